"""Reductions of many short rows: a warp has several of them at once, so that enough is on its way from memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.programs import lowered

from terrazzo.front.capture import capture
from terrazzo.ir.schedule import Like
from terrazzo.options import Options
from terrazzo.pipelines import lowering


@pytest.mark.parametrize(
    ("fn", "rows", "length", "dtype", "lanes"),
    [
        (lambda x, y: (x.float() * y.float()).sum(-1), 8452, 64, torch.bfloat16, 8),
        (lambda x, y: (x.float() * y.float()).sum(-1), 8448, 128, torch.float16, 16),
        (lambda x, y: (x + y).amax(-1), 8449, 16, torch.float32, 0),
        (lambda x, y: (x + y).amax(-1), 8449, 32, torch.float32, 8),
        (lambda x, y: (x.float() * y.float()).sum(-1), 8000, 64, torch.bfloat16, 0),
        (lambda x, y: (x.float() * y.float()).sum(-1), 8452, 96, torch.bfloat16, 4),
        (lambda x, y: (x.float() * y.float()).sum(-1), 8452, 160, torch.bfloat16, 8),
        (lambda x, y: (x + y).sum(-1), 8452, 96, torch.float32, 16),
        (lambda x, y: (x + y).sum(-1), 8449, 17, torch.float32, 4),
        (lambda x, y: (x + y).softmax(-1), 8451, 33, torch.bfloat16, 8),
        (lambda x, y: (x + y).var(-1), 8450, 77, torch.float32, 16),
        (lambda x, y: torch.nn.functional.layer_norm(x + y, (64,)), 8450, 64, torch.float32, 16),
        (lambda x, y: (x + y).reshape(-1, 7, 50).softmax(-1), 8449, 350, torch.float32, 16),
    ],
)  # fmt: skip
def test_short_rows(fn: Any, rows: int, length: int, dtype: torch.dtype, lanes: int) -> None:
    torch.manual_seed(1)
    args = tuple(torch.randn(rows, length).to(dtype) for _ in range(2))
    found = lowered(fn, args, "sm_90a")
    ((_, schedule),) = found.lowering.at("tile").schedules
    bound = [b for s in schedule.sites for _, b in s.axes if not isinstance(b, Like)]
    shared = {f.size for b in bound for f in b if f.level == "lane"}
    assert (shared == {lanes}) if lanes else shared <= {32}
    (ours,) = found.simulated()
    close = 2.0**-7 if found.fn(*args).dtype is torch.bfloat16 else 1e-4
    right = fn(*(a.double() for a in args)).numpy()
    np.testing.assert_allclose(np.asarray(ours, np.float64), right, rtol=close, atol=close)


def test_rows_of_several_axes_are_one_where_they_lie_in_line() -> None:
    """Not where a row is read elsewhere than behind the one before it."""
    norm = lambda x: torch.nn.functional.layer_norm(x, (96,))  # noqa: E731
    rolled = lambda x: norm(x.roll(3, 1))  # noqa: E731
    image = torch.empty(16, 56, 56, 96, device="meta", dtype=torch.bfloat16)
    axes = []
    for fn in (norm, rolled):
        ((_, schedule),) = lowering(capture(fn, (image,), {}).program, Options(target="sm_90a")).at("tile").schedules
        axes.append(len(schedule.axes))
    assert axes == [1, 3]


def test_lanes_share_windows_by_their_rows() -> None:
    """Of windows no more than lie side by side; not of whole images, which are rows of memory as they are."""
    images = torch.empty(64, 256, 176, 176, device="meta")
    for size, lanes in ((11, 8), (176, 32)):
        program = capture(partial(torch.nn.functional.avg_pool2d, kernel_size=size), (images,), {}).program
        ((_, schedule), *_) = lowering(program, Options(target="sm_90a", libraries="never")).at("tile").schedules
        bound = [b for s in schedule.sites for _, b in s.axes if not isinstance(b, Like)]
        assert {f.size for b in bound for f in b if f.level == "lane"} == {lanes}


def test_shared_windows_are_right() -> None:
    torch.manual_seed(1)
    x = torch.randn(8, 18, 121, 121)
    found = lowered(lambda x: torch.nn.functional.avg_pool2d(x * 1, 11), (x,), "sm_90a")
    (ours,) = found.simulated()
    np.testing.assert_allclose(ours, torch.nn.functional.avg_pool2d(x.double(), 11).numpy(), rtol=1e-4, atol=1e-5)
