"""A reduction split over the grid: one kernel for partial states, and one that combines them in order and does all the
rest.

For every monoid: split-K, split reductions, split-KV are this one rewrite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from terrazzo.errors import UserError, about
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Var, at_least
from terrazzo.ir.nest import accumulators
from terrazzo.ir.node import Node, substitute, topological, transform
from terrazzo.ir.schedule import Like, Schedule
from terrazzo.ir.types import Type
from terrazzo.rules.loop.inline import guarded, rewrite_loads


def split(kernel: l.Kernel, reduces: Sequence[l.Reduce], pieces: int, unit: int = 1) -> tuple[l.Kernel, l.Kernel]:
    """`kernel` as two, its `reduces` (over axes of the same extents) in so many pieces of the last axis, multiples of
    `unit`.

    Where these are more than the axis has, the last piece is short: loads beyond the end are 0, which must add nothing.

    @loop
    def f(x: f32[3, 4]):
        with kernel('z', z=f32[3]):
            for a0 in free(3):
                for r0 in reduce(4):
                    in0 = x[a0, r0]
                    v0 = exp(in0)
                    acc0 <- sum(v0)
                v1 = log(acc0)
                z[a0] = v1
        return (z,)
    =>
    @loop
    def f(x: f32[3, 4]):
        with kernel('z_part', z_part=f32[2, 3]):
            for s in free(2):
                for a0 in free(3):
                    for r0 in reduce(2):
                        in0 = x[a0, r0 + s * 2]
                        v0 = exp(in0)
                        acc0 <- sum(v0)
                    z_part[s, a0] = acc0
        with kernel('z', z=f32[3]):
            for a0 in free(3):
                for r0 in reduce(2):
                    in0 = z_part[r0, a0]
                    acc0 <- sum(in0)
                v0 = log(acc0)
                z[a0] = v0
        return (z,)
    """
    axes = tuple(a for a in kernel.axes if any(a in r.free for r in reduces))
    part = Var("s", pieces)
    stores: list[l.Store] = []
    whole: dict[Node, Node] = {}
    for number, r in enumerate(reduces):
        inner, args = l.open_binder(r)
        last = inner[-1]
        step = -(-last.extent // (pieces * unit)) * unit
        short = Var(l.fresh_name(), step)
        fresh = (*inner[:-1], short)
        body = tuple(_moved(a, last, part * step + short) for a in args)
        partial = l.Reduce.make(r.monoid, fresh, body)
        types = r.dtype if r.monoid.width > 1 else (r.dtype,)
        own = tuple(a for a in axes if a in r.free)
        loads = []
        for p, dtype in enumerate(types):
            name = f"{kernel.name}_part{number or ''}{f'_{p}' if len(types) > 1 else ''}"
            buffer = l.Buffer(name, Type(dtype, (pieces, *(a.extent for a in own))))
            stores.append(l.Store(buffer, (part, *own), l.Get(partial, p) if len(types) > 1 else partial))
            s = Var(l.fresh_name(), pieces)
            loads.append((s, l.Load(buffer, (s, *own))))
        one = loads[0][0]
        again = [substitute(x, {s: one}) for s, x in loads]
        whole[r] = l.Reduce.make(r.monoid, (one,), tuple(again))
    first = l.Kernel(f"{kernel.name}_part", (part, *axes), tuple(stores), kernel.source)
    second = l.Kernel(
        kernel.name, kernel.axes, tuple(transform(s, lambda x: x, dict(whole)) for s in kernel.stores), kernel.source
    )
    return first, second


def pinned_split(kernel: l.Kernel, schedule: Schedule) -> tuple[l.Kernel, Schedule, l.Kernel] | None:
    """A kernel as two, where its schedule binds an axis that is reduced to the grid: the one for partial states, with
    the rest of the schedule, and the one that combines them. None where it binds none.

    UserError where the schedule splits other than the last axis of reductions that are over the same ones.
    """
    lines = {a: b for a, b in schedule.axes if not isinstance(b, Like)}
    reduces = [r for r in accumulators(kernel).values() if isinstance(r, l.Reduce)]
    over = {f"r{a.label}": r for r in reduces for a in r.axes}
    cut = [a for a, b in lines.items() if a in over and any(f.level == "grid" and f.size > 1 for f in b)]
    if not cut:
        return None
    last = {f"r{r.axes[-1].label}" for r in reduces}
    if len(cut) > 1 or last != set(cut) or any(isinstance(x, l.Reduce) for r in reduces for x in topological(r.args)):
        with about(*schedule.part("", cut[0])):
            raise UserError(
                f"the schedule of {kernel.name}: blocks share {', '.join(cut)}, and can share the last axis that all "
                f"of its reductions are over, which is {' and '.join(sorted(last))}"
            )
    (axis,) = cut
    grid, *rest = lines[axis]
    first, second = split(kernel, reduces, grid.size, math.prod(f.size for f in rest))
    part = first.axes[0].name
    names = {s.buffer.name: p.buffer.name for s, p in zip(kernel.stores, first.stores, strict=False)}
    sites = tuple(replace(s, names=tuple(names.get(x, x) for x in s.names)) for s in schedule.sites)
    axes = tuple((a, tuple(rest) if a == axis else b) for a, b in schedule.axes)
    bound = replace(
        schedule, kernel=first.name, axes=((part, (grid,)), *(x for x in axes if x[1])), sites=sites, origin=schedule
    )
    return first, bound, second


def _moved(term: Node, axis: Var, to: IntExpr) -> Any:
    """A term at another place of an axis; what it loads beyond the axis' end is 0."""
    moved, inside = substitute(term, {axis: to}), (axis.extent - 1 - to,)
    return moved if at_least(*inside, 0) else rewrite_loads(moved, lambda load: guarded(load, inside))
