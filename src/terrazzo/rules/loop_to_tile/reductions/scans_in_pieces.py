"""A scan in pieces over the grid: what each piece comes to, what all before a piece come to, and each piece from there.

A block takes the steps of a row together (`scans.py`), so rows that are few and long leave most processors idle. Sums
in equal pieces are read twice and stored once. Other scans, of any length, are stored piece by piece first, and then
once more with what comes before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from terrazzo.hw.gpu import Gpu
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Var
from terrazzo.ir.node import Node, substitute, topological, transform
from terrazzo.ir.schedule import Like, Schedule
from terrazzo.ir.types import Type
from terrazzo.rules.loop.definitions import unused
from terrazzo.rules.loop.fusion.inline import select
from terrazzo.rules.loop_to_tile.reductions.scans import column_of, shared
from terrazzo.rules.loop_to_tile.reductions.split import axis_of_pieces, moved
from terrazzo.rules.loop_to_tile.walked.threads import size_of

LONG = 512
"""Steps of a piece, at least: with less, three launches are what takes time."""


def ways(kernel: l.Kernel, gpu: Gpu) -> dict[str, tuple[l.Kernel, ...]]:
    """How a kernel's scans may be in pieces that fill a GPU, by the names of the rewrites; none where they are short,
    or fill it anyway.
    """
    if not kernel.scans or (sharing := shared(kernel, gpu)) is None:
        return {}
    _, whole, _ = sharing
    equal, most = pieces(kernel, whole, gpu), most_pieces(kernel, whole, gpu)
    found = {"scanned_in_pieces": scanned_in_pieces(kernel, equal)}
    if equal < most:
        found["scanned_piece_by_piece"] = scanned_piece_by_piece(kernel, most)
    return {name: parts for name, parts in found.items() if len(parts) > 1}


def pieces(kernel: l.Kernel, whole: Schedule, gpu: Gpu) -> int:
    """In how many pieces a kernel's scans fill a GPU, and not more than their length allows; 1 where they do anyway, by
    the schedule that they have as a whole.
    """
    length = size_of(kernel.axes[-1])
    return next((p for p in range(most_pieces(kernel, whole, gpu), 1, -1) if length % p == 0), 1)


def most_pieces(kernel: l.Kernel, whole: Schedule, gpu: Gpu) -> int:
    """The same where pieces need not be equal."""
    factors = [f for _, binding in whole.axes if not isinstance(binding, Like) for f in binding]
    blocks = math.prod(f.size for f in factors if f.level == "grid")
    return min(-(-2 * gpu.processors // blocks), size_of(kernel.axes[-1]) // LONG)


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
    whole, before = (unused(f"{kernel.name}_{what}", taken) for what in ("piece", "before"))
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


def scanned_piece_by_piece(kernel: l.Kernel, number: int) -> tuple[l.Kernel, ...]:
    """`kernel`, whose scans go along its last axis, as three, in so many pieces of that axis, of which the last may be
    short.

    @loop
    def f(x: f32[3, 7]):
        with kernel('z', z=f32[3, 7]):
            for a0 in free(3):
                for a1 in scan(7):
                    in0 = x[a0, a1]
                    acc0 <- sum(in0)
                    v0 = exp(acc0)
                    z[a0, a1] = v0
        return (z,)
    =>
    @loop
    def f(x: f32[3, 7]):
        with kernel('z_piece', z_piece=f32[3, 2, 4]):
            for a0 in free(3):
                for s in free(2):
                    for a1 in scan(4):
                        in0 = x[a0, a1 + s * 4] if a1 + s * 4 < 7 else 0
                        acc0 <- sum(in0)
                        z_piece[a0, s, a1] = acc0
        with kernel('z_before', z_before=f32[3, 2]):
            for a0 in free(3):
                for s in scan(2):
                    in0 = z_piece[a0, s, 3]
                    acc0 <- sum(in0)
                    z_before[a0, s] = acc0
        with kernel('z', z=f32[3, 7]):
            for a0 in free(3):
                for a1 in free(7):
                    in0 = z_before[a0, (a1 // 4) - 1] if a1 // 4 == 1 else 0
                    in1 = z_piece[a0, a1 // 4, a1 % 4]
                    v0 = add(in0, in1)
                    v1 = exp(v0)
                    z[a0, a1] = v1
        return (z,)
    """
    *rows, axis = kernel.axes or (None,)
    found = [x for x in kernel.carried if isinstance(x, l.Scan) and _single(x, axis) and x.free >= {*rows}]
    if not found or len(found) < len(kernel.carried) or number < 2:
        return (kernel,)
    assert isinstance(axis, Var)
    length = -(-size_of(axis) // number)
    short, number = Var(axis.name, length), -(-size_of(axis) // length)
    part, piece = axis_of_pieces(kernel, number), axis // length
    within = column_of(kernel, axis) is None  # memory runs along the scan

    def place(piece: Any, step: Any) -> tuple[Any, ...]:
        return (*rows, piece, step) if within else (piece, step, *rows)

    taken = {b.name for b in (*kernel.reads, *kernel.writes)}
    names = [unused(f"{kernel.name}_{what}", taken) for what in ("piece", "before")]
    shapes = [a.extent for a in place(part, short)], [a.extent for a in (*rows, part)]
    stores: tuple[list[l.Store], list[l.Store]] = [], []
    memo: dict[Node, Node] = {}
    for x in found:
        first = len(stores[0])
        each, sums = (
            [l.Buffer(f"{name}{first + k or ''}", Type(v.dtype, tuple(shape))) for k, v in enumerate(_values(x))]
            for name, shape in zip(names, shapes, strict=True)
        )
        (step,), args = l.open_binder(x)
        here, to = Var(l.fresh_name(), length), Var(l.fresh_name(), number)
        mine = l.Scan.make(x.monoid, here, moved(x, args, step, part * length + here), short)
        ends = l.Scan.make(x.monoid, to, tuple(l.Load(b, place(to, length - 1)) for b in each), part)
        stores[0].extend(l.Store(b, place(part, short), v) for b, v in zip(each, _values(mine), strict=True))
        stores[1].extend(l.Store(b, (*rows, part), v) for b, v in zip(sums, _values(ends), strict=True))
        identity = x.monoid.identity([b.type.dtype for b in each])
        earlier = [_from_second(b, (*rows, piece - 1), y) for b, y in zip(sums, identity, strict=True)]
        own = [l.Load(b, place(piece, axis % length)) for b in each]
        memo |= dict(zip(_values(x), x.monoid.combine(l.apply, earlier, own), strict=True))
    last = tuple(transform(s, lambda y: y, dict(memo)) for s in kernel.stores)
    return (
        l.Kernel(names[0], (*rows, part, short), tuple(stores[0]), kernel.source),
        l.Kernel(names[1], (*rows, part), tuple(stores[1]), kernel.source),
        l.Kernel(kernel.name, kernel.axes, last, kernel.source),
    )


def _values(x: l.Scan) -> tuple[Any, ...]:
    """The values of a scan, each a term."""
    return (x,) if x.monoid.width == 1 else tuple(l.Get(x, k) for k in range(x.monoid.width))


def _from_second(sums: l.Buffer, place: Sequence[IntExpr], identity: Any) -> Any:
    """What comes before a piece, at its number less one; and in the first piece what changes nothing."""
    load = l.Load.make(sums, tuple(place), (place[-1],))
    return select((place[-1],), load, identity) if identity else load


def _single(x: l.Scan, axis: Any) -> bool:
    """Whether a scan goes along an axis, and nothing in it is reduced or scanned."""
    return x.at is axis and not any(isinstance(y, l.Reduce | l.Scan) for y in topological(x.args))


def _plain(x: l.Scan, axis: Any) -> bool:
    """Whether that adds up single values."""
    return x.monoid.name == "sum" and _single(x, axis)
