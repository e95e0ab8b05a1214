"""Ops of PyTorch that work in the memory of their operand, where nobody needs that any more."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import terrazzo
from terrazzo.ir.in_place import in_place_variant
from terrazzo.run.misfit import shared
from terrazzo.run.plan import Plan

R = torch.randn


def on_nothing(x: Any, i: Any, y: Any) -> Any:
    return torch.zeros(64, 512).index_add(0, i, y).relu()


def one_after_the_other(x: Any, i: Any, y: Any) -> Any:
    z = (x * 2).index_add(0, i, y)
    return z.index_add(0, i, y * 2), y.sum()


def operand_given_back(x: Any, i: Any, y: Any) -> Any:
    z = x * 2
    return z, z.index_add(0, i, y)


def operand_read_again(x: Any, i: Any, y: Any) -> Any:
    z = x * 3
    return z.index_add(0, i, y), z.index_add(0, i, -y)


def of_what_pytorch_made(x: Any, i: Any, y: Any) -> Any:
    return torch.sort(x, 0)[0].index_add(0, i, y)


def of_an_input(x: Any, i: Any, y: Any) -> Any:
    return x.index_add(0, i, y)


def to_an_input(x: Any, i: Any, y: Any) -> Any:
    x.index_add_(0, i, y)
    return y + 1


def to_an_input_that_is_read(x: Any, i: Any, y: Any) -> Any:
    before = x.sum()
    x.index_add_(0, i, y)
    return before, x.sum()


CASES: dict[str, tuple[Callable[..., Any], list[tuple[str, str]]]] = {
    "on nothing": (on_nothing, [("index_add", "full")]),
    "one after the other": (one_after_the_other, [("index_add", "mul"), ("index_add_1", "index_add")]),
    "an operand that is given back": (operand_given_back, []),
    "an operand that is read again": (operand_read_again, [("index_add", "mul")]),
    "what PyTorch made": (of_what_pytorch_made, [("index_add", "sort")]),
    "an input": (of_an_input, []),
    "an input that is changed": (to_an_input, [("index_add", "x")]),
    "an input that is changed and read": (to_an_input_that_is_read, [("index_add", "x")]),
}


def args() -> tuple[Any, ...]:
    return R(64, 512), torch.randint(0, 64, (2000,)), R(2000, 512)


@pytest.mark.parametrize("case", CASES)
def test_where_ops_work(case: str, tmp_path: Path) -> None:
    fn, expected = CASES[case]
    call = terrazzo.compile(fn, *args(), options={"target": "cpu", "cache_dir": tmp_path})
    slots = call.compiled.plan.slots
    assert [(s.name, slots[s.onto].name) for s in slots if s.onto is not None] == expected
    assert shared(call.compiled.plan) == "" and Plan.from_json(call.compiled.plan.to_json()) == call.compiled.plan
    ours = args()
    theirs = copy.deepcopy(ours)
    for _ in range(2):
        torch.testing.assert_close(call(*ours), fn(*theirs), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_plans_in_which_ops_work_elsewhere_are_refused(tmp_path: Path) -> None:
    plan = terrazzo.compile(
        one_after_the_other, *args(), options={"target": "cpu", "cache_dir": tmp_path}
    ).compiled.plan
    names = [s.name for s in plan.slots]
    for name, onto in (("index_add", "mul_1"), ("index_add_1", "mul"), ("index_add_1", "mul_1")):
        k = names.index(name)
        slot = replace(plan.slots[k], onto=names.index(onto))
        assert shared(replace(plan, slots=(*plan.slots[:k], slot, *plan.slots[k + 1 :])))


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("aten.index_add.default", "aten.index_add_.default"),
        ("aten.scatter_reduce.two", "aten.scatter_reduce_.two"),
        ("aten.index_put.default", "aten.index_put_.default"),
        ("aten.squeeze.dim", ""),  # which gives a view
        ("aten.sort.default", ""),
        ("aten.sub_.Tensor", ""),  # which is one
        ("aten.nothing.default", ""),
        ("", ""),
    ],
)
def test_what_has_a_variant(name: str, variant: str) -> None:
    assert in_place_variant(name) == variant
