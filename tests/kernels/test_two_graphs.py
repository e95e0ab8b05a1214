"""Attention's training as torch.compile has it: two graphs, of which the second is given what the first kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from tests.kernels.test_training import tensors
from torch._subclasses.fake_tensor import unset_fake_temporarily

from terrazzo.front import dynamo
from terrazzo.front.fx import from_graph
from terrazzo.interp import kernel as simulator
from terrazzo.interp.torch import from_numpy, to_numpy
from terrazzo.ir.plan import Frame, Product, Reach
from terrazzo.options import Options
from terrazzo.pipelines import Lowering, lowering


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Lowering]:
    """What the graphs of torch.compile become on an H200; the simulator runs them."""
    found: list[Lowering] = []

    def graph(gm: Any, *_: Any) -> Any:
        with unset_fake_temporarily():
            program, constants = from_graph(gm, "forward")
            done = lowering(program, Options(target="sm_90a", libraries="never"))
        found.append(done)
        bound = {name: to_numpy(t.detach()) for name, t in constants.items()}
        taken = [b.name for b in done.loop.inputs if b.name not in bound]

        def call(*args: Any) -> tuple[torch.Tensor, ...]:
            inputs = {**bound, **{n: to_numpy(a.detach()) for n, a in zip(taken, args, strict=True)}}
            made = simulator.run(done.at("kernel"), inputs)
            return tuple(from_numpy(np.asarray(x)) for x in made)

        return make_boxed_func(call)

    monkeypatch.setattr(dynamo, "_graph", graph)
    torch._dynamo.reset()
    return found


def causal(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def plain(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def step(fn: Any, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    *given, gradient = args
    leaves = [x.detach().requires_grad_() for x in given]
    result = fn(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, gradient)]


@pytest.mark.parametrize(
    ("fn", "shapes"), [(causal, ((1, 4, 320, 64),) * 3), (plain, ((2, 8, 320, 64), (2, 4, 320, 64), (2, 4, 320, 64)))]
)
def test_the_second_graph_computes_no_softmax(fn: Any, shapes: Any, graphs: list[Lowering]) -> None:
    """It has four kernels with the first one's: results, rows of these and their gradients, and two of gradients."""
    args = tensors(*shapes, shapes[0])
    found = step(torch.compile(fn, backend=dynamo.terrazzo, dynamic=False), args)
    _, backward = graphs
    assert [len(x.at("kernel").steps) for x in graphs] == [1, 3]
    assert [sum(len(plan.all(Frame)) for _, plan in x.at("tile").plans) for x in graphs] == [1, 0]
    sums = sum(len(p.sites) for _, plan in backward.at("tile").plans for p in plan.all(Product))
    assert sums == 7
    assert fn is plain or all(plan.all(Reach) for _, plan in backward.at("tile").plans if plan.all(Product))
    numbers = math.prod(shapes[0][:3])
    kept = [b.type for b in backward.loop.inputs if b.type.dtype.size == 4]
    assert [t.numel for t in kept] == [numbers], "a number for each row"
    for ours, eager, exact in zip(found, step(fn, args), step(fn, [x.double() for x in args]), strict=True):
        error, allowed = (float((x.double() - exact).square().mean().sqrt()) for x in (ours, eager))
        assert error <= 2 * allowed
