"""Many products of small matrices, and of long ones with short rows: tiles as long as their sums, on CUDA cores where
those of tensor cores would multiply zeros mostly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import lowered

from terrazzo.front.capture import capture
from terrazzo.interp import kernel as simulator
from terrazzo.ir.parse import parse
from terrazzo.options import Options
from terrazzo.pipelines import Lowering, lowering


def told(fn: Any, *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """Why the kernels of a product are as they are."""
    given = tuple(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    return reasons(lowering(capture(fn, given, {}).program, Options(target="sm_90a", libraries="never")))


def reasons(done: Lowering) -> list[str]:
    """Why tiles are as they are."""
    return [e.reason for e in done.log.events if e.pass_name == "schedule" and e.rule == "tile"]


@pytest.mark.parametrize(
    ("batch", "size", "tile"),
    [
        (50000, 12, "16 x 32 x 12 on CUDA cores"),  # measured: 33 us, and 119 on tensor cores
        (20000, 20, "32 x 32 x 20 on CUDA cores"),  # 34 us, and 79
        (20000, 32, "wgmma"),  # 75 us on CUDA cores, and 54
    ],
)
def test_small_matrices_of_16_bits_are_priced_on_both(batch: int, size: int, tile: str) -> None:
    (why,) = told(torch.bmm, (batch, size, size), (batch, size, size))
    assert tile in why


def test_a_step_is_as_long_as_its_sum() -> None:
    (why,) = told(F.linear, (200000, 20), (20, 20), dtype=torch.float32)
    assert "32 x 32 x 20 on CUDA cores" in why
    (why,) = told(F.linear, (200000, 33), (20, 33), dtype=torch.float32)
    assert " x 20 on" not in why


PAIRS = """
@loop
def f(x: f32[{m}, 5, 5], w: f32[5, 5, 5]):
    with kernel('y', y=f32[{m}, 5]):
        for a0 in free({m}):
            for a1 in free(5):
                for r0, r1 in reduce(5, 5):
                    in0 = x[a0, r0, r1]
                    in1 = w[{w}, a1]
                    v0 = mul(in0, in1)
                    acc0 <- sum(v0)
                y[a0, a1] = acc0
    return (y,)
"""


def summed(m: int, places: str) -> Lowering:
    """The kernel of a sum over pairs of elements, whose weights are read in some order."""
    return lowering(parse(PAIRS.format(m=m, w=places)), Options(target="sm_90a"))


def test_steps_of_several_axes_are_one_where_memory_runs_through_them() -> None:
    """Instead of tiles of 128 x 128 in steps of 8, whose last 3 are zeros."""
    (why,) = reasons(summed(131072, "r0, r1"))
    assert "128 x 8 x 28 on CUDA cores" in why
    (why,) = reasons(summed(131072, "r1, r0"))
    assert " x 28 on" not in why  # which has no step that is the same all the way


def test_steps_of_several_axes_are_summed_rightly() -> None:
    torch.manual_seed(1)
    x, w = torch.randn(72, 5, 5), torch.randn(5, 5, 5)
    (ours,) = simulator.run(summed(72, "r0, r1").at("kernel"), {"x": x.numpy(), "w": w.numpy()})
    np.testing.assert_allclose(ours, torch.einsum("zij,ijk->zk", x.double(), w.double()).numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("k", "n"), [(64, 8), (25, 4), (512, 5)])
def test_few_columns_in_float32_have_tiles_of_their_own(k: int, n: int) -> None:
    """They are bound by memory: in tiles of 32 columns they took twice to three times as long as that by the model."""
    (why,) = told(F.linear, (131072, k), (n, k), dtype=torch.float32)
    assert why.startswith("128 x 8 x ") and "on CUDA cores" in why


def test_tiles_of_few_columns_are_right() -> None:
    torch.manual_seed(1)
    x, w = torch.randn(16640, 25), torch.randn(5, 25)  # some blocks for each processor: fewer have tiles of fewer rows
    found = lowered(lambda x, w: F.linear(x, w), (x, w), "sm_90a", fp32="split")
    assert "128 x 8 x 28" in reasons(found.lowering)[0]
    (ours,) = found.simulated()
    np.testing.assert_allclose(ours, (x.double() @ w.double().T).numpy(), rtol=1e-5, atol=2e-5)


def test_results_that_are_no_vectors_are_stored_by_neighbouring_lanes() -> None:
    """Threads of tiles of 64 x 64 have vectors of them, and would store their elements one by one."""
    (why,) = told(torch.bmm, (2000, 49, 32), (2000, 32, 49), dtype=torch.float32)
    assert "32 x 64 x 32 on CUDA cores" in why
    (why,) = told(torch.bmm, (2000, 64, 32), (2000, 32, 64), dtype=torch.float32)
    assert "64 x 64 x 16 on CUDA cores" in why


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "m", "k", "n"), [(150, 20, 20, 20), (100, 12, 12, 12), (60, 40, 7, 40), (40, 21, 5, 70)]
)
def test_short_sums_are_right(batch: int, m: int, k: int, n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(batch, m, k).to(dtype), torch.randn(batch, k, n).to(dtype)
    found = lowered(lambda x, y: torch.bmm(x, y), (x, y), "sm_90a")
    (ours,) = found.simulated()
    close = 1e-5 if dtype is torch.float32 else 2.0**-6
    np.testing.assert_allclose(np.asarray(ours, np.float64), (x.double() @ y.double()).numpy(), rtol=close, atol=close)
