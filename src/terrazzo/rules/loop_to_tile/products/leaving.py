"""How results leave the tiles of warpgroups: from registers, or gathered in shared memory, in boxes or whole rows,
whichever is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terrazzo.collector import remembered
from terrazzo.hw import tma
from terrazzo.hw.gpu import Gpu, Warpgroups
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.schedule import Factor, Like, Operand, Site
from terrazzo.ir.sites import Product
from terrazzo.rules.access import box
from terrazzo.rules.loop_to_tile.products.results import OF_WORDS, SCATTERED, WORD, along, scatter
from terrazzo.rules.loop_to_tile.products.warpgroup_tiles import LEAST, ROWS, Tile
from terrazzo.rules.loop_to_tile.products.work import LINE
from terrazzo.rules.loop_to_tile.walked.threads import ceil
from terrazzo.rules.swizzles import swizzled
from terrazzo.rules.tile.draft import axis_name

RESULTS = 2
"""Subtiles of results on their way."""
TURNED = 128
"""Columns of a tile from which on results that run along its rows gather in shared memory."""

TURNING = 0.95
"""At what part of the rate results of 16 bits leave registers where memory runs along a tile's rows: lanes side by side
have columns. Held against benchmarks/fits/h100-small.json: 64 x 96 of 256 x 768 x 2304 took 5.5 us turned, and 4.5 not.
"""
BOTH = 0.8
"""What is left of waiting for slots where two warpgroups have some each: 512 x 2048 x 5632 took 20.1 us in tiles of 128
x 176, which are eleven subtiles (H200), and 24.1 in those of 192, which are three (H100).
"""
WHOLE = 0.5
"""The same of one warpgroup where rows of subtiles are whole lines of memory, as those of results that are turned are:
448 x 1024 x 4096 took 7.9 us in tiles of 64 x 224 and 9.2 in 64 x 240, which are eight subtiles more (H200,
benchmarks/fits/h200-order.json).
"""


def result_sites(p: Product, t: Tile, by: str) -> Sequence[Site]:
    """How stores see the tile."""
    if not by:
        stores = tuple(dict.fromkeys(b.name for b in p.kernel.writes))
        return (Site(stores, tuple((axis_name(a), Like(p.names[0])) for a in (p.m, p.n))),)
    return [_site(s, t, by) for s in {s.buffer: s for s in p.kernel.stores}.values()]


def _site(store: l.Store, t: Tile, by: str) -> Site:
    """How a store sees the tile whose subtiles gather: rows of these are of their columns, or of the tile's rows."""
    name, size = store.buffer.name, store.buffer.type.dtype.size
    width = t.width(size)
    row = width if along(store, t.columns) else t.each * ROWS
    time = Factor("time", t.n // width, (("ring", RESULTS),))
    place = Operand("smem", (("by", by), ("swizzle", swizzled(size * row))))
    return Site((name,), ((axis_name(t.columns), (time, Factor("block", width))),), ((name, place),))


def result_bytes(p: Product, t: Tile, rows: int) -> int:
    """Of shared memory that subtiles of so many rows take on their way."""
    sizes = {s.buffer: s.buffer.type.dtype.size for s in p.kernel.stores}.values()
    return RESULTS * rows * sum(t.width(size) * size for size in sizes)


def result_rate(p: Product, t: Tile, gpu: Gpu, has: Warpgroups) -> float:
    """Bytes of results in a nanosecond. Registers are stored one by one, whatever their size. Narrow subtiles wait for
    slots more often than wide ones, which nothing hides unless warpgroups take turns.
    """
    by, size = leaves(p, t), narrowest(p)
    if not by and scatter(p):
        return SCATTERED / gpu.processors
    if not by:
        turned = all(along(s, t.rows) and not along(s, t.columns) for s in p.kernel.stores)
        return has.direct * min(size / WORD, 1.0) * (TURNING if turned and size < WORD else 1.0)
    if by != "tma":
        return has.rows
    left = BOTH if t.groups > 1 else WHOLE if _turned(p, t) else 1.0
    columns, waited = t.n // t.parts, 0.0 if t.turns else has.emptied * left
    tile, more = size * t.m * columns, columns // t.width(size) - ceil(columns, LINE // size)
    return tile / (tile / (has.gathered * (OF_WORDS if size == WORD else 1.0)) + more * waited)


def leaves(p: Product, t: Tile) -> str:
    """How results leave shared memory: by TMA, where they are boxes, or by the threads, in whole rows, where rows begin
    anywhere. Those that run along the tile's rows do so where it has many columns. Others leave registers (nothing).
    """
    if t.direct or t.n < LEAST or not gathers(p):
        return ""
    return "tma" if _turned(p, t) else _leave(p, t.rows, t.m, t.columns, t.width(narrowest(p)))


@remembered
def gathers(p: Product) -> bool:
    """Whether results may gather in shared memory: of 16 bits, or of 32, where these are more than the cache has."""
    return {s.buffer.type.dtype.size for s in p.kernel.stores} == {2} or scatter(p)


def narrowest(p: Product) -> int:
    """Bytes of a result, of the store whose results have fewest."""
    return min(s.buffer.type.dtype.size for s in p.kernel.stores)


def _turned(p: Product, t: Tile) -> bool:
    """Whether results are turned on their way, since they run along the tile's rows."""
    size = narrowest(p)
    return (size == WORD or (t.n >= TURNED and t.each == 1)) and _leave_turned(p, t.rows, t.columns, t.width(size))


@remembered
def _leave_turned(p: Product, rows: Any, columns: Any, width: int) -> bool:
    """Whether results run along the tile's rows, in boxes of a warpgroup's."""
    known = all(along(s, rows) and not along(s, columns) for s in p.kernel.stores)
    return known and all(_is_box(s, columns, width, rows, ROWS) for s in p.kernel.stores)


@remembered
def _leave(p: Product, rows: Any, m: int, columns: Any, width: int) -> str:
    if not all(along(s, columns) for s in p.kernel.stores):
        return ""
    return "tma" if all(_is_box(s, rows, m, columns, width) for s in p.kernel.stores) else "ld"


@remembered
def _is_box(store: l.Store, rows: Any, m: int, columns: Any, width: int) -> bool:
    found = box(store, {rows: m, columns: width})
    return not isinstance(found, str) and not tma.problem(found.place.tensor, found.sides, 0)
