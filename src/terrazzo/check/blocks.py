"""Running a kernel of a GPU in the simulator: all of its blocks where they are few, else the first, the last, tails and some others."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from terrazzo.interp import kernel as simulator
from terrazzo.ir.address import evaluate
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Var
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.ir.schedule import Schedule
from terrazzo.rules.tile_to_kernel.digits import Bindings

ALL = 1 << 11
"""Threads up to which a kernel is simulated whole."""
MORE = 2
"""Blocks simulated at random, beside those at the edges."""


def sample(kernel: k.Kernel, schedule: Schedule | None = None) -> list[int]:
    """The blocks that are simulated: the first, the last, the last along each axis of the grid, and some others."""
    if kernel.grid * kernel.threads <= ALL:
        return list(range(kernel.grid))
    some = random.Random(kernel.grid).sample(range(kernel.grid), MORE)
    return sorted({0, kernel.grid - 1, *some, *(_tails(schedule) if schedule else ())})


def _tails(schedule: Schedule) -> list[int]:
    """For every axis of the grid, the block that is last along it and first along the others."""
    bindings = Bindings(schedule)
    numbers = np.arange(bindings.blocks)
    digits = {a: np.broadcast_to(evaluate(e, {bindings.block: numbers}), numbers.shape) for a, e in bindings.grid.items()}
    return [int(np.argmax(d - sum(e for b, e in digits.items() if b != a) * bindings.blocks)) for a, d in digits.items()]


def simulate(kernel: k.Kernel, blocks: Sequence[int], memory: Mapping[l.Buffer, Any]) -> dict[l.Buffer, Any]:
    """What a kernel writes. Where not all of its blocks run, what they do not write keeps its value in `memory`.

    CompilerBug where the simulator finds the kernel wrong.
    """
    work = dict(memory)
    if len(blocks) == kernel.grid:
        for b in kernel.writes:
            work.pop(b, None)
    else:
        kernel = _only(kernel, blocks)
    simulator.run_kernel(kernel, work)
    return {b: work[b] for b in kernel.writes}


def _only(kernel: k.Kernel, blocks: Sequence[int]) -> k.Kernel:
    """A kernel of these blocks alone: the number of a block becomes a function of the new one, in steps."""
    count = len(blocks)
    new = Var(k.BLOCK, count)
    number: IntExpr = blocks[0]
    for step in range(1, count):
        number = number + (blocks[step] - blocks[step - 1]) * ((new + (count - step)) // count)
    old: dict[Node, Any] = {e: number for e in topological(kernel.body) if getattr(e, "name", "") == k.BLOCK}
    fields = dict(zip(kernel._fields, kernel.values, strict=True))
    return k.Kernel(**{**fields, "grid": count, "body": tuple(substitute(s, old) for s in kernel.body)})
