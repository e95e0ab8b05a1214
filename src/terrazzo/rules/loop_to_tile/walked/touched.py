"""What threads touch that compute points under a schedule: the sectors that the cache brings, and the lines for which
warps wait, one after the other.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from terrazzo.hw.gpu import Gpu
from terrazzo.ir.address import evaluate
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, FloorDiv, Loaded, Mod
from terrazzo.ir.node import topological
from terrazzo.ir.schedule import Factor, Schedule
from terrazzo.rules.access import WIDEST
from terrazzo.rules.loop_to_tile.walked.cache_lines import LINE, offset_of, said
from terrazzo.rules.loop_to_tile.walked.threads import SECTOR, WARP, ceil, size_of

LINES = 2
"""Instructions that a processor could begin while a line comes from its cache. Patches of 3 x 3 in bfloat16, of which
it is 28 million lines, took 67 us, others with 21 million 107 (H200, November 2026).
"""
BLOCK = 0.6
"""Nanoseconds for which a block comes and goes, whatever it does: 489,216 of them that stored patches took 297 us, and
442,368 269 (H200, November 2026).
"""
EACH, DIVIDED = 9, 4
"""Instructions for an element that is stored, with what is loaded for it (9 were counted for patches of 7 x 7 among
which threads walk), and for each division by which its place is found anew, of which many find the same.
"""


@lru_cache(maxsize=1024)
def touched(kernel: l.Kernel, schedule: Schedule, gpu: Gpu) -> float:
    """Nanoseconds of a kernel without reductions whose threads compute points as the schedule says: what memory moves,
    what the cache brings in sectors, the lines that warps ask for, or the instructions they need; and the launch.
    """
    spread = _Spread(kernel, schedule)
    accesses = {x for x in topological([s.value for s in kernel.stores]) if isinstance(x, l.Load)}
    accesses |= {l.Load(s.buffer, s.index) for s in kernel.stores}
    moved = sum(math.prod(b.type.static_shape) * b.type.dtype.size for b in {x.buffer for x in accesses})
    both = [spread.asked(x) for x in accesses]
    sectors, lines = (sum(x) for x in zip(*both, strict=True))
    found = {x for x in topological(kernel.stores) if isinstance(x, FloorDiv | Mod) and x.free & spread.vectors}
    issued = spread.elements * (EACH * len(kernel.stores) + DIVIDED * len(found))
    rate = gpu.fma / 2 / WARP
    busy = spread.warps * max(issued, LINES * lines) / rate
    time: float = max(moved / gpu.memory, SECTOR * spread.warps * sectors / gpu.cache, busy, BLOCK * spread.blocks)
    return time + gpu.launch


class _Spread:
    """Where the lanes of a warp have their points, one amid all others, and how many warps there are that have some.

    `at` has for each axis the places of the warp's points, [elements of a thread, lanes], and `there` which of these
    are points.
    """

    def __init__(self, kernel: l.Kernel, schedule: Schedule) -> None:
        mine: list[tuple[Any, Factor, int]] = []
        self.at: dict[Any, Any] = {}
        self.warps = self.blocks = 1
        for a in kernel.axes:
            inner = 1
            for f in reversed(schedule.binding(None, a.name)):
                if f.level in ("lane", "reg"):
                    mine.append((a, f, inner))
                inner *= f.size
                self.blocks *= f.size if f.level == "grid" else 1
            own = math.prod(f.size for x, f, _ in mine if x is a)
            self.warps *= ceil(size_of(a), own)
            self.at[a] = size_of(a) // own // 2 * own
        # an axis further in, and a factor further in, lies closer together
        mine.sort(key=lambda x: x[1].level == "lane")
        self.vectors = frozenset(a for a, f, _ in mine if f.level == "reg")
        self.elements = math.prod(f.size for _, f, _ in mine if f.level == "reg")
        shape = [f.size for _, f, _ in mine]
        places = np.indices(shape).reshape(len(shape), self.elements, -1)
        for (a, _, inner), x in zip(mine, places, strict=True):
            self.at[a] = self.at[a] + x * inner
        self.there = np.ones(places.shape[1:], bool)
        for a in kernel.axes:
            self.there &= np.broadcast_to(self.at[a] < size_of(a), self.there.shape)

    def asked(self, x: l.Load) -> tuple[int, int]:
        """How many sectors a warp touches, and for how many lines it asks, an instruction's at a time."""
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
        width = self._width(place, size)
        begins = np.where(there, place * size // LINE, -1).reshape(-1, width * place.shape[1])
        lines = np.sort(begins, axis=1)
        apart = (lines[:, 1:] != lines[:, :-1]).sum() + len(lines) - (lines[:, 0] < 0).sum()
        return sectors, int(apart)

    def _width(self, place: Any, size: int) -> int:
        """How many elements of a thread are one vector."""
        for width in (8, 4, 2):
            if self.elements % width == 0 and width * size <= WIDEST:
                parts = place.reshape(-1, width, place.shape[1])
                if (np.diff(parts, axis=1) == 1).all() and (parts[:, 0] % width == 0).all():
                    return width
        return 1
