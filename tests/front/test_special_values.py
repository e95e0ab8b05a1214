"""Functions of one element at infinities, NaN, zeros, the largest and the smallest numbers: what PyTorch gives in
float64, rounded.

Eager itself is no judge there: on a CPU its gelu of an infinity in float32 is NaN for a contiguous tensor and an
infinity for one with strides, as on a GPU and in float64. The sign of a zero that `max` gives is not looked at:
relu(-0.0) is -0.0 for eager on a CPU.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import terrazzo
from terrazzo.front.capture import capture
from terrazzo.interp import loop
from terrazzo.interp.torch import to_numpy
from terrazzo.options import Options
from terrazzo.pipelines import lowering

torch = pytest.importorskip("torch")
F = torch.nn.functional

PLAIN = """exp expm1 log log1p sqrt rsqrt sin tan atan sinh tanh asinh atanh erf erfc sigmoid reciprocal floor round
    sign square"""
ACTIVATIONS = """gelu silu mish softplus logsigmoid relu relu6 hardsigmoid hardswish leaky_relu elu selu celu softsign
    tanhshrink hardtanh"""
FUNCTIONS = {
    **{name: getattr(torch, name) for name in PLAIN.split()},
    **{name: getattr(F, name) for name in ACTIVATIONS.split()},
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softmax": lambda x: x[:, None].softmax(1),
}
UP_TO_SIGN = ("relu", "relu6", "hardtanh", "hardsigmoid", "hardswish")


def kind(x: float) -> object:
    """NaN, which infinity, which zero, or a number."""
    return "nan" if math.isnan(x) else x if math.isinf(x) else math.copysign(1, x) * 0.5 if x == 0 else "finite"


@pytest.mark.parametrize("target", ["cpu", "interpreter"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_special_values(dtype: str, target: str, tmp_path: Path) -> None:
    chosen = getattr(torch, dtype)
    about = torch.finfo(chosen)
    numbers = [math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, -1.0, 5.0, -5.0]
    x = torch.tensor([*numbers, about.max if dtype == "float64" else 4e4, -4e4], dtype=torch.float64).to(chosen)
    fast = terrazzo.compile(
        lambda x: [f(x) for f in FUNCTIONS.values()], x, options={"target": target, "cache_dir": tmp_path}
    )
    wrong = []
    for (name, f), found in zip(FUNCTIONS.items(), fast(x), strict=True):
        for at, mine, right in zip(
            x.tolist(), found.flatten().tolist(), f(x.double()).to(chosen).flatten().tolist(), strict=True
        ):
            zero = mine == right == 0 and name in UP_TO_SIGN
            if not zero and kind(mine) != kind(right):
                wrong.append((name, at, mine, right))
    assert not wrong


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_addcdiv_divides_first_on_a_gpu(device: str) -> None:
    """As eager mode does there, and not on a CPU: the other order overflows."""
    x, a, b = (torch.tensor([value]) for value in (0.0, 2e38, 4.0))
    captured = capture(lambda *given: torch.addcdiv(*given, value=2.0), [t.to(device) for t in (x, a, b)])
    done = lowering(captured.program, Options(target="cpu" if device == "cpu" else "sm_90a"))
    (found,) = loop.run(done.loop, {b.name: to_numpy(t) for b, t in zip(done.loop.inputs, (x, a, b), strict=True)})
    assert found.item() == (torch.addcdiv(x, a, b, value=2.0).item() if device == "cpu" else pytest.approx(1e38))


@pytest.mark.parametrize("target", ["cpu", "interpreter"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_a_place_that_is_no_number_gives_none(padding: str, target: str, tmp_path: Path) -> None:
    """Of cubic interpolation: an image has no zeros there."""
    x, places = torch.randn(1, 2, 5, 5), [[-1.0, 1.0], [math.nan, 0.0], [0.0, math.inf], [0.3, 1e10], [-0.4, 0.2]]
    grid = torch.tensor(places)[None, None]

    def cubic(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(x, grid, "bicubic", padding, align_corners=True)

    found = terrazzo.compile(cubic, x, grid, options={"target": target, "cache_dir": tmp_path})(x, grid)
    torch.testing.assert_close(found, cubic(x, grid), equal_nan=True)
