"""A schedule for every kernel of a program, by a first analytic model. What a user pinned comes first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from terrazzo.errors import Limitation, UserError
from terrazzo.hw.gpu import Gpu
from terrazzo.ir import nest as n
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.schedule import Schedule
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop_to_tile import products, threads
from terrazzo.rules.loop_to_tile.collapse import collapse, flat_reductions, merge_product_axes
from terrazzo.rules.loop_to_tile.split import split
from terrazzo.rules.tile_to_kernel.lower import lower

PASS = "schedule"


Show = Callable[[Any], str] | None


def schedule(
    program: l.Program, gpu: Gpu, log: Log, pinned: Mapping[str, Schedule] | None = None, show: Show = None
) -> tile.Program:
    """Every kernel with a schedule. Kernels may be collapsed to one axis or split over the grid first; both mean the
    same.
    """
    steps: list[l.Kernel | l.Call] = []
    schedules: list[tuple[int, Schedule]] = []
    for step in program.steps:
        if not isinstance(step, l.Kernel):
            steps.append(step)
            continue
        for kernel, chosen, rule, reason in _choose(step, gpu, pinned or {}, log):
            texts = ("\n".join(map(show, [step])), f"{show(kernel)}\n{chosen}") if show else ("", "")
            log.add(Event(PASS, rule, kernel.name, True, reason, *texts))
            schedules.append((len(steps), chosen))
            steps.append(kernel)
    if strange := set(pinned or {}) - {k.name for k in steps if isinstance(k, l.Kernel)}:
        names = ", ".join(k.name for k in steps if isinstance(k, l.Kernel))
        raise UserError(f"there is no kernel {min(strange)} to pin a schedule to; there are {names}")
    return tile.Program(l.Program(program.name, program.inputs, tuple(steps), program.results), tuple(schedules))


Chosen = tuple[l.Kernel, Schedule, str, str]
"""A kernel with its schedule, the rule that made it, and why."""


def _choose(kernel: l.Kernel, gpu: Gpu, pinned: Mapping[str, Schedule], log: Log) -> list[Chosen]:
    """The kernels (one, or two after a split) that take the place of this one."""

    def became(rule: str, old: l.Kernel, *new: l.Kernel) -> l.Kernel:
        log.applied(PASS, rule, old.name, [old], new)
        return new[0]

    if kernel.name in pinned:
        done = _pinned(_forms(kernel), pinned, gpu)
        became("pin", kernel, done[0])
        return [done]
    if (p := products.product(kernel)) is not None:
        kernel = became("merge_product_axes", kernel, merge_product_axes(kernel, p.sites))
        p = products.product(kernel)
        assert p is not None
        best = products.plans(p, gpu)[0]
        if best.pieces > 1:
            return _split(kernel, [c.reduce for c in p.sites], best.pieces, gpu, pinned, became, best.tile.k)
        return [_tiled(p, best, gpu)]
    kernel = became("flat_reductions", kernel, flat_reductions(kernel))
    reduces = [r for r in n.accumulators(kernel).values() if isinstance(r, l.Reduce)]
    if not reduces or not any(isinstance(a.extent, int) and a.extent > 1 for r in reduces for a in r.axes):
        flat = became("collapse", kernel, collapse(kernel))
        return [(flat, threads.pointwise(flat, gpu), "points", "every thread computes points of its own")]
    if (pieces := _pieces(kernel, reduces, gpu)) > 1:
        return _split(kernel, reduces, pieces, gpu, pinned, became)
    return [_shared(kernel, gpu)]


def _tiled(p: products.Product, plan: products.Plan, gpu: Gpu) -> Chosen:
    t = plan.tile
    what = f"{t.m} x {t.n} x {t.k} on {plan.instruction or 'CUDA cores'}: {plan.time / 1000:.1f} us by the model"
    return p.kernel, products.schedule(p, plan, gpu), "tile", what


def _shared(kernel: l.Kernel, gpu: Gpu) -> Chosen:
    together = threads.reduction(kernel, gpu)
    try:
        lower(kernel, together, gpu)
    except (UserError, Limitation) as why:
        return kernel, threads.pointwise(kernel, gpu), "alone", f"every thread reduces by itself: {why}"
    return kernel, together, "share", "threads share the reductions of a row, or take columns where memory runs so"


def _forms(kernel: l.Kernel) -> list[l.Kernel]:
    """A kernel as it is, and as it is when a schedule is chosen for it."""
    p = products.product(kernel)
    return [kernel, *([merge_product_axes(kernel, p.sites)] if p else []), flat_reductions(kernel), collapse(kernel)]


def _pinned(forms: Sequence[l.Kernel], pinned: Mapping[str, Schedule], gpu: Gpu) -> Chosen:
    """The first form of a kernel that its pinned schedule fits; UserError where there is none."""
    chosen = pinned[forms[0].name]
    if chosen.target != gpu.arch:
        raise UserError(f"the schedule of {chosen.kernel} is one for {chosen.target}, and the target is {gpu.arch}")
    why = []
    for kernel in forms:
        try:
            tile.fit(chosen, kernel)
        except UserError as e:
            why.append(str(e))
            continue
        return kernel, chosen, "pin", "by the user"
    raise UserError(f"the schedule of {chosen.kernel} does not fit it: {why[0]}")


def _split(
    kernel: l.Kernel,
    reduces: list[l.Reduce],
    pieces: int,
    gpu: Gpu,
    pinned: Mapping[str, Schedule],
    became: Callable[..., l.Kernel],
    unit: int = 1,
) -> list[Chosen]:
    """A kernel of partial states and one that combines them and does the rest, in that order."""
    first, second = split(kernel, reduces, pieces, unit)
    became("split", kernel, first, second)
    if first.name in pinned:
        done = _pinned([first], pinned, gpu)
    elif (p := products.product(first)) is not None:
        done = _tiled(p, min((x for x in products.plans(p, gpu) if x.pieces == 1), key=lambda x: x.time), gpu)
    else:
        done = _shared(first, gpu)
    if all(s.free >= frozenset(second.axes) for s in second.stores):
        second = became("collapse", second, collapse(second))
    why = f"{pieces} pieces of a reduction over the grid, since there are few blocks otherwise"
    return [
        (done[0], done[1], "split", f"{why}; {done[3]}"),
        (second, threads.finish(second, gpu), "finish", "partial states meet, in order"),
    ]


def _pieces(kernel: l.Kernel, reduces: list[l.Reduce], gpu: Gpu) -> int:
    """Into how many pieces long reductions are cut where there are too few rows: all alike, over the same axes, in no
    other one.
    """
    first = reduces[0]
    rows = math.prod(a.extent for a in kernel.axes if a in first.free and isinstance(a.extent, int))
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
