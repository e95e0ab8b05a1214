"""Sums of products of which every s-th point sees other steps, as those of a transposed convolution with a stride: the
rests that points leave, their phases, are axes of their own, and steps only those that a phase sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr, Var
from terrazzo.ir.node import substitute, topological
from terrazzo.ir.sites import product
from terrazzo.ir.types import Type, ordered_strides
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.definitions import unused
from terrazzo.rules.loop.layout.images import Rests, at_rests, quotients
from terrazzo.rules.loop.layout.lookups import stored_first
from terrazzo.rules.loop.precision.number_parts import order_of

PASS, RULE = "online", "phases_apart"


@dataclass(frozen=True)
class Phase:
    """Of a factor that is read at a `place` of `rests`, and is 0 where that leaves a rest, what takes the place of its
    point and its step: every stride-th point from each `phase` on, and each step that leaves no rest.
    """

    place: IntExpr
    rests: Rests
    among: Any
    phase: Any
    turn: IntExpr

    @property
    def moved(self) -> IntExpr:
        """The phase, as the image sees it."""
        found: IntExpr = self.phase + self.rests.shift
        return found

    @property
    def first(self) -> IntExpr:
        """The first step that leaves no rest, if there is one."""
        r = self.rests
        apart = r.stride // r.common
        found: IntExpr = self.moved // r.common * pow(r.dilation // r.common, -1, apart) % apart
        return found

    @property
    def tap(self) -> IntExpr:
        """The step; it may lie behind the last one."""
        r = self.rests
        found: IntExpr = self.turn * (r.stride // r.common) + self.first + self.moved % r.common * r.step.extent
        return found

    @property
    def at(self) -> IntExpr:
        """The place; it lies before the tensor where there is no such step."""
        r = self.rests
        beyond = self.tap // r.step.extent * (self.among.extent + r.shift + 1)
        found = self.moved // r.stride if r.dilation == 1 else (self.moved - self.first * r.dilation) // r.stride
        place: IntExpr = self.among - self.turn * (r.dilation // r.common) + found - beyond
        return place


def phases_apart(program: l.Program, log: Log, price: Callable[[Sequence[l.Kernel]], float]) -> l.Program:
    """`program` with sums of products whose image is read at quotients of points less steps, and is 0 where these leave
    a rest, with axes of phases and no other steps than these see, where that is faster by the model. Filters are stored
    first, phase by phase.

    @loop
    def f(x: f32[8, 16], w: f32[16, 4, 9]):
        with kernel('z', z=f32[9, 16]):
            for a0 in free(9):
                for a1 in free(16):
                    for r0, r1 in reduce(16, 4):
                        in0 = x[(-r1 + a1 + 1) // 2, r0] if (-r1 + a1 + 1) // 2 >= 0 and (-r1 + a1 + 1) // 2 < 8 and (-r1 + a1 + 1) % 2 == 0 else 0
                        in1 = w[r0, r1, a0]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    z[a0, a1] = acc0
        return (z,)
    =>
    @loop
    def f(x: f32[8, 16], w: f32[16, 4, 9]):
        with kernel('z_w', z_w=f32[9, 4, 16]):
            for a0 in free(9):
                for a1 in free(2):
                    for a2 in free(2):
                        for a3 in free(16):
                            in0 = w[a3, ((a1 + 1) % 2) + a2 * 2, a0]
                            z_w[a0, a1 * 2 + a2, a3] = in0
        with kernel('z', z=f32[9, 16]):
            for a0 in free(9):
                for a1 in free(8):
                    for a2 in free(2):
                        for r0, r1 in reduce(16, 2):
                            in0 = x[-r1 + ((a2 + 1) // 2) + a1, r0] if r1 <= ((a2 + 1) // 2) + a1 and ((a2 + 1) // 2) + a1 <= r1 + 7 else 0
                            in1 = z_w[a0, r1 + a2 * 2, r0]
                            v0 = mul(in0, in1)
                            acc0 <- sum(v0)
                        z[a0, a1 * 2 + a2] = acc0
        return (z,)
    """  # noqa: E501

    def find(s: l.Kernel, names: Set[str], _: object) -> tuple[l.Kernel, ...] | None:
        return in_phases(s, names)

    def prices(s: l.Kernel, found: Sequence[l.Kernel]) -> tuple[float, float]:
        return price([s]), price(found)

    return stored_first(program, log, (PASS, RULE, "with steps of which most are 0"), find, prices)


def in_phases(kernel: l.Kernel, names: Set[str]) -> tuple[l.Kernel, ...] | None:
    """A kernel that stores filters phase by phase, and the one that reads them; None where an image has no phases.
    Where these have not equally many points, it stores what they would have, and a third one what there is of it.
    """
    p = product(kernel)
    if p is None or len(p.sites) != 1 or len(p.operands) != 2 or not all(isinstance(x, l.Load) for x in p.operands):
        return None
    reduce = p.sites[0].reduce
    steps, args = l.open_binder(reduce)
    loads: list[Any] = [substitute(x, dict(zip(reduce.axes, steps, strict=True))) for x in p.operands]
    image, filters = sorted(loads, key=lambda x: not quotients(x))
    phases = [_phase(e, kernel.axes, steps) for e in quotients(image)]
    found = [y for y in phases if y is not None and y.rests.point not in filters.free]
    if not found or len(found) < len(phases):
        return None
    at: dict[Any, Any] = {y.place: y.at for y in found}
    index = tuple(at.get(e, e) for e in image.index)
    gone = {x for y in found for x in (y.rests.point, y.rests.step)}
    if any(isinstance(e, Expr) and e.free & gone for e in index):
        return None
    sizes = dict(zip(image.index, image.buffer.type.static_shape, strict=True))
    inside = [e for e in image.inside if not e.free & gone]
    inside += [e for y in found for e in (y.at, sizes[y.place] - 1 - y.at)]
    turns = {y.rests.step: y.turn for y in found}
    walked: list[Any] = [t for r in steps if not isinstance(t := turns.get(r, r), int)]
    inner = sorted(walked, key=lambda r: (r not in turns.values(), r.extent))
    two = {y.rests.point: (y.among, y.phase) for y in found}
    axes = tuple(b for a in kernel.axes for b in two.get(a, (a,)))
    place, stored = _by_phases(kernel, filters, found, [*axes, *inner], names)
    taken = {image: l.Load.make(image.buffer, index, tuple(inside)), filters: place}
    term = l.Reduce.make(reduce.monoid, tuple(walked), tuple(substitute(x, taken) for x in args))
    points: dict[Any, Any] = {y.rests.point: y.among * y.rests.stride + y.phase for y in found}
    sizes = {p: y.among.extent * y.rests.stride for y in found if (p := y.rests.point).extent % y.rests.stride}
    if sizes:
        whole = _all_points(kernel, {reduce: term}, points, sizes, axes, names)
        return (stored, *whole) if whole is not None else None
    stores = [substitute(substitute(s, {reduce: term}), points) for s in kernel.stores]
    return stored, _kernel(kernel.name, axes, stores, kernel)


def _all_points(
    kernel: l.Kernel,
    taken: Mapping[Any, Any],
    points: Mapping[Any, Any],
    sizes: Mapping[Any, int],
    axes: Sequence[Any],
    names: Set[str],
) -> tuple[l.Kernel, ...] | None:
    """A kernel of phases that go on beyond the last point, so that all have equally many, and one that stores what
    there is of its results. Points have `sizes` there, and nothing else is read beyond theirs. None where a store has
    one of them in no dimension of its own.
    """
    if any(sum(e is a for e in s.index) != 1 for s in kernel.stores for a in sizes):
        return None
    (reduce,) = taken
    new = dict(taken)
    for x in topological([s.value for s in kernel.stores], lambda x: x is reduce):
        if isinstance(x, l.Load):
            ends = tuple(a.extent - 1 - points[a] for a in sizes if a in x.free)
            y = substitute(x, points)
            new[x] = l.Load.make(y.buffer, y.index, (*y.inside, *ends))
    wide = {s.buffer: _widened(s, sizes, names) for s in kernel.stores}
    stores = [substitute(substitute(l.Store(wide[s.buffer], s.index, s.value), new), points) for s in kernel.stores]
    whole = _kernel(unused(f"{kernel.name}_whole", {*names}), axes, stores, kernel)
    there = tuple(l.Store(s.buffer, s.index, l.Load.make(wide[s.buffer], s.index)) for s in kernel.stores)
    return whole, l.Kernel(kernel.name, kernel.axes, there, kernel.source)


def _widened(s: l.Store, sizes: Mapping[Any, int], names: Set[str]) -> l.Buffer:
    """What a store writes to, with room for so many points of axes."""
    kind = s.buffer.type
    shape = tuple(sizes.get(e, n) for e, n in zip(s.index, kind.static_shape, strict=True))
    strides = None if kind.strides is None else ordered_strides(shape, order_of(kind))
    return l.Buffer(unused(f"{s.buffer.name}_whole", {*names}), Type(kind.dtype, shape, strides))


def _by_phases(
    reader: l.Kernel, filters: l.Load, found: Sequence[Phase], every: Sequence[Any], names: Set[str]
) -> tuple[l.Load, l.Kernel]:
    """Filters where they are stored for each phase, along those of `every` axis that they know, in this order, and the
    kernel that stores them: 0 where a phase has no such step.
    """
    taps: dict[Any, Any] = {y.rests.step: y.tap for y in found}
    ends = tuple(y.rests.step.extent - 1 - y.tap for y in found)
    value = l.Load.make(filters.buffer, *(tuple(substitute(e, taps) if isinstance(e, Expr) else e for e in x)
                                          for x in (filters.index, (*filters.inside, *ends))))  # fmt: skip
    turns: dict[Any, Any] = {y.phase: y.turn for y in found}
    axes = [a for a in every if a in turns or a in turns.values() or (a in filters.free and a not in taps)]
    index: list[Any] = []
    shape: list[int] = []
    for a in axes:
        if isinstance(turn := turns.get(a), Var):  # dimensions are few that boxes may have
            index.append(a * turn.extent + turn)
            shape.append(a.extent * turn.extent)
        elif a not in turns.values():
            index.append(a)
            shape.append(a.extent)
    name = unused(f"{reader.name}_{filters.buffer.name}", {*names})
    place = l.Load(l.Buffer(name, Type(filters.dtype, tuple(shape))), tuple(index))
    return place, _kernel(name, axes, [l.Store(place.buffer, place.index, value)], reader)


def _kernel(name: str, axes: Sequence[Any], stores: Sequence[l.Store], source: l.Kernel) -> l.Kernel:
    """A kernel whose axes have the names that they have elsewhere."""
    plain: dict[Any, Any] = {a: Var(f"a{n}", a.extent) for n, a in enumerate(axes)}
    return l.Kernel(name, tuple(plain.values()), tuple(substitute(s, plain) for s in stores), source.source)


def _phase(place: IntExpr, points: Sequence[Any], steps: Sequence[Any]) -> Phase | None:
    """What takes the place of a point and a step that a place is of; None where it is none of theirs."""
    if (r := at_rests(place, points, steps)) is None:
        return None
    among, phase = Var(l.fresh_name(), -(-r.point.extent // r.stride)), Var(l.fresh_name(), r.stride)
    turns = -(-r.step.extent * r.common // r.stride)
    return Phase(place, r, among, phase, Var(l.fresh_name(), turns) if turns > 1 else 0)
