"""A product of which one kernel reads two halves is computed by that kernel, as two weights by themselves would be."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.hw.sass import sass
from tests.kernels.test_joined import lowered, r
from tests.kernels.test_quantised import as_exact_as_eager, numbers
from tests.rules.test_catalog import assert_same, example

from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.ir.text import parse, show
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.fusion.read_in_parts import read_in_parts
from terrazzo.targets.cuda.check import check

H = gpu("sm_90a")
M, K, N = 72, 128, 80


def geglu(x: Any, w: Any, b: Any) -> Any:
    value, gate = F.linear(x, w, b).chunk(2, -1)
    return value * F.gelu(gate)


def swiglu(x: Any, w: Any) -> Any:
    gate, value = F.linear(x, w).chunk(2, -1)
    return F.silu(gate) * value


def glu(x: Any, w: Any) -> Any:
    return F.glu(x @ w, -1)


CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "GEGLU with a bias": (geglu, (r(M, K), r(2 * N, K), r(2 * N))),
    "SwiGLU, in float16": (swiglu, tuple(r(*s, dtype=torch.float16) for s in ((M, K), (2 * N, K)))),
    "GLU of a batch": (glu, (r(3, M, K), r(K, 2 * N))),
}


def test_the_example() -> None:
    before, after = example(inspect.getdoc(read_in_parts) or "", "read_in_parts")
    found = read_in_parts(parse(before), Log(), lambda steps: float(len(steps)))
    assert show(found) == after
    assert_same(parse(before), found)


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("name", CASES)
def test_one_kernel_is_as_exact_as_eager(name: str, seed: int | None) -> None:
    fn, given = CASES[name]
    program = lowered(fn, given).at("kernel")
    assert len(program.steps) == 1
    check(program, H)
    (y,) = simulator.run(program, {b.name: numbers(x) for b, x in zip(program.inputs, given, strict=True)}, seed=seed)
    as_exact_as_eager(y, fn, given)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_is_as_exact_as_eager(name: str) -> None:
    import terrazzo

    fn, given = CASES[name]
    x = tuple(t.cuda() for t in given)
    torch._dynamo.reset()
    ours = terrazzo.compile(fn, *x, options={"libraries": "never"})(*x)
    as_exact_as_eager(ours.cpu().float().numpy(), fn, given)


def wide(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes)


@pytest.mark.parametrize(("m", "k", "n"), [(8192, 320, 1280), (512, 1280, 5120), (2048, 3072, 8192)])
def test_gated_layers_of_models(m: int, k: int, n: int, tmp_path: Path) -> None:
    (kernel,) = lowered(geglu, wide((m, k), (2 * n, k), (2 * n,))).at("kernel").steps
    found = "\n".join(sass(kernel, "sm_90a", tmp_path))
    assert "HGMMA" in found and "STL" not in found


def test_what_others_read_or_is_pinned_is_stored() -> None:
    given = wide((4096, 512), (4096, 512))
    assert [s.name for s in lowered(swiglu, given).at("loop").steps] == ["mul"]
    assert [s.name for s in lowered(swiglu, given, materialize=("mm",)).at("loop").steps] == ["mm", "mul"]

    def both(x: Any, w: Any) -> Any:
        y = F.linear(x, w)
        gate, value = y.chunk(2, -1)
        return y, F.silu(gate) * value

    assert [s.name for s in lowered(both, given).at("loop").steps] == ["mm", "mul"]


def test_halves_that_are_read_more_often_than_they_are_long_are_stored() -> None:
    """An outer product of rows would multiply each of them again."""

    def outer(x: Any, w: Any) -> Any:
        one, other = F.linear(x, w).chunk(2, -1)
        return one[:, :, None] * other[:, None, :]

    assert len(lowered(outer, wide((4096, 512), (64, 512))).at("loop").steps) == 2
