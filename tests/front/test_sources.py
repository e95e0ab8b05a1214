"""Steps know which line of the user's program they come from, also where it is captured twice."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from terrazzo.front import capture  # noqa: E402


class Twice(torch.nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        y = torch.relu(x)
        return torch.exp(y)


def test_a_program_that_is_captured_twice_keeps_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 4)
    once = capture.capture(Twice(), (x,), {}).program.sources
    first = Twice.forward.__code__.co_firstlineno
    assert once == {"relu": f"test_sources.py:{first + 1}", "exp": f"test_sources.py:{first + 2}"}
    asked: list[Any] = []

    def mutates(node: Any) -> bool:
        """As if the first graph worked in place on a value of its own."""
        asked.append(node)
        return len(asked) == 1

    monkeypatch.setattr(capture, "_mutates", mutates)
    assert capture.capture(Twice(), (x,), {}).program.sources == once
    assert asked
