"""What index_put and scatter_add add is added by another op of PyTorch on a GPU, where that is as exact and faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.rules.test_library import calls

from terrazzo.errors import IndexOutOfRange
from terrazzo.front.capture import capture
from terrazzo.interp import loop as interpreter
from terrazzo.interp.torch import call_numpy, from_numpy, to_numpy
from terrazzo.options import Options
from terrazzo.pipelines import lowering

EDGES, NODES = 6000, 900
put = torch.ops.aten.index_put.default


def rows(dtype: Any = torch.float32, width: int = 8) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Gradients of nodes, of edges that picked them."""
    index = torch.randint(-NODES, NODES, (EDGES,))
    return lambda x, i, v: x.index_put((i,), v, True), (
        numbers(NODES, width, dtype=dtype),
        index,
        numbers(EDGES, width, dtype=dtype),
    )


def wide() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Wide rows that are added to what is there."""
    index = torch.randint(0, 90, (5000,))
    rows = (numbers(n, 3584, dtype=torch.bfloat16) for n in (90, 5000))
    return lambda x, v, i: x.index_add(0, i, v), (*rows, index)


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


def of_tables() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Gradients of few rows of several large tables, which are zero before: nothing is moved."""
    tables, index = torch.arange(4)[:, None], torch.randint(0, 900, (4, 300))
    return lambda b, i, v: put(v.new_zeros(4, 900, 8), [b, i], v, True), (tables, index, numbers(4, 300, 8))


def of_pixels() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Gradients of what was read at pixels of images, whose channels are between."""
    at = torch.randint(0, 3, (EDGES,)), torch.randint(0, 40, (EDGES,)), torch.randint(-50, 50, (EDGES,))
    fn = lambda b, y, x, v: put(v.new_zeros(3, 8, 40, 50), [b, None, y, x], v, True)  # noqa: E731
    return fn, (*at, numbers(EDGES, 8))


def picked(dim: int = 1, width: int = 3584) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Gradients of rows of several tables, which were gathered by an index that is repeated along them."""
    index, source = torch.randint(0, 90, (2, 2000)), numbers(2, 2000, width, dtype=torch.bfloat16)
    if dim == 2:
        index, source = index[:, None], source.transpose(1, 2)
    else:
        index = index[..., None]
    shape = [90 if d == dim else n for d, n in enumerate(source.shape)]
    return lambda i, v: v.new_zeros(shape).scatter_add(dim, i.expand(source.shape), v), (index, source)


INDEX_ADD, EMBEDDING = "aten.index_add.default", "aten.embedding_dense_backward.default"
ADDED = {
    "float32": (rows(), INDEX_ADD),
    "int64": (rows(torch.int64), INDEX_ADD),
    "rows of clouds": (pairs(3), INDEX_ADD),
    "columns": (columns(), INDEX_ADD),
    "rows of tables": (of_tables(), INDEX_ADD),
    "pixels": (of_pixels(), INDEX_ADD),
    "wide rows to a sum": (wide(), EMBEDDING),
    "columns gathered": (picked(2, 5632), EMBEDDING),
}


@pytest.mark.parametrize("case", ADDED)
def test_rows_are_added_otherwise(case: str) -> None:
    (fn, given), name = ADDED[case]
    assert calls(fn, *given) == [name]
    assert calls(fn, *given, target="cpu") != [name]
    program = lowering(capture(fn, given).program, Options(target="sm_90a", fp32="split")).loop
    arrays = {b.name: to_numpy(x) for b, x in zip(program.inputs, given, strict=True)}
    (found,) = interpreter.run(program, arrays, call=call_numpy)
    exact = fn(*(x.double() if x.is_floating_point() else x for x in given))
    assert torch.equal(from_numpy(found).double(), exact.double())


@pytest.mark.parametrize(
    ("given", "name"), [(rows(torch.bfloat16, 256), "index_put"), (picked(), "scatter_add")], ids=["put", "gathered"]
)
def test_rows_beside_each_other_are_added_by_the_op_itself(given: Any, name: str) -> None:
    """On an H200 scatter_add was as fast as the fastest of the others, or faster, wherever one index is for a row."""
    assert calls(given[0], *given[1]) == [f"aten.{name}.default"]


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
