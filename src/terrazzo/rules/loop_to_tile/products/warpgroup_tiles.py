"""The tiles that a product may have on the instructions of warpgroups."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from terrazzo.collector import remembered
from terrazzo.hw.gpu import Gpu
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import derived
from terrazzo.ir.sites import Product, called
from terrazzo.rules.loop_to_tile.products.making import MADE_WAVES, converted, promotes
from terrazzo.rules.loop_to_tile.products.results import along, results, scatter
from terrazzo.rules.loop_to_tile.products.work import LINE, STEP, facts_of
from terrazzo.rules.loop_to_tile.walked.threads import ceil

SHORT = 256
"""Sums of fewer products are added up twice as often where someone wants to be exact: what a tensor core truncates is
still seen in them.
"""
SHORTEST = {False: 8, True: 4}
"""Steps of a piece of k, at least; of parts, of which each is multiplied several times in a step, fewer will do: 128 x
3584 x 512 took 13.7 us in 14 pieces of four steps and 16.2 in seven of eight (H200).
"""
NARROW = 32
"""Columns up to which what a step multiplies takes no longer than waiting for it, where factors are made in registers:
twice as long steps halve that. Weights of int8 and int4 on 16 rows of 4096 took 27.1 and 20.0 us for 14336 columns, and
23.9 and 18.2 so (H200).
"""
ROWS = 64
"""Rows of an instruction."""
FEWEST = 16
"""Elements of k that an instruction takes."""
LEAST = 16
"""Bytes of a row of a box, and columns of results that leave in boxes, at least."""
COLUMNS = (8, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)
"""Columns of the instructions that are tried."""
ACCUMULATORS, PROMOTED = 128, 160
"""Registers of a thread for sums, at most; and where some of these are those of a step, which are added to the others.
With 144 columns the 18944 of a layer are 132 tiles, one for each processor; NVRTC 13.5 spills nothing. What makes its
factors in registers needs more beside its sums; and what is rescued, sums of a few steps by themselves, since what
tensor cores cut off is made up for where these become part of the others.
"""


IN_TURNS, BESIDE, MUCH = 192, 32, 10
"""Registers of a thread for sums, at most, where warpgroups take turns, and so many fewer where each result reads
something, which is fetched for two subtiles, or takes much to compute: so many operations. With 192 columns ptxas
spilled 52 bytes for a GELU and 732 for a softplus, and nothing for a SiLU; with 160 nothing for any (NVRTC 13.5).
"""
ROOTS = 8
"""Operations of a column from which on, where warpgroups take turns, tiles end with the columns: a root and a quotient.
Else all that is read for a column is behind a condition. ptxas took 21 s for 144 columns of 256 so, normed, twice (of
NVRTC 13.0; 34 of 13.5), where it takes 3 without conditions, and 4 without the root and the quotient.
"""


@dataclass(frozen=True)
class Tile:
    """A block's part of a product: `groups` warpgroups with `each` instructions of 64 rows and `n` columns, in steps of
    `k` products. Or `abreast` sums share an instruction, and each has n of its columns.

    `rows` and `columns` are the product's axes that the instruction's are; a cluster of two divides the `split` one.
    Or the blocks of a cluster have the same tile, and `share` its steps. With `turns` a second warpgroup has a tile of
    its own, and multiplies while the first one stores. Results that may gather in shared memory leave registers where
    they are `direct`.
    """

    rows: Any
    columns: Any
    groups: int
    each: int
    n: int
    k: int = STEP
    split: Any = None
    share: int = 1
    abreast: int = 1
    turns: bool = False
    direct: bool = False

    @derived
    def m(self) -> int:
        """Rows of a block."""
        return self.groups * self.each * ROWS

    @derived
    def teams(self) -> int:
        """Warpgroups that multiply in a block."""
        return 2 if self.turns else self.groups

    @derived
    def blocks(self) -> int:
        """Blocks in a cluster."""
        return self.share if self.split is None else 2

    @derived
    def parts(self) -> int:
        """How many of the blocks that share sums store a part of the columns each, of whole subtiles."""
        if self.share == 1:
            return 1
        return next(
            d for d in range(self.share, 0, -1) if self.share % d == 0 and (self.n % (d * LEAST) == 0 or d == 1)
        )

    def width(self, size: int) -> int:
        """Columns of a subtile of results of so many bytes: a power of two, as swizzles are, and a line at most."""
        part = self.n // self.parts
        return min(part & -part, LINE // size)

    def covered(self, axis: Any) -> int:
        """How much of an axis a cluster covers."""
        size = self.m if axis is self.rows else self.n
        return 2 * size if axis is self.split else size

    @derived
    def clusters(self) -> tuple[int, int]:
        """How many clusters the axis of the rows takes, and that of the columns."""
        rows, columns = self.rows, self.columns
        return ceil(rows.extent, self.covered(rows)), ceil(columns.extent, self.covered(columns))


def shapes(p: Product, n: int) -> Iterator[Tile]:
    """Tiles whose accumulators have room and whose slabs wgmma reads, and of which no axis fills less than half."""
    count = len(p.sites) * (2 if promotes(p) else 1)
    made = converted(p)
    most = PROMOTED if promotes(p) and not made and not p.rescued else ACCUMULATORS
    for rows, columns in ((p.m, p.n), (p.n, p.m)):
        if n >= 2 * max(columns.extent, 8):
            continue
        for groups, each, turns in ((1, 1, False), (2, 1, False), (2, 2, False), (1, 2, True)):
            if count * each * n // 2 > (_in_turns(p, columns) if turns else most):
                continue
            if any(rows not in x.free or each > 1 or turns for x in made) or (turns and promotes(p)):
                continue
            if groups * each * ROWS >= 2 * max(rows.extent, ROWS):
                continue
            if turns and columns.extent % n and roots(p, columns):
                continue
            tile = Tile(rows, columns, groups, each, n, step(p), turns=turns)
            lengths = tile.m, n, tile.k
            if any(lengths[c] not in (16, 32) and lengths[c] % STEP for c in _runs_along(p, rows, columns)):
                continue
            for way in (tile, replace(tile, direct=True)) if scatter(p) and n >= LEAST and not turns else (tile,):
                yield way
                if n <= NARROW and _lengthens(p, 2 * tile.k):
                    yield replace(way, k=2 * tile.k)
                for split in () if made or _called_alike(p) else (rows, columns):  # what threads read is their block's
                    if ceil(split.extent, tile.covered(split)) % 2 == 0 and _shares(tile, split):
                        yield replace(way, split=split)


def roots(p: Product, columns: Any) -> bool:
    """Whether much is computed for each column alone, from what is read for it."""
    return results(p).alone[columns] >= ROOTS


def _in_turns(p: Product, columns: Any) -> int:
    """Registers of a thread for sums, at most, where warpgroups take turns."""
    r = results(p)
    beside = p.n in p.kernel.axes and (r.read or r.operations >= MUCH or roots(p, columns))  # none, where reduced
    return IN_TURNS - BESIDE * bool(beside)


def _called_alike(p: Product) -> bool:
    """Whether two operands are of one buffer, so that schedules cannot say of one of them that it is multicast."""
    return len(set(map(called, p.sources))) < len(p.sources)


def abreast(p: Product, columns: int) -> Iterator[Tile]:
    """Tiles of which all sums share an instruction of so many columns: they have the factor of the rows in common, and
    instructions read it once, whose second factors lie one behind the other. Results begin with whole subtiles.
    """
    count = len(p.sites)
    n = columns // count
    plain = all(isinstance(x, l.Load) for x in p.operands) and len(p.operands) == facts_of(p).terms + 1 == count + 1
    if count == 1 or columns % (count * LEAST) or n not in COLUMNS or not plain:
        return
    for tile in shapes(p, n):
        firsts, seconds = ([x for x in p.operands if (tile.rows in x.free) == side] for side in (True, False))
        panels = n % STEP == 0 and n > STEP
        if len(firsts) == 1 and (panels or not any(along(x, tile.columns) for x in seconds)):
            yield replace(tile, abreast=count)


def step(p: Product) -> int:
    """Elements of k in a step of a product: no more than the last axis has, where there are others around it."""
    last = STEP if len(p.axes) == 1 else max(FEWEST, 1 << (p.axes[-1].extent - 1).bit_length())
    return min(last, longest_step(p))


def longest_step(p: Product) -> int:
    """Elements of k in a step of a product, whichever of its axes they are of."""
    if promotes(p):
        return STEP // 2 if math.prod(a.extent for a in p.axes) < SHORT else STEP
    return max(FEWEST, STEP * 4 // max(len(p.sites[0].terms), 4))  # all terms of a step are in registers at once


def _lengthens(p: Product, k: int) -> bool:
    """Whether a step may be as long as k where factors are made: all terms of it are in registers at once."""
    made = converted(p) and not promotes(p)
    return bool(made) and p.axes[-1].extent % k == 0 and k * len(p.sites[0].terms) <= 4 * STEP


def steps(p: Product, tile: Tile) -> tuple[int, int]:
    """Of a tile: along all axes but the last, which are walked one by one, and along that."""
    return facts_of(p).outer, ceil(p.axes[-1].extent, tile.k)


def _shares(tile: Tile, split: Any) -> bool:
    """Whether what the blocks of a cluster have in common is wide enough to be fetched in halves."""
    return (tile.n if split is tile.rows else tile.m) >= 16


def cuts(p: Product, tile: Tile, tiles: int, gpu: Gpu) -> Iterator[int]:
    """Into how many pieces the last axis of k may be cut while blocks are few: of whole steps, of which each block has
    `SHORTEST` at least. The last may be shorter, since TMA brings zeros for what lies beyond the end: unless other
    points lie there, where the axis is a part of a dimension.
    """
    yield 1
    facts, made = facts_of(p), bool(converted(p))
    if tile.abreast > 1 or tile.turns or facts.several or p.rescued:
        return
    outer, inner = steps(p, tile)
    most = (MADE_WAVES if made else 2) * gpu.processors // (tiles * tile.blocks)
    found = pieces(inner, most, ceil(SHORTEST[promotes(p)], outer))
    if not (facts.ends and (promotes(p) or not made)):  # and no piece may be shorter
        found = tuple(s for s in found if not (inner % s or p.axes[-1].extent % tile.k))
    yield from found


@lru_cache(maxsize=1024)
def pieces(steps: int, most: int, least: int) -> tuple[int, ...]:
    """Into how many pieces of `least` steps or more these may be cut, none of them empty: few, or a half of `most` or
    all of it, which fill a machine once and twice.
    """
    wanted = (*range(2, min(most, 16) + 1), *(x for x in (most // 2, most) if x > 16))
    return tuple(dict.fromkeys(-(-steps // each) for s in wanted if (each := -(-steps // s)) >= least))


def sharing(p: Product, tile: Tile, tiles: int, gpu: Gpu) -> Iterator[Tile]:
    """The tile where blocks of a cluster share its steps, two at least each, while all clusters run at once."""
    _, inner = steps(p, tile)
    alone = tile.split is None and not converted(p) and tile.abreast == 1 and not tile.turns
    for share, most in gpu.warpgroups.clusters if alone and gpu.warpgroups else ():
        each = ceil(inner, share)
        if each > 1 and ceil(inner, each) == share and tiles <= most:
            yield replace(tile, share=share)


@remembered
def _runs_along(p: Product, rows: Any, columns: Any) -> tuple[int, ...]:
    """Along which of the axes of a tile memory of its sources runs: rows, columns or steps."""
    return tuple({0 if along(x, rows) else 1 if along(x, columns) else 2 for x in p.sources})


def runs(x: Any, t: Tile) -> int:
    """Elements of a slab that lie in a row: of whichever axis runs through memory. A swizzle takes whole rows of it."""
    return t.m if along(x, t.rows) else t.n if along(x, t.columns) else t.k
