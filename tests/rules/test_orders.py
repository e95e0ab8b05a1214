"""An order that a sort gave is not sorted again: its inverse is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.rules.test_library import calls

import terrazzo


def ranks(x: Any) -> Any:
    return x.argsort(-1).argsort(-1)


def stable(x: Any) -> Any:
    return torch.sort(x, dim=0, descending=True, stable=True)[1].argsort(dim=0, stable=True)


def both(x: Any) -> Any:
    """The sorted order, which is its places."""
    return torch.sort(torch.sort(x, 1)[1], -1)


def there_and_back(x: Any) -> Any:
    """Tokens by their experts, and again as they were."""
    order = x[:, 0].argsort()
    return x[order].exp()[order.argsort()]


@pytest.mark.parametrize("fn", [ranks, stable, both, there_and_back])
@pytest.mark.filterwarnings("ignore:terrazzo. aten.s")
def test_its_inverse_is_written(fn: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    x = torch.randn(1100, 1030)  # more than is counted
    for target in ("sm_90a", "cpu"):
        found = calls(fn, x, target=target)
        assert sum("sort" in name for name in found) == 1 and found.count("aten.scatter.src") == 1
    x[3, 4], x[5, 4], x[7] = torch.nan, torch.inf, 1.0  # of equal numbers a stable order is one, and others are not
    if fn is not stable:
        x[7] = torch.randn(1030)
    compiled = terrazzo.compile(fn, x, options={"target": "cpu"})
    for mine, eager in zip(
        torch.utils._pytree.tree_leaves(compiled(x)), torch.utils._pytree.tree_leaves(fn(x)), strict=True
    ):
        torch.testing.assert_close(mine, eager, equal_nan=True, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.argsort(-1).argsort(0),
        lambda x: x.argsort(-1).argsort(-1, descending=True),
        lambda x: torch.topk(x, 1026)[1].argsort(-1),
        lambda x: x.argsort(-1)[:, :1026].argsort(-1),
    ],
)
def test_what_is_no_whole_order_or_sorted_otherwise_is_sorted(fn: Callable[..., Any]) -> None:
    found = calls(fn, torch.zeros(1100, 1030))
    assert sum("sort" in name or "topk" in name for name in found) == 2 and "aten.scatter.src" not in found
