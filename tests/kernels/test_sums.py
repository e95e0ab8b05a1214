"""Long sums of a thread are sums of short ones: compared with float64 and with what PyTorch is off by."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.arrangements import F as CORES
from tests.kernels.arrangements import Product
from tests.kernels.programs import lowered
from tests.kernels.test_arrangements import derived, right

from terrazzo.interp import kernel as simulator
from terrazzo.ir.dialects import kernel as k


def text(rows: int, steps: str) -> str:
    """The sum over rows, of which each thread takes whole columns."""
    return f"""@tile
def f(x: f32[2, {rows}, 32]):
    with kernel('y', y=f32[2, 32]):
        for a0 in free(2):
            for a1 in free(32):
                for r0 in reduce({rows}):
                    acc0 <- sum(x[a0, r0, a1])
                y[a0, a1] = acc0
    with schedule("y", target="sm_90a"):
        a0 = grid(2)
        a1 = grid(1) * lane(32)
        with site("acc0"):
            r0 = {steps}
    return (y,)
"""


def sums(text: str) -> list[str]:
    """What a kernel calls the registers it adds up in."""
    (kernel,) = derived(text).steps
    return [s.place.name for s in k.walk(kernel.body) if isinstance(s, k.Declare)]


@pytest.mark.parametrize(
    ("rows", "steps", "registers"),
    [
        (64, "time(64)", ["acc0", "sum0"]),  # 8 of 8
        (64, "reg(64)", ["acc0", "sum0"]),
        (200, "time(25) * reg(8)", ["acc0", "sum0"]),
        (1024, "time(8) * reg(128)", ["acc0", "sum0", "sum1"]),  # 8 of 16 of 8
        (250, "time(32) * reg(8)", ["acc0", "sum0"]),  # and some are left
        (64, "time(1) * reg(64)", ["acc0", "sum0"]),
        (24, "time(3) * reg(8)", ["acc0"]),
        (37, "time(37)", ["acc0"]),  # which no loop of equal parts cuts
    ],
)
def test_a_long_sum_is_cut(rows: int, steps: str, registers: list[str]) -> None:
    right(text(rows, steps))
    assert sums(text(rows, steps)) == registers


def off(y: Any, exact: Any) -> float:
    return float(np.linalg.norm(y.astype(np.float64) - exact))


@pytest.mark.parametrize("sign", ["positive", "either"])
@pytest.mark.parametrize(("rows", "steps"), [(64, "time(64)"), (1024, "time(16) * reg(64)")])
def test_a_long_sum_is_as_exact_as_pytorchs(rows: int, steps: str, sign: str) -> None:
    """And better than one addition after the other."""
    x = np.random.default_rng(0).standard_normal((2, rows, 32)).astype(np.float32)
    x = np.abs(x) if sign == "positive" else x
    exact, chain = x.astype(np.float64).sum(1), np.zeros((2, 32), np.float32)
    for row in x.transpose(1, 0, 2):
        chain = chain + row
    (ours,) = simulator.run(derived(text(rows, steps)), {"x": x}, seed=1)
    assert off(ours, exact) < 2 * off(torch.from_numpy(x).sum(1).numpy(), exact)
    assert off(ours, exact) < off(chain, exact) / 1.5


def test_a_maximum_is_left_alone() -> None:
    largest = text(64, "time(64)").replace("sum(", "max(")
    right(largest)
    assert sums(largest) == ["acc0"]


def product(rows: int, tile: str) -> str:
    """A product of few columns, of which each thread of a warp has a tile."""
    m, n = (int(x) for x in tile.split("x"))
    return f"""@tile
def f(x: f32[{rows}, {4 * m}], w: f32[{rows}, {8 * n}]):
    with kernel('y', y=f32[{4 * m}, {8 * n}]):
        for a0 in free({4 * m}):
            for a1 in free({8 * n}):
                for r0 in reduce({rows}):
                    acc0 <- sum(mul(x[r0, a0], w[r0, a1]))
                y[a0, a1] = acc0
    with schedule("y", target="sm_90a"):
        a0 = grid(1) * block({4 * m})
        a1 = grid(1) * block({8 * n})
        r0 = time({rows // 16}, ring=2) * block(16)
        with site("acc0", on="fma.f32"):
            a0 = reg({m}) * lane(4)
            a1 = reg({n}) * lane(8)
            r0 = reg(16)
            x = smem(by="cp.async")
            w = smem(by="cp.async")
        with site("y"):
            a0 = like("acc0")
            a1 = like("acc0")
    return (y,)
"""


@pytest.mark.parametrize(
    ("rows", "tile", "cut"), [(128, "4x4", True), (256, "2x2", True), (64, "4x4", False), (128, "4x8", False)]
)
def test_long_products_of_small_tiles_are_cut(rows: int, tile: str, cut: bool) -> None:
    """Larger tiles leave no registers: arithmetic takes the time there."""
    right(product(rows, tile))
    assert any(x.startswith("sum") for x in sums(product(rows, tile))) is cut


def test_a_product_of_few_columns_is_as_exact_as_a_library_s() -> None:
    rng = np.random.default_rng(0)
    x, w = (np.abs(rng.standard_normal((1024, n))).astype(np.float32) for n in (8, 16))
    exact, chain = x.astype(np.float64).T @ w, np.zeros((8, 16), np.float32)
    for a, b in zip(x, w, strict=True):
        chain = chain + a[:, None] * b
    (ours,) = simulator.run(derived(product(1024, "2x2")), {"x": x, "w": w}, seed=1)
    assert off(ours, exact) < off(chain, exact) / 4


def test_large_tiles_of_products_are_left_alone() -> None:
    """They take arithmetic, not memory."""
    assert "acc0" in sums(Product(**CORES).text)
    assert not any(x.startswith("sum") for x in sums(Product(**CORES).text))


def test_what_is_made_of_places_ends_with_its_axis() -> None:
    """A long sum of few products is cut where no piece is whole, though a factor is made of places and not loaded:
    beyond the end it is 0, where it would be no number otherwise.
    """

    def fitted(x: torch.Tensor) -> torch.Tensor:
        t = torch.arange(x.shape[1], 0, -1.0)
        return x.mT.flatten(0, 1) @ torch.stack((1 / t, t, torch.ones_like(t), t.sqrt()), -1)

    torch.manual_seed(0)
    x = torch.randn(8, 3001, 3)
    found = lowered(fitted, (x,), "sm_90a")
    assert [s.name for s in found.lowering.at("tile").loop.steps] == ["mm_part", "mm"]
    (ours,) = found.simulated()
    t = torch.arange(3001, 0, -1.0, dtype=torch.float64)
    exact = x.double().mT.flatten(0, 1) @ torch.stack((1 / t, t, torch.ones_like(t), t.sqrt()), -1)
    np.testing.assert_allclose(np.asarray(ours), exact.numpy(), rtol=1e-5, atol=1e-3)
