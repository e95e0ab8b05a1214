"""The kernels that are mutated: derived ones of every shape, on small inputs, and all that were written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from terrazzo.hw.gpu import Gpu, gpu
from terrazzo.ir.dialects import kernel as k
from tests.kernels import by_hand
from tests.kernels.programs import attention, b, h, lowered, n, r, swiglu


@dataclass(frozen=True)
class Subject:
    """A program of kernels, inputs for it, and the GPU it is for."""

    name: str
    program: k.Program
    inputs: dict[str, Any]
    gpu: Gpu


def spread(rows: int, columns: int) -> torch.Tensor:
    """Normal numbers, one of which is far above the others in every second row: exp() of a sum without it does not
    fit.
    """
    x = r(rows, columns)
    for i in range(0, rows, 2):
        x[i, i * (columns - 1) // ((rows - 1) // 2 * 2)] += 200
    return x


def steep(x: torch.Tensor) -> torch.Tensor:
    """x with every second row so large that the differences of its products do not fit exp()."""
    x[:, ::2] *= 80
    return x


def infinite(x: torch.Tensor, first: int) -> torch.Tensor:
    """x with an infinity in each of some rows: what is left of it where zeros should be makes a sum NaN."""
    for i in range(8):
        x[first + i, i] = torch.inf
    return x


DERIVED: dict[str, tuple[str, Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "gelu": ("sm_90a", lambda x: F.gelu(x), lambda: (r(3, 300),)),
    "transposed": ("sm_80", lambda x, y: x.t() + y, lambda: (r(40, 50), r(50, 40))),
    "embedding": ("sm_90a", lambda i, w: F.embedding(i, w), lambda: (n(50, 2, 3), r(50, 64))),
    "sum of rows": ("sm_90a", lambda x: x.sum(-1), lambda: (r(3, 500),)),
    "sum of columns": ("sm_80", lambda x: x.sum(0), lambda: (r(200, 40),)),
    "argmax": ("sm_90a", lambda x: x.argmax(-1), lambda: (spread(16, 700),)),
    "softmax": ("sm_90a", lambda x: torch.softmax(x, -1), lambda: (spread(12, 500),)),
    "softmax of columns": ("sm_80", lambda x: torch.softmax(x, 0), lambda: (spread(16, 40).t().contiguous(),)),
    "variance": ("sm_80", lambda x: x.var(-1), lambda: (r(3, 500),)),
    "layer norm": ("sm_90a", lambda x, w, c: F.layer_norm(x, (512,), w, c), lambda: (r(2, 512), r(512), r(512))),
    "rms norm": ("sm_75", lambda x, w: F.rms_norm(x, (1031,), w), lambda: (r(2, 1031), r(1031))),
    "cross entropy": ("sm_90a", lambda x, i: F.cross_entropy(x, i), lambda: (spread(27, 70), n(70, 27))),
    "linear": ("sm_80", lambda x, w, c: F.linear(x, w, c), lambda: (r(16, 180), r(24, 180), r(24))),
    "linear through registers": (
        "sm_75",
        lambda x, w: x.t() @ w.t(),
        lambda: (infinite(r(40, 20), 20), infinite(r(40, 32), 20).t().contiguous()),
    ),
    "split product": ("sm_80", lambda x, w: x @ w, lambda: (r(16, 1536), r(1536, 16))),
    "matmul of bfloat16": ("sm_80", lambda x, w: x @ w, lambda: (b(32, 616), b(616, 32))),
    "matmul of half": (
        "sm_75",
        lambda x, w: x @ w,
        lambda: (infinite(h(320, 32), 200).t().contiguous(), infinite(h(320, 32), 200)),
    ),
    "transposed matmul of bfloat16": ("sm_90a", lambda x, w: x.t() @ w, lambda: (b(640, 32), b(640, 40))),
    "ragged matmul of bfloat16": ("sm_80", lambda x, w: x @ w, lambda: (b(23, 584), b(584, 40))),
    "bmm of half": ("sm_90a", lambda x, w: torch.bmm(x, w), lambda: (h(2, 32, 616), h(2, 616, 32))),
    "swiglu": ("sm_90a", swiglu, lambda: (b(32, 616), b(16, 616), b(16, 616))),
    "attention": ("sm_90a", attention, lambda: (steep(r(1, 8, 180)), r(1, 180, 180), r(1, 180, 24))),
    "attention of half": ("sm_80", attention, lambda: (steep(h(1, 24, 616)), h(1, 616, 616), h(1, 616, 24))),
    "conv2d": ("sm_80", lambda x, w, c: F.conv2d(x, w, c, padding=1), lambda: (r(1, 5, 6, 6), r(16, 5, 3, 3), r(16))),
    "conv1d": ("sm_90a", lambda x, w: F.conv1d(x, w, dilation=2), lambda: (r(1, 4, 36), r(32, 4, 3))),
}
"""For each: the target, the function, and its arguments (after seeding)."""

NAMES = (*DERIVED, *(f"{name} by hand" for name in by_hand.MEANING))


@cache
def subject(name: str) -> Subject:
    """A kernel to mutate."""
    if name.endswith(" by hand"):
        program = by_hand.program(name.removesuffix(" by hand"))
        return Subject(name, program, by_hand.inputs(program, seed=2), gpu("sm_90a"))
    target, fn, make = DERIVED[name]
    torch.manual_seed(0)
    found = lowered(fn, make(), target)
    return Subject(name, found.program, found.inputs, gpu(target))
