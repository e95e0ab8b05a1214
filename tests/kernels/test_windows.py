"""Windows: depthwise convolutions, pooling, interpolation and stencils, whose points take the steps of their reductions
together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels import programs
from tests.kernels.programs import Lowered, b, h, r

from terrazzo.rules.loop_to_tile import windows

LAST = torch.channels_last
ULP = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def depthwise(x: Any, w: Any, **options: Any) -> Any:
    conv = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.dim()]
    return conv(x, w, groups=x.shape[1], **options)


def normed(x: Any, w: Any, mean: Any, scale: Any, skip: Any) -> Any:
    y = depthwise(x, w, padding=1)
    return F.hardtanh((y - mean[:, None, None]) * scale[:, None, None], 0.0, 6.0) + skip


def laplace(x: Any) -> Any:
    y = F.pad(x, (1, 1, 1, 1))
    return y[:, 2:, 1:-1] + y[:, :-2, 1:-1] + y[:, 1:-1, 2:] + y[:, 1:-1, :-2] - 4 * x


WINDOWS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "3 x 3": (lambda x, w: depthwise(x, w, padding=1), (b(2, 8, 14, 14), b(8, 1, 3, 3))),
    "7 x 7": (lambda x, w: depthwise(x, w, padding=3), (b(2, 8, 20, 20), b(8, 1, 7, 7))),
    "in single precision": (lambda x, w: depthwise(x, w, padding=2), (r(1, 4, 13, 11), r(4, 1, 5, 5))),
    "in half precision": (lambda x, w: depthwise(x, w, padding=1), (h(1, 4, 28, 28), h(4, 1, 3, 3))),
    "every second": (lambda x, w: depthwise(x, w, padding=1, stride=2), (b(2, 8, 28, 28), b(8, 1, 3, 3))),
    "dilated": (lambda x, w: depthwise(x, w, padding=2, dilation=2), (b(1, 8, 15, 17), b(8, 1, 3, 3))),
    "no padding": (depthwise, (b(1, 8, 19, 21), b(8, 1, 3, 3))),
    "channels last": (
        lambda x, w: depthwise(x, w, padding=3),
        (b(2, 32, 14, 14).to(memory_format=LAST), b(32, 1, 7, 7)),
    ),
    "odd channels last": (
        lambda x, w: depthwise(x, w, padding=1),
        (b(2, 31, 9, 11).to(memory_format=LAST), b(31, 1, 3, 3)),
    ),
    "channels last in single precision": (
        lambda x, w: depthwise(x, w, padding=1),
        (r(1, 32, 9, 10).to(memory_format=LAST), r(32, 1, 3, 3)),
    ),
    "what follows": (normed, (b(2, 8, 14, 14), b(8, 1, 3, 3), b(8), b(8), b(2, 8, 14, 14))),
    "a multiplier": (lambda x, w: F.conv2d(x, w, padding=1, groups=4), (b(1, 4, 16, 16), b(8, 1, 3, 3))),
    "in one dimension": (lambda x, w: depthwise(x, w, padding=3)[..., :-3], (b(2, 16, 100), b(16, 1, 4))),
    "in three dimensions": (lambda x, w: depthwise(x, w, padding=1), (b(1, 4, 6, 8, 9), b(4, 1, 3, 3, 3))),
    "average": (lambda x: F.avg_pool2d(x, 7), (b(2, 8, 49, 49),)),
    "average of neighbours": (lambda x: F.avg_pool2d(x, 3, 1, 1), (b(2, 8, 14, 14),)),
    "average, channels last": (lambda x: F.avg_pool2d(x, 2), (b(2, 32, 8, 8).to(memory_format=LAST),)),
    "maximum": (lambda x: F.max_pool2d(x, 3, 2, 1), (b(2, 8, 28, 28),)),
    "maximum with indices": (lambda x: F.max_pool2d(x, 2, return_indices=True)[0], (r(2, 8, 16, 16),)),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, (5, 7)), (b(2, 8, 28, 28),)),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), (b(2, 4, 8, 8),)),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bicubic"), (b(2, 4, 8, 8),)),
    "grid sample": (lambda x, g: F.grid_sample(x, g, align_corners=False), (r(2, 8, 8, 8), r(2, 9, 10, 2))),
    "stencil": (laplace, (r(2, 20, 30),)),
    "transposed": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, groups=8),
        (b(1, 8, 9, 9), b(8, 1, 3, 3)),
    ),
}  # fmt: skip


def exact(found: Lowered) -> Any:
    return found.fn(*(x.double() for x in found.args)).numpy()


def right(found: Lowered) -> None:
    """The kernels give what PyTorch gives in float64, as exactly as rounding allows."""
    wanted = exact(found)
    ours = found.simulated()[0].astype(np.float64)
    assert np.abs(ours - wanted).max() <= 2 * ULP[found.args[0].dtype] * np.abs(wanted).max()


def chosen(found: Lowered) -> dict[str, str]:
    """The rule and the reason of every kernel's schedule."""
    events = [e for e in found.lowering.log.events if e.pass_name == "schedule" and e.fired]
    return {e.subject: f"{e.rule}: {e.reason}" for e in events}


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small problems are scheduled as large ones, which have threads enough whatever each of them computes."""
    monkeypatch.setattr(windows, "BUSY", 0.0)
    windows.window.cache_clear()
    yield
    windows.window.cache_clear()


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("target", programs.TARGETS)
def test_windows_are_right(name: str, target: str) -> None:
    fn, args = WINDOWS[name]
    right(programs.lowered(fn, args, target))


@pytest.mark.parametrize("name", WINDOWS)
def test_several_points_of_a_thread_are_right(name: str, many: None) -> None:
    fn, args = WINDOWS[name]
    right(programs.lowered(fn, args, "sm_90a"))
