"""Ctrl-C while a program is compiled leaves the process as it was, and what was built is in the cache."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

torch = pytest.importorskip("torch")

import terrazzo  # noqa: E402
from terrazzo import pipelines, progress  # noqa: E402
from terrazzo.run import compiled, compiler, cpu  # noqa: E402

PHASES = [p.name for p in pipelines.PASSES if p.name not in pipelines.GPU_ONLY]


def interrupted(*args: Any, **kwargs: Any) -> NoReturn:
    raise KeyboardInterrupt


def fn(x: Any) -> Any:
    return torch.softmax(x, -1).sum(0) + 3.0


@pytest.mark.parametrize("phase", [*PHASES, "compile", "plan", "load"])
def test_ctrl_c_in_a_phase_leaves_all_as_it_was(phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, options = torch.randn(5, 7), {"cache_dir": tmp_path / "cache"}
    with monkeypatch.context() as patch:
        if phase in PHASES:
            passes = tuple(replace(p, run=interrupted) if p.name == phase else p for p in pipelines.PASSES)
            patch.setattr(pipelines, "PASSES", passes)
        else:
            where, name = {"compile": (cpu, "compile_all"), "plan": (compiled, "make"), "load": (cpu.Cpu, "load")}[
                phase
            ]
            patch.setattr(where, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            terrazzo.compile(fn, x, options=options)
    assert gc.isenabled() and progress._bar is None
    built: list[Any] = []
    build_all = compiler._build_all
    monkeypatch.setattr(compiler, "_build_all", lambda c, sources: (built.extend(sources), build_all(c, sources))[1])
    torch.testing.assert_close(terrazzo.compile(fn, x, options=options)(x), fn(x))
    assert bool(built) == (phase not in ("plan", "load"))  # these come after what was built is kept
