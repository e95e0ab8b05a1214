"""Sizes of tiles, and how fast a machine is with them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """A block's part of m and n, a step of k, and how warps and threads divide them: m, n of warps, then of lanes on
    CUDA cores.

    `rate` is the part of the machine's arithmetic that a full machine reached with this tile (on an H200). `resident`
    blocks are to fit on a processor. On CUDA cores `inner` products along k come from one load of either operand; 1
    lays slabs out along m and n instead. Sums that are `promoted` begin afresh in every step.
    """

    m: int
    n: int
    k: int
    warps: tuple[int, int]
    rate: float
    lanes: tuple[int, int] = (1, 1)
    ring: int = 4
    resident: int = 1
    inner: int = 1
    promoted: bool = False

    @property
    def threads(self) -> int:
        return math.prod(self.warps) * 32

    def registers(self, count: int, size: int) -> int:
        """What a thread needs on CUDA cores for `count` products of `size` bytes with one factor in common, addresses
        included.
        """
        m, n = self.m // self.warps[0] // self.lanes[0], self.n // self.warps[1] // self.lanes[1]
        sums = count * m * n * (1 + self.promoted)
        return (sums + (m + count * n) * max(self.inner, 2)) * max(size // 4, 1) + (32 if size <= 4 else 96)


CUDA_CORES = (
    Tile(128, 128, 8, (4, 2), 0.765, (4, 8), 4, 2),
    Tile(128, 128, 16, (4, 2), 0.76, (4, 8), 3, 2),
    Tile(64, 128, 16, (2, 2), 0.75, (4, 8), 3, 4),
    Tile(128, 64, 16, (2, 2), 0.745, (8, 4), 3, 4),
    Tile(64, 64, 16, (2, 2), 0.645, (4, 8), 4, 4),
    Tile(32, 128, 32, (1, 4), 0.59, (4, 8), 3, 2, 4),
    Tile(32, 64, 32, (1, 4), 0.53, (4, 8), 4, 3, 4),
    Tile(32, 32, 32, (1, 2), 0.50, (4, 8), 4, 6, 4),
    Tile(16, 64, 32, (1, 4), 0.42, (4, 8), 4, 3, 4),
    Tile(16, 32, 32, (1, 2), 0.35, (4, 8), 4, 6, 4),
    Tile(128, 8, 32, (4, 1), 0.35, (16, 2), 3, 4, 4),
)
"""The last is for few columns, whose rows are as good as copied: others multiply by zeros for 24 columns or more. It
was not measured; its rate is that of the tile above, whose threads have as many results for as many loads.
"""
TENSOR_CORES = (
    Tile(128, 128, 32, (2, 4), 0.77, resident=2),
    Tile(128, 64, 64, (2, 2), 0.69, resident=2),
    Tile(128, 64, 32, (2, 2), 0.69, resident=4),
    Tile(64, 128, 64, (2, 2), 0.67, resident=2),
    Tile(64, 64, 64, (2, 2), 0.61, resident=3),
    Tile(32, 128, 64, (1, 4), 0.50, resident=2),
    Tile(32, 64, 64, (1, 4), 0.40, resident=4),
    Tile(32, 32, 128, (1, 2), 0.30, resident=3),
    Tile(16, 64, 128, (1, 4), 0.25, resident=2),
)

WITH_TMA = (
    Tile(128, 128, 64, (2, 4), 0.72, ring=3, resident=2),
    Tile(128, 64, 64, (2, 2), 0.67, resident=2),
    Tile(64, 128, 64, (2, 2), 0.65, resident=2),
    Tile(64, 64, 64, (2, 2), 0.53, resident=3),
    Tile(32, 128, 64, (1, 4), 0.55, resident=2),
    Tile(32, 64, 64, (1, 4), 0.50, resident=4),
    Tile(32, 32, 128, (1, 2), 0.28, resident=3),
    Tile(16, 64, 128, (1, 4), 0.23, resident=2),
)
"""Tiles on tensor cores where operands come by TMA, from sm_90 on. Their rates, and what `products.py` says of TMA, are
fitted to 239 schedules on an H200 (benchmarks/fits/h200-tiles.json), of which 36 % are off by more than 14 %.
"""
