"""What a product in tiles of warpgroups asks of the cache and of memory: what its blocks fetch for a step, who fetches
the same, and what is fetched for nothing.
"""

from __future__ import annotations

from terrazzo.hw.gpu import Gpu, Warpgroups
from terrazzo.ir.sites import Product
from terrazzo.rules.loop_to_tile.products.warpgroup_tiles import Tile, groups_of
from terrazzo.rules.loop_to_tile.products.work import facts_of
from terrazzo.rules.loop_to_tile.walked.threads import ceil

FREE = 32
"""Rows of a slab beyond the end of an operand that are brought beside others."""


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


def readers(tile: Tile, at_once: float) -> float:
    """How many clusters fetch the same rows of an operand at once where so many work at once: those of one product
    lie in as many rows of tiles as a group has, or fewer.
    """
    most, rows = tile.group
    return min(at_once, most) / rows


def again(p: Product, tile: Tile, gpu: Gpu, has: Warpgroups) -> float:
    """Bytes that memory is asked for again: of the operand along which tiles are walked, where the cache does not keep
    it, for each group of those that are walked together, or for as many as all blocks work on. A gated layer of 2309
    rows walked one by one read 100 MB of weights 18 times, and took 671 us, and 414 in another run and order (H200).
    """
    (outer, inner), together = groups_of(p, tile, gpu)
    rows, columns = (ceil(a.extent, tile.covered(a)) for a in (outer, inner))
    facts = facts_of(p)
    size = sum(x.bytes for x in facts.sources if inner in x.free)
    if tile.share > 1 or size <= has.keeps * facts.batch:
        return 0.0
    passes = ceil(rows, max(together, gpu.processors // tile.blocks // columns))
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
