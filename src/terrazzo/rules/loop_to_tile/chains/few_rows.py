"""Chains of two products with few rows and many steps, as in decoding: rows that share their steps' operands stand
together, and blocks share the steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from terrazzo.errors import UserError, about
from terrazzo.ir.address import unflatten
from terrazzo.ir.contraction import nested_contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import FloorDiv, Var, at_least
from terrazzo.ir.nest import accumulators
from terrazzo.ir.node import Node, substitute, substituted, topological
from terrazzo.ir.schedule import Like, Schedule
from terrazzo.ir.types import Type
from terrazzo.rules.loop.fusion.inline import guarded, rewrite_loads, select
from terrazzo.rules.loop_to_tile.chains.chain import chain, nested
from terrazzo.rules.loop_to_tile.reductions.rows import in_line
from terrazzo.rules.loop_to_tile.reductions.split import axis_of_pieces
from terrazzo.rules.tile.draft import axis_name
from terrazzo.rules.tile.frames import Framed, at, reductions, weight

MOST = 64
"""Rows of a block that are worth putting together."""


def share_rows(kernel: l.Kernel) -> l.Kernel:
    """`kernel` with an axis as two, where some factor of a product knows its quotient only: heads of a group, which
    have keys in common, become rows of their own. Where nothing is a row, there is one more axis, of one row.

    @loop
    def f(q: f32[6, 4], k: f32[2, 5, 4], v: f32[2, 5, 3]):
        with kernel('z', z=f32[6, 3]):
            for a0 in free(6):
                for a1 in free(3):
                    for r1 in reduce(5):
                        for r0 in reduce(4):
                            in0 = q[a0, r0]
                            in1 = k[a0 // 3, r1, r0]
                            v0 = mul(in0, in1)
                            acc1 <- sum(v0)
                        in2 = v[a0 // 3, r1, a1]
                        v1 = mul(acc1, in2)
                        acc0 <- sum(v1)
                    z[a0, a1] = acc0
        return (z,)
    =>
    @loop
    def f(q: f32[6, 4], k: f32[2, 5, 4], v: f32[2, 5, 3]):
        with kernel('z', z=f32[6, 3]):
            for a0 in free(2):
                for a1 in free(3):
                    for a2 in free(3):
                        for r1 in reduce(5):
                            in0 = v[a0, r1, a2]
                            for r0 in reduce(4):
                                in1 = q[a0 * 3 + a1, r0]
                                in2 = k[a0, r1, r0]
                                v0 = mul(in1, in2)
                                acc1 <- sum(v0)
                            v1 = mul(acc1, in0)
                            acc0 <- sum(v1)
                        z[a0 * 3 + a1, a2] = acc0
        return (z,)
    """
    if not all(isinstance(a.extent, int) and a.extent > 0 for a in kernel.axes):
        return kernel
    made = _divided(kernel) or _one_more(kernel) or kernel
    return _merged(made)


def _divided(kernel: l.Kernel) -> l.Kernel | None:
    """An axis of which some factor knows the quotient only as two."""
    for x in topological(kernel.stores):
        if not isinstance(x, FloorDiv) or x.a not in kernel.axes or not isinstance(x.b, int):
            continue
        if _size(x.a) % x.b == 0 and 1 < x.b < _size(x.a):
            made = _as_two(kernel, x.a, x.b)
            if chain(made) is not None:
                return made
    return None


def _merged(kernel: l.Kernel) -> l.Kernel:
    """All rows that share the steps' operands as one axis: heads of a group, of each of a few tokens."""
    rows = _rows(kernel)
    return _as_one(kernel, rows) if len(rows) > 1 and math.prod(map(_size, rows)) <= MOST else kernel


def rows_in_line(kernel: l.Kernel) -> l.Kernel:
    """`kernel` with all rows that share the steps' operands as one axis, where they lie one after the other in all that
    is read and stored of them: tokens of several texts, or windows, of 49 each, say, which no tile has as many rows as.
    """
    rows = _rows(kernel)
    known = all(isinstance(x.extent, int) and x.extent > 0 for x in rows)
    return _as_one(kernel, rows) if len(rows) > 1 and known and in_line(kernel, rows) else kernel


def _rows(kernel: l.Kernel) -> list[Any]:
    """The axes of a chain that only its first factor knows."""
    if (c := chain(kernel)) is None:
        return []
    a, *others = c.operands
    return [x for x in kernel.axes if x in a.free and not any(x in y.free for y in others)]


def _as_one(kernel: l.Kernel, rows: Sequence[Any]) -> l.Kernel:
    flat = Var(rows[0].name, math.prod(map(_size, rows)))
    new = dict(zip(rows, unflatten(flat, tuple(x.extent for x in rows)), strict=True))
    stores = substituted(kernel.stores, new)
    axes = tuple(flat if x is rows[0] else x for x in kernel.axes if x not in rows[1:])
    return l.Kernel(kernel.name, axes, stores, kernel.source)


def _one_more(kernel: l.Kernel) -> l.Kernel | None:
    """A row of its own for every point of the others, where the first factor has no row at all."""
    if chain(kernel) is not None or len(kernel.stores) != 1:
        return None
    (store,) = kernel.stores
    row = Var(f"a{len(kernel.axes)}", 1)
    for *_, (a, b, c) in nested(kernel):
        columns = [x for x in kernel.axes if x in c.free and x not in a.free and x not in b.free]
        if not isinstance(a, l.Load) or not columns or row in kernel.axes:
            continue
        new = l.Load.make(a.buffer, (a.index[0] + row, *a.index[1:]), a.inside)
        value = substitute(store.value, {a: new})
        axes = (*(x for x in kernel.axes if x not in columns[-1:]), row, columns[-1])
        made = l.Kernel(
            kernel.name, axes, (l.Store(store.buffer, (store.index[0] + row, *store.index[1:]), value),), kernel.source
        )
        if chain(made) is not None:
            return made
    return None


def _as_two(kernel: l.Kernel, axis: Any, inner: int) -> l.Kernel:
    """An axis as two, of which the inner one has so many values; axes are called in order."""
    sizes = [n for a in kernel.axes for n in ((a.extent // inner, inner) if a is axis else (a.extent,))]
    axes = tuple(Var(f"a{number}", size) for number, size in enumerate(sizes))
    left = list(axes)
    new: dict[Any, Any] = {}
    for a in kernel.axes:
        new[a] = left.pop(0) * inner + left.pop(0) if a is axis else left.pop(0)
    return l.Kernel(kernel.name, axes, substituted(kernel.stores, new), kernel.source)


def split_frames(kernel: l.Kernel, pieces: int, unit: int = 1) -> tuple[l.Kernel, l.Kernel] | None:
    """A chain in a moving frame as two kernels: the states of so many pieces of its steps (the maximum, the sum of
    weights, what the product sums), and what they make in the highest frame. Pieces are multiples of `unit`. None where
    the sums are in no frame.

    @loop
    def f(q: f32[3, 4], k: f32[6, 4], v: f32[6, 5]):
        with kernel('z', z=f32[3, 5]):
            for a0 in free(3):
                for r1 in reduce(6):
                    for r0 in reduce(4):
                        in0 = q[a0, r0]
                        in1 = k[r1, r0]
                        v0 = mul(in0, in1)
                        acc1 <- sum(v0)
                    acc0 <- max(acc1)
                for a1 in free(5):
                    for r1 in reduce(6):
                        for r0 in reduce(4):
                            in2 = q[a0, r0]
                            in3 = k[r1, r0]
                            v1 = mul(in2, in3)
                            acc3 <- sum(v1)
                        v2 = sub(acc3, acc0)
                        v3 = exp2(v2)
                        in4 = v[r1, a1]
                        v4 = mul(v3, in4)
                        acc2 <- sum(v4)
                    z[a0, a1] = acc2
        return (z,)
    =>
    @loop
    def f(q: f32[3, 4], k: f32[6, 4], v: f32[6, 5]):
        with kernel('z_part', z_top=f32[2, 3], z_part=f32[2, 3, 5]):
            for s in free(2):
                for a0 in free(3):
                    for r1 in reduce(3):
                        for r0 in reduce(4):
                            in0 = q[a0, r0]
                            in1 = k[r1 + s * 3, r0]
                            v0 = mul(in0, in1)
                            acc1 <- sum(v0)
                        acc0 <- max(acc1)
                    v1 = eq(acc0, f32(-inf))
                    z_top[s, a0] = acc0
                    for a1 in free(5):
                        for r2 in reduce(3):
                            in2 = v[r2 + s * 3, a1]
                            for r0 in reduce(4):
                                in3 = q[a0, r0]
                                in4 = k[r2 + s * 3, r0]
                                v2 = mul(in3, in4)
                                acc3 <- sum(v2)
                            v3 = sub(acc3, acc0)
                            v4 = exp2(v3)
                            v5 = mul(v4, in2)
                            acc2 <- sum(v5)
                        v6 = where(v1, f32(0.0), acc2)
                        z_part[s, a0, a1] = v6
        with kernel('z', z=f32[3, 5]):
            for a0 in free(3):
                for r0 in reduce(2):
                    in0 = z_top[r0, a0]
                    acc0 <- max(in0)
                for a1 in free(5):
                    for r1 in reduce(2):
                        in1 = z_part[r1, a0, a1]
                        in2 = z_top[r1, a0]
                        v0 = eq(in2, f32(-inf))
                        v1 = sub(in2, acc0)
                        v2 = exp2(v1)
                        v3 = where(v0, f32(0.0), v2)
                        v4 = mul(in1, v3)
                        acc1 <- sum(v4)
                    z[a0, a1] = acc1
        return (z,)
    """
    found = chain(kernel)
    if found is None or len(kernel.stores) != 1 or not isinstance(found.steps.extent, int):
        return None
    outer = accumulators(kernel)[found.outer]
    assert isinstance(outer, l.Reduce)
    c = nested_contraction(outer)
    held = weight(c) if c is not None and len(outer.axes) == 1 else None
    (axis, *_) = outer.axes
    every = reductions(kernel.stores[0].value)
    if held is None or len(held.top.axes) != 1 or at(held.top, axis) is not held.score:
        return None
    totals = [r for r in every if r.monoid.name == "sum" and len(r.axes) == 1 and at(r, axis) is held.weight]
    if {*every} - {outer, held.top, *totals}:
        return None
    return _Split(kernel, outer, held, tuple(totals), pieces, unit).kernels()


@dataclass(frozen=True)
class _Split:
    """A kernel whose sums `outer` and `totals` are of weights in one frame, and how its steps are cut."""

    kernel: l.Kernel
    outer: l.Reduce
    held: Framed
    totals: tuple[l.Reduce, ...]
    pieces: int
    unit: int

    def kernels(self) -> tuple[l.Kernel, l.Kernel]:
        """That of states, that of results."""
        states = self.states()
        part = axis_of_pieces(self.kernel, self.count)
        stores: list[l.Store] = []
        loads: dict[Node, l.Load] = {}
        again = Var(l.fresh_name(), self.count)
        for old, (name, term) in states.items():
            own = tuple(a for a in self.kernel.axes if a in old.free)
            kind = Type(term.dtype, (self.count, *(a.extent for a in own)))  # type: ignore[attr-defined]
            buffer = l.Buffer(f"{self.kernel.name}_{name}", kind)
            stores.append(l.Store(buffer, (part, *own), term))
            loads[old] = l.Load(buffer, (again, *own))
        axes = (part, *self.kernel.axes)
        first = l.Kernel(f"{self.kernel.name}_part", axes, tuple(stores), self.kernel.source)
        return first, self.whole(again, loads)

    @property
    def length(self) -> int:
        """Steps in a piece."""
        (axis,) = self.outer.axes
        return -(-_size(axis) // (self.pieces * self.unit)) * self.unit

    @property
    def count(self) -> int:
        """The pieces that have a step at all."""
        (axis,) = self.outer.axes
        return -(-_size(axis) // self.length)

    def states(self) -> dict[Node, tuple[str, Node]]:
        """The state of a piece: what becomes of every reduction. Where there is no score, sums are 0."""
        held, (axis,) = self.held, self.outer.axes
        part, short = Var("s", self.count), Var(l.fresh_name(), self.length)
        to = part * self.length + short
        inside = tuple(e for e in (axis.extent - 1 - to,) if not at_least(e, 0))

        def moved(x: Node) -> Any:
            return rewrite_loads(substitute(x, {axis: to}), beside)

        def beside(load: l.Load) -> l.Load:
            return guarded(load, inside) if short in load.free else load

        score = select(inside, moved(held.score), -math.inf)
        top = l.Reduce.make(held.top.monoid, (short,), (score,))
        e = held.above(score, held.base(top))
        summed = substitute(moved(self.outer.args[0]), {moved(held.weight): e})
        sums = {**dict.fromkeys(self.totals, ("total", e)), self.outer: ("part", summed)}
        nothing = l.apply("eq", top, l.Literal(-math.inf, top.dtype))
        found: dict[Node, tuple[str, Node]] = {
            old: (name, _unless(nothing, l.Reduce.make(old.monoid, (short,), (term,))))
            for old, (name, term) in sums.items()
        }
        return {held.top: ("top", top), **found}

    def whole(self, again: Var, loads: dict[Node, l.Load]) -> l.Kernel:
        """All states in the highest frame, and what was to be made of them."""
        held = self.held
        top = l.Reduce.make(held.top.monoid, (again,), (loads[held.top],))
        none = l.apply("eq", loads[held.top], l.Literal(-math.inf, top.dtype))
        worth = _unless(none, held.of(l.apply("sub", loads[held.top], top)))
        new: dict[Any, Any] = {
            old: l.Reduce.make(self.outer.monoid, (again,), (l.apply("mul", loads[old], worth),))
            for old in (self.outer, *self.totals)
        }
        (store,) = self.kernel.stores
        value = substitute(store.value, {**new, held.top: top})
        stores = (l.Store(store.buffer, store.index, value),)
        return l.Kernel(self.kernel.name, self.kernel.axes, stores, self.kernel.source)


def _unless(condition: Node, x: Any) -> Any:
    """0 where the condition holds."""
    return l.apply("where", condition, l.Literal(0.0, x.dtype), x)


def _like(binding: Like, called: dict[str, str]) -> Like:
    """The same where sites are called otherwise."""
    site, dot, axis = binding.site.partition(".")
    return Like(called.get(site, site) + dot + axis)


def _size(axis: Any) -> int:
    found: int = axis.extent
    return found


def pinned_frames(kernel: l.Kernel, schedule: Schedule) -> tuple[l.Kernel, Schedule, l.Kernel] | None:
    """A chain in a moving frame as two kernels, where its schedule binds the steps to the grid: that of states, with
    the rest of the schedule, and that which combines them. None where it binds them to no grid, or nothing is in a
    frame.

    UserError where the schedule binds other axes of the steps as well: they are cut as these are.
    """
    c = chain(kernel)
    binding = dict(schedule.axes).get(axis_name(c.steps), ()) if c is not None else ()
    if c is None or isinstance(binding, Like) or not binding or binding[0].level != "grid":
        return None
    grid, *rest = binding
    if (made := split_frames(kernel, grid.size, math.prod(f.size for f in rest))) is None:
        return None
    steps = axis_name(c.steps)
    sums = [r for r in accumulators(kernel).values() if isinstance(r, l.Reduce)]
    alike = {axis_name(a) for r in sums for a in r.axes if a not in c.depths} - {steps}
    for a in (a for a, _ in schedule.axes if a in alike):
        with about(*schedule.part("", a)):
            raise UserError(
                f"the schedule of {kernel.name}: blocks share {steps}, and {a} goes along the same steps: leave {a} out"
            )
    first, second = made
    (found,) = [x for x in [chain(first)] if x is not None]
    called = {c.inner: found.inner, c.outer: found.outer, kernel.stores[0].buffer.name: f"{kernel.name}_part"}
    sites = tuple(
        replace(
            s,
            names=tuple(called.get(x, x) for x in s.names),
            axes=tuple((a, _like(b, called) if isinstance(b, Like) else b) for a, b in s.axes),
        )
        for s in schedule.sites
    )
    part = first.axes[0]
    axes = tuple((axis_name(found.steps), tuple(rest)) if a == steps else (a, b) for a, b in schedule.axes)
    whole = (part.name, (replace(grid, size=_size(part)),))
    bound = replace(schedule, kernel=first.name, axes=(whole, *axes), sites=sites, origin=schedule)
    return first, bound, second
