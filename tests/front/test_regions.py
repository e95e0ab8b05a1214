"""Regions that are to be compiled once are written out where they are called, and fused with what is around them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn


@torch.compiler.nested_compile_region
def halves(x: Any) -> Any:
    """Two results, of which one is a constant's part."""
    return x.relu() + torch.tensor([0.5]), x.abs()


@torch.compiler.nested_compile_region
def layer(m: Any, x: Any) -> Any:
    a, b = halves(m(x))
    return a - b * 0.5


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: Any) -> Any:
        for m in self.layers:
            x = layer(m, x)
        return x.sum(-1)


@pytest.mark.parametrize("training", [False, True])
def test_regions_are_part_of_the_graph(training: bool, tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = Layers()
    compiled = torch.compile(model, backend="terrazzo")
    with warnings.catch_warnings(), torch.set_grad_enabled(training):
        warnings.simplefilter("error")  # nothing is left to PyTorch
        x = torch.randn(5, 8, requires_grad=training)
        found, wanted = compiled(x), model(x)
        torch.testing.assert_close(found, wanted)
        if training:
            mine, theirs = (torch.autograd.grad(y.sum(), [x, *model.parameters()]) for y in (found, wanted))
            torch.testing.assert_close(mine, theirs)
