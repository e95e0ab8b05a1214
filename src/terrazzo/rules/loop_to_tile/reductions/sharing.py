"""How many lanes share a short row, and which rows warps and lanes have beside each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from terrazzo.hw.gpu import Gpu
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.schedule import Factor
from terrazzo.rules.access import WIDEST
from terrazzo.rules.loop_to_tile.reductions.rows import loaded, run
from terrazzo.rules.loop_to_tile.walked.threads import (
    POWERS,
    SPARE,
    WARP,
    WORD,
    ceil,
    grid,
    lanes_of,
    size_of,
    warps_of,
    waste,
)

FLYING = 128
"""Bytes that a thread has on their way at once, at most: registers hold them."""
MANY = 64
"""Rows for each processor from which on a warp may take several short ones at once."""


def sharing(rows: Sequence[Any], top: Sequence[l.Reduce], length: int, vector: int, gpu: Gpu) -> int:
    """The lanes that share a short row: of many rows a warp takes several at once, so that a lane has 16 bytes on its
    way, or four elements that are no word; and no more lanes than elements lie side by side in a `run`. A sum of a
    million rows of 17 float32 took 160 us with a warp for each, of which 15 lanes had nothing (H100); windows of 11 by
    11 pixels side by side took 5534 us with a warp for each, 5200 with half of one, and 4773 with a quarter (H200).

    Of vectors of elements that are less than a word fewer lanes take more each, so that none is idle in the last ones:
    LayerNorm of 200,704 rows of 96 in bfloat16 took 32.2 us by eight lanes and 22.7 by four, softmax 34.2 and 22.2;
    in float32 memory is what is waited for, and rows of 160 took 6.7 by 16 lanes and 7.7 by eight (H200, 29 November
    2026).
    """
    if math.prod(map(size_of, rows)) < MANY * gpu.processors:
        return WARP
    sizes = {x.buffer: x.dtype.size for x in loaded(top)}.values()
    each, lanes = max(vector * max(sizes, default=WORD), WORD), WARP
    while lanes > FEWEST and _fits(rows, WARP // lanes * 2):
        if lanes * vector <= min(length, *map(run, top)) and ceil(length, lanes * vector) * each >= WIDEST:
            break
        lanes //= 2
    if max(sizes, default=WORD) >= WORD or each < WIDEST or waste(length, lanes * vector) <= SPARE:
        return lanes
    fewer = [k for k in POWERS if FEWEST <= k < lanes and _fits(rows, WARP // k)]
    held = [k for k in fewer if ceil(length, k * vector) * vector * sum(sizes) <= FLYING]
    return min((lanes, *held), key=lambda k: waste(length, k * vector))


FEWEST = 4
"""Lanes that share a row: of fewer each would find its neighbour's elements in a sector of its own."""


def _fits(rows: Sequence[Any], each: int) -> bool:
    """Whether the last axis of rows has so many of them side by side without a rest."""
    return each == 1 or waste(size_of(rows[-1]), each) <= SPARE


def beside(rows: Sequence[Any], each: int) -> tuple[tuple[Factor, ...], int]:
    """Warps, and lanes of each, that have rows of their own, of the last axis; and how many rows they have."""
    warps = 4 if each == 1 else next(k for k in (8, 4, 2, 1) if k == 1 or _fits(rows, each * k))
    return (*warps_of(warps), *lanes_of(each)), warps * each


def row_lines(rows: Sequence[Any], inner: tuple[Factor, ...], size: int) -> tuple[tuple[str, tuple[Factor, ...]], ...]:
    """The last row axis shared by warps or lanes too."""
    *outer, last = rows
    return (
        *((a.name, grid(size_of(a))) for a in outer),
        (last.name, (Factor("grid", max(ceil(size_of(last), size), 1)), *inner)),
    )
