"""The places in a triangle of a matrix, in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import terrazzo
from terrazzo.front.capture import capture
from terrazzo.hw.gpu import gpu
from terrazzo.ir.dialects import loop
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop_to_tile.estimate import estimate


@pytest.mark.parametrize("fn", [torch.tril_indices, torch.triu_indices])
@pytest.mark.parametrize("args", [(5, 5, 0), (5, 5, -1), (4, 7, 2), (7, 4, -3), (6, 3, 5), (3, 6, -9), (1, 1, 0)])
def test_as_of_pytorch(fn: Any, args: tuple[int, int, int]) -> None:
    ours = terrazzo.compile(lambda: fn(*args), options={"target": "interpreter", "strict": True})()
    assert torch.equal(ours, fn(*args)) and ours.dtype is torch.int64


def test_rows_are_not_counted_for_every_place() -> None:
    """Of 2048 rows and columns there are two million places, and 4 billion pairs of a place and a row."""
    done = lowering(capture(lambda: torch.tril_indices(2048, 2048, -1), (), {}).program, Options(target="sm_90a"))
    kernels = [s for s in done.loop.steps if isinstance(s, loop.Kernel)]
    assert sum(estimate(k, gpu("sm_90a")).time for k in kernels) < 100e3
