"""Sums of which every s-th step is of anything take these alone: what they compute, and what that gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import lowered
from tests.rules.test_taps_after import priced

from terrazzo.ir.dialects import loop as l
from terrazzo.rules.loop.layout import few_results, whole_steps

CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "one channel": (lambda x, w: F.conv_transpose1d(x, w, stride=16), (2, 1, 30), (1, 1, 64)),
    "a part of the taps for some points": (
        lambda x, w: F.conv_transpose1d(x, w, stride=8, padding=3, output_padding=2), (2, 1, 30), (1, 1, 21),
    ),
    "fewer taps than lie between points": (lambda x, w: F.conv_transpose1d(x, w, stride=8), (2, 1, 30), (1, 1, 5)),
    "fewer in one dimension": (
        lambda x, w: F.conv_transpose2d(x, w, stride=(5, 2), dilation=(2, 1)), (2, 1, 3, 9), (1, 1, 3, 4),
    ),
    "dilated": (lambda x, w: F.conv_transpose1d(x, w, stride=5, dilation=3), (2, 1, 30), (1, 1, 12)),
    "each channel by itself": (
        lambda x, w: F.conv_transpose2d(x, w, stride=(2, 3), padding=1, groups=4), (2, 4, 9, 8), (4, 1, 4, 5),
    ),
    "windows of ones": (
        lambda x, w: F.conv_transpose1d(torch.ones_like(x[:1, :1]), w.square(), stride=16) * x[0, 0, 0], (2, 1, 30),
        (1, 1, 64),
    ),
    "ones, with a rest": (
        lambda x, w: F.conv_transpose1d(torch.ones_like(x[:1, :1]), w, stride=7) * x[0, 0, 0], (2, 1, 30), (1, 1, 20),
    ),
    "many channels": (lambda x, w: F.conv_transpose1d(x, w, stride=16), (2, 66, 30), (66, 1, 64)),
    "many channels, with a rest": (lambda x, w: F.conv_transpose1d(x, w, stride=16), (2, 66, 30), (66, 1, 50)),
    "the gradient of an image": (
        lambda x, w: torch.ops.aten.convolution_backward.default(
            x, x.new_ones(2, 4, 17, 17), w, None, [2, 2], [1, 1], [1, 1], False, [0, 0], 4, [True, False, False]
        )[0],
        (2, 4, 9, 9), (4, 1, 3, 3),
    ),
    "the gradient of means": (
        lambda x, w: w * torch.ops.aten.avg_pool2d_backward(
            x, x.new_ones(2, 4, 26, 26), [5, 5], [3, 3], [1, 1], False, True, None
        ),
        (2, 4, 8, 8), (1,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_it_is_right(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an infinity, which no other step meets. So little is done here that it makes no difference by the model."""
    monkeypatch.setattr(whole_steps, "SURE", math.inf)
    monkeypatch.setattr(few_results, "SURE", math.inf)
    fn, *shapes = CASES[name]
    torch.manual_seed(0)
    x, w = (torch.randn(s).to(dtype) for s in shapes)
    x.view(-1)[17] = torch.inf
    found = lowered(fn, (x, w), "sm_90a")
    longest = max((math.prod(a.extent for a in r.axes) for r in sums(found) if r.args[0].free), default=1)
    assert longest <= (66 if "many" in name else 9)
    exact, eager = (fn(*(y.to(d) for y in (x, w))).double().numpy() for d in (torch.float64, dtype))
    ours, seen = found.simulated()[0].astype(np.float64), np.isfinite(exact)
    assert (ours[~seen] == exact[~seen]).all() and np.isfinite(ours[seen]).all()
    seen &= np.isfinite(eager)  # which multiplies the infinity by zeros, in 16 bits
    off, off_eager = (np.sqrt(np.square(y[seen] - exact[seen]).mean()) for y in (ours, eager))
    assert off <= 2 * off_eager + 1e-7


def sums(found: Any) -> list[l.Reduce]:
    return [r for s in found.lowering.loop.steps for r in s.carried if isinstance(r, l.Reduce)]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_overlapping_windows_are_a_product_and_few_sums(dtype: torch.dtype) -> None:
    """An inverse Fourier transform of short times took 281 us by the model in 16 bits, and 342 in 32, since all taps
    of a point were looked at; the product takes 25 and 61.
    """
    fn = lambda x, w: F.conv_transpose1d(x, w, stride=256)  # noqa: E731
    time, fired = priced(fn, (8, 1026, 626), (1026, 1, 1024), dtype=dtype)
    assert fired and time < (60e3 if dtype is torch.bfloat16 else 120e3)


def test_a_window_of_one_channel_is_no_call() -> None:
    """Of 1024 taps a point sees four."""
    fn = lambda w: F.conv_transpose1d(torch.ones(1, 1, 626, device=w.device), w, stride=256)  # noqa: E731
    assert priced(fn, (1, 1, 1024), dtype=torch.float32)[0] < 5e3
