"""Random programs as kernels of a GPU, simulated, against the loops they came from."""

from __future__ import annotations

import os

import numpy as np
from hypothesis import HealthCheck, given, settings
from tests.harness import random_inputs, tensor_programs

from terrazzo.interp import kernel as simulator
from terrazzo.interp import loop
from terrazzo.ir.program import Program
from terrazzo.ir.text import parse, show
from terrazzo.options import Options
from terrazzo.pipelines import lowering

# More by hand: TERRAZZO_EXAMPLES=1000 pytest tests/kernels/test_random.py
EXAMPLES = int(os.environ.get("TERRAZZO_EXAMPLES", "60"))
slow = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=EXAMPLES == 60)


def agree(program: Program, target: str, fuse: bool = True) -> None:
    found = lowering(program, Options(target=target, fuse=fuse))
    inputs = random_inputs(program.inputs)
    kernels = found.at("kernel")
    for a, b in zip(simulator.run(kernels, inputs), loop.run(found.at("loop"), inputs), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=show(program))
    for ir in ("tile", "kernel"):
        assert parse(show(found.at(ir))) == found.at(ir)


@slow
@given(tensor_programs())
def test_fused(program: Program) -> None:
    agree(program, "sm_90a")


@slow
@given(tensor_programs(steps=5))
def test_unfused(program: Program) -> None:
    agree(program, "sm_75", fuse=False)
