"""In how many slots the operands of products come, and who brings them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terrazzo.hw.products import matrix, warps
from terrazzo.ir.contraction import operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import Node, substitute
from terrazzo.ir.plan import COMPUTED, EVERYONE, Agent, Order, Plan, Product, Ring
from terrazzo.ir.schedule import Factor, Site, Word
from terrazzo.ir.show import show
from terrazzo.ir.sites import called, made_of
from terrazzo.rewrite.rule import need, rule
from terrazzo.rules.tile.agents import LOAD
from terrazzo.rules.tile.draft import Draft, axis_name
from terrazzo.rules.tile.products import CONVERTED
from terrazzo.rules.tile.spans import span, spanned
from terrazzo.rules.transports import PLAIN, TRANSPORTS, Transport


def operand_text(term: Node) -> str:
    """What a plan calls an operand: the term as it is written."""
    return show(term)


def brought(draft: Draft, product: Product) -> list[Node]:
    """The operands of a product that come from memory, each once."""
    rows = axis_called(draft, product.m)
    found: list[Any] = []
    for name in product.sites:
        c = draft.products[name]
        for pair in c.terms:
            a, b = pair if rows in pair[0].free else pair[::-1]
            for f, source in ((a, product.a), (b, product.b)):
                if source not in COMPUTED:
                    found += [made_of(f) if source == CONVERTED else operand(f)]
    return list(dict.fromkeys(found))


def axis_called(draft: Draft, name: str, sums: Sequence[str] = ()) -> Any:
    """The axis of this name, of the kernel or of one of its products: of these `sums`, where they have one, since sums
    beside each other call what they go along alike.
    """
    products = [*(draft.products[x] for x in sums), *draft.products.values()]
    every = [*draft.axes, *(a for c in products for a in c.reduce.axes)]
    return next(a for a in every if axis_name(a) == name)


def outermost(draft: Draft, product: Product) -> bool:
    """Whether a product's sums are those of a tile, and not of a step."""
    last = draft.products[list(draft.products)[-1]]
    return draft.products[product.sites[0]].reduce.axes == last.reduce.axes


def across(draft: Draft, product: Product, inner: Product) -> tuple[Any, Any]:
    """The rows and columns of what another product sums, as a factor of this one has them: its columns are the steps'
    axis, wherever the other's instruction has that.
    """
    *_, steps = draft.products[product.sites[0]].reduce.axes
    m, n = (axis_called(draft, x) for x in (inner.m, inner.n))
    return (n, m) if m is steps else (m, n)


def overlaps(draft: Draft) -> bool:
    """Whether the schedule has the steps overlap."""
    asked = [v for _, f in steps(draft) if (v := draft.option(f, "overlap", 0))] if draft.products else []
    if strange := [v for v in asked if v != 1]:
        raise draft.fail(f"overlap is 1, for one step starts early, not {strange[0]}")
    return bool(asked)


def staggered(draft: Draft, products: Sequence[Product]) -> bool:
    """Whether products of several lines overlap: each begins as soon as what it is made of is there, and those of the
    next step do before the last ones of this step have ended.
    """
    return len(products) > 2 and overlaps(draft)


def steps(draft: Draft) -> list[tuple[Any, Factor]]:
    """The loops over a tile's steps: those of the product that all others are part of, but for what slabs span."""
    name = list(draft.products)[-1]
    site, inside = draft.site(name), spanned(draft)
    return [(a, f) for a in draft.products[name].reduce.axes if a not in inside for f in draft.times(a, site)]


def rounds(draft: Draft) -> list[tuple[Any, Factor]]:
    """The loops around those of a chain's steps: its sums go on from one round to the next, and what is held for a tile
    stays.
    """
    chained = len({c.reduce.axes for c in draft.products.values()}) > 1
    return steps(draft)[:-1] if chained else []


@rule(keys=(Plan,))
def pipeline(plan: Plan, draft: Draft) -> Plan | None:
    """Operands that change in the same steps for the same products share the slots of a ring, but for those that have
    `slots` of their own; one that does not change is held for the tile. Who loads runs ahead by all slots; where all do
    everything, by all but the one in use.
    """
    if plan.all(Ring) or not plan.all(Product):
        return None
    loops = steps(draft)
    products = plan.all(Product)
    for p in products[:-1]:
        own = [f for a in draft.products[p.sites[0]].reduce.axes for f in draft.times(a, draft.site(p.sites[0]))]
        need(
            not own or outermost(draft, p), f"{p.sites[0]} has steps of its own inside those of {products[-1].sites[0]}"
        )
    asked = [v for _, f in loops if isinstance(v := draft.option(f, "ring", 1), int)]
    if none := [v for v in asked if v < 1]:
        raise draft.fail(f"a ring has one slot at least, not {none[0]}")
    slots = max([1, *asked])
    apart = any(a.name == LOAD for a in plan.all(Agent))
    # For (product, loops), or (nothing, loops), the transports and the products.
    groups: dict[tuple[Any, ...], dict[type[Transport], None]] = {}
    users: dict[tuple[Any, ...], list[int]] = {}
    same = twins(plan, draft)
    of = {x: number for number, p in reversed([*enumerate(products)]) for x in brought(draft, p)}
    for number, p in enumerate(products):
        for x in brought(draft, p):
            over = loops_of(draft, products, x)
            key = (of[same.get(x, x)] if apart else None, over, own_slots(draft, p, x) if over else 0)
            groups.setdefault(key, {})[_transport(draft, draft.site(p.sites[0]), x)] = None
            users.setdefault(key, []).append(number)
    rings: dict[tuple[Any, ...], Ring] = {}
    for key, transports in sorted(groups.items(), key=lambda group: -group[0][2]):  # who runs further ahead goes first
        over = key[1]
        boxes = any(x.boxes for x in transports)
        need(not boxes or len(transports) == 1, "TMA brings in all operands of a contraction or none")
        count = key[2] or slots if over else held_slots(draft, plan, products, users[key])
        by = next(iter(transports)) if len(transports) == 1 else PLAIN
        by = PLAIN if by.beside and not boxes and over and count == 1 else by
        need(
            not boxes or count > 1 or not over or apart,
            "TMA fills a ring of two slots at least where all warps do everything",
        )
        need(boxes or not apart, f"who only loads does so by TMA, not by {by.name}")
        count = min(count, by.most or count)
        late = warps(matrix(products[0].on)) > 1 and len(products) == 1 and by.beside and count > (1 if apart else 3)
        late = late and not products[0].promote and products[0].a != CONVERTED
        ahead = count if apart else count - 1 - late
        consumer = products[users[key][0]].agent
        rings[key] = Ring(f"ring{len(rings)}", over, count, ahead, by.name, LOAD if apart else EVERYONE, consumer, late)
    lines = []
    for number, p in enumerate(products):
        mine = tuple(r.name for key, r in rings.items() if number in users[key])
        lines.append(Product(p.sites, p.on, p.agent, mine, p.m, p.n, p.a, p.b, p.promote, p.box))
    rest = tuple(x for x in plan.lines if not isinstance(x, Product))
    read = [w for a, _ in loops for w in draft.read(None, axis_name(a), "ring")]
    return Plan(plan.kernel, plan.target, rest, plan.open).plus(*rings.values(), *lines, read=read)


def twins(plan: Plan, draft: Draft) -> dict[Node, Node]:
    """Operands that are the same slab as one before them, where slots are kept for both: what one product has as its
    depth another has as its columns, and a step has all of both.
    """
    products = plan.all(Product)
    apart = any(a.name == LOAD for a in plan.all(Agent))
    if not apart or len(products) == 1 or (overlaps(draft) and not staggered(draft, products)):
        return {}
    found: dict[Node, Node] = {}
    every = [(p, x) for p in products for x in brought(draft, p)]
    for number, (q, y) in enumerate(every):
        for p, x in every[:number]:
            if p is not q and x is not y and y not in found and x not in found and _twins(draft, (p, x), (q, y)):
                found[y] = x
    return found


def _twins(draft: Draft, one: tuple[Product, Node], other: tuple[Product, Node]) -> bool:
    (p, x), (q, y) = one, other
    held = [draft.held(draft.site(a.sites[0]), called(b)) for a, b in (one, other)]
    if held[0] != held[1] or not isinstance(x, l.Load) or not isinstance(y, l.Load) or x.buffer is not y.buffer:
        return False
    mine, its = slab_sizes(draft, p, x), slab_sizes(draft, q, y)
    new, old = [a for a in its if a not in mine], [a for a in mine if a not in its]
    if len(new) != 1 or len(old) != 1 or new[0].extent != old[0].extent or mine[old[0]] != its[new[0]]:
        return False
    same = substitute(y, {new[0]: old[0]}) is x and old[0] not in y.free and mine[old[0]] >= old[0].extent
    return same and all(mine[a] == its[a] for a in mine if a is not old[0])


def twin_axes(names: Sequence[str], x: Node, y: Node) -> list[str]:
    """The axes of a slab as those of an operand that is the same one."""
    (new,) = [axis_name(a) for a in y.free - x.free]
    gone = {axis_name(a) for a in x.free - y.free}
    return [new if name in gone else name for name in names]


def own_slots(draft: Draft, p: Product, x: Node) -> int:
    """In how many slots an operand comes that has more than the loop says, or 0: what comes from memory takes longer
    than what the cache has.
    """
    found = dict(draft.held(draft.site(p.sites[0]), called(x)).options).get("slots", 0)
    if not isinstance(found, int) or found < 0:
        raise draft.fail(f"{called(x)}: slots are a number, not {found}", *draft.line(called(x)))
    return found


def ring_of(draft: Draft, p: Product, x: Node, rings: Sequence[Ring]) -> Ring:
    """Which of the rings of the same steps an operand comes in."""
    own, others = own_slots(draft, p, x), {own_slots(draft, p, y) for y in brought(draft, p)} - {0}
    return next(r for r in rings if len(rings) == 1 or (r.slots == own if own else r.slots not in others))


def held_slots(draft: Draft, plan: Plan, products: Sequence[Product], users: Sequence[int]) -> int:
    """Slots for what is held for a tile: with two, the next tile's comes while this one is multiplied."""
    held = [(p, x) for p in (products[n] for n in users) for x in brought(draft, p) if not loops_of(draft, products, x)]
    count = 1
    for p, x in held:
        slots = dict(draft.held(draft.site(p.sites[0]), called(x)).options).get("slots", 1)
        if not isinstance(slots, int) or slots < 1:
            raise draft.fail(f"{called(x)}: slots are a number, not {slots}", *draft.line(called(x)))
        count = max(count, slots)
    apart = any(a.name == LOAD for a in plan.all(Agent))
    need(
        count == 1 or (apart and plan.all(Order) and plan.one(Order).persistent),
        "what is held for a tile has slots where blocks stay for several tiles, behind warps that load",
    )
    return count


def loops_of(draft: Draft, products: Sequence[Product], x: Node) -> tuple[Word, ...]:
    """The loops an operand changes in. For one product, all of them: what does not change is loaded again."""
    loops = steps(draft)
    if len(products) > 1 and not any(a in x.free for a, _ in loops):
        return ()
    return tuple(Word(axis_name(a), (f.size,)) for a, f in loops)


def _transport(draft: Draft, site: Site | None, x: Node) -> type[Transport]:
    name = called(x)
    by = str(dict(draft.held(site, name).options).get("by", PLAIN.name))
    if by not in TRANSPORTS:
        why = f"{name} is brought in by {by!r}; known: {', '.join(TRANSPORTS)}"
        raise draft.fail(why, *draft.line(name), f'by="{by}"')
    if draft.gpu.number < TRANSPORTS[by].since:
        needs = f"sm_{TRANSPORTS[by].since}"
        why = f"{name} is brought in by {by}, which needs {needs}, and the target is {draft.gpu.arch}"
        raise draft.fail(why, *draft.line(name), f'by="{by}"')
    return TRANSPORTS[by]


def slab_sizes(draft: Draft, product: Product, term: Node) -> dict[Any, int]:
    """The axes of a slab, and how much it has of each: the tile's part and its halo, and all of loops it spans."""
    site, whole = draft.site(product.sites[0]), span(draft, term)
    reduce = draft.products[product.sites[0]].reduce
    m, n = axis_called(draft, product.m), axis_called(draft, product.n)
    inner = [a for a in (m, n) if a not in draft.axes and a not in reduce.axes]
    free = [a for a in (*draft.tiled, *inner) if a in term.free]
    reduced = [a for a in reduce.axes if a in term.free and draft.length(a, site) > 1]
    parts = {a: draft.length(a, site) + whole.halo(a) for a in (*free, *reduced)}
    last = {a: parts.pop(a) for a in reduced}
    return {**parts, **{r: r.extent for r in whole.own}, **last}


RULES = (pipeline,)
