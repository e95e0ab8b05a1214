"""Kernels in the text of Kernel IR that were written by hand: what they compute, and inputs for them. Most follow from
a schedule by now (`test_arrangements.py`, which has some of them from the `.tile` files here).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.text import parse

FOLDER = Path(__file__).parent

MEANING: dict[str, Callable[..., Any]] = {
    "ring": lambda x, w: x @ w.T,
    "cluster": lambda x, w: x @ w.T,
    "ping_pong": lambda x, w: (
        x @ w.T
    ),  # two warpgroups take turns by named barriers: one multiplies while the other stores
    "registers": lambda x, w: x @ w.T,  # the first operand comes from registers, two of its fragments in turn
    "copied": lambda x, w: x @ w.T,  # cp.async feeds wgmma
    "split": lambda x, w: x @ w.T,  # two warpgroups take half of k each, and their boxes are added
    "persistent": lambda x, w: (
        x @ w.T
    ),  # slots and phases go on from tile to tile, and stores overlap with the next tile
    # relu(q @ k.T) @ v: scores are packed to be a factor, values are MN-major, two accumulators are on their way
    "chain": lambda q, k, v: np.maximum(q @ k.T, 0).astype(bfloat16).astype(float) @ v,
    # the lower triangle of a, tile by tile: steps that are left out, slots that go on from tile to tile
    "causal": lambda a, x: (np.kron(np.tril(np.ones((5, 5))), np.ones((64, 64))) * a) @ x.T,
    "turned": lambda x: x.T,  # matrices are transposed in registers
    "cluster_sum": lambda x: x.sum(1),
    "histogram": lambda x: (
        np.bincount(x.astype(int) + 8, minlength=17) + np.arange(17) // 16 * (x.reshape(8, 4, 32) > 2).any(2).sum()
    ),
}
"""What each computes, in float64."""


def program(name: str) -> k.Program:
    """A program of one kernel."""
    found: k.Program = parse((FOLDER / f"{name}.kernel").read_text(), f"{name}.kernel")
    return found


def inputs(of: k.Program, seed: int = 0) -> dict[str, Any]:
    """Normal numbers."""
    rng = np.random.default_rng(seed)
    return {b.name: rng.standard_normal(b.type.static_shape).astype(b.type.dtype.numpy) for b in of.inputs}


def exact(name: str, given: dict[str, Any]) -> Any:
    """The result in float64."""
    return MEANING[name](*(x.astype(np.float64) for x in given.values()))
