"""Gradients of embeddings stay one op: PyTorch's, which sums many at once, or a small table's own kernel."""

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
    torch.testing.assert_close(compiled(table, ids), gradient(table, ids))
