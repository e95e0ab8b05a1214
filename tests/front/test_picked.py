"""What a number in a tensor without dimensions picks is gathered where nobody can tell it from a view."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

PICKED: tuple[Callable[..., Any], ...] = (
    lambda x, k: x[k] * 2,
    lambda x, k: x[k, k] + 1,
    lambda x, k: x[:, k].exp(),
    lambda x, k: x[..., k].sum(0),
    lambda x, k: x[1:, None, k, ::2] + x[0, :2, :2],
    lambda x, k: x[-1, k].sqrt() * (1 - x[k]).t(),
)


def compiled(function: Callable[..., Any]) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="terrazzo", options={"strict": True})


@pytest.mark.parametrize("function", PICKED)
@pytest.mark.parametrize("k", [torch.tensor(2), torch.tensor(-1, dtype=torch.int32)])
def test_what_is_picked_is_compiled(function: Callable[..., Any], k: Tensor) -> None:
    xs = [torch.rand(4, 4, 4).requires_grad_()]
    xs.append(xs[0].detach().clone().requires_grad_())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "terrazzo")  # nothing is left to PyTorch
        ours = compiled(function)(xs[0], k)
    torch.testing.assert_close(ours, function(xs[1], k))
    ours.sum().backward()
    function(xs[1], k).sum().backward()
    torch.testing.assert_close(xs[0].grad, xs[1].grad)


TRANSFORMED: tuple[Callable[..., Any], ...] = (
    lambda x, k, at: vmap(lambda row, j: row[j])(x, at),
    lambda x, k, at: vmap(lambda row, j: row[j] * row[k])(x, at),
    lambda x, k, at: vmap(lambda row, j: row.clone().index_fill(0, j, 3.0)[j])(x, at),
    lambda x, k, at: grad(lambda x: (x[k] ** 2).sum())(x),
    lambda x, k, at: jvp(lambda x: x[k] ** 2, (x,), (x,))[1],
)


@pytest.mark.parametrize("function", TRANSFORMED)
def test_within_transforms(function: Callable[..., Any]) -> None:
    given = torch.rand(4, 4), torch.tensor(2), torch.tensor([3, 0, 1, -1])
    torch.testing.assert_close(compiled(function)(*given), function(*given))


def test_a_number_out_of_range_is_an_error() -> None:
    with pytest.raises(IndexError):
        compiled(PICKED[0])(torch.rand(4, 4), torch.tensor(4))


@pytest.mark.filterwarnings("ignore:terrazzo")
def test_views_stay_views() -> None:
    def changed(x: Tensor, k: Tensor) -> Tensor:
        x[k].add_(1)
        return x.sum()

    def later(x: Tensor, k: Tensor) -> Tensor:
        y = x[k]
        x += 1
        return y * 2

    x, k = torch.rand(4, 4), torch.tensor(1)
    y = compiled(lambda x, k: (x[k], x[k] + 1))(x, k)[0]
    assert y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    for function in (changed, later):
        ours, theirs = x.clone(), x.clone()
        torch.testing.assert_close(compiled(function)(ours, k), function(theirs, k))
        torch.testing.assert_close(ours, theirs)
