"""Convolutions on a processor that read images: strides, steps, groups, borders, fusion, all as exact as eager."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import terrazzo
from terrazzo.front.capture import capture
from terrazzo.ir.dialects import loop as l
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop_to_tile.walked.collapse import digits_apart
from terrazzo.targets.cpu.emit import emit, prelude
from terrazzo.targets.cpu.phases import phases
from terrazzo.targets.cpu.tiles import tiled

CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "3x3": (lambda: nn.Conv2d(8, 24, 3, padding=1), (2, 8, 19, 21)),
    "many rows": (lambda: nn.Conv2d(8, 40, 3, padding=1), (2, 8, 19, 21)),
    "no border": (lambda: nn.Conv2d(8, 24, 3), (2, 8, 19, 21)),
    "stride 2": (lambda: nn.Conv2d(8, 24, 3, 2, 1), (2, 8, 19, 21)),
    "stride 2, no border": (lambda: nn.Conv2d(8, 24, (2, 5), 2), (1, 8, 18, 23)),
    "stride 3, few steps": (lambda: nn.Conv2d(8, 24, (2, 4), 3, (1, 2)), (1, 8, 18, 70)),
    "dilated": (lambda: nn.Conv2d(8, 24, 3, 1, 2, 2), (2, 8, 19, 21)),
    "dilated with a stride": (lambda: nn.Conv2d(8, 24, 3, 2, 2, 2), (2, 8, 19, 41)),
    "other steps than strides": (lambda: nn.Conv2d(8, 24, 3, 2, 3, 3), (2, 8, 19, 41)),
    "1x7": (lambda: nn.Conv2d(8, 24, (1, 7), padding=(0, 3)), (2, 8, 9, 21)),
    "7x1": (lambda: nn.Conv2d(8, 24, (7, 1), padding=(3, 0)), (2, 8, 9, 21)),
    "groups of 4": (lambda: nn.Conv2d(16, 16, 3, padding=1, groups=4), (3, 16, 14, 14)),
    "groups of 8, stride 2": (lambda: nn.Conv2d(16, 16, 3, 2, 1, groups=2), (3, 16, 15, 38)),
    "depthwise": (lambda: nn.Conv2d(40, 40, 3, padding=1, groups=40), (2, 40, 14, 14)),
    "depthwise, 7 x 7": (lambda: nn.Conv2d(6, 6, 7, padding=3, groups=6), (2, 6, 20, 35)),
    "depthwise, stride 2": (lambda: nn.Conv2d(6, 6, 5, 2, 2, groups=6), (2, 6, 20, 35)),
    "depthwise, small": (lambda: nn.Conv2d(40, 40, 7, padding=3, groups=40), (2, 40, 7, 7)),
    "depthwise, small, stride 2": (lambda: nn.Conv2d(40, 40, 3, 2, 1, groups=40), (1, 40, 14, 9)),
    "depthwise, large": (lambda: nn.Conv2d(40, 40, 3, padding=1, groups=40), (1, 40, 70, 70)),
    "depthwise, dilated": (lambda: nn.Conv2d(40, 40, 3, padding=2, dilation=2, groups=40), (1, 40, 11, 12)),
    "one dimension": (lambda: nn.Conv1d(8, 24, 9, padding=4), (2, 8, 100)),
    "one dimension, depthwise": (lambda: nn.Conv1d(8, 8, 31, padding=15, groups=8), (2, 8, 100)),
    "three dimensions": (lambda: nn.Conv3d(4, 24, 3, padding=1), (1, 4, 6, 7, 20)),
    "transposed": (lambda: nn.ConvTranspose2d(8, 24, 4, 2, 1), (2, 8, 9, 20)),
    "circular": (lambda: nn.Conv2d(8, 24, 3, padding=1, padding_mode="circular"), (2, 8, 19, 21)),
    "reflected": (lambda: nn.Conv2d(8, 24, 3, padding=1, padding_mode="reflect"), (2, 8, 19, 21)),
    "after a ReLU": (lambda: nn.Sequential(nn.ReLU(), nn.Conv2d(8, 24, 3, padding=1), nn.SiLU()), (2, 8, 19, 21)),
    "after a norm": (
        lambda: nn.Sequential(nn.BatchNorm2d(8).eval(), nn.ReLU(), nn.Conv2d(8, 24, 3, padding=1)),
        (2, 8, 19, 21),
    ),
    "two": (
        lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Hardswish(), nn.Conv2d(8, 24, 1)),
        (2, 8, 19, 21),
    ),
    "deep": (lambda: nn.Conv2d(512, 20, 3, padding=1), (1, 512, 8, 8)),
}

needs_compiler = pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_as_exact_as_eager(name: str, threads: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, shape = CASES[name]
    module, x = make(), torch.randn(shape)
    options = Options(target="cpu", threads=threads, cache_dir=tmp_path, libraries="never")
    with torch.no_grad():
        ours, eager = terrazzo.compile(module, x, options=options)(x), module(x)
        exact = module.double()(x.double())
    assert ours.shape == eager.shape and ours.stride() == eager.stride()
    least = 1e-7 * float(exact.abs().max())
    assert float((ours - exact).abs().max()) <= 2 * max(float((eager - exact).abs().max()), least)


@needs_compiler
@pytest.mark.parametrize("name", ["3x3", "stride 2", "depthwise", "groups of 4"])
def test_gradients(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, shape = CASES[name]
    module, x = make(), torch.randn(shape, requires_grad=True)
    compiled = torch.compile(module, backend="terrazzo", options={"target": "cpu", "cache_dir": str(tmp_path)})
    leaves = [x, *module.parameters()]
    ours = torch.autograd.grad(compiled(x).square().sum(), leaves)
    eager = torch.autograd.grad(module(x).square().sum(), leaves)
    wide = [p.detach().double().requires_grad_() for p in module.parameters()]
    far = x.detach().double().requires_grad_()
    named = dict(zip((n for n, _ in module.named_parameters()), wide, strict=True))
    exact = torch.autograd.grad(torch.func.functional_call(module, named, far).square().sum(), [far, *wide])
    for mine, theirs, true in zip(ours, eager, exact, strict=True):  # in the mean: a bias has few numbers
        least = 1e-7 * float(true.norm())
        assert float((mine - true).norm()) <= 2 * max(float((theirs - true).norm()), least)


@pytest.mark.parametrize("name", ["3x3", "dilated", "depthwise", "groups of 4", "one dimension", "deep"])
def test_windows_are_read_in_images(name: str) -> None:
    make, shape = CASES[name]
    kernels = [
        s
        for s in lowering(
            capture(make(), (torch.randn(shape),)).program, Options(target="cpu", libraries="never")
        ).loop.steps
        if isinstance(s, l.Kernel)
    ]
    ways = [tiled(digits_apart(phases(kernel))) for kernel in kernels]
    assert any(way is not None and way.image is not None for way in ways)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_borders_of_small_images_are_not_written(dtype: torch.dtype) -> None:
    """They are the same for all channels, and were zeros to begin with; results are rows of known length."""
    module, x = nn.Conv2d(40, 40, 3, padding=1, groups=40).to(dtype), torch.randn(1, 40, 9, 9, dtype=dtype)
    program = lowering(capture(module, (x,)).program, Options(target="cpu", libraries="never")).loop
    (kernel,) = (s for s in program.steps if isinstance(s, l.Kernel))
    text = emit(kernel)[1].removeprefix(prelude())
    assert "thread_local f32 image[" in text
    assert "0x0.0p+0f" not in text and "% 11" not in text


@needs_compiler
def test_a_border_stays_what_it_is(tmp_path: Path) -> None:
    """Images of one call lie where those of the last one did."""
    module = nn.Conv2d(40, 40, 3, padding=1, groups=40)
    compiled = terrazzo.compile(module, torch.zeros(1, 40, 9, 9), options=Options(target="cpu", cache_dir=tmp_path))
    with torch.no_grad():
        assert compiled(torch.full((1, 40, 9, 9), torch.inf)).shape == (1, 40, 9, 9)
        x = torch.randn(1, 40, 9, 9)
        torch.testing.assert_close(compiled(x), module(x))
