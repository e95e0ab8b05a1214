"""Reductions in a frame of what a thread has in registers: the frame of all of it first, and then sums in that frame.

One state after the other would move the sums whenever the frame grows: for each element as many exponentials as there
are sums and one, each of which waits for the one before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from terrazzo.ir import nest as n
from terrazzo.ir.address import coefficient, mentions
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.ir.types import f32
from terrazzo.rules.loop.attention.multiples import is_value
from terrazzo.rules.loop.precision.relax import LOG2E
from terrazzo.rules.tile.digits import Bindings, Digit
from terrazzo.rules.tile_to_kernel.accumulate import Accumulators
from terrazzo.rules.tile_to_kernel.builder import Builder
from terrazzo.rules.tile_to_kernel.meet import meet
from terrazzo.rules.tile_to_kernel.scope import Scope


class InFrame:
    """Fills the accumulators of a loop whose steps can be taken several times; `write` writes what they compute."""

    def __init__(
        self,
        builder: Builder,
        bindings: Bindings,
        s: n.Loop,
        digits: Sequence[Sequence[Digit]],
        inside: Sequence[IntExpr],
        scope: Scope,
        write: Callable[[Sequence[n.Statement], Scope], None],
    ) -> None:
        every = [d for ds in digits for d in ds]
        self.builder, self.bindings, self.inside, self.scope, self.compute = builder, bindings, inside, scope, write
        self.axes = s.axes
        self.looped = [d for d in every if d.level in ("reg", "frag")]
        self.shared = [d for d in every if d.level in ("lane", "warp", "warpgroup")]
        self.terms = [x for x in s.body if not isinstance(x, n.Accumulate)]
        steps = [x for x in s.body if isinstance(x, n.Accumulate)]
        self.framed = [x for x in steps if x.into.monoid.frame]
        self.others = [x for x in steps if not x.into.monoid.frame]

    def write(self) -> None:
        """All of it."""
        builder, scope = self.builder, self.scope
        builder.peeled(self.looped, self.inside, self.higher)
        bases: dict[Any, Node] = {}
        for x in self.framed:
            (top, *_), (_, rebuild) = scope.env[x.into], growing(x.args[0])
            meet(builder, self.bindings, top, self.shared, x.into.monoid.frame)
            builder.add(l.Store(top, (), rebuild(l.Load(top, ()))))
            bases[x.into] = builder.let(finite(l.Load(top, ())))
        builder.peeled(self.looped, self.inside, partial(self.add_up, bases))
        for x in self.others:
            here = [scope(e) for e in somewhere(x.args[0], self.axes)]
            add = partial(builder.peeled, self.looped, self.inside, partial(self.combine, x))
            builder.where(here, add)
        for x in self.framed:
            for place in scope.env[x.into][1:]:
                meet(builder, self.bindings, place, self.shared)
        for x in self.others:
            meet(builder, self.bindings, scope.env[x.into][0], self.shared, FUNCTIONS[x.into.monoid.name])

    def higher(self) -> None:
        """The frames so far, and those of one more element."""
        for x in self.framed:
            top, (bare, _) = self.scope.env[x.into][0], growing(x.args[0])
            self.builder.add(l.Store(top, (), l.apply(x.into.monoid.frame, l.Load(top, ()), self.scope(bare))))

    def add_up(self, bases: Mapping[Any, Node]) -> None:
        """The sums so far, and what those of one more element are worth in the frame."""
        here, builder = self.scope.inner(), self.builder
        self.compute([x for x in self.terms if self.needed(x)], here)
        for x in self.framed:
            args = here.all(x.args)
            worth = builder.let(exponential(l.apply("sub", args[0], bases[x.into])))
            for place, y in zip(self.scope.env[x.into][1:], args[1:], strict=True):
                term = worth if isinstance(y, l.Literal) and y.value == 1 else l.apply("mul", y, worth)
                builder.add(l.Store(place, (), l.apply("add", l.Load(place, ()), term)))

    def needed(self, x: Any) -> bool:
        """Whether a term is one that what is in a frame is made of."""
        return x.term in topological([a for y in self.framed for a in y.args])

    def combine(self, x: n.Accumulate) -> None:
        """One more element of a reduction that is in no frame."""
        (place,) = self.scope.env[x.into]
        new = x.into.monoid.combine(l.apply, [l.Load(place, ())], self.scope.all(x.args))
        self.builder.add(l.Store(place, (), new[0]))


class StepFrame:
    """Fills the accumulators of reductions in frames from memory: what a thread loads in a step is in one frame, to
    which the sums so far are brought before it is added.
    """

    def __init__(
        self, accumulators: Accumulators, own: Sequence[Any], digits: Sequence[Sequence[Digit]], scope: Scope
    ) -> None:
        self.accumulators, self.builder, self.own, self.scope = accumulators, accumulators.builder, own, scope
        self.times = [d for ds in digits for d in ds if d.level == "time"]
        self.rest = [[d for d in ds if d.level != "time"] for ds in digits]
        self.looped = [d for ds in self.rest for d in ds if d.level in ("reg", "frag")]

    def write(self, steps: Callable[[Sequence[Sequence[Digit]]], None]) -> None:
        """All of it; `steps` goes over the digits inside a step."""
        self.builder.loops([(d.variable, False) for d in self.times], partial(self.step, steps))

    def step(self, steps: Callable[[Sequence[Sequence[Digit]]], None]) -> None:
        builder, at = self.builder, tuple(d.variable for d in self.looped)
        held: dict[Any, tuple[k.Registers, k.Registers]] = {}
        for r in self.own:
            top, kind = self.scope.env[r][0], r.dtype[0]
            new = builder.registers("new", kind, ())
            builder.add(l.Store(new, (), l.Load(top, ())))
            held[r] = builder.registers("score", kind, [d.size for d in self.looped], l.Literal(-math.inf, kind)), new
            self.accumulators.collect[r] = partial(self.keep, r, *held[r])
        steps(self.rest)
        for r, (scores, new) in held.items():
            del self.accumulators.collect[r]
            top, total = self.scope.env[r]
            worth = l.apply("mul", l.Load(total, ()), apart(l.Load(top, ()), l.Load(new, ())))
            builder.add(l.Store(total, (), worth), l.Store(top, (), l.Load(new, ())))
            one = apart(l.Load(scores, at), l.Load(new, ()))
            more = l.Store(total, (), l.apply("add", l.Load(total, ()), one))
            builder.loops([(d.variable, True) for d in self.looped], partial(builder.add, more))

    def keep(self, r: Any, scores: k.Registers, new: k.Registers, args: Sequence[Node]) -> None:
        """One more element: its score, and the frame of all so far."""
        at = tuple(d.variable for d in self.looped)
        self.builder.add(l.Store(scores, at, args[0]))
        self.builder.add(l.Store(new, (), l.apply(r.monoid.frame, l.Load(new, ()), l.Load(scores, at))))


def stepwise(s: n.Loop, body: Sequence[n.Statement]) -> list[Any]:
    """The reductions of a loop that are sums of what each score is worth in a frame; none where loops stand inside."""
    if s.kind != "reduce" or any(isinstance(x, n.Loop) for x in body):
        return []
    steps = [x for x in body if isinstance(x, n.Accumulate) and x.into.monoid.frame]
    ones = [x.into for x in steps if all(isinstance(y, l.Literal) and y.value == 1 for y in x.args[1:])]
    return [r for r in ones if r.monoid.width == 2]


FUNCTIONS = {"sum": "add", "max": "max", "min": "min"}
"""The scalar functions that combine what threads have, by monoid."""


def somewhere(x: Any, axes: Sequence[Any]) -> tuple[IntExpr, ...]:
    """What is >= 0 where a term is something else than 0 for any value of an axis: one that data says is picked."""
    if not isinstance(x, l.Apply) or x.fn.name != "where" or not is_value(x.args[2], 0.0) or len(axes) != 1:
        return ()
    (axis,) = axes
    match x.args[0]:
        case l.Apply(fn=fn, args=(l.Index(value=place), l.Index(value=wanted))) if fn.name == "eq":
            if coefficient(place, axis) == 1 and not mentions(wanted, axis):
                first = substitute(place, {axis: 0})
                return wanted - first, first + (axis.extent - 1) - wanted
    return somewhere(x.args[1], axes)


def growing(x: Any) -> tuple[Any, Callable[[Any], Any]]:
    """What a term is rounded from, and how it is. Roundings keep what is highest, so they are done once, to that: ptxas
    would keep the rounded values beside the others, for which there are no registers.
    """
    before: Any = x.args[0] if isinstance(x, l.Apply) and is_cast(x.fn) else None
    if before is not None and x.dtype.is_float and before.dtype.is_float:
        bare, inner = growing(before)
        return bare, lambda y: l.Apply(x.fn, (inner(y),))
    if isinstance(x, l.Apply) and x.fn.name == "where" and is_value(x.args[2], -math.inf):
        bare, inner = growing(x.args[1])  # which rounds -inf to itself
        return l.apply("where", x.args[0], bare, l.Literal(-math.inf, bare.dtype)), inner
    return x, lambda y: y


def finite(top: l.Load) -> Node:
    """A frame, or, where that is infinite, another one, from which the difference of what is equal is no NaN."""
    zero = l.Literal(0.0, top.dtype)
    return l.apply("where", l.apply("eq", l.apply("sub", top, top), zero), top, zero)


def apart(score: l.Load, top: l.Load) -> Node:
    """What a score is worth in a frame; 1 where it is the highest, an infinite one as well."""
    worth = exponential(l.apply("sub", score, top))
    return l.apply("where", l.apply("eq", score, top), l.Literal(1.0, top.dtype), worth)


def exponential(difference: Any) -> Node:
    """exp of what is not above 0, in 32 bits as exactly as a sum of such that is not below 1 shows."""
    if difference.dtype is not f32:
        return l.apply("exp", difference)
    return l.apply("approx_exp2", l.apply("mul", difference, l.Literal(LOG2E, f32)))


def twice(s: n.Loop, body: Sequence[n.Statement], digits: Sequence[Sequence[Digit]]) -> bool:
    """Whether some reduction of a loop is in a frame, and a thread has all that its steps take in registers."""
    framed = any(r.monoid.frame for r in s.carried)
    plain = all(isinstance(x, n.Accumulate | n.Let) for x in body)
    loads = any(isinstance(x, n.Let) and isinstance(x.term, l.Load) for x in body)
    known = all(isinstance(r, l.Reduce) and (r.monoid.frame or r.monoid.name in FUNCTIONS) for r in s.carried)
    return framed and plain and known and not loads and all(d.level != "time" for ds in digits for d in ds)
