"""The machines: what a block may use, how fast memory and arithmetic are. One record each; the chooser of schedules reads nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.errors import UserError


@dataclass(frozen=True)
class Gpu:
    """`arch` is what NVRTC calls the target. Rates are of the whole machine: bytes and operations per nanosecond.

    `shared` is what a block may have, in bytes; `fma` counts two operations per multiply-add in f32, `tensor` those of `mma.sync` on
    16-bit operands; `launch` is in nanoseconds.
    """

    arch: str
    name: str
    processors: int
    shared: int
    memory: float
    cache: float
    fma: float
    tensor: float
    launch: float = 2000.0

    @property
    def number(self) -> int:
        """90 for sm_90a."""
        return int("".join(c for c in self.arch if c.isdigit()))


# Data sheets, but for sm_90a: there memory, fma and mma.sync are what kernels reached on an H200.
GPUS = {
    g.arch: g
    for g in (
        Gpu("sm_75", "T4", 40, 65536, 320, 1200, 8100, 60000),
        Gpu("sm_80", "A100", 108, 166912, 1555, 4000, 19500, 280000),
        Gpu("sm_86", "A10, RTX 30", 72, 101376, 600, 2500, 31000, 120000),
        Gpu("sm_89", "L4, RTX 40", 128, 101376, 1000, 4500, 80000, 320000),
        Gpu("sm_90a", "H100, H200", 132, 232448, 4200, 7000, 60000, 480000),
        Gpu("sm_120", "RTX 50", 170, 101376, 1790, 6000, 100000, 400000),
    )
}


def gpu(arch: str) -> Gpu:
    """The record of an architecture; UserError names the known ones."""
    if arch not in GPUS:
        raise UserError(f"unknown architecture {arch!r}; known: {', '.join(GPUS)}")
    return GPUS[arch]
