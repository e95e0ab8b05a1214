"""Which steps a mask leaves anything of: those that no point of a tile can reach are not visited, and only those that a
mask cuts test it. From index ranges; nobody says "causal".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.collector import remembered
from terrazzo.ir.address import coefficient, evaluate, mentions
from terrazzo.ir.contraction import Contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import Expr, FloorDiv, IntExpr, Loaded, Var, at_least, terms_of
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.ir.plan import Agent, Order, Plan, Product, Reach
from terrazzo.ir.show_expr import show_expr
from terrazzo.rewrite.rule import rule
from terrazzo.rules.loop.folding.fold import negated
from terrazzo.rules.tile.draft import Draft, axis_name
from terrazzo.rules.tile.frames import computed, weight
from terrazzo.rules.tile.lengths import Blocks, length, without_blocks
from terrazzo.rules.tile.rings import axis_called, operand_text, overlaps, rounds, steps

PLACES = 5
"""Places at which bounds of what rows see are compared."""
TOLD = 4096
"""Points of the axes that may say where steps end."""
SAMPLED = 32
"""Rows of which is asked how much they see, for a price."""

Either = tuple[IntExpr, ...]
"""What is one expression, or several of which one is >= 0."""


@dataclass(frozen=True)
class Mask:
    """A term that is `bare` where of each of `inside` one at least is >= 0, and `nothing` elsewhere.

    `upper` is the last value of the steps' axis that is inside and `lower` the first, as far as they are expressions of
    the other axes. Besides, what data says of `blocks` must hold.
    """

    bare: Node
    inside: tuple[Either, ...]
    nothing: float
    upper: IntExpr | None
    lower: IntExpr | None
    blocks: Blocks | None = None


def mask(term: Node, nothing: float, axis: Any, blocked: bool = True) -> Mask:
    """A term apart from the predicates on indices that make it nothing (-inf of a score, 0 of a factor); and apart from
    what is said of blocks, where tiles are `blocked`.
    """
    term, blocks = without_blocks(term, nothing, axis) if blocked else (term, None)
    bare, found = _apart(term, nothing)
    inside = tuple(tuple(_undivided(e, axis) for e in either) for either in found)
    uppers = [[e + axis for e in either if coefficient(e, axis) == -1] for either in inside]
    lowers = [axis - e for e, *more in inside if coefficient(e, axis) == 1 and not more]
    upper = _nearest([_most(x) for x, either in zip(uppers, inside, strict=True) if len(x) == len(either)], 1)
    lower = _nearest(lowers, -1)
    return Mask(bare, inside, nothing, upper, lower, blocks)


def _most(bounds: Sequence[IntExpr]) -> IntExpr | None:
    """What is no less than any of some bounds: their sum, where none is negative."""
    total: IntExpr = sum(bounds[1:], start=bounds[0])
    return total if len(bounds) == 1 or all(at_least(e, 0) for e in bounds) else None


def _undivided(e: IntExpr, axis: Any) -> IntExpr:
    """e >= 0 as a bound of an axis where it is one of a quotient: x // c <= a where x <= a c + c - 1."""
    for atoms, factor in terms_of(e).items():
        q: Any = atoms[0] if len(atoms) == 1 else 0
        if not isinstance(q, FloorDiv) or not isinstance(q.b, int):
            continue
        rest = e - q * factor
        if factor in (1, -1) and mentions(q, axis) and not mentions(rest, axis):
            return rest * q.b + q.a if factor == 1 else rest * q.b + (q.b - 1) - q.a
    return e


def _nearest(bounds: Sequence[IntExpr | None], sign: int) -> IntExpr | None:
    """Of several bounds, of which each holds, that which is nearest at some places."""
    plain = [
        e
        for e in bounds
        if e is not None and not any(isinstance(x, Loaded) for x in topological([e] if isinstance(e, Expr) else []))
    ]

    def far(e: IntExpr) -> int:
        axes = e.free if isinstance(e, Expr) else ()
        return sign * sum(int(evaluate(e, {v: int(v.extent * n // PLACES) for v in axes})) for n in range(PLACES))

    return min(plain, key=far, default=None)


def _apart(x: Any, nothing: float) -> tuple[Any, tuple[Either, ...]]:
    if not isinstance(x, l.Apply):
        return x, ()
    if x.fn.name == "where" and _is(x.args[1], nothing) and (seen := negated(x.args[0])) is not None:
        x = l.apply("where", seen, x.args[2], x.args[1])
    if x.fn.name == "where" and _is(x.args[2], nothing):
        (some, rest), (bare, inside) = _parts(x.args[0]), _apart(x.args[1], nothing)
        if not some:
            return x, ()
        return (l.apply("where", rest, bare, x.args[2]) if rest is not None else bare), (*some, *inside)
    if x.fn.name == "add" and nothing:
        for one, other in (x.args, x.args[::-1]):
            if not isinstance(other, l.Apply) or other.fn.name != "where" or not _is(other.args[1], 0.0):
                continue
            if _is(other.args[2], nothing) and (found := conditions(other.args[0])) is not None:
                bare, inside = _apart(one, nothing)
                return bare, (*found, *inside)
    if not nothing and (is_cast(x.fn) or x.fn.name == "mul"):
        apart = [_apart(a, nothing) for a in x.args]
        inside = tuple(e for _, found in apart for e in found)
        return (l.Apply(x.fn, tuple(bare for bare, _ in apart)) if inside else x), inside
    return x, ()


def _is(x: Any, value: float) -> bool:
    return isinstance(x, l.Literal) and not isinstance(x.value, bool) and x.value == value


def _parts(x: Any) -> tuple[tuple[Either, ...], Any]:
    """What of a predicate are expressions that are all >= 0, and the rest of it, if there is one."""
    if (found := conditions(x)) is not None:
        return found, None
    if not isinstance(x, l.Apply) or x.fn.name != "and_":
        return (), x
    (some, one), (more, other) = map(_parts, x.args)
    both = [rest for rest in (one, other) if rest is not None]
    return (*some, *more), l.apply("and_", *both) if len(both) > 1 else both[0]


def conditions(x: Any) -> tuple[Either, ...] | None:
    """A predicate as expressions that are all >= 0, or of which one is; None where it is no such thing."""
    if isinstance(x, l.Literal):
        return () if x.value is True else None
    if not isinstance(x, l.Apply):
        return None
    if x.fn.name == "and_":
        a, b = map(conditions, x.args)
        return None if a is None or b is None else (*a, *b)
    if x.fn.name == "or_":
        a, b = map(conditions, x.args)
        return ((*a[0], *b[0]),) if a is not None and b is not None and len(a) == len(b) == 1 else None
    if x.fn.name == "eq":
        one, other = map(_index, x.args)
        return None if one is None or other is None else ((one - other,), (other - one,))
    if x.fn.name in ("le", "lt", "ge", "gt"):
        small, large = x.args if x.fn.name in ("le", "lt") else x.args[::-1]
        more = _index(large)
        inner = small.args[0] if isinstance(small, l.Apply) and small.fn.name == "abs" else small
        less: Any = _index(inner)
        if more is None or less is None:
            return None
        least = more - (1 if x.fn.name in ("lt", "gt") else 0)
        return ((least - less,), (least + less,)) if inner is not small else ((least - less,),)
    return None


def _index(x: Any) -> IntExpr | None:
    """A term of whole numbers as an index expression."""
    if isinstance(x, l.Index):
        return x.value
    if isinstance(x, l.Literal) and isinstance(x.value, int) and not isinstance(x.value, bool):
        return x.value
    if isinstance(x, l.Apply) and x.fn.name in ("add", "sub") and not x.dtype.is_float:
        a, b = map(_index, x.args)
        if a is not None and b is not None:
            return a + b if x.fn.name == "add" else a - b
    return None


def masked(draft: Draft, product: Product) -> Mask | None:
    """What hides parts of a product's computed factor."""
    c = draft.products[product.sites[0]]
    found = hidden(c)
    whole = found is None or found.blocks is None or _blocked(draft, product, found.blocks)
    return found if whole else hidden(c, blocked=False)


def _blocked(draft: Draft, product: Product, blocks: Blocks) -> bool:
    """Whether what is said of blocks is said of all of a step of a tile."""
    rows, site = axis_called(draft, product.rows), draft.site(product.sites[0])
    *_, axis = draft.products[product.sites[0]].reduce.axes
    places = [e for x in blocks.loads for e in x.index if mentions(e, rows)]
    over = {e.b if isinstance(e, FloorDiv) and e.a is rows else 1 for e in places}
    sizes = [blocks.size % draft.length(axis, site), *(n % draft.length(rows, site) for n in over)]
    return not any(sizes)


@remembered
def hidden(c: Contraction, blocked: bool = True) -> Mask | None:
    """What hides parts of a contraction's computed factor: of its scores, where it is weighted by them; of itself,
    before it is rounded, where it is in no frame.
    """
    *rounds, axis = c.reduce.axes
    if (found := weight(c)) is not None:
        return None if rounds else mask(found.score, -math.inf, axis, blocked)
    if not (parts := computed(c)):
        return None
    term: Any = parts[0]
    casts = isinstance(term, l.Apply) and is_cast(term.fn)
    wide = casts and term.args[0].dtype is c.reduce.dtype
    return mask(term.args[0] if wide else term, 0.0, axis)


def share(c: Contraction, rows: Any) -> float:
    """How much of a contraction's steps a mask leaves, on average over the rows."""
    (*_, axis), found = c.reduce.axes, hidden(c)
    if found is None or not isinstance(axis.extent, int) or not isinstance(rows.extent, int):
        return 1.0
    bounds = [
        e if grows(e, rows) and not (getattr(e, "free", frozenset()) - {rows}) else None
        for e in (found.lower, found.upper)
    ]
    places = [rows.extent * (2 * n + 1) // (2 * SAMPLED) for n in range(SAMPLED)]
    low, high = (
        [int(evaluate(e, {rows: p})) if e is not None else other for p in places]
        for e, other in zip(bounds, (0, axis.extent - 1), strict=True)
    )
    left = [max(min(b, axis.extent - 1) - max(a, 0) + 1, 0) for a, b in zip(low, high, strict=True)]
    return sum(left) / (len(left) * axis.extent)


@dataclass(frozen=True)
class Visits:
    """The steps a tile visits: from `since` on, or from the first where that is negative, and those before `until`, as
    far as there are such; of these no more than hold the `length` that data says, and those from block number `first`
    on and before block number `last`, which are so many steps `each`.
    """

    since: IntExpr | None
    until: IntExpr
    length: Node | None = None
    first: Node | None = None
    last: Node | None = None
    each: int = 1


def last_step(c: Contraction, outside: Collection[Any]) -> IntExpr | None:
    """The condition, which is >= 0, under which a factor that is loaded is not 0: that steps of the first axis are no
    later than axes `outside` of tiles say. None where there is no such one, or several. (Where a tensor ends is none:
    a border is few steps.)
    """
    first, *_ = c.reduce.axes
    found: Any = {e for x in c.operands if isinstance(x, l.Load) for e in x.inside if coefficient(e, first) == -1}
    for x in c.operands:
        if isinstance(x, l.Load):
            found -= {n - 1 - i for i, n in zip(x.index, x.buffer.type.shape, strict=True)}
    ends = [e for e in found if e.free <= {first, *outside}]
    return ends[0] if len(ends) == 1 and math.prod(a.extent for a in ends[0].free - {first}) <= TOLD else None


def steps_taken(c: Contraction, end: IntExpr) -> list[int]:
    """How many steps of the first axis there are by such a condition, for each point of the axes that it knows."""
    first, *_ = c.reduce.axes
    until: Any = end + first + 1
    axes = [*getattr(until, "free", ())]
    every = (dict(zip(axes, at, strict=True)) for at in itertools.product(*(range(a.extent) for a in axes)))
    return [min(max(int(evaluate(until, at)), 0), first.extent) for at in every]


@dataclass(frozen=True)
class End:
    """The steps that there are: those for which `inside` is >= 0, which an axis is in, are those before `until`."""

    axis: Any
    inside: IntExpr
    until: IntExpr


def ends_early(draft: Draft) -> End | None:
    """Where the steps of a product end of what a warp of its own loads: those beyond are of zeros alone. None where all
    steps are visited.
    """
    roles = dict(draft.schedule.options("roles"))
    if len(draft.products) != 1 or not roles or roles.get("turns"):
        return None
    ((name, c),) = draft.products.items()
    outside = [a for a in draft.kernel.axes if a not in draft.tiled]
    if (end := last_step(c, outside)) is None or not (loops := steps(draft)):
        return None
    (axis, factor), *inner = loops
    if axis is not c.reduce.axes[0] or factor.size != axis.extent or draft.length(axis, draft.site(name)) != 1:
        return None
    return End(axis, end, (end + axis + 1) * math.prod(f.size for _, f in inner))


def visited(
    draft: Draft, product: Product, rows: Any, first: IntExpr, size: int, step: int, count: int
) -> Visits | None:
    """Which steps a tile visits whose `size` rows begin at `first`: None where that may be all of them."""
    found = masked(draft, product)
    *_, axis = draft.products[product.sites[0]].reduce.axes
    around = {a for a, _ in rounds(draft)}
    if found is None or any(isinstance(e, Expr) and e.free & around for e in (found.upper, found.lower)):
        return None
    until: IntExpr = count
    since: IntExpr | None = None
    if grows(found.upper, rows):
        until = substitute(found.upper, {rows: first + (size - 1)}) // step + 1
        until = until if at_least(until, 0) and not at_least(until - count, 0) else count
    if grows(found.lower, rows):
        since = substitute(found.lower, {rows: first}) // step
        since = since if not at_least(-since, 0) and at_least(count - 1 - since, 0) else None
    told = _told(draft, product, axis, rows) if since is None else None
    if (blocks := found.blocks) is not None:
        begin, end = (substitute(x, {rows: first}) if x is not None else None for x in (blocks.first, blocks.last))
        return Visits(since, until, told, begin, end, blocks.size // step)
    return Visits(since, until, told) if since is not None or until != count or told is not None else None


def _told(draft: Draft, product: Product, axis: Any, rows: Any) -> Node | None:
    """The length along the steps that data says: of scores in a frame, whose steps all warps walk together."""
    c = draft.products[product.sites[0]]
    framed = weight(c)
    alone = not draft.schedule.directive("roles") and not rounds(draft)
    return length(framed.score, -math.inf, axis, rows) if framed is not None and alone else None


def grows(bound: IntExpr | None, rows: Any) -> bool:
    """Whether a bound of what rows see is no less for later rows: the first row of a tile has the least, the last the
    most.
    """
    if bound is None or isinstance(bound, int) or not mentions(bound, rows):
        return bound is not None
    for atoms, factor in terms_of(bound).items():
        if any(mentions(a, rows) for a in atoms) and (factor < 0 or len(atoms) > 1 or not _rises(atoms[0], rows)):
            return False
    return True


def _rises(atom: Any, rows: Any) -> bool:
    """The same of rows, or a quotient of what grows with them."""
    return atom is rows or (isinstance(atom, FloorDiv) and isinstance(atom.b, int) and grows(atom.a, rows))


@rule(keys=(Plan,))
def skip_steps(plan: Plan, draft: Draft) -> Plan | None:
    """A step all of whose points are masked adds nothing, and is not visited."""
    chained = [p for p in plan.all(Product) if p.made]
    if plan.all(Reach) or not plan.all(Product) or not plan.all(Order) or not plan.all(Agent):
        return None
    if not chained:
        (p, *_), end = plan.all(Product), ends_early(draft)
        return plan.plus(Reach(axis_name(end.axis), p.rows, show_expr(end.until))) if end is not None else None
    if plan.one(Order).persistent and len(plan.all(Agent)) == 1:
        return None  # only warps with roles count the steps of tiles that are unlike
    found, *others = (_visits(draft, p) for p in chained)
    if found is None or any(x != found for x in others):
        return None
    product = chained[-1]
    *_, axis = draft.products[product.sites[0]].reduce.axes
    since = show_expr(found.since) if found.since is not None else ""
    told, first, last = (operand_text(x) if x is not None else "" for x in (found.length, found.first, found.last))
    return plan.plus(Reach(axis_name(axis), product.rows, show_expr(found.until), since, told, first, last))


def _visits(draft: Draft, product: Product) -> Visits | None:
    """Which steps a tile visits whose number along the rows is `first`: None where that may be all of them."""
    rows, site = axis_called(draft, product.rows), draft.site(product.sites[0])
    *_, axis = draft.products[product.sites[0]].reduce.axes
    size, step = draft.length(rows, site), draft.length(axis, site)
    first = Var("first", -(-rows.extent // size)) * size
    return visited(draft, product, rows, first, size, step, -(-axis.extent // step))


def reached(plan: Plan, draft: Draft) -> list[int]:
    """How many steps a tile visits for each part of the rows, the first one first; or for each of what else says it."""
    product = plan.all(Product)[-1]
    if not product.made and (end := ends_early(draft)) is not None:
        return steps_taken(draft.products[product.sites[0]], end.inside)
    rows, site = axis_called(draft, product.rows), draft.site(product.sites[0])
    *_, axis = draft.products[product.sites[0]].reduce.axes
    tiles, around = -(-rows.extent // draft.length(rows, site)), math.prod(f.size for _, f in rounds(draft))
    every = math.prod(f.size for f in draft.times(axis, site))
    found = _visits(draft, product) if plan.all(Reach) else None
    if found is None:
        return [around * every] * tiles
    return [around * (min(_at(found.until, n), every) - max(_at(found.since or 0, n), 0)) for n in range(tiles)]


def idle(plan: Plan, draft: Draft) -> bool:
    """Whether there may be tiles of which a mask leaves no step. Where steps overlap, data leaves one of each."""
    told = any(x.length or x.at_first or x.at_last for x in plan.all(Reach)) and not overlaps(draft)
    return min(reached(plan, draft)) < 1 or told


def _at(e: IntExpr, first: int) -> int:
    """An expression for a tile of this number."""
    return int(evaluate(e, dict.fromkeys(e.free, first) if isinstance(e, Expr) else {}))


RULES = (skip_steps,)
