"""The machines: what a block may use, how fast memory and arithmetic are. One record each; the chooser of schedules
reads nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from terrazzo.errors import UserError


@dataclass(frozen=True)
class Warpgroups:
    """What products by warpgroups reach, with operands by TMA. Nanoseconds, and bytes or operations in one.

    `rate` is that of the whole machine on 16-bit operands, and `sustained` that at the limit of power; one warpgroup
    that multiplies alone, with instructions of n columns, has n / (n + `single`) of it; `parts` are two such numbers
    where factors are parts of numbers, of which each slab is multiplied several times. A step takes `step` besides, and
    a slab `latency` until it has come; `shared` is what comes into a processor at most, `banks` what its shared memory
    is read and written at, and `cache` what leaves the cache for all of them. Results leave a block at `gathered`
    through shared memory in boxes, and for each subtile more than those of 64 columns would be takes `emptied` until a
    slot is free; at `rows` where threads take them from there one by one, and at `direct` from registers. A kernel
    takes `fill` until its first step, and `drain` for each 64 columns of a tile beside its products and what its
    results take: nothing is multiplied until the next tile's first products are there. One of clusters takes `cluster`
    more, and one of partial sums `part` more and `states` times as long for these as the cache would need. `flying`
    bytes must be on their way in a processor for its share of the memory's rate. Rows that begin anywhere in the
    cache's lines take `straddling` times as long: where no more than every other processor fetches, and otherwise,
    since two processors share their way to the cache. Blocks of a cluster that share sums take `meeting` until all have
    theirs, and a block then gives and takes `given` bytes; for each beyond two of them everything takes `sharing` of
    its time more; of what they fetch more than once of the larger operand, all take `again` bytes; `clusters` has how
    many clusters of so many blocks run at once. `parts_states` and `parts_meeting` are in the places of `states` and
    `meeting` where factors are parts; these come from memory at `parts_memory`. The cache `keeps` an operand of so many
    bytes until it is read again. A row of a slab beyond the end of an operand takes `empty`, where the slab has many.
    """

    rate: float
    sustained: float
    single: float
    parts: tuple[float, float]
    step: float
    latency: float
    shared: float
    cache: float
    gathered: float
    emptied: float
    rows: float
    direct: float
    fill: float
    drain: float
    cluster: float
    part: float
    states: float
    flying: float
    read: float
    after: float
    straddling: tuple[float, float] = (1.0, 1.0)
    meeting: float = 0.0
    sharing: float = 0.0
    given: float = 1.0
    again: float = 1.0
    clusters: tuple[tuple[int, int], ...] = ()
    parts_memory: float = 1.0
    parts_states: float = 0.0
    parts_meeting: float = 0.0
    banks: float = math.inf
    keeps: float = math.inf
    empty: float = 0.0


@dataclass(frozen=True)
class Gpu:
    """`arch` is what NVRTC calls the target. Rates are of the whole machine: bytes and operations per nanosecond.

    `shared` is what a block may have, in bytes; `memory`, `cache`, `fma` (two operations per multiply-add, in f32) and
    `tensor` (those of `mma.sync` on 16-bit operands) are what good kernels reach; `roof` has the data sheet's memory,
    f32 and 16-bit tensor rates, which nothing beats; `launch` is in nanoseconds, and so is `wave`, in which blocks on
    `mma.sync` that come one after the other begin and end, and memory waits. `features` are what an architecture
    has whatever its number: sm_120 has no wgmma.
    """

    arch: str
    name: str
    processors: int
    shared: int
    memory: float
    cache: float
    fma: float
    tensor: float
    roof: tuple[float, float, float]
    launch: float = 2000.0
    wave: float = 0.0
    features: tuple[str, ...] = ()
    warpgroups: Warpgroups | None = None

    def __hash__(self) -> int:
        return hash(self.arch)  # one of few, and asked for again and again

    @property
    def number(self) -> int:
        """90 for sm_90a."""
        return int("".join(c for c in self.arch if c.isdigit()))


H200 = Warpgroups(
    rate=1027000, sustained=830000, single=13.0, parts=(930000, 26.0), step=6.0, latency=975.0, shared=122.0,
    cache=12000.0, gathered=53.0, emptied=90.0, rows=47.0, direct=78.0, fill=775.0, drain=230.0, cluster=690.0,
    part=1370.0, states=6.8, flying=52000.0, read=18.0, after=120.0, straddling=(1.5, 2.17), meeting=600.0,
    sharing=0.006, given=40.0, again=10000.0, clusters=((2, 66), (4, 30), (8, 15)), parts_memory=2500.0,
    parts_states=2.0, parts_meeting=1000.0, banks=243.0, keeps=32e6, empty=0.55,
)  # fmt: skip
"""What a machine of 1.9 GHz does by its data sheet: `rate`, `banks` (128 bytes a clock) and `shared` (64). The others
are fitted to 4,238 schedules of 150 products of bf16 (benchmarks/fits: h200-tiles, h200-shared, h200-order, h200-rows,
h200-walks, h200-turns, and 283 candidates that were not kept), by how far they are off and by how much is lost where
they choose: 1.5 % of h200-tiles.json, 1.2 of h200-shared.json, 1.5 of h200-order.json, 4 of h200-rows.json, 1.7 of
h200-turns.json, and 3.7 of h100-small.json, which was not fitted to. 4096 products of 64 cubed say the same of `drain`:
124 tiles of 64 x 16 to a processor took 41.8 us, 0.34 each. What takes most of a step is no maximum but what several
things take that go on at once (AT_ONCE). `sustained`, and what power costs beyond it (POWER), are what long
products reach. `rows` is an estimate. `read` and `after` are of three products each, with a residual or GELU beside
bias and ReLU (22 November 2026): 13 to 21 bytes, where one took nothing, and 65 to 235 operations. `meeting`, `given`
and `again` were fitted to how much is lost by what is chosen of 461 schedules of 34 products, of which 176 share sums
(benchmarks/fits/h200-shared.json): the good ones of these take 10 % longer than the model says. The first number of
`straddling` is of 159 schedules of eleven products whose tiles hardly fill the machine
(benchmarks/fits/h200-order.json): 300 x 1000 x 1000 took 5.4 us in 64 tiles of 64 x 80, and 6.2 in 80 of 64 x 64; 320 x
1024 x 1024 4.2 and 4.1. So is that what boxes bring from beyond the ends of operands takes as long as memory needs for
as much, whatever else is done: with 0, 32 and 48 of 448 rows beyond the end tiles of 64 x 224 took 7.9, 8.4 and 9.4 us.
`clusters` is what the driver says of blocks with 200,000 bytes of shared memory. `parts` and `parts_states` are fitted
to 182 measurements of 20 products (benchmarks/fits/h200-parts-tiles.json); of those in several pieces it is not known
for sure in which tile they ran. `parts_meeting` is held against 56 schedules of six small products (H100,
benchmarks/fits/h100-halves.json), those in two launches. `sharing` is of one product, 128 x 18944 x 3584, of which
eight blocks to a tile took 51 us and two 47 (benchmarks/fits/h200-few.json). `parts_memory` is an estimate: what was
chosen for 128 rows read 2.1 to 2.7 TB/s.
"""

# Those of sm_90a were measured on an H200; the others are estimates from data sheets.
GPUS = {
    g.arch: g
    for g in (
        Gpu("sm_75", "T4", 40, 65536, 300, 1200, 7000, 40000, (320, 8100, 65000)),
        Gpu("sm_80", "A100", 108, 166912, 1400, 4000, 17000, 230000, (2039, 19500, 312000)),
        Gpu("sm_86", "A10, RTX 30", 72, 101376, 540, 2500, 24000, 90000, (936, 35600, 142000)),
        Gpu("sm_89", "L4, RTX 40", 128, 101376, 900, 4500, 60000, 250000, (1008, 82600, 330000)),
        Gpu(
            "sm_90a",
            "H100, H200",
            132,
            232448,
            4200,
            7000,
            60000,
            480000,
            (4800, 67000, 989000),
            wave=2100.0,  # fitted with the tiles of `mma.sync` (rules/loop_to_tile/products/products.py)
            features=("wgmma",),
            warpgroups=H200,
        ),
        Gpu("sm_120", "RTX 50", 170, 101376, 1600, 6000, 80000, 320000, (1792, 104800, 419000)),
    )
}


def gpu(arch: str) -> Gpu:
    """The record of an architecture; UserError names the known ones."""
    if arch not in GPUS:
        raise UserError(f"unknown architecture {arch!r}; known: {', '.join(GPUS)}")
    return GPUS[arch]
