"""What must hold of each line of a plan, given those it depends on. A check declines, with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from terrazzo.hw.products import warps
from terrazzo.hw.transfer import FMA
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.plan import (
    EVERYONE,
    STORED,
    Agent,
    Align,
    Combine,
    Convert,
    Frame,
    Jam,
    Keep,
    Limit,
    Line,
    Order,
    Plan,
    Product,
    Reach,
    Rescue,
    Result,
    Ring,
    Stage,
    Stream,
)
from terrazzo.ir.schedule import WARPS_IN_A_GROUP, Like, Word
from terrazzo.rewrite.rule import Rule, need
from terrazzo.rules.access import WIDEST
from terrazzo.rules.tile.agents import LOAD, MATH, bound_warps, role_warps
from terrazzo.rules.tile.draft import Draft, axis_name
from terrazzo.rules.tile.frames import move_frames
from terrazzo.rules.tile.handed import asked
from terrazzo.rules.tile.layouts import conversions
from terrazzo.rules.tile.order import begun, clusters, grid
from terrazzo.rules.tile.overlap import check as overlap
from terrazzo.rules.tile.overlap import freed_late, lags, may_fall_behind, may_take_turns
from terrazzo.rules.tile.products import box, place, promoted
from terrazzo.rules.tile.reach import skip_steps
from terrazzo.rules.tile.rescue import rescue_sums
from terrazzo.rules.tile.results import aligned, combination, height, is_turned, jammed, no_boxes, panelled, runs_along
from terrazzo.rules.tile.rings import (
    brought,
    held_slots,
    loops_of,
    operand_text,
    overlaps,
    own_slots,
    staggered,
    steps,
    twins,
)
from terrazzo.rules.tile.slabs import Slab, beside_it
from terrazzo.rules.tile.stages import stage
from terrazzo.rules.tile.vectors import vectors
from terrazzo.rules.transports import PLAIN, TRANSPORTS

LONGEST = Word("longest_first")


def _same(what: str, given: Any, meant: Any) -> None:
    """A line says what the schedule binds."""
    need(given == meant, f"{what} {_told(given)}, and the schedule has {_told(meant)}")


def _told(value: Any) -> str:
    return f"({', '.join(map(str, value))})" if isinstance(value, tuple) else str(value)


def _asked(options: dict[str, Any], **given: Any) -> None:
    """A line says what the words of the schedule ask for, where they do."""
    for name, value in given.items():
        if name in options:
            _same(f"{name} is", value, options[name])


def _order(line: Order, plan: Plan, draft: Draft) -> None:
    _same("tiles are", line.tiles, grid(draft))
    divided = clusters(draft)
    need(
        line.cluster == divided[:1] or line.cluster in [(w,) for w in divided],
        f"the schedule's cluster is {_told(divided)}",
    )
    names = [w.name for w in line.tiles]
    longest = {
        a
        for a, b in draft.schedule.axes
        if not isinstance(b, Like)
        for f in b
        if f.level == "grid" and ("order", LONGEST) in f.options
    }
    need(
        longest <= {*line.backward} <= {*names},
        f"backward are {_told(line.backward)}, and the schedule has {_told(tuple(longest))}",
    )
    need(len({w.name for w in line.grouped}) == len(line.grouped), f"grouped are {_told(line.grouped)}: an axis once")
    for w in line.grouped:
        need(w.name in names[:-1], f"rows of {w.name} are grouped, and no axis of tiles is inside of it")
        need(
            line.tiles[names.index(w.name)].args[0] % w.args[0] == 0,
            f"groups of {w} do not divide {line.tiles[names.index(w.name)]}",
        )
    _same("steps begin by", line.begin, begun(draft))
    size, every = line.cluster_size, line.count * line.cluster_size
    if not line.persistent:
        need(not draft.schedule.directive("persistent"), "the schedule is persistent")
        need(line.blocks == every, f"there are {every} blocks, one for each tile, where nothing is persistent")
    need(
        size <= line.blocks <= every and line.blocks % size == 0,
        f"{line.blocks} blocks: at most {every}, a multiple of {size}",
    )


def _agent(line: Agent, plan: Plan, draft: Draft) -> None:
    agents = plan.all(Agent)
    names = tuple(a.name for a in agents)
    need(names in ((EVERYONE,), (LOAD, MATH)), f"agents are {EVERYONE}, or {LOAD} and {MATH}, not {', '.join(names)}")
    need(not draft.schedule.options("roles") or len(agents) == 2, "the schedule has roles")
    first = sum(a.warps for a in agents[: agents.index(line)])
    need(
        line.first == first,
        f"its first warp is {line.first}, and {first} warps stand before it: none is of two, none of nobody",
    )
    need(line.warps > 0, "it has no warp")
    whole = line.teams > 0 and line.warps % line.teams == 0
    need(whole, f"{line.warps} warps are no {line.teams} teams of as many each")
    groups = any(warps(draft.instruction(s)) > 1 for s in draft.schedule.sites)
    meant = 1
    turns = line.name == MATH and dict(draft.schedule.options("roles")).get("turns") is True
    need(line.turns == turns, f"its teams {'take' if turns else 'do not take'} turns")
    lag = line.name == MATH and lags(draft)
    need(line.lag == lag, f"its teams {'lag' if lag else 'do not lag'} behind one another")
    if lag and not staggered(draft, plan.all(Product)):
        need(not overlaps(draft), "steps that overlap need no teams that lag")
        may_fall_behind(plan)
    if line.name != LOAD:
        _same("warps are", line.each if turns else line.warps, bound_warps(draft))
        meant = line.warps // WARPS_IN_A_GROUP if groups and line.name == MATH else 1
    need(line.teams == meant, f"teams are {line.teams}, and {meant} of it wait by themselves")
    roles = dict(draft.schedule.options("roles"))
    if roles and line.name in (LOAD, MATH):
        _same("warps are", line.warps, role_warps(draft)[line.name])
    if isinstance(asked := roles.get("registers"), tuple) and line.name in (LOAD, MATH):
        _same("registers are", line.registers, asked[(LOAD, MATH).index(line.name)])


def _product(line: Product, plan: Plan, draft: Draft) -> None:
    for name in line.sites:
        need(
            name in draft.products,
            f"a block is divided for no contraction {name}; for {', '.join(draft.products) or 'none'}",
        )
    order, above = [*draft.products], plan.all(Product)[: plan.all(Product).index(line)]
    late = [p.sites[0] for p in above if order.index(p.sites[0]) > order.index(line.sites[0])]
    need(not late, f"a step multiplies for {line.sites[0]} before it does for {', '.join(late)}, which stands above it")
    agent = plan.all(Agent)[-1].name
    need(line.agent == agent, f"{agent} computes, not {line.agent}")
    together, instruction, m, n, a, b = place(draft, line.sites[0])
    _same("sites are", line.sites, tuple(together))
    _same("it is on", line.on, instruction.name if instruction else FMA.name)
    _same("m is", line.m, axis_name(m))
    _same("n is", line.n, axis_name(n))
    _same("promote is", line.promote, promoted(draft, together))
    site = draft.site(line.sites[0])
    assert site is not None
    _same("its box is", line.box, tuple(map(axis_name, box(draft, site, instruction, m, n))))
    for name, given, meant in (("a", line.a, a), ("b", line.b, b)):
        need(given == meant, f"{name} comes from {given}: {line.on} takes {meant}")


def _ring(line: Ring, plan: Plan, draft: Draft) -> None:
    every = tuple(Word(axis_name(a), (f.size,)) for a, f in steps(draft)) if draft.products else ()
    need(line.over in (every, ()), f"its steps are {_told(line.over)}, and those of the tile {_told(every)}")
    users = [p for p in plan.all(Product) if line.name in p.rings]
    need(users, "no product waits for it")
    need(any(s.ring == line.name for s in plan.all(Stream)), "no stream comes to it")
    agents = [a.name for a in plan.all(Agent)]
    need(line.producer == agents[0], f"{agents[0]} loads, not {line.producer}")
    need(line.consumer == agents[-1], f"{agents[-1]} multiplies, not {line.consumer}")
    apart = len(agents) > 1
    need(line.by in TRANSPORTS, f"{line.by!r} is no transport; known: {', '.join(TRANSPORTS)}")
    by = TRANSPORTS[line.by]
    need(draft.gpu.number >= by.since, f"{by.name} needs sm_{by.since}, and the target is {draft.gpu.arch}")
    need(by.boxes or not apart, f"{LOAD} loads by tma, not by {by.name}")
    need(line.slots >= 1, f"slots are {line.slots}, and a ring has one at least")
    if not line.over and line.slots > 1:
        numbers = [n for n, p in enumerate(plan.all(Product)) if line.name in p.rings]
        _same("slots are", line.slots, held_slots(draft, plan, plan.all(Product), numbers))
    one = len(plan.all(Product)) == 1 and warps(draft.instruction(draft.site(users[0].sites[0]))) > 1
    in_turn = staggered(draft, plan.all(Product))
    if in_turn:
        _same("late is", line.late, freed_late(line, plan, draft))
    need(
        in_turn or not line.late or (one and line.over and by.beside),
        "slots are freed late by one product of warpgroups only, or by several that overlap",
    )
    need(not (line.late and users[0].promote), "sums that are promoted are waited for in every step: late is wrong")
    need(not (line.late and apart) or line.slots > 1, "the only slot is freed late, and the next step waits for it")
    most = line.slots if apart else line.slots - 1 - line.late
    least = most if apart or not by.beside else min(line.slots - 1, 1)
    need(line.slots <= (by.most or line.slots), f"{by.name} fills {by.most} slots at most")
    if line.over and by.beside and not apart:
        need(line.slots > 1, f"{line.by} fills one slot while another is read: two at least")
    need(least <= line.ahead <= most, f"{line.ahead} steps ahead, and of {line.slots} slots {most} can be filled early")
    asked = [v for _, f in steps(draft) if isinstance(v := draft.option(f, "ring", 0), int) and v]
    if asked and line.over and by.beside:
        own = {own_slots(draft, p, x) for p in users for x in brought(draft, p)} - {0}
        if line.slots not in own:
            _same("slots are", line.slots, max(asked))


def _stream(line: Stream, plan: Plan, draft: Draft) -> None:
    terms = {operand_text(x): (x, p) for p in plan.all(Product) for x in brought(draft, p)}
    terms |= {operand_text(x): (x, p) for x, p in vectors(draft, plan).items()}
    need(line.operand in terms, f"the kernel has no operand {line.operand}; it has {', '.join(terms) or 'none'}")
    term, product = terms[line.operand]
    ring: Ring = plan.named(line.ring)
    slab = Slab(draft, plan, product, ring, term)
    loops = loops_of(draft, plan.all(Product), term)
    same = tuple(operand_text(y) for y, x in twins(plan, draft).items() if x is term)
    _same("the same slab are", line.also, same)
    texts = [operand_text(y) for y in beside_it(draft, product, term)][:1]
    first = next((s.name for s in plan.all(Stream) if s.operand in texts and s is not line), "")
    _same("it lies behind", line.behind, first)
    need(ring.over == loops, f"it changes with {_told(loops)}, and the slots of {ring.name} with {_told(ring.over)}")
    sizes = {axis_name(a): (a, size) for a, size in slab.sizes.items()}
    parts = tuple(Word(name, (size,)) for name, (_, size) in sizes.items())
    need(
        set(line.axes) == set(parts) and len(line.axes) == len(parts),
        f"a step needs {_told(parts)} of it, not {_told(line.axes)}",
    )
    axes = [sizes[w.name][0] for w in line.axes]
    memory, lengths = slab.memory([*slab.sizes]), slab.sizes
    need(line.memory == axis_name(memory), f"global memory is contiguous along {axis_name(memory)}, not {line.memory}")
    _asked(slab.options, swizzle=line.swizzle, pad=line.pad, multicast=line.multicast > 1, along=line.axes[-1].name)
    asked = slab.options.get("by", ring.by)
    need(ring.by in (asked, PLAIN.name), f"{ring.name} comes by {ring.by}, and the schedule has this come by {asked}")
    need(line.swizzle in (0, 32, 64, 128) and line.pad >= 0, "slabs are swizzled by 32, 64 or 128 bytes, or not")
    points = len(axes) > 1 and term in vectors(draft, plan)
    need(line.beside == points, "what all points of a product have stands beside it, and no factor does")
    panel = slab.panel(axes, lengths, line.swizzle)
    need(line.panel == panel, f"panels are {line.panel} wide, and {product.on} takes {panel}")
    slab.aligned(line, axes, lengths)
    cast = slab.cast(axes, line.multicast > 1)
    need(line.multicast == cast, f"its boxes go to {line.multicast} blocks, and a cluster has {cast}")
    if slab.by.boxes:
        need(line.vector == 0, "TMA brings the whole slab: vector is 0")
        return slab.box(line, axes, lengths)
    widest = WIDEST // term.dtype.size  # type: ignore[attr-defined]
    need(
        line.vector in (1, 2, 4, 8, 16)
        and line.vector <= widest
        and slab.fits(axes, lengths, memory, line.pad, line.vector),
        f"{line.vector} elements of {line.operand} do not lie together wherever a thread begins",
    )
    need(not (why := slab.by.refuses(term, line.vector)), why)


def _stage(line: Stage, plan: Plan, draft: Draft) -> None:
    takes = [p for p in plan.all(Product) if STORED in (p.a, p.b) and line.product == p.sites[0]]
    need(takes, f"{line.product} takes nothing that was summed from shared memory")
    for given in asked(draft, line.product).values():
        _asked(dict(given.options), swizzle=line.swizzle, slots=line.slots)
    meant = stage(plan, draft, takes[0], line.name, line.swizzle, line.slots)
    _same("it is made of what is summed at", line.of, meant.of)
    _same("axes of it are", line.axes, meant.axes)
    _same("panel of it is", line.panel, meant.panel)


def _rings_of(line: Product, plan: Plan, draft: Draft) -> None:
    """The rings of a product are those its operands come to."""
    streams = {x: s for s in plan.all(Stream) for x in (s.operand, *s.also)}
    needed = {streams[t].ring for x in brought(draft, line) if (t := operand_text(x)) in streams}
    need(
        set(line.rings) == needed,
        f"its operands come to {', '.join(sorted(needed)) or 'none'}, not {', '.join(line.rings) or 'none'}",
    )


def derived(kind: type[Line], plan: Plan, draft: Draft) -> tuple[Line, ...]:
    """The lines of a kind that its rule adds where there are none."""
    bare = Plan(plan.kernel, plan.target, tuple(x for x in plan.lines if not isinstance(x, kind)))
    found = DERIVED[kind].rewrite(bare, draft)
    return found.all(kind) if found else ()


def _early(line: Product, plan: Plan, draft: Draft) -> None:
    """Products start early where the schedule has steps overlap, and only the first of two."""
    early = overlaps(draft) and not staggered(draft, plan.all(Product))
    _same("early is", line.early, line is plan.all(Product)[0] and early)
    if line.early:
        overlap(plan, draft)
    if staggered(draft, plan.all(Product)):
        may_take_turns(plan, draft)


def _follows(line: Line, plan: Plan, draft: Draft) -> None:
    """What follows from the term is as it follows."""
    meant = derived(type(line), plan, draft)
    need(line in meant, f"from the term follows {' and '.join(map(str, meant)) or 'no such line'}")


def _combine(line: Combine, plan: Plan, draft: Draft) -> None:
    need(
        line.site in draft.names, f"the kernel has no reduction {line.site}; it has {', '.join(draft.names) or 'none'}"
    )
    meant = combination(draft, line.site)
    need(line == meant, f"by the schedule its partial states are to meet as {meant or 'nowhere: each is whole'}")


def _keep(line: Keep, plan: Plan, draft: Draft) -> None:
    known = [*(b.name for b in (*draft.kernel.reads, *draft.kernel.writes)), *draft.names]
    need(line.what in known, f"nothing is called {line.what}; there are {', '.join(dict.fromkeys(known))}")


def _jam(line: Jam, plan: Plan, draft: Draft) -> None:
    meant = jammed(draft)
    need(line.points == meant, f"by the schedule the points are {', '.join(map(str, meant)) or 'each for itself'}")


def _align(line: Align, plan: Plan, draft: Draft) -> None:
    meant = aligned(draft)
    need(line.vectors == meant, f"by the schedule these are {', '.join(map(str, meant)) or 'vectors of rows alone'}")


def _result(line: Result, plan: Plan, draft: Draft) -> None:
    store = next((s for s in draft.kernel.stores if s.buffer.name == line.store), None)
    names = dict.fromkeys(s.buffer.name for s in draft.kernel.stores)
    need(store is not None, f"the kernel does not store {line.store}; it stores {', '.join(names)}")
    agent = plan.all(Agent)[-1].name
    need(line.agent == agent, f"{agent} computes it, not {line.agent}")
    site = draft.site(line.store)
    asked = dict(site.operands).get(line.store) if site else None
    if not line.slab:
        need(asked is None, "the schedule has it gather in shared memory")
        return need(
            line == Result(line.store, line.agent),
            "only what gathers in shared memory has rows, columns or a way there",
        )
    assert store is not None
    if asked is not None:
        _asked(dict(asked.options), swizzle=line.swizzle, pad=line.pad, by=line.by)
    _gathers(line, store, plan, draft)


def _gathers(line: Result, store: l.Store, plan: Plan, draft: Draft) -> None:
    """A store's way through shared memory."""
    product = plan.all(Product)[-1] if plan.all(Product) else None
    tile = draft.site(product.sites[0]) if product else None
    need(product and draft.instruction(tile), "only results of matrix instructions gather in shared memory")
    assert product is not None
    need((line.rows, line.columns) == (product.m, product.n), f"its rows are {product.m} and its columns {product.n}")
    _same("its box is", line.box, product.box)
    axis = next(a for a in draft.kernel.axes if axis_name(a) == line.columns)
    along = line.rows if line.turned else line.columns
    known = is_turned(draft, product, store) if line.turned else runs_along(store, axis)
    need(known, f"it is not contiguous along {along}")
    size, length = store.buffer.type.dtype.size, draft.length(axis, tile)
    times = math.prod(f.size for f in draft.schedule.binding(draft.site(line.store), line.columns) if f.level == "time")
    fits = line.width > 0 and length % line.width == 0 and line.width % 8 == 0 and times in (1, length // line.width)
    need(fits, f"{length} columns are no subtiles of {line.width}")
    panel = panelled(draft, product, size) if line.turned else 0
    need(line.panel == panel, f"its panels are of {panel} rows")
    row = size * (panel or (height(draft, product) if line.turned else line.width))
    need(line.swizzle in (0, row) and line.swizzle <= 128, f"rows of {row} bytes are not swizzled by {line.swizzle}")
    need(line.slots >= 1 and line.pad >= 0, "it has a slot at least, and no negative pad")
    need(line.by in ("ld", "tma"), f"results leave by ld or by tma, not by {line.by!r}")
    need(
        line.by == "ld" or (draft.gpu.number >= 90 and not line.pad),
        "TMA is of sm_90 on, and leaves no room between rows",
    )
    need(line.by == "tma" or not line.by_axes, "by_axes is said of boxes")
    if line.by == "tma":
        need(not (why := no_boxes(line, store, draft, product)), why)
    need(not line.turned or line.by == "tma", "results that are turned leave by TMA")
    matrices = draft.gpu.number >= 90 and size == 2
    need(
        line.put == "st" or (line.put == "stmatrix" and matrices),
        f"{line.put!r} puts no {store.buffer.type.dtype} into shared memory",
    )


def _convert(line: Convert, plan: Plan, draft: Draft) -> None:
    meant = {(c.value, c.to): c for c in conversions(plan, draft)}
    told = ", ".join(f"{value} to {to}" for value, to in meant) or "nothing"
    need((line.value, line.to) in meant, f"{line.value} is not converted to {line.to}: {told} is")
    found = meant[line.value, line.to]
    need(line.by == found.by, f"{line.value} comes to {line.to} by {found.by}, not by {line.by}")
    need(line.layout == found.layout, f"by {line.by}, registers have `{found.layout}`, not `{line.layout}`")


def _limit(line: Limit, plan: Plan, draft: Draft) -> None:
    need(line.resident >= 1, "a block at least is to fit on a processor")
    if asked := draft.schedule.directive("resident"):
        _same("blocks are", line.resident, asked[0])


DERIVED: dict[type[Line], Rule] = {Frame: move_frames, Reach: skip_steps, Rescue: rescue_sums}
"""The rules whose lines the schedule has no say in."""

CHECKS: tuple[tuple[type[Line], Callable[..., None]], ...] = (
    (Order, _order),
    (Agent, _agent),
    (Product, _product),
    (Ring, _ring),
    (Stream, _stream),
    (Stage, _stage),
    (Product, _rings_of),
    (Frame, _follows),
    (Product, _early),
    (Reach, _follows),
    (Rescue, _follows),
    (Combine, _combine),
    (Keep, _keep),
    (Jam, _jam),
    (Align, _align),
    (Result, _result),
    (Convert, _convert),
    (Limit, _limit),
)
