"""What threads that compute points under a schedule touch, and how long that takes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from terrazzo.collector import remembered
from terrazzo.hw.gpu import Gpu
from terrazzo.ir.address import evaluate
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, FloorDiv, Loaded, Mod
from terrazzo.ir.node import topological
from terrazzo.ir.schedule import Factor, Schedule
from terrazzo.rules.access import WIDEST
from terrazzo.rules.loop_to_tile.walked.cache_lines import offset_of, said
from terrazzo.rules.loop_to_tile.walked.threads import SECTOR, WARP, ceil, size_of

BROUGHT = 2.0
"""How much longer the cache takes for sectors than its rate says, each once for a block. This and the next are fitted
to 54 copies (H200, November 2026, benchmarks/fits/h200-copies.json), of which the model is 19 % off in the mean:
patches, images turned, shuffled, cut and put together, in 16 and 32 bits.
"""
EACH, DIVIDED, GUARD = 2, 3, 4
"""Instructions for each vector that a thread loads or stores, for each division by which its place is found, and for
each end of a tensor that it may lie beyond.
"""
LEVELS = ("reg", "warp", "lane")
"""Of factors, those that the threads of a block have at once."""
BLOCK = 0.6
"""Nanoseconds for which a block comes and goes, whatever it does: 489,216 of them that stored patches took 297 us, and
442,368 269 (H200, November 2026).
"""


@remembered
def touched(kernel: l.Kernel, schedule: Schedule, gpu: Gpu) -> float:
    """Nanoseconds of a kernel without reductions whose threads compute points as the schedule says: for what memory
    moves, what the cache brings in sectors, or the instructions that find places; and the launch.
    """
    spread = _Spread(kernel, schedule)
    loads = [x for x in topological([s.value for s in kernel.stores]) if isinstance(x, l.Load)]
    accesses = dict.fromkeys([*loads, *(l.Load(s.buffer, s.index) for s in kernel.stores)])
    moved: dict[l.Buffer, int] = {}
    sectors, issued = 0, 0.0
    for x in accesses:
        points = math.prod(size_of(a) for a in kernel.axes if a in x.free)
        bytes_of = x.dtype.size * min(points, math.prod(x.buffer.type.static_shape))
        moved[x.buffer] = max(moved.get(x.buffer, 0), bytes_of)
        brought, width = spread.asked(x)
        sectors += brought
        places = topological([e for e in (*x.index, *x.inside) if isinstance(e, Expr)])
        divided = sum(isinstance(e, FloorDiv | Mod) and not e.free.isdisjoint(spread.vectors) for e in places)
        issued += spread.warps * spread.elements / width * (EACH + DIVIDED * divided + GUARD * len(x.inside))
    busy = spread.steps * issued / (gpu.fma / 2 / WARP)
    cache = BROUGHT * SECTOR * spread.steps * sectors / gpu.cache
    time: float = max(sum(moved.values()) / gpu.memory, cache, busy, BLOCK * spread.blocks)
    return time + gpu.launch


class _Spread:
    """Where the threads of a block have their points, one amid all others, at a step; how many warps it has, and how
    many such steps there are of all `blocks`.

    `at` has for each axis the places of the block's points, [elements of a thread, threads], and `there` which of these
    are points.
    """

    def __init__(self, kernel: l.Kernel, schedule: Schedule) -> None:
        mine: list[tuple[Any, Factor, int]] = []
        self.at: dict[Any, Any] = {}
        self.steps = self.blocks = 1
        for a in kernel.axes:
            inner = 1
            for f in reversed(schedule.binding(None, a.name)):
                if f.level in LEVELS:
                    mine.append((a, f, inner))
                inner *= f.size
                self.blocks *= f.size if f.level == "grid" else 1
            own = math.prod(f.size for x, f, _ in mine if x is a)
            self.steps *= ceil(size_of(a), own)
            self.at[a] = size_of(a) // own // 2 * own
        mine.sort(key=lambda x: LEVELS.index(x[1].level))  # lanes are next to each other
        self.vectors = frozenset(a for a, f, _ in mine if f.level == "reg")
        self.elements, self.warps, lanes = (math.prod(f.size for _, f, _ in mine if f.level == x) for x in LEVELS)
        shape = [f.size for _, f, _ in mine]
        places = np.indices(shape).reshape(len(shape), self.elements, self.warps * lanes)
        for (a, _, inner), x in zip(mine, places, strict=True):
            self.at[a] = self.at[a] + x * inner
        self.there = np.ones(places.shape[1:], bool)
        for a in kernel.axes:
            self.there &= np.broadcast_to(self.at[a] < size_of(a), self.there.shape)

    def asked(self, x: l.Load) -> tuple[int, int]:
        """How many sectors a block touches, and how many of a thread's elements are one vector."""
        env = {**dict.fromkeys(x.free, 0), **self.at}
        for y in topological([i for i in (*x.index, *x.inside) if isinstance(i, Expr)]):
            if isinstance(y, Loaded):
                env[y] = said(y, env)
        size = x.dtype.size
        place = np.broadcast_to(evaluate(offset_of(x), env), self.there.shape)
        there = self.there
        for e in x.inside:
            there = there & np.broadcast_to(evaluate(e, env) >= 0, there.shape)
        sectors = len(np.unique(place[there] * size // SECTOR))
        return sectors, self._width(place, size)

    def _width(self, place: Any, size: int) -> int:
        """How many elements of a thread are one vector."""
        for width in (8, 4, 2):
            if self.elements % width == 0 and width * size <= WIDEST:
                parts = place.reshape(-1, width, place.shape[1])
                if (np.diff(parts, axis=1) == 1).all() and (parts[:, 0] % width == 0).all():
                    return width
        return 1
