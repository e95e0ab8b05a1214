"""Random numbers are those of eager mode, however tensors lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import terrazzo

CASES: dict[str, Callable[[Any], Any]] = {
    "turned": lambda x: F.dropout(x.transpose(1, 2), 0.3),
    "computed": lambda x: F.dropout(x.transpose(1, 2).relu() + 1, 0.3),
    "like": lambda x: (torch.rand_like(x.mT), torch.randn_like(x.permute(2, 0, 1)), torch.rand_like(x.mT.exp())),
    "written": lambda x: (x.mT.clone().uniform_(), x.mT.exp().exponential_()),
    "whole": lambda x: (F.dropout(x), torch.rand(4, 5), torch.bernoulli(x.mT.sigmoid())),
}


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_numbers_go_by_memory(case: str, gradients: bool) -> None:
    """Elements that lie across memory draw in its order, as PyTorch's kernels do."""
    f, x = CASES[case], torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0), requires_grad=gradients)
    _same(f, torch.compile(f, backend="terrazzo"), x)


@pytest.mark.parametrize("case", CASES)
def test_numbers_of_a_program_go_by_memory(case: str) -> None:
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
    _same(CASES[case], terrazzo.compile(CASES[case], x), x)


def test_an_input_is_drawn_for_as_it_lies() -> None:
    x = torch.randn(2, 4, 5, 6, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)
    _same(F.dropout, torch.compile(F.dropout, backend="terrazzo"), x)


def _same(f: Callable[[Any], Any], compiled: Callable[[Any], Any], x: Any) -> None:
    torch.manual_seed(1)
    expected = pytree.tree_leaves(f(x))
    torch.manual_seed(1)
    for found, wanted in zip(pytree.tree_leaves(compiled(x)), expected, strict=True):
        torch.testing.assert_close(found, wanted)
        assert found.stride() == wanted.stride()
