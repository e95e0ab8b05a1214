"""Norms of 16-bit numbers with weights of 32 bits, as under autocast, whose gradients take what the norm knew in 32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import terrazzo

NORMS: dict[str, Callable[..., Any]] = {
    "layer": lambda x, w, b: F.layer_norm(x, (8,), w, b),
    "group": lambda x, w, b: F.group_norm(x.view(-1, 8, 2), 4, w, b),
    "batch": lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NORMS)
def test_gradients_are_no_further_off_than_eagers(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    given = [torch.randn(16, 8).to(dtype), torch.randn(8), torch.randn(8)]
    found, eager, exact = (
        _gradients(f, [kind(t) for t in given])
        for f, kind in (
            (torch.compile(NORMS[name], backend="terrazzo"), torch.Tensor.clone),
            (NORMS[name], torch.Tensor.clone),
            (NORMS[name], torch.Tensor.double),
        )
    )
    for ours, theirs, wanted in zip(found, eager, exact, strict=True):
        assert ours.dtype is theirs.dtype
        limit = 2 * max((theirs - wanted).abs().max(), 1e-6 * wanted.abs().max())
        assert (ours - wanted).abs().max() <= limit


def _gradients(f: Callable[..., Any], given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    for t in given:
        t.requires_grad_()
    y = f(*given)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(y.dtype)
    return torch.autograd.grad(y, given, weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", ["capture", "dynamo"])
def test_running_statistics_are_rounded_once(way: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """As by PyTorch's kernels for a GPU; its definition rounds what is left of the old ones, too."""
    torch.manual_seed(0)
    norm, x = torch.nn.BatchNorm2d(64).to(dtype), torch.randn(4, 64, 5, 5).to(dtype)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    wide = copy.deepcopy(norm).double()
    options = {"target": "cpu", "cache_dir": tmp_path}
    torch._dynamo.reset()
    if way == "capture":
        fast = terrazzo.compile(norm, x, options=options)
    else:
        fast = torch.compile(norm, backend="terrazzo", options={**options, "strict": True})
    fast(x), wide(x.double())
    for ours, exact in ((norm.running_mean, wide.running_mean), (norm.running_var, wide.running_var)):
        assert ours.dtype is dtype and (ours != exact.to(dtype)).sum() <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_running_statistics_in_16_bits_are_only_read_where_nothing_trains(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm2d(8).to(dtype).eval()
    norm.running_mean.normal_()
    before = norm.running_mean.clone()
    x = torch.randn(4, 8, 3, 5).to(dtype)
    ours, exact = torch.compile(norm, backend="terrazzo")(x), copy.deepcopy(norm).double()(x.double())
    assert ours.dtype is dtype and torch.equal(norm.running_mean, before)
    torch.testing.assert_close(ours.double(), exact, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
