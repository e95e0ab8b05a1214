"""Gradients of convolutions: each an op of its own, lowered to sums of products of what lies in memory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import terrazzo
from terrazzo.front.capture import capture
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.node import topological
from terrazzo.options import Options
from terrazzo.pipelines import lowering, stages
from terrazzo.rewrite.rule import Log
from terrazzo.run.interpreted import interpreted

backward = torch.ops.aten.convolution_backward.default


def drawn(seed: int) -> tuple[tuple[Any, ...], tuple[Any, ...], list[bool]]:
    """Some convolution: its result's gradient, image and weights; its options; and which gradients are asked for."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    spatial, transposed, groups = rng.choice((1, 2, 3)), rng.random() < 0.5, rng.choice((1, 2))
    kernel, stride = ([rng.choice((1, 2, 3)) for _ in range(spatial)] for _ in range(2))
    dilation, padding = [rng.choice((1, 2)) for _ in range(spatial)], [rng.choice((0, 1)) for _ in range(spatial)]
    more = [rng.randrange(max(s, d)) * transposed for s, d in zip(stride, dilation, strict=True)]
    cin, cout = groups * rng.choice((1, 3)), groups * rng.choice((1, 2))
    x = torch.randn(2, cin, *(rng.randint(5, 7) for _ in range(spatial)))
    w = torch.randn(*((cin, cout // groups) if transposed else (cout, cin // groups)), *kernel)
    if spatial == 2 and rng.random() < 0.5:
        x, w = (t.to(memory_format=torch.channels_last) for t in (x, w))
    options = (stride, padding, dilation, transposed, more, groups)
    grad = torch.randn_like(torch.ops.aten.convolution(x, w, None, *options))
    mask = [rng.random() < 0.8 for _ in range(3)]
    return (grad, x, w), options, mask if any(mask) else [True, True, False]


def gradients(given: Any, options: Any, mask: Any) -> tuple[Any, ...]:
    """Those that the mask asks for."""
    grad, x, w = given
    channels = grad.shape[1]
    return tuple(r for r, m in zip(backward(grad, x, w, [channels], *options, mask), mask, strict=True) if m)


def names(program: Any) -> list[str]:
    """The names of the ops of a program of Torch IR."""
    return [n.name for n in topological(program.results) if isinstance(n, Aten)]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_all_of_them_are_as_near_as_eagers(seed: int, dtype: torch.dtype, tmp_path: Path) -> None:
    given, options, mask = drawn(seed)
    given = tuple(x.to(dtype) for x in given)
    call = lambda *g: gradients(g, options, mask)  # noqa: E731
    ours = terrazzo.compile(call, *given, options={"libraries": "never", "cache_dir": tmp_path})
    assert not ours.compiled.fallbacks
    exact = gradients([x.double() for x in given], options, mask)
    for found, eager, right in zip(ours(*given), call(*given), exact, strict=True):
        off, off_eager = ((y.double() - right).square().mean().sqrt() for y in (found, eager))
        assert off <= 2 * off_eager + torch.finfo(dtype).eps * right.square().mean().sqrt()
        assert found.stride() == eager.stride() and found.dtype == eager.dtype


@pytest.mark.parametrize("which", ("image", "weights"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("sizes", ((16, 32, 8, 3, 1), (32, 16, 6, 1, 1), (16, 16, 6, 3, 2)), ids=str)
def test_kernels_of_a_gpu(sizes: tuple[int, ...], dtype: torch.dtype, which: str) -> None:
    torch.manual_seed(0)
    cin, cout, side, kernel, stride = sizes
    pad, mask = kernel // 2, [which == "image", which == "weights", False]
    out = (side + 2 * pad - kernel) // stride + 1
    shapes = (16, cout, out, out), (16, cin, side, side), (cout, cin, kernel, kernel)
    given = [torch.randn(s).to(dtype).to(memory_format=torch.channels_last) for s in shapes]
    options = ([stride] * 2, [pad] * 2, [1, 1], False, [0, 0], 1)
    call = lambda *g: gradients(g, options, mask)  # noqa: E731
    done = lowering(capture(call, given).program, Options(target="sm_90a", libraries="never"))
    (found,), (right,) = interpreted(done, {})(given), gradients([x.double() for x in given], options, mask)
    assert (found.double() - right).norm() <= 4 * torch.finfo(dtype).eps * right.norm()


def test_each_is_an_op_of_its_own() -> None:
    given, options, _ = drawn(1)
    program = capture(lambda *g: gradients(g, options, [True, True, True]), given).program
    assert sorted(names(program)) == ["aten.convolution_backward.default"] * 2 + ["aten.sum.dim_IntList"]


@pytest.mark.parametrize("libraries", ("auto", "never"))
def test_on_a_processor_they_are_called_where_that_may_be(libraries: str) -> None:
    given, options, _ = drawn(1)
    program = capture(lambda *g: gradients(g, options, [True, False, False]), given).program
    log = Log()
    stages(program, Options(target="cpu", libraries=libraries), log, ("torch_to_tensor",))
    told = [e.reason for e in log.events if e.rule == "library" and e.fired]
    assert len(told) == (libraries == "auto") and all("faster on a processor" in why for why in told)


@pytest.mark.parametrize("pad", (0, 1))
def test_points_that_a_single_tap_leaves_out_are_not_multiplied(pad: int) -> None:
    """Of 56 x 56 points every second in both directions has the tap, and the others are 0."""
    shapes = (32, 512, 28 + pad, 28 + pad), (32, 256, 56, 56), (512, 256, 1, 1)
    given = [torch.empty(s, device="meta", dtype=torch.bfloat16) for s in shapes]
    options = ([2, 2], [pad, pad], [1, 1], False, [0, 0], 1)
    call = lambda *g: gradients(g, options, [True, False, False])  # noqa: E731
    done = lowering(capture(call, given).program, Options(target="sm_90a", libraries="never"))
    *_, product, _ = done.loop.steps
    assert product.writes[0].type.static_shape == (32, 256, 28 + pad, 28 + pad)
