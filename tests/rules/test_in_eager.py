"""How much memory eager mode takes, and what is put together in groups because of that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from terrazzo.front.capture import capture
from terrazzo.interp import torch as interpreter
from terrazzo.rewrite.rule import Log
from terrazzo.rules.torch_to_tensor.in_eager import chunks, most_in_eager
from terrazzo.rules.torch_to_tensor.loops import products_together
from terrazzo.rules.torch_to_tensor.together import sums_together
from terrazzo.targets import target

torch = pytest.importorskip("torch")
RATES = target("sm_90a").rates
SIZE = 4 * 64 * 64


def test_what_is_alive_counts() -> None:
    def views(x: Any) -> Any:
        y = x.exp()  # there until the last use of its view
        z = y.T.sin()
        return z.cos()

    def results(x: Any) -> Any:
        y = x.exp()
        return y.view(-1), x.sin().cos()

    def in_turn(x: Any) -> Any:
        a = x.exp()
        b = a.sum(0)
        c = x.sin()  # `a` is no more
        return c.sum(0), b

    for fn, most in ((views, 2 * SIZE), (results, 3 * SIZE), (in_turn, SIZE + 2 * 4 * 64)):
        assert most_in_eager(capture(fn, (torch.randn(64, 64),)).program) == most, fn.__name__


def test_groups_are_as_large_as_can_be() -> None:
    assert [[*x] for x in chunks(5, 2)] == [[0, 1, 2], [3, 4]]
    assert [len(x) for x in chunks(12, 1)] == [12] and len(chunks(3, 8)) == 3


def cell(x: Any, w: Any, u: Any, h: Any) -> Any:
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] @ w + h @ u)
    return h


@pytest.mark.parametrize(("rows", "products"), [(2, 1), (512, 2)])
def test_steps_at_once_take_no_more_than_eager_mode(rows: int, products: int) -> None:
    """The inputs of few rows are multiplied at once; of many, those of half the steps at a time."""
    steps, k, n = 12, 8, 64
    given = [torch.randn(s) for s in ((rows, steps, k), (k, n), (n, n), (rows, n))]
    captured, log = capture(cell, given), Log()
    made = products_together(captured.program, log, RATES)
    inputs = captured.given(given, {})
    old, new = (interpreter.run(p, inputs, precise=True)[0] for p in (captured.program, made))
    torch.testing.assert_close(old, new, rtol=1e-10, atol=1e-12)
    least, most = most_in_eager(captured.program), rows * steps * n * 4
    assert most_in_eager(made) < (least + most / products + 4 * rows * n * 4)
    assert [e.reason.startswith("in 2 groups") for e in log.events if e.fired][1:] == [True] * (products - 1)


@pytest.mark.parametrize(("rows", "together"), [(16, True), (2048, False)])
def test_sums_that_gain_little_stay_apart_where_all_steps_would_be_there(rows: int, together: bool) -> None:
    """A step's factors are no more when the next step begins; one below the other, all wait for the last."""
    steps, n = 8, 64
    moved = 2 * steps * rows * n * 4
    rates = replace(RATES, byte=2.2 * RATES.launch / moved)  # what is copied takes nearly as long as 5 launches

    def gradient(x: Any) -> Any:
        return sum(torch.sin(x[t]).T @ torch.cos(x[t]) for t in range(steps))

    given = (torch.randn(steps, rows, n),)
    captured, log = capture(gradient, given), Log()
    made = sums_together(captured.program, log, rates)
    assert [e.fired for e in log.events] == [True] + [False] * (not together)
    assert (most_in_eager(made) > 1.05 * most_in_eager(captured.program)) == together
    inputs = captured.given(given, {})
    old, new = (interpreter.run(p, inputs, precise=True)[0] for p in (captured.program, made))
    torch.testing.assert_close(old, new, rtol=1e-10, atol=1e-10)
