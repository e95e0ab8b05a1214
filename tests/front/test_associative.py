"""torch.associative_scan, captured and under torch.compile: what it combines is found, however that is written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.programs import lowered
from torch._higher_order_ops.associative_scan import (
    associative_scan,
    associative_scan_op,
    wrap_combine_fn_flat,
)
from torch.utils import _pytree as pytree

from terrazzo.errors import UserError
from terrazzo.front import dynamo
from terrazzo.front.capture import capture
from terrazzo.interp import kernel as simulator
from terrazzo.interp import torch as meaning
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.program import Input
from terrazzo.ir.recurrence import linear_recurrence
from terrazzo.ir.show import show
from terrazzo.ir.types import Type, f32


def recurrence(x: Any, y: Any) -> Any:
    return x[0] * y[0], y[0] * x[1] + y[1]


RECURRENCES: dict[str, Callable[[Any, Any], Any]] = {
    "as it is read": recurrence,
    "by functions": lambda x, y: (torch.mul(y[0], x[0]), torch.add(y[1], x[1].mul(y[0]))),
    "by one function": lambda x, y: (x[0] * y[0], torch.addcmul(y[1], x[1], y[0])),
    "subtracted": lambda x, y: (x[0] * y[0], y[1] - (-x[1]) * y[0]),
    "scaled": lambda x, y: (x[0] * y[0], torch.add(y[1], x[1] * y[0] * 0.5, alpha=2)),
}
OTHERS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "sum": (lambda x, y: x + y, "aten.cumsum"),
    "product": (lambda x, y: y * x, "aten.cumprod"),
    "maximum": (torch.maximum, "aten.cummax"),
    "minimum": (lambda x, y: torch.min(y, x), "aten.cummin"),
    "log-sum-exp": (torch.logaddexp, "aten.logcumsumexp"),
}
UNKNOWN: dict[str, Callable[[Any, Any], Any]] = {
    "hypotenuse": lambda x, y: torch.sqrt(x * x + y * y),
    "sum and half a product": lambda x, y: x + y + 0.5 * x * y,
}


def operands(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.rand(shape) * 2 - 1, torch.randn(shape)


def generic(combine: Any, dim: int, reverse: bool = False) -> Callable[..., Any]:
    def fn(*xs: Any) -> Any:
        given = xs[0] if len(xs) == 1 else xs
        return associative_scan(combine, given, dim, reverse=reverse, combine_mode="generic")

    return fn


def whole(combine: Any) -> Callable[..., Any]:
    """The operator itself, as a GPU has it (`combine_mode="pointwise"`), along the first dimension."""

    def fn(*xs: Any) -> Any:
        leaves, spec = pytree.tree_flatten(xs if len(xs) > 1 else xs[0])
        named = partial(wrap_combine_fn_flat, combine_fn=combine, spec=spec, num_leaves=len(leaves))
        return associative_scan_op(named, leaves, additional_inputs=())

    return fn


def leaves(x: Any) -> list[Any]:
    return list(pytree.tree_leaves(x))


def close(found: Any, eager: Any, exact: Any) -> None:
    """The error is at most twice that of eager mode."""
    for ours, theirs, right in zip(leaves(found), leaves(eager), leaves(exact), strict=True):
        scale = max(float(right.abs().max()), 1.0)
        least = 4 * scale * torch.finfo(torch.float32).eps
        assert ours.shape == right.shape
        assert (
            bool(right.isfinite().all())
            and float((ours - right).abs().max()) <= 2 * float((theirs - right).abs().max()) + least
        )


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The ops of each graph that was compiled."""
    found: list[list[str]] = []
    compiled = dynamo._graph

    def graph(gm: Any, *more: Any) -> Any:
        found.append([str(n.target) for n in gm.graph.nodes if n.op == "call_function"])
        return compiled(gm, *more)

    monkeypatch.setattr(dynamo, "_graph", graph)
    monkeypatch.setattr(dynamo, "_said", set())
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize("name", RECURRENCES)
def test_a_recurrence_is_found_however_it_is_written(name: str) -> None:
    given = operands(3, 13)
    fn = generic(RECURRENCES[name], 1)
    program = capture(fn, given).program
    assert "terrazzo.linear_recurrence" in show(program) and "aten.cat" not in show(program)
    found = meaning.run(program, dict(zip(program.input_names, given, strict=True)))
    close(found, fn(*given), fn(*(x.double() for x in given)))


@pytest.mark.parametrize("name", OTHERS)
def test_scans_of_pytorch_are_found(name: str) -> None:
    combine, op = OTHERS[name]
    given = operands(3, 13)[1]
    fn = generic(combine, -1)
    program = capture(fn, (given,)).program
    assert op in show(program) and "aten.cat" not in show(program)
    close(meaning.run(program, {program.input_names[0]: given}), fn(given), fn(given.double()))


@pytest.mark.parametrize("name", UNKNOWN)
def test_others_are_a_few_steps_over_all_elements(name: str) -> None:
    given = operands(100, 2)[1]
    fn = generic(UNKNOWN[name], 0)
    program = capture(fn, (given * 0.1,)).program
    assert show(program).count("aten.cat") == 7  # for 100 elements
    found = meaning.run(program, {program.input_names[0]: given * 0.1})
    close(found, fn(given * 0.1), fn(given.double() * 0.1))


def test_nothing_else_is_taken_for_a_recurrence() -> None:
    for combine in (
        lambda x, y: (x[0] * y[0], x[0] * y[1] + x[1]),  # of the other direction
        lambda x, y: (x[0] * y[0], y[0] * x[1] + 2 * y[1]),
        lambda x, y: (x[0] * y[0], y[0] * y[0] * x[1] + y[1]),
    ):
        program = capture(generic(combine, 0), operands(4, 3)).program
        assert "linear_recurrence" not in show(program)
    assert "aten.cumsum" not in show(capture(generic(lambda x, y: x | y, 0), (torch.rand(4, 3) > 0.5,)).program)


@pytest.mark.parametrize("length", [1, 2, 5, 12])
@pytest.mark.parametrize("reverse", [False, True])
def test_trees_of_dynamo_are_found(length: int, reverse: bool, graphs: list[list[str]], recwarn: Any) -> None:
    """One element has no tree; two and more have, with rests in it."""
    given = operands(2, length, 3)
    fn = generic(recurrence, 1, reverse)
    found = torch.compile(fn, backend="terrazzo", options={"target": "interpreter"})(*given)
    assert ("terrazzo.linear_recurrence.default" in graphs[0]) == (length > 1)
    assert not [x for x in graphs[0] if "slice" in x or "cat" in x]
    assert not [w for w in recwarn if str(w.message).startswith("terrazzo:")]
    close(found, fn(*given), fn(*(x.double() for x in given)))


def test_several_trees_and_other_maps(graphs: list[list[str]]) -> None:
    """Two scans of the same tensors, one function that is not known, and a map that is no scan."""

    def fn(a: Any, b: Any) -> Any:
        first = generic(recurrence, 0)(a, b)
        second = generic(lambda x, y: (x[0] + y[0], torch.maximum(x[1], y[1])), 0)(a, b)
        mapped = torch.vmap(lambda x, y: (x * y).sum())(a, b)
        return first, second, mapped, generic(UNKNOWN["hypotenuse"], 0)(b)

    given = operands(7, 3)
    found = torch.compile(fn, backend="terrazzo", options={"target": "interpreter"})(*given)
    names = [x.removeprefix("aten.").removesuffix(".default") for x in graphs[0]]
    assert {"terrazzo.linear_recurrence", "cumprod", "cumsum", "cummax"} <= set(names)
    assert sum("cat" in x for x in names) == 3
    close(found, fn(*given), fn(*(x.double() for x in given)))


@pytest.mark.parametrize("combine", [recurrence, UNKNOWN["hypotenuse"]])
def test_the_operator_is_compiled(combine: Any, graphs: list[list[str]], recwarn: Any) -> None:
    given = operands(6, 3) if combine is recurrence else operands(6, 3)[1:]
    found = torch.compile(whole(combine), backend="terrazzo", options={"target": "interpreter"})(*given)
    assert not [w for w in recwarn if str(w.message).startswith("terrazzo:")]
    assert len(graphs) == 1
    eager = generic(combine, 0)
    close(found, eager(*given), eager(*(x.double() for x in given)))


def test_gradients_are_a_recurrence_from_the_end(graphs: list[list[str]]) -> None:
    fn = lambda a, b: generic(recurrence, 0)(a, b)[1]  # noqa: E731

    def gradients(fn: Any, dtype: Any) -> Any:
        a, b = (x.to(dtype).requires_grad_() for x in operands(9, 3))
        weights = torch.arange(27, dtype=dtype).reshape(9, 3)
        return torch.autograd.grad((fn(a, b) * weights).sum(), (a, b))

    compiled = torch.compile(fn, backend="terrazzo", options={"target": "interpreter"})
    close(gradients(compiled, torch.float32), gradients(fn, torch.float32), gradients(fn, torch.float64))
    assert graphs[1].count("terrazzo.linear_recurrence.default") == 1


def test_the_operator_says_its_gradients() -> None:
    a, b = (x.double().requires_grad_() for x in operands(2, 5, 3))
    assert torch.autograd.gradcheck(lambda a, b: linear_recurrence()(a, b, 1), (a, b))


@pytest.mark.parametrize(
    ("shape", "dim", "kernels"), [((3, 2051), 1, 1), ((600, 70), 0, 1), ((2, 100, 40), 1, 1), ((50001,), 0, 3)]
)
def test_threads_share_a_recurrence(shape: tuple[int, ...], dim: int, kernels: int) -> None:
    """In lanes, warps and tiles, whose order makes a difference; in a kernel whose steps are those of a scan, or one
    for pieces of a long row.
    """
    given = operands(*shape)
    fn = lambda a, b: generic(recurrence, dim)(a, b)[1]  # noqa: E731
    found = lowered(fn, given, "sm_90a")
    assert len(found.kernels) == kernels and any(e.rule == "scan" and e.fired for e in found.lowering.log.events)
    (ours,) = simulator.run(found.program, found.inputs)
    close(torch.from_numpy(np.array(ours)), fn(*given), fn(*(x.double() for x in given)))


@pytest.mark.parametrize(("shape", "dim"), [((3, 70), 1), ((3, 70, 20), 1), ((5000,), 0)])
def test_a_processor_takes_the_steps_in_order(shape: tuple[int, ...], dim: int) -> None:
    import terrazzo

    given = operands(*shape)
    fn = lambda a, b: generic(recurrence, dim)(a, b)[1]  # noqa: E731
    close(terrazzo.compile(fn, *given)(*given), fn(*given), fn(*(x.double() for x in given)))


def test_the_first_factor_is_not_looked_at() -> None:
    import terrazzo

    a, b = operands(3, 70)
    a[:, 0] = torch.tensor([torch.inf, torch.nan, -torch.inf])
    fn = lambda a, b: generic(recurrence, 1)(a, b)[1]  # noqa: E731
    close(terrazzo.compile(fn, a, b)(a, b), fn(a, b), fn(a.double(), b.double()))
    found = lowered(fn, (a, b), "sm_90a")
    close(torch.from_numpy(simulator.run(found.program, found.inputs)[0]), fn(a, b), fn(a.double(), b.double()))


def test_a_recurrence_is_not_reduced() -> None:
    """What reductions combine in any order, where this one would be another value."""
    given = [Input(name, Type(f32, (4, 3))) for name in "ab"]
    with pytest.raises(UserError, match="recurrence does not commute; scan it"):
        t.reduce("recurrence", given, [0])
