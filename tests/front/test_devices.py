"""A graph is on one device, though parts of it were made on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from terrazzo.errors import Limitation
from terrazzo.front.devices import device_of, gather_on_one, is_copied
from terrazzo.front.fx import Unheld, from_graph
from terrazzo.front.segments import in_segments, run_by_pytorch
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.node import topological

OFTEN = torch.arange(12.0).reshape(3, 4)  # as a plain attribute that nobody moved


def mask(x: torch.Tensor) -> torch.Tensor:
    """A mask that the CPU makes."""
    return x.masked_fill(~torch.zeros(x.shape).to(device=x.device, dtype=torch.bool), 1.0)


def steps(x: torch.Tensor) -> torch.Tensor:
    """Numbers of the CPU, computed there."""
    places = torch.arange(4, dtype=torch.float32)
    return x * (10000 ** (2 * torch.div(places, 2, rounding_mode="floor") / 4)).to(x.device)


def attribute(x: torch.Tensor) -> torch.Tensor:
    """A tensor from outside."""
    return x + OFTEN.sqrt().to(x.device)


def looked_up(x: torch.Tensor) -> torch.Tensor:
    """Places on the CPU."""
    return x[:, torch.arange(3) + 1]


def there_and_back(x: torch.Tensor) -> torch.Tensor:
    """What the GPU has, by way of the CPU."""
    return x + x.cpu().exp().to(x.device)


ONE = (mask, steps, attribute, looked_up, there_and_back)


def drawn(x: torch.Tensor) -> torch.Tensor:
    """The CPU's random numbers are others."""
    return x + torch.randn(3, 4).to(x.device)


def given_back(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A result is to be on the CPU."""
    ones = torch.ones(3, 4)
    return x + ones.to(x.device), ones


def sorted_there(x: torch.Tensor) -> torch.Tensor:
    """What an op of several results makes is picked of them."""
    return x + OFTEN.sort(-1).values.to(x.device)


def traced(fn: Callable[..., Any]) -> Any:
    """Its graph, of a tensor on a device that is not the CPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        return make_fx(fn)(torch.empty(3, 4, device="meta"))


@pytest.mark.parametrize("fn", ONE, ids=lambda fn: fn.__name__)
def test_what_only_the_gpu_reads_is_made_there(fn: Callable[..., Any]) -> None:
    graph = traced(fn)
    with pytest.raises(Limitation, match="on the CPU"):
        device_of(graph)
    gather_on_one(graph)
    assert device_of(graph) == "meta"
    program, _ = from_graph(graph, "gathered")
    ops = [x for x in topological(program.results) if isinstance(x, Aten)]
    assert not [x for x in ops if x.name == "aten._to_copy.default" and "device" in dict(x.kwargs)]


@pytest.mark.parametrize("fn", (drawn, given_back), ids=lambda fn: fn.__name__)
def test_what_would_be_another_stays(fn: Callable[..., Any]) -> None:
    graph = traced(fn)
    before = graph.code
    gather_on_one(graph)
    assert graph.code == before
    with pytest.raises(Limitation, match="on the CPU"):
        device_of(graph)


@pytest.mark.parametrize("fn", (drawn, given_back), ids=lambda fn: fn.__name__)
def test_pytorch_runs_what_is_on_the_cpu_and_the_rest_is_compiled(fn: Callable[..., Any]) -> None:
    graph = traced(lambda x: torch.utils._pytree.tree_leaves(fn(x * 2)))
    gather_on_one(graph)
    with pytest.raises(Unheld) as why:
        device_of(graph)
    ours: list[str] = []

    def compiled(part: Any) -> Any:
        assert device_of(part) == "meta"
        ours.extend(str(n.target) for n in part.graph.nodes if n.op == "call_function")
        return run_by_pytorch(part)

    run = in_segments(graph, why.value.nodes, compiled)
    x = torch.empty(3, 4, device="meta")
    found, right = run([x]), torch.utils._pytree.tree_leaves(fn(x))
    assert [(y.shape, y.device) for y in found] == [(y.shape, y.device) for y in right]
    assert ours == ["aten.mul.Tensor", "aten.add.Tensor"]


def test_what_is_made_of_what_stays_is_made_of_its_copy() -> None:
    """As of random numbers: where the graph says that something lies is where it does."""
    graph = traced(lambda x: [x + (torch.randn(5, 4)[:3] * 2).to(x.device)])
    gather_on_one(graph)
    with pytest.raises(Unheld) as why:
        device_of(graph)
    assert [str(n.target) for n in why.value.nodes] == ["aten.randn.default", "aten._to_copy.default"]

    def compiled(part: Any) -> Any:
        def run(args: list[Any]) -> Any:
            given = [n.meta["val"].device for n in part.graph.find_nodes(op="placeholder")]
            assert [y.device for y in args] == given
            return run_by_pytorch(part)(args)

        assert device_of(part) == "meta"
        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    (found,) = in_segments(graph, why.value.nodes, compiled)([torch.empty(3, 4, device="meta")])
    assert found.device.type == "meta" and found.shape == (3, 4)


def test_who_reads_what_is_on_the_cpu_runs_there_too() -> None:
    graph = traced(sorted_there)
    gather_on_one(graph)
    with pytest.raises(Unheld) as why:
        device_of(graph)
    assert [str(n.target) for n in why.value.nodes] == ["aten.sort.default", "aten._to_copy.default"]


def test_what_is_passed_on_may_be_anywhere() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        graph = make_fx(lambda x, y: (x + 1, y))(torch.empty(4, device="meta"), torch.empty(4))
    gather_on_one(graph)
    assert device_of(graph) == "meta"


def test_inputs_on_the_cpu_are_copied_first() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        graph = make_fx(lambda x, y: x + (y * 2).to(x.device))(torch.empty(4, device="meta"), torch.empty(4))
    gather_on_one(graph)
    assert device_of(graph) == "meta"
    x, y = graph.graph.find_nodes(op="placeholder")
    assert is_copied(y, "meta") and not is_copied(x, "meta")
    lines = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    assert lines[:2] == ["aten._to_copy.default", "aten.mul.Tensor"]


@pytest.mark.gpu
def test_graphs_with_parts_on_the_cpu_are_compiled() -> None:
    x = torch.randn(3, 4, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fn in ONE:
            compiled = torch.compile(fn, backend="terrazzo", dynamic=False, options={"strict": True})
            torch.testing.assert_close(compiled(x), fn(x))
        compiled = torch.compile(lambda x, y: x + (y * 2).to(x.device), backend="terrazzo", options={"strict": True})
        for _ in range(2):
            y = torch.randn(3, 4)
            torch.testing.assert_close(compiled(x, y), x + (y * 2).cuda())
