"""Gradients of embeddings, and sums by index, stay one op: PyTorch's, which adds many at once, or a small table's own
kernel.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import terrazzo
from terrazzo.front.capture import capture
from terrazzo.ir.node import topological


def gradient(table: Any, ids: Any) -> Any:
    with torch.enable_grad():
        weight = table.detach().requires_grad_()
        return torch.autograd.grad(F.embedding(ids, weight, padding_idx=1).pow(2).sum(), weight)[0]


@pytest.mark.parametrize(("rows", "called"), [(3, 0), (5000, 1)])
def test_gradients_of_embeddings(rows: int, called: int) -> None:
    torch.manual_seed(0)
    table, ids = torch.randn(rows, 4), torch.randint(rows, (7, 300)) % 40  # the same rows many times
    ops = [x.name for x in topological(capture(gradient, (table, ids)).program.results) if hasattr(x, "name")]
    assert ops.count("aten.embedding_dense_backward.default") == 1
    assert not any("index_put" in name for name in ops)
    compiled = terrazzo.compile(gradient, table, ids)
    assert len(compiled.compiled.fallbacks) == called
    exact = gradient(table.double(), ids)  # eager's sum of 700 equal numbers is further off
    torch.testing.assert_close(compiled(table, ids).double(), exact, rtol=1.3e-6, atol=1e-5)


@pytest.mark.parametrize(("rows", "called"), [(3, 0), (5000, 1)])
def test_sums_by_index(rows: int, called: int) -> None:
    """PyTorch's index_add does not sort the indices, as the index_put it could be taken apart to does."""

    def gathered(x: Any, index: Any, source: Any) -> Any:
        return x.index_add(-2, index, source, alpha=3)

    torch.manual_seed(0)
    given = torch.randn(2, rows, 4), torch.randint(rows, (700,)) % 40, torch.randn(2, 700, 4)
    ops = [x.name for x in topological(capture(gathered, given).program.results) if hasattr(x, "name")]
    assert [name for name in ops if name.startswith("aten.")] == ["aten.index_add.default"]
    compiled = terrazzo.compile(gathered, *given)
    assert len(compiled.compiled.fallbacks) == called
    torch.testing.assert_close(compiled(*given), gathered(*given))


@pytest.mark.parametrize("alpha", [1, 2])
def test_a_single_number_is_added_to(alpha: int) -> None:
    given = torch.tensor(1.0), torch.tensor(0), torch.tensor(2.0)

    def added(x: Any, index: Any, source: Any) -> Any:
        return x.index_add(0, index, source, alpha=alpha)

    assert terrazzo.compile(added, *given)(*given) == 1 + 2 * alpha
