"""What all tests share."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

# What is drawn is the same in every run and on every machine: new programs are drawn by `make fuzz`, or here with
# --hypothesis-profile=default.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many rules say `sorry`: they are exempt from the harness of tests/rules, and there should be none."""
    from terrazzo.rules import tensor_to_loop, torch_to_tensor
    from terrazzo.rules.torch_to_tensor.lower import opaque

    rules = (*torch_to_tensor.RULES, opaque, *tensor_to_loop.RULES)
    sorry = [f"{r.name} ({r.sorry})" for r in rules if r.sorry]
    terminalreporter.write_line(
        f"rules exempt from the harness: {len(sorry)} of {len(rules)}{': ' if sorry else ''}{', '.join(sorry)}"
    )
