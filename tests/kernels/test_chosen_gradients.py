"""What is chosen for the gradients of a convolution's weights: a product for each tap, whose steps go along the batch,
of images as they lie in memory, channels last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels import programs
from tests.kernels.test_chosen_convolutions import t

from terrazzo.front.capture import capture
from terrazzo.hw.gpu import GPUS
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.sites import product
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop_to_tile.estimate import estimate, expected


def of_weights(size: int, width: int, stride: int, batch: int, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    """The gradient of the weights of a convolution from 64 channels to 64, and what it is given."""
    pad, out = width // 2, (size + 2 * (width // 2) - width) // stride + 1
    options = (None, [stride] * 2, [pad] * 2, [1, 1], False, [0, 0], 1, [False, True, False])
    given = tuple(
        t(*shape, dtype=dtype) for shape in ((batch, 64, out, out), (batch, 64, size, size), (64, 64, width, width))
    )
    return lambda g, x, w: torch.ops.aten.convolution_backward(g, x, w, *options)[1], given


SIZES = (8, 3, 1, 32), (8, 3, 2, 16), (6, 1, 2, 48), (7, 3, 1, 20), (64, 3, 1, 2)
"""Of images, filters, strides and batches."""


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_no_image_is_copied_and_results_are_right(size: tuple[int, ...], dtype: Any) -> None:
    fn, given = of_weights(*size, dtype)  # type: ignore[arg-type]
    found = programs.lowered(fn, given, "sm_90a")
    first = next(x for x in found.kernels if any(isinstance(s, k.MultiplyAsync) for s in k.walk(x.body)))
    parts = [x for x in found.kernels if "parts" in x.name]
    assert bool(parts) == (dtype is torch.float32)
    assert len([x for x in found.kernels if x is not first]) - len(parts) <= 1  # what adds up partial sums
    exact = fn(*(x.double() for x in given)).numpy()
    ours = found.simulated()[0].astype(np.float64)
    eager = fn(*given).double().numpy()
    off, off_eager = (np.sqrt(np.square(x - exact).mean()) for x in (ours, eager))
    assert off <= 2 * off_eager


def test_what_no_point_sees_is_multiplied_by_nothing() -> None:
    """Images that hold infinities at their border: taps that do not reach these have no NaN."""
    fn, (g, x, w) = of_weights(8, 3, 1, 20, torch.bfloat16)
    x[:, :, 0] = torch.inf
    found = programs.lowered(fn, (g.abs() + 1, x, w), "sm_90a")
    ours, eager = found.simulated()[0].astype(np.float64), fn(g.abs() + 1, x.float().to(x.dtype), w).double().numpy()
    assert (np.isfinite(ours) == np.isfinite(eager)).all() and np.isfinite(ours[:, :, 2]).all()


def test_blocks_share_the_points_of_large_images() -> None:
    fn, given = of_weights(56, 3, 1, 32, torch.bfloat16)
    done = lowering(
        capture(fn, tuple(x.to("meta") for x in given)).program, Options(target="sm_90a", libraries="never")
    )
    part, rest = done.loop.steps
    (p,) = filter(None, [product(part)])
    assert [a.extent for a in part.axes] == [14, 3, 3, 64, 64]
    assert [a.extent for a in p.axes] == [56, 4, 32]
    assert sum(estimate(x, GPUS["sm_90a"]).time for x in (part, rest)) < 60_000


def test_channels_that_lie_apart_are_copied_beside_each_other() -> None:
    fn, given = of_weights(32, 3, 1, 8, torch.bfloat16)
    captured = capture(fn, tuple(x.contiguous().to("meta") for x in given))
    done = lowering(captured.program, Options(target="sm_90a", libraries="never"))
    *copies, _part, _rest = done.loop.steps
    assert len(copies) == 2 and all(x.stores[0].buffer.type.element_strides[1] == 1 for x in copies)


def of_few_channels(image: tuple[int, ...], filters: tuple[int, ...]) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """The gradient of filters over images of three channels in bfloat16, and what it is given."""
    dims = len(image) - 2
    options = (None, [1] * dims, [0] * dims, [1] * dims, False, [0] * dims, 1, [False, True, False])
    sizes = (n - k + 1 for n, k in zip(image[2:], filters[2:], strict=True))
    shapes = (image[0], filters[0], *sizes), image, filters
    given = tuple(torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes)
    return lambda g, x, w: torch.ops.aten.convolution_backward(g, x, w, *options)[1], given


def test_blocks_share_the_points_of_images_of_few_channels() -> None:
    """Whose boxes of taps are few."""
    fn, given = of_few_channels((128, 3, 24, 24), (16, 3, 5, 5))
    torch.manual_seed(0)
    given = tuple(torch.randn(x.shape).bfloat16() for x in given)
    found = programs.lowered(fn, given, "sm_90a")
    (part,) = [s for s in found.lowering.loop.steps if s.name.endswith("_part")]
    assert part.axes[0].extent > 1 and any(e.rule == "boxes" and e.fired for e in found.lowering.log.events)
    exact = fn(*(x.double() for x in given)).numpy()
    ours, eager = found.simulated()[0].astype(np.float64), fn(*given).double().numpy()
    assert np.abs(ours - exact).max() <= 2 * np.abs(eager - exact).max()


def test_blocks_share_the_points_of_volumes() -> None:
    """Three blocks had all of it to do, which takes 14 ms by the model."""
    fn, given = of_few_channels((128, 3, 16, 64, 64), (16, 3, 3, 3, 3))
    done = lowering(capture(fn, given).program, Options(target="sm_90a", libraries="never"))
    *copies, part, rest = done.loop.steps
    assert len(copies) == 2 and part.axes[0].extent >= 31
    assert sum(estimate(x, GPUS["sm_90a"]).time for x in (part, rest)) < 500_000


def test_blocks_share_rows_of_pixels_of_a_filter_of_one_tap() -> None:
    """The gradient is stored as one row of all pixels, as a softmax over an image leaves it, so there are steps along
    images, rows and columns; 72 columns are two steps, which no blocks can share. Two had all of it to do: 1776 us on
    an H200, 0.15 of eager's speed.
    """
    torch.manual_seed(0)
    g, x = (torch.randn(s).bfloat16() for s in ((8, 17, 24 * 72), (8, 64, 24, 72)))
    fn = lambda g, x: torch.einsum("nohw,nihw->oi", g.view(8, 17, 24, 72), x)  # noqa: E731
    found = programs.lowered(fn, (g, x), "sm_90a")
    (part,) = [s for s in found.lowering.loop.steps if s.name.endswith("_part")]
    assert part.axes[0].extent > 1
    exact, eager = fn(g.double(), x.double()).numpy(), fn(g, x).double().numpy()
    ours = found.simulated()[0].astype(np.float64)
    assert np.abs(ours - exact).max() <= 2 * np.abs(eager - exact).max()


def of_groups(batch: int, channels: int, size: int, width: int, groups: int) -> tuple[Any, tuple[tuple[int, ...], ...]]:
    """The gradient of the weights of a convolution in groups, and the shapes of what it is given."""
    options = (None, [1] * 2, [width // 2] * 2, [1, 1], False, [0, 0], groups, [False, True, False])
    image = (batch, channels, size, size)
    shapes = image, image, (channels, channels // groups, width, width)
    return lambda g, x, w: torch.ops.aten.convolution_backward(g, x, w, *options)[1], shapes


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("sizes", ((16, 32, 28, 7, 32), (4, 64, 29, 7, 64), (8, 64, 28, 5, 32)), ids=str)
def test_a_thread_takes_several_taps_of_a_filter_in_groups(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of 28 points of a row, and of 29, of which no run of 4 or more leaves no rest."""
    fn, shapes = of_groups(*sizes)
    given = tuple(t(*shape, dtype=dtype) for shape in shapes)
    found = programs.lowered(fn, given, "sm_90a")
    assert any(e.rule == "window" and e.subject.endswith("_part") for e in found.lowering.log.events)
    exact = fn(*(x.double() for x in given)).numpy()
    ours, eager = found.simulated()[0].astype(np.float64), fn(*given).double().numpy()
    off, off_eager = (np.sqrt(np.square(x - exact).mean()) for x in (ours, eager))
    assert off <= 2 * off_eager


def test_what_lies_beyond_a_run_is_multiplied_by_nothing() -> None:
    """Images whose last column is infinite, beyond which a run of points goes on: other taps than those that see it
    have no NaN.
    """
    fn, shapes = of_groups(4, 64, 29, 7, 64)
    g, x, w = (t(*shape).abs() + 1 for shape in shapes)
    x[..., -1] = torch.inf
    found = programs.lowered(fn, (g, x, w), "sm_90a")
    ours = found.simulated()[0].astype(np.float64)
    assert np.isfinite(ours[..., :3]).all() and np.isposinf(ours[..., 3:]).all()


FEW = (
    ((32, 96, 56, 56), (32, 96, 56, 56), (96, 1, 7, 7), 96, 60),
    ((4, 3, 256, 256), (4, 64, 256, 256), (3, 64, 3, 3), 1, 90),
    ((32, 64, 112, 112), (32, 3, 224, 224), (64, 3, 7, 7), 1, 400),
)
"""Of a gradient, an image, filters and groups, and what is expected at most, in microseconds: threads, or tiles of CUDA
cores of which one block walked all images, took 271 and 541, 172 and 1622, 62 and 5667 in bfloat16 and float32.
"""


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("case", FEW, ids=str)
def test_few_channels_take_no_tiles(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    *shapes, groups, most = case
    given = [torch.empty(s, dtype=dtype, device="meta").to(memory_format=torch.channels_last) for s in shapes]
    stride = shapes[1][-1] // shapes[0][-1]
    options = (None, [stride] * 2, [shapes[2][-1] // 2] * 2, [1, 1], False, [0, 0], groups, [False, True, False])
    fn = lambda g, x, w: torch.ops.aten.convolution_backward(g, x, w, *options)[1]  # noqa: E731
    done = lowering(capture(fn, tuple(given)).program, Options(target="sm_90a", libraries="never"))
    assert expected(done.loop.steps, GPUS["sm_90a"]) < most * 1000
