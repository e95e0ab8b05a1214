"""Images that are resized to their nearest pixels, and rows that are repeated, before products and after them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import lowered

import terrazzo
from terrazzo.front.capture import capture
from terrazzo.ir.address import evaluate, quotient
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.expr import Loaded, Var
from terrazzo.ir.node import topological
from terrazzo.options import Options
from terrazzo.pipelines import lowering, stages
from terrazzo.rewrite.rule import Log
from terrazzo.targets.cuda.emit import emit

Fn = Callable[..., torch.Tensor]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def resized(**how: Any) -> Fn:
    return lambda x: F.interpolate(x, **how)


@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (resized(scale_factor=2, mode="nearest"), (1, 2, 24, 20)),
        (resized(scale_factor=1.5, mode="nearest"), (1, 2, 24, 20)),
        (resized(scale_factor=0.5, mode="nearest-exact"), (1, 2, 24, 20)),
        (resized(size=(31, 77), mode="nearest"), (1, 2, 13, 9)),
        (resized(scale_factor=4, mode="nearest"), (1, 2, 100)),
        (lambda x: x[:, torch.arange(0, 24, 2) // 4 + 1], (1, 24)),
    ],
)
def test_places_that_follow_from_coordinates_are_known(fn: Fn, shape: tuple[int, ...]) -> None:
    """Whatever arithmetic on floats leads to a place, it is a quotient, and no data; which is where PyTorch reads."""
    x = torch.randn(shape)
    with torch.no_grad():
        captured = capture(fn, (x,), {})
    done = stages(captured.program, Options(target="interpreter"), Log())
    (tensors,) = (p for made, p, _ in done if made.name == "torch_to_tensor")
    maps = [n for n in topological(tensors.results) if isinstance(n, t.IndexMap)]
    assert maps and not any(isinstance(e, Loaded) for n in maps for e in topological(n.index_nodes))
    assert torch.equal(torch.from_numpy(lowered(fn, (x,), "sm_90a").simulated()[0]), fn(x))


def test_what_is_no_quotient_is_read() -> None:
    def squares(x: torch.Tensor) -> torch.Tensor:
        i = torch.arange(10)
        return x[:, i * i]

    assert quotient([k * k for k in range(10)], Var("i", 10)) is None
    x = torch.randn(3, 100)
    assert torch.equal(torch.from_numpy(lowered(squares, (x,), "sm_90a").simulated()[0]), squares(x))


def test_quotients_have_their_values() -> None:
    """All (a i + b) // c of small numbers, also where there are fewer values than c."""
    for a in range(-5, 6):
        for b in range(-7, 8):
            for c in range(1, 7):
                for n in (2, 5, 20):
                    values = [(a * i + b) // c for i in range(n)]
                    i = Var("i", n)
                    found = quotient(values, i)
                    assert found is not None or n < 2 * c
                    if found is not None:
                        assert np.broadcast_to(evaluate(found, {i: np.arange(n)}), n).tolist() == values


def kernels(fn: Fn, *args: torch.Tensor) -> dict[str, str]:
    """By which rule each kernel of ours is scheduled, at real sizes."""
    with torch.no_grad():
        found = lowering(capture(fn, args, {}).program, Options(target="sm_90a", libraries="never"))
    return {e.subject: e.rule for e in found.log.events if e.pass_name == "schedule" and e.fired}


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_a_convolution_of_an_image_with_repeated_pixels_is_tiled(mode: str) -> None:
    """Of 1 x 1 (28 ms on an H200 when each thread read what data said, and cuDNN 0.1)."""
    fn = lambda x, w: F.conv2d(F.interpolate(x, scale_factor=2, mode=mode), w)  # noqa: E731
    found = kernels(fn, empty(32, 256, 32, 32), empty(128, 256, 1, 1))
    assert found["convolution"] == "tile"
    assert not {"share", "plain"} & {*found.values()}


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (
            lambda x, w: F.relu(F.interpolate(F.conv2d(x, w), scale_factor=2, mode="nearest")),
            (empty(32, 256, 32, 32), empty(128, 256, 1, 1)),
        ),
        (lambda x, w: F.relu((x @ w.t()).repeat_interleave(4, 1)), (empty(32, 1024, 256), empty(512, 256))),
    ],
)
def test_who_repeats_a_product_does_not_multiply_again(fn: Fn, args: tuple[torch.Tensor, ...]) -> None:
    assert sorted(kernels(fn, *args).values()) == ["points", "tile"]


def test_repeated_pixels_are_stored_along_memory() -> None:
    """Channels lie side by side in what is read, pixels in what is stored: lanes lie along the first."""
    fn = lambda x: x.permute(0, 3, 1, 2).repeat_interleave(2, 3).contiguous()  # noqa: E731
    with torch.no_grad():
        found = lowering(capture(fn, (empty(32, 32, 32, 128),), {}).program, Options(target="sm_90a"))
    assert "lanes lie along what is read" in " ".join(e.reason for e in found.log.events)


def test_what_is_widened_and_rounded_back_is_looked_up_as_it_is() -> None:
    """An operand that data picks is stored before its product, and so is one that went through float32 on its way."""
    fn = lambda x, i, w: x[i].float().to(torch.bfloat16) @ w  # noqa: E731
    found = kernels(fn, empty(5000, 512), empty(8192, dtype=torch.int64), empty(512, 512))
    assert sorted(found.values()) == ["points", "tile"]


def regions(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Regions of an image, resampled and pooled."""
    return F.avg_pool2d(F.grid_sample(x.expand(len(grid), -1, -1, -1), grid, align_corners=False), 2)


def test_regions_of_few_pixels_fill_the_lanes() -> None:
    """7 x 7 pixels of each channel: lanes lie along rows too, and a thread loads all of its taps at once."""
    with torch.no_grad():
        captured = capture(regions, (empty(1, 256, 64, 64), empty(512, 14, 14, 2)), {})
    found = lowering(captured.program, Options(target="sm_90a", libraries="never"))
    (schedule,) = (s for _, s in found.at("tile").schedules if s.kernel == "avg_pool2d")
    assert math.prod(f.size for _, line in schedule.axes for f in line if f.level == "lane") == 32
    assert sum(f.size for _, line in schedule.axes[:-1] for f in line if f.level == "lane") > 1
    assert all(f.level == "reg" for site in schedule.sites for _, line in site.axes for f in line)
    x, grid = torch.randn(1, 4, 12, 12), torch.rand(3, 14, 14, 2) * 2.2 - 1.1
    assert np.allclose(lowered(regions, (x, grid), "sm_90a").simulated()[0], regions(x, grid), atol=1e-5)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(5, 6), (20, 6), (7, 3), (3, 7)])
def test_places_and_their_weights_are_those_of_the_same_elements(mode: str, size: tuple[int, int]) -> None:
    """Also where they are computed in two kernels, and one is contracted: a place may be just a whole number."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, 10)
    fn = resized(size=size, mode=mode, antialias=True)
    torch.testing.assert_close(terrazzo.compile(fn, x)(x), fn(x), rtol=1e-5, atol=1e-5)


def test_products_that_places_are_made_of_are_rounded() -> None:
    found = lowered(resized(size=(20, 6), mode="bilinear", antialias=True), (torch.randn(2, 4, 9, 10),), "sm_90a")
    assert len(found.kernels) == 2 and all("tz_rounded_mul(" in emit(x)[1] for x in found.kernels)
