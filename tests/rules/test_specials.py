"""Infinities, NaN and signed zeros among ordinary numbers: what is distributed, cancelled or multiplied by 0 in a rule
shows there.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import terrazzo

INF, NAN = math.inf, math.nan


def rows(*special: float) -> torch.Tensor:
    """Ordinary numbers, and in each row one of these."""
    torch.manual_seed(0)
    x = torch.randn(len(special), 5)
    for row, value in enumerate(special):
        x[row, row % 5] = value
    return x


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        pytest.param(lambda s: torch.linspace(s, 3.0, 1), (torch.tensor(-INF),), id="linspace of one, from"),
        pytest.param(lambda s: torch.linspace(3.0, s, 1), (torch.tensor(INF),), id="linspace of one, to"),
        pytest.param(lambda s: torch.linspace(2.5, s, 4), (torch.tensor(7.0),), id="linspace"),
        pytest.param(lambda x, y: torch.cdist(x, y, 0.0), (rows(INF, NAN, -INF), rows(1, NAN, 0)), id="cdist of 0"),
        pytest.param(lambda x, y: torch.cdist(x, y, 1.0), (rows(INF, NAN, -INF), rows(1, NAN, 0)), id="cdist of 1"),
        pytest.param(lambda x: torch.softmax(x, -1), (rows(INF, -INF, NAN, 0),), id="softmax"),
        pytest.param(lambda x: torch.logsumexp(x, -1), (rows(INF, -INF, NAN, 0),), id="logsumexp"),
        pytest.param(lambda x, y: x @ y.t(), (rows(INF, -INF, NAN, -0.0), rows(0, -0.0, 1)), id="product"),
        pytest.param(lambda x, y: (x * -2.0) @ y.t(), (torch.zeros(3, 5), rows(1, 2)), id="a negative constant"),
    ],
)
def test_as_in_eager(fn: Any, args: tuple[torch.Tensor, ...]) -> None:
    eager = fn(*args)
    ours = terrazzo.compile(fn, *args, options={"target": "interpreter"})(*args)
    assert torch.allclose(ours, eager, equal_nan=True)
    assert torch.equal(ours.signbit() & (eager == 0), eager.signbit() & (eager == 0))
