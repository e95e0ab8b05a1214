"""Attention that is written out in 16 bits: what of it is computed in 32, and that gradients are no further off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from terrazzo.front import dynamo
from terrazzo.front.drawn import drop_nothing
from terrazzo.front.written_out import product, unround_weights

SHAPE = (2, 3, 24, 16)
LATER = torch.ones(24, 24, dtype=torch.bool).triu(1)


def plain(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v


def wide(q: Any, k: Any, v: Any) -> Any:
    scores = torch.matmul(q, k.mT) / 4.0 + torch.full((24, 24), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)
    return F.softmax(scores, dim=-1, dtype=torch.float32).type_as(q).matmul(v)


def narrow_again(q: Any, k: Any, v: Any) -> Any:
    return F.softmax((q @ k.mT).float().to(q.dtype), dim=-1, dtype=q.dtype) @ v


def flat(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(2, 3, 24, 24).masked_fill(LATER, -torch.inf)
    weights = F.dropout(scores.flatten(0, 1).softmax(-1), 0.0, True)
    return torch.bmm(weights, v).view(SHAPE).transpose(1, 2).reshape(2, 24, 48)


def in_place(q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.mT
    scores *= 0.25
    scores.masked_fill_(LATER, -torch.inf)
    return scores.softmax(-1) @ v


def einsums(q: Any, k: Any, v: Any) -> Any:
    weights = torch.einsum("bhid, bhjd -> bhij", q, k).softmax(-1)
    return torch.einsum("bhij,bhjd->bihd", weights, v).flatten(2)


def turned(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.einsum("bjhd,bhij->bihd", v, torch.einsum("bihd,bjhd->bhij", q, k).softmax(3))


def cast_for(q: Any, k: Any, v: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.softmax(q.float() @ k.float().mT * 0.25, -1) @ v


def looked_at(q: Any, k: Any, v: Any) -> Any:
    weights = torch.softmax(q @ k.mT, -1)
    return weights @ v, weights


def biased(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.mT + v.sum(-1, keepdim=True), -1) @ v


def added(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = q[:, :, :1].mT.baddbmm(batch1=q, batch2=k.mT, beta=0.5, alpha=0.25)
    return torch.bmm(scores.softmax(-1), v).view(SHAPE)


def not_added(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.baddbmm(torch.full((6, 24, 24), torch.nan, dtype=q.dtype), q, k.mT, beta=0, alpha=0.25)
    return torch.bmm(scores.softmax(-1), v).view(SHAPE)


def sharpened(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.mT * v.sum(-1, keepdim=True), -1) @ v


def added_at_last(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.baddbmm(v, torch.bmm(q, k.mT).softmax(-1), v).view(SHAPE)


def along_rows(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.mT, -2) @ v


def in_two(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.mT + k @ q.mT, -1) @ v


def copied_and_written(q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.mT
    others = scores.clone()
    others *= 2
    return torch.softmax(scores + others, -1) @ v


def no_matrices(q: Any, k: Any, v: Any) -> Any:
    weights = torch.einsum("bhid,bhjd->bij", q, k).softmax(-1)
    return torch.einsum("bij,bhjd->bhid", weights, v)


def wide_heads(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.repeat(1, 1, 1, 9) for x in (q, k, v))
    return plain(q, k, v)


FOUND = [plain, wide, narrow_again, flat, in_place, einsums, turned, cast_for, biased, added, not_added]
OTHERS = [looked_at, sharpened, added_at_last, along_rows, in_two, copied_and_written, no_matrices, wide_heads]


def trained(fn: Callable[..., Any], given: list[torch.Tensor]) -> list[torch.Tensor]:
    args = [x.detach().requires_grad_() for x in given]
    y = fn(*args)
    y = y[0] if isinstance(y, tuple) else y
    return [y.detach(), *torch.autograd.grad((y.to(torch.promote_types(y.dtype, torch.float32)) ** 2).sum(), args)]


def compiled(fn: Callable[..., Any], given: list[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """The result and its gradients, and how many products are in 32 bits."""
    counts: list[int] = []

    def backend(gm: Any, inputs: Any) -> Any:
        drop_nothing(gm)
        unround_weights(gm, inputs)
        counts.append(len(gm.graph.find_nodes(op="call_function", target=product)))
        return gm

    torch._dynamo.reset()
    return trained(torch.compile(fn, backend=backend, dynamic=False, fullgraph=True), given), sum(counts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fn", FOUND)
def test_scores_and_weights_are_not_rounded(fn: Callable[..., Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    given = [torch.randn(SHAPE).to(dtype) for _ in range(3)]
    ours, count = compiled(fn, given)
    assert count == 2
    exact = trained(plain if fn is cast_for else fn, [x.double() for x in given])
    for x, eager, y in zip(ours, trained(fn, given), exact, strict=True):
        assert (x.shape, x.dtype) == (eager.shape, eager.dtype)
        error, allowed = (float((z.double() - y).square().mean().sqrt()) for z in (x, eager))
        assert error <= 1.1 * allowed


@pytest.mark.parametrize("fn", OTHERS)
def test_what_is_left_as_it_is(fn: Callable[..., Any]) -> None:
    """Weights that others read, what wants a gradient of what multiplies scores, and what is no attention."""
    torch.manual_seed(0)
    given = [torch.randn(SHAPE).bfloat16() for _ in range(3)]
    ours, count = compiled(fn, given)
    assert count == 0
    for x, eager in zip(ours, trained(fn, given), strict=True):
        assert torch.equal(x, eager)


def test_float32_is_left_as_it_is() -> None:
    assert compiled(plain, [torch.randn(SHAPE) for _ in range(3)])[1] == 0


def test_a_graph_of_several_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are symbols, and what is compiled for one set of them says nothing of its inputs."""
    counts: list[int] = []

    def watched(gm: Any, inputs: Any) -> bool:
        found = unround_weights(gm, inputs)
        counts.append(len(gm.graph.find_nodes(op="call_function", target=product)))
        return found

    def refuse(*_: Any) -> Any:
        raise dynamo._Refused

    monkeypatch.setattr(dynamo, "unround_weights", watched)
    monkeypatch.setattr(dynamo, "_graph", refuse)
    torch._dynamo.reset()
    run = torch.compile(plain, backend=dynamo.terrazzo, dynamic=True, options={"target": "sm_90a"})
    for tokens in (24, 40):
        trained(run, [torch.randn(2, 3, tokens, 16).bfloat16() for _ in range(3)])
    assert counts == [2, 2]


@pytest.mark.parametrize("fn", [plain, F.scaled_dot_product_attention])
def test_rows_of_their_gradients_add_up_to_nothing(fn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in eager mode, where weights are kept; PyTorch's own kernels round what these rows are summed from."""
    asked: list[bool] = []

    def watched(joint: Any, inputs: Any, *, exactly: bool, **options: Any) -> Any:
        asked.append(exactly)
        raise dynamo._Refused

    monkeypatch.setattr(dynamo, "partition", watched)
    torch._dynamo.reset()
    run = torch.compile(lambda q, k, v: fn(q, k, v), backend=dynamo.terrazzo, options={"target": "sm_90a"})
    trained(run, [torch.randn(SHAPE).bfloat16() for _ in range(3)])
    assert asked == [fn is plain]


def test_long_chains_of_sums_are_looked_at_once() -> None:
    """Each node once, however many ways lead to it: 1200 sums of a matrix and itself, turned."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.zeros(4, 4, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(1200):
        turned = graph.call_method("transpose", (x, 0, 1))
        total = graph.call_function(torch.add, (x, turned))
        turned.meta, total.meta, x = dict(x.meta), dict(x.meta), total
    weights = graph.call_function(F.softmax, (x,), {"dim": -1})
    weights.meta = dict(x.meta)
    graph.output(weights)
    gm = torch.fx.GraphModule({}, graph)
    unround_weights(gm, [torch.zeros(4, 4, dtype=torch.bfloat16)])
    assert not gm.graph.find_nodes(op="call_function", target=product)
