"""Images under windows: operands of products that steps move, at places that division finds, or that are looked up, as
where pixels are shuffled, repeated or reflected around a convolution. Points side by side read no box of such a one,
but they do of the image at the places that points and steps add up to.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, FloorDiv, IntExpr, Loaded, Mod, Sum, Var, terms_of
from terrazzo.ir.node import topological, transform


def strewn(x: Any, steps: Sequence[Any]) -> bool:
    """Whether steps move what is divided or looked up to find a place of an operand. (Digits of a point alone come
    apart, as axes of their own.)
    """
    loads = [y for y in topological([x]) if isinstance(y, l.Load)]
    places = [e for y in loads for e in y.index if isinstance(e, Expr)]
    found = [y.free for y in topological(places) if isinstance(y, FloorDiv | Mod | Loaded)]
    return any(free & {*steps} and free - {*steps} for free in found)


def image(x: Any, axes: Sequence[Any], steps: Sequence[Any]) -> tuple[Any, dict[Var, IntExpr]]:
    """An operand at the places that a window's points and steps add up to, and what each place is; the operand as it
    is, and none, where there is no such image. It has a border where the window reads beyond the tensor. A window may
    go backwards, as those of gradients do; but an image that is 0 where division has a rest goes phase by phase.
    """
    if any(quotients(y) for y in topological([x]) if isinstance(y, l.Load)):
        return x, {}
    found: dict[Any, Any] = {}
    for y in topological([x]):
        if isinstance(y, FloorDiv | Mod | Loaded):
            found |= dict.fromkeys(z for z in topological([y]) if isinstance(z, Sum))
    new: dict[Any, tuple[Var, int, int]] = {}
    first: dict[Var, int] = {}
    for one in found:
        moved = {f: c for c, (f, *more) in one.terms if not more}
        for a, r in product((a for a in axes if a in moved), (r for r in steps if r in moved)):
            g = gcd(moved[a], moved[r])
            s, d = abs(moved[a]) // g, abs(moved[r]) // g
            if isinstance(a.extent, int) and isinstance(r.extent, int) and (a, r) not in new:
                reach = d * (r.extent - 1)
                backwards = moved[a] * moved[r] < 0
                place = Var(l.fresh_name(), s * (a.extent - 1) + reach + 1)
                new[a, r] = place, s, -d if backwards else d
                first[place] = -reach if backwards else 0

    def placed(node: Any) -> Any:
        if isinstance(node, Sum):
            moved = {f: c for c, (f, *more) in node.terms if not more}
            for (a, r), (p, s, d) in new.items():
                if a in moved and r in moved and moved[a] * d == moved[r] * s:
                    node = node + (p + first[p] - a * s - r * d) * (moved[a] // s)
        return node

    there = transform(x, placed) if new else x
    left = there.free
    if any(a in left or r in left for a, r in new):
        return x, {}
    return there, {p: a * s + r * d - first[p] for (a, r), (p, s, d) in new.items()}


def quotients(x: l.Load) -> list[IntExpr]:
    """Places, each the sum of a quotient and multiples, at which a factor is read that is 0 where there is a rest."""
    rests = {f for e in x.inside for factors in terms_of(e) for f in factors if isinstance(f, Mod)}
    return [e for e in x.index if (found := _quotient(e)) is not None and found.a % found.b in rests]


def _quotient(e: IntExpr) -> FloorDiv | None:
    """The quotient of which e is the sum, with multiples; None where it is of none or several."""
    found = [(f, c) for f, c in terms_of(e).items() if any(isinstance(y, FloorDiv) for y in topological(f))]
    (factors, count), *others = found or [((), 0)]
    one = factors[0] if len(factors) == 1 and count == 1 and not others else None
    return one if isinstance(one, FloorDiv) and isinstance(one.b, int) else None


@dataclass(frozen=True)
class Rests:
    """Of a place (point - `dilation` * step + `shift`) // `stride`, as in transposed convolutions, what it is of."""

    point: Any
    step: Any
    shift: int
    stride: int
    dilation: int

    @property
    def common(self) -> int:
        """Points of which one has steps without a rest."""
        return gcd(self.dilation, self.stride)


def at_rests(e: IntExpr, points: Collection[Any], steps: Collection[Any]) -> Rests | None:
    """What a place of a transposed convolution is of; None where it is none of such a one."""
    if (quotient := _quotient(e)) is None:
        return None
    stride = quotient.b
    assert isinstance(stride, int)
    terms = {f: c * stride for f, c in terms_of(e).items() if f != (quotient,)}
    for f, c in terms_of(quotient.a).items():
        terms[f] = terms.get(f, 0) + c
    shift = terms.pop((), 0)
    point: Any = next((x for (x, *more), c in terms.items() if c == 1 and not more and x in points), None)
    step, dilation = next(((x, -c) for (x, *more), c in terms.items() if not more and x in steps), (None, 0))
    if len(terms) > 2 or point is None or dilation < 1 or shift < 0:
        return None
    return Rests(point, step, shift, stride, dilation)


def transposed(x: Any, steps: Collection[Any]) -> bool:
    """Whether an operand is the image of a transposed convolution. It goes phase by phase over boxes, where phases are
    equally long; where they are not, it is faster than by threads that reduce its results on their way, too.
    """
    if not isinstance(x, l.Load) or not (found := quotients(x)):
        return False
    whole = [y for e in found if isinstance(e, Expr) for y in topological([e]) if isinstance(y, FloorDiv)]
    allowed = [-(y.a % y.b) for y in whole]
    allowed += [e for i, n in zip(x.index, x.buffer.type.shape, strict=True) for e in (i, n - 1 - i)]
    rests = [at_rests(e, e.free - {*steps}, steps) for e in found if isinstance(e, Expr)]
    return all(e in allowed for e in x.inside) and all(rests)
