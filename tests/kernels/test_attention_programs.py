"""Attention as programs write it: one kernel each, at their sizes, and as exact as eager in the simulator at small
ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import lowered
from tests.kernels.test_attention import close, lines, together
from tests.kernels.test_attention import tensors as random
from tests.kernels.test_training import gradients

from terrazzo.front.capture import capture
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.plan import Product, Reach
from terrazzo.options import Options
from terrazzo.pipelines import LOWER, stages
from terrazzo.rewrite.rule import Log


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(s, dtype=dtype, device="meta") for s in shapes)


def names(fn: Any, *args: Any, last: str = "schedule") -> list[str]:
    """The kernels of a program for an H200."""
    program = capture(fn, args, {}).program
    passes = LOWER[: LOWER.index(last) + 1]
    done = stages(program, Options(target="sm_90a", libraries="never"), Log(), passes)[-1][1]
    loop = done.loop if last == "schedule" else done
    return [s.name for s in loop.steps if isinstance(s, l.Kernel)]


def test_many_scores_are_scaled_after_their_product() -> None:
    """Each operand is scaled, and neither alone is worth scaling the scores instead."""

    def window(q: Any, k: Any, v: Any) -> Any:
        at = torch.arange(q.shape[-2], device=q.device)
        seen = (at[:, None] >= at) & (at[:, None] - at < 1024)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    assert len(names(window, *tensors(*((1, 16, 16384, 128),) * 3))) == 1


def causal(q: Any, window: int = 0) -> Any:
    at = torch.arange(q.shape[-2], device=q.device)
    seen = at[None] <= at[:, None]
    return seen & (at[None] > at[:, None] - window) if window else seen


def sinks(q: Any, k: Any, v: Any, sinks: Any) -> Any:
    """A logit for each head beside the scores, as gpt-oss has it in transformers."""
    w = torch.matmul(q, k.transpose(2, 3)) * 0.125
    w = w + torch.where(causal(q), 0.0, torch.finfo(torch.bfloat16).min).to(q.dtype)[None, None]
    s = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    c = torch.cat([w, s], dim=-1)
    c = c - c.max(dim=-1, keepdim=True).values
    return torch.matmul(F.softmax(c, dim=-1, dtype=c.dtype)[..., :-1], v)


def sinks_in_a_window(q: Any, k: Any, v: Any, sinks: Any) -> Any:
    """The same as its authors write it, where keys are few."""
    n, heads, _ = q.shape
    s = sinks.reshape(heads, 1, 1).expand(-1, n, -1)
    mask = torch.triu(q.new_full((n, n), -float("inf")), diagonal=1)
    mask = mask + torch.tril(mask.new_full((n, n), -float("inf")), diagonal=-50)
    w = torch.einsum("qhd,khd->hqk", q, k) * 0.125 + mask[None]
    w = torch.softmax(torch.cat([w, s], dim=-1), dim=-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", w, v)


def no_maximum(q: Any, k: Any, v: Any) -> Any:
    p = torch.exp((q @ k.mT).float() * 0.1)
    return (p / p.sum(-1, keepdim=True)).to(q.dtype) @ v


def of_logarithms(q: Any, k: Any, v: Any) -> Any:
    return F.log_softmax((q @ k.mT).float() * 0.1, -1).exp().to(q.dtype) @ v


def one_more(q: Any, k: Any, v: Any) -> Any:
    """A softmax with one more logit, which is 0."""
    w = (q @ k.mT).float() * 0.1
    m = w.amax(-1, keepdim=True)
    e = torch.exp(w - m)
    return (e / (torch.exp(-m) + e.sum(-1, keepdim=True))).to(q.dtype) @ v


def soft_capped(q: Any, k: Any, v: Any) -> Any:
    """Scores up to 30, in a window, as Gemma 2 has them: most lie near the cap."""
    w = torch.tanh(q @ k.mT * (4 / 30)) * 30
    w = w.masked_fill(~causal(q, 60), float("-inf"))
    return torch.softmax(w.float(), -1).to(q.dtype) @ v


ONE = (1, 2, 160, 64)


@pytest.mark.parametrize(
    ("fn", "shapes", "skips"),
    [
        (sinks, (ONE, ONE, ONE, (2,)), True),
        (sinks_in_a_window, (*((300, 2, 64),) * 3, (2,)), True),
        (no_maximum, (ONE, ONE, ONE), False),
        (of_logarithms, (ONE, ONE, ONE), False),
        (one_more, (ONE, ONE, ONE), False),
        (soft_capped, (ONE, ONE, ONE), True),
    ],
)
def test_weights_of_any_exponential_are_in_one_frame(fn: Any, shapes: tuple[tuple[int, ...], ...], skips: bool) -> None:
    args = random(*shapes)
    found = lowered(fn, args, "sm_90a")
    assert together(found) and bool(lines(found, Reach)) == skips
    close(found, fn, args)


MASKS: dict[str, Any] = {
    "documents of 100": lambda i: i[:, None] // 100 == i // 100,
    "documents of 128, causal": lambda i: (i[:, None] // 128 == i // 128) & (i[:, None] >= i),
    "blocks": lambda i: i[:, None] // 150 >= i // 150,
    "neighbours": lambda i: (i[:, None] // 64 - i // 64).abs() <= 1,
    "on both sides": lambda i: (i[:, None] - i).abs() < 70,
    "first keys and a window": lambda i: ((i[:, None] - i < 100) | (i < 4)) & (i[:, None] >= i),
    "a prefix": lambda i: (i[:, None] >= i) | (i < 90),
    "every third": lambda i: ((i[:, None] - i) % 3 == 0) & (i[:, None] >= i),
}
BEGINNING = ("documents of 100", "documents of 128, causal", "neighbours", "on both sides")
"""Those that hide first keys, too."""


@pytest.mark.parametrize("name", MASKS)
def test_steps_that_predicates_of_places_hide_are_not_visited(name: str) -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        seen = MASKS[name](torch.arange(q.shape[-2], device=q.device))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    args = random(*((1, 1, 400, 64),) * 3)
    found = lowered(fn, args, "sm_90a")
    (reach,) = lines(found, Reach)
    assert together(found) and bool(reach.since) == (name in BEGINNING)
    close(found, fn, args)


def test_weights_that_stay_outside_are_rounded_to_what_they_weigh() -> None:
    """Weights multiplied by each other are in no frame, so there are three kernels, the last one on tensor cores all
    the same.
    """

    def fn(q: Any, k: Any, v: Any) -> Any:
        w = torch.softmax((q @ k.mT).float() * 0.1, -1)
        w = (w * w).to(torch.promote_types(v.dtype, torch.float32))
        return (w @ v.to(w.dtype)).to(q.dtype)

    args = random(ONE, ONE, ONE)
    found = lowered(fn, args, "sm_90a")
    last = next(s for s in found.lowering.loop.steps if "v" in [b.name for b in s.reads])
    (weights,) = [b for b in last.reads if b.name != "v"]
    assert weights.type.dtype.name == "bf16" and len(lines(found, Product)) == 2
    close(found, fn, args)


@pytest.mark.parametrize(("dtype", "one"), [(torch.bfloat16, True), (torch.float16, False)])
@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_weights_are_multiplied_by_gates_in_their_frame(dtype: torch.dtype, one: bool, target: str) -> None:
    """What else weights are multiplied by, for each query and key, is not in their sum. In float16 gates might make
    infinities of weights that are not divided by it yet.
    """

    def fn(q: Any, k: Any, v: Any, gates: Any) -> Any:
        w = torch.softmax((q @ k.mT).float() * 0.1, -1) * gates
        w = w.to(torch.promote_types(v.dtype, torch.float32))
        return (w @ v.to(w.dtype)).to(q.dtype)

    args = (*(x.to(dtype) for x in random(ONE, ONE, ONE)), torch.randn(160, 160))
    found = lowered(fn, args, target)
    assert together(found) == one
    close(found, fn, args)


@pytest.mark.parametrize("kind", ["bool", "numbers"])
def test_masks_that_layers_share_say_what_positions_hide(kind: str) -> None:
    """The mask lies in memory, since lengths are data and two kernels read it. Both skip what no length could show."""

    def fn(q: Any, k: Any, v: Any, seen: Any) -> Any:
        mask = (causal(q)[None] & seen[:, None, :])[:, None]
        if kind == "numbers":
            mask = torch.where(mask, 0.0, float("-inf")).to(q.dtype)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return F.scaled_dot_product_attention(x, k, v, attn_mask=mask)

    seen = torch.arange(300) < torch.tensor([[300], [130]])
    args = (*random(*((2, 1, 300, 64),) * 3), seen)
    found = lowered(fn, args, "sm_90a")
    assert len(lines(found, Reach)) == 2
    exact = fn(*(a.double() if a.is_floating_point() else a for a in args)).numpy()
    eager = fn(*args).double().numpy()
    (ours,) = found.simulated()
    error, allowed = (np.sqrt(np.mean((np.asarray(x, np.float64) - exact) ** 2)) for x in (ours, eager))
    assert error <= 2 * allowed


def test_operands_that_are_converted_on_their_way_are_stored_as_products_take_them() -> None:
    """Values too, whose product is none for tensor cores before its weights are."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(*(x.bfloat16() for x in (q, k, v)))

    program = capture(attend, tensors(*[(2, 16, 1024, 64)] * 3, dtype=torch.float32), {}).program
    passes = LOWER[: LOWER.index("schedule") + 1]
    steps = stages(program, Options(target="sm_90a", libraries="never"), Log(), passes)[-1][1].loop.steps
    assert [len(s.reads) for s in steps] == [1, 1, 1, 3]
    assert all(b.type.shape[-2:] == (1024, 64) for s in steps for b in s.writes)


def test_what_a_mask_hides_is_in_the_price_of_gradients() -> None:
    """Weights of grouped heads would be stored otherwise, for their chains visit all steps then."""

    def fn(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    shapes = ((2, 32, 2048, 128), (2, 8, 2048, 128), (2, 8, 2048, 128), (2, 32, 2048, 128))
    program = capture(gradients(fn), tensors(*shapes), {}).program
    passes = LOWER[: LOWER.index("online") + 1]
    steps = stages(program, Options(target="sm_90a", libraries="never"), Log(), passes)[-1][1].steps
    assert not [b for s in steps for b in s.writes if b.type.shape[-2:] == (2048, 2048)]
