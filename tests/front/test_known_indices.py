"""Indices that the program text has, or that follow from coordinates, are not read from memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import terrazzo
from terrazzo.front.capture import capture
from terrazzo.ir.text import show
from terrazzo.options import Options
from terrazzo.pipelines import lowering

X = torch.randn(6, 3, 4)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x[:, [-2]] * 2,
        lambda x: x[torch.arange(4) + 1],
        lambda x: x[2 * torch.arange(3), 1],
        lambda x: F.embedding(torch.arange(2, 6).expand(5, 4), x[:, 0]),
        lambda x: x.index_select(1, torch.tensor([2])),
    ],
)
def test_known_indices(fn: Callable[[Any], Any]) -> None:
    program = capture(fn, (X,)).program
    assert [i.name for i in program.inputs] == ["x"]
    assert "at(" not in show(lowering(program, Options(target="cpu")).loop)
    assert torch.equal(terrazzo.compile(fn, X)(X), fn(X))


def test_indices_outside_are_read_and_refused() -> None:
    compiled = terrazzo.compile(lambda x, i: x[torch.arange(3) + i], X, torch.tensor(2))
    assert torch.equal(compiled(X, torch.tensor(3)), X[3:])
    with pytest.raises((terrazzo.UserError, IndexError)):
        compiled(X, torch.tensor(4))
