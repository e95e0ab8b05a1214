"""Attention's gradient, found in the terms: no sums over weights, no weights kept, every product on tensor cores; right
in the simulator, and as exact as eager.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import Lowered, lowered
from torch.nn.attention import SDPBackend, sdpa_kernel

from terrazzo.check.replay import check
from terrazzo.front.capture import capture
from terrazzo.interp import kernel as simulator
from terrazzo.interp.torch import to_numpy
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.plan import Frame, Product, Reach, Ring
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import PASSES, lowering, stages
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.fusion import again
from terrazzo.rules.loop_to_tile.chains.chain import chain
from terrazzo.rules.loop_to_tile.estimate import work

ONE = (1, 2, 128, 64)


def gradients(fn: Any) -> Any:
    """`fn` of q, k and v, and its gradients for the last argument."""

    def both(*args: Any) -> Any:
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in args[:3])
            o = fn(q, k, v, *args[3:-1])
            return (o.detach(), *torch.autograd.grad(o, (q, k, v), args[-1]))

    return both


def plain(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v)


def causal(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def masked(q: Any, k: Any, v: Any, m: Any) -> Any:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=m)


def grouped(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def heads_last(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(3)
    return tuple(torch.randn(s).to(dtype) for s in shapes)


def close(found: Lowered, fn: Any, args: tuple[torch.Tensor, ...]) -> None:
    """Every result as near to float64 as twice eager's own error."""
    exact = fn(*(a.double() if a.is_floating_point() else a for a in args))
    for ours, eager, x in zip(found.simulated(), fn(*args), exact, strict=True):
        truth = x.numpy()
        values = np.asarray(ours, np.float64), eager.double().numpy()
        error, allowed = (np.sqrt(np.mean((y - truth) ** 2)) for y in values)
        assert error <= 2 * allowed + 1e-9, (error, allowed)


def plans(found: Lowered, kind: type) -> list[Any]:
    return [x for _, plan in found.lowering.at("tile").plans for x in plan.all(kind)]


def wide(found: Lowered, size: int) -> list[l.Buffer]:
    """The temporaries that have a number in 32 bits for every weight."""
    steps = found.lowering.loop.steps
    return [b for s in steps for b in s.writes if b.type.dtype.size == 4 and b.type.numel >= size]


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize(
    ("fn", "shapes", "dtype"),
    [
        (plain, (ONE, ONE, ONE), torch.bfloat16),
        (plain, (ONE, ONE, ONE), torch.float16),
        (causal, (ONE, ONE, ONE), torch.bfloat16),
        (plain, ((1, 1, 77, 64),) * 3, torch.bfloat16),
        (plain, ((1, 2, 64, 64), (1, 2, 200, 64), (1, 2, 200, 64)), torch.bfloat16),
        (grouped, ((1, 4, 128, 64), (1, 2, 192, 64), (1, 2, 192, 64)), torch.bfloat16),
        (heads_last, ((1, 128, 2, 64),) * 3, torch.bfloat16),
    ],
)  # fmt: skip
def test_gradients(fn: Any, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, target: str) -> None:
    args = tensors(*shapes, shapes[0], dtype=dtype)
    found = lowered(gradients(fn), args, target)
    tokens = -3 if fn is heads_last else -2
    assert not wide(found, shapes[0][1] * shapes[0][tokens] * shapes[1][tokens])
    assert len(plans(found, Frame)) == 1  # the forward pass is one kernel
    assert len([x for p in plans(found, Product) for x in p.sites]) >= 6
    close(found, gradients(fn), args)


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize(("keys", "values"), [(32, 64), (64, 32), (96, 64)])
def test_values_may_be_wider_or_narrower_than_keys(
    keys: int, values: int, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of latent and of differential attention: no weights are stored, and scores and what values are worth are
    sums beside each other of other lengths. (So few are stored by the model.)
    """
    monkeypatch.setattr(again, "SURE", 9.0)
    q, k = ((1, 2, 128, keys),) * 2
    args = tensors(q, k, (1, 2, 128, values), (1, 2, 128, values))
    found = lowered(gradients(causal), args, target)
    steps = found.lowering.loop.steps
    assert not [b for s in steps for b in s.writes if b.type.numel >= 2 * 128 * 128]
    assert len([x for p in plans(found, Product) for x in p.sites]) >= 6
    close(found, gradients(causal), args)


def test_in_32_bits_sums_of_other_lengths_are_in_no_chain() -> None:
    """Steps of parts have one site for all sums inside, so none is tried that has these."""
    args = tensors(*((1, 8, 1024, width) for width in (32, 32, 64, 64)), dtype=torch.float32)
    found = lowered(gradients(causal), args, "sm_90a")
    chained = [c for s in found.lowering.loop.steps if isinstance(s, l.Kernel) and (c := chain(s))]
    assert chained and all(len({*c.depths}) == 1 for c in chained)
    assert not [e for e in found.lowering.log.events if "contractions over the same axes only" in e.reason]


def test_steps_that_a_mask_hides_are_not_visited() -> None:
    """Keys after a query, and queries before a key: in every chain, whose steps overlap."""
    args = tensors(*((1, 8, 384, 64),) * 4)
    found = lowered(gradients(causal), args, "sm_90a")
    reaches = plans(found, Reach)
    assert [bool(x.since) for x in reaches] == [False, False, True]
    assert sum(x.early for x in plans(found, Product)) == 1 and sum(x.late for x in plans(found, Ring)) == 3
    close(found, gradients(causal), args)


@pytest.mark.parametrize("fn", [plain, causal])
def test_every_step_means_the_same(fn: Any) -> None:
    args = tensors(*((1, 2, 32, 16),) * 4)
    captured = capture(gradients(fn), args, {})
    varying = iter(args)
    inputs = {
        b.name: captured.bound[b.name] if b.name in captured.bound else next(varying) for b in captured.program.inputs
    }
    report = check(captured.program, inputs, Options(target="sm_90a", libraries="never"))
    assert report.applications["gradients"] and report.applications["online"]
    assert report.wrong is None, report.wrong


def test_rows_that_are_normalised_lie_as_they_are_read() -> None:
    """Layer norm between products along tokens and along channels: a transposed store would sum a row for each of its
    elements.
    """

    def mixed(x: Any, w: Any, u: Any) -> Any:
        y = F.layer_norm(x, (64,)).transpose(1, 2) @ w
        return F.layer_norm(x + y.transpose(1, 2), (64,)) @ u

    args = tensors((2, 48, 64), (48, 48), (64, 64))
    found = lowered(mixed, args, "sm_90a")
    stores = [s for step in found.lowering.loop.steps for s in step.stores]
    assert all(s.buffer.type.strides is None for s in stores if s.buffer.type.shape == (2, 48, 64))
    events = [e for e in found.lowering.log.events if e.rule == "channels_last" and not e.fired]
    assert {e.reason.partition(" ")[2] for e in events} >= {"sum is known for every a1, and would be computed again"}
    exact = mixed(*(a.double() for a in args)).numpy()
    (ours,) = found.simulated()
    errors = [np.abs(np.asarray(y, np.float64) - exact).max() for y in (ours, mixed(*args).double().numpy())]
    assert errors[0] <= 2 * errors[1]


@pytest.mark.parametrize(
    ("target", "dtype"), [("sm_90a", torch.bfloat16), ("sm_80", torch.bfloat16), ("sm_75", torch.float16)]
)
@pytest.mark.parametrize("fn", [plain, causal, grouped])
def test_no_weight_is_stored(fn: Any, target: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that would be too much: each gradient is a chain of products, which makes tiles of weights again. Heads
    that share keys are rounds, whoever fills the slots.
    """
    monkeypatch.setattr(again, "LARGEST", -1)
    q, kv = ((1, 2, 192, 64), (1, 1 if fn is grouped else 2, 192, 64))
    args = tensors(q, kv, kv, q, dtype=dtype)
    found = lowered(gradients(fn), args, target)
    assert max(b.type.numel for s in found.lowering.loop.steps for b in s.writes) < 2 * 192 * 192
    chains = [p for _, p in found.lowering.at("tile").plans if len(p.all(Product)) > 1]
    assert [sum(len(x.sites) for x in p.all(Product)) for p in chains] == [2, 3, 4]
    close(found, gradients(fn), args)


@pytest.mark.parametrize(("sure", "chains"), [(0.5, False), (2.0, True)])
def test_what_is_stored_has_a_price(sure: float, chains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is cheaper by the model is taken; how sure it must be is data."""
    monkeypatch.setattr(again, "SURE", sure)
    args = tuple(torch.empty(1, 16, 4096, 128, dtype=torch.bfloat16, device="meta") for _ in range(4))
    log = Log()
    names = tuple(p.name for p in PASSES if p.dst != "kernel" and p.name not in ("schedule", "plan"))
    stages(capture(gradients(plain), args, {}).program, Options(target="sm_90a", libraries="never"), log, names)
    (event,) = [e for e in log.events if e.rule == again.RULE and "where" in e.subject]
    assert event.fired == chains and "us as chains" in event.reason and "us stored, by the model" in event.reason


def test_both_rewrites_can_be_undone() -> None:
    args = tensors(ONE, ONE, ONE, ONE)
    rules = {e.rule for e in lowered(gradients(plain), args, "sm_90a").lowering.log.events if e.fired}
    assert {"row_sums", "weights_again", "rounded_factors"} <= rules
    pinned = lowered(gradients(plain), args, "sm_90a", materialize=("where",))
    assert not {e.rule for e in pinned.lowering.log.events} & {"row_sums", "weights_again", "rounded_factors"}
    close(pinned, gradients(plain), args)


def test_what_is_pinned_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "LARGEST", -1)
    args = tensors(ONE, ONE, ONE, ONE)
    pinned = lowered(gradients(plain), args, "sm_90a", materialize=("where_again", "sub_bf16"))
    assert {"where_again", "sub_bf16"} <= {b.name for s in pinned.lowering.loop.steps for b in s.writes}


@pytest.mark.parametrize("most", [1 << 30, -1])
def test_rows_without_any_key_have_no_gradient(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "LARGEST", most)
    q, k, v, g = tensors(*((1, 1, 64, 64),) * 4)
    mask = torch.zeros(64, 64, dtype=torch.bfloat16)
    mask[:, 40:] = -torch.inf
    mask[7] = -torch.inf
    found = lowered(gradients(masked), (q, k, v, mask, g), "sm_90a")
    assert len(plans(found, Frame)) == 1
    close(found, gradients(masked), (q, k, v, mask, g))
    dq = np.asarray(found.simulated()[1], np.float32)
    assert (dq[..., 7, :] == 0).all() and (np.asarray(found.simulated()[2], np.float32)[..., 40:, :] == 0).all()


HEADS = """@loop
def f(p: bf16[2, 64, 64], v: bf16[64, 128]):
    with kernel('y', y=bf16[64, 128]):
        for a0 in free(64):
            for a1 in free(128):
                for r0 in reduce(64):
                    acc0 <- sum(mul(f32(p[a1 // 64, a0, r0]), f32(v[r0, a1])))
                y[a0, a1] = bf16(acc0)
    return (y,)
"""


def test_heads_in_the_columns_of_a_product_are_an_axis_again() -> None:
    done = lowering(parse(HEADS), Options(target="sm_90a"))
    (plan,) = [p for _, p in done.at("tile").plans]
    assert [x.on.partition(".")[0] for x in plan.all(Product)] == ["wgmma"]
    p, v = tensors((2, 64, 64), (64, 128))
    (found,) = simulator.run(done.at("kernel"), {"p": to_numpy(p), "v": to_numpy(v)})
    truth = torch.einsum("hij,jhd->ihd", p.double(), v.double().view(64, 2, 64)).reshape(64, 128).numpy()
    assert np.allclose(np.asarray(found, np.float64), truth, rtol=2**-7, atol=1e-2)


def test_products_that_share_a_mask_alone_stay_apart() -> None:
    def two(a: Any, b: Any, c: Any, d: Any, m: Any) -> Any:
        return torch.exp(a @ b + m), torch.exp(c @ d + m)

    args = tensors(*((256, 256),) * 5)
    found = lowered(two, args, "sm_90a")
    reasons = {e.reason for e in found.lowering.log.events if e.rule == "merge" and not e.fired}
    assert "what one multiplies, the other does not" in reasons
    assert all(len(s.stores) == 1 for s in found.lowering.loop.steps)


def of_channels(x: Any, qkv: Any, o: Any) -> Any:
    """Attention between the 48 channels of heads of 196 tokens, after a layer and before another: weights are fewer
    than what their scores and their results are made of.
    """
    b, n, c = x.shape
    q, k, v = torch.tanh(x @ qkv).reshape(b, n, 3, 2, c // 2).permute(2, 0, 3, 4, 1)
    return (torch.softmax(q @ k.transpose(-1, -2), -1) @ v).permute(0, 3, 1, 2).reshape(b, n, c) @ o


@pytest.mark.parametrize("tokens", [196, 24])
def test_the_gradients_of_a_small_softmax_compute_neither_values_nor_the_net_before_it_again(tokens: int) -> None:
    """Sums change places for sums over rows alone: gradients of values multiply what is a product, for every column.
    Scores are computed again, and not what they multiply.
    """
    shapes = (4, tokens, 96), (96, 288), (96, 96), (4, tokens, 96)
    both = gradients(of_channels)
    given = tuple(torch.empty(s, device="meta") for s in shapes)
    options = Options(target="sm_90a", libraries="never")
    program = capture(both, given, {}).program
    done = {p.name: x for p, x, _ in stages(program, options, Log()) if p.dst == "loop"}
    again = [s.name for s in done["gradients"].steps if s.name.endswith("_again")]
    assert len(again) <= 2, again
    flops = sum(work(s)[0] for s in done["online"].steps if isinstance(s, l.Kernel))
    assert flops < 12 * 4 * tokens * 96 * (288 + 96 + 96 + 48 * 4)
