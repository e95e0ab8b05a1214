"""Every pipeline, in order, on one screen. The verifier runs after each pass, always."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.program import Program
from terrazzo.ir.show import show
from terrazzo.ir.verify import verify
from terrazzo.options import Options
from terrazzo.rewrite.rule import Log
from terrazzo.rules import torch_to_tensor
from terrazzo.rules.loop.fuse import fuse
from terrazzo.rules.loop.layout import store_as_read
from terrazzo.rules.tensor_to_loop.lift import lift
from terrazzo.rules.torch_to_tensor.lower import lower as to_tensor
from terrazzo.targets import target

Run = Callable[[Any, Log, Options], Any]


def _texts(options: Options) -> Callable[[Any], str] | None:
    return show if options.verbose > 1 else None


@dataclass(frozen=True)
class Pass:
    """One step: what it is called, the IR it takes and gives, one line of why, and how it runs."""

    name: str
    src: str
    dst: str
    why: str
    run: Run


PASSES = (
    Pass("torch_to_tensor", "torch", "tensor", "each ATen op becomes a composition of primitives, or an opaque call",
         lambda p, log, o: to_tensor(p, torch_to_tensor.RULES, log, _texts(o))),
    Pass("tensor_to_loop", "tensor", "loop", "each primitive becomes a kernel that stores its term",
         lambda p, log, o: lift(p)),
    Pass("fuse", "loop", "loop", "terms replace the buffers they were stored in, where that pays",
         lambda p, log, o: fuse(p, log, target(o.target).rates, o.materialize, _texts(o)) if o.fuse else p),
    Pass("store_as_read", "loop", "loop", "buffers that are only read transposed or reshaped are stored so",
         lambda p, log, o: store_as_read(p, log)),
)  # fmt: skip

LOWER = tuple(p.name for p in PASSES)

for _a, _b in pairwise(PASSES):
    assert _a.dst == _b.src, f"pass {_b.name} takes {_b.src} but follows one that gives {_a.dst}"


def dialect(program: Program | l.Program) -> str:
    """Which IR a program is in."""
    return "loop" if isinstance(program, l.Program) else program.dialect


def stages(program: Any, options: Options, log: Log, names: tuple[str, ...] = LOWER) -> list[tuple[Pass, Any, float]]:
    """Run the passes `names` that apply from the program's IR on; each with its result and the seconds it took."""
    verify(program, "reading")
    out: list[tuple[Pass, Any, float]] = []
    for p in PASSES:
        if p.name in names and p.src == dialect(program):
            start = time.perf_counter()
            program = p.run(program, log, options)
            verify(program, p.name)
            out.append((p, program, time.perf_counter() - start))
    return out


@dataclass(frozen=True)
class Lowering:
    """A program on its way down: what it was, every pass with its result and seconds, and what happened."""

    source: Program | l.Program
    stages: list[tuple[Pass, Any, float]]
    log: Log

    @property
    def loop(self) -> l.Program:
        """The last stage."""
        last = self.stages[-1][1] if self.stages else self.source
        assert isinstance(last, l.Program)
        return last

    def lifted(self) -> l.Program | None:
        """Loop IR before fusion; None where the input was Loop IR."""
        return next((program for p, program, _ in self.stages if p.name == "tensor_to_loop"), None)

    @property
    def seconds(self) -> dict[str, float]:
        """What each pass took."""
        return {p.name: seconds for p, _, seconds in self.stages}


def lowering(program: Any, options: Options) -> Lowering:
    """Any program down to fused Loop IR, with all that is between."""
    log = Log()
    return Lowering(program, stages(program, options, log), log)


def lower(program: Any, options: Options, log: Log) -> l.Program:
    """Any program down to fused Loop IR."""
    done = stages(program, options, log)
    lowered: l.Program = done[-1][1] if done else program
    return lowered
