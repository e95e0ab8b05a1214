"""Kernels that store in the place of what they read: by the simulator, which finds who reads what another wrote."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from terrazzo.front.capture import capture
from terrazzo.interp.kernel import run_kernel
from terrazzo.ir import in_place
from terrazzo.ir.node import substitute
from terrazzo.options import Options
from terrazzo.pipelines import lowering


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "WORTH", 0)


def residual(x: Any, y: Any, w: Any, b: Any) -> Any:
    return x + F.linear(y, w, b)


def gated(x: Any, y: Any, w: Any) -> Any:
    return F.silu(y @ w) * x


def rows(x: Any, y: Any) -> Any:
    return y + x.softmax(-1).sum(-1, keepdim=True)


def pointwise(x: Any, y: Any) -> Any:
    return torch.where(x > 0, y, x.exp()), x * 2


def across(x: Any, y: Any) -> Any:
    return y + x.t().contiguous().cumsum(-1).t()


def normed(x: Any, y: Any, w: Any) -> Any:
    return y * 0.5 + F.layer_norm(x, x.shape[-1:], w)


def r(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype) / 4


def linear(m: int, k: int, n: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """What a residual is added to, the input, the weight and the bias of a linear layer."""
    return r(m, n, dtype=dtype), r(m, k, dtype=dtype), r(n, k, dtype=dtype), r(n, dtype=dtype)


bf16 = torch.bfloat16
CASES = {
    "a residual, wgmma": (residual, linear(144, 64, 136), "sm_90a"),
    "a residual, mma": (residual, linear(100, 64, 72), "sm_80"),
    "a residual, few rows": (residual, linear(8, 264, 264), "sm_90a"),
    "a residual, CUDA cores": (residual, linear(70, 50, 50, torch.float32), "sm_80"),
    "a residual, parts": (residual, linear(130, 64, 136, torch.float32), "sm_90a"),
    "a gate": (gated, (r(96, 128, dtype=bf16), r(96, 64, dtype=bf16), r(64, 128, dtype=bf16)), "sm_90a"),
    "rows": (rows, (r(9, 515), r(9, 1)), "sm_90a"),
    "long rows": (rows, (r(2, 5000), r(2, 1)), "sm_90a"),
    "pointwise": (pointwise, (r(17, 129), r(17, 129)), "sm_90a"),
    "a scan": (across, (r(40, 70), r(40, 70)), "sm_90a"),
    "a norm": (normed, (r(12, 384), r(12, 384), r(384)), "sm_90a"),
}


@pytest.mark.parametrize("case", CASES)
def test_results_are_the_same_in_place(case: str) -> None:
    fn, args, gpu = CASES[case]
    captured = capture(fn, args)
    done = lowering(captured.program, Options(target=gpu, libraries="never"))
    found = in_place.pairs(done.loop.steps)
    rng, tried = np.random.default_rng(0), 0
    for kernel in done.at("kernel").steps:
        for b, old in ((x, old) for x in kernel.writes for old in found.get(x, ())):
            tried += 1
            given = {
                x: (rng.standard_normal(x.type.static_shape) / 4).astype(x.type.dtype.numpy)
                for x in kernel.params
                if x not in kernel.writes
            }
            apart = dict(given)
            run_kernel(kernel, apart)
            params = tuple(x for x in kernel.params if x is not old)
            there = replace(kernel, params=params, body=tuple(substitute(s, {old: b}) for s in kernel.body))
            for seed in (None, 0):
                together = {x: a for x, a in given.items() if x is not old} | {b: given[old].copy()}
                run_kernel(there, together, seed=seed)
                for x in kernel.writes:
                    np.testing.assert_array_equal(apart[x], together[x])
    assert tried
