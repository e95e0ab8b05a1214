"""Some blocks of a kernel, run on random numbers for what the simulator notices: races, memory nobody wrote, accesses
out of bounds.

They are the first and last of the grid, and of every axis of it that the kernel counts blocks by, and some at random.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from terrazzo.interp.kernel.machine import run_kernel
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import FloorDiv, Mod, Var
from terrazzo.ir.node import topological

RANDOM = 2
"""Blocks at random."""


def check_blocks(kernel: k.Kernel, seed: int = 0) -> None:
    """Run the sample of a kernel; CompilerBug where something is wrong. Races are found in whatever order warps go."""
    rng = np.random.default_rng(seed)
    memory = {b: _numbers(b, rng) for b in kernel.params if b not in kernel.writes}
    if kernel.grid:
        run_kernel(kernel, memory, blocks=blocks(kernel, seed))


def blocks(kernel: k.Kernel, seed: int = 0) -> list[int]:
    """The numbers of the blocks to try."""
    found, sizes = {0, kernel.grid - 1}, set()
    for x in topological(kernel.body):  # block // size and block % size are coordinates along the axes of the grid
        if isinstance(x, FloorDiv | Mod) and isinstance(x.a, Var) and x.a.name == k.BLOCK and isinstance(x.b, int):
            sizes.add(x.b)
    found |= {edge for size in sizes if size < kernel.grid for edge in (size - 1, kernel.grid - size)}
    return sorted(found | set(random.Random(seed).sample(range(kernel.grid), min(RANDOM, kernel.grid))))


def _numbers(b: l.Buffer, rng: Any) -> Any:
    """Normal floats; integers that are 0 or 1, which are indices into anything that has two elements."""
    shape, kind = b.type.static_shape, b.type.dtype.numpy
    return (
        rng.standard_normal(shape, np.float32).astype(kind)
        if b.type.dtype.is_float
        else rng.integers(0, 2, shape).astype(kind)
    )
