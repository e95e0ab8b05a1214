"""A schedule for every kernel of a program, by a first analytic model. What a user pinned comes first."""

from __future__ import annotations

import math
from collections.abc import Mapping

from terrazzo.hw.gpu import Gpu
from terrazzo.ir import nest as n
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.schedule import Schedule
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop_to_tile import products, threads
from terrazzo.rules.loop_to_tile.collapse import collapse, flat_reductions
from terrazzo.rules.loop_to_tile.split import split

PASS = "schedule"


def schedule(program: l.Program, gpu: Gpu, log: Log, pinned: Mapping[str, Schedule] | None = None) -> tile.Program:
    """Every kernel with a schedule. Kernels may be collapsed to one axis or split over the grid first; both mean the same."""
    steps: list[l.Kernel | l.Call] = []
    schedules: list[tuple[int, Schedule]] = []
    for step in program.steps:
        if not isinstance(step, l.Kernel):
            steps.append(step)
            continue
        for kernel, chosen in choose(step, gpu, log, pinned or {}):
            schedules.append((len(steps), chosen))
            steps.append(kernel)
    return tile.Program(l.Program(program.name, program.inputs, tuple(steps), program.results), tuple(schedules))


def choose(kernel: l.Kernel, gpu: Gpu, log: Log, pinned: Mapping[str, Schedule]) -> list[tuple[l.Kernel, Schedule]]:
    """The kernels (one, or two after a split) that take the place of this one, with their schedules."""
    if kernel.name in pinned:
        log.add(Event(PASS, "pin", kernel.name, True, "by the user"))
        return [(kernel, pinned[kernel.name])]
    if (p := products.product(kernel)) is not None:
        best = products.plans(p, gpu)[0]
        reason = f"{best.instruction or 'CUDA cores'}, {best.tile.m} x {best.tile.n} x {best.tile.k}, {best.pieces} piece(s): {best.time / 1000:.1f} us"
        log.add(Event(PASS, "tile", kernel.name, True, reason))
        if best.pieces > 1:
            return _split(kernel, [c.reduce for c in p.sites], best.pieces, gpu, log)
        return [(kernel, products.schedule(p, best, gpu))]
    kernel = flat_reductions(kernel)
    reduces = [r for r in n.accumulators(kernel).values() if isinstance(r, l.Reduce)]
    if not reduces or not any(isinstance(a.extent, int) and a.extent > 1 for r in reduces for a in r.axes):
        flat = collapse(kernel)
        return [(flat, threads.pointwise(flat, gpu))]
    if (pieces := _pieces(kernel, reduces, gpu)) > 1:
        return _split(kernel, reduces, pieces, gpu, log)
    return [(kernel, threads.reduction(kernel, gpu))]


def _split(kernel: l.Kernel, reduces: list[l.Reduce], pieces: int, gpu: Gpu, log: Log) -> list[tuple[l.Kernel, Schedule]]:
    log.add(Event(PASS, "split", kernel.name, True, f"{pieces} pieces over the grid"))
    first, second = split(kernel, reduces, pieces)
    if (p := products.product(first)) is not None:
        best = min((x for x in products.plans(p, gpu) if x.pieces == 1), key=lambda x: x.time)
        done = [(first, products.schedule(p, best, gpu))]
    else:
        done = [(first, threads.reduction(first, gpu))]
    second = collapse(second) if all(s.free >= frozenset(second.axes) for s in second.stores) else second
    return [*done, (second, threads.finish(second, gpu))]


def _pieces(kernel: l.Kernel, reduces: list[l.Reduce], gpu: Gpu) -> int:
    """Into how many pieces long reductions are cut where there are too few rows: all alike, over the same axes, in no other one."""
    first = reduces[0]
    rows = math.prod(a.extent for a in kernel.axes if a in first.free)  # type: ignore[misc]
    length = math.prod(a.extent for a in first.axes)
    if any(r.axes != first.axes or not r.free <= frozenset(kernel.axes) or _nested(r) for r in reduces):
        return 1
    if rows >= gpu.processors // 2 or length < 16384:
        return 1
    last = first.axes[-1].extent
    wanted = min(gpu.processors * 2 // max(rows, 1), length // 4096)
    return max((s for s in range(1, wanted + 1) if last % s == 0), default=1)


def _nested(r: l.Reduce) -> bool:
    from terrazzo.ir.node import topological

    return any(isinstance(x, l.Reduce | l.Scan) for x in topological(r.args))
