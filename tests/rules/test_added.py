"""What index_put adds is added by PyTorch's index_add on a GPU, which sorts nothing, where that is as exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.rules.test_library import calls

from terrazzo.errors import IndexOutOfRange
from terrazzo.front.capture import capture
from terrazzo.interp import loop as interpreter
from terrazzo.interp.torch import call_numpy
from terrazzo.options import Options
from terrazzo.pipelines import lowering

EDGES, NODES = 6000, 900
put = torch.ops.aten.index_put.default


def rows(dtype: Any = torch.float32) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Gradients of nodes, of edges that picked them."""
    index = torch.randint(-NODES, NODES, (EDGES,))
    return lambda x, i, v: x.index_put((i,), v, True), (
        numbers(NODES, 8, dtype=dtype),
        index,
        numbers(EDGES, 8, dtype=dtype),
    )


def numbers(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randint(-9, 9, shape).to(dtype)  # of which sums are exact


def pairs(tables: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The same of points of several clouds, whose neighbours are a row for each."""
    clouds, neighbours = torch.arange(tables)[:, None, None], torch.randint(-300, 300, (tables, 400, 5))
    given = numbers(tables, 300, 6), clouds, neighbours, numbers(tables, 400, 5, 6)
    return lambda x, b, i, v: x.index_put((b, i), v, True), given


def columns() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Of columns, and of one value for all of them."""
    index = torch.randint(0, NODES, (EDGES // 6, 6), dtype=torch.int32)
    return lambda x, i, v: put(x, [None, i], v, True), (numbers(7, NODES), index, numbers(1, 6))


ADDED = {
    "float32": rows(),
    "int64": rows(torch.int64),
    "rows of clouds": pairs(3),
    "columns": columns(),
}


@pytest.mark.parametrize("case", ADDED)
def test_rows_are_added_one_by_one(case: str) -> None:
    fn, given = ADDED[case]
    assert calls(fn, *given) == ["aten.index_add.default"]
    assert calls(fn, *given, target="cpu") == ["aten.index_put.default"]
    program = lowering(capture(fn, given).program, Options(target="sm_90a", fp32="split")).loop
    arrays = {b.name: x.numpy() for b, x in zip(program.inputs, given, strict=True)}
    (found,) = interpreter.run(program, arrays, call=call_numpy)
    assert torch.equal(torch.from_numpy(found), fn(*given))


@pytest.mark.parametrize("far", [NODES, -NODES - 1])
def test_an_index_that_is_out_of_range_is_an_error(far: int) -> None:
    fn, (x, index, values) = rows()
    program = lowering(capture(fn, (x, index, values)).program, Options(target="sm_90a", fp32="split")).loop
    index[77] = far
    arrays = {b.name: t.numpy() for b, t in zip(program.inputs, (x, index, values), strict=True)}
    with pytest.raises(IndexOutOfRange):
        interpreter.run(program, arrays, call=call_numpy)


def sets() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return lambda x, i, v: x.index_put((i,), v), rows()[1]


def apart() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Dimensions that are not beside each other."""
    i, j = torch.randint(0, 90, (2, EDGES))
    return lambda x, i, j, v: put(x, [i, None, j], v, True), (numbers(90, 4, 90), i, j, numbers(EDGES, 4))


def scattered() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Few of many rows along several dimensions, which would be moved."""
    i, j = torch.randint(0, 900, (2, EDGES))
    return lambda x, i, j, v: x.index_put((i, j), v, True), (numbers(900, 900, 4), i, j, numbers(EDGES, 4))


@pytest.mark.parametrize("case", [rows(torch.bfloat16), rows(torch.float16), sets(), apart(), scattered()])
def test_others_stay_what_they_are(case: tuple[Callable[..., Any], tuple[Any, ...]]) -> None:
    """PyTorch's index_put adds 16 bits in float32, and its index_add in 16 bits."""
    fn, given = case
    assert calls(fn, *given) == ["aten.index_put.default"]
