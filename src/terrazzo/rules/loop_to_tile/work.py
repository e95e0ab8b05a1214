"""What a kernel on the instructions of warpgroups takes: waves of the slowest of its resources."""

from __future__ import annotations

import math
from dataclasses import dataclass

from terrazzo.hw.gpu import Gpu

STEP = 64
"""Elements of k in a step: 128 bytes, the widest swizzle."""


@dataclass(frozen=True)
class Work:
    """What a kernel does, as far as its time depends on it: so many tiles of m rows and n columns for each of `count`
    products, by clusters of so many blocks, in steps for which a block fetches some bytes into one of its slots of so
    many `held` bytes, and which take `extra` nanoseconds. Results leave at a rate, and computing a tile's of its sums
    takes `after` nanoseconds. `least` bytes of memory are touched. A step has `depth` products of each sum. So many
    `readers` fetch the same rows at once. Sums may be `shared` by the blocks of a cluster.
    """

    m: int
    n: int
    count: int
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
    readers: float = 0.0
    shared: bool = False


def lasts(work: Work, gpu: Gpu) -> float:
    """Waves of the slowest of arithmetic, cache, latency and memory, in nanoseconds. In the last one few blocks may be
    left, which have less on their way.
    """
    has = gpu.warpgroups
    if has is None or work.slots < 2:
        return math.inf
    walkers = gpu.processors // work.blocks
    active = min(work.tiles, walkers) * work.blocks
    each = 2.0 * work.m * work.n * work.depth * work.count
    arithmetic = each * gpu.processors * (work.n + has.start) / work.n / has.rate
    fetched = max(work.fetched * active / has.cache, work.fetched / has.shared)
    step = max(arithmetic, fetched, has.latency / work.slots, has.crowd * work.readers) + has.step + work.extra
    tile = work.steps * step + work.m * work.n * work.results / work.rate + work.after

    def wave(tiles: int, count: int) -> float:
        flying = min(1.0, tiles * work.blocks * work.slots * work.held / (gpu.processors * has.flying))
        return count * max(tile, work.least / work.tiles * tiles / (gpu.memory * flying)) if tiles else 0.0

    full, rest = divmod(work.tiles, walkers)
    return wave(walkers, full) + wave(rest, 1) + has.fill + (has.cluster if work.blocks > 1 and not work.shared else 0)
