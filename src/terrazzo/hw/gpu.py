"""The machines: what a block may use, how fast memory and arithmetic are. One record each; the chooser of schedules
reads nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.errors import UserError


@dataclass(frozen=True)
class Gpu:
    """`arch` is what NVRTC calls the target. Rates are of the whole machine: bytes and operations per nanosecond.

    `shared` is what a block may have, in bytes; `memory`, `cache`, `fma` (two operations per multiply-add, in f32) and
    `tensor` (those of `mma.sync` on 16-bit operands) are what good kernels reach; `roof` has the data sheet's memory,
    f32 and 16-bit tensor rates, which nothing beats; `launch` is in nanoseconds. `features` are what an architecture has
    whatever its number: sm_120 has no wgmma. `warpgroups` is the rate of wgmma on 16-bit operands, `boxes` that of TMA from
    the cache.
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
    features: tuple[str, ...] = ()
    warpgroups: float = 0.0
    boxes: float = 0.0

    @property
    def number(self) -> int:
        """90 for sm_90a."""
        return int("".join(c for c in self.arch if c.isdigit()))


# Those of sm_90a were measured on an H200; the others are estimates from data sheets.
GPUS = {
    g.arch: g
    for g in (
        Gpu("sm_75", "T4", 40, 65536, 300, 1200, 7000, 40000, (320, 8100, 65000)),
        Gpu("sm_80", "A100", 108, 166912, 1400, 4000, 17000, 230000, (2039, 19500, 312000)),
        Gpu("sm_86", "A10, RTX 30", 72, 101376, 540, 2500, 24000, 90000, (936, 35600, 142000)),
        Gpu("sm_89", "L4, RTX 40", 128, 101376, 900, 4500, 60000, 250000, (1008, 82600, 330000)),
        Gpu("sm_90a", "H100, H200", 132, 232448, 4200, 7000, 60000, 480000, (4800, 67000, 989000), features=("wgmma",), warpgroups=830000, boxes=10000),
        Gpu("sm_120", "RTX 50", 170, 101376, 1600, 6000, 80000, 320000, (1792, 104800, 419000)),
    )
}


def gpu(arch: str) -> Gpu:
    """The record of an architecture; UserError names the known ones."""
    if arch not in GPUS:
        raise UserError(f"unknown architecture {arch!r}; known: {', '.join(GPUS)}")
    return GPUS[arch]
