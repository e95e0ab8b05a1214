"""What a product in tiles of warpgroups asks of the cache and of memory: what its blocks fetch for a step, who fetches
the same, and what is fetched for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from terrazzo.hw.gpu import Gpu, Warpgroups
from terrazzo.ir.sites import Product
from terrazzo.rules.loop_to_tile.products.warpgroup_tiles import Tile, steps
from terrazzo.rules.loop_to_tile.products.work import facts_of
from terrazzo.rules.loop_to_tile.walked.threads import ceil

FREE = 32
"""Rows of a slab beyond the end of an operand that are brought beside others."""
NEAR = 32
"""Blocks that get the same lines from the cache by one request: as many that follow each other work side by side, on
processors that have one way to it. What comes to both blocks of a cluster at once is asked for by each cluster. Of 725
schedules of nine products in all orders (benchmarks/fits/h200-walks.json) 24 to 40 explain most.
"""
TOGETHER = 16
"""Tiles of an axis that are walked together, at most."""


class Walk(NamedTuple):
    """The order in which a product's tiles are walked: so many of the outer axis `together`, along the inner one."""

    outer: Any
    inner: Any
    together: int


def walk(p: Product, tile: Tile, gpu: Gpu) -> Walk:
    """The order in which least time goes by for what the cache gives, and memory again: 64 columns by 176 rows of 1370
    x 4096 x 1024 took 29.2 us where eight tiles of the larger operand were walked together, 24.2 one by one, and in
    clusters, to both blocks of which that operand comes, 24.4 and 26.7 (H200).
    """
    has = gpu.warpgroups
    assert has is not None
    deep = math.prod(steps(p, tile)) * tile.blocks * clusters(p, tile)
    counts, slabs = _counts(p, tile), _slabs(p, tile, has, False)

    def takes(way: Walk) -> float:
        out = _leaving(tile, way, counts, slabs) * deep / has.cache
        return out + _again(p, tile, way, counts, gpu, has) / gpu.memory

    return min(_walks(p, counts), key=takes)


def _counts(p: Product, tile: Tile) -> dict[Any, int]:
    """How many clusters each axis of a product takes."""
    return {a: ceil(a.extent, tile.covered(a)) for a in (p.m, p.n)}


def _walks(p: Product, counts: Mapping[Any, int]) -> Iterator[Walk]:
    """The orders there are: groups divide the tiles of an axis."""
    for outer, inner in ((p.m, p.n), (p.n, p.m)):
        count = counts[outer]
        for together in range(min(count, TOGETHER), 0, -1):
            if count % together == 0:
                yield Walk(outer, inner, together)


def clusters(p: Product, tile: Tile) -> int:
    """How many clusters there are, of all products of the batch."""
    rows, columns = tile.clusters
    return facts_of(p).batch * rows * columns


def alone(p: Product, tile: Tile, gpu: Gpu, pieces: int = 1) -> bool:
    """Whether there is a block for every other processor at most: the two share their way to the cache."""
    return clusters(p, tile) * tile.blocks * pieces <= gpu.processors // 2


def fetched(p: Product, tile: Tile, has: Warpgroups, few: bool) -> float:
    """Bytes of all operands that a block fetches for a step; blocks of a cluster fetch halves of what both need. Lines
    that rows straddle take less where blocks are so `few` that they are `alone`.
    """
    found = 0.0
    for x in facts_of(p).sources:
        shared = tile.split is not None and tile.split not in x.free
        size: int = (tile.m if tile.rows in x.free else tile.n) * tile.k * x.size
        found += size / (2 if shared else 1) * (has.straddling[not few] if x.straddles else 1)
    return found


def leaving(p: Product, tile: Tile, way: Walk, has: Warpgroups, few: bool) -> float:
    """Bytes that leave the cache for a block and a step, where blocks that are `NEAR` share what they fetch."""
    return _leaving(tile, way, _counts(p, tile), _slabs(p, tile, has, few))


def _slabs(p: Product, tile: Tile, has: Warpgroups, few: bool) -> list[tuple[Any, float]]:
    """The axis of the tile that each operand knows, and bytes of it that a block needs for a step."""
    found = []
    for x in facts_of(p).sources:
        rows = tile.rows in x.free
        size = (tile.m if rows else tile.n) * tile.k * x.size * (has.straddling[not few] if x.straddles else 1)
        found.append((tile.rows if rows else tile.columns, size))
    return found


def _leaving(tile: Tile, way: Walk, counts: Mapping[Any, int], slabs: Iterable[tuple[Any, float]]) -> float:
    """The same, of operands of which that is known."""
    rows, columns, group = counts[way.outer], counts[way.inner], way.together
    near = max(min(NEAR // tile.blocks, rows * columns), 1)
    different = {
        way.outer: min(rows, min(group, near) * _met(near, group * columns)),
        way.inner: min(columns, _met(near, group)),
    }
    found = 0.0
    for mine, size in slabs:
        if tile.split is not None:  # the other operand comes to both blocks at once
            found += size * (different[mine] if mine is tile.split else near / 2)
        else:
            found += size * different[mine]
    return found / near


def _met(near: int, each: int) -> float:
    """How many rows of so many tiles each are met by so many that follow each other, wherever these begin."""
    return 1 + (near - math.gcd(near, each)) / each


def again(p: Product, tile: Tile, way: Walk, gpu: Gpu, has: Warpgroups) -> float:
    """Bytes that memory is asked for again: of the operand along which tiles are walked, where the cache does not keep
    it, for each group of those that are walked together, or for as many as all blocks work on. A gated layer of 2309
    rows walked one by one read 100 MB of weights 18 times, and took 671 us, and 414 in another run and order (H200).
    """
    return _again(p, tile, way, _counts(p, tile), gpu, has)


def _again(p: Product, tile: Tile, way: Walk, counts: Mapping[Any, int], gpu: Gpu, has: Warpgroups) -> float:
    """The same, of so many clusters along each axis."""
    facts = facts_of(p)
    size = facts.known_by[way.inner]
    if tile.share > 1 or size <= has.keeps * facts.batch:
        return 0.0
    passes = ceil(counts[way.outer], max(way.together, gpu.processors // tile.blocks // counts[way.inner]))
    return (passes - 1) * size


def beyond(p: Product, tile: Tile) -> float:
    """Bytes beyond the end of an operand that boxes bring to all blocks: those of a cluster do not share them."""
    facts = facts_of(p)
    found = 0.0
    sides = (tile.rows, tile.clusters[1], tile.columns), (tile.columns, tile.clusters[0], tile.rows)
    for a, others, other in sides:
        if rows := -a.extent % tile.covered(a):
            size = sum(x.size for x in facts.sources if a in x.free)
            found += size * rows * facts.deep * facts.batch * others * (2 if tile.split is other else 1)
    return found


def empty(tile: Tile) -> float:
    """Rows beyond the end of an operand in the slabs of a step of the last block, but for those that are brought beside
    others; blocks of a cluster bring halves of what both need.
    """
    found = 0.0
    for a, size, other in ((tile.rows, tile.m, tile.columns), (tile.columns, tile.n, tile.rows)):
        rows = min(-a.extent % tile.covered(a), size)
        found += max((rows / 2 if tile.split is other else rows) - FREE, 0)
    return found
