"""Gradients of what repeats elements, or takes means of them: each place gathers its own, as PyTorch computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import lowered


def gradient(f: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Of the sum of what `f` makes of x, weighted."""

    def backward(x: Any, w: Any) -> Any:
        return torch.func.grad(lambda y: (f(y).float() * w[: f(y).numel()].view(f(y).shape)).sum())(x)

    return backward


CASES: dict[str, Callable[[Any], Any]] = {
    "repeated": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "repeated by sizes": lambda x: F.interpolate(x, size=(18, 36), mode="nearest"),
    "means side by side": lambda x: F.avg_pool2d(x, 3),
    "what windows leave over": lambda x: F.avg_pool2d(x, 2),
    "means that overlap": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "without what is padded": lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
    "all that begin inside": lambda x: F.avg_pool2d(x, 2, 2, ceil_mode=True),
    "divided by a number": lambda x: F.avg_pool2d(x, 3, 2, divisor_override=5),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_places_gather_their_gradients(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 9, 12).to(dtype), torch.randn(4096)
    fn = gradient(CASES[name])
    found = lowered(fn, (x, w), "sm_90a")
    assert len(found.kernels) == len(found.program.steps), "PyTorch is called"
    ours, eager, exact = (
        np.asarray(y, np.float64) for y in (found.simulated()[0], fn(x, w).float(), fn(x.double(), w))
    )
    one, other = (np.sqrt(np.mean((y - exact) ** 2)) for y in (ours, eager))
    assert one <= 2 * other + 1e-7, (one, other)
