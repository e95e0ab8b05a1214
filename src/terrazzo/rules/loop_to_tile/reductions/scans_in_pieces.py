"""A scan in pieces over the grid: what each piece comes to, what all before a piece come to, and each piece from there.

A block takes the steps of a row together (`scans.py`), so rows that are few and long leave most processors idle.
"""

from __future__ import annotations

import math
from itertools import count
from typing import Any

from terrazzo.hw.gpu import Gpu
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Var
from terrazzo.ir.node import Node, substitute, topological, transform
from terrazzo.ir.schedule import Like, Schedule
from terrazzo.ir.types import Type
from terrazzo.rules.loop_to_tile.reductions.split import axis_of_pieces
from terrazzo.rules.loop_to_tile.walked.threads import size_of

LONG = 512
"""Steps of a piece, at least: with less, three launches are what takes time."""


def pieces(kernel: l.Kernel, whole: Schedule, gpu: Gpu) -> int:
    """In how many pieces a kernel's scans fill a GPU, and not more than their length allows; 1 where they do anyway, by
    the schedule that they have as a whole.
    """
    factors = [f for _, binding in whole.axes if not isinstance(binding, Like) for f in binding]
    blocks = math.prod(f.size for f in factors if f.level == "grid")
    axis = kernel.axes[-1]
    most = min(-(-2 * gpu.processors // blocks), size_of(axis) // LONG)
    return next((p for p in range(most, 1, -1) if size_of(axis) % p == 0), 1)


def scanned_in_pieces(kernel: l.Kernel, number: int) -> tuple[l.Kernel, ...]:
    """`kernel`, whose scans go along its last axis, as three, in so many pieces of that axis, where these are equal and
    nothing is scanned but sums of single values.

    @loop
    def f(x: f32[3, 8]):
        with kernel('z', z=f32[3, 8]):
            for a0 in free(3):
                for a1 in scan(8):
                    in0 = x[a0, a1]
                    acc0 <- sum(in0)
                    v0 = exp(acc0)
                    z[a0, a1] = v0
        return (z,)
    =>
    @loop
    def f(x: f32[3, 8]):
        with kernel('z_piece', z_piece=f32[3, 2]):
            for a0 in free(3):
                for s in free(2):
                    for r0 in reduce(4):
                        in0 = x[a0, r0 + s * 4]
                        acc0 <- sum(in0)
                    z_piece[a0, s] = acc0
        with kernel('z_before', z_before=f32[3, 2]):
            for a0 in free(3):
                for s in scan(2):
                    in0 = z_piece[a0, s]
                    acc0 <- sum(in0)
                    z_before[a0, s] = acc0
        with kernel('z', z=f32[3, 8]):
            for a0 in free(3):
                for s in free(2):
                    in0 = z_before[a0, s - 1] if s == 1 else 0
                    for a1 in scan(4):
                        in1 = x[a0, a1 + s * 4]
                        acc0 <- sum(in1)
                        v0 = add(in0, acc0)
                        v1 = exp(v0)
                        z[a0, a1 + s * 4] = v1
        return (z,)
    """
    *rows, axis = kernel.axes or (None,)
    found = [x for x in kernel.carried if isinstance(x, l.Scan) and _plain(x, axis) and x.free >= {*rows}]
    if not found or len(found) < len(kernel.carried) or number < 2 or size_of(axis) % number:
        return (kernel,)
    assert isinstance(axis, Var)
    part = axis_of_pieces(kernel, number)
    short = Var(axis.name, size_of(axis) // number)
    place = part * short.extent + short
    taken = {b.name for b in (*kernel.reads, *kernel.writes)}
    names = (f"{kernel.name}_{what}" for what in ("piece", "before"))
    whole, before = (next(x for x in (f"{n}{'_' * m}" for m in count()) if x not in taken) for n in names)
    stores: tuple[list[l.Store], list[l.Store]] = [], []
    memo: dict[Node, Node] = {}
    shape = (*(a.extent for a in rows), number)
    for k, x in enumerate(found):
        each, sums = (l.Buffer(f"{n}{k or ''}", Type(x.dtype, shape)) for n in (whole, before))
        (step,) = (substitute(s, {axis: place}) for s in x.step)
        stores[0].append(l.Store(each, (*rows, part), l.Reduce.make(x.monoid, (short,), (step,))))
        to = Var(l.fresh_name(), number)
        inner = l.Scan.make(x.monoid, to, (l.Load(each, (*rows, to)),), part)
        stores[1].append(l.Store(sums, (*rows, part), inner))
        here = Var(l.fresh_name(), short.extent)
        mine = l.Scan.make(x.monoid, here, (substitute(step, {short: here}),), short)
        earlier = l.Load.make(sums, (*rows, part - 1), (part - 1,))
        (memo[x],) = x.monoid.combine(l.apply, (earlier,), (mine,))
    last = tuple(substitute(transform(s, lambda x: x, dict(memo)), {axis: place}) for s in kernel.stores)
    return (
        l.Kernel(whole, (*rows, part), tuple(stores[0]), kernel.source),
        l.Kernel(before, (*rows, part), tuple(stores[1]), kernel.source),
        l.Kernel(kernel.name, (*rows, part, short), last, kernel.source),
    )


def _plain(x: l.Scan, axis: Any) -> bool:
    """Whether a scan along an axis adds up single values, in which nothing is reduced or scanned."""
    return (
        x.at is axis
        and x.monoid.name == "sum"
        and not any(isinstance(y, l.Reduce | l.Scan) for y in topological(x.args))
    )
