"""The GPU computes what the simulator says it does: every kernel of the tests, and those written by hand."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.kernels import by_hand
from tests.kernels.programs import CASES, case

from terrazzo.interp import kernel as simulator
from terrazzo.interp.torch import from_numpy, to_numpy
from terrazzo.ir.dialects import kernel as k
from terrazzo.options import Options
from terrazzo.run.compiled import compile_program

pytestmark = pytest.mark.gpu


def target() -> str:
    from terrazzo.run.cuda import architecture

    return architecture(0)


def on_gpu(program: k.Program, inputs: dict[str, Any]) -> list[Any]:
    """The results of a program on the GPU."""
    compiled = compile_program(program, {}, Options(target=target()), "cuda:0")
    return [to_numpy(x.cpu()) for x in compiled([from_numpy(inputs[b.name]).cuda() for b in program.inputs])]


def agree(ours: Any, simulated: Any) -> None:
    """Equal bit for bit, but for sums and products in one rounding instead of two, and functions that the hardware
    approximates.
    """
    assert ours.shape == simulated.shape and ours.dtype == simulated.dtype
    if ours.dtype.kind in "iub" and ours.dtype.name not in ("bfloat16", "float16"):
        np.testing.assert_array_equal(ours, simulated)
        return
    a, b = ours.astype(np.float64), simulated.astype(np.float64)
    special = ~np.isfinite(b)
    assert np.array_equal(a[special], b[special], equal_nan=True)
    digits = {"bfloat16": 7, "float16": 10, "float64": 45}.get(ours.dtype.name, 18)
    assert np.abs(a - b)[~special].max(initial=0.0) <= 2.0**-digits * np.abs(b[~special]).max(initial=0.0)


@pytest.mark.parametrize("name", CASES)
def test_a_kernel(name: str) -> None:
    found = case(name, target())
    for ours, simulated in zip(on_gpu(found.program, found.inputs), found.simulated(), strict=True):
        agree(ours, simulated)


def test_a_kernel_of_another_thread() -> None:
    """Kernels are loaded in whichever thread compiles, though it has used no GPU before."""
    found = case(next(iter(CASES)), target())
    with ThreadPoolExecutor(1) as pool:
        compiled = pool.submit(compile_program, found.program, {}, Options(target=target()), "cuda:0").result()
    results = compiled([from_numpy(found.inputs[b.name]).cuda() for b in found.program.inputs])
    for ours, simulated in zip(results, found.simulated(), strict=True):
        agree(to_numpy(ours.cpu()), simulated)


@pytest.mark.parametrize("name", by_hand.MEANING)
def test_a_kernel_by_hand(name: str) -> None:
    if target() != "sm_90a":
        pytest.skip("they are for Hopper")
    program = by_hand.program(name)
    inputs = by_hand.inputs(program)
    agree(on_gpu(program, inputs)[0], simulator.run(program, inputs)[0])
