"""What must hold of a plan: every line fits the kernel, the schedule, the machine and the lines it refers to; nothing is
missing, nothing is said twice, and all of it fits a processor.

Plans that rules complete hold by construction, and are looked at all the same. Those that somebody wrote or edited are
used as they stand once they are found to be in order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from terrazzo.errors import TerrazzoError, UserError
from terrazzo.hw.gpu import Gpu
from terrazzo.hw.products import warps
from terrazzo.hw.transfer import FMA
from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import Node
from terrazzo.ir.plan import AXIS, EVERYONE, Agent, Combine, Keep, Limit, Line, Order, Plan, Product, Result, Ring, Stream
from terrazzo.ir.schedule import WARPS_IN_A_GROUP, Schedule, Word
from terrazzo.rewrite.rule import Declined, need
from terrazzo.rules.access import WIDEST
from terrazzo.rules.tile.agents import LOAD, MATH, bound_warps
from terrazzo.rules.tile.draft import Draft, axis_name
from terrazzo.rules.tile.order import clusters, grid
from terrazzo.rules.tile.products import place
from terrazzo.rules.tile.results import combination, kept
from terrazzo.rules.tile.rings import SINCE, Slab, brought, loops_of, operand_text, slab_type, steps

THREADS = 1024
"""As many as a block may have."""


@lru_cache(maxsize=1024)
def verify(kernel: l.Kernel, schedule: Schedule, plan: Plan, gpu: Gpu) -> None:
    """UserError, with the line that is wrong, unless a kernel can be written from the plan."""
    draft = Draft(kernel, schedule, gpu)
    for line, why in itertools.chain(problems(plan, draft), budget(plan, draft)):
        number = plan.lines.index(line) + 2 if line else 1
        text = str(plan).splitlines()[number - 1].strip()
        raise UserError(f"the plan of {plan.kernel}, line {number}: {why}\n    {text}")


Problem = tuple[Line | None, str]
"""What is wrong, and with which line; None where one is missing."""


def problems(plan: Plan, draft: Draft) -> Iterator[Problem]:
    """What is wrong, whatever the machine has room for. Lines come after those they depend on, so only the first problem is
    sure to be one.
    """
    if (plan.kernel, plan.target) != (draft.kernel.name, draft.gpu.arch):
        yield None, f"it is not one of {draft.kernel.name} for {draft.gpu.arch}"
    yield from _said_twice(plan)
    yield from _references(plan, draft)
    for kind, check in CHECKS:
        for line in plan.all(kind):
            if why := _reason(check, line, plan, draft):
                yield line, why
        yield from ((None, why) for why in MISSING[kind](plan, draft))


def _reason(check: Callable[..., None], line: Line, plan: Plan, draft: Draft) -> str:
    try:
        check(line, plan, draft)
    except (Declined, TerrazzoError) as why:
        return str(why).splitlines()[0].removeprefix(f"{draft.kernel.name}: ")
    return ""


# -- lines and each other ------------------------------------------------------------------------------------------------


def _subjects(line: Line) -> list[tuple[str, str]]:
    """What a line is the only one to decide."""
    match line:
        case Order() | Limit():
            return [(line.op, "")]
        case Product():
            return [("the product", site) for site in line.sites]
        case Stream():
            return [("", line.name), ("the stream of", line.operand)]
        case Agent() | Ring():
            return [("", line.name)]
        case Combine():
            return [("the combination of", line.site)]
        case Keep():
            return [("keeping", line.what)]
        case Result():
            return [("the result", line.store), *([("", line.slab)] if line.slab else [])]
    raise AssertionError(line)


def _said_twice(plan: Plan) -> Iterator[Problem]:
    seen = set()
    for line in plan.lines:
        for subject in _subjects(line):
            if subject in seen:
                yield line, f"{' '.join(subject).strip()} is decided twice"
            seen.add(subject)


def _references(plan: Plan, draft: Draft) -> Iterator[Problem]:
    """Names of lines stand below these, and axes are the kernel's."""
    axes = {axis_name(a) for a in (*draft.kernel.axes, *(a for r in draft.names.values() for a in getattr(r, "axes", ())))}
    known: dict[str, str] = {}
    for line in plan.lines:
        for field, to in line.references.items():
            given = getattr(line, field)
            for name in given if isinstance(given, tuple) else [given] if given else []:
                if to == AXIS and name not in axes:
                    yield line, f"there is no axis {name}; there are {', '.join(sorted(axes))}"
                if to != AXIS and known.get(name) != to:
                    yield line, f"there is no {to} {name} above"
        if name := getattr(line, "name", ""):
            known[name] = line.op


# -- the kinds of lines --------------------------------------------------------------------------------------------------


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
    need(line.cluster == divided[:1] or line.cluster in [(w,) for w in divided], f"the schedule's cluster is {_told(divided)}")
    names = [w.name for w in line.tiles]
    for w in line.grouped:
        need(w.name in names[:-1], f"rows of {w.name} are grouped, and no axis of tiles is inside of it")
        need(line.tiles[names.index(w.name)].args[0] % w.args[0] == 0, f"groups of {w} do not divide {line.tiles[names.index(w.name)]}")
    size, every = line.cluster_size, line.count * line.cluster_size
    if not line.persistent:
        need(not draft.schedule.directive("persistent"), "the schedule is persistent")
        need(line.blocks == every, f"there are {every} blocks, one for each tile, where nothing is persistent")
    need(size <= line.blocks <= every and line.blocks % size == 0, f"{line.blocks} blocks: at most {every}, a multiple of {size}")


def _agent(line: Agent, plan: Plan, draft: Draft) -> None:
    agents = plan.all(Agent)
    names = tuple(a.name for a in agents)
    need(names in ((EVERYONE,), (LOAD, MATH)), f"agents are {EVERYONE}, or {LOAD} and {MATH}, not {', '.join(names)}")
    need(not draft.schedule.options("roles") or len(agents) == 2, "the schedule has roles")
    first = sum(a.warps for a in agents[: agents.index(line)])
    need(line.first == first, f"its first warp is {line.first}, and {first} warps stand before it: none is of two, none of nobody")
    need(line.warps > 0, "it has no warp")
    groups = any(warps(draft.instruction(s)) > 1 for s in draft.schedule.sites)
    meant = 1
    if line.name != LOAD:
        _same("warps are", line.warps, bound_warps(draft))
        meant = line.warps // WARPS_IN_A_GROUP if groups and line.name == MATH else 1
    need(line.teams == meant, f"teams are {line.teams}, and {meant} of it wait by themselves")
    roles = dict(draft.schedule.options("roles"))
    if isinstance(asked := roles.get("registers"), tuple) and line.name in (LOAD, MATH):
        _same("registers are", line.registers, asked[(LOAD, MATH).index(line.name)])


def _product(line: Product, plan: Plan, draft: Draft) -> None:
    for name in line.sites:
        need(name in draft.products, f"a block is divided for no contraction {name}; for {', '.join(draft.products) or 'none'}")
    agent = plan.all(Agent)[-1].name
    need(line.agent == agent, f"{agent} computes, not {line.agent}")
    together, instruction, m, n, a, b = place(draft, line.sites[0])
    _same("sites are", line.sites, tuple(together))
    _same("it is on", line.on, instruction.name if instruction else FMA.name)
    _same("m is", line.m, axis_name(m))
    _same("n is", line.n, axis_name(n))
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
    need(line.by in SINCE, f"{line.by!r} is no transport; known: {', '.join(SINCE)}")
    need(draft.gpu.number >= SINCE[line.by], f"{line.by} needs sm_{SINCE[line.by]}, and the target is {draft.gpu.arch}")
    need(line.by == "tma" or not apart, f"{LOAD} loads by tma, not by {line.by}")
    need(line.slots >= 1 and (line.slots == 1 or line.over), f"slots are {line.slots}, and 1 is held for a tile")
    least, most = (line.slots, line.slots) if apart else (min(line.slots - 1, 1), line.slots - 1)
    if line.by == "ld":
        need(line.slots <= 2, "ld fills two slots at most")
        least = most
    elif line.over:
        need(line.slots > 1, f"{line.by} fills one slot while another is read: two at least")
    need(least <= line.ahead <= most, f"{line.ahead} steps ahead, and of {line.slots} slots {most} can be filled early")
    one = len(plan.all(Product)) == 1 and warps(draft.instruction(draft.site(users[0].sites[0]))) > 1
    need(not line.late or (apart and one and line.over), "slots are freed late where one product of warpgroups has loads of its own")
    asked = [v for _, f in steps(draft) if isinstance(v := draft.option(f, "ring", 0), int) and v]
    if asked and line.over and line.by != "ld":
        _same("slots are", line.slots, max(asked))


def _stream(line: Stream, plan: Plan, draft: Draft) -> None:
    terms = {operand_text(x): (x, p) for p in plan.all(Product) for x in brought(draft, p)}
    need(line.operand in terms, f"the kernel has no operand {line.operand}; it has {', '.join(terms) or 'none'}")
    term, product = terms[line.operand]
    ring: Ring = plan.named(line.ring)
    slab = Slab(draft, plan, product, ring, term)
    loops = loops_of(draft, plan.all(Product), term)
    need(ring.over == loops, f"it changes with {_told(loops)}, and the slots of {ring.name} with {_told(ring.over)}")
    sizes = {axis_name(a): (a, draft.length(a, slab.site)) for a in (*slab.free, *slab.reduced)}
    parts = tuple(Word(name, (size,)) for name, (_, size) in sizes.items())
    need(set(line.axes) == set(parts) and len(line.axes) == len(parts), f"a step needs {_told(parts)} of it, not {_told(line.axes)}")
    axes = [sizes[w.name][0] for w in line.axes]
    memory, lengths = slab.memory(axes), {a: size for a, size in sizes.values()}
    need(line.memory == axis_name(memory), f"global memory is contiguous along {axis_name(memory)}, not {line.memory}")
    _asked(slab.options, swizzle=line.swizzle, pad=line.pad, multicast=line.multicast > 1, along=line.axes[-1].name)
    need(slab.options.get("by", "ld") in (ring.by, "tma", "cp.async") and ring.by in (slab.options.get("by", "ld"), "ld"),
         f"{ring.name} comes by {ring.by}, and the schedule has {line.operand} come by {slab.options.get('by', 'ld')}")  # fmt: skip
    need(line.swizzle in (0, 32, 64, 128) and line.pad >= 0, "slabs are swizzled by 32, 64 or 128 bytes, or not")
    panel = slab.panel(axes, lengths, line.swizzle)
    need(line.panel == panel, f"panels are {line.panel} wide, and {product.on} takes {panel}")
    slab.aligned(line, axes, lengths)
    cast = slab.cast(axes, line.multicast > 1)
    need(line.multicast == cast, f"its boxes go to {line.multicast} blocks, and a cluster has {cast}")
    if ring.by == "tma":
        need(line.vector == 0, "TMA brings the whole slab: vector is 0")
        return slab.box(line, axes, lengths)
    widest = WIDEST // term.dtype.size  # type: ignore[attr-defined]
    need(
        line.vector in (1, 2, 4, 8, 16) and line.vector <= widest and slab.fits(axes, lengths, memory, line.pad, line.vector),
        f"{line.vector} elements of {line.operand} do not lie together wherever a thread begins",
    )
    need(ring.by != "cp.async" or slab.copied(line.vector), "cp.async needs a plain load of which 4 bytes at least lie together")


def _rings_of(line: Product, plan: Plan, draft: Draft) -> None:
    """The rings of a product are those its operands come to."""
    streams = {s.operand: s for s in plan.all(Stream)}
    needed = {streams[t].ring for x in brought(draft, line) if (t := operand_text(x)) in streams}
    need(set(line.rings) == needed, f"its operands come to {', '.join(sorted(needed)) or 'none'}, not {', '.join(line.rings) or 'none'}")


def _combine(line: Combine, plan: Plan, draft: Draft) -> None:
    need(line.site in draft.names, f"the kernel has no reduction {line.site}; it has {', '.join(draft.names) or 'none'}")
    meant = combination(draft, line.site)
    need(line == meant, f"by the schedule its partial states are to meet as {meant or 'nowhere: each is whole'}")


def _keep(line: Keep, plan: Plan, draft: Draft) -> None:
    known = [*(b.name for b in draft.kernel.reads), *draft.names]
    need(line.what in known, f"nothing is called {line.what}; there are {', '.join(dict.fromkeys(known))}")


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
        return need(line == Result(line.store, line.agent), "only what gathers in shared memory has rows, columns or a way there")
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
    axis = next(a for a in draft.kernel.axes if axis_name(a) == line.columns)
    along = coefficient(flatten(store.index, store.buffer.type.element_strides), axis) == 1
    need(along, f"it is not contiguous along {line.columns}")
    size, length = store.buffer.type.dtype.size, draft.length(axis, tile)
    times = math.prod(f.size for f in draft.schedule.binding(draft.site(line.store), line.columns) if f.level == "time")
    fits = line.width > 0 and length % line.width == 0 and line.width % 8 == 0 and times in (1, length // line.width)
    need(fits, f"{length} columns are no subtiles of {line.width}")
    need(line.swizzle in (0, line.width * size) and line.swizzle <= 128, f"rows of {line.width * size} bytes are not swizzled by {line.swizzle}")
    need(line.slots >= 1 and line.pad >= 0, "it has a slot at least, and no negative pad")
    need(line.by in ("ld", "tma"), f"results leave by ld or by tma, not by {line.by!r}")
    need(line.by == "ld" or (draft.gpu.number >= 90 and not line.pad), "TMA is of sm_90 on, and leaves no room between rows")
    matrices = draft.gpu.number >= 90 and size == 2
    need(line.put == "st" or (line.put == "stmatrix" and matrices), f"{line.put!r} puts no {store.buffer.type.dtype} into shared memory")


def _limit(line: Limit, plan: Plan, draft: Draft) -> None:
    need(line.resident >= 1, "a block at least is to fit on a processor")
    if asked := draft.schedule.directive("resident"):
        _same("blocks are", line.resident, asked[0])


# -- the whole -----------------------------------------------------------------------------------------------------------


def _unsaid(kind: type[Line]) -> Callable[[Plan, Draft], Iterator[str]]:
    """For kinds of lines that every plan has."""

    def missing(plan: Plan, draft: Draft) -> Iterator[str]:
        if not plan.all(kind):
            yield f"it has no line `{kind.op}`"

    return missing


def _unmultiplied(plan: Plan, draft: Draft) -> Iterator[str]:
    done = {name for p in plan.all(Product) for name in p.sites}
    yield from (f"nothing says on what {name} runs: a line `product` is missing" for name in draft.products if name not in done)


def _unbrought(plan: Plan, draft: Draft) -> Iterator[str]:
    done = {s.operand for s in plan.all(Stream)}
    terms = dict.fromkeys(operand_text(x) for p in plan.all(Product) for x in brought(draft, p))
    yield from (f"nothing brings {text}: a line `stream` is missing" for text in terms if text not in done)


def _uncombined(plan: Plan, draft: Draft) -> Iterator[str]:
    done = {c.site for c in plan.all(Combine)}
    for name in draft.names:
        if name not in done and (meant := combination(draft, name)):
            yield f"nothing says where the partial states of {name} meet: `{meant}` is missing"


def _unkept(plan: Plan, draft: Draft) -> Iterator[str]:
    done = {line.what for line in plan.all(Keep)}
    yield from (f"the schedule keeps {name} in registers: a line `keep` is missing" for name in kept(draft) if name not in done)


def _unstored(plan: Plan, draft: Draft) -> Iterator[str]:
    done = {line.store for line in plan.all(Result)}
    names = dict.fromkeys(s.buffer.name for s in draft.kernel.stores)
    yield from (f"nothing says how {name} leaves: a line `result` is missing" for name in names if name not in done)


def _nothing(plan: Plan, draft: Draft) -> Iterator[str]:
    return iter(())


def budget(plan: Plan, draft: Draft) -> Iterator[Problem]:
    """What the machine has no room for: threads, registers, slabs in shared memory. Results, partial states and barriers
    come on top, which the kernel says that is written.
    """
    arch, threads, registers, used = draft.gpu.arch, 0, 0, 0
    for agent in plan.all(Agent):
        threads += 32 * agent.warps
        registers += 32 * agent.warps * agent.registers
        if threads > THREADS:
            yield agent, f"{threads} threads in a block, and {arch} has {THREADS}"
        whole = agent.first % WARPS_IN_A_GROUP == agent.warps % WARPS_IN_A_GROUP == 0 and draft.gpu.number >= 90
        if agent.registers and not (whole and agent.registers in range(24, 241, 8)):
            yield agent, "registers are for whole warpgroups from sm_90 on, and a multiple of 8 from 24 to 240"
        if registers > k.REGISTER_FILE:
            yield agent, f"{registers} registers with those before it, and a processor has {k.REGISTER_FILE}"
    terms: dict[str, Node] = {operand_text(x): x for p in plan.all(Product) for x in brought(draft, p)}
    for line in plan.all(Stream):
        kind = slab_type(line, terms[line.operand].dtype, plan.named(line.ring).slots)  # type: ignore[attr-defined]
        used += k.shared_bytes(k.Shared(line.name, kind))
        if used > draft.gpu.shared:
            yield line, f"{used} bytes of shared memory with those before it, and {arch} has {draft.gpu.shared}"


CHECKS: tuple[tuple[type[Line], Callable[..., None]], ...] = (
    (Order, _order),
    (Agent, _agent),
    (Product, _product),
    (Ring, _ring),
    (Stream, _stream),
    (Product, _rings_of),
    (Combine, _combine),
    (Keep, _keep),
    (Result, _result),
    (Limit, _limit),
)

MISSING: dict[type[Line], Callable[[Plan, Draft], Iterator[str]]] = {
    Order: _unsaid(Order),
    Agent: _unsaid(Agent),
    Product: _unmultiplied,
    Ring: _nothing,
    Stream: _unbrought,
    Combine: _uncombined,
    Keep: _unkept,
    Result: _unstored,
    Limit: _nothing,
}
