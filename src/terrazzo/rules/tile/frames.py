"""Sums in a moving frame: what weighs a product's values is exp(score - maximum), and the maximum is not known yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from terrazzo.ir.contraction import Contraction, operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.ir.plan import Frame, Plan, Product
from terrazzo.rewrite.rule import need, rule
from terrazzo.rules.tile.draft import Draft

EXPONENTIALS = ("exp", "exp2", "approx_exp2")
"""The functions f for which f(a - b) is f(a - c) * f(c - b)."""


@dataclass(frozen=True)
class Framed:
    """A weight: `rounded` is what the product takes, made of `weight` = f(`score` - `top`), or of f of a multiple."""

    rounded: Node
    weight: l.Apply
    score: Node
    top: l.Reduce

    def of(self, difference: Node) -> Node:
        """What a difference of scores weighs."""
        (inner,) = self.weight.args
        if inner.fn.name == "mul":  # type: ignore[attr-defined]
            _, c = inner.args  # type: ignore[attr-defined]
            difference = l.apply("mul", difference, c)
        return l.Apply(self.weight.fn, (difference,))


def framed(draft: Draft, product: Product) -> Framed | None:
    """The weight of a product's computed factor, where it is one of a moving frame."""
    return weight(draft.products[product.sites[0]])


def weight(c: Contraction) -> Framed | None:
    """The weight among a contraction's factors."""
    for factor in c.factors:
        tops = [x for x in reductions(factor) if x.monoid.name == "max"]
        if len(tops) != 1:
            continue
        for e in topological([factor], stop=lambda x: isinstance(x, l.Reduce)):
            if not isinstance(e, l.Apply) or e.fn.name not in EXPONENTIALS:
                continue
            match e.args[0]:
                case l.Apply(fn=times, args=(inner, l.Literal(value=by))) if times.name == "mul" and by > 0:
                    pass
                case inner:
                    pass
            match inner:
                case l.Apply(fn=minus, args=(score, top)) if minus.name == "sub" and top is tops[0]:
                    return Framed(operand(factor), e, score, tops[0])
    return None


def reductions(term: Node) -> list[l.Reduce]:
    """The outermost reductions in a term."""
    found = topological([term], stop=lambda x: isinstance(x, l.Reduce))
    return [x for x in found if isinstance(x, l.Reduce)]


def at(reduce: l.Reduce, axis: Any) -> Node:
    """What a reduction over one axis takes in, at another axis of the same extent."""
    (own,), (arg,) = l.open_binder(reduce)
    found: Node = substitute(arg, {own: axis})
    return found


@rule(keys=(Plan,))
def move_frames(plan: Plan, draft: Draft) -> Plan | None:
    """The maximum of the scores so far is the frame of the sums. When it grows, they are multiplied by what the old one
    is worth in the new one.
    """
    chained = [p for p in plan.all(Product) if "values" in (p.a, p.b)]
    if plan.all(Frame) or not chained:
        return None
    (product,) = chained
    inside = {x for f in draft.products[product.sites[0]].factors for x in reductions(f)}
    others = inside - {c.reduce for c in draft.products.values()}
    if not others:
        return None
    found = framed(draft, product)
    need(
        found is not None and others == {found.top},
        f"{product.sites[0]}: its factor holds a reduction that is no frame",
    )
    assert found is not None
    (axis,) = draft.products[product.sites[0]].reduce.axes
    need(len(found.top.axes) == 1 and at(found.top, axis) is found.score, "the frame is the maximum of other scores")
    names = {r: name for name, r in draft.names.items()}
    totals = [
        name
        for r, name in names.items()
        if isinstance(r, l.Reduce) and r.monoid.name == "sum" and len(r.axes) == 1 and at(r, axis) is found.weight
    ]
    need(len(totals) <= 1, "the weights are summed more than once")
    return plan.plus(Frame(names[found.top], product.sites[0], totals[0] if totals else ""))


RULES = (move_frames,)
