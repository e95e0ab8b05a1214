"""Schedules of a product of a product on the instructions of warpgroups, and what the model says of each."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from terrazzo.hw.gpu import Gpu
from terrazzo.hw.wgmma import PRODUCTS
from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Loaded
from terrazzo.ir.node import substitute, topological
from terrazzo.ir.schedule import Factor, Operand, Schedule, Site, Word
from terrazzo.ir.sites import called, loads
from terrazzo.rules.loop_to_tile.chains.chain import Chain
from terrazzo.rules.loop_to_tile.chains.chain_schedules import Tile, alike, parts
from terrazzo.rules.loop_to_tile.products.warpgroup_tiles import ROWS
from terrazzo.rules.loop_to_tile.products.warpgroups import REGISTERS
from terrazzo.rules.loop_to_tile.walked.threads import ceil
from terrazzo.rules.swizzles import swizzled
from terrazzo.rules.tile.draft import axis_name

STEP = 128
"""Columns of the inner product that a warpgroup has in a step, at most."""
MOST_SLOTS = 4
"""Slots for each operand of a step: more are never waited for less."""
HELD, FULL = 200, 224
"""Registers of a thread for what is summed, at most, and with factors made of that: what is left of 240 is for what
these are made of besides, and for addresses.
"""
WIDE = 192
"""Columns of sums of parts that a warpgroup has registers for: two blocks share more, and find the scores both."""
WIDTHS = 128, 96, 64, 48, 32
"""Columns of the inner product that a warpgroup has in a step of parts."""
VECTORS = 2
"""Vectors of numbers of 32 bits that come with a step's slabs: what its columns have once each."""
BARRIERS = 1024
"""Bytes of shared memory for barriers, and for what slabs begin at multiples of."""
EXPONENTIALS = 27.2
"""Exponentials that a processor finds in a nanosecond: 16 in each of 1.7 cycles."""
BEGUN = 300.0
"""Nanoseconds of a step of parts in which nobody multiplies: 4 x 16 x 2048 x 64 took 646 us in steps of 64 columns on
an H200 and 607 in steps of 128. That one warpgroup lagged behind the other gained nothing there (645 without).
"""
ROUNDED = 40.0
"""Parts of weights that a processor makes in a nanosecond: four instructions each. An estimate."""
BESIDE = {(False, 1): 1.0, (False, 2): 0.8, (False, 3): 0.7, (True, 1): 1.0, (True, 2): 0.5, (True, 3): 0.35}
"""How much of the time for exponentials is not hidden behind products: whether steps overlap, and by the number of
warpgroups. 4 x 32 x 2048 x 128 took 497 us with two on an H200 and 455 overlapped (a text by hand); that three hide
more is an estimate. One hides none: 1 x 32 x 8192 x 256, causal, took 2145 us so, in blocks that stay (22 November
2026), and `HELD_UP` is 1.25 of that. One whose products take turns waits for what it makes itself.
"""
HELD_UP = 1.25
"""How much longer steps take in blocks that stay for several tiles which are unlike, where what is held for a tile has
one slot, so that the next tile's comes when this one is done: of heads of 256, causal, 4 x 32 x 2048 took 527 us on an
H200 where the model without it says 423, and 16 x 16 x 1024 283 where it says 233; 1 x 32/8 x 16384, with a block for
each tile, took 6210 where it says 6063 (22 November 2026). So it is with one warpgroup whose products take turns:
gradients of keys and of values of 4 x 32 x 2048 x 256, causal, took 867 and 904 us, and 698 and 820 with a block for
each tile. With two, one multiplies while the other waits (328 us and 359; 23 November 2026).
"""
TURNAROUND = 250.0
"""Nanoseconds from a warpgroup's scores to its next ones, besides its products and exponentials. An estimate."""
BLOCK, TILE = 3300.0, 1000.0
"""Nanoseconds that a block takes to begin and to end, and a tile where blocks stay for several: the former is what is
left of 16 x 16 x 1024 x 128 and 4 x 32 x 2048 x 128 on an H200 (274 and 497 us), the latter an estimate.
"""
SCATTERED = 10.2
"""What a processor loads of scores' own numbers in a nanosecond, where each thread loads two at a time of many rows:
4 x 32 x 2048 x 128 with a bias took 824 us on an H200, and 427 without.
"""
CACHED = 32 << 20
"""Bytes of the second level cache that operands of tiles that run at the same time may take."""


@dataclass(frozen=True)
class Groups:
    """`count` warpgroups have 64 rows each, and `step` columns of the inner product in a step, of which operands have
    `slots`. Steps overlap, or do not; results gather in shared memory, or do not. There are `blocks` that stay for
    several tiles (0: each has one), and walk `together` rows of tiles at a time; what is held for a tile has `held`
    slots: the next one's comes while this one is multiplied. Where products take `turns`, each begins by itself. Blocks
    may share the outer columns: so many lie `blocks_across`. Tiles may be `sorted`: the longest ones of all heads come
    first. What every score has of its own, as a bias, comes with the slabs of a step where it is `brought`.
    """

    count: int
    step: int
    slots: int
    overlap: bool
    gathered: bool
    blocks: int = 0
    together: int = 0
    held: int = 1
    turns: bool = False
    blocks_across: int = 1
    sorted: bool = False
    brought: bool = False

    def shared(self, c: Chain) -> int:
        """Bytes of shared memory."""
        width, rows = c.width // self.blocks_across, self.count * ROWS
        more = [x for x in c.along if not ((self.turns or c.terms > 1) and _brought(c, x))]
        along = c.brought + len(more) * width
        operands = 2 * (c.down * self.held * rows + self.slots * self.step * along)
        results = 2 * len(c.outside) * gathering(c) * rows * parts(width)
        vectors = 4 * VECTORS * self.slots * self.step if self.turns else 0
        own = sum(self.slots * rows * self.step * x.dtype.size for x in points(c)) if self.brought else 0
        return operands + vectors + own + (results if self.gathered else 0)


def on_warpgroups(c: Chain, gpu: Gpu, way: Groups, longest_first: bool = False) -> Schedule | None:
    """A producer warp, warpgroups of 64 rows each, slots for the operands of a step. None where no instruction fits."""
    kind = c.operands[0].dtype.name  # type: ignore[attr-defined]
    width, step = c.width // way.blocks_across, way.step
    inner, outer = (f"wgmma.m64n{n}k16.f32.{kind}" for n in (step, width))
    if inner not in PRODUCTS or outer not in PRODUCTS or len(_wide(c)) != len(c.outside):
        return None
    name = axis_name(c.steps)
    mine = (c.rows.name, (Factor("warpgroup", way.count), Factor("inst.m", ROWS)))
    across = (name, (Factor("inst.n", step),))
    columns = (c.columns.name, (Factor("inst.n", width),))

    def first(names: tuple[str, ...], depth: Any, deep: int) -> Site:
        along = {called(x): _by_tma(deep, way.held if c.rows in x.free else 1) for x in c.read(*names)}
        along |= {called(x): _by_tma(step, 1, x.dtype.size) for x in points(c)} if way.brought else {}
        return Site(names, (mine, across, _depth(depth, deep)), (*along.items(),), inner)

    def last(sum_: str, terms: Sequence[Any]) -> Site:
        along = {called(x): _by_tma(width) for x in terms}
        return Site((sum_,), (mine, columns, _depth(c.steps, step)), (*along.items(),), outer)

    each = [(x,) for x in c.sums] if way.turns else [c.sums]
    sites = (
        *(first(*x) for x in zip(each, c.depths, c.deep, strict=False)),
        *(last(x, c.read(x)) for x, _ in c.outside),
    )
    results = _gathered(c) if way.gathered else alike(c)
    near = points(c) if not (longest_first or way.together or way.sorted) and _shares(c) else ()
    tile = Tile(way.count * ROWS, step, way.slots, way.blocks_across, way.sorted, near)
    lines = tile.lines(c, longest_first, overlap=way.overlap)
    return Schedule(c.kernel.name, gpu.arch, tuple(lines), (), _directives(way), (*sites, *results))


def points(c: Chain) -> tuple[Any, ...]:
    """What is loaded for every score by itself, and is a box of memory for a step of a tile."""
    loads = [x for x in c.kernel.terms if isinstance(x, l.Load) and {c.rows, c.steps} <= x.free and not x.inside]
    places = {x: flatten(x.index, x.buffer.type.element_strides) for x in loads}
    along = [x for x, e in places.items() if coefficient(e, c.steps) == 1 and coefficient(e, c.rows) is not None]
    return tuple(x for x in along if not any(isinstance(e, Loaded) for e in topological([x])))


def _shares(c: Chain) -> bool:
    """Whether tiles that share what scores have of their own may run at the same time: what goes along with the steps
    of all of them is in the cache then.
    """
    apart = [a.extent for a in outside_axes(c) if not any(a in x.free for x in points(c))]
    size = 2 * c.steps.extent * (c.brought + len(c.along) * c.width)
    return bool(points(c)) and math.prod(apart) * size <= CACHED // 2


def _brought(c: Chain, x: Any) -> bool:
    """Whether an operand of a sum outside is the slab of one inside, where products take turns."""
    return any(substitute(y, {d: c.columns}) is x for d in c.depths for y in c.inside)


def gathering(c: Chain) -> int:
    """Slots for what gathers of each result."""
    return 1 if c.others else 2


def _directives(way: Groups) -> tuple[Any, ...]:
    roles: tuple[tuple[str, Any], ...] = (
        ("load", Word("warp", (1,))),
        ("math", Word("warpgroup", (way.count,))),
        ("registers", REGISTERS[way.count] if way.count != 2 else (24, 240)),
    )
    roles += (("lag", True),) if way.turns and way.count > 1 else ()
    order = (("order", Word("grouped", (way.together,))),) if way.together else ()
    stay = (("persistent", (way.blocks,), order),) if way.blocks else ()
    return (*stay, ("roles", (), roles))


def _depth(axis: Any, size: int) -> tuple[str, tuple[Factor, ...]]:
    return axis_name(axis), (Factor("reg", size // 16), Factor("inst.k", 16))


def _by_tma(width: int, slots: int = 1, size: int = 2) -> Operand:
    """By TMA, in panels as wide as a swizzle; of numbers of so many bytes."""
    more = (("slots", slots),) if slots > 1 else ()
    return Operand("smem", (("by", "tma"), ("swizzle", swizzled(size * width)), *more))


def _wide(c: Chain) -> list[Any]:
    """The stores of all columns. Besides them there may be some of rows."""
    return [s for s in c.kernel.stores if c.columns in s.free]


def _gathered(c: Chain) -> tuple[Site, ...]:
    """Results leave through shared memory, a part of the columns at a time; those of rows from their registers."""
    width, part = c.width, parts(c.width)
    times = Factor("time", width // part, (("ring", gathering(c)),)), Factor("block", part)
    through = Operand("smem", (("by", "tma"), ("swizzle", swizzled(2 * part))))
    names = [s.buffer.name for s in _wide(c)]
    out = {x: Site((x,), ((c.columns.name, times),), ((x, through),)) for x in names}
    return tuple(out.get(s.names[0], s) for s in alike(c))


# -- which there are, and which is best --------------------------------------------------------------------------------


def arrangements(c: Chain, gpu: Gpu) -> Iterator[Groups]:
    """What a processor has room for, one block for each tile."""
    if c.terms > 1:
        yield from _of_parts(c, gpu)
        return
    if c.beside or c.others:
        yield from _in_turns(c, gpu)
    most = STEP if c.width <= 128 and not c.beside else STEP // 2  # each sum of a step is in registers
    counts = [n for n in (1, 2, 3) if (n - 1) * ROWS < c.rows.extent]
    brought = {x.buffer for operand in (*c.inside, *c.along) for x in loads(operand)}
    others = {*c.kernel.reads} - brought
    fewer = others and most == STEP  # what columns are made of besides is in registers too
    steps = dict.fromkeys(min(n, ceil(c.steps.extent, 16) * 16) for n in ((most, STEP // 2) if fewer else (most,)))
    apart = bool(c.others) or len({*c.depths}) > 1  # each sum is a site of its own
    for step, count, overlap, gathered in () if apart else product(steps, counts, (True, False), (True, False)):
        if count == 3 and (c.width > 64 or others):
            continue  # 160 registers hold no more sums, nor a mask, beside 128 scores
        for along in (False, True) if points(c) else (False,):
            yield from _roomiest(Groups(count, step, MOST_SLOTS, overlap, gathered, brought=along), c, gpu)


def _of_parts(c: Chain, gpu: Gpu) -> Iterator[Groups]:
    """With sums of several terms, whose steps take long: one warpgroup multiplies while another finds weights. Sums of
    a step are registers beside those of the tile, and so are parts of weights.
    """
    if c.others or c.rounds or len({*c.depths}) > 1:  # the sums inside are one site
        return
    across = 1 if c.width <= WIDE or c.width % (2 * 16) else 2
    parts_of, width = len(c.read(c.outer)), c.width // 2 // across
    steps = dict.fromkeys(min(n, ceil(c.steps.extent, 16) * 16) for n in WIDTHS)
    for step, count in product(steps, (2, 1)):
        factors, sums = parts_of * step // 4, len(c.sums) * step // 2
        if width + max(width, sums) + factors > FULL or (count - 1) * ROWS >= c.rows.extent:
            continue
        yield from _roomiest(Groups(count, step, 2, False, False, blocks_across=across), c, gpu, least=1)


def _in_turns(c: Chain, gpu: Gpu) -> Iterator[Groups]:
    """With several sums inside, each of which is waited for by itself: all are in registers, and so is what is summed
    outside, and what is made of the former for it.
    """
    for step, count, gathered in product((STEP, 3 * STEP // 4, STEP // 2), (2, 1), (True, False)):
        sums = len(c.outside) * c.width // 2 + len(c.sums) * step // 2
        factors = sum(step // 4 for _ in c.outside)
        if sums > HELD or sums + factors > FULL or (count - 1) * ROWS >= c.rows.extent or step > c.steps.extent:
            continue
        yield from _roomiest(Groups(count, step, MOST_SLOTS, True, gathered, turns=True), c, gpu)


def _roomiest(way: Groups, c: Chain, gpu: Gpu, least: int = 2) -> Iterator[Groups]:
    """An arrangement with as many slots as there is room for, if there is."""
    every = (replace(way, slots=slots) for slots in range(way.slots, least - 1, -1))
    found = next((x for x in every if x.shared(c) + BARRIERS <= gpu.shared), None)
    if found is not None:
        yield found


def staying(way: Groups, c: Chain, gpu: Gpu, unlike: bool) -> Iterator[Groups]:
    """The same with blocks that stay for several tiles. Where tiles are `unlike`, long ones of several rows come before
    short ones, of as many as fit in the cache. Blocks of parts do not stay: their tiles take long, and who is free
    first takes the next one (608 us and 646 of 4 x 16 x 2048 x 64 in float32 on an H200). Where there are several
    rounds of steps, tiles are few and long: those of other heads come before shorter ones, whatever the cache holds.
    """
    others = outside(c)
    if unlike and c.rounds:
        yield replace(way, sorted=True)
    if math.prod(others) * ceil(c.rows.extent, way.count * ROWS) <= gpu.processors or c.terms > 1:
        return
    size = 2 * c.steps.extent * (c.brought + len(c.along) * c.width)  # of what goes along with the steps
    rows = others[-1] if others and unlike else 1
    groups = [n for n in range(1, rows + 1) if rows % n == 0 and (n == 1 or n * size <= CACHED)]
    for together in groups:
        made = replace(way, blocks=gpu.processors, together=together if together > 1 else 0)
        if not way.turns:
            early = list(_roomiest(replace(made, held=2 if way.step == STEP else 1), c, gpu))
            yield from early or (_roomiest(made, c, gpu) if way.brought else ())
            continue
        both = list(_roomiest(replace(made, held=2), c, gpu, least=min(way.slots, 3)))
        yield from both or _roomiest(made, c, gpu)


def price(way: Groups, c: Chain, gpu: Gpu, steps: Sequence[int]) -> float:
    """Nanoseconds, where a tile visits so many steps for each part of the rows, in the order they are walked in. Both
    factors of a product inside come from shared memory, 128 bytes at a time: an instruction of fewer than 64 columns
    waits for its rows. Nothing multiplies while the only slot of a slab is filled that both products read: 8192 x 256
    through 256 columns of float32, in steps of 48, took 84 us on an H200 (71 by this), and 43 is what the rest says.
    """
    width = c.width // way.blocks_across
    assert gpu.warpgroups is not None
    rate = gpu.warpgroups.sustained / gpu.processors
    deep = sum(c.deep), width * len(c.outside)
    inner, outer = (2 * way.count * ROWS * way.step * n * c.terms / rate for n in deep)
    inner *= max(1.0, (ROWS + way.step) / (2 * way.step))
    found = way.count * ROWS * way.step / EXPONENTIALS
    begun = BEGUN if c.terms > 1 else 0.0
    found += (len(c.read(c.outer)) - 1) * way.count * ROWS * way.step / ROUNDED if c.terms > 1 else 0.0
    if way.slots == 1 and c.terms > 1 and any(_brought(c, x) for x in c.along):
        begun += gpu.warpgroups.latency + (replace(way, slots=2).shared(c) - way.shared(c)) * gpu.processors / gpu.cache
    own = 0.0 if way.brought else len(points(c)) * way.count * ROWS * way.step / SCATTERED
    alone = way.turns and way.count == 1
    busy = begun + inner + outer + own + (1.0 if alone else BESIDE[way.overlap, way.count]) * found
    each = max(busy, (inner + (0.0 if way.overlap else outer) + found) / way.count + TURNAROUND)
    times = math.prod(outside(c)) * way.blocks_across
    if way.blocks:
        waits = way.held == 1 and (not way.turns or way.count == 1)
        each *= HELD_UP if waits and len({*steps}) > 1 else 1.0
        return BLOCK + _longest([each * n + TILE for n in steps], times, way)
    tiles = [each * n + BLOCK for n in steps]
    if way.sorted:
        return _listed([x for x in tiles for _ in range(times)], 1, gpu.processors)
    return _listed(tiles, times, gpu.processors)


def outside_axes(c: Chain) -> list[Any]:
    """The axes that only the grid walks."""
    return [a for a in c.kernel.axes if a not in (c.rows, c.columns)]


def outside(c: Chain) -> list[int]:
    """Their extents."""
    return [a.extent for a in outside_axes(c)]


def _longest(tiles: Sequence[float], times: int, way: Groups) -> float:
    """The most any block has, of tiles that are dealt out in order."""
    lengths = np.repeat(np.array(tiles), max(way.together, 1))
    every = np.resize(lengths, -(-times * len(tiles) // way.blocks) * way.blocks)
    every[times * len(tiles) :] = 0
    return float(every.reshape(-1, way.blocks).sum(0).max())


def _listed(tiles: Sequence[float], times: int, processors: int) -> float:
    """Until the last of some tiles is done, each of which goes to who is free first."""
    if times * len(tiles) > 64 * processors:
        return sum(tiles) * times / processors + max(tiles)
    busy = [0.0] * processors
    for _ in range(times):
        for x in tiles:
            heapq.heapreplace(busy, busy[0] + x)
    return max(busy)
