"""What a kernel writes out is bounded where its sums are accumulators of matrix instructions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.test_operators import kernels

from terrazzo.hw.gpu import Gpu, gpu
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.text import parse
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop_to_tile.choose import schedule
from terrazzo.rules.tile_to_kernel import budget, lower
from terrazzo.rules.tile_to_kernel.budget import over_budget, written


def mish() -> k.Kernel:
    """A product with a long function of each of its results."""
    x, w = (torch.empty(512, 512, dtype=torch.bfloat16, device="meta") for _ in range(2))
    (kernel,) = kernels(lambda x, w: F.mish(F.linear(x, w)), x, w)
    return kernel


def test_what_is_unrolled_counts_as_often_as_it_is_written() -> None:
    loops = [s for s in k.walk(mish().body) if isinstance(s, k.For)]
    for loop in loops:
        times = loop.most if loop.unrolled else 1
        assert written((loop,)) == times * written(loop.body)
    assert any(loop.unrolled and loop.most > 1 and written(loop.body) for loop in loops)


def test_too_much_of_it_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = mish()
    assert over_budget(kernel, gpu("sm_90a")) == ""
    monkeypatch.setattr(budget, "WRITTEN", written(kernel.body) - 1)
    assert "writes out" in over_budget(kernel, gpu("sm_90a"))


def test_products_that_fit_in_no_tile_together_have_tiles_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of four products of parts was left to threads, each of which read its rows from memory: 6.4 ms for 33 us
    (H200).
    """
    weights = (1072, 528)

    def refused(kernel: k.Kernel, gpu: Gpu) -> str:
        both = sum(b.type.shape == weights for b in kernel.reads) > 1
        return "the schedule needs 330 registers of a thread, and sm_90a has 255" if both else ""

    monkeypatch.setattr(lower, "over_budget", refused)
    program = parse("""
@loop
def f(x: bf16[1040, 528], w: bf16[1072, 528], u: bf16[1072, 528]):
    with kernel('z', z=f32[1040, 1072]):
        for a0 in free(1040):
            for a1 in free(1072):
                for r0 in reduce(528):
                    in0 = x[a0, r0]
                    v0 = f32(in0)
                    in1 = w[a1, r0]
                    v1 = f32(in1)
                    v2 = mul(v0, v1)
                    in2 = u[a1, r0]
                    v3 = f32(in2)
                    v4 = mul(v0, v3)
                    acc0 <- sum(v2)
                    acc1 <- sum(v4)
                v5 = tanh(acc0)
                v6 = mul(v5, acc1)
                z[a0, a1] = v6
    return (z,)
""")
    done = schedule(program, gpu("sm_90a"), Log())
    assert len(done.schedules) == 2 and all("wgmma" in str(s) for _, s in done.schedules)
