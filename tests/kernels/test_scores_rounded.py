"""Scores are rounded alike wherever they are computed: by the last place of one that is large, a weight is another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import lowered

import terrazzo
from terrazzo.bench.programs.losses import time_warping
from terrazzo.bench.programs.registry import Gradients
from terrazzo.options import Options
from terrazzo.targets.cuda.emit import emit


def test_gradients_of_large_scores_are_eagers(tmp_path: Path) -> None:
    """Soft time warping: scores of 1e8 where there is no path, and weights of 0 and 1; each diagonal's are computed in
    the kernel of its sum, and in that of its gradient."""
    torch.manual_seed(0)
    module, *inputs = time_warping(2, 6, 16)
    module = Gradients(module)
    with torch.no_grad():
        found = terrazzo.compile(module, *inputs, options=Options(strict=True))(*inputs)
        for mine, theirs in zip(found, module(*inputs), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6 * float(theirs.abs().max()))


def sums(c: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (c - 0.1 * x).logsumexp(-1)


def test_their_products_are_rounded() -> None:
    (kernel,) = lowered(sums, (torch.randn(64, 96), torch.randn(64, 96)), "sm_90a").kernels
    assert "tz_rounded_mul(" in emit(kernel)[1]


@pytest.mark.parametrize("classes", [10, 100])
def test_scores_that_are_scaled_are_those_of_their_largest(classes: int) -> None:
    """Cross-entropy at a temperature: a score is computed for the largest, for the sum of powers, and for the result. A
    compiler that rounds it for one of them only is off by the last place of the largest.
    """
    torch.manual_seed(0)
    x, labels = torch.randn(64, classes, requires_grad=True), torch.randint(classes, (64,))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(10 * (x - 0.3 * F.one_hot(labels, classes)), labels)

    def gradient(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(fn(x), x)[0].double()

    exact = gradient(loss, x.detach().double().requires_grad_())
    ours, eager = ((gradient(f, x) - exact).abs().max() for f in (torch.compile(loss, backend="terrazzo"), loss))
    assert ours <= 2 * eager


def test_attention_is_left_as_it_is() -> None:
    """A bias that something is multiplied with is added to scores between two products."""

    def biased(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT * 0.125 + bias * 0.5).softmax(-1) @ v

    found = lowered(biased, (*(torch.randn(2, 128, 64) for _ in range(3)), torch.randn(128, 128)), "sm_90a")
    assert found.kernels and not any("tz_rounded_mul(" in emit(x)[1] for x in found.kernels)


def test_products_are_rounded_on_a_processor() -> None:
    """What was added to one that was not rounded would be above or below 0."""
    torch.manual_seed(0)
    for kind in (torch.float32, torch.float64):
        x = torch.randn(4099, dtype=kind)
        found = terrazzo.compile(
            lambda x, y: (y - x * x).ceil() + (x * x - y).ceil(), x, x * x, options={"target": "cpu"}
        )(x, x * x)
        assert not found.any()


def test_a_variance_of_one_value_is_zero() -> None:
    """The mean of squares less the square of the mean, of what nodes receive."""
    torch.manual_seed(0)
    x, to = torch.randn(64, 8), torch.arange(64)

    def variances(x: torch.Tensor) -> torch.Tensor:
        sums = (x.new_zeros(64, 8).index_add(0, to, y) for y in (x, x * x))
        mean, square = sums
        return square - mean * mean

    assert not terrazzo.compile(variances, x, options={"target": "cpu"})(x).any()
    assert any("tz_rounded_mul(" in emit(k)[1] for k in lowered(variances, (x,), "sm_90a").kernels)


def test_one_less_a_square_is_as_it_was() -> None:
    """As in the gradient of tanh: what is added is exact, and a product that is not rounded is nearer."""
    (kernel,) = lowered(lambda x, g: g * (1 - x * x), (torch.randn(64), torch.randn(64)), "sm_90a").kernels
    assert "tz_rounded_mul(" not in emit(kernel)[1]
