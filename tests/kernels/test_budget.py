"""What a kernel writes out is bounded where its sums are accumulators of matrix instructions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.test_operators import kernels

from terrazzo.hw.gpu import gpu
from terrazzo.ir.dialects import kernel as k
from terrazzo.rules.tile_to_kernel import budget
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
