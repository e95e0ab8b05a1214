"""Convolutions in training steps: what norms and views lie between, what several of them read, and which are called."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import lowered

from terrazzo.front.capture import capture
from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.ir.dialects import loop as l
from terrazzo.options import Options
from terrazzo.pipelines import Lowering, lowering
from terrazzo.rules.loop_to_tile.estimate import estimate
from terrazzo.rules.loop_to_tile.reductions import under_taps


def chosen(fn: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype, libraries: str = "auto") -> Lowering:
    """A program lowered for tensors of shapes that hold nothing."""
    given = tuple(torch.empty(s, dtype=dtype, device="meta") for s in shapes)
    return lowering(capture(fn, given).program, Options(target="sm_90a", libraries=libraries))


def called(found: Lowering) -> list[str]:
    return [s.name for s in found.loop.steps if isinstance(s, l.Call)]


def instructions(found: Lowering) -> list[str]:
    """What multiplies in the kernels of a program, in order."""
    sites = [site for _, s in found.at("tile").schedules for site in s.sites if site.instruction]
    return [site.instruction for site in sites]


def gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The gradients of a function of tensors, given its results' last."""
    return lambda *given: torch.func.vjp(fn, *given[:-1])[1](given[-1])


def two(x: Any, w: Any, u: Any) -> Any:
    return F.conv2d(F.relu(F.conv2d(x, w, padding=1)), u, padding=1)


def normed(x: Any, w: Any, u: Any) -> Any:
    return F.conv2d(F.silu(F.group_norm(F.conv2d(x, w, padding=1), 8)), u, padding=1)


WIDE = (32, 64, 56, 56), (64, 64, 3, 3), (64, 64, 3, 3), (32, 64, 56, 56)


@pytest.mark.parametrize("fn", (two, normed))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_a_training_step_calls_no_library_where_ours_are_faster(fn: Any, dtype: torch.dtype) -> None:
    """Every product runs on tensor cores, what a norm stores in groups of channels is read as images."""
    found = chosen(gradients(fn), *WIDE, dtype=dtype)
    assert not called(found)
    assert len(on := instructions(found)) >= 5
    assert all(x.startswith("wgmma") for x in on)


def test_what_norms_store_in_groups_is_stored_as_convolutions_read_it() -> None:
    torch.manual_seed(0)
    given = tuple(torch.randn(s) for s in ((2, 16, 6, 6), (16, 16, 3, 3), (16, 16, 3, 3), (2, 16, 6, 6)))
    found = lowered(gradients(normed), given, "sm_90a", libraries="never")
    fired = [e.reason for e in found.lowering.log.events if e.rule == "dimensions_of_products" and e.fired]
    assert any("is stored as f32[2, 16, 6, 6]" in why for why in fired)
    exact = gradients(normed)(*(x.double() for x in given))
    for x, y in zip(found.simulated(), exact, strict=True):
        assert np.abs(x - y.numpy()).max() <= 1e-5 * y.abs().max()


def test_convolutions_under_several_windows_are_kernels_of_their_own() -> None:
    """As of rates of dilation that read one image: a tile has the sums of one."""

    def rates(x: Any, *filters: Any) -> Any:
        return tuple(F.conv2d(x, w, padding=d, dilation=d) for w, d in zip(filters, (2, 4, 6), strict=True))

    found = chosen(rates, (4, 256, 64, 64), *[(256, 256, 3, 3)] * 3, dtype=torch.float32, libraries="never")
    assert all(x.startswith("wgmma") for x in instructions(found))
    sums = [len(s.carried) for s in found.loop.steps if isinstance(s, l.Kernel) and s.carried]
    assert sums == [1] * len(sums)
    assert len(sums) >= 3


def test_what_is_given_as_a_sequence_is_copied_as_the_image_it_is_read_as() -> None:
    """Rows of a sequence folded into periods, as of time series."""

    def folded(x: Any, w: Any) -> Any:
        n, length, c = x.shape
        return F.conv2d(x.transpose(1, 2).reshape(n, c, length // 24, 24), w, padding=2)

    found = chosen(folded, (32, 192, 64), (64, 64, 5, 5), dtype=torch.float32, libraries="never")
    assert all(x.startswith("wgmma") for x in instructions(found))
    fired = [e.reason for e in found.log.events if e.rule == "dimensions_of_products" and e.fired]
    assert fired == ["f32[32, 192, 64] is copied as f32[32, 8, 24, 64]"]
    torch.manual_seed(0)
    given = torch.randn(2, 48, 16), torch.randn(16, 16, 5, 5)
    small = lowered(folded, given, "sm_90a", libraries="never")
    exact = folded(*(x.double() for x in given))
    assert np.abs(small.simulated()[0] - exact.numpy()).max() <= 1e-5 * exact.abs().max()


def test_sums_over_images_in_two_orders_copy_one() -> None:
    """The sums of a norm's gradient, of an image that is stored row by row and of another whose channels are last."""

    def sums(x: Any, y: Any) -> Any:
        return (x.float() * y.float()).sum((0, 2, 3))

    x = torch.empty(32, 256, 56, 56, dtype=torch.bfloat16, device="meta")
    given = (x, x.to(memory_format=torch.channels_last))
    found = lowering(capture(sums, given).program, Options(target="sm_90a", libraries="never"))
    read = [b for s in found.loop.steps if isinstance(s, l.Kernel) and s.carried for b in s.reads if b.type.rank == 4]
    assert len({b.type.element_strides for b in read}) == 1


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_few_images_of_few_channels_leave_pieces_of_few_terms(dtype: torch.dtype) -> None:
    """A filter's gradient, cut along as many pixels as there are: a piece has a term for each of two images, and is no
    product.
    """
    torch.manual_seed(0)
    given = tuple(torch.randn(s).to(dtype) for s in ((2, 8, 64), (8, 8, 3), (2, 8, 64)))
    line = lambda x, w: F.conv1d(x, w, padding=1)  # noqa: E731
    found = lowered(gradients(line), given, "sm_90a")
    exact = gradients(line)(*(x.double() for x in given))
    for x, y in zip(found.simulated(), exact, strict=True):
        assert np.abs(x - y.numpy()).max() <= (1e-5 if dtype is torch.float32 else 2**-7) * y.abs().max()


def of_filters(groups: int, taps: int = 3, stride: int = 1) -> Callable[..., Any]:
    """The gradient of a filter in groups, by the gradient of what it gives."""
    backward, padding = torch.ops.aten.convolution_backward.default, [taps // 2] * 2
    last = [1, 1], False, [0, 0], groups, [False, True, False]
    return lambda g, x, w: backward(g, x, w, None, [stride] * 2, padding, *last)[1]


def test_boxes_that_do_not_begin_where_they_may_have_others_copies_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that cannot be derived copies less than the next one, which read what nobody had stored."""
    monkeypatch.setattr(under_taps, "least", lambda *args: math.inf)
    images = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((32, 128, 14, 14), (32, 128, 28, 28)))
    g, x = (t.to(memory_format=torch.channels_last) for t in images)
    w = torch.empty(128, 4, 3, 3, dtype=torch.bfloat16, device="meta")
    program = capture(of_filters(32, stride=2), (g, x, w)).program
    found = lowering(program, Options(target="sm_90a", libraries="never"))
    assert any(e.rule == "boxes" and e.fired for e in found.log.events)
    assert len([s for s in found.loop.steps if s.name.endswith(("_g", "_gr", "_x"))]) == 2


def test_boxes_that_would_hold_elements_several_times_are_no_way_to_run_a_sum() -> None:
    """The gradient of a filter of few channels, of an image that has these first and a gradient that has them last: 192
    us by the model as windows, after a copy of the image; it was 2061, after one of it for each of 27 taps, 382 MB.
    """
    images = [torch.empty(1, 8, 96, 96, 96, dtype=torch.bfloat16, device="meta") for _ in range(2)]
    g, x = images[0].to(memory_format=torch.channels_last_3d), images[1]
    w = torch.empty(8, 8, 3, 3, 3, dtype=torch.bfloat16, device="meta")
    last = [1, 1, 1], [1, 1, 1], [1, 1, 1], False, [0, 0, 0], 1, [False, True, False]
    backward = lambda g, x, w: torch.ops.aten.convolution_backward(g, x, w, None, *last)[1]  # noqa: E731
    found = lowering(capture(backward, (g, x, w)).program, Options(target="sm_90a", libraries="never"))
    kernels = [s for s in found.loop.steps if isinstance(s, l.Kernel)]
    assert all(b.type.numel <= 1.2 * x.numel() for s in kernels for b in s.writes)
    assert sum(estimate(s, gpu("sm_90a")).time for s in kernels) < 250e3


def test_sums_written_out_are_no_windows_where_they_are_faster() -> None:
    """Gradients of 32 groups of two channels, which lie first, were 101 us as windows by the model that had 24 here."""
    shapes = (32, 64, 56, 56), (32, 64, 56, 56), (64, 2, 3, 3)
    found = chosen(of_filters(32), *shapes, dtype=torch.bfloat16, libraries="never")
    kernels = [s for s in found.loop.steps if isinstance(s, l.Kernel)]
    assert sum(estimate(s, gpu("sm_90a")).time for s in kernels) < 40e3


@pytest.mark.parametrize(("images", "size"), [(16, 10), (32, 12)])
def test_blocks_share_images_on_cuda_cores(images: int, size: int) -> None:
    """As for filters of few channels a group, in float32: a block for each of 32 groups went through all of them."""

    gradient = of_filters(4)
    torch.manual_seed(0)
    g, x, w = (torch.randn(s) for s in ((images, 16, size, size), (images, 16, size, size), (16, 4, 3, 3)))
    found = lowered(gradient, (g, x, w), "sm_90a")
    part, _ = found.program.steps
    assert part.grid >= 4 * 4 and set(instructions(found.lowering)) == {"fma.f32"}
    exact = gradient(g.double(), x.double(), w.double()).numpy()
    eager = np.abs(gradient(g, x, w).numpy() - exact).max()
    (out,) = simulator.run(found.program, found.inputs)
    assert np.abs(np.asarray(out, np.float64) - exact).max() <= 2 * eager
