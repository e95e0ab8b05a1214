"""Calls of PyTorch are given views where they would be given copies, and compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import terrazzo


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.sort(x[1:].reshape(-1)).values,
        lambda x: torch.sort(x.t(), dim=0).values,
        lambda x: torch.sort(x.t().contiguous(), dim=0).indices,
        lambda x: torch.sort(torch.sort(x).values.t()[2:]).values,
        lambda x: torch.median(x.reshape(2, -1)[1]),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_views_among_arguments(fn: Callable[[Any], Any], turned: bool) -> None:
    x = torch.randn(6, 4).t() if turned else torch.randn(4, 6)
    compiled = terrazzo.compile(fn, x)
    assert torch.equal(compiled(x), fn(x))
