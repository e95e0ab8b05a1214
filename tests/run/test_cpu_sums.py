"""Long sums on a CPU are no further from float64 than twice what eager's are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import terrazzo
from terrazzo.bench.harness import accuracy
from terrazzo.options import Options

PIXELS = (16, 24, 64, 64)
LONG = (60_000, 16)

CASES: dict[str, tuple[Callable[[Any], Any], tuple[int, ...], float]] = {
    "the mean of all, over axes of which the first is short": (lambda x: (x - 0.3).square().mean(), PIXELS, 0.0),
    "sums over all but one axis": (lambda x: x.sum((0, 2, 3)), PIXELS, 0.0),
    "a batch norm of numbers far from zero": (
        lambda x: torch.nn.functional.batch_norm(x, None, None, training=True), PIXELS, 100.0,
    ),
    "rows": (lambda x: x.T.contiguous().sum(1), LONG, 0.0),
    "columns": (lambda x: x.sum(0), LONG, 0.0),
    "deviations of rows far from zero": (lambda x: x.T.contiguous().var(1), LONG, 100.0),
    "numbers looked up": (lambda x: x[torch.arange(LONG[0]).flip(0), 1].sum(), LONG, 0.0),
    "running sums of rows": (lambda x: x.T.contiguous().cumsum(1), LONG, 0.0),
    "running sums of columns": (lambda x: x.cumsum(0), LONG, 0.0),
    "running products": (lambda x: (1 + (x - 0.5) / 100).cumprod(0), LONG, 0.0),
    "running sums of exponentials": (lambda x: (10 * x).T.contiguous().logcumsumexp(1), LONG, 0.0),
    "variances of few rows": (lambda x: x.view(33, -1).var(0), (330, 100), 100.0),
    "variances of fewer": (lambda x: x.view(-1, 7).var(1), (280, 70), 0.0),
    "variances of all, far from zero": (lambda x: x.var(), (64, 1000), 100.0),
    "means of images": (lambda x: x.mean((2, 3)), (8, 32, 14, 14), 0.0),
    "columns of products, of which a few are left over": (lambda x: x[:, 0] @ x, (4003, 70), 0.0),
    "products of long rows": (lambda x: x.T @ x, LONG, 0.0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_long_sums_are_as_exact_as_eager(name: str) -> None:
    fn, shape, offset = CASES[name]
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0)) + offset
    ours = terrazzo.compile(fn, x, options=Options(target="cpu"))(x)
    found = accuracy([ours], [fn(x)], [fn(x.double())], few=2e-7)
    assert not found.problem, found.problem
