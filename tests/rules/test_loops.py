"""Loops over time at once: parts that steps add, and products by one weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from terrazzo.bench.programs import programs
from terrazzo.bench.programs.registry import Gradients
from terrazzo.front.capture import capture
from terrazzo.interp import torch as interpreter
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.node import topological
from terrazzo.ir.verify import verify
from terrazzo.rewrite.rule import Log
from terrazzo.rules.torch_to_tensor.loops import parts_stacked, products_together, stacks_whole
from terrazzo.rules.torch_to_tensor.together import sums_together
from terrazzo.targets import target

torch = pytest.importorskip("torch")
FREE = replace(target("sm_90a").rates, byte=0.0)  # so that fewer kernels are always better


def count(program: Any, *names: str) -> int:
    return sum(isinstance(n, Aten) and n.name in names for n in topological(program.results))


def at_once(fn: Any, *inputs: Any) -> tuple[Any, Any, Log]:
    """The program as captured, and with its loops at once; both are run, in float64."""
    captured = capture(fn, inputs)
    log = Log()
    made = sums_together(parts_stacked(captured.program, log), log, FREE)
    made = stacks_whole(products_together(made, log, FREE), log)
    verify(made, "loops")
    given = {**captured.bound, **captured.given(inputs, {})}
    old, new = (interpreter.run(p, given, precise=True) for p in (captured.program, made))
    for a, b in zip(old, new, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, check_dtype=False)
    return captured.program, made, log


PRODUCTS = ("aten.mm.default", "aten.addmm.default")


@pytest.mark.parametrize("name", ["character_model", "unrolled", "attending_decoder", "convolutional_lstm", "elman"])
@pytest.mark.parametrize("training", [False, True])
def test_programs_mean_the_same(name: str, training: bool) -> None:
    torch.manual_seed(0)
    before, made, _ = at_once(*(x for y in programs_of(name, training) for x in y))
    assert count(made, *PRODUCTS) <= count(before, *PRODUCTS)


def programs_of(name: str, training: bool) -> tuple[tuple[Any], tuple[Any, ...]]:
    module, inputs = programs()[f"{name}_training" if training else name].made("f32", small=True)
    return (module,), inputs


class Cells(torch.nn.Module):  # type: ignore[misc]
    """Cells in a loop, over steps of a tensor in either order."""

    def __init__(self, kind: Any, backward: bool) -> None:
        super().__init__()
        self.cell, self.backward = kind(5, 6), backward

    def forward(self, x: Any) -> Any:
        state, steps = None, []
        for t in range(x.shape[1])[:: -1 if self.backward else 1]:
            state = self.cell(x[:, t], state)
            steps.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(steps, 1)


@pytest.mark.parametrize("kind", [torch.nn.LSTMCell, torch.nn.GRUCell, torch.nn.RNNCell])
@pytest.mark.parametrize("backward", [False, True])
def test_a_loop_of_cells(kind: Any, backward: bool) -> None:
    """One product for what all inputs contribute, one for each step, and a few for gradients by weights and inputs."""
    torch.manual_seed(0)
    for steps in (4, 9):
        x = torch.randn(3, steps, 5)
        _, made, _ = at_once(Cells(kind, backward), x)
        assert count(made, *PRODUCTS) == steps + 1
        _, made, log = at_once(Gradients(Cells(kind, backward)), x)
        assert count(made, *PRODUCTS) <= 2 * steps + 4
        assert not any(e.rule == "parts_stacked" for e in log.events)  # nobody asks for gradients by inputs

        def by_inputs(x: Any) -> Any:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(Cells(kind, backward)(x).square().sum(), x)[0]

        torch.manual_seed(1)
        cells = Cells(kind, backward)

        def gradient(x: Any, cells: Any = cells) -> Any:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(cells(x).square().sum(), x)[0]

        before, made, log = at_once(gradient, x)
        assert any(e.rule == "parts_stacked" and e.fired for e in log.events)
        assert count(made, "aten.select_scatter.default") == 0 < count(before, "aten.select_scatter.default")
        assert count(made, *PRODUCTS) <= 2 * steps + 2


def test_what_is_left_alone() -> None:
    w = torch.randn(4, 4)
    x = torch.randn(3, 5, 4)

    def chain(x: Any) -> Any:
        for _ in range(4):
            x = x @ w
        return x

    def mapped(x: Any) -> Any:
        return torch.relu(x[0] @ w) * torch.relu(x[1] @ w) * torch.relu(x[2] @ w)

    def returned(x: Any) -> Any:
        return x[0] @ w, x[1] @ w, x[2] @ w

    for fn, given in ((chain, x[0]), (mapped, x), (returned, x)):
        before, made, _ = at_once(fn, given)
        assert made is before, fn.__name__


def test_parts_that_overlap_lie_apart_or_begin_anywhere() -> None:
    def placed(x: Any, dim: int, n: int) -> Any:
        return torch.select_scatter(torch.zeros(3, 5, 4), x, dim, n)

    def fn(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
        total = placed(a, 1, 0) + placed(b, 1, 2) + placed(c, 1, -1)
        return total + placed(d, 1, 2) + placed(e, 0, 1) + f + torch.select_scatter(f, a, 1, 1)

    rows = [torch.randn(3, 4) for _ in range(4)]
    _, made, log = at_once(fn, *rows, torch.randn(5, 4), torch.randn(3, 5, 4))
    assert [e.reason for e in log.events if e.rule == "parts_stacked"] == ["3 parts of it are added"]
    assert count(made, "aten.select_scatter.default") == 3


def test_parts_of_several_lengths_are_no_stack() -> None:
    def fn(x: Any) -> Any:
        return torch.stack([x[0:2], x[4:6], x[2:4]]), torch.stack([x[1:3], x[3:5], x[4:6]])

    before, made, _ = at_once(fn, torch.randn(6, 4))
    assert made is before
