"""Weights of scores as multiples of what they are in the frame of the scores' own maximum.

    exp(s - t) = exp(s - m) exp(m - t),   m = max(s)

for any t that every key of a row shares: the maximum itself, or that of the scores and a sink, their logarithm of a sum
of exponentials, or nothing. Sums of such weights are the same multiple of the frame's sum. So whoever divides by one,
or writes one as an exponential of a difference, or adds a logit to a row, has attention in one frame.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import Var, at_least
from terrazzo.ir.monoid import monoid
from terrazzo.ir.node import substitute, topological, transform
from terrazzo.rules.loop.folding.fold import bounded, folded

FEW = 8
"""Keys beside those of a product that are combined one by one, at most."""


def plain(x: Any, keys: Any) -> Any:
    """A term without what is rounded to 16 bits on the way to 32, and with reductions over several pieces of an axis,
    as of the scores of so many keys and what was concatenated with them, apart.
    """
    return folded(transform(x, lambda y: _pieces(y, keys) if isinstance(y, l.Reduce) else _plain(y)))


def _plain(x: Any) -> Any:
    if isinstance(x, l.Load) and x.inside:
        return l.Load.make(x.buffer, x.index, tuple(e for e in x.inside if not at_least(e, 0)))
    if not isinstance(x, l.Apply) or not is_cast(x.fn) or not x.dtype.is_float:
        return x
    (inner,) = x.args
    if isinstance(inner, l.Apply) and inner.fn.name == "where":
        chosen = (_plain(l.Apply(x.fn, (a,))) for a in inner.args[1:])
        return l.apply("where", inner.args[0], *chosen)
    if isinstance(inner, l.Apply) and is_cast(inner.fn) and inner.dtype.is_float and inner.dtype.size == 2:
        wide: Any = inner.args[0]
        return wide if wide.dtype is x.dtype else x
    return x


def _pieces(x: l.Reduce, keys: Any) -> Any:
    """A reduction over an axis as what combines that over the keys, its first values, and what is at its few last ones.
    Others are left alone: a product whose axis is short may hold many, one in the other.
    """
    if len(x.axes) > 1 or x.monoid.width > 1 or not isinstance(x.axes[0].extent, int):
        return x
    if not isinstance(keys, int) or not keys < x.axes[0].extent <= keys + FEW:
        return x
    (axis,), (body,) = l.open_binder(x)
    for y in topological([body], stop=lambda y: isinstance(y, l.Reduce)):
        if not isinstance(y, l.Apply) or y.fn.name != "where" or (found := bounded(y.args[0])) is None:
            continue
        v, (first, last), (low, high) = found
        if v is not axis or first != 0 or last + 1 != keys:
            continue
        begin = Var(l.fresh_name(), last + 1)
        parts = [l.Reduce.make(x.monoid, (begin,), (folded(_again(substitute(body, {axis: begin}))),))]
        parts += [_again(folded(substitute(body, {axis: n}))) for n in range(low, high + 1)]
        return reduce(lambda a, b: x.monoid.combine(l.apply, (a,), (b,))[0], parts)
    return x


def _again(x: Any) -> Any:
    """A term that was folded, and so may round what it did not before."""
    return transform(folded(x), _plain)


def apart(x: Any, axis: Var) -> tuple[Any, Any]:
    """A difference as what depends on an axis, and the sum of all that is subtracted from it and does not."""
    if isinstance(x, l.Apply) and x.fn.name == "sub" and axis not in x.args[1].free:
        score, t = apart(x.args[0], axis)
        return score, x.args[1] if t is None else l.apply("add", t, x.args[1])
    return x, None


def _summands(t: Any) -> list[Any]:
    """What a term adds up, in order."""
    if isinstance(t, l.Apply) and t.fn.name == "add":
        return [y for x in t.args for y in _summands(x)]
    return [] if t is None else [t]


@dataclass
class Known:
    """What reductions over an axis are, given that of `scores`: the `highest`, the `sums` of weights in its frame, and
    whether there is `nothing` but -inf. `found` has those that were asked for.
    """

    axis: Var
    score: Any
    highest: Any
    sums: Any
    nothing: Any
    kept: frozenset[Any]
    found: dict[Any, Any] = field(default_factory=dict)

    def worth(self, t: Any) -> Any:
        """What weights exp(score - t) are as multiples of those in the frame; None where they are the same."""
        if t is self.top:
            return None
        above = self.highest
        for part in _summands(t):  # one by one: beside a highest score of -1e9 the logarithm of a sum is lost
            above = l.apply("sub", above, self.rewritten(part))
        return l.apply("exp", above)

    @property
    def top(self) -> Any:
        """The highest score as others have it."""
        return l.Reduce.make(monoid("max"), (self.axis,), (self.score,))

    @property
    def finite(self) -> Any:
        """The highest score where it is a number, else 0: what logarithms of sums of exponentials are taken of."""
        no = l.apply("eq", l.apply("abs", self.top), l.Literal(math.inf, self.score.dtype))
        return l.apply("where", no, l.Literal(0.0, self.score.dtype), self.top)

    def rewritten(self, x: Any) -> Any:
        """A term with what is known for its reductions."""
        inside = topological([x], stop=lambda y: isinstance(y, l.Reduce))
        new = {r: self.value(r) for r in inside if isinstance(r, l.Reduce) and r not in self.kept}
        return substitute(x, {r: y for r, y in new.items() if y is not None})

    def value(self, r: l.Reduce) -> Any:
        """A reduction, as it is known; None where it is not."""
        if r not in self.found:
            value = self._value(r)
            if value is not None:
                self.found[r] = value
        return self.found.get(r)

    def _value(self, r: l.Reduce) -> Any:
        if len(r.axes) > 1 or len(r.args) > 1 or r.axes[0].extent != self.axis.extent:
            return None
        (own,), (arg,) = l.open_binder(r)
        body: Any = substitute(arg, {own: self.axis})
        if r.monoid.name == "all":
            none = l.apply("eq", self.score, l.Literal(-math.inf, self.score.dtype))
            return self.nothing if body is none else None
        exp = r.monoid.name == "sum" and isinstance(body, l.Apply) and body.fn.name == "exp"
        score, t = apart(body.args[0] if exp else body, self.axis)
        if score is not self.score or (not exp and r.monoid.name != "max"):
            return None
        if exp and t is self.finite:
            no = l.apply("eq", l.apply("abs", self.highest), l.Literal(math.inf, self.sums.dtype))
            return l.apply("where", no, l.apply("exp", self.highest), self.sums)
        if exp:
            worth = self.worth(t)
            return self.sums if worth is None else l.apply("mul", self.sums, worth)
        return self.highest if t is None else l.apply("sub", self.highest, self.rewritten(t))
