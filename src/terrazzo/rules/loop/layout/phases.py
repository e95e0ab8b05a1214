"""Sums of products of which every s-th point sees other steps, as those of a transposed convolution with a stride: the
rests that points leave, their phases, are axes of their own, and steps only those that a phase sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from terrazzo.ir.address import coefficient, evaluate, flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr, Var
from terrazzo.ir.node import substitute
from terrazzo.ir.sites import product
from terrazzo.ir.types import Type, contiguous_strides
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.definitions import unused
from terrazzo.rules.loop.layout.across import read_across
from terrazzo.rules.loop.layout.images import Rests, at_rests, quotients
from terrazzo.rules.loop.layout.last_points import Pieces, Steps, all_points, with_plain_axes
from terrazzo.rules.loop.layout.lookups import stored_first

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
    def apart(self) -> int:
        """How many steps lie between those that leave no rest."""
        return self.rests.stride // self.rests.common

    @property
    def whole(self) -> int:
        """How many points there are of which each phase has equally many."""
        points: int = self.rests.point.extent
        return points - points % self.rests.stride

    @property
    def first(self) -> IntExpr:
        """The first step that leaves no rest, if there is one."""
        r = self.rests
        found: IntExpr = self.moved // r.common * pow(r.dilation // r.common, -1, self.apart) % self.apart
        return found

    @property
    def tap(self) -> IntExpr:
        """The step; it may lie behind the last one."""
        found: IntExpr = self.turn * self.apart + self.first
        return found

    @property
    def at(self) -> IntExpr:
        """The place; it lies before the tensor where the phase has no step, and others have one."""
        r = self.rests
        found = self.moved // r.stride if r.dilation == 1 else (self.moved - self.first * r.dilation) // r.stride
        place: IntExpr = self.among - self.turn * (r.dilation // r.common) + found
        none = 1 - self.count if max(self.counts) == 1 else 0
        return place - none * (self.among.extent + r.shift + 1)  # type: ignore[no-any-return]

    @property
    def most(self) -> IntExpr:
        """How many steps the phase sees, if it sees any: as many as others, or one more."""
        found: IntExpr = (self.rests.step.extent - 1 - self.first) // self.apart + 1
        return found

    @property
    def count(self) -> IntExpr:
        """How many steps it sees: none where the dilation leaves it a rest."""
        common = self.rests.common
        return self.most * ((common - self.moved % common) // common)

    @property
    def counts(self) -> tuple[int, ...]:
        """The same, of each phase."""
        return tuple(int(evaluate(self.count, {self.phase: n})) for n in range(self.rests.stride))


@dataclass(frozen=True)
class Turns:
    """An axis of steps that phases see, one `turn` after the other, and how many each of them sees: all of them, or as
    an expression of the phases.
    """

    turn: Var
    phases: tuple[Phase, ...]
    count: IntExpr

    @property
    def ends(self) -> tuple[IntExpr, ...]:
        """What is >= 0 where there is a step."""
        return () if self.count == self.turn.extent else (self.count - 1 - self.turn,)

    @property
    def index(self) -> IntExpr:
        """Which phase it is, and which turn of it, as one number."""
        return flatten((*(y.phase for y in self.phases), self.turn), contiguous_strides(self._sizes))

    @property
    def extent(self) -> int:
        """How many such numbers there are."""
        return math.prod(self._sizes)

    @property
    def _sizes(self) -> tuple[int, ...]:
        longest: Any = self.turn.extent
        return (*(y.rests.stride for y in self.phases), longest)


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

    def prices(s: l.Kernel, found: Sequence[Any]) -> tuple[float, float]:
        return price([s]), price(found)

    def find(s: l.Kernel, names: Set[str], _: object) -> tuple[l.Kernel | l.Call, ...] | None:
        return min(in_phases(s, names), key=lambda found: prices(s, found)[1], default=None)

    made = stored_first(program, log, (PASS, RULE, "with steps of which most are 0"), find, prices)
    return read_across(made, log, {*program.steps}, price)


@dataclass(frozen=True)
class Factors:
    """The one sum of a kernel that multiplies an image, which may have phases, with filters: its terms and its steps,
    opened, and what is loaded of both.
    """

    reduce: l.Reduce
    args: Sequence[Any]
    steps: Sequence[Any]
    image: Any
    filters: Any


def factors_of(kernel: l.Kernel) -> Factors | None:
    """Those of a kernel; None where it has others, or none."""
    p = product(kernel)
    if p is None or len(p.sites) != 1 or len(p.operands) != 2 or not all(isinstance(x, l.Load) for x in p.operands):
        return None
    reduce = p.sites[0].reduce
    steps, args = l.open_binder(reduce)
    loads: list[Any] = [substitute(x, dict(zip(reduce.axes, steps, strict=True))) for x in p.operands]
    image, filters = sorted(loads, key=lambda x: not quotients(x))
    return Factors(reduce, args, steps, image, filters)


def in_phases(kernel: l.Kernel, names: Set[str]) -> list[Steps]:
    """Ways to go phase by phase, none where an image has no phases: a kernel that reads filters as they lie, or one
    that stores them phase by phase, and the one that reads those.
    Where these have not equally many points, it stores what they would have, and a third one what there is of it; or
    there is one more for the last points of each dimension.
    """
    if (given := factors_of(kernel)) is None:
        return []
    reduce, args, steps = given.reduce, given.args, given.steps
    image, filters = given.image, given.filters
    phases = [_phase(e, kernel.axes, steps) for e in quotients(image)]
    found = [y for y in phases if y is not None and y.rests.point not in filters.free]
    if not found or len(found) < len(phases):
        return []
    found, turns = _in_turn(found)
    ends = [e for x in turns for e in x.ends]
    at: dict[Any, Any] = {y.place: y.at for y in found}
    index = tuple(at.get(e, e) for e in image.index)
    gone = {x for y in found for x in (y.rests.point, y.rests.step)}
    if any(isinstance(e, Expr) and e.free & gone for e in index):
        return []
    sizes = dict(zip(image.index, image.buffer.type.static_shape, strict=True))
    inside = [e for e in image.inside if not e.free & gone]
    inside += [e for y in found for e in (y.at, sizes[y.place] - 1 - y.at)]
    inside += ends
    own = {x.phases[0].rests.step: x.turn for x in turns if not x.ends}
    walked: list[Any] = [x.turn for x in turns if x.ends]  # of which not all are taken
    walked += [own.get(r, r) for r in steps if r in own or r not in gone]
    if not walked:  # points see one step of one channel, so that nothing is summed
        return []
    inner = sorted(walked, key=lambda r: (all(r is not x.turn for x in turns), r.extent))
    two = {y.rests.point: (y.among, y.phase) for y in found}
    axes = tuple(b for a in kernel.axes for b in two.get(a, (a,)))
    by_phases, stored = _by_phases(kernel, filters, found, turns, [*axes, *inner], names)
    ways: list[tuple[l.Load, Steps]] = [(by_phases, (stored,))]
    if (as_it_lies := _as_it_lies(filters, found)) is not None:
        ways.append((as_it_lies, ()))
    taken = l.Load.make(image.buffer, index, tuple(inside))
    points: dict[Any, Any] = {y.rests.point: y.among * y.rests.stride + y.phase for y in found}
    sizes = {p: y.among.extent * y.rests.stride for y in found if (p := y.rests.point).extent % y.rests.stride}
    if any(sum(e is a for e in s.index) != 1 for s in kernel.stores for a in sizes):
        return []  # a store has one of them in no dimension of its own
    every: list[Steps] = []
    for place, first in ways:
        term = l.Reduce.make(
            reduce.monoid, tuple(walked), tuple(substitute(x, {image: taken, filters: place}) for x in args)
        )
        if not sizes:
            stores = [substitute(substitute(s, {reduce: term}), points) for s in kernel.stores]
            every.append((*first, with_plain_axes(kernel.name, axes, stores, kernel)))
            continue
        every.append((*first, *all_points(kernel, {reduce: term}, points, sizes, axes, names)))
        uneven = [y for y in found if y.rests.point in sizes]
        known = {*names, *(b.name for b in stored.writes)}
        if pieces := Pieces(kernel, {reduce: term}, points, axes, known).steps(uneven):
            every.append((*first, *pieces))
    return every


def _by_phases(
    reader: l.Kernel,
    filters: l.Load,
    found: Sequence[Phase],
    turns: Sequence[Turns],
    every: Sequence[Any],
    names: Set[str],
) -> tuple[l.Load, l.Kernel]:
    """Filters where they are stored for each phase, along those of `every` axis that they know, in this order, and the
    kernel that stores them: 0 where a phase has no such step.
    """
    value = _at_taps(filters, found, [e for x in turns for e in x.ends])
    taps = {y.rests.step for y in found}
    known = {y.phase for y in found} | {x.turn for x in turns}
    axes = [a for a in every if a in known or (a in filters.free and a not in taps)]
    together: dict[Any, Turns] = {y.phase: x for x in turns for y in x.phases}  # boxes have few dimensions
    places = [(x.index, x.extent) if (x := together.get(a)) else (a, a.extent) for a in axes]
    index, shape = zip(*(x for x in dict.fromkeys(places) if all(x[0] is not y.turn for y in turns)), strict=True)
    name = unused(f"{reader.name}_{filters.buffer.name}", {*names})
    place = l.Load(l.Buffer(name, Type(filters.dtype, shape)), index)
    return place, with_plain_axes(name, axes, [l.Store(place.buffer, place.index, value)], reader)


def _at_taps(filters: l.Load, found: Sequence[Phase], ends: Sequence[IntExpr] = ()) -> l.Load:
    """Filters at the taps of phases: 0 beyond the last ones, and `ends`."""
    taps: dict[Any, Any] = {y.rests.step: y.tap for y in found}
    every = (*filters.inside, *(y.rests.step.extent - 1 - y.tap for y in found), *ends)
    index, inside = (
        tuple(substitute(e, taps) if isinstance(e, Expr) else e for e in x) for x in (filters.index, every)
    )
    return l.Load.make(filters.buffer, index, inside)


def _as_it_lies(filters: l.Load, found: Sequence[Phase]) -> l.Load | None:
    """The same, where boxes of memory have it: where channels lie side by side."""
    taps = {y.rests.step for y in found}
    place = flatten(filters.index, filters.buffer.type.element_strides)
    return _at_taps(filters, found) if any(coefficient(place, a) == 1 for a in filters.free - taps) else None


def _phase(place: IntExpr, points: Sequence[Any], steps: Sequence[Any]) -> Phase | None:
    """What takes the place of a point and a step that a place is of; None where it is none of theirs."""
    if (r := at_rests(place, points, steps)) is None:
        return None
    among, phase = Var(l.fresh_name(), -(-r.point.extent // r.stride)), Var(l.fresh_name(), r.stride)
    turns = -(-r.step.extent * r.common // r.stride)
    return Phase(place, r, among, phase, Var(l.fresh_name(), turns) if turns > 1 else 0)


def _in_turn(found: Sequence[Phase]) -> tuple[list[Phase], list[Turns]]:
    """Phases with their steps in turn. Where some see more than others, there is one axis for all steps of these
    dimensions, so that whoever comes to the end of what a phase sees has seen all of it.
    """
    odd = [y for y in found if len({*y.counts}) > 1]
    longest = math.prod(max(y.counts) for y in odd)
    if longest == 1:
        return [*found], [Turns(y.turn, (y,), y.turn.extent) for y in found if isinstance(y.turn, Var)]
    turn = Var(l.fresh_name(), longest)
    left: IntExpr = turn
    new = {y: y for y in found}
    for y in odd[:0:-1]:
        if max(y.counts) > 1:
            new[y], left = replace(y, turn=left % y.most), left // y.most
    new[odd[0]] = replace(odd[0], turn=left)
    mine = tuple(new[y] for y in odd)
    count = math.prod((y.count for y in odd), start=1)
    turns = [Turns(turn, mine, count)]
    turns += [Turns(y.turn, (y,), y.turn.extent) for y in found if y not in odd and isinstance(y.turn, Var)]
    return [*new.values()], turns
