"""Indices that are computed are checked wherever something is looked up or written to, and nowhere else: threads beyond
the end of a tensor compute them too, of what they have not loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.programs import b, lowered, n, r
from torch import Tensor
from torch.nn import functional as F

from terrazzo.errors import IndexOutOfRange

ROWS, CLASSES = 37, 5


def least_hot(x: Tensor) -> Tensor:
    return F.one_hot(x.argmin(1), 16).float()


def off(x: Tensor, w: Tensor, places: Tensor) -> Tensor:
    """What a softmax's gradient begins with, of a product."""
    return (x @ w).float() - F.one_hot(places - 1, CLASSES)


def written(x: Tensor, w: Tensor, places: Tensor) -> Tensor:
    return torch.scatter_add((x @ w).float(), 1, places[:, None] - 1, torch.ones(ROWS, 1))


SHARED = """
with schedule("{name}", target="sm_90a"):
    a0 = grid(10) * lane(4)
    with site("acc0"):
        r0 = reg(2) * lane(8)
    with site("{name}"):
        a1 = like("acc0.r0")
"""
"""Four rows for a warp, of which the last one has one."""


def test_rows_of_a_warp_that_are_none() -> None:
    given = (r(ROWS, 16),)
    (kernel,) = lowered(least_hot, given, "sm_90a").kernels
    found = lowered(least_hot, given, "sm_90a", schedules=(SHARED.format(name=kernel.name),))
    assert np.array_equal(found.simulated()[0], least_hot(*given).numpy())


@pytest.mark.parametrize("f", [off, written])
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_results_of_a_product(f: Callable[..., Any], target: str) -> None:
    x, w, places = b(ROWS, 64) * 0.125, b(64, CLASSES), n(CLASSES, ROWS) + 1
    found = lowered(f, (x, w, places), target)
    np.testing.assert_allclose(found.simulated()[0], f(x, w, places).numpy(), atol=2e-2)
    with pytest.raises(IndexOutOfRange):
        lowered(f, (x, w, places - 1), target).simulated()
