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
from terrazzo.interp.torch import call_numpy, from_numpy, to_numpy
from terrazzo.ir.plan import Frame, Product, Reach
from terrazzo.options import Options
from terrazzo.pipelines import Lowering, lowering
from terrazzo.rules.loop.fusion import again


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
            made = simulator.run(done.at("kernel"), inputs, call=call_numpy)
            return tuple(from_numpy(np.asarray(x)) for x in made)

        return make_boxed_func(call)

    monkeypatch.setattr(dynamo, "_graph", graph)
    torch._dynamo.reset()
    return found


def causal(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def plain(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def written_out(q: Any, k: Any, v: Any) -> Any:
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(later, -torch.inf)
    return torch.softmax(scores.float(), -1).to(q.dtype) @ v


def step(fn: Any, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    *given, gradient = args
    leaves = [x.detach().requires_grad_() for x in given]
    result = fn(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, gradient)]


@pytest.mark.parametrize(
    ("fn", "shapes", "dtype"),
    [
        (causal, ((1, 4, 320, 64),) * 3, torch.bfloat16),
        (causal, ((1, 4, 320, 64),) * 3, torch.float16),
        (plain, ((2, 8, 320, 64), (2, 4, 320, 64), (2, 4, 320, 64)), torch.bfloat16),
        (written_out, ((1, 4, 320, 64),) * 3, torch.bfloat16),
        (written_out, ((1, 4, 320, 64),) * 3, torch.float16),
    ],
)
def test_the_second_graph_computes_no_softmax(
    fn: Any, shapes: Any, dtype: torch.dtype, graphs: list[Lowering], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has four kernels with the first one's: results, rows of these and their gradients, and two of gradients. Where
    attention is written out, three more have the means of values, and how far values are from these.
    """
    monkeypatch.setattr(again, "LARGEST", 0)
    args = tensors(*shapes, shapes[0], dtype=dtype)
    found = step(torch.compile(fn, backend=dynamo.terrazzo, dynamic=False, options={"target": "sm_90a"}), args)
    _, backward = graphs
    exactly = fn is written_out
    assert [len(x.at("kernel").steps) for x in graphs] == [1 + 3 * exactly, 3]
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_values_have_in_common_is_lost_in_no_gradient(dtype: torch.dtype, graphs: list[Lowering]) -> None:
    """What keys have in common is multiplied by sums of rows of scores' gradients, which are of what values and
    gradients have in common where weights are rounded: gradients of queries were off by 4 times as much as eager's.
    """

    def weights_once(q: Any, k: Any, v: Any) -> Any:
        return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1, dtype=torch.float32).to(q.dtype) @ v

    q, k, v, gradient = tensors(*((2, 2, 128, 32),) * 4, dtype=torch.float32)
    common = torch.randn(2, 32)
    args = [x.to(dtype) for x in (0.2 * q, 0.2 * k + 2 * common[0], 0.2 * v + common[1], gradient)]
    run = torch.compile(weights_once, backend=dynamo.terrazzo, dynamic=False, options={"target": "sm_90a"})
    found, eager, exact = step(run, args), step(weights_once, args), step(weights_once, [x.double() for x in args])
    for ours, theirs, right in zip(found, eager, exact, strict=True):
        error, allowed = (float((x.double() - right).norm()) for x in (ours, theirs))
        assert error <= 2 * allowed


def biased(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5 + bias, -1) @ v


def test_of_scores_with_a_bias_that_learns_one_gradient_is_stored(
    graphs: list[Lowering], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the scores, which is summed over the batch, in 16 bits; chains compute it again, and the weights."""
    monkeypatch.setattr(again, "SURE", 9.0)
    args = tensors((2, 2, 192, 64), (2, 2, 192, 64), (2, 2, 192, 64), (1, 2, 192, 192), (2, 2, 192, 64))
    found = step(torch.compile(biased, backend=dynamo.terrazzo, dynamic=False, options={"target": "sm_90a"}), args)
    forward, backward = (x.at("tile").loop.steps for x in graphs)
    size = 2 * 2 * 192 * 192
    assert not [b for s in forward for b in s.writes if b.type.numel >= size]
    assert [b.type.dtype.name for s in backward for b in s.writes if b.type.numel >= size] == ["bf16"]
    assert sum(len(p.sites) for _, plan in graphs[1].at("tile").plans for p in plan.all(Product)) == 7 + 2
    for ours, eager, exact in zip(found, step(biased, args), step(biased, [x.double() for x in args]), strict=True):
        error, allowed = (float((x.double() - exact).square().mean().sqrt()) for x in (ours, eager))
        assert error <= 2 * allowed


@pytest.mark.parametrize("heads", [8, 4])
def test_chains_of_few_tokens_are_judged_as_the_kernels_that_they_become(heads: int, graphs: list[Lowering]) -> None:
    """The gradients of keys and of values share what they compute: two chains take longer than what is stored, and the
    kernel of both does not.
    """

    def few(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    args = tensors((1, 8, 192, 64), (1, heads, 192, 64), (1, heads, 192, 64), (1, 8, 192, 64))
    found = step(torch.compile(few, backend=dynamo.terrazzo, dynamic=False, options={"target": "sm_90a"}), args)
    assert [len(x.at("kernel").steps) for x in graphs] == [1, 3]
    for ours, eager, exact in zip(found, step(few, args), step(few, [x.double() for x in args]), strict=True):
        error, allowed = (float((x.double() - exact).square().mean().sqrt()) for x in (ours, eager))
        assert error <= 2 * allowed


def kept(seeds: np.ndarray, shape: tuple[int, ...], part: float) -> torch.Tensor:
    """Which weights are kept: a hash of 32 bits of the place of each, in 64."""
    low = (1 << 32) - 1
    first, second = (int(x) & low for x in seeds)
    rows = np.arange(math.prod(shape[:-1]), dtype=np.uint64).reshape(*shape[:-1], 1)
    x = (rows * np.uint64(2654435769) + np.arange(shape[-1], dtype=np.uint64) + np.uint64(first)) & np.uint64(low)
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D)) & np.uint64(low)
    x ^= np.uint64(second)
    x = ((x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B)) & np.uint64(low)
    x ^= x >> np.uint64(16)
    return torch.from_numpy(((x + np.uint64(1 << 31)) & np.uint64(low)) >= np.uint64(round(part * (1 << 32))))


@pytest.mark.parametrize(("mask", "width"), [(False, 64), (True, 64), (True, 48)])
def test_what_is_dropped_follows_from_places(
    mask: bool, width: int, graphs: list[Lowering], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are dropped by a hash of where they are, in both graphs: neither stores any."""
    monkeypatch.setattr(again, "LARGEST", 0)
    part, shape = 0.25, (1, 2, 192, width)

    def dropped(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=part, is_causal=mask)

    *args, g = tensors(*(shape,) * 4)
    torch.manual_seed(1)
    ours = step(torch.compile(dropped, backend=dynamo.terrazzo, dynamic=False), (*args, g))
    assert [len(x.at("kernel").steps) for x in graphs] == [2, 4]
    sizes = [b.type.numel for x in graphs for s in x.loop.steps for b in s.writes]
    assert max(sizes) == math.prod(shape), "nothing is stored for a weight"
    torch.manual_seed(1)
    seeds = torch.randint(-(1 << 31), 1 << 31, [2], dtype=torch.int32)
    keep = kept(seeds.numpy(), (1, 2, 192, 192), part)
    assert abs(float(keep.double().mean()) - (1 - part)) < 0.01

    def exact(q: Any, k: Any, v: Any) -> Any:
        scores = q @ k.transpose(-1, -2) * width**-0.5
        seen = torch.ones(192, 192, dtype=torch.bool).tril() if mask else torch.ones(192, 192, dtype=torch.bool)
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf).double(), -1).to(scores.dtype)
        return torch.where(keep, weights / (1 - part), 0) @ v

    wanted = step(exact, [x.double() for x in (*args, g)])
    for x, eager, y in zip(ours, step(exact, (*args, g)), wanted, strict=True):
        error, allowed = (float((z.double() - y).square().mean().sqrt()) for z in (x, eager))
        assert error <= 2 * allowed
