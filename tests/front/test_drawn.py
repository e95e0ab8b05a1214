"""Random numbers are those of eager mode, however tensors lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import terrazzo


def _last_first(first: Any, second: Any, x: Any) -> Any:
    third = torch.rand(2) + second.sum()
    return F.dropout(x), third, second, first


CASES: dict[str, Callable[[Any], Any]] = {
    "turned": lambda x: F.dropout(x.transpose(1, 2), 0.3),
    "computed": lambda x: F.dropout(x.transpose(1, 2).relu() + 1, 0.3),
    "like": lambda x: (torch.rand_like(x.mT), torch.randn_like(x.permute(2, 0, 1)), torch.rand_like(x.mT.exp())),
    "written": lambda x: (x.mT.clone().uniform_(), x.mT.exp().exponential_()),
    "asked for in another order": lambda x: _last_first(F.dropout(x), torch.rand(3), x),
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


@pytest.mark.parametrize("drop", [F.dropout, F.dropout2d, F.alpha_dropout, torch.nn.Dropout().eval()])
def test_where_nothing_is_dropped_the_tensor_itself_goes_on(drop: Callable[..., Any]) -> None:
    """So that writes to the result are writes to it."""

    def write(x: Any) -> Any:
        return (drop(x, 0.5, False) if not isinstance(drop, torch.nn.Module) else drop(x)).mul_(2)

    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).mT
    before = x.clone()
    found = torch.compile(write, backend="terrazzo")(x)
    assert found.data_ptr() == x.data_ptr()
    assert found.stride() == x.stride()
    torch.testing.assert_close(x, 2 * before)


def test_a_program_that_drops_nothing_goes_on_with_the_tensor() -> None:
    x = torch.randn(3, 4)
    drop = torch.nn.Dropout().eval()
    assert terrazzo.compile(drop, x)(x).data_ptr() == x.data_ptr()


def _same(f: Callable[[Any], Any], compiled: Callable[[Any], Any], x: Any) -> None:
    torch.manual_seed(1)
    expected = pytree.tree_leaves(f(x))
    torch.manual_seed(1)
    for found, wanted in zip(pytree.tree_leaves(compiled(x)), expected, strict=True):
        torch.testing.assert_close(found, wanted)
        assert found.stride() == wanted.stride()
