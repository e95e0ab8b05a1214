"""Gradients of what is gathered from a tensor that was repeated first are added at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from terrazzo.front.capture import capture
from terrazzo.interp import torch as interpreter
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.node import topological
from terrazzo.ir.verify import verify
from terrazzo.rewrite.rule import Log
from terrazzo.rules.torch_to_tensor.scatters_summed import scatters_summed

torch = pytest.importorskip("torch")
Fn = Callable[..., Any]


def blocks(queries: int, alike: bool) -> tuple[Fn, tuple[Any, ...]]:
    """The gradient of blocks of keys that queries select, or groups of queries that select alike."""
    keys, index = torch.randn(2, 9, 4, 5), torch.randint(9, (2, 1 if alike else queries, 3, 1, 1))
    gradient = torch.randn(2, queries, 3, 4, 5)

    def fn(x: Any, i: Any, y: Any) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            many = x[:, None].expand(-1, queries, -1, -1, -1)
            return torch.autograd.grad(many.gather(2, i.expand(y.shape)), x, y)[0]

    return fn, (keys, index, gradient)


def summed(dims: Any, *shape: int, keepdim: bool = False, extent: int = 6) -> tuple[Fn, tuple[Any, ...]]:
    """Sums of what is added along dimension 2, to zeros of `extent` places there."""
    index, source = torch.randint(extent, shape), torch.randn(shape)

    def fn(i: Any, y: Any) -> Any:
        zeros = y.new_zeros(*shape[:2], extent, *shape[3:])
        return zeros.scatter_add(2, i, y).sum(dims, keepdim=keepdim)

    return fn, (index, source)


def partly() -> tuple[Fn, tuple[Any, ...]]:
    """Places beyond those that an index has stay zero."""
    index, source = torch.randint(6, (3, 2, 4)), torch.randn(3, 2, 4)
    return lambda i, y: y.new_zeros(5, 7, 6).scatter_add(2, i, y).sum(1), (index, source)


CASES = {
    "blocks of queries": blocks(7, False),
    "blocks of groups": blocks(7, True),
    "the first": summed([0], 3, 4, 5),
    "the last": summed([-1], 3, 4, 5, 2),
    "two around": summed([3, 1], 3, 4, 5, 2),
    "kept": summed([0, 3], 3, 4, 5, 2, keepdim=True),
    "all others": summed([0, 1], 3, 4, 5),
    "partly": partly(),
}


def made(fn: Fn, given: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    captured = capture(fn, given)
    program = scatters_summed(captured.program, Log())
    verify(program, "scatters_summed")
    return captured.program, program, {**captured.bound, **captured.given(given, {})}


@pytest.mark.parametrize("case", CASES)
def test_sums_are_what_they_were(case: str) -> None:
    torch.manual_seed(0)
    before, program, given = made(*CASES[case])
    (old,), (new,) = (interpreter.run(p, given, precise=True) for p in (before, program))
    torch.testing.assert_close(new, old, rtol=1e-12, atol=1e-12)
    (scatter,) = scatters(program)
    (result,) = program.results
    assert scatter.type.numel == result.type.numel
    assert all(n.name != "aten.sum.dim_IntList" or n in topological([scatter]) for n in calls(program))


def test_sixteen_bits_are_added_in_thirty_two() -> None:
    """As those of the sum were, of which none was rounded in between where a place was hit once."""
    torch.manual_seed(0)
    fn, (x, index, gradient) = blocks(400, False)
    before, program, given = made(fn, (x.bfloat16(), index, gradient.bfloat16()))
    (scatter,) = scatters(program)
    assert str(scatter.type.dtype) == "f32"
    exact, eager, ours = (
        interpreter.run(p, given, precise=precise)[0].double()
        for p, precise in ((before, True), (before, False), (program, False))
    )
    assert (ours - exact).abs().max() <= (eager - exact).abs().max()


def read_twice() -> tuple[Fn, tuple[Any, ...]]:
    fn = lambda i, y: (z := y.new_zeros(3, 4, 6).scatter_add(2, i, y)).sum(0) + z[0]  # noqa: E731
    return fn, summed([0], 3, 4, 5)[1]


def added_to_something() -> tuple[Fn, tuple[Any, ...]]:
    index, source = summed([0], 3, 4, 5)[1]
    return lambda x, i, y: x.scatter_add(2, i, y).sum(0), (torch.randn(3, 4, 6), index, source)


@pytest.mark.parametrize("case", [read_twice(), added_to_something(), summed([0, 2], 3, 4, 5)])
def test_others_stay_what_they_are(case: tuple[Fn, tuple[Any, ...]]) -> None:
    before, program, _ = made(*case)
    assert program is before


def calls(program: Any) -> list[Any]:
    return [n for n in topological(program.results) if isinstance(n, Aten)]


def scatters(program: Any) -> list[Any]:
    return [n for n in calls(program) if n.name == "aten.scatter_add.default"]
