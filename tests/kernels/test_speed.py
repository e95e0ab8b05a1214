"""The simulator is fast enough to be asked: a step of a large tile, and a whole block. Times are this process's
alone.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from tests.kernels.programs import lowered

from terrazzo.interp import kernel as simulator

TILE = """\
with schedule("mm", target="sm_80"):
    a0 = grid(2) * block(128)
    a1 = grid(2) * block(128)
    r0 = time(4, ring=3) * block(64)
    with site("acc0", on="mma.m16n8k16.f32.bf16"):
        a0 = warp(2) * reg(4) * inst.m(16)
        a1 = warp(4) * reg(4) * inst.n(8)
        r0 = reg(4) * inst.k(16)
        x = smem(by="cp.async", swizzle=128)
        w = smem(by="cp.async", swizzle=128)
    with site("mm"):
        a0 = like("acc0")
        a1 = like("acc0")
"""
STEPS = 4


def seconds(shape: int) -> float:
    """One block of the product of two square matrices: the best of three times."""
    torch.manual_seed(0)
    args = tuple(torch.randn(shape, shape).bfloat16() for _ in range(2))
    found = lowered(lambda x, w: x @ w, args, "sm_80", schedules=(TILE,))
    (kernel,) = found.kernels
    best = np.inf
    for _ in range(3):
        memory = {b: found.inputs[b.name] for b in kernel.reads}
        start = time.process_time()
        simulator.run_kernel(kernel, memory, blocks=[0])
        best = min(best, time.process_time() - start)
    assert kernel.threads == 256
    return best


def test_a_block_of_256_threads_and_each_of_its_steps() -> None:
    whole = seconds(256)
    assert whole < 5
    assert whole / STEPS < 0.1  # of 128 x 128 x 64, for which 50 ms is the goal
