"""What a kernel on the instructions of warpgroups takes: waves of the slowest of its resources."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from terrazzo.collector import remembered
from terrazzo.hw.gpu import Gpu
from terrazzo.ir.address import coefficient, flatten, mentions
from terrazzo.ir.concatenated import concatenated
from terrazzo.ir.sites import Product

STEP = 64
"""Elements of k in a step: 128 bytes, the widest swizzle."""
LINE = 128
"""Bytes of a line of the cache."""
COLUMNS = 64
"""Of narrower tiles less is waited for between two of them: 20,000 products of 32 cubed took 0.36 us a tile in all."""
PAIRED = 1.013
"""How much faster parts are multiplied of which a half comes to both blocks of a cluster: their slabs are all that the
cache can give (benchmarks/fits/h200-parts-tiles.json).
"""

AT_ONCE = 3.5
"""How nearly what is done side by side takes as long as the longest of it. Fitted with the record of the machine."""
LONG, POWER = 600_000.0, 1.0
"""Nanoseconds of a product that is at the limit of power. There, what is fetched takes energy, and so time: so much of
it for a byte that is fetched for a product. In clusters of two along its rows, tiles of 128 x 256 that both warpgroups
share took 0.96 to 0.99 of what they took alone (four products of 0.7 to 2.8 ms, each for a tenth of a second at a
time), and 0.98 and 1.02 in a square of 16384; those in turns took less than these (H200).
"""
TURNED = 0.96
"""Of what the model says, what warpgroups take in turns at the limit of power, beside those that share a tile: gated
layers of 2048 x 4096 x 14336 took 671 us so and 713 in tiles of 128 x 128, a square of 8192 1595 and 1645 (H200,
benchmarks/fits/h200-turns.json); in clusters 1.01 to 1.03 of that.
"""
STORED = 0.5
"""Of the time that memory takes for results, what they add at the limit of power: a loss took 12.8 ms with 2.1 GB of
logits in memory, and 11.8 without (H200).
"""


class Work(NamedTuple):
    """What a kernel does, as far as its time depends on it: so many tiles of m rows and n columns for each of so
    many `products`, by clusters of so many blocks, in steps for which a block fetches some bytes into one of its
    slots of so many `held` bytes, and which take `extra` nanoseconds. Of what is fetched for a block so many bytes
    are `leaving` the cache: blocks that are near each other share the rest. Results leave at a rate, and computing a
    tile's of its sums takes `after` nanoseconds. `least` bytes of memory are touched. A step has `depth` products of
    each sum. Sums may be `shared` by the blocks of a cluster. Factors may be `parts` of numbers, of which each is
    multiplied several times in a long step. Instructions have `wide` columns. A warpgroup makes what it multiplies
    for `made` nanoseconds of a step before it does so, and another one multiplies meanwhile, for half of the time,
    unless it is `alone`. Where warpgroups take `turns`, one computes and stores the results of a tile while another
    multiplies. In a step instructions `read` so many bytes of slabs. Of what boxes bring in all, so many bytes lie
    `beyond` the ends of operands, and so many rows are `empty` in a step of the last block, more than others hide.
    What a step needs is `brought` in so many nanoseconds, ahead of it and beside results. For its power, `drawn`
    bytes count.
    """

    m: int
    n: int
    products: int
    tiles: int
    blocks: int
    steps: int
    fetched: float
    held: int
    slots: int
    results: int
    rate: float
    least: float
    extra: float = 0.0
    depth: int = STEP
    after: float = 0.0
    leaving: float = 0.0
    shared: bool = False
    parts: bool = False
    wide: int = 0
    made: float = 0.0
    alone: bool = False
    turns: bool = False
    read: float = 0.0
    beyond: float = 0.0
    empty: float = 0.0
    brought: float = 0.0
    drawn: float = 0.0


def lasts(work: Work, gpu: Gpu) -> float:
    """Waves of the slowest of arithmetic, cache, latency and memory, in nanoseconds."""
    return clock(work, gpu)(work.tiles, work.steps)


def clock(work: Work, gpu: Gpu) -> Callable[[int, int], float]:
    """What a kernel takes with so many tiles, of so many steps: as its own, or as it has when it is cut in pieces. In
    the last wave few blocks may be left, which have less on their way.
    """
    has = gpu.warpgroups
    if has is None or work.slots < 2:
        return lambda tiles, steps: math.inf
    blocks, slots, least, extra = work.blocks, work.slots, work.least, work.extra
    walkers = gpu.processors // blocks
    each = 2.0 * work.m * work.n * work.depth * work.products
    rate, start = has.parts if work.parts else (has.rate, has.single if work.alone and not work.turns else 0.0)
    rate *= PAIRED if work.parts and work.blocks > 1 and not work.shared else 1
    wide = work.wide or work.n
    arithmetic = each * gpu.processors * (wide + start) / wide / rate
    multiplying = arithmetic if work.alone else arithmetic / 2
    alone = max(work.fetched / has.shared, (work.read + work.held) / has.banks)
    memory = has.parts_memory if work.parts else gpu.memory
    results = work.m * work.n * work.results / work.rate + work.after + has.drain * min(1.0, work.n / COLUMNS)
    begin = has.fill + (has.cluster if blocks > 1 and not work.shared else 0)

    def time(tiles: int, steps: int) -> float:
        at_once = tiles if tiles < walkers else walkers
        fetched = work.leaving * at_once * blocks / has.cache
        waited = has.latency
        if work.parts:
            waited += least / (tiles * steps) * at_once / gpu.memory + arithmetic
        longest = max if work.parts else _at_once
        making = work.made + multiplying if work.made else 0.0
        step = max(longest(arithmetic, alone, fetched, waited / slots), making) + has.step + extra
        products = steps * step
        beside = min(results, products / 2) if work.turns else 0.0  # alone, it takes twice as long
        beyond = max(work.beyond / gpu.memory, work.empty * has.empty * steps)
        found = begin + beside + beyond * at_once / tiles  # later waves bring theirs beside others
        for wave, count in ((walkers, tiles // walkers), (tiles % walkers, 1)):
            if wave and count:
                flying = min(1.0, wave * blocks * slots * work.held / (gpu.processors * has.flying))
                coming = max(steps * work.brought, least / tiles * wave / (memory * flying))
                found += count * max(products + results - beside, coming)
        return found

    return time


def limited(work: Work, time: float, moved: int, gpu: Gpu) -> float:
    """A time by the clock, or what the limit of power makes of it: where it is `LONG` tiles are compared by what takes
    energy, with so many bytes `moved` for results.
    """
    if time >= LONG:
        time *= (1 + POWER * fetched_each(work)) * (TURNED if work.turns and work.blocks == 1 else 1.0)
        time += STORED * moved / gpu.memory
    return max(time, powered(work, gpu))


def powered(work: Work, gpu: Gpu) -> float:
    """Nanoseconds that a kernel takes at the limit of power at least, whatever its tiles are; 0 where nothing is known:
    of parts, of which each is fetched for several products.
    """
    has = gpu.warpgroups
    if has is None or not work.drawn:
        return 0.0
    each = 2.0 * work.m * work.n * work.depth * work.products
    return each * work.tiles * work.blocks * work.steps * (1 + POWER * fetched_each(work)) / has.sustained


def fetched_each(work: Work) -> float:
    """Bytes that are fetched for a product, as far as they count for power."""
    return work.drawn / (work.m * work.n * work.depth * work.products)


def _at_once(*times: float) -> float:
    """What takes so long each when nothing else is done: the longest, and the others as far as they come near it."""
    total: float = sum(t**AT_ONCE for t in times) ** (1 / AT_ONCE)
    return total


@dataclass(frozen=True)
class Source:
    """What of a product lies in memory: the axes it knows, the bytes of an element and of all that is read of it, and
    whether its rows begin anywhere in the cache's lines.
    """

    free: frozenset[Any]
    size: int
    bytes: int
    straddles: bool


@dataclass(frozen=True)
class Facts:
    """What follows from a product whatever its tiles are: points of the batch, of k, and of `outer`, all of k's axes
    but the last; the terms of its sums, what lies in memory and its `bytes`, those of what knows m and of what knows n,
    whether that ends where k does, and whether an operand is `several` tensors.
    """

    batch: int
    deep: int
    outer: int
    terms: int
    sources: tuple[Source, ...]
    bytes: int
    known_by: Mapping[Any, int]
    ends: bool
    several: bool


@remembered
def facts_of(p: Product) -> Facts:
    """Of a product, once for all of its tiles."""
    sources = tuple(Source(x.free, x.dtype.size, p.touched(x) * x.dtype.size, _straddles(x)) for x in p.sources)
    return Facts(
        math.prod(a.extent for a in p.batch),
        math.prod(a.extent for a in p.axes),
        math.prod(a.extent for a in p.axes[:-1]),
        sum(len(c.terms) for c in p.sites),
        sources,
        sum(x.bytes for x in sources),
        {a: sum(x.bytes for x in sources if a in x.free) for a in (p.m, p.n)},
        all(e is p.axes[-1] for x in p.sources for e in x.index if mentions(e, p.axes[-1])),
        any(map(concatenated, p.operands)),
    )


def _straddles(x: Any) -> bool:
    """Whether rows of an operand begin anywhere in the cache's lines."""
    offset = flatten(x.index, x.buffer.type.element_strides)
    steps = (coefficient(offset, a) for a in x.free)
    return any(c != 1 and (not isinstance(c, int) or x.dtype.size * c % LINE) for c in steps)
