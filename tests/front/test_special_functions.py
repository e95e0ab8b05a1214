"""Special functions in float32, beside float64: no further from it than PyTorch's own, and without float64 in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.programs import lowered

from terrazzo.front.capture import capture
from terrazzo.interp import loop
from terrazzo.ir.text import show
from terrazzo.options import Options
from terrazzo.pipelines import lowering

torch.manual_seed(0)
UNIT = torch.cat(
    [torch.linspace(-1, 1, 4001), 1 - 2.0 ** torch.linspace(-24, 0, 2000), 2.0 ** torch.linspace(-40, 0, 999)]
)
WIDE = torch.cat(
    [torch.linspace(-30, 30, 4001), 2.0 ** torch.linspace(-20, 6.5, 2000), -(2.0 ** torch.linspace(3, 6, 500))]
)
SPECIAL = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.0, -1.0, 1.5, -80.0])
FUNCTIONS: dict[str, tuple[Any, torch.Tensor]] = {
    "erfinv": (torch.erfinv, UNIT),
    "i0": (torch.i0, WIDE),
    "i0e": (torch.special.i0e, WIDE),
    "i1": (torch.special.i1, WIDE),
    "i1e": (torch.special.i1e, WIDE),
}
CLOSE = 4.0
"""So many units of the last place are near enough, even where PyTorch on a CPU refines what it has."""


def off(found: Any, exact: Any) -> float:
    """How many units of float32's last place finite numbers are off, at most."""
    known = np.isfinite(exact) & (abs(exact) < np.finfo(np.float32).max)
    right = exact[known]
    return float((abs(found[known] - right) / np.spacing(np.maximum(abs(right), 1e-38).astype(np.float32))).max())


def ours(fn: Any, x: torch.Tensor) -> Any:
    found = lowered(fn, (x,), "sm_90a")
    return loop.run(found.lowering.loop, found.inputs)[0]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_as_exact_as_float32(name: str) -> None:
    fn, x = FUNCTIONS[name]
    found, exact = np.asarray(ours(fn, x), np.float64), fn(x.double()).numpy()
    assert off(found, exact) <= max(CLOSE, off(fn(x).double().numpy(), exact))
    assert np.array_equal(found[~np.isfinite(exact)], exact[~np.isfinite(exact)])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values_are_those_of_float64(name: str) -> None:
    fn, *_ = FUNCTIONS[name]
    np.testing.assert_allclose(np.asarray(ours(fn, SPECIAL)), fn(SPECIAL.double()).float().numpy(), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_is_computed_in_float64(name: str, dtype: torch.dtype) -> None:
    x = torch.empty(1 << 20, device="meta", dtype=dtype)
    done = lowering(capture(FUNCTIONS[name][0], (x,)).program, Options(target="sm_90a"))
    assert "f64" not in show(done.loop)
