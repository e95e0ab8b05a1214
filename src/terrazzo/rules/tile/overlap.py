"""Products of the next step beside what is made of this one's: tensor cores multiply while CUDA cores find weights."""

from __future__ import annotations

from typing import Any

from terrazzo.hw.products import matrix, warps
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import Node, topological
from terrazzo.ir.plan import VALUES, Agent, Frame, Plan, Product, Ring
from terrazzo.rewrite.rule import need, rule
from terrazzo.rules.tile.agents import MATH
from terrazzo.rules.tile.draft import Draft, axis_name
from terrazzo.rules.tile.handed import REGISTERS, handed
from terrazzo.rules.tile.products import CONVERTED
from terrazzo.rules.tile.reach import idle, masked
from terrazzo.rules.tile.rings import axis_called, outermost, overlaps, staggered, steps


@rule(keys=(Plan,))
def start_early(plan: Plan, draft: Draft) -> Plan | None:
    """`r1 = time(16, ring=2, overlap=1)`: the scores of the next step are on their way to one set of registers while
    those of this step become weights in another, which the second product takes while the next weights are found.
    """
    products = plan.all(Product)
    if not plan.all(Ring) or any(p.early for p in products) or not overlaps(draft) or staggered(draft, products):
        return None
    check(plan, draft)
    first = p = products[0]
    early = Product(p.sites, p.on, p.agent, p.rings, p.m, p.n, p.a, p.b, p.promote, p.box, early=True)
    lines = tuple(early if x is first else x for x in plan.lines)
    read = [w for a, _ in steps(draft) for w in draft.read(None, axis_name(a), "overlap")]
    return Plan(plan.kernel, plan.target, lines, plan.open).plus(read=read)


def check(plan: Plan, draft: Draft) -> None:
    """Declines where the products of the next step cannot be on their way beside this step's."""
    products, agents = plan.all(Product), plan.all(Agent)
    found: Any = masked(draft, products[-1])
    need(
        len(products) == 2
        and stays(draft, products[-1])
        and found is not None
        and (plan.all(Frame) or found.bare.dtype.size == 4),
        "what overlaps are two products in a row, of which the second takes what is made of the first",
    )
    need(
        all(warps(matrix(p.on)) > 1 for p in products) and len(agents) == 2,
        "what overlaps are products of warpgroups, behind warps that load",
    )
    moving = {r.name: r.slots for r in plan.all(Ring) if r.over}
    need(
        not {*products[0].rings} & {*products[1].rings} & {*moving},
        "products that overlap take their operands from slots of their own",
    )
    need(min(moving.values()) > 1, "one step starts before another has ended, so each operand has two slots at least")
    need(not idle(plan, draft), "what overlaps are steps, of which every tile has one at least")


@rule(keys=(Plan,))
def take_turns(plan: Plan, draft: Draft) -> Plan | None:
    """`r1 = time(32, ring=3, overlap=1)` where there are more than two lines of products: each begins as soon as what
    it is made of is there, and is waited for where it is wanted. The last ones go on while the first one of the next
    step does, and free their slots a step late.
    """
    rings, products = plan.all(Ring), plan.all(Product)
    if not rings or any(r.late for r in rings) or not staggered(draft, products):
        return None
    may_take_turns(plan, draft)
    behind = lags(draft)
    lines = tuple(
        _late(x)
        if isinstance(x, Ring) and freed_late(x, plan, draft)
        else _lagging(x)
        if isinstance(x, Agent) and x.name == MATH and behind
        else x
        for x in plan.lines
    )
    read = [w for a, _ in steps(draft) for w in draft.read(None, axis_name(a), "overlap")]
    read += draft.read(None, "roles", "lag")
    return Plan(plan.kernel, plan.target, lines, plan.open).plus(read=read)


@rule(keys=(Plan,))
def fall_behind(plan: Plan, draft: Draft) -> Plan | None:
    """`roles(..., lag=True)` where a step's products come one after the other: a warpgroup begins a step when the one
    before it has that step's first sums, or has made its factors of a slab, so that one multiplies while the other
    makes factors. Where there is one product, the other one stores meanwhile.
    """
    if not plan.all(Ring) or not lags(draft) or any(a.lag for a in plan.all(Agent)) or overlaps(draft):
        return None
    may_fall_behind(plan)
    lines = tuple(_lagging(x) if isinstance(x, Agent) and x.name == MATH else x for x in plan.lines)
    return Plan(plan.kernel, plan.target, lines, plan.open).plus(read=draft.read(None, "roles", "lag"))


def may_fall_behind(plan: Plan) -> None:
    """Declines where warpgroups have nothing to do that others could multiply meanwhile."""
    products = plan.all(Product)
    made = (len(products) == 2 and products[-1].a == VALUES) or any(p.a == CONVERTED for p in products)
    need(
        (made or len(products) == 1) and all(warps(matrix(p.on)) > 1 for p in products),
        "warpgroups lag behind one another in one product, or where a product of theirs takes what is made of another "
        "one's sums, or of a slab",
    )
    need(any(plan.named(x).over for x in products[0].rings), "warpgroups lag behind one another step by step")


def lags(draft: Draft) -> bool:
    """Whether the schedule has warpgroups lag behind one another."""
    return dict(draft.schedule.options("roles")).get("lag") is True


def _lagging(a: Agent) -> Agent:
    need(a.teams > 1 and not a.turns, "warpgroups lag behind one another where several have parts of one tile")
    return Agent(a.name, a.first, a.warps, a.teams, a.registers, a.turns, lag=True)


def _late(r: Ring) -> Ring:
    return Ring(r.name, r.over, r.slots, r.ahead, r.by, r.producer, r.consumer, late=True)


def freed_late(ring: Ring, plan: Plan, draft: Draft) -> bool:
    """Whether products that take turns free a ring's slots a step late."""
    return bool(ring.over) and any(outermost(draft, p) for p in plan.all(Product) if ring.name in p.rings)


def may_take_turns(plan: Plan, draft: Draft) -> None:
    """Declines where products cannot begin one by one."""
    products, agents = plan.all(Product), plan.all(Agent)
    need(
        all(warps(matrix(p.on)) > 1 for p in products) and len(agents) == 2,
        "what overlaps are products of warpgroups, behind warps that load",
    )
    last = [p for p in products if outermost(draft, p)]
    need(
        not plan.all(Frame) and last == [p for p in products if stays(draft, p)] == [*products[-len(last) :]],
        "several products overlap where the last ones take what is made of the first, in no frame",
    )
    need(
        min(r.slots for r in plan.all(Ring) if r.over) > 1,
        "one step starts before another has ended, so each operand has two slots at least",
    )
    need(not idle(plan, draft), "what overlaps are steps, of which every tile has one at least")
    gone: set[Node] = set()
    for p in last:
        bare, known = made(draft, p), made_before(draft, plan, p)
        left = {x for x in topological([bare], stop=known.__contains__) if isinstance(x, l.Reduce)}
        need(not left & gone, f"{p.sites[0]} takes what is made of sums in whose place there is something else by then")
        gone |= {x for x in topological([bare]) if isinstance(x, l.Reduce)}


def stays(draft: Draft, p: Product) -> bool:
    """Whether a product's factor lies where the sums do that it is made of."""
    m, n = (axis_called(draft, x) for x in (p.m, p.n))
    return p.a == VALUES and handed(draft, p.sites[0], matrix(p.on), m, n).by == REGISTERS


def made(draft: Draft, product: Product) -> Node:
    """What a product's computed factor is rounded from, where no mask hides it. Declines where nothing is rounded."""
    found: Any = masked(draft, product)
    need(found is not None and found.bare.dtype.size == 4, f"{product.sites[0]}: its factor is made of no 32 bits")
    bare: Node = found.bare
    return bare


def made_before(draft: Draft, plan: Plan, product: Product) -> dict[Node, Product]:
    """What products before this one take, and this one's computed factor is made of, before it is rounded: it stands in
    place of sums then.
    """
    every = [p for p in plan.all(Product) if p.a == VALUES]
    if len(every) < 2:
        return {}
    bare = made(draft, product)
    before = {made(draft, p): p for p in every[: every.index(product)]}
    return {x: p for x, p in before.items() if x is not bare and x in topological([bare])}


def made_first(draft: Draft, plan: Plan, product: Product) -> Node | None:
    """The part of a product's computed factor that the sums of the first product alone are in, where there are others:
    it is made while these are on their way. None where it was made before.
    """
    bare, (first,) = made(draft, product), {draft.products[x].reduce for x in plan.all(Product)[0].sites[:1]}
    every = [x for x in topological([bare]) if isinstance(x, l.Reduce)]
    if made_before(draft, plan, product) or first not in every or len(every) < 2:
        return None
    for x in reversed(topological([bare])):
        if isinstance(x, l.Apply) and x.dtype is first.dtype and [y for y in topological([x]) if y in every] == [first]:
            return x if first not in topological([bare], stop=lambda y, x=x: y is x) else None  # type: ignore[misc]
    return None


def multiples(draft: Draft, plan: Plan, product: Product) -> list[Product]:
    """The products before whose factors this one's is a multiple of: where they are hidden, it is 0 too."""
    before = made_before(draft, plan, product)
    return [p for x, p in before.items() if x in _factors(made(draft, product))]


def _factors(x: Any) -> list[Node]:
    if isinstance(x, l.Apply) and x.fn.name == "mul":
        return [x, *(y for a in x.args for y in _factors(a))]
    return [x]


RULES = (start_early, take_turns, fall_behind)
