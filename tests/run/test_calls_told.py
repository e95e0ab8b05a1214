"""Ops of PyTorch that write where they are told to, among the temporaries of kernels and in results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import terrazzo
from terrazzo.ir.in_place import given_variant
from terrazzo.run.misfit import misfit
from terrazzo.run.plan import Plan

R = torch.randn


def between_kernels(x: Any, w: Any, v: Any) -> Any:
    return ((x * 2 @ w).relu() @ v).relu()


def in_results(x: Any, w: Any, v: Any) -> Any:
    """The second product is a result, in whose memory lies what the first is made of."""
    return (x.tanh() @ w).relu().mT @ x, v + 1


def turned(x: Any, w: Any, v: Any) -> Any:
    return (w.mT @ x.mT).mT.relu() @ v


def written_to_again(x: Any, w: Any, v: Any) -> Any:
    return (x @ w).index_add(0, torch.arange(3), w[:3]), v * 2


def seen_by_an_op(x: Any, w: Any, v: Any) -> Any:
    y, _ = torch.sort((x @ w), 0)
    return y.relu()


CASES: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "between kernels": (between_kernels, {"mm": "arena", "mm_1": "arena"}),
    "in results": (in_results, {"mm": "arena", "mm_1": "result"}),
    "turned": (turned, {"mm": "arena", "mm_1": "result"}),
    "written to again": (written_to_again, {"mm": "arena"}),
    "seen by an op": (seen_by_an_op, {"mm": "arena"}),
}


@pytest.mark.parametrize("case", CASES)
def test_products_are_written_where_they_are_needed(case: str, tmp_path: Path) -> None:
    fn, expected = CASES[case]
    x, w, v = R(256, 512), R(512, 512), R(512, 512)
    options = {"target": "cpu", "cache_dir": tmp_path}
    call = terrazzo.compile(fn, x, w, v, options=options)
    plan = call.compiled.plan
    told = [plan.slots[s.results[0]] for s in plan.steps if s.told and s.results[0] is not None]
    assert {slot.name: slot.kind for slot in told} == expected
    before = [t.clone() for t in (x, w, v)]
    found, again = call(x, w, v), call(x, w, v)
    torch.testing.assert_close(found, again, rtol=0, atol=0)
    torch.testing.assert_close(found, fn(x, w, v), rtol=1e-4, atol=1e-3)
    assert all(map(torch.equal, before, (x, w, v)))
    one, *_ = found if isinstance(found, tuple) else (found,)
    two, *_ = again if isinstance(again, tuple) else (again,)
    assert one.untyped_storage().data_ptr() != two.untyped_storage().data_ptr()
    assert Plan.from_json(plan.to_json()) == plan
    read = terrazzo.compile(fn, x, w, v, options=options)
    assert read.compiled.program is None, "it came from the cache"
    torch.testing.assert_close(read(x, w, v), found, rtol=0, atol=0)


def test_what_a_product_is_made_of_lies_in_a_result_that_is_not_there_yet(tmp_path: Path) -> None:
    """A training step of an MLP took 1.16 of eager's memory: nothing lay in the gradients before they were there."""

    def fn(x: Any, w: Any) -> Any:
        y = (x @ w).exp()
        return (y * 2) @ w

    x, w = R(512, 512), R(512, 512)
    plan = terrazzo.compile(fn, x, w, options={"target": "cpu", "cache_dir": tmp_path}).compiled.plan
    assert [s.told for s in plan.steps if not s.key] == [True, True]
    assert plan.arena + sum(s.bytes for s in plan.slots if s.kind != "input") < 5 * x.nbytes


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("aten.mm.default", "aten.mm.out"),
        ("aten.addmm.default", "aten.addmm.out"),
        ("aten.sum.dim_IntList", ""),  # its variant is called otherwise
        ("aten.index.Tensor", "aten.index.Tensor_out"),
        ("aten.convolution.default", ""),  # its variant copies
        ("aten._fft_c2c.default", ""),
        ("aten.sort.default", ""),  # it has two results
        ("aten.view.default", ""),
        ("aten.add_.Tensor", ""),
    ],
)
def test_ops_that_are_told_where_to_write(name: str, variant: str) -> None:
    assert given_variant(name) == variant


def test_a_plan_that_tells_an_op_that_makes_its_own_memory_is_none(tmp_path: Path) -> None:
    call = terrazzo.compile(
        seen_by_an_op, *(R(512, 512) for _ in range(3)), options={"target": "cpu", "cache_dir": tmp_path}
    )
    plan, program = call.compiled.plan, call.compiled.program
    assert misfit(plan, program) == ""
    edited = replace(plan, steps=tuple(replace(s, told=not s.key) for s in plan.steps))
    assert misfit(edited, program) == "aten.sort.default cannot be told where to write"
