"""Windows that move by less than they are long: what they come to along one axis first, and then along another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import lowered

from terrazzo.front.capture import capture
from terrazzo.interp import kernel as simulator
from terrazzo.interp import loop
from terrazzo.options import Options
from terrazzo.pipelines import lowering


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(3)
    found = torch.randn(shape)
    found.view(-1)[found.numel() // 3] = torch.nan
    return found.to(dtype)


def similar(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Variances and covariances of two images around each point."""
    mean = lambda z: F.avg_pool2d(z, 21, 1)  # noqa: E731
    return (mean(a * b) - mean(a) * mean(b)) / (mean(a * a) - mean(a) ** 2 + mean(b * b) + 1)


MANY = 8, 16
CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "sums of long windows": (lambda x: F.avg_pool1d(x, 129, 1), (x(*MANY, 300),)),
    "long windows that reach beyond": (lambda x: F.avg_pool1d(x, 127, 1, 63), (x(*MANY, 256),)),
    "a number of points that is prime": (lambda x: F.avg_pool1d(x, 131, 1, 65), (x(*MANY, 203),)),
    "windows of two axes": (lambda x: F.avg_pool2d(x, 25, 1, 12), (x(*MANY, 30, 34),)),
    "windows of two axes in 16 bits": (lambda x: F.avg_pool2d(x, 25, 1), (x(*MANY, 40, 33, dtype=torch.bfloat16),)),
    "windows of three axes": (lambda x: F.avg_pool3d(x, 9, 1, 4), (x(2, 4, 14, 13, 15),)),
    "largest": (lambda x: F.max_pool2d(x, 21, 1, 10), (x(*MANY, 32, 31),)),
    "largest of a row in 16 bits": (lambda x: F.max_pool1d(x, 127, 1), (x(*MANY, 300, dtype=torch.bfloat16),)),
    "windows that move by two": (lambda x: F.avg_pool2d(x, 25, 2, 12), (x(*MANY, 48, 50),)),
    "a filter of ones": (lambda x: F.conv2d(x, torch.ones(1, 1, 25, 25)), (x(128, 1, 40, 42),)),
    "several sums": (similar, (x(*MANY, 40, 41), x(*MANY, 40, 41) * 2 + 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_it_means_what_whole_windows_mean(name: str) -> None:
    fn, args = CASES[name]
    found = lowered(fn, args, "sm_90a")
    names = [b.name for s in found.program.steps for b in s.writes]
    assert any("_window" in x for x in names), names
    out = simulator.run(found.program, found.inputs)
    for a, b in zip(out, loop.run(found.lowering.at("loop"), found.inputs), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isnan(a).any() and not np.isnan(a).all()
        rough = args[0].dtype == torch.bfloat16
        np.testing.assert_allclose(a, b, rtol=1e-2 if rough else 1e-4, atol=1e-3)


WHOLE: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "small windows": (lambda x: F.avg_pool2d(x, 3, 1, 1), (8, 64, 56, 56)),
    "windows side by side": (lambda x: F.avg_pool2d(x, 16), (8, 64, 256, 256)),
    "weights that differ": (lambda x: F.conv2d(x, torch.rand(1, 1, 25, 25)), (8, 1, 256, 256)),
    "points that are further apart": (lambda x: F.max_pool2d(x, 21, 1, 10, dilation=2), (8, 16, 128, 128)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_other_windows_are_gone_through_whole(name: str) -> None:
    fn, shape = WHOLE[name]
    done = lowering(capture(fn, (torch.empty(shape, device="meta"),)).program, Options(target="sm_90a"))
    assert not any("_window" in b.name for s in done.at("kernel").steps for b in s.writes)
