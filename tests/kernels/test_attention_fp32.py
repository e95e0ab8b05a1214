"""Attention in float32: one kernel of products of parts, no scores in memory, as exact as eager."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.programs import Lowered, lowered
from tests.kernels.test_attention import by_hand, causal, close, grouped, heads_last, lines, plain, tensors

from terrazzo.front.capture import capture
from terrazzo.interp import kernel as simulator
from terrazzo.ir.plan import Frame, Order, Product, Reach
from terrazzo.options import Options
from terrazzo.pipelines import PASSES, lowering, stages
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.fusion import again


def in_one(found: Lowered) -> bool:
    """Whether there is one kernel beside those that store parts of what it multiplies."""
    *makers, _ = found.kernels
    return len(lines(found, Frame)) == 1 and sum(len(s.writes) for s in makers) == 9


def hidden(q: Any, k: Any, v: Any) -> Any:
    seen = torch.arange(k.shape[2])[None, :] <= torch.arange(q.shape[2])[:, None] * 2 + 5
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)


CASES = [
    (plain, ((1, 2, 128, 64),) * 3),
    (plain, ((1, 1, 200, 128),) * 3),
    (plain, ((1, 1, 150, 192),) * 3),
    (plain, ((1, 1, 80, 256),) * 3),
    (plain, ((1, 2, 70, 40), (1, 2, 77, 40), (1, 2, 77, 40))),
    (plain, ((1, 2, 64, 64), (1, 2, 300, 64), (1, 2, 300, 128))),
    (causal, ((1, 1, 200, 64),) * 3),
    (hidden, ((1, 1, 130, 96),) * 3),
    (grouped, ((1, 4, 64, 64), (1, 2, 128, 64), (1, 2, 128, 64))),
    (heads_last, ((1, 128, 2, 72),) * 3),
    (by_hand, ((1, 2, 128, 64),) * 3),
]


@pytest.mark.parametrize(("fn", "shapes"), CASES)
def test_one_kernel(fn: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    args = tensors(*shapes, dtype=torch.float32)
    found = lowered(fn, args, "sm_90a")
    assert in_one(found)
    close(found, fn, args)


def test_sums_of_a_step_are_added_up_on_cuda_cores() -> None:
    args = tensors(*((1, 1, 128, 64),) * 3, dtype=torch.float32)
    found = lowered(plain, args, "sm_90a")
    scores, values = lines(found, Product)
    assert not scores.promote and values.promote and values.a == "values"


def test_masks_are_known_in_float32() -> None:
    args = tensors(*((1, 1, 512, 64),) * 3, dtype=torch.float32)
    assert len(lines(lowered(causal, args, "sm_90a"), Reach)) == 1


@pytest.mark.parametrize(("fp32", "parts"), [("tf32", 2), ("bf16", 1)])
def test_fewer_parts(fp32: str, parts: int) -> None:
    args = tensors(*((1, 1, 128, 64),) * 3, dtype=torch.float32)
    found = lowered(plain, args, "sm_90a", fp32=fp32)
    *makers, _ = found.kernels
    assert len(lines(found, Frame)) == 1 and sum(len(s.writes) for s in makers) == 3 * parts
    exact = plain(*(x.double() for x in args)).numpy()
    (ours,) = found.simulated()
    assert abs(ours - exact).max() < {2: 1e-4, 1: 2e-2}[parts]


def test_exact_products_are_no_chain() -> None:
    args = tensors(*((1, 1, 128, 64),) * 3, dtype=torch.float32)
    assert not lines(lowered(plain, args, "sm_90a", fp32="exact"), Frame)


def gradient(fn: Any) -> Any:
    """The gradients of q, k and v."""

    def found(q: Any, k: Any, v: Any, g: Any) -> Any:
        with torch.enable_grad():
            leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
            return torch.autograd.grad(fn(*leaves), leaves, g)

    return found


@pytest.mark.parametrize(
    ("fn", "shape"),
    [(plain, (1, 1, 192, 64)), (causal, (1, 2, 200, 64)), (plain, (1, 1, 130, 128))],
)
def test_gradients_store_no_scores(fn: Any, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "WIDE", 1e9)
    args = tensors(*(shape,) * 4, dtype=torch.float32)
    found = lowered(gradient(fn), args, "sm_90a")
    assert all(b.type.static_shape[-2:] != (shape[2], shape[2]) for s in found.kernels for b in s.writes)
    assert sum(p.promote for p in lines(found, Product)) == 4
    exact = gradient(fn)(*(x.double() for x in args))
    eager = gradient(fn)(*args)
    for ours, x, y in zip(found.simulated(), exact, eager, strict=True):
        assert np.linalg.norm(ours - x.numpy()) <= 2 * np.linalg.norm(y.double().numpy() - x.numpy())


@pytest.mark.parametrize(("head", "moved"), [(128, True), (256, False)])
def test_rows_are_summed_from_what_is_stored_where_heads_make_no_chain(head: int, moved: bool) -> None:
    """So rows of gradients add up to 0, whatever tensor cores cut off of the product that both are made of."""
    args = tuple(torch.empty(1, 2, 256, head, device="meta") for _ in range(4))
    log = Log()
    upper = tuple(p.name for p in PASSES if p.name in ("torch_to_tensor", "tensor_to_loop", "gradients"))
    stages(capture(gradient(plain), args, {}).program, Options(target="sm_90a", libraries="never"), log, upper)
    events = [e for e in log.events if e.rule == "row_sums"]
    assert {e.fired for e in events} == {moved}
    assert moved or "heads of 256 in float32 make no chain" in events[0].reason


def test_results_are_found_where_batches_and_heads_are_one_axis() -> None:
    """The row sums of a training step are of what the forward pass stores, and nobody computes that once more."""

    def step(q: Any, k: Any, v: Any, g: Any) -> Any:
        with torch.enable_grad():
            leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
            out = plain(*leaves).transpose(1, 2).reshape(g.shape)
            return (out, *torch.autograd.grad(out, leaves, g))

    args = *(torch.empty(2, 3, 256, 64, device="meta") for _ in range(3)), torch.empty(2, 256, 192, device="meta")
    log = Log()
    upper = tuple(p.name for p in PASSES if p.name in ("torch_to_tensor", "tensor_to_loop", "gradients"))
    done = stages(capture(step, args, {}).program, Options(target="sm_90a", libraries="never"), log, upper)[-1][1]
    (event,) = [e for e in log.events if e.rule == "row_sums"]
    assert event.fired and "is one over bmm_1, which it is multiplied to" in event.reason
    assert sum("where" in {b.name for b in s.reads} for s in done.steps) == 1, "others read what is made again"


@pytest.mark.parametrize("seed", [1, 2])
def test_slots_of_parts_under_adverse_orders(seed: int) -> None:
    """Two warpgroups, several steps."""
    args = tensors((1, 2, 130, 64), (1, 2, 300, 64), (1, 2, 300, 64), dtype=torch.float32)
    found = lowered(plain, args, "sm_90a")
    (ours,) = simulator.run(found.program, found.inputs, seed=seed)
    np.testing.assert_allclose(ours, plain(*args).numpy(), atol=2e-6)


def test_blocks_of_parts_have_one_tile_and_wide_steps() -> None:
    args = tuple(torch.empty(4, 16, 2048, 64, device="meta") for _ in range(3))
    done = lowering(capture(plain, args, {}).program, Options(target="sm_90a", libraries="never"))
    *_, (_, plan) = done.at("tile").plans
    assert not plan.one(Order).persistent
    assert "n128k16" in plan.all(Product)[0].on


def columns_first(q: Any, k: Any, v: Any) -> Any:
    """As blocks of convolutional nets write attention: channels before places, in the results too."""
    return v.mT @ torch.softmax(q @ k.mT, -1).mT


@pytest.mark.parametrize("rows", [64, 784])
def test_results_whose_columns_are_stored_first(rows: int) -> None:
    args = tensors((1, rows, 64), (1, 196, 64), (1, 196, 64), dtype=torch.float32)
    close(lowered(columns_first, args, "sm_90a"), columns_first, args)


def pooled_keys(x: Any, q: Any, k: Any) -> Any:
    """A product of which both factors are made of products, one through a maximum."""
    return (x.mT @ q) @ torch.nn.functional.max_pool1d(k.mT @ x, 4)


def test_a_factor_that_is_made_on_the_way_ends_no_chain() -> None:
    args = tensors((1, 8, 36), (1, 8, 4), (1, 8, 4), dtype=torch.float32)
    close(lowered(pooled_keys, args, "sm_90a"), pooled_keys, args)
