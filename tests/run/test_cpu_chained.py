"""Products of what is made of products, on a processor: no matrix of scores in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import terrazzo
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.parse import parse
from terrazzo.targets.cpu.chained import LEAST, LONGEST, ROOM, chained, refusal

TOKENS, OTHERS = 270, 333


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(s).to(dtype) for s in shapes)


def causal(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def grouped(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def capped(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(10 * torch.tanh(q @ k.mT / 10), -1) @ v


def normed(q: Any, k: Any, v: Any) -> Any:
    scores = F.relu(q @ k.mT) ** 2
    return scores / (scores.sum(-1, keepdim=True) + 1) @ v


def masked(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


HEADS = ((2, 3, TOKENS, 40), (2, 3, OTHERS, 40), (2, 3, OTHERS, 24))
CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "plain": (F.scaled_dot_product_attention, tensors(*HEADS)),
    "causal": (causal, tensors(*((2, 3, TOKENS, 40),) * 3)),
    "grouped": (grouped, tensors((1, 6, TOKENS, 16), (1, 2, OTHERS, 16), (1, 2, OTHERS, 16))),
    "capped": (capped, tensors(*HEADS)),
    "of weights that are no softmax": (normed, tensors(*HEADS)),
    "deep": (F.scaled_dot_product_attention, tensors((1, TOKENS, 300), (1, OTHERS, 300), (1, OTHERS, 130))),
    "bf16": (F.scaled_dot_product_attention, tensors(*HEADS, dtype=torch.bfloat16)),
    "f64": (F.scaled_dot_product_attention, tensors(*HEADS, dtype=torch.float64)),
    "a mask": (masked, (*tensors(*HEADS), torch.rand(TOKENS, OTHERS) > 0.3)),
    "rows that see nothing": (masked, (*tensors(*HEADS), torch.arange(TOKENS)[:, None] * torch.ones(OTHERS) > 20)),
    "a bias": (masked, (*tensors(*HEADS), torch.randn(3, TOKENS, OTHERS))),
}


def kernels(compiled: Any) -> list[l.Kernel]:
    return [s for s in compiled.compiled.program.steps if isinstance(s, l.Kernel)]


@pytest.mark.parametrize("name", CASES)
def test_scores_stay_with_the_thread(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path))
    fn, args = CASES[name]

    class Module(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return fn(*args)

    compiled = terrazzo.compile(Module(), *args, options={"libraries": "never"})
    assert any(chained(s) for s in kernels(compiled))
    assert max(b.type.span for s in kernels(compiled) for b in s.writes) < 4 * 6 * TOKENS * OTHERS
    exact = fn(*(x.double() if x.is_floating_point() else x for x in args))
    ours, eager = ((x.double() - exact).abs() for x in (compiled(*args), fn(*args)))
    assert ours.isnan().equal(eager.isnan())
    assert ours.nan_to_num().max() <= 2 * eager.nan_to_num().max() + 4e-15


def attention(heads: int, tokens: int, keys: int) -> l.Kernel:
    """The first kernel of a sum of scores times values."""
    parsed = parse(f"""
@loop
def f(q: f32[{heads}, {tokens}, 16], k: f32[{keys}, 16], v: f32[{keys}, 16]):
    with kernel('o', o=f32[{heads}, {tokens}, 16]):
        for a0 in free({heads}):
            for a1 in free({tokens}):
                for a2 in free(16):
                    for r1 in reduce({keys}):
                        in0 = v[r1, a2]
                        for r0 in reduce(16):
                            in1 = q[a0, a1, r0]
                            in2 = k[r1, r0]
                            v0 = mul(in1, in2)
                            acc1 <- sum(v0)
                        v1 = mul(acc1, in0)
                        acc0 <- sum(v1)
                    o[a0, a1, a2] = acc0
    return (o,)
""")
    kernel: l.Kernel = parsed.steps[0]
    return kernel


@pytest.mark.parametrize(
    ("heads", "tokens", "keys", "rows"),
    [(64, 1024, 64, 192), (64, 1024, 4096, 48), (64, 1024, LONGEST, 12), (1, 1024, 64, 12), (1, 5, 64, 5)],
)
def test_rows_of_a_block(heads: int, tokens: int, keys: int, rows: int) -> None:
    """As many as have room, fewer where there would be few blocks, and no more than there are."""
    found = chained(attention(heads, tokens, keys))
    assert found is not None and found.rows == rows and not refusal(found.kernel)
    assert found.rows * keys * 4 <= max(ROOM, LEAST * LONGEST * 4)


def test_what_is_not_of_this_form() -> None:
    assert "too long" in refusal(attention(1, 100, LONGEST + 1))
    kernel = attention(1, 100, 100)
    assert "is not two products" in refusal(l.Kernel("twice", kernel.axes, (*kernel.stores, *_squared(kernel)), ""))


def _squared(kernel: l.Kernel) -> tuple[l.Store, ...]:
    """What a kernel stores, stored again, of other scores."""
    (s,) = kernel.stores
    other = attention(1, 100, 200).stores[0].value
    return (l.Store(l.Buffer("o2", s.buffer.type), s.index, l.apply("mul", s.value, other)),)


def test_weights_that_are_products_of_scores_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the steps by which Muon makes a gradient orthogonal. Weights take the place of scores in a row, one by one,
    and each sum of all scores found some of them gone; it was computed anew for each weight, besides.
    """
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path))
    x = torch.randn(256, 300) / 64

    def step(x: Any) -> Any:
        a = x @ x.mT
        return 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x

    compiled = terrazzo.compile(step, x)
    assert len(kernels(compiled)) == 3 and not any(map(chained, kernels(compiled)))
    ours, eager = ((y.double() - step(x.double())).abs().max() for y in (compiled(x), step(x)))
    assert ours <= 2 * eager
