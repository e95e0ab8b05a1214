"""What is made of images whose channels lie side by side is stored so, whatever its type: lanes lie along channels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import lowered

from terrazzo.front.capture import capture
from terrazzo.hw.gpu import gpu
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop_to_tile.estimate import expected

LAST = torch.channels_last


def pooled_back(x: Any, g: Any) -> Any:
    return torch.func.vjp(lambda x: F.max_pool2d(x, 3, 2, 1), x)[1](g)[0]


def pooled_twice(x: Any, g: Any) -> Any:
    return F.avg_pool2d(F.avg_pool2d(x, 3, 1, 1), 3, 2, 1) - g


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", [pooled_back, pooled_twice])
def test_what_lies_between_lies_as_images_do(fn: Any, dtype: torch.dtype) -> None:
    """Such as places of maxima, which are whole numbers. What is moved is most of the time."""
    torch.manual_seed(0)
    x, g = torch.randn(2, 32, 14, 14).to(dtype), torch.randn(2, 32, 7, 7).to(dtype)
    args = tuple(v.to(memory_format=LAST) for v in (x, g))
    found = lowered(fn, args, "sm_90a")
    for step in found.lowering.loop.steps:
        for s in step.stores:
            assert s.buffer.type.element_strides[1] == 1
    exact = fn(*(v.double() for v in args)).numpy()
    error = 2e-6 if dtype is torch.float32 else 2e-2
    assert np.abs(found.simulated()[0].astype(np.float64) - exact).max() <= error * np.abs(exact).max()

    large = (torch.empty(s, dtype=dtype, device="meta") for s in ((32, 64, 112, 112), (32, 64, 56, 56)))
    images = tuple(v.to(memory_format=LAST) for v in large)
    steps = lowering(capture(fn, images, {}).program, Options(target="sm_90a", libraries="never")).loop.steps
    moved = sum(b.type.span for s in steps for b in (*s.reads, *s.writes)) / gpu("sm_90a").memory
    assert expected(steps, gpu("sm_90a")) < 2.2 * moved
