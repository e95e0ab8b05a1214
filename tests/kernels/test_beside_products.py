"""What every score has of its own comes with the slabs of a step, and threads read it where it lies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import Lowered, lowered
from tests.kernels.test_attention import close, lines, together
from tests.kernels.test_attention import tensors as random
from tests.kernels.test_training import gradients

from terrazzo.front.capture import capture
from terrazzo.ir.plan import Order, Ring, Stream
from terrazzo.options import Options
from terrazzo.pipelines import lowering


def biased(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def brought(found: Any) -> list[Any]:
    return [x for x in lines(found, Stream) if x.beside]


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("kind", ["bias", "f32 bias", "mask", "relative"])
def test_a_bias_comes_by_tma(kind: str, size: int) -> None:
    q, k, v = random(*((2, 2, 320, size),) * 3)
    bias: Any = {
        "bias": torch.randn(1, 2, 320, 320).bfloat16(),
        "f32 bias": torch.randn(2, 320, 320),
        "mask": torch.rand(2, 1, 320, 320) < 0.5,
        "relative": torch.randn(2, 320, 320).bfloat16(),
    }[kind]

    def fn(q: Any, k: Any, v: Any, bias: Any) -> Any:
        if kind == "f32 bias":
            return torch.softmax((q @ k.mT).float() * 0.1 + bias, -1).to(q.dtype) @ v
        if kind == "relative":
            i = torch.arange(320, device=q.device)
            return biased(q, k, v, torch.where(i[:, None] >= i, bias, -torch.inf).to(q.dtype)[None])
        return biased(q, k, v, bias)

    found = lowered(fn, (q, k, v, bias), "sm_90a")
    assert together(found)
    (stream,) = brought(found)
    rings = {r.name: r for r in lines(found, Ring)}
    assert rings[stream.ring].over and "bias" in stream.operand
    close(found, fn, (q, k, v, bias))


def test_tiles_that_share_a_bias_run_side_by_side() -> None:
    """Those of all sequences, before the next rows of a head are begun."""
    q = torch.empty(4, 32, 2048, 128, dtype=torch.bfloat16, device="meta")
    bias = torch.empty(1, 32, 2048, 2048, dtype=torch.bfloat16, device="meta")
    program = capture(biased, (q, q, q, bias), {}).program
    found = Lowered(biased, (), {}, lowering(program, Options(target="sm_90a", libraries="never")))
    (order,) = lines(found, Order)
    assert [w.args[0] for w in order.tiles] == [32, 16, 4] and len(brought(found)) == 1


def test_gradients_read_a_bias_where_it_lies() -> None:
    """That of a query's row, which keys go along."""
    q, k, v, g = random(*((1, 2, 320, 128),) * 4)
    bias = torch.randn(2, 320, 320).bfloat16()
    fn = gradients(biased)
    args = (q, k, v, bias[None], g)
    found = lowered(fn, args, "sm_90a")
    assert brought(found)
    exact = fn(*(x.double() for x in args))
    for ours, eager, wanted in zip(found.simulated(), fn(*args), exact, strict=True):
        both = (torch.tensor(np.asarray(x, np.float64)) for x in (ours, eager.double()))
        error, allowed = (float((x - wanted).square().mean().sqrt()) for x in both)
        assert error <= 2 * allowed


def test_what_a_product_reads_too_is_no_bias() -> None:
    """Two layers of pixels with what was there before: the factor of the second product has the first one's operand."""

    def fn(x: Any, w: Any, v: Any) -> Any:
        h = x + torch.relu(F.conv2d(x, w))
        return h + torch.relu(F.conv2d(h, v))

    x, w, v = random((2, 8, 16, 16), (8, 8, 1, 1), (8, 8, 1, 1))
    found = lowered(fn, (x, w, v), "sm_90a")
    assert not brought(found)
    close(found, fn, (x, w, v))
