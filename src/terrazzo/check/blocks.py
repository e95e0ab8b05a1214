"""Running a kernel of a GPU in the simulator: all of its blocks where they are few, else the first, the last, tails and
some others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from terrazzo.interp.kernel import run_kernel
from terrazzo.interp.kernel.sample import blocks
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l

ALL = 1 << 11
"""Threads up to which a kernel is simulated whole."""


def sample(kernel: k.Kernel) -> list[int]:
    """The blocks that are simulated."""
    return list(range(kernel.grid)) if kernel.grid * kernel.threads <= ALL else blocks(kernel)


def simulate(kernel: k.Kernel, chosen: Sequence[int], memory: Mapping[l.Buffer, Any]) -> dict[l.Buffer, Any]:
    """What a kernel writes. Where not all of its blocks run, what they do not write keeps its value in `memory`.

    CompilerBug where the simulator finds the kernel wrong.
    """
    whole = len(chosen) == kernel.grid
    work = {b: value for b, value in memory.items() if not whole or b not in kernel.writes}
    run_kernel(kernel, work, blocks=None if whole else chosen)
    return {b: work[b] for b in kernel.writes}
