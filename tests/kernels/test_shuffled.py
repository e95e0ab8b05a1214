"""Convolutions of what lies in memory otherwise than as an image of their channels: pixels shuffled among channels,
slices of channels, channels that are no multiple of 16 bytes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import Lowered, lowered

from terrazzo.front.capture import capture
from terrazzo.hw.gpu import gpu
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.sites import product
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop.layout.pixels import pixels_together
from terrazzo.rules.loop_to_tile.products import product_candidates
from terrazzo.rules.loop_to_tile.walked.collapse import collapse
from terrazzo.rules.loop_to_tile.walked.crossed import points
from terrazzo.rules.loop_to_tile.walked.touched import touched

HOPPER = gpu("sm_90a")
LAST = torch.channels_last


def gradient(g: Any, w: Any) -> Any:
    """Of what a convolution reads whose results were shuffled."""
    g = F.pixel_unshuffle(g, 2)
    return torch.nn.grad.conv2d_input((g.shape[0], w.shape[1], *g.shape[2:]), w, g, padding=1)


def forward(x: Any, w: Any) -> Any:
    return F.conv2d(F.pixel_unshuffle(x, 2), w, padding=1)


def weights(x: Any, g: Any) -> Any:
    return torch.nn.grad.conv2d_weight(x, (g.shape[1], x.shape[1], 3, 3), g, padding=1)


def weights_shuffled(x: Any, g: Any) -> Any:
    return weights(x, F.pixel_unshuffle(g, 2))


def sliced(x: Any, w: Any) -> Any:
    """Channels that begin at no multiple of 16 bytes."""
    return F.conv2d(x[:, 20:40], w, padding=1)


def cut(x: Any, w: Any) -> Any:
    """Channels that begin at one, and end amid others."""
    return F.conv2d(x[:, 8:28], w, padding=1)


def pooled(g: Any, w: Any, dilation: int = 1) -> Any:
    """Of what a convolution reads whose results were averaged in squares of 2 x 2."""
    n, _, height, width = g.shape
    whole = g.new_empty(n, w.shape[0], 2 * height, 2 * width)
    g = torch.ops.aten.avg_pool2d_backward(g, whole, [2], [2], [0], False, True, None)
    shape = n, w.shape[1], 2 * height, 2 * width
    return torch.nn.grad.conv2d_input(shape, w, g, padding=dilation, dilation=dilation)


def rules(found: Lowered) -> list[str]:
    return [e.rule for e in found.lowering.log.events if e.fired]


def close(found: Lowered, fn: Any, args: tuple[torch.Tensor, ...]) -> None:
    """Nearer to float64 than twice what PyTorch is off by, or than a rounding of the largest."""
    exact = fn(*(x.double() for x in args)).numpy()
    eager = np.abs(fn(*args).double().numpy() - exact).max()
    rounding = 2.0**-8 if args[0].dtype is torch.bfloat16 else 2.0**-23
    off = np.abs(found.simulated()[0].astype(np.float64) - exact).max()
    assert off <= max(2 * eager, rounding * np.abs(exact).max())


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are stored whole however rarely they are multiplied."""
    monkeypatch.setattr("terrazzo.pipelines.pixels_together", lambda p, log: pixels_together(p, log, often=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (gradient, [(2, 16, 16, 16), (64, 64, 3, 3)]),
        (forward, [(2, 16, 16, 16), (64, 64, 3, 3)]),
        (weights_shuffled, [(2, 64, 8, 16), (2, 16, 16, 32)]),
    ],
)
def test_pixels_that_are_channels_are_stored_as_such(fn: Any, shapes: Any, dtype: torch.dtype, often: None) -> None:
    torch.manual_seed(0)
    args = tuple(torch.randn(s).to(dtype) for s in shapes)
    found = lowered(fn, args, "sm_90a")
    assert "pixels_together" in rules(found)
    assert any(
        c.buffer.name.endswith("together")
        for s in found.lowering.loop.steps
        if isinstance(s, l.Kernel)
        for c in s.stores
    )
    close(found, fn, args)


@pytest.mark.parametrize("dilation", [1, 3])
def test_a_window_that_goes_backwards_over_repeated_pixels_reads_them_stored(dilation: int) -> None:
    """It was left to CUDA cores: it reads (y - r + 1) // 2."""
    torch.manual_seed(0)
    args = torch.randn(2, 64, 4, 8), torch.randn(64, 64, 3, 3)
    fn = partial(pooled, dilation=dilation)
    found = lowered(fn, args, "sm_90a")
    assert "store_lookups" in rules(found) and "boxes" in rules(found)
    close(found, fn, args)


def test_one_image_serves_all_its_gradients() -> None:
    """Those of weights read what those of the image read, where parts of this have been stored."""

    def both(x: Any, w: Any, g: Any) -> Any:
        return gradient(g, w), weights_shuffled(x, g)

    args = tuple(torch.empty(s, device="meta") for s in ((4, 64, 48, 48), (256, 64, 3, 3), (4, 64, 96, 96)))
    steps = lowering(capture(both, args).program, Options(target="sm_90a")).loop.steps
    (stored,) = [s for s in steps if isinstance(s, l.Kernel) and args[-1].shape in [b.type.shape for b in s.reads]]
    multiplied = [s for s in steps if isinstance(s, l.Kernel) and product(s) is not None]
    assert len(multiplied) == 2 and all(b.type.dtype.size == 2 for s in multiplied for b in s.reads)
    assert all({*stored.writes} < {*s.reads} for s in multiplied)


@pytest.mark.parametrize(("fn", "copies"), [(sliced, 2), (cut, 1)])
def test_a_slice_of_channels_is_an_image(fn: Any, copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is copied by itself where its rows begin elsewhere than at multiples of 16 bytes; filters are, in any case."""
    monkeypatch.setattr(product_candidates, "best", lambda *_: 1e12)
    monkeypatch.setattr(product_candidates, "after", lambda *_: 1e12)
    torch.manual_seed(0)
    x, w = torch.randn(2, 48, 9, 16).bfloat16().to(memory_format=LAST), torch.randn(24, 20, 3, 3).bfloat16()
    found = lowered(fn, (x, w), "sm_90a")
    assert rules(found).count("boxes") == 1 and len(found.kernels) == 1 + copies
    close(found, fn, (x, w))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 64, 16, 32), torch.float32), ((2, 20, 16, 32), torch.bfloat16)], ids=["few", "uneven"]
)
def test_gradients_of_weights_multiply_few_images_on_tensor_cores(shape: Any, dtype: torch.dtype) -> None:
    """Steps are rows of pixels where there are few images, a run of each at a time, wherever a tap has moved it."""
    torch.manual_seed(0)
    x, g = (torch.randn(shape).to(dtype).to(memory_format=LAST) for _ in range(2))
    found = lowered(weights, (x, g), "sm_90a")
    assert any("wgmma" in str(s) for _, s in found.lowering.at("tile").schedules)
    close(found, weights, (x, g))


def test_gradients_of_weights_of_few_large_images_are_ours() -> None:
    args = tuple(torch.empty(4, 256, 48, 48, device="meta") for _ in range(2))
    done = lowering(capture(weights, args).program, Options(target="sm_90a", libraries="auto"))
    assert not any(isinstance(s, l.Call) for s in done.loop.steps)


def test_patches_whose_channels_lie_side_by_side_are_read_along_these() -> None:
    """Rows of the filters' length for every pixel, stored by columns: what is read of a sector is used at once."""
    text = """
@loop
def f(x: bf16[32, 52, 56, 56] @ (163072, 1, 2912, 52)):
    with kernel('p', p=bf16[468, 100352]):
        for a0 in free(468):
            for a1 in free(100352):
                in0 = x[a1 // 3136, a0 // 9, a1 // 56 % 56 + a0 // 3 % 3 - 1, a1 % 56 + a0 % 3 - 1] if WITHIN else 0
                p[a0, a1] = in0
    return (p,)
"""
    y, x = "a1 // 56 % 56 + a0 // 3 % 3", "a1 % 56 + a0 % 3"
    text = text.replace("WITHIN", f"{y} >= 1 and {y} < 57 and {x} >= 1 and {x} < 57")

    (kernel,) = parse(text).steps
    form, schedule, why, _ = points(collapse(kernel), HOPPER)
    assert "along what is read" in why
    assert touched(form, schedule, HOPPER) < 120e3  # 82 us on an H200, where it took 297
