"""Shared memory and barriers that the agents of a block have in common."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile

from terrazzo.hw.products import matrix, warps
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.node import Node, topological
from terrazzo.ir.plan import Plan, Product, Ring, Stage, Stream
from terrazzo.ir.schedule import Word
from terrazzo.rules.tile.digits import Bindings
from terrazzo.rules.tile.draft import Draft
from terrazzo.rules.tile.handed import made
from terrazzo.rules.tile.products import CONVERTED
from terrazzo.rules.tile.rings import brought, operand_text
from terrazzo.rules.tile.slabs import slab_type
from terrazzo.rules.tile.vectors import vectors
from terrazzo.rules.tile_to_kernel.builder import Builder
from terrazzo.rules.transports import TRANSPORTS


@dataclass(frozen=True)
class Memory:
    """What the agents of a block share: a place for every stream, two sets of barriers for every ring that needs them,
    one that says whose turn it is to multiply, and those by which teams lag behind one another.
    """

    places: dict[str, k.Shared]
    full: dict[str, k.Barriers]
    empty: dict[str, k.Barriers]
    turn: k.Barriers | None = None
    lag: k.Barriers | None = None


def operands(draft: Draft, plan: Plan) -> dict[str, Node]:
    """The terms that streams bring, by their text."""
    every = [x for p in plan.all(Product) for x in brought(draft, p)]
    return {operand_text(x): x for x in (*every, *vectors(draft, plan))}


def whole(plan: Plan, s: Stream) -> Stream:
    """A stream with the columns of those that lie behind it."""
    count = 1 + sum(x.behind == s.name for x in plan.all(Stream))
    columns = {p.n for p in plan.all(Product)} if count > 1 else {}
    axes = tuple(Word(w.name, (w.args[0] * count,)) if w.name in columns else w for w in s.axes)
    return Stream(**{**{f: getattr(s, f) for f in s._fields}, "axes": axes})


def share(draft: Draft, plan: Plan, builder: Builder, bindings: Bindings) -> Memory:
    """Shared memory for streams, and the barriers of rings that boxes come to."""
    terms = operands(draft, plan)
    places: dict[str, k.Shared] = {}
    for s in plan.all(Stream):
        ring: Ring = plan.named(s.ring)
        if s.behind:
            places[s.name] = places[s.behind]
            continue
        kind = slab_type(whole(plan, s), terms[s.operand].dtype, ring.slots)  # type: ignore[attr-defined]
        places[s.name] = builder.memory(s.name, kind, s.swizzle)
    for line in plan.all(Stage):
        factors = (x for c in draft.products.values() for x in made(c))
        term = next(x for x in factors if draft.products[line.of].reduce in topological([x]))
        kind = slab_type(line.stream, term.dtype, line.slots)  # type: ignore[attr-defined]
        places[line.name] = builder.memory(line.name, kind, line.swizzle)
    memory = Memory(places, {}, {})
    for ring in plan.all(Ring):
        if not TRANSPORTS[ring.by].boxes:
            continue
        memory.full[ring.name] = builder.barriers("full", ring.slots, 1)
        if ring.producer != ring.consumer:
            memory.empty[ring.name] = builder.barriers("empty", ring.slots, arrivals(plan, ring, bindings))
    if bindings.agent.turns:
        memory = Memory(places, memory.full, memory.empty, builder.barriers("turn", bindings.agent.teams, 1))
    if bindings.agent.lag:
        slots = lagging(plan).slots * (bindings.agent.teams - 1)
        memory = replace(memory, lag=builder.barriers("lag", slots, 1))
    more = [x for x in (memory.turn, memory.lag) if x is not None]
    every = (*memory.full.values(), *memory.empty.values(), *more)
    if every:
        builder.where([-bindings.everyone, -k.LANE], lambda: builder.add(*map(k.InitBarriers, every)))
        builder.add(k.ClusterSync() if bindings.order.cluster_size > 1 else k.Sync())
    return memory


def room(draft: Draft, plan: Plan, memory: Memory) -> int:
    """Bytes at the beginning of the block's memory that nobody needs once all steps of a tile are done: slabs of what
    products multiply.
    """
    every = {operand_text(x) for p in plan.all(Product) for x in brought(draft, p)}
    slabs = takewhile(lambda s: s.operand in every and plan.named(s.ring).over, plan.all(Stream))
    return sum(k.shared_bytes(x) for x in {memory.places[s.name]: None for s in slabs})


def lagging(plan: Plan) -> Ring:
    """The ring whose slots say how far a team may be before the one that lags behind it."""
    every: list[Ring] = [plan.named(name) for name in plan.all(Product)[0].rings]
    return next(r for r in every if r.over)


def arrivals(plan: Plan, ring: Ring, bindings: Bindings) -> int:
    """How often a slot is freed: by a thread of every team, or of every warp, for every block that shares the boxes."""
    consumer = plan.named(ring.consumer)
    shared = max([s.multicast for s in plan.all(Stream) if s.ring == ring.name])
    teams = 1 if consumer.turns else consumer.teams
    each: int = teams if freed_by_teams(plan, ring) else consumer.warps // consumer.teams * teams
    return each * shared


def freed_by_teams(plan: Plan, ring: Ring) -> bool:
    """Whether a warpgroup is done with a slot when its products are. Warps that read it themselves, or multiply by
    themselves, are done one by one.
    """
    users = [p for p in plan.all(Product) if ring.name in p.rings]
    if any(s.read for s in plan.all(Stream) if s.ring == ring.name):
        return False
    held = any({p.a, p.b} & {"ldmatrix", CONVERTED} for p in users)
    return any(warps(matrix(p.on)) > 1 for p in users) and not held
