"""Schedules of products on the instructions of warpgroups: which tile, which cluster, who loads, by a model of what
each costs. The model's numbers are those of the machine's record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from terrazzo.collector import remembered
from terrazzo.hw import tma
from terrazzo.hw.gpu import Gpu, Warpgroups
from terrazzo.hw.products import missing
from terrazzo.hw.wgmma import INSTRUCTIONS, WarpgroupInstruction
from terrazzo.ir.address import coefficient, mentions
from terrazzo.ir.concatenated import concatenated, loaded
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.schedule import Factor, Operand, Schedule, Site, Word
from terrazzo.ir.sites import Product, called, made_of
from terrazzo.rules.access import box
from terrazzo.rules.loop.precision.number_parts import every_digit
from terrazzo.rules.loop_to_tile.products import traffic
from terrazzo.rules.loop_to_tile.products.leaving import leaves, narrowest, result_bytes, result_rate, result_sites
from terrazzo.rules.loop_to_tile.products.making import (
    BEFORE,
    BEHIND,
    MADE,
    MADE_ALONE,
    converted,
    making,
    not_converted,
    promotes,
)
from terrazzo.rules.loop_to_tile.products.results import along, partly_stored, results
from terrazzo.rules.loop_to_tile.products.warpgroup_tiles import (
    COLUMNS,
    FEWEST,
    LEAST,
    ROWS,
    Tile,
    abreast,
    cuts,
    roots,
    runs,
    shapes,
    sharing,
    step,
    steps,
)
from terrazzo.rules.loop_to_tile.products.work import LINE, LONG, STEP, Work, clock, facts_of, lasts, limited
from terrazzo.rules.loop_to_tile.walked.threads import ceil, grid
from terrazzo.rules.swizzles import swizzled
from terrazzo.rules.tile.draft import axis_name

PIECES = 8
"""Tensors that an operand may be one after the other, at most: each has a tensor map of 128 bytes among the arguments
of a kernel, of 4096 in all, and who loads asks in every step which of them it is.
"""
SLOTS = 8
"""Of a ring, at most."""
ENOUGH = 5
"""Slots to which others add nothing (benchmarks/fits/h200-tiles.json), unless factors are parts, whose steps are
longer: Linear(3584, 18944) on 32 rows in bf16 was within 3 % of 36 us with five slots of 256 x 32 x 64, and took 50
with a sixth, in the memory that results need where they do not leave registers (H200).
"""
PROMOTION = 25.0
"""Nanoseconds for each 64 columns, for waiting for those of a step's products that are promoted together and adding
them up, where no other warpgroup multiplies meanwhile. Fitted to the same products as `MADE_ALONE`.
"""
REACH = 1100.0
"""Nanoseconds that slabs must be on their way for blocks of a cluster to save power by what they share: in turns those
of 128 x 192 are for a microsecond only, and clusters took 1.01 to 1.03 (H200).
"""
REGISTERS = {1: (40, 240), 2: (40, 232), 3: (32, 160)}
"""Of a thread that loads and of one that multiplies, by the number of warpgroups that multiply."""


Walks = Callable[[Product, Tile, Gpu], traffic.Walk]
"""In which order the tiles of a product are walked."""


class Plan(NamedTuple):
    """A tile of a product, in so many pieces of k, and the nanoseconds the model gives it."""

    tile: Tile
    pieces: int
    instruction: WarpgroupInstruction
    time: float

    @property
    def unit(self) -> int:
        """What pieces of k are multiples of."""
        return self.tile.k

    def __str__(self) -> str:
        t = self.tile
        cluster = f", clusters of 2 along {axis_name(t.split)}" if t.split else ""
        cluster += f", whose steps {t.share} blocks share" if t.share > 1 else ""
        cluster += ", in turns" if t.turns else ""
        tile = f"{t.m} ({axis_name(t.rows)}) x {t.n} ({axis_name(t.columns)}) x {t.k}"
        return f"{tile} on {self.instruction.name}{cluster}: {self.time / 1000:.1f} us by the model"


def plans(p: Product, gpu: Gpu, walk: Walks = traffic.walk) -> tuple[Plan, ...]:
    """Every plan that may fit, best first, as its tiles are walked; none where the machine has no such instructions or
    they take other types. Of those that are alike, as all are that wait for memory, that of fewer waves is first; then
    that of more blocks, which all ask at once, and of squarer tiles, which read less.
    """
    return _plans(p.nameless, gpu, walk)


@remembered
def _plans(p: Product, gpu: Gpu, walk: Walks) -> tuple[Plan, ...]:
    found: list[tuple[Plan, int]] = []
    if gpu.warpgroups is None:
        return ()

    def tried(tile: Tile, pieces: int, i: WarpgroupInstruction, time: float, work: Work) -> None:
        plan = Plan(tile, pieces, i, limited(work, time, results(p).moved, gpu) + partly_stored(p))
        found.append((plan, work.tiles * work.blocks * pieces))

    for i in instructions_for(p, gpu)[0]:
        for tile in (*(shapes(p, i.shape[1]) if i.shape[1] in COLUMNS else ()), *abreast(p, i.shape[1])):
            way = walk(p, tile, gpu)
            if tile.split is None:  # those that clusters divide follow it
                alone = whole = work_of(p, tile, way, gpu, gpu.warpgroups)
            else:
                whole = _divided(p, tile, way, alone, gpu, gpu.warpgroups)
            if tile.turns and not _takes_turns(p, tile, whole.tiles, gpu):
                continue
            for s, time in _times(p, tile, way, whole, cuts(p, tile, whole.tiles, gpu), gpu, gpu.warpgroups):
                tried(tile, s, i, time, whole)
            for x in sharing(p, tile, whole.tiles, gpu):
                work = work_of(p, x, walk(p, x, gpu), gpu, gpu.warpgroups)
                waits = 1 + (0.0 if promotes(p) else gpu.warpgroups.sharing * max(x.share - 2, 0))
                tried(x, 1, i, lasts(work, gpu) * waits, work)

    def order(x: tuple[Plan, int]) -> tuple[float, ...]:
        plan, blocks = x
        if plan.time >= LONG:  # waves are many
            return (200 * math.log(plan.time),)
        return alike(plan.time), ceil(blocks, gpu.processors), -blocks, plan.tile.m + plan.tile.n

    return tuple(plan for plan, _ in sorted((x for x in found if x[0].time < math.inf), key=order))


def _drawn(p: Product, tile: Tile, fetched: float, slots: int, gpu: Gpu, has: Warpgroups) -> float:
    """Bytes that count for power of those `fetched` for a step: all, where blocks of a cluster that share them need not
    wait for each other: while one slot is multiplied and another is about to be freed, the rest of a ring is on its
    way. Else what a block would fetch alone.
    """
    step = 2.0 * tile.m * tile.n * tile.k * facts_of(p).terms * gpu.processors / has.sustained
    if tile.split is None or (slots - 2) * step >= REACH:
        return fetched
    tile = replace(tile, split=None)
    return traffic.fetched(p, tile, has, traffic.alone(p, tile, gpu))


def _takes_turns(p: Product, tile: Tile, tiles: int, gpu: Gpu) -> bool:
    """Whether a block has several tiles, one of which may be stored while the next is multiplied. Where results leave
    from registers, ptxas moves what is done with them to before the last products are waited for. What each result
    reads is fetched subtile by subtile, and where these are many little of that is hidden: a residual of 8192 x 2048
    took 115 us with tiles of 128 columns and 136 with 160, which have five subtiles for two (H200).
    """
    wide = tile.width(narrowest(p)) * narrowest(p) == LINE or not (results(p).read or roots(p, tile.columns))
    return tiles * tile.blocks > gpu.processors and leaves(p, tile) != "" and wide


def alike(time: float) -> int:
    """A number that times have in common which differ by half a percent at most: less than the model knows."""
    return round(200 * math.log(time))


def multiplied(p: Product) -> bool:
    """Whether there are instructions for numbers such as a product's, wherever they lie."""
    return {x.dtype for x in p.operands} <= {i.operand for i in INSTRUCTIONS}  # type: ignore[attr-defined]


def instructions_for(p: Product, gpu: Gpu) -> tuple[list[WarpgroupInstruction], str]:
    """The instructions that take a product's operands on this machine, or none and why."""
    types = {x.dtype for x in p.operands}  # type: ignore[attr-defined]
    if len(types) != 1:
        return [], "its factors are of different types"
    across = _across(p)
    least = FEWEST if across else STEP
    if (short := p.axes[-1].extent) < least and len(p.axes) > 1:
        return [], f"it sums over {len(p.axes)} axes, the last of which has {short} elements of a step's {least}"
    if why := not_converted(p, step(p)):
        return [], why
    for x in p.operands:
        every = dict.fromkeys([*loaded(x), made_of(x)])
        if why := next(filter(None, (_no_steps(x, p), *(_no_boxes(y, p, across) for y in every if y is not None))), ""):
            return [], f"{called(x)}: {why}"
    (kind,) = types
    total = p.sites[0].reduce.dtype
    known = [i for i in INSTRUCTIONS if i.operand is kind and i.d.dtype is total]
    if not known:
        return [], f"it adds up no products of {kind} in {total}"
    if lacks := missing(known[0], gpu):
        return [], f"it needs {lacks}, and the target is {gpu.arch}"
    return known, ""


def _no_steps(x: Any, p: Product) -> str:
    """Why an operand that is one tensor after the other does not come step by step; nothing where it does, or is not
    such a one: a step has one of them, which all lie alike.
    """
    pieces = concatenated(x)
    if len(pieces) > PIECES:
        return f"it is {len(pieces)} tensors one after the other, and a kernel takes {PIECES} at most"
    if any(y.axis is not p.axes[-1] or y.first % step(p) for y in pieces):
        return "a tensor ends within a step, and another begins"
    runs = {next((a for a in (p.m, p.n, *p.axes) if along(y.load, a)), None) for y in pieces}
    return "memory runs along one axis of a tensor, and along another of the next" if len(runs) > 1 else ""


def _across(p: Product) -> bool:
    """Whether memory runs across the steps of a product in all that it reads: a step may be short, and what is read is
    as wide.
    """
    return all(isinstance(x, l.Load) and (along(x, p.m) or along(x, p.n)) for x in p.operands)


def _no_boxes(x: Any, p: Product, across: bool) -> str:
    """Why TMA moves no boxes of an operand, however long they are; nothing where it may. Where memory runs `across` the
    steps, and a box is one point wide, outer axes of steps may walk in any steps; or in those that boxes are long.
    """
    *outer, depth = p.axes
    inner = [a for a in (p.m, p.n, depth) if a in x.free]
    pairs = [(a, b, e) for a in outer for b in inner for e in x.index if mentions(e, a) and mentions(e, b)]
    beside = [a for a, b, e in pairs if b is not depth or (coefficient(e, a) or 1) % depth.extent]
    beside = beside if across else [a for a in outer if a in x.free]
    found = box(x, dict.fromkeys((*inner, *beside), 1))
    if isinstance(found, str):
        return found
    if found.along[-1] is None:
        return "memory runs along no axis of the product"
    return tma.problem(found.place.tensor, (*found.sides[:-1], LEAST // x.dtype.size), 0)


def promotion(p: Product, n: int, k: int) -> float:
    """Nanoseconds of a step of k products in which a warpgroup that is alone adds up its sums of n columns. Products
    that are scaled alike are added up together; where someone wants all digits, the large ones of a long step in two
    halves.
    """
    scales = p.sites[0].scales
    return PROMOTION * n / 64 * (len(set(scales)) + (every_digit(scales) and k == STEP))


def _bytes(p: Product, tile: Tile) -> int:
    """Of a step in shared memory: every operand has a slab of its own."""
    m, n, rows = tile.m, tile.n, tile.rows
    return sum((m if rows in x.free else n) * x.size for x in facts_of(p).sources) * tile.k


def _slots(p: Product, tile: Tile, gpu: Gpu) -> int:
    """Of a ring, beside results on their way, or in their place where they leave registers."""
    size, room, rows = _bytes(p, tile), gpu.shared - 2048, tile.m * tile.teams // tile.groups
    found = min(SLOTS, (room - result_bytes(p, tile, rows)) // size)
    if not leaves(p, tile):
        found = max(found, min(SLOTS if promotes(p) else ENOUGH, room // size))
    given = tile.m * tile.n * 4 * len(p.sites) if tile.share > 1 else 0  # where the slabs were, or behind them
    return found if given <= found * size else found - ceil(given, size)


def after(p: Product, points: int, has: Warpgroups, tile: Tile | None = None) -> float:
    """Nanoseconds in which a processor computes so many results of a product from its sums. A thread has those of two
    rows, for both of which it computes what depends on the column alone. In a tile, it loads two of a row at once, but
    one by one what memory runs across the rows in.
    """
    r = results(p)
    if tile is None:
        computed = r.operations + r.alone[p.n] / 2
        return points * (r.read / has.read + computed / has.after)
    computed = r.operations + r.alone[tile.columns] / 2 + r.alone[tile.rows] * 4 / tile.n
    return points * ((r.read + r.across[tile.columns]) / has.read + computed / has.after)


def work_of(p: Product, tile: Tile, way: traffic.Walk, gpu: Gpu, has: Warpgroups) -> Work:
    """What the kernel of a tile does, in one piece."""
    (outer, inner), few = steps(p, tile), traffic.alone(p, tile, gpu)
    fetched, slots = traffic.fetched(p, tile, has, few), _slots(p, tile, gpu)
    return Work(
        tile.m, tile.n, facts_of(p).terms, traffic.clusters(p, tile), tile.blocks,
        steps=outer * ceil(inner, tile.share),
        fetched=fetched,
        held=_bytes(p, tile),
        slots=slots,
        results=results(p).stored,
        rate=result_rate(p, tile, gpu, has) * tile.parts,
        least=_least(p, tile, way, gpu, has),
        extra=_extra(p, tile, gpu),
        depth=tile.k,
        after=after(p, tile.m * tile.n // tile.parts, has, tile) + _meeting(p, tile, has) + _first(p, tile, gpu),
        leaving=traffic.leaving(p, tile, way, has, few),
        shared=tile.share > 1,
        parts=promotes(p) and tile.k == STEP,
        wide=tile.n * tile.abreast,
        made=_made(p, tile, gpu),
        alone=tile.groups == 1,
        turns=tile.turns,
        read=_read(p, tile),
        beyond=traffic.beyond(p, tile),
        empty=traffic.empty(tile),
        drawn=0.0 if promotes(p) else _drawn(p, tile, fetched, slots, gpu, has),
    )  # fmt: skip


def _least(p: Product, tile: Tile, way: traffic.Walk, gpu: Gpu, has: Warpgroups) -> float:
    """Bytes that memory brings and takes: each once, and what it is asked for again."""
    return facts_of(p).bytes + results(p).moved + traffic.again(p, tile, way, gpu, has)


def _divided(p: Product, tile: Tile, way: traffic.Walk, alone: Work, gpu: Gpu, has: Warpgroups) -> Work:
    """The same of a tile of which blocks of a cluster divide an axis, by what one alone does."""
    few = traffic.alone(p, tile, gpu)
    fetched = traffic.fetched(p, tile, has, few)
    return alone._replace(
        tiles=traffic.clusters(p, tile),
        blocks=tile.blocks,
        fetched=fetched,
        least=_least(p, tile, way, gpu, has),
        leaving=traffic.leaving(p, tile, way, has, few),
        beyond=traffic.beyond(p, tile),
        empty=traffic.empty(tile),
        drawn=0.0 if promotes(p) else _drawn(p, tile, fetched, alone.slots, gpu, has),
    )


def _times(
    p: Product, tile: Tile, way: traffic.Walk, whole: Work, cut: Iterable[int], gpu: Gpu, has: Warpgroups
) -> Iterator[tuple[int, float]]:
    """What the kernel of a tile takes in so many pieces each; in several it pays for its partial sums."""
    clocks: dict[bool, Callable[[int, int], float]] = {}
    for pieces in cut:
        if pieces == 1:
            yield 1, lasts(whole, gpu)
            continue
        if (few := traffic.alone(p, tile, gpu, pieces)) not in clocks:
            count, (outer, inner) = len(p.sites), steps(p, tile)
            sums = count * results(p).points
            part = whole._replace(
                results=4 * count, rate=has.direct, least=whole.least - results(p).moved + 4 * sums,
                after=_first(p, tile, gpu), fetched=traffic.fetched(p, tile, has, few),
                leaving=traffic.leaving(p, tile, way, has, few),
            )  # fmt: skip
            clocks[few], states = clock(part, gpu), has.parts_states if promotes(p) else has.states
        time = clocks[few](whole.tiles * pieces, outer * ceil(inner, pieces * tile.share))
        yield pieces, time + has.part + states * pieces * sums * 4 / gpu.cache


def _meeting(p: Product, tile: Tile, has: Warpgroups) -> float:
    """What it takes that blocks of a cluster give sums to each other, and that clusters far apart, which walk one tile
    each, fetch the larger operand again.
    """
    if tile.share == 1:
        return 0.0
    each = tile.m * tile.n * 4 * len(p.sites)
    larger = max(p.sources, key=lambda x: p.touched(x) * x.dtype.size)
    axes = zip((tile.rows, tile.columns), tile.clusters, strict=True)
    times = math.prod(count for a, count in axes if a not in larger.free)
    again: float = (times - 1) * p.touched(larger) * larger.dtype.size / has.again
    meeting = has.parts_meeting if promotes(p) else has.meeting
    return meeting + again + each * (1 + tile.share / tile.parts) / has.given


def _extra(p: Product, tile: Tile, gpu: Gpu) -> float:
    """Nanoseconds of a step that nothing hides: threads make factors of what lies in shared memory, and add up sums."""
    if not (promotes(p) or converted(p)):
        return 0.0
    made = making(p) * tile.m * tile.k * gpu.processors / (gpu.fma / 2)
    if not promotes(p):
        return made / BEHIND if tile.groups > 1 else 0.0
    if tile.groups > 1:
        return made
    return promotion(p, tile.n, tile.k) + made * MADE_ALONE / MADE


def _made(p: Product, tile: Tile, gpu: Gpu) -> float:
    """Nanoseconds of a step in which a warpgroup makes factors other than parts, and waits, before it multiplies."""
    if promotes(p) or not converted(p):
        return 0.0
    return BEFORE + making(p) * tile.m * tile.k * gpu.processors / (gpu.fma / 2)


def _read(p: Product, tile: Tile) -> float:
    """Bytes of slabs that instructions read in a step: rows of warpgroups, and all columns for each."""
    rows = 0 if converted(p) else ROWS
    size: int = p.operands[0].dtype.size  # type: ignore[attr-defined]
    return size * facts_of(p).terms / tile.abreast * (tile.m // ROWS) * (rows + tile.n * tile.abreast) * tile.k


def _first(p: Product, tile: Tile, gpu: Gpu) -> float:
    """Nanoseconds in which a tile's first parts are made, while nothing is multiplied."""
    if not (promotes(p) and converted(p)):
        return 0.0
    return MADE_ALONE * tile.m * tile.k * gpu.processors / (gpu.fma / 2)


def schedule(p: Product, plan: Plan, gpu: Gpu) -> Schedule:
    """The bindings of a plan in one piece. Results of 16 bits gather in shared memory."""
    t = plan.tile
    tiles = {a: ceil(a.extent, t.covered(a)) for a in (p.m, p.n)}
    two: dict[Any, tuple[tuple[str, int], ...]] = {t.split: (("cluster", 2),)}
    lines: list[tuple[str, Any]] = [
        (a.name, grid(ceil(a.extent, 2 if a in two else 1), *two.get(a, ()))) for a in p.batch
    ]
    way = traffic.walk(p, t, gpu)
    for a in (way.outer, way.inner):
        lines.append((axis_name(a), grid(tiles[a], *two.get(a, ()), ("block", t.m if a is t.rows else t.n))))
    *outer, depth = p.axes
    lines += [(f"r{a.label}", (Factor("time", a.extent),)) for a in outer]
    name = f"r{depth.label}"
    ahead, slots = _ahead(p, t, gpu), _slots(p, t, gpu) + 1
    options = (("ring", slots - 1), *([("promote", True)] if promotes(p) else []))
    sharing = (Factor("cluster", t.share),) if t.share > 1 else ()
    lines.append((name, (*sharing, Factor("time", ceil(depth.extent, t.k * t.share), options), Factor("block", t.k))))
    order = (("order", Word("grouped", (way.together,))),) if way.together > 1 else ()
    blocks = gpu.processors // t.blocks * t.blocks
    walk = (("persistent", (blocks,), order),) if t.share == 1 else ()
    registers = (("registers", REGISTERS[t.teams]),) if t.share == 1 else ()
    lag = (("lag", True),) if converted(p) and promotes(p) and t.groups > 1 else ()
    turns = (("turns", True),) if t.turns else ()
    roles = ("load", Word("warp", (1,))), ("math", Word("warpgroup", (t.teams,))), *registers, *lag, *turns
    each = (Factor("reg", t.each),) if t.each > 1 else ()
    site = Site(
        p.names,
        (
            (axis_name(t.rows), (Factor("warpgroup", t.groups), *each, Factor("inst.m", ROWS))),
            (axis_name(t.columns), (Factor("inst.n", t.n),)),
            (name, (Factor("reg", t.k // 16), Factor("inst.k", 16))),
        ),
        tuple({called(x): _operand(x, t, slots if ahead in x.free else 0) for x in p.sources}.items()),
        plan.instruction.name,
    )
    return Schedule(
        p.kernel.name, gpu.arch, tuple(lines), (),
        (*walk, ("roles", (), roles)),
        (site, *result_sites(p, t, leaves(p, t))),
    )  # fmt: skip


def _operand(x: Any, t: Tile, slots: int) -> Operand:
    """By TMA, for both blocks of a cluster where they need the same; in slots of its own, if any."""
    shared = (("multicast", True),) if t.split is not None and t.split not in x.free else ()
    own = (("slots", slots),) if slots else ()
    return Operand("smem", (("by", "tma"), ("swizzle", swizzled(x.dtype.size * runs(x, t))), *own, *shared))


def _ahead(p: Product, t: Tile, gpu: Gpu) -> Any:
    """The axis of the larger factor where its parts come from memory for one or two tiles, and there is room for a
    third slot of it: the other one's come from the cache, and sooner. None where there is not.
    """
    slots, larger = _slots(p, t, gpu), max(p.sources, key=lambda x: p.touched(x) * x.dtype.size)
    axis, size = (t.rows, t.m) if t.rows in larger.free else (t.columns, t.n)
    other = t.clusters[0 if axis is t.columns else 1]
    each = sum(x.size for x in facts_of(p).sources if axis in x.free) * size * t.k
    alone = promotes(p) and not converted(p) and t.split is None and t.share == 1 and not leaves(p, t)
    room = gpu.shared - 2048 - slots * _bytes(p, t) - each
    return axis if alone and slots == 2 and other <= 2 and room >= 0 else None
