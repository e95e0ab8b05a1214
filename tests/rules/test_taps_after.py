"""Convolutions of few results multiply every point of their image with all taps, and add these up after, where that is
faster by the model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import lowered

from terrazzo.front.capture import capture
from terrazzo.hw.gpu import GPUS
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop_to_tile.estimate import expected

CASES = {
    "three channels": (F.conv2d, (4, 64, 48, 48), (3, 64, 3, 3), {"padding": 1}),
    "a single one": (F.conv2d, (4, 64, 40, 40), (1, 64, 9, 9), {"padding": 4}),
    "transposed": (F.conv_transpose2d, (8, 64, 24, 24), (64, 3, 7, 7), {"stride": 2, "padding": 3}),
    "transposed, with as many taps for every point": (
        F.conv_transpose2d, (16, 64, 25, 23), (64, 3, 4, 4), {"stride": 2, "padding": 1},
    ),
    "in one dimension": (F.conv1d, (4, 64, 4096), (1, 64, 7), {"padding": 3}),
    "in three, dilated": (F.conv3d, (2, 32, 12, 12, 12), (1, 32, 3, 3, 3), {"padding": 2, "dilation": 2}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_it_is_right(name: str, dtype: torch.dtype) -> None:
    """With an infinity, which no tap but those that see it meets, and what follows the sums."""
    fn, image, filters, options = CASES[name]
    torch.manual_seed(0)
    results = filters[1 if "transpose" in fn.__name__ else 0]
    x, w, b = (torch.randn(s).to(dtype) for s in (image, filters, (results,)))
    x.view(-1)[777] = torch.inf
    found = lowered(lambda x, w, b: torch.relu(fn(x, w, b, **options)), (x, w, b), "sm_90a")
    assert any(e.rule == "taps_after" and e.fired for e in found.lowering.log.events)
    exact, eager = (found.fn(*(y.to(d) for y in (x, w, b))).double().numpy() for d in (torch.float64, dtype))
    ours, seen = found.simulated()[0].astype(np.float64), np.isfinite(exact)
    assert (np.isposinf(ours) == np.isposinf(exact)).all() and not np.isnan(ours).any()
    off, off_eager = (np.sqrt(np.square(y[seen] - exact[seen]).mean()) for y in (ours, eager))
    assert off <= 2 * off_eager


def priced(fn: Any, *shapes: tuple[int, ...], dtype: torch.dtype) -> tuple[float, bool]:
    """What a function is expected to take, in nanoseconds, and whether taps are added up after."""
    given = tuple(torch.empty(s, dtype=dtype, device="meta") for s in shapes)
    done = lowering(capture(fn, given).program, Options(target="sm_90a", libraries="never"))
    fired = any(e.rule == "taps_after" and e.fired for e in done.log.events)
    return expected(done.loop.steps, GPUS["sm_90a"]), fired


@pytest.mark.parametrize(
    ("stride", "shapes", "most"),
    [
        (2, ((64, 64, 64, 64), (64, 3, 4, 4)), 45),
        (1, ((4, 64, 256, 256), (64, 3, 3, 3)), 30),
        (1, ((16, 64, 128, 128), (64, 1, 9, 9)), 60),
    ],
)
def test_few_columns_are_not_padded(stride: int, shapes: Any, most: int) -> None:
    """A generator's last layer took 85 us by the model, 3 x 3 taps 43, and 9 x 9 168."""
    fn = lambda x, w: F.conv_transpose2d(x, w, stride=stride, padding=(w.shape[-1] - 1) // 2)  # noqa: E731
    time, fired = priced(fn, *shapes, dtype=torch.bfloat16)
    assert fired and time < 1000 * most


@pytest.mark.parametrize("groups", (1, 8))
def test_others_stay_as_they_are(groups: int) -> None:
    """Of many results, and of channels in groups, of which each is multiplied with its own filters alone."""
    channels = 64 if groups == 1 else 8
    shapes = (32, 64, 56, 56), (channels, 64 // groups, 3, 3)
    _, fired = priced(lambda x, w: F.conv2d(x, w, padding=1, groups=groups), *shapes, dtype=torch.bfloat16)
    assert not fired


def resampled_back(samples: Any, filters: Any) -> Any:
    """The gradient of what is resampled: windows of rows of samples, added up, less what was padded in front."""
    phases = filters.shape[0]
    frames = samples.unflatten(-1, (-1, phases)).transpose(1, 2)
    return F.conv_transpose1d(frames, filters, stride=filters.shape[-1] - 14)[..., 7:]


def test_channels_that_lie_between_windows_in_one_dimension() -> None:
    """Samples that become channels: all points were stored with zeros between them, 908 MB, and all were multiplied
    with all taps (2.1 ms on an H200, 0.1 in eager mode).
    """
    time, fired = priced(resampled_back, (16, 201 * 441), (441, 1, 334), dtype=torch.bfloat16)
    assert fired and time < 60_000


def test_what_such_channels_give_is_right() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(8, 100 * 256), torch.randn(256, 1, 142)
    found = lowered(resampled_back, (x, w), "sm_90a")
    assert any(e.rule == "taps_after" and e.fired for e in found.lowering.log.events)
    exact = resampled_back(x.double(), w.double()).numpy()
    ours, eager = found.simulated()[0], resampled_back(x, w).numpy()
    assert np.square(ours - exact).mean() <= 4 * np.square(eager - exact).mean()
