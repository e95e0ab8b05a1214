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
    """Normal numbers, one of which is far above the others in every second row: exp() of a sum without it does not fit."""
    x = r(rows, columns)
    for i in range(0, rows, 2):
        x[i, i * 7919 % columns] += 200
    return x


DERIVED: dict[str, tuple[str, Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "gelu": ("sm_90a", lambda x: F.gelu(x), lambda: (r(3, 300),)),
    "transposed": ("sm_80", lambda x, y: x.t() + y, lambda: (r(40, 50), r(50, 40))),
    "embedding": ("sm_90a", lambda i, w: F.embedding(i, w), lambda: (n(50, 2, 3), r(50, 64))),
    "sum of rows": ("sm_90a", lambda x: x.sum(-1), lambda: (r(3, 301),)),
    "sum of columns": ("sm_80", lambda x: x.sum(0), lambda: (r(200, 40),)),
    "argmax": ("sm_90a", lambda x: x.argmax(-1), lambda: (r(16, 700),)),
    "softmax": ("sm_90a", lambda x: torch.softmax(x, -1), lambda: (spread(12, 500),)),
    "softmax of columns": ("sm_80", lambda x: torch.softmax(x, 0), lambda: (spread(9, 40).t().contiguous(),)),
    "variance": ("sm_80", lambda x: x.var(-1), lambda: (r(3, 500),)),
    "layer norm": ("sm_90a", lambda x, w, c: F.layer_norm(x, (512,), w, c), lambda: (r(2, 512), r(512), r(512))),
    "rms norm": ("sm_75", lambda x, w: F.rms_norm(x, (1031,), w), lambda: (r(2, 1031), r(1031))),
    "cross entropy": ("sm_90a", lambda x, i: F.cross_entropy(x, i), lambda: (spread(12, 70), n(70, 12))),
    "linear": ("sm_80", lambda x, w, c: F.linear(x, w, c), lambda: (r(16, 180), r(24, 180), r(24))),
    "linear through registers": ("sm_75", lambda x, w: x.t() @ w.t(), lambda: (r(40, 20), r(24, 40))),
    "split product": ("sm_80", lambda x, w: x @ w, lambda: (r(8, 1024), r(1024, 8))),
    "matmul of bfloat16": ("sm_80", lambda x, w: x @ w, lambda: (b(32, 160), b(160, 64))),
    "matmul of half": ("sm_75", lambda x, w: x @ w, lambda: (h(32, 96), h(96, 32))),
    "transposed matmul of bfloat16": ("sm_90a", lambda x, w: x.t() @ w, lambda: (b(320, 64), b(320, 72))),
    "ragged matmul of bfloat16": ("sm_80", lambda x, w: x @ w, lambda: (b(23, 168), b(168, 40))),
    "bmm of half": ("sm_90a", lambda x, w: torch.bmm(x, w), lambda: (h(2, 32, 320), h(2, 320, 40))),
    "swiglu": ("sm_90a", swiglu, lambda: (b(32, 320), b(32, 320), b(32, 320))),
    "attention": ("sm_90a", attention, lambda: (r(1, 9, 96), r(1, 20, 96), r(1, 20, 96))),
    "attention of half": ("sm_80", attention, lambda: (h(1, 16, 160), h(1, 24, 160), h(1, 24, 160))),
    "conv2d": ("sm_80", lambda x, w, c: F.conv2d(x, w, c, padding=1), lambda: (r(1, 5, 6, 6), r(7, 5, 3, 3), r(7))),
    "conv1d": ("sm_90a", lambda x, w: F.conv1d(x, w, dilation=2), lambda: (r(1, 4, 20), r(8, 4, 3))),
}
"""For each: the target, the function, and its arguments (after seeding)."""

NAMES = (*DERIVED, *(f"{name} by hand" for name in by_hand.MEANING))


@cache
def subject(name: str) -> Subject:
    """A kernel to mutate."""
    if name.endswith(" by hand"):
        program = by_hand.program(name.removesuffix(" by hand"))
        return Subject(name, program, by_hand.inputs(program), gpu("sm_90a"))
    target, fn, make = DERIVED[name]
    torch.manual_seed(0)
    found = lowered(fn, make(), target)
    return Subject(name, found.program, found.inputs, gpu(target))
