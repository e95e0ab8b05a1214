"""The kernels measured in "A Principled ML Compiler Stack in 5,000 Lines of Python", the article this stack follows, at
its shapes.

Its own ratios to eager (float32, an RTX 5090, PyTorch 2.11) stand beside ours; for single kernels it gives them in
words and ranges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from terrazzo.bench.gpu_suites import Case, Made, normal

LENGTHS = (32, 128, 512)


@dataclass(frozen=True)
class Sizes:
    """A model's: of its hidden states, of what a layer's linear layers give, and of its attention."""

    hidden: int
    wide: int
    heads: int
    groups: int
    head: int


MODELS = {"TinyLlama": Sizes(2048, 5632, 32, 4, 64), "Qwen2.5-7B": Sizes(3584, 18944, 28, 4, 128)}


def article() -> tuple[Case, ...]:
    """The kernels of a decoder layer, one at a time, float32."""
    return tuple(case for model, sizes in MODELS.items() for tokens in LENGTHS for case in _layer(model, sizes, tokens))


def _layer(model: str, z: Sizes, s: int) -> list[Case]:
    import torch
    from torch.nn import functional as f

    def norm(x: Any, w: Any) -> Any:
        return f.rms_norm(x, (x.shape[-1],), w)

    def softmax(x: Any) -> Any:
        return torch.softmax(x, -1)

    def attention(q: Any, k: Any, v: Any) -> Any:
        return f.scaled_dot_product_attention(q, k, v, is_causal=True)

    def silu_mul(gate: Any, up: Any) -> Any:
        return f.silu(gate) * up

    def silu_mul_linear(gate: Any, up: Any, w: Any) -> Any:
        return f.linear(f.silu(gate) * up, w)

    def case(
        kernel: str, fn: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], out: int, operations: float, said: str
    ) -> Case:
        def make() -> Made:
            return fn, lambda: tuple(normal(shape, "f32") for shape in shapes), lambda *a: fn(*(x.double() for x in a))

        moved = 4 * (out + sum(torch.Size(shape).numel() for shape in shapes))
        return Case(f"{model} {kernel}, {s} tokens", "f32", make, moved, operations, said)

    def linear(kernel: str, k: int, n: int, said: str) -> Case:
        return case(kernel, f.linear, ((s, k), (n, k)), s * n, 2.0 * s * k * n, said)

    heads, scores, wide = (1, z.heads, s, z.head), (1, z.heads, s, s), (s, z.wide)
    products = 2.0 * z.heads * s * s * z.head  # of the two products of attention, half of each, for it is causal
    dense = "0.67x to 0.94x" if s == 512 else ""
    return [
        case("RMS norm", norm, ((s, z.hidden), (z.hidden,)), s * z.hidden, 0, "a win"),
        linear("q_proj", z.hidden, z.heads * z.head, ""),
        linear("k_proj", z.hidden, z.groups * z.head, "up to 4.68x"),
        case("softmax", softmax, (scores,), z.heads * s * s, 0, "a win"),
        case("attention", attention, (heads, heads, heads), z.heads * s * z.head, products, "a win"),
        linear("gate_proj", z.hidden, z.wide, dense),
        case("silu * up", silu_mul, (wide, wide), s * z.wide, 0, "a win"),
        linear("down_proj", z.wide, z.hidden, dense),
        case("silu * up, down_proj", silu_mul_linear, (wide, wide, (z.hidden, z.wide)), s * z.hidden,
             2.0 * s * z.wide * z.hidden, "0.25x" if (model, s) == ("Qwen2.5-7B", 512) else ""),
    ]  # fmt: skip
