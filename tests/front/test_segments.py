"""A graph with operations that no program holds: PyTorch runs them, in their place, and the rest is compiled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from terrazzo.front import dynamo


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The ops of each graph that was compiled."""
    found: list[list[str]] = []
    whole = dynamo._graph

    def graph(gm: Any, *more: Any) -> Any:
        found.append([str(n.target) for n in gm.graph.nodes if n.op == "call_function"])
        return whole(gm, *more)

    monkeypatch.setattr(dynamo, "_graph", graph)
    monkeypatch.setattr(dynamo, "_said", set())
    torch._dynamo.reset()
    return found


def branches(x: Any) -> Any:
    y = torch.cond(x.sum() > 0, lambda x: (x.sin(),), lambda x: (x.cos(),), (x,))[0]
    return (y * 2).softmax(-1)


def looped(x: Any) -> Any:
    from torch._higher_order_ops.while_loop import while_loop

    _, y = while_loop(lambda i, x: i < 4, lambda i, x: (i + 1, x * 1.5), (torch.tensor(0), x.exp()))
    return y.tanh()


def scanned(x: Any) -> Any:
    from torch._higher_order_ops.scan import scan

    last, all_ = scan(lambda c, x: (c + x, (c * x).sin()), torch.zeros(x.shape[1]), x.exp())
    return last.relu(), all_.cos() * 3


def narrow(x: Any) -> Any:
    """Numbers of 8 bits, between what has more."""
    small = (x * 2).to(torch.float8_e4m3fn)
    return small.float() + 1, small, x


def picked(x: Any) -> Any:
    """Several results of one op, before and behind what no program holds."""
    values, places = x.topk(2)
    small = values.to(torch.float8_e5m2).float()
    return small + places, places, F.dropout(values, 0.5) + F.dropout(small, 0.5)


CASES: dict[str, tuple[Callable[..., Any], str]] = {
    "cond": (branches, r"cond at test_segments.py:\d+: it runs other operators or graphs"),
    "while_loop": (looped, r"while_loop at test_segments.py:\d+: it runs other operators or graphs"),
    "scan": (scanned, r"scan at test_segments.py:\d+: it runs other operators or graphs"),
    "narrow": (narrow, "tensors of torch.float8_e4m3fn are not supported"),
    "picked": (picked, "tensors of torch.float8_e5m2 are not supported"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_lies_between_is_compiled(name: str, graphs: list[list[str]]) -> None:
    fn, why = CASES[name]
    compiled = torch.compile(fn, backend="terrazzo")
    for sign in (1, -1):
        x = torch.rand(5, 6) * sign
        torch.manual_seed(0)
        wanted = fn(x)
        torch.manual_seed(0)
        if sign > 0:
            with pytest.warns(RuntimeWarning, match=f"(?s){why}.*what lies between is compiled"):
                found = compiled(x)
        else:
            found = compiled(x)
        for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (found, wanted)), strict=True):
            assert a.dtype is b.dtype and a.stride() == b.stride()
            torch.testing.assert_close(a.float(), b.float())
    assert len(graphs) > 1 and all(graphs)


def test_gradients_go_through_all_of_them(graphs: list[list[str]]) -> None:
    compiled = torch.compile(branches, backend="terrazzo")
    for sign in (1, -1):
        x = (torch.rand(5, 6) * sign).requires_grad_()
        with pytest.warns(RuntimeWarning, match="what lies between") if sign > 0 else nullcontext():
            (mine,) = torch.autograd.grad(compiled(x)[:, 0].sum(), x)
        torch.testing.assert_close(mine, torch.autograd.grad(branches(x)[:, 0].sum(), x)[0])


def test_pytorch_runs_a_graph_of_nothing_else(graphs: list[list[str]]) -> None:
    def fn(x: Any) -> Any:
        return x.to(torch.float8_e4m3fn)

    with pytest.warns(RuntimeWarning, match="PyTorch runs this graph"):
        found = torch.compile(fn, backend="terrazzo")(torch.rand(4))
    assert found.dtype is torch.float8_e4m3fn and len(graphs) == 1


def test_what_is_drawn_again_is_what_was_drawn(graphs: list[list[str]]) -> None:
    """Checkpoints with dropout: a gradient's segments take turned weights from each other as they were traced."""
    layers = [torch.nn.Linear(8, 8) for _ in range(2)]

    def fn(x: Any) -> Any:
        for layer in layers:
            x = x + checkpoint(lambda x, f=layer: F.dropout(torch.tanh(f(x)), 0.5), x, use_reentrant=False)
        return x

    x = torch.randn(16, 8, requires_grad=True)
    given = [x, *(p for layer in layers for p in layer.parameters())]

    def gradients(of: Callable[..., Any]) -> Any:
        torch.manual_seed(3)
        return torch.autograd.grad(of(x).square().sum(), given)

    with pytest.warns(RuntimeWarning, match="(?s)rng_state.*what lies between is compiled"):
        found = gradients(torch.compile(fn, backend="terrazzo"))
    torch.testing.assert_close(found, gradients(fn))


def test_a_graph_that_only_checks_still_does(graphs: list[list[str]]) -> None:
    """Its result is its input, so nothing is computed."""

    def fn(x: Any) -> Any:
        torch._assert_async(x.sum() > 0, "too small")
        return x

    compiled = torch.compile(fn, backend="terrazzo")
    with pytest.warns(RuntimeWarning, match="_assert_async"):
        compiled(torch.ones(4))
    assert graphs
    with pytest.raises(RuntimeError, match="too small"):
        compiled(-torch.ones(4))


def test_checks_come_last(graphs: list[list[str]]) -> None:
    """What is checked on the way is checked behind the one program."""

    def fn(x: Any, y: Any) -> Any:
        torch._assert_async((y < 4).all(), "too large")
        z = x.exp()
        torch._assert_async((z > 0).all(), "too small")
        return (y[:, None] * z).sum(0)

    compiled = torch.compile(fn, backend="terrazzo")
    x, y = torch.rand(3, 4), torch.tensor([0, 3, 2])
    with pytest.warns(RuntimeWarning, match="_assert_async"):
        torch.testing.assert_close(compiled(x, y), fn(x, y))
    whole, *inner = graphs
    assert len(inner) == 1 and len(inner[0]) == sum("_assert_async" not in op for op in whole)
    with pytest.raises(RuntimeError, match="too large"):
        compiled(x, y + 1)
