"""What a training graph keeps of its forward pass."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch.aot_autograd import aot_module_simplified

from terrazzo.front import spread
from terrazzo.front.attention import attention_traced
from terrazzo.front.decompositions import table
from terrazzo.front.partition import partition
from terrazzo.front.row_numbers import keep_row_numbers
from terrazzo.ir.program import donated
from terrazzo.run import compiled as running

TOKENS, WIDTH, HEADS = 40, 32, 2


class Attention(nn.Module):
    """One layer of it, with heads beside each other."""

    def __init__(self, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.causal, self.dropout = causal, dropout
        self.inward, self.outward = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        heads = (y.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for y in self.inward(x).chunk(3, -1))
        o = F.scaled_dot_product_attention(*heads, is_causal=self.causal, dropout_p=self.dropout)
        return self.outward(o.transpose(1, 2).flatten(2))


def trained(model: Any, x: torch.Tensor, weight: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradients of a model's parameters, and what autograd keeps for them."""
    kept: list[torch.Tensor] = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = (model(x) * weight).float().sum()
    return list(torch.autograd.grad(loss, list(model.parameters()))), kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_keeps_nothing_for_every_weight(causal: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Attention(causal).to(dtype)
    x, weight = (torch.randn(2, TOKENS, WIDTH).to(dtype) for _ in range(2))
    compiled = torch.compile(model, backend="terrazzo", options={"target": "interpreter"})
    found, kept = trained(compiled, x, weight)
    eager, _ = trained(model, x, weight)
    exact, _ = trained(model.double(), x.double(), weight.double())
    for ours, theirs, truth in zip(found, eager, exact, strict=True):
        assert (ours.double() - truth).norm() <= 2 * (theirs.double() - truth).norm() + 1e-6 * truth.norm()
    most = 2 * HEADS * TOKENS * TOKENS
    assert any(t.numel() == most for t in kept) == (dtype is torch.float32)
    rows = [t for t in kept if t.dtype is torch.float32]
    assert dtype is torch.float32 or len(rows) == 1
    assert dtype is torch.float32 or all(t.numel() == 2 * HEADS * TOKENS for t in rows)


def test_dropout_is_the_same_in_both_graphs() -> None:
    """What is linear in some parameters is its gradient times these: not if forward and backward dropped others."""
    torch.manual_seed(0)
    model = Attention(False, dropout=0.5).to(torch.bfloat16)
    nn.init.zeros_(model.outward.bias)
    x, weight = (torch.randn(2, TOKENS, WIDTH, dtype=torch.bfloat16) for _ in range(2))
    compiled = torch.compile(model, backend="terrazzo", options={"target": "interpreter"})
    loss = (compiled(x) * weight).float().sum()
    values = [p[2 * WIDTH :] for p in (model.inward.weight, model.inward.bias)]
    slopes = [g[2 * WIDTH :] for g in torch.autograd.grad(loss, [model.inward.weight, model.inward.bias])]
    linear = sum((g.double() * v.double()).sum() for g, v in zip(slopes, values, strict=True))
    size = sum((g.double() * v.double()).abs().sum() for g, v in zip(slopes, values, strict=True))
    assert abs(linear - loss.double()) <= 2**-8 * size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_dropped_is_not_kept(dtype: torch.dtype) -> None:
    """A call draws two numbers; with the same ones it drops the same weights."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Attention(True, dropout=0.5).to(dtype)
    x, weight = (torch.randn(2, TOKENS, WIDTH).to(dtype) for _ in range(2))
    compiled = torch.compile(model, backend="terrazzo", options={"target": "interpreter"})
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        gradients, kept = trained(compiled, x, weight)
        assert not any(t.numel() == 2 * HEADS * TOKENS * TOKENS for t in kept)
        assert [t.numel() for t in kept if t.dtype is torch.int32] == [2]
        found.append(gradients[0])
    assert torch.equal(*found[:2]) and not torch.equal(*found[1:])


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_weights_of_float32_are_kept_where_no_kernel_has_them(causal: bool, wide: bool) -> None:
    """What the two graphs compute is the same either way."""
    torch.manual_seed(0)
    model, x = Attention(causal), torch.randn(2, TOKENS, WIDTH)
    kept: list[int] = []

    def apart(joint: Any, inputs: Any, **options: Any) -> Any:
        forward, backward = partition(joint, inputs, wide=wide, **options)
        (output,) = forward.graph.find_nodes(op="output")
        kept.extend(y.meta["val"].numel() for y in output.args[0] if isinstance(y, torch.fx.Node))
        return forward, backward

    def backend(gm: Any, inputs: Any) -> Any:
        with attention_traced():
            options = {"fw_compiler": lambda graph, _: graph.forward, "decompositions": table()}
            return aot_module_simplified(gm, inputs, partition_fn=apart, **options)

    torch._dynamo.reset()
    found, _ = trained(torch.compile(model, backend=backend), x, x)
    eager, _ = trained(model, x, x)
    for ours, theirs in zip(found, eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert (2 * HEADS * TOKENS * TOKENS in kept) == (not wide)


@pytest.mark.parametrize(("dtype", "size", "numbers"), [
    (torch.float32, 128, True), (torch.float32, 256, False), (torch.bfloat16, 256, True), (torch.float16, 64, True),
])  # fmt: skip
def test_numbers_of_rows_are_kept_where_their_sums_are_exact(
    dtype: torch.dtype, size: int, numbers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wide heads in float32 make no chain of products, in which what tensor cores cut off would be the same."""
    kept: list[int] = []

    def keep(graph: Any, *given: Any) -> Any:
        found = keep_row_numbers(graph, *given)
        kept.append(len(found[0]))
        return found

    monkeypatch.setattr("terrazzo.front.partition.keep_row_numbers", keep)

    def backend(gm: Any, inputs: Any) -> Any:
        with attention_traced():
            options = {"fw_compiler": lambda graph, _: graph.forward, "decompositions": table()}
            apart = functools.partial(partition, wide=True)
            return aot_module_simplified(gm, inputs, partition_fn=apart, **options)

    torch._dynamo.reset()
    q, k, v = (torch.randn(1, 2, 16, size, dtype=dtype, requires_grad=True) for _ in range(3))
    torch.compile(F.scaled_dot_product_attention, backend=backend)(q, k, v).float().sum().backward()
    assert any(kept) == numbers


def test_gradients_may_be_asked_for_again() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
    weights = list(module.parameters())
    torch._dynamo.reset()
    x = torch.randn(3, 4)
    ours, theirs = torch.compile(module, backend="terrazzo")(x).sum(), module(x).sum()
    for last in (False, True):
        found = torch.autograd.grad(ours, weights, retain_graph=not last)
        torch.testing.assert_close(found, torch.autograd.grad(theirs, weights, retain_graph=True))
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(ours, weights)


def margins(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """How far each pair of a row's numbers is from its margin, where they are ordered by others."""
    ordered = y[:, :, None] < y[:, None]
    return torch.where(ordered, F.relu(1 - x[:, None] + x[:, :, None]), 0).sum((1, 2))


def others(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Each number of a row by the others, which a mask that is made of nothing says."""
    same = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
    return (x[:, None] * y[:, :, None]).masked_fill(same, 0).relu().sum(1)


def widths(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Sums of exponentials of distances, which are dear."""
    return (x[:, None] - x[:, :, None]).abs().neg().exp().sum((1, 2)) + y.sum(1)


def differences(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """All pairs are wanted."""
    return (x[:, None] - y[:, :, None]).relu()


@pytest.mark.parametrize(("fn", "times"), [(margins, 2), (others, 2), (widths, 64), (differences, 64)])
def test_pairs_are_spread_out_again(fn: Any, times: int) -> None:
    """What is made of all pairs of numbers is not kept, unless it is dear, or a result."""
    torch.manual_seed(0)
    x, y = torch.randn(512, 64, requires_grad=True), torch.randn(512, 64)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        loss = torch.compile(fn, backend="terrazzo", options={"target": "interpreter"})(x, y).square().sum()
    (found,) = torch.autograd.grad(loss, x)
    assert max(t.numel() for t in kept) <= times * x.numel()
    assert all(t.is_floating_point() for t in kept), "numbers of places are made again"
    assert times == 2 or max(t.numel() for t in kept) == 64 * x.numel()
    exact = x.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(fn(exact, y.double()).square().sum(), exact)
    (eager,) = torch.autograd.grad(fn(x, y).square().sum(), x)
    assert (found.double() - truth).norm() <= 2 * (eager.double() - truth).norm() + 1e-6 * truth.norm()


def test_each_of_a_chain_of_large_tensors_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From each one all before it were, whether it was made of little or of something dear."""
    asked: list[Any] = []
    cheap = spread._cheap
    monkeypatch.setattr(spread, "_cheap", lambda node: asked.append(node) or cheap(node))  # type: ignore[func-returns-value]
    aten = torch.ops.aten
    for first, made in ((aten.expand.default, 300), (aten.exp.default, 0)):
        graph = torch.fx.Graph()
        last = graph.placeholder("primals_1")
        last.meta["val"] = torch.empty(1 if made else 1 << 18, device="meta")
        for n in range(300):
            last = graph.call_function(aten.add.Tensor if n else first, (last, 1) if n else (last,))
            last.meta["val"] = torch.empty(1 << 18, device="meta")
        graph.output(([last, graph.call_function(aten.sum.default, (last,))],))
        asked.clear()
        assert len(spread.spread_out(graph, 0, ())) == made
        assert len(asked) < 1000


def test_a_backward_program_knows_what_is_kept_for_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight, and no result: who called has these."""
    programs: list[Any] = []
    make = running.compile_program

    def noted(program: Any, *args: Any) -> Any:
        programs.append(program)
        return make(program, *args)

    monkeypatch.setattr(running, "compile_program", noted)

    def call(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = (x @ w).tanh()
        return hidden, (hidden @ w).exp().tanh() @ w

    x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    torch._dynamo.reset()
    ours = torch.compile(call, backend="terrazzo", options={"target": "interpreter", "strict": True})
    sum(y.sum() for y in ours(x, w)).backward()  # type: ignore[union-attr]
    forward, backward = programs
    kept = donated(backward.inputs)
    assert not donated(forward.inputs) and len(kept) > 1
    others = {b.name for b in backward.inputs} - kept
    given = {name for name in others if name.startswith(("primals", "tangents"))}
    assert len(given) == 4 and not any(name.startswith(("primals", "tangents")) for name in kept)
    assert 0 < len(others - given) < 3  # the first result, perhaps by another name, too
