"""What one product sums is a factor of another wherever it lies: in the same registers, in others, in other lanes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kernels.chains import EVERY, Chain
from tests.kernels.test_arrangements import ADR, derived, inputs
from tests.kernels.test_layouts import ways

from terrazzo.interp import kernel as simulator
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.text import parse
from terrazzo.run.cache import Cache
from terrazzo.targets.cuda.emit import emit

HANDED = {name: chain for name, chain in EVERY.items() if chain.across == "m" or chain.second == "b" or chain.then}
"""Chains in which weights are not the first factor of the instruction they were summed by, or lie as no sums do."""


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("rows across, weights second, relu", ("acc0.b", "mov")),
        ("keys down, weights first, relu", ("acc0.a", "movmatrix")),
        ("keys down, weights second, relu", ("acc0.b", "movmatrix")),
        ("warps with keys down, then warpgroups", ("acc0.a", "movmatrix")),
        ("warps, then warpgroups", ("acc4.a", "registers")),
        ("warpgroups, then warps", ("acc4.a", "registers")),
    ],
)
def test_the_plan_says_how(name: str, way: tuple[str, str]) -> None:
    to, by = way
    assert [b for (_, t), b in ways(EVERY[name]).items() if t == to] == [by]
    (kernel,) = derived(EVERY[name].text).steps
    assert isinstance(kernel, k.Kernel)
    assert any(isinstance(s, k.TurnMatrix) for s in k.walk(kernel.body)) == (by == "movmatrix")


def test_one_matrix_at_a_time() -> None:
    """Of 32 keys by 8 heads, four."""
    (kernel,) = derived(ADR["9_decode"].read_text()).steps
    assert isinstance(kernel, k.Kernel)
    assert _times(kernel.body) == 4


def _times(body: tuple[object, ...]) -> int:
    """How many matrices each warp transposes in a step."""
    found = 0
    for s in body:
        if isinstance(s, k.For):
            found += _times(s.body) * (s.axis.extent if s.unrolled and isinstance(s.axis.extent, int) else 1)
        found += isinstance(s, k.TurnMatrix)
    return found


@pytest.mark.parametrize("name", HANDED)
def test_it_compiles(name: str, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings")
    from tests.kernels.test_nvrtc import compile_all

    chain: Chain = EVERY[name]
    compile_all([emit(s)[1] for s in derived(chain.text).steps], chain.target, Cache(tmp_path, 1 << 30))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*HANDED, "9_decode"])
def test_on_a_gpu(name: str) -> None:
    from tests.kernels.test_on_gpu import agree, on_gpu, target

    text = ADR[name].read_text() if name in ADR else EVERY[name].text
    if target() != "sm_90a":
        pytest.skip("they are for Hopper")
    given = inputs(parse(text))
    agree(on_gpu(derived(text), given)[0], simulator.run(derived(text), given)[0])
