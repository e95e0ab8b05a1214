"""Determinants, whose gradients go by how a matrix lay; and the zeros of forward derivatives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import terrazzo
from terrazzo.options import Options


def logarithm(x: Any) -> Any:
    return sum(y.square().sum() for y in torch.linalg.slogdet(x))


def plain(x: Any) -> Any:
    return torch.linalg.det(x).square().sum()


@pytest.mark.parametrize("fn", [logarithm, plain])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1, 2, 0)])
def test_gradients_of_determinants(fn: Any, order: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)

    def gradient(x: Any) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            found = fn(x.permute(*order))
            return found, *torch.autograd.grad(found, [x])

    x = torch.randn(*((3, 4, 4)[order.index(k)] for k in range(3)))  # so that matrices are 4 x 4
    ours = terrazzo.compile(gradient, x, options=Options(target="interpreter", cache_dir=tmp_path))
    torch.testing.assert_close(ours(x), gradient(x))


def test_zeros_of_forward_derivatives(tmp_path: Path) -> None:
    """What does not depend on the input has a derivative of zeros, which PyTorch does not store."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Softplus(), torch.nn.Linear(8, 4))

    def trace(x: Any, v: Any, w: Any) -> Any:
        with torch.enable_grad():
            w = w.detach().requires_grad_()
            made, along = torch.func.jvp(lambda x: net(x) * w, (x,), (v,))
            return torch.autograd.grad(((along * v).sum(-1) + made.square().sum(-1)).mean(), [w])

    x, v, w = torch.randn(5, 4), torch.randn(5, 4), torch.randn(4)
    ours = terrazzo.compile(trace, x, v, w, options=Options(target="interpreter", cache_dir=tmp_path))
    torch.testing.assert_close(ours(x, v, w), trace(x, v, w))
