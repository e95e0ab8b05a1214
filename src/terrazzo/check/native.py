"""Running single kernels as they are deployed: as machine code, on the machine they were compiled for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from terrazzo.interp.torch import from_numpy, to_numpy
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.plan import Plan
from terrazzo.ir.schedule import Schedule
from terrazzo.options import Options

Bound = tuple[Schedule, Plan | None]
"""A schedule, and the plan that completes it where that is known."""
Native = Callable[[l.Kernel, Bound | None, Mapping[l.Buffer, Any]], dict[l.Buffer, Any]]
"""What a kernel with its schedule writes, given the values of what it reads."""


def native(options: Options) -> Native | None:
    """How kernels for `options.target` run on this machine, or None where they cannot: there is no such GPU, or no
    compiler.
    """
    from terrazzo.run.cache import Cache
    from terrazzo.run.compiled import compile_program
    from terrazzo.run.compiler import find_compiler
    from terrazzo.run.cuda import architecture, devices
    from terrazzo.run.tensors import Expected, slot_of
    from terrazzo.targets import target

    device = "cuda:0" if target(options.target).gpu else "cpu"
    if device == "cpu":
        if (
            options.target != "cpu"
            or find_compiler(options.compiler, Cache(options.cache_dir, options.cache_limit)) is None
        ):
            return None
    elif not devices() or architecture() != options.target:
        return None
    quiet = replace(options, fuse=False, materialize=(), frozen=(), schedules=(), graph=False, verbose=0, dump=None)

    def run(kernel: l.Kernel, bound: Bound | None, memory: Mapping[l.Buffer, Any]) -> dict[l.Buffer, Any]:
        inputs = tuple(b for b in kernel.reads if b not in kernel.writes)
        written = tuple(dict.fromkeys(kernel.writes))
        alone = l.Program(kernel.name, inputs, (kernel,), written)
        schedule, plan = bound or (None, None)
        tiled = tile.Program(alone, ((0, schedule),), ((0, plan),) if plan else ()) if schedule else alone
        compiled = compile_program(tiled, {}, quiet, device)
        found = compiled([Expected(slot_of(b), device).holding(from_numpy(memory[b])) for b in inputs])
        return {b: to_numpy(x) for b, x in zip(written, found, strict=True)}

    return run
