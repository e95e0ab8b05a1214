"""Windows that a program writes to: what lies between them stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import terrazzo
from terrazzo.errors import UserError
from terrazzo.front.unfolded import windows

PLACES = {
    "whole": lambda t: t,
    "turned": lambda t: t.transpose(0, 1),
    "a part": lambda t: t[1:, 1:],
}
TOUCHING, APART, ENDING_SHORT, SHARED = (1, 5, 5), (0, 2, 3), (1, 3, 7), (1, 4, 2)
"""Dimension, size and step."""


def written(place: str, dimension: int, size: int, step: int) -> Any:
    def f(x: Any) -> Any:
        y = x * 2
        PLACES[place](y).unfold(dimension, size, step)[..., 0] = -1
        x.unfold(dimension, size, step).mul_(3)
        return y + 0

    return f


def same(compiled: Any, f: Any, x: Any) -> bool:
    mine, theirs = x.clone(), x.clone()
    return torch.equal(compiled(mine), f(theirs)) and torch.equal(mine, theirs)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", [TOUCHING, APART, ENDING_SHORT])
def test_what_no_window_reaches_is_kept(place: str, form: tuple[int, int, int]) -> None:
    f, x = written(place, *form), torch.randn(20, 17)
    torch._dynamo.reset()
    assert same(torch.compile(f, backend="terrazzo", options={"target": "interpreter"}), f, x)
    try:
        compiled = terrazzo.compile(f, x.clone(), options={"target": "interpreter"})
    except UserError as why:  # of which PyTorch runs such a graph
        assert "as_strided" in str(why)
        assert place != "whole" and PLACES[place](x).shape[form[0]] % form[2] not in (0, *range(form[1]))
        return
    assert same(compiled, f, x)


@pytest.mark.parametrize("form", [TOUCHING, APART, ENDING_SHORT, SHARED, (-1, 1, 1), (-1, 17, 17), (0, 20, 1)])
@pytest.mark.parametrize("place", PLACES)
def test_windows_are_the_same_views(place: str, form: tuple[int, int, int]) -> None:
    x = PLACES[place](torch.randn(20, 17))
    if form[1] > x.shape[form[0]]:
        with pytest.raises(RuntimeError, match="maximum size"):
            windows(x, *form)
        return
    ours, theirs = windows(x, *form), x.unfold(*form)
    assert torch.equal(ours, theirs) and ours.data_ptr() == theirs.data_ptr()
    assert all(a == b for a, b, n in zip(ours.stride(), theirs.stride(), theirs.shape, strict=True) if n > 1)


@pytest.mark.parametrize("form", [TOUCHING, APART, ENDING_SHORT, SHARED])
def test_gradients_of_windows(form: tuple[int, int, int]) -> None:
    def f(x: Any) -> Any:
        return x.t().contiguous().t().unfold(*form).exp() * x.unfold(*form)

    x = torch.randn(20, 17, requires_grad=True)
    torch._dynamo.reset()
    options = {"target": "interpreter", "strict": True}
    (mine,) = torch.autograd.grad(torch.compile(f, backend="terrazzo", options=options)(x).sum(), x)
    (theirs,) = torch.autograd.grad(f(x).sum(), x)
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("form", [TOUCHING, APART, ENDING_SHORT, SHARED])
def test_windows_within_transforms(form: tuple[int, int, int]) -> None:
    def f(x: Any) -> Any:
        return torch.func.vmap(torch.func.grad(lambda x: x.exp().unfold(*form).square().sum()))(x)

    x = torch.randn(2, 20, 17).transpose(1, 2)
    torch._dynamo.reset()
    options = {"target": "interpreter", "strict": True}
    torch.testing.assert_close(torch.compile(f, backend="terrazzo", options=options)(x), f(x))
    torch.testing.assert_close(terrazzo.compile(f, x, options={"target": "interpreter"})(x), f(x))
