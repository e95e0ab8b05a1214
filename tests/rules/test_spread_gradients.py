"""Gradients of what repeats elements, or takes means of them: each place gathers its own, as PyTorch computes them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import lowered

import terrazzo


def gradient(f: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Of the sum of what `f` makes of x, weighted."""

    def backward(x: Any, w: Any) -> Any:
        return torch.func.grad(lambda y: (f(y).float() * w[: f(y).numel()].view(f(y).shape)).sum())(x)

    return backward


CASES: dict[str, Callable[[Any], Any]] = {
    "repeated": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "repeated by sizes": lambda x: F.interpolate(x, size=(18, 36), mode="nearest"),
    "repeated unequally": lambda x: F.interpolate(x, size=(20, 17), mode="nearest"),
    "repeated by a number": lambda x: F.interpolate(x, scale_factor=1.7, mode="nearest"),
    "some left out": lambda x: F.interpolate(x, size=(5, 7), mode="nearest"),
    "repeated around middles": lambda x: F.interpolate(x, size=(20, 17), mode="nearest-exact"),
    "between, twice": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "between, by a number": lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
    "between, of fewer": lambda x: F.interpolate(x, size=(4, 5), mode="bilinear"),
    "between corners": lambda x: F.interpolate(x, size=(20, 17), mode="bilinear", align_corners=True),
    "between corners, one": lambda x: F.interpolate(x, size=(1, 17), mode="bilinear", align_corners=True),
    "between, in a volume": lambda x: F.interpolate(x[None], size=(6, 9, 11), mode="trilinear"),
    "between, along a line": lambda x: F.interpolate(x.flatten(2), size=150, mode="linear"),
    "by cubes, twice": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "by cubes, by a number": lambda x: F.interpolate(x, scale_factor=1.7, mode="bicubic"),
    "by cubes, of fewer": lambda x: F.interpolate(x, size=(4, 5), mode="bicubic"),
    "by cubes, between corners": lambda x: F.interpolate(x, size=(20, 17), mode="bicubic", align_corners=True),
    "by cubes, of one element": lambda x: F.interpolate(x[..., :1], size=(20, 3), mode="bicubic"),
    "means side by side": lambda x: F.avg_pool2d(x, 3),
    "what windows leave over": lambda x: F.avg_pool2d(x, 2),
    "means that overlap": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "without what is padded": lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
    "all that begin inside": lambda x: F.avg_pool2d(x, 2, 2, ceil_mode=True),
    "divided by a number": lambda x: F.avg_pool2d(x, 3, 2, divisor_override=5),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
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


@pytest.mark.parametrize("images", [2, 0])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_they_do_so_under_torch_compile(mode: str, images: int) -> None:
    """PyTorch would take what resamples images apart before autograd sees it, and scatter gradients."""
    torch._dynamo.reset()
    x = torch.randn(images, 3, 9, 12, requires_grad=True)

    def f(x: Any) -> Any:
        return F.interpolate(x.sin(), size=(20, 17), mode=mode)

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # an op that is left to PyTorch is told once
        compiled = torch.compile(f, backend="terrazzo", options={"strict": True})
        (ours,) = torch.autograd.grad(compiled(x).square().sum(), x)
    torch.testing.assert_close(ours, torch.autograd.grad(f(x).square().sum(), x)[0])


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_an_infinite_gradient_is_that_of_its_own(mode: str) -> None:
    x, w = torch.randn(1, 1, 9, 12), torch.ones(4096)
    w[5 * 17 + 7] = torch.inf  # of 17 columns
    fn = gradient(lambda x: F.interpolate(x, size=(20, 17), mode=mode))
    ours, eager = lowered(fn, (x, w), "sm_90a").simulated()[0], fn(x, w)
    np.testing.assert_array_equal(np.isinf(ours), np.isinf(eager))
    assert not np.isnan(ours).any()


@pytest.mark.parametrize(
    "how", [{"size": (224, 217)}, {"scale_factor": 1.7}, {"size": 61, "align_corners": True}], ids=str
)
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_places_are_not_rounded(mode: str, how: Any) -> None:
    """Eager mode is off by a rounding of the place, which is many of the numbers' where an image is large."""
    torch.manual_seed(0)
    x = torch.randn(1, 2, 96, 96)

    def f(x: Any) -> Any:
        return F.interpolate(x, mode=mode, **how)

    exact = f(x.double())
    ours = terrazzo.compile(f, x, options={"target": "interpreter", "strict": True})(x)
    assert ((ours - exact).square().mean() / exact.square().mean()).sqrt() < 1.5e-7
