"""Kernels for every GPU, simulated: they mean what the loops mean, and are as near to float64 as eager."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.programs import attention, budget, case, lowered, programs, refuse_others, swiglu

from terrazzo.bench.harness import accuracy
from terrazzo.interp import loop
from terrazzo.interp.costs import Costs
from terrazzo.interp.torch import call_numpy, from_numpy
from terrazzo.ir.dialects import kernel as k

# Where eager adds in float64 and we do not: how many roundings may go the same way.
IN_ORDER = {"cumsum": 10, "cumsum of the first axis": 10}
SIGNED = ("sum of all", "sum of very many")
"""Sums that are much smaller than what is added up on the way."""
LONG = ("softmax of long rows",)
"""Where eager's own error depends on how wide the vectors of its machine are, so that it is no measure."""


def flat(out: Any) -> list[torch.Tensor]:
    return list(out) if isinstance(out, tuple) else [out]


def exact(x: Any) -> Any:
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def rounding(name: str, x: torch.Tensor, best: torch.Tensor) -> float:
    """How far what is made of all of `x`, or of its rows, may be from float64, whatever machine eager runs on.

    In a tree of sums roundings go either way, so that they add up to the square root of its depth; and partial sums of
    n numbers of either sign are as large as the square root of n.
    """
    size, many = float(best.abs().max()), x.numel()
    if name in SIGNED:
        size = max(size, float(x.double().norm()))
    if name in LONG:
        size, many = float(best.double().square().mean().sqrt()), x.shape[-1]
    return IN_ORDER.get(name, math.sqrt(math.log2(max(many, 2)))) * 2.0**-24 * size


@pytest.mark.parametrize(("name", "target"), programs())
def test_a_kernel_means_what_its_loops_mean_and_costs_what_is_predicted(name: str, target: str) -> None:
    found, costs = case(name, target), Costs()
    ours = found.simulated(costs=costs)
    refuse_others(found.kernels, costs)
    for a, b in zip(ours, loop.run(found.lowering.at("loop"), found.inputs, call=call_numpy), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if not np.issubdtype(a.dtype, np.integer) and a.dtype != bool:
            a, b = (np.asarray(x, np.float64) for x in (a, b))
            assert (np.isfinite(a) == np.isfinite(b)).all() and np.array_equal(
                a[~np.isfinite(a)], b[~np.isfinite(b)], equal_nan=True
            )
            a, b = a[np.isfinite(a)], b[np.isfinite(b)]
            scale = np.abs(b).max(initial=0.0)
            digits = {"bfloat16": 7, "float16": 10, "float64": 50}.get(ours[0].dtype.name, 18)
            assert np.abs(a - b).max(initial=0.0) <= 2.0**-digits * scale
        else:
            np.testing.assert_array_equal(a, b)
    eager, best = flat(found.fn(*found.args)), flat(found.fn(*map(exact, found.args)))
    judged = accuracy([from_numpy(x) for x in ours], eager, best)
    if name in (*IN_ORDER, *LONG) or eager[0].numel() == 1:
        assert judged.ours <= rounding(name, found.args[0], best[0])
    else:
        assert judged.ok, judged.problem


@pytest.mark.parametrize(("name", "target"), programs())
def test_a_kernel_fits_its_machine(name: str, target: str) -> None:
    for kernel in case(name, target).kernels:
        assert 1 <= kernel.threads <= 1024 and kernel.grid >= 1
        assert kernel.shared_bytes <= budget(target)
        used = {s.instruction for s in k.walk(kernel.body) if isinstance(s, k.Multiply)}
        copies = [s for s in k.walk(kernel.body) if isinstance(s, k.AsyncCopy)]
        if target == "sm_75":
            assert used <= {"mma.m16n8k8.f32.f16"} and not copies


HALVES = (
    "linear of bfloat16",
    "matmul of bfloat16",
    "ragged matmul of bfloat16",
    "transposed matmul of bfloat16",
    "swiglu",
    "residual",
)


def multiplied(kernel: k.Kernel) -> list[k.Multiply | k.MultiplyAsync]:
    """The matrix instructions of a kernel."""
    return [s for s in k.walk(kernel.body) if isinstance(s, (k.Multiply, k.MultiplyAsync))]


@pytest.mark.parametrize(
    ("name", "target"),
    [p for p in programs() if p.values[0] in (*HALVES, "matmul of half", "gelu of linear of half", "bmm of half")],
)
def test_aligned_products_of_16_bits_run_on_tensor_cores(name: str, target: str) -> None:
    used = {s.instruction for kernel in case(name, target).kernels for s in multiplied(kernel)}
    kind = "bf16" if name in HALVES else "f16"
    if target == "sm_75":
        assert used == (set() if name in HALVES else {"mma.m16n8k8.f32.f16"})
    elif target == "sm_90a":
        assert used and all(re.fullmatch(rf"wgmma\.m64n\d+k16\.f32\.{kind}", i) for i in used)
    else:
        assert used == {f"mma.m16n8k16.f32.{kind}"}


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_swiglu_is_one_kernel_of_two_products(target: str) -> None:
    (kernel,) = case("swiglu", target).kernels
    assert len({s.d.name for s in multiplied(kernel)}) == 2


def test_a_long_sum_is_split_over_the_grid() -> None:
    part, whole = case("sum of very many", "sm_90a").kernels
    assert part.grid > 1 and whole.grid == 1
    assert part.writes[0] in whole.reads


@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
def test_attention_in_batches_writes_nothing_larger_than_its_scores(target: str) -> None:
    shape = (2, 8, 512, 64)
    kernels = lowered(attention, (torch.ones(shape),) * 3, target).lowering.loop.steps
    assert max(b.type.numel for kernel in kernels for b in kernel.writes) <= 2 * 8 * 512 * 512


def test_different_numbers_give_different_results() -> None:
    """The comparison above could not fail if inputs did not matter."""
    args = (torch.ones(32, 64).bfloat16(), torch.ones(96, 64).bfloat16(), torch.ones(96, 64).bfloat16())
    one, other = (lowered(swiglu, tuple(a * x for a in args), "sm_90a").simulated()[0] for x in (1, 2))
    assert (one != other).all()
