"""A compiled call refuses tensors that it was not compiled for, and says which and why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import terrazzo
from terrazzo import UserError

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module", params=["cpu", "interpreter"])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """x[2, 3] + y[3], on every target."""

    def add(x: Any, y: Any) -> Any:
        return x + y

    options = {"target": request.param, "cache_dir": tmp_path_factory.mktemp("cache")}
    return terrazzo.compile(add, torch.ones(2, 3), torch.ones(3), options=options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: (torch.ones(2, 4), torch.ones(3)), "input x: compiled for shape [2, 3], got [2, 4]"),
        (lambda: (torch.ones(2, 3), torch.ones(1, 3)), "input y: compiled for shape [3], got [1, 3]"),
        (lambda: (torch.ones(2, 3), torch.tensor(1.0)), "input y: compiled for shape [3], got []"),
        (lambda: (torch.ones(2, 3).double(), torch.ones(3)), "input x: compiled for torch.float32, got torch.float64"),
        (
            lambda: (torch.ones(2, 3), torch.ones(3).bfloat16()),
            "input y: compiled for torch.float32, got torch.bfloat16",
        ),
        (lambda: (torch.ones(2, 3, device="meta"), torch.ones(3)), "input x: compiled for cpu, got a tensor on meta"),
        (
            lambda: (torch.ones(3, 2).T, torch.ones(3)),
            "input x: compiled for strides [3, 1], got [1, 2]; call .contiguous() on it",
        ),
        (
            lambda: (torch.ones(2, 3), torch.ones(6)[::2]),
            "input y: compiled for strides [1], got [2]; call .contiguous() on it",
        ),
        (lambda: (torch.ones(2, 3),), "called with other arguments than it was compiled for"),
        (lambda: ([torch.ones(2, 3)], torch.ones(3)), "argument x: compiled for a tensor, got"),
        (lambda: (torch.ones(2, 3), 1.0), "argument y: compiled for a tensor, got 1.0"),
    ],
)
def test_wrong_tensors(compiled: Any, make: Any, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        compiled(*make())


def test_what_only_looks_different_is_taken(compiled: Any) -> None:
    """Strides along dimensions of one element mean nothing."""

    def double(x: Any) -> Any:
        return x * 2

    one = terrazzo.compile(double, torch.ones(1, 3), options={"target": "interpreter"})
    assert one(torch.ones(3, 1).T).tolist() == [[2.0, 2.0, 2.0]]


TARGETS = ("cpu", "interpreter")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "pick",
    [
        lambda table, ids: table[ids],
        lambda table, ids: torch.nn.functional.embedding(ids, table),
        lambda table, ids: table.gather(0, ids[:, None].expand(2, 2)),
        lambda table, ids: table.index_select(0, ids),
    ],
    ids=("index", "embedding", "gather", "index_select"),
)
def test_an_index_out_of_range(pick: Any, target: str, tmp_path: Path) -> None:
    """It is an IndexError too, which programs written for PyTorch may expect."""
    options = {"cache_dir": tmp_path, "target": target}
    compiled = terrazzo.compile(pick, torch.randn(4, 2), torch.tensor([0, 1]), options=options)
    for kind in (UserError, IndexError):
        with pytest.raises(kind, match="out of range"):
            compiled(torch.randn(4, 2), torch.tensor([0, 4]))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "write",
    [
        lambda x, ids: x.scatter(0, ids[:, None], 9.0),
        lambda x, ids: x.scatter_add(0, ids[:, None].expand(2, 2), x[:2]),
        lambda x, ids: x.index_add(0, ids, x[:2]),
        lambda x, ids: x.index_put((ids,), x[:2]),
        lambda x, ids: x.index_reduce(0, ids, x[:2], "amax"),
        lambda x, ids: x.index_copy(0, ids, x[:2]),
        lambda x, ids: x.scatter(0, ids[:, None] * 3 - 2 * ids[:, None], 9.0),
        lambda x, ids: x.index_add(0, ids * 3 - 2 * ids, x[:2]),
        lambda x, ids: x.index_put((ids * 3 - 2 * ids,), x[:2]),
    ],
    ids=(
        *("scatter", "scatter_add", "index_add", "index_put", "index_reduce", "index_copy"),
        *("scatter, computed", "index_add, computed", "index_put, computed"),
    ),
)
def test_a_place_out_of_range_is_not_written_to_nowhere(write: Any, target: str, tmp_path: Path) -> None:
    options = {"cache_dir": tmp_path, "target": target}
    x = torch.randn(4, 2)
    compiled = terrazzo.compile(write, x, torch.tensor([0, 1]), options=options)
    assert torch.equal(compiled(x, torch.tensor([3, 1])), write(x, torch.tensor([3, 1])))
    for wrong in (4, -5):
        with pytest.raises(IndexError, match="out of range"):
            compiled(x, torch.tensor([0, wrong]))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "f",
    [
        lambda x, ids: x.gather(0, ids[:, None].expand(2, 2)),
        lambda x, ids: x.scatter_add(0, ids[:, None].expand(2, 2), x[:2]),
        lambda x, ids: x.index_add(0, ids, x[:2]),
        lambda x, ids: x.index_reduce(0, ids, x[:2], "prod"),
        lambda x, ids: x.index_copy(0, ids, x[:2]),
    ],
    ids=("gather", "scatter_add", "index_add", "index_reduce", "index_copy"),
)
def test_what_counts_no_index_from_the_end(f: Any, target: str, tmp_path: Path) -> None:
    x, ids = torch.randn(4, 2), torch.tensor([0, -1])
    with pytest.raises((RuntimeError, IndexError), match="out of"):
        f(x, ids)
    compiled = terrazzo.compile(f, x, ids.abs(), options={"cache_dir": tmp_path, "target": target})
    with pytest.raises(IndexError, match="out of range"):
        compiled(x, ids)


@pytest.mark.parametrize("bad", [0, 777, 39_999])
def test_one_index_of_many(bad: int, tmp_path: Path) -> None:
    """What one thread or lane notes is not lost by what the others do not."""

    def counts(table: Any, ids: Any) -> Any:
        return table[ids] * 2, torch.zeros(4).index_add(0, ids[:8], table[:8, 0]), table.gather(0, ids[:, None]) + 1

    table, ids = torch.randn(40, 3), torch.arange(40_000) % 4
    compiled = terrazzo.compile(counts, table, ids, options={"cache_dir": tmp_path, "target": "cpu"})
    for a, b in zip(compiled(table, ids), counts(table, ids), strict=True):
        torch.testing.assert_close(a, b)
    ids[bad] = 40
    for _ in range(20):
        with pytest.raises(IndexError, match="out of range"):
            compiled(table, ids)


@pytest.mark.parametrize(
    "choose",
    [lambda x: x.max(), lambda x: x.min(), lambda x: x.max(0), lambda x: x.min(0).indices],
    ids=("max", "min", "max of rows", "min of rows"),
)
def test_the_largest_of_nothing_is_an_error(choose: Any, tmp_path: Path) -> None:
    """PyTorch's own: it is no infinity."""
    nothing, options = torch.ones(0, 4), {"target": "interpreter", "cache_dir": tmp_path}
    with pytest.raises((RuntimeError, IndexError), match="Expected reduction dim"):
        terrazzo.compile(choose, nothing, options=options)(nothing)


def floor(a: Any, b: Any) -> Any:
    return a // b


def rest(a: Any, b: Any) -> Any:
    return a.to(torch.uint8) % b.to(torch.uint8)


def truncated(a: Any, b: Any) -> Any:
    return torch.div(a.int(), b, rounding_mode="trunc").sum()


def padded(a: Any, b: Any) -> Any:
    """Where there is only padding nothing is divided, though a kernel computes a quotient for every element."""
    return torch.nn.functional.pad((a + 1) // b, (2, 3)) * 2


def joined(a: Any, b: Any) -> Any:
    return torch.cat([torch.fmod(a, b), b % 3]).view(2, -1).sum(0)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("f", [floor, rest, truncated, padded, joined])
def test_a_whole_number_divided_by_zero(f: Any, target: str, tmp_path: Path) -> None:
    """As in eager on a CPU, which raises a RuntimeError that speaks of a ZeroDivisionError."""
    a, b = torch.arange(1, 9), torch.tensor([1, 2, 3, 1, 2, 3, 1, 2])
    compiled = terrazzo.compile(f, a, b, options={"cache_dir": tmp_path, "target": target})
    assert torch.equal(compiled(a, b), f(a, b))
    b[5] = 0
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        f(a, b)
    for kind in (UserError, ZeroDivisionError, RuntimeError):
        with pytest.raises(kind, match="a whole number is divided by zero"):
            compiled(a, b)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"target": "gpu"},
            "there is no target 'gpu'; did you mean 'cpu'? The known ones are auto, cpu, interpreter, sm_75, sm_80,",
        ),
        ({"fused": True}, "there is no option 'fused'; did you mean 'fuse'?"),
        ({"threads": "two"}, "option threads: expected a whole number, got 'two' of type str"),
    ],
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        terrazzo.compile(torch.relu, torch.ones(3), options=options)
