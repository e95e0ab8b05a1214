"""Transposed convolutions of few results, whose phases (`phases.py`) are columns beside these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr, Var
from terrazzo.ir.node import substitute, topological
from terrazzo.ir.types import Type
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.definitions import unused
from terrazzo.rules.loop.layout.few_results import Price, has_few, surely
from terrazzo.rules.loop.layout.images import Rests, at_rests, quotients
from terrazzo.rules.loop.layout.last_points import with_plain_axes
from terrazzo.rules.loop.layout.phases import Factors, factors_of

PASS, RULE = "online", "phases_beside"


@dataclass(frozen=True)
class _Dimension:
    """A dimension of points, in whose place are those `among` which the first phase begins, and the phases there. Each
    sees one tap in every `turn`.
    """

    rests: Rests
    among: Var
    phase: Var
    turn: Var

    @property
    def first(self) -> int:
        """Where the first phase begins first."""
        return self.rests.shift // self.rests.stride

    @property
    def place(self) -> IntExpr:
        """What is read of the image."""
        return self.among + self.first - self.turn

    @property
    def tap(self) -> IntExpr:
        """What that is multiplied with."""
        return self.turn * self.rests.stride + self.phase

    @property
    def point(self) -> IntExpr:
        """The point that a phase has there; it may lie before the first one or behind the last one."""
        return (self.among + self.first) * self.rests.stride + self.phase - self.rests.shift

    @property
    def at(self) -> dict[Any, IntExpr]:
        """Where a point is among these."""
        moved = self.rests.point + self.rests.shift
        return {self.among: moved // self.rests.stride - self.first, self.phase: moved % self.rests.stride}


def _dimension(r: Rests) -> _Dimension:
    among = (r.point.extent - 1 + r.shift) // r.stride - r.shift // r.stride + 1
    sizes = among, r.stride, r.step.extent // r.stride
    return _Dimension(r, *(Var(l.fresh_name(), n) for n in sizes))


def phases_beside(program: l.Program, log: Log, price: Price) -> l.Program:
    """`program` with the phases of transposed convolutions of few results as columns, beside these, where each phase
    sees equally many taps, and that is faster by the model. Points are those at which the first phase begins, so that
    all of them read the same of the image; and another kernel takes what there is of them to where it belongs.

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
        with kernel('z_w', z_w=f32[9, 2, 2, 16]):
            for a0 in free(9):
                for a1 in free(2):
                    for a2 in free(2):
                        for a3 in free(16):
                            in0 = w[a3, a1 + a2 * 2, a0]
                            z_w[a0, a1, a2, a3] = in0
        with kernel('z_phases', z_phases=f32[9, 9, 2]):
            for a0 in free(9):
                for a1 in free(9):
                    for a2 in free(2):
                        for r0, r1 in reduce(2, 16):
                            in0 = x[-r0 + a0, r1] if r0 <= a0 and a0 <= r0 + 7 else 0
                            in1 = z_w[a1, a2, r0, r1]
                            v0 = mul(in0, in1)
                            acc0 <- sum(v0)
                        z_phases[a0, a1, a2] = acc0
        with kernel('z', z=f32[9, 16]):
            for a0 in free(9):
                for a1 in free(16):
                    in0 = z_phases[(a1 + 1) // 2, a0, (a1 + 1) % 2]
                    z[a0, a1] = in0
        return (z,)
    """  # noqa: E501
    return surely(program, log, (PASS, RULE, "otherwise"), beside_results, price)


def beside_results(kernel: l.Kernel, names: Set[str]) -> tuple[l.Kernel, ...] | None:
    """A kernel so: one that stores filters phase by phase, one that stores all phases beside each other, and one that
    takes these apart; None where it is no such convolution.
    """
    given = factors_of(kernel)
    found = _dimensions(kernel, given) if given is not None and len(kernel.stores) == 1 else []
    if given is None or not found:
        return None
    (store,) = kernel.stores
    results = [a for a in kernel.axes if a in given.filters.free]
    phases, turns = [x.phase for x in found], [x.turn for x in found]
    left = [a for a in given.steps if all(a is not x.rests.step for x in found)]
    taps = {x.rests.step: x.tap for x in found}
    stored = _stored_along(kernel, given.filters, taps, [*results, *phases, *turns, *left], names)
    load = l.Load.make(stored.stores[0].buffer, (*results, *phases, *turns, *left), ())
    factors = {given.image: _read(given.image, found), given.filters: load}
    sums = l.Reduce.make(given.reduce.monoid, (*turns, *left), tuple(substitute(x, factors) for x in given.args))
    among = {x.rests.point: x.among for x in found}
    axes = [*(among.get(a, a) for a in kernel.axes if a not in results), *results, *phases]
    place = l.Buffer(
        unused(f"{kernel.name}_phases", {*names, stored.name}),
        Type(store.buffer.type.dtype, tuple(a.extent for a in axes)),
    )
    value = _at_points(substitute(store.value, {given.reduce: sums, **dict(_guarded(store, given, found))}), found)
    whole = with_plain_axes(place.name, axes, [l.Store(place, tuple(axes), value)], kernel)
    at = {a: e for x in found for a, e in x.at.items()}
    there = l.Load.make(place, tuple(at.get(a, a) for a in axes), ())
    last = l.Kernel(kernel.name, kernel.axes, (l.Store(store.buffer, store.index, there),), kernel.source)
    return stored, whole, last


def _dimensions(kernel: l.Kernel, given: Factors) -> list[_Dimension]:
    """Those of an image of few results that have phases, each of which sees equally many taps; none where some do not,
    or where a point is stored at more than one place.
    """
    rests = [at_rests(e, kernel.axes, given.steps) for e in quotients(given.image)]
    found = [x for x in rests if x is not None]
    if len(found) < len(rests) or not has_few(kernel, given.filters):
        return []
    if any(x.dilation > 1 or x.step.extent % x.stride or x.point in given.filters.free for x in found):
        return []
    (store,) = kernel.stores
    once = all(sum(e is x.point for e in store.index) == 1 for x in found)
    return list(map(_dimension, found)) if once else []


def _read(image: Any, found: Sequence[_Dimension]) -> l.Load:
    """What is read of an image: 0 outside of it, where all of its guards on points that have phases say the same."""
    gone = {a for x in found for a in (x.rests.point, x.rests.step)}
    places = dict(zip(quotients(image), (x.place for x in found), strict=True))
    sizes = dict(zip(image.index, image.buffer.type.static_shape, strict=True))
    ends = (end for e, place in places.items() for end in (place, sizes[e] - 1 - place))
    inside = (*(e for e in image.inside if not e.free & gone), *ends)
    return l.Load.make(image.buffer, tuple(places.get(e, e) for e in image.index), inside)


def _guarded(store: l.Store, given: Factors, found: Sequence[_Dimension]) -> Iterator[tuple[l.Load, l.Load]]:
    """What else is loaded at points, with that at the points of phases: 0 where there are none."""
    for x in topological([store.value], lambda x: x is given.reduce):
        if isinstance(x, l.Load):
            points = [d for d in found if d.rests.point in x.free]
            more = tuple(e for d in points for e in (d.point, d.rests.point.extent - 1 - d.point))
            y = _at_points(x, found)
            yield x, l.Load.make(y.buffer, y.index, (*y.inside, *more))


def _at_points(term: Any, found: Sequence[_Dimension]) -> Any:
    return substitute(term, {x.rests.point: x.point for x in found})


def _stored_along(
    reader: l.Kernel, filters: l.Load, taps: Mapping[Any, Any], axes: Sequence[Any], names: Set[str]
) -> l.Kernel:
    """What stores filters at `taps` along axes, in this order."""
    value = l.Load.make(filters.buffer, *(_moved(x, taps) for x in (filters.index, filters.inside)))
    place = l.Buffer(
        unused(f"{reader.name}_{filters.buffer.name}", {*names}), Type(filters.dtype, tuple(a.extent for a in axes))
    )
    return with_plain_axes(place.name, axes, [l.Store(place, tuple(axes), value)], reader)


def _moved(places: Sequence[IntExpr], taps: Mapping[Any, Any]) -> tuple[IntExpr, ...]:
    return tuple(substitute(e, taps) if isinstance(e, Expr) else e for e in places)
