"""Logarithms of sums of exponentials beside attention: what a kernel knows of its rows leaves it with its results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.programs import lowered
from tests.kernels.test_training import plans, tensors

from terrazzo.ir.plan import Frame, Product


def by_hand(q: Any, k: Any, v: Any) -> Any:
    s = (q @ k.transpose(-1, -2)).float() * 0.125
    return torch.softmax(s, -1).to(v.dtype) @ v, torch.logsumexp(s, -1)


def later_hidden(q: Any, k: Any, v: Any) -> Any:
    """The first 40 queries see nothing."""
    s = (q @ k.transpose(-1, -2)).float() * 0.125
    seen = torch.arange(q.shape[-2])[:, None] >= torch.arange(k.shape[-2]) + 40
    s = s.masked_fill(~seen, -torch.inf)
    return torch.softmax(s, -1).to(v.dtype) @ v, torch.logsumexp(s, -1)


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("fn", [by_hand, later_hidden])
def test_logarithms_of_sums_leave_with_results(fn: Any, target: str) -> None:
    """One kernel; rows without any key have -inf, and no results, as in PyTorch."""
    args = tensors((1, 2, 128, 64), (1, 2, 192, 64), (1, 2, 192, 64))
    found = lowered(fn, args, target)
    assert len(found.kernels) == 1 and len(plans(found, Frame)) == 1 and len(plans(found, Product)) == 2
    exact = fn(*(a.double() for a in args))
    for ours, eager, truth in zip(found.simulated(), fn(*args), exact, strict=True):
        x, y, t = (np.asarray(z, np.float64) for z in (ours, eager.double(), truth))
        assert (np.isnan(x) == np.isnan(t)).all() and (np.isinf(x) == np.isinf(t)).all()
        some = np.isfinite(t)
        one, other = (np.sqrt(np.mean((z[some] - t[some]) ** 2)) for z in (x, y))
        assert one <= 2 * other + 1e-6, (one, other)


def test_infinite_scores_have_infinite_logarithms() -> None:
    """Of rows with a score of +inf weights are nothing, and the logarithm is +inf, as in PyTorch."""
    args = tensors((1, 1, 64, 64), (1, 1, 64, 64), (1, 1, 64, 64))
    args[0][0, 0, 3] = torch.inf
    args[1][0, 0, 5] = 1.0
    args[1][0, 0, 6:] = args[1][0, 0, 6:].abs()
    found = lowered(by_hand, args, "sm_90a")
    ours, eager = np.asarray(found.simulated()[1], np.float64), by_hand(*args)[1].double().numpy()
    assert np.array_equal(np.isnan(ours), np.isnan(eager)) and np.array_equal(np.isinf(ours), np.isinf(eager))
