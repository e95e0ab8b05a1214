"""Sums in a moving frame: what weighs a product's values is exp(score - maximum), and the maximum is not known yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from terrazzo.collector import remembered
from terrazzo.hw.products import matrix, warps
from terrazzo.ir.contraction import Contraction, operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.ir.plan import Agent, Frame, Order, Plan, Product
from terrazzo.rewrite.rule import need, rule
from terrazzo.rules.tile.digits import Bindings
from terrazzo.rules.tile.draft import Draft
from terrazzo.rules.tile.handed import divided, summed
from terrazzo.rules.tile.rings import axis_called

OF_A_WARP = ("lane", "reg", "frag")
"""The levels that divide a warp's part of an axis."""
EXPONENTIALS = ("exp", "exp2", "approx_exp2")
"""The functions f for which f(a - b) is f(a - c) * f(c - b)."""
ABOVE = 8
"""How far above the frame a score may be before the frame moves: 2^8 and e^8 are ordinary numbers of 16 bits."""


@dataclass(frozen=True)
class Framed:
    """A weight: `rounded` are what the product takes, one or parts, made of `weight` = f(`score` - `top`), or of f of a
    multiple: of the difference times `by`, or, where it was multiplied `early`, of the difference of both times `by`.
    """

    rounded: tuple[Node, ...]
    weight: l.Apply
    score: Node
    top: l.Reduce
    by: l.Literal | None = None
    early: bool = False

    @property
    def whole(self) -> Node:
        """What is rounded: the weight, or what it is multiplied by besides."""
        return _whole(self.rounded[0])

    def of(self, difference: Node) -> Node:
        """What a difference of scores weighs."""
        return l.Apply(self.weight.fn, (self.times(difference),))

    def times(self, x: Any) -> Any:
        """x times `by`."""
        return l.apply("mul", x, self.by) if self.by is not None else x

    def base(self, top: Node) -> Node:
        """What is subtracted from scores to weigh them, given the maximum."""
        return self.times(top) if self.early else top

    def above(self, score: Node, base: Node) -> Node:
        """What a score weighs, given what is subtracted."""
        return l.Apply(self.weight.fn, (self.height(score, base),))

    def height(self, score: Node, base: Node) -> Node:
        """How far a score is above what is subtracted: one multiplication and addition in one, where `early`."""
        found: Node = l.apply("sub", self.times(score), base) if self.early else self.times(l.apply("sub", score, base))
        return found

    def between(self, base: Node, new: Node) -> Node:
        """What sums are worth where something else is subtracted."""
        less = l.apply("sub", base, new)
        return l.Apply(self.weight.fn, (less if self.early else self.times(less),))


def framed(draft: Draft, product: Product) -> Framed | None:
    """The weight of a product's computed factor, where it is one of a moving frame."""
    return weight(draft.products[product.sites[0]])


@remembered
def weight(c: Contraction) -> Framed | None:
    """The weight among a contraction's factors."""
    for factor in c.factors:
        tops = [x for x in reductions(factor) if x.monoid.name == "max"]
        if len(tops) != 1:
            continue
        for e in topological([factor], stop=lambda x: isinstance(x, l.Reduce)):
            if not isinstance(e, l.Apply) or e.fn.name not in EXPONENTIALS:
                continue
            inner, by = _multiple(e.args[0])
            match inner:
                case l.Apply(fn=minus, args=(score, top)) if minus.name == "sub" and top is tops[0]:
                    return Framed(computed(c), e, score, tops[0], by)
                case l.Apply(fn=minus, args=(one, other)) if minus.name == "sub" and by is None:
                    (score, by), (top, same) = _multiple(one), _multiple(other)
                    if by is not None and by is same and top is tops[0]:
                        return Framed(computed(c), e, score, tops[0], by, early=True)
    return None


@remembered
def computed(c: Contraction) -> tuple[Node, ...]:
    """The factor of a contraction that is made of reductions, as the product takes it: one term, or its parts, of which
    each is made of what those before leave. Nothing where no factor is, or both are.
    """
    sides = [[operand(pair[side]) for pair in c.terms] for side in (0, 1)]
    made = [x for x in sides if reductions(x[0])]
    if len(made) != 1:
        return ()
    (found,) = made
    return tuple(x for x in topological(found, stop=lambda x: isinstance(x, l.Reduce)) if x in found)


def _whole(x: Any) -> Node:
    found: Node = x.args[0] if isinstance(x, l.Apply) and is_cast(x.fn) else x
    return found


def _multiple(x: Any) -> tuple[Any, l.Literal | None]:
    """x as a positive multiple of something."""
    match x:
        case l.Apply(fn=times, args=(inner, l.Literal(value=value) as by)) if times.name == "mul" and value > 0:
            return inner, by
    return x, None


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
    is worth in the new one. On the instructions of warpgroups that is done only where some lane has a score that is far
    above the frame: lanes need not meet in the other steps, so weights are found sooner, and sums stay as they are.
    """
    chained = [p for p in plan.all(Product) if p.made]
    if plan.all(Frame) or not chained or not plan.all(Order):
        return None
    inside = {x for p in chained for f in draft.products[p.sites[0]].factors for x in reductions(f)}
    others = inside - {c.reduce for c in draft.products.values()}
    if not others:
        return None
    need(len(chained) == 1, "several products take what is made of the first ones, and their frame moves with one")
    (product,) = chained
    found = framed(draft, product)
    need(
        found is not None and others == {found.top},
        f"{product.sites[0]}: its factor holds a reduction that is no frame",
    )
    assert found is not None
    *rounds, axis = draft.products[product.sites[0]].reduce.axes
    need(not rounds, f"{product.sites[0]}: a frame goes along in one round of steps")
    need(len(found.top.axes) == 1 and at(found.top, axis) is found.score, "the frame is the maximum of other scores")
    _rows_lie_alike(plan, draft, product)
    names = {r: name for name, r in draft.names.items()}
    totals = [
        name
        for r, name in names.items()
        if isinstance(r, l.Reduce) and r.monoid.name == "sum" and len(r.axes) == 1 and at(r, axis) is found.weight
    ]
    need(len(totals) <= 1, "the weights are summed more than once")
    above = ABOVE if warps(matrix(product.on)) > 1 and not product.promote else 0
    return plan.plus(Frame(names[found.top], product.sites[0], totals[0] if totals else "", above))


def _rows_lie_alike(plan: Plan, draft: Draft, product: Product) -> None:
    """Declines where a thread has sums of other rows than those whose weights it knows."""
    bindings = Bindings(draft.schedule, plan, plan.all(Agent)[-1])
    (inner, *_), name = summed(draft, product.sites[0]), product.rows
    rows = axis_called(draft, name)
    sites = [draft.site(x) for x in (product.sites[0], inner)]
    of_warps = [divided(draft, rows, site) for site in sites]
    inside = [[d.role for d in bindings.digits(name, s, rows.extent) if d.level in OF_A_WARP] for s in sites]
    where = f"otherwise in its sums than in those of {inner}"
    need(
        of_warps[0] == of_warps[1] and inside[0] == inside[1],
        f"{product.sites[0]}: its frame moves with rows ({name}), which lie {where}",
    )
    *_, steps = draft.products[product.sites[0]].reduce.axes
    shared = [divided(draft, steps, site) for site in sites]
    need(shared[0] == shared[1], f"{product.sites[0]}: warps share the steps of its frame {where}")


RULES = (move_frames,)
