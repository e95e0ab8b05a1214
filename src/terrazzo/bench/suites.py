"""What is measured. A case makes a function and several sets of inputs for it, random normal ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Made = tuple[Callable[..., Any], list[tuple[Any, ...]], dict[str, Any]]
"""What is called, sets of positional arguments, and the named arguments of all of them."""

SETS = 3
"""Sets of inputs per case. They take turns, so that no call finds its inputs just where the last one left them."""


@dataclass(frozen=True)
class Case:
    """`make` is called once, after the seed was set, and gives what is to be compared."""

    name: str
    make: Callable[[], Made]


def chains() -> tuple[Case, ...]:
    """Chains of pointwise operations, norms and softmax, at the sizes of decoder layers: what fusion is for."""
    import torch
    from torch.nn import functional as f

    def gelu_by_hand(x: Any) -> Any:
        return 0.5 * x * (1 + torch.tanh(0.797 * (x + 0.044 * x * x * x)))

    def gated(gate: Any, up: Any) -> Any:
        return f.silu(gate) * up

    def bias_gelu(x: Any, bias: Any) -> Any:
        return f.gelu(x + bias)

    def residual_rms_norm(x: Any, residual: Any, weight: Any) -> Any:
        h = x + residual
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight

    def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
        return f.layer_norm(x, x.shape[-1:], weight, bias)

    def residual_layer_norm(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
        return f.layer_norm(x + residual, x.shape[-1:], weight, bias)

    def masked_softmax(scores: Any, mask: Any) -> Any:
        return torch.softmax(scores * 0.125 + mask, -1)

    def rotary(x: Any, cos: Any, sin: Any) -> Any:
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    def normalise_and_clip(x: Any) -> Any:
        return ((x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)).clamp(-3, 3)

    def log_softmax(x: Any) -> Any:
        return torch.log_softmax(x, -1)

    return (
        _case("gelu by hand", gelu_by_hand, (32, 18944)),
        _case("silu(gate) * up", gated, (128, 5632), (128, 5632)),
        _case("gelu(x + bias)", bias_gelu, (512, 3072), (3072,)),
        _case("residual + RMS norm", residual_rms_norm, (128, 2048), (128, 2048), (2048,)),
        _case("layer norm", layer_norm, (512, 768), (768,), (768,)),
        _case("residual + layer norm", residual_layer_norm, (512, 768), (512, 768), (768,), (768,)),
        _case("scaled, masked softmax", masked_softmax, (12, 128, 128), (128, 128)),
        _case("log-softmax", log_softmax, (64, 32000)),
        _case("rotary embedding", rotary, (32, 128, 64), (128, 64), (128, 64)),
        _case("normalise and clip", normalise_and_clip, (512, 1024)),
    )


def layer() -> tuple[Case, ...]:
    """A decoder layer of TinyLlama-1.1B with random weights."""
    import torch

    def make(length: int) -> Callable[[], Made]:
        def made() -> Made:
            from terrazzo.front import huggingface

            module, args, kwargs = huggingface.load(
                "TinyLlama/TinyLlama-1.1B-Chat-v1.0", layer=0, seq_len=length, random_weights=True
            )
            hidden, *rest = args
            return module, [(torch.randn_like(hidden), *rest) for _ in range(SETS)], kwargs

        return made

    return tuple(Case(f"TinyLlama layer, {length} tokens", make(length)) for length in (32, 128))


def gemm() -> tuple[Case, ...]:
    """Linear layers without and with what follows them, by rows, inner size and columns; and batched products."""
    import torch
    from torch.nn import functional as f

    def linear(x: Any, weight: Any) -> Any:
        return f.linear(x, weight)

    def linear_gelu(x: Any, weight: Any, bias: Any) -> Any:
        return f.gelu(f.linear(x, weight, bias))

    def batched(a: Any, b: Any) -> Any:
        return torch.matmul(a, b.transpose(-1, -2))

    sizes = (
        (1, 2048, 2048),
        (32, 2048, 2048),
        (128, 2048, 5632),
        (128, 5632, 2048),
        (512, 768, 3072),
        (512, 1024, 1024),
    )
    return (
        *(_case(f"linear {m} x {k} x {n}", linear, (m, k), (n, k)) for m, k, n in sizes),
        _case("gelu(linear) 512 x 768 x 3072", linear_gelu, (512, 768), (3072, 768), (3072,)),
        _case("q @ k.T, 12 heads of 128 x 64", batched, (12, 128, 64), (12, 128, 64)),
    )


SUITES: dict[str, Callable[[], tuple[Case, ...]]] = {"chains": chains, "layer": layer, "gemm": gemm}


def _case(name: str, fn: Callable[..., Any], *shapes: tuple[int, ...]) -> Case:
    import torch

    return Case(name, lambda: (fn, [tuple(torch.randn(s) for s in shapes) for _ in range(SETS)], {}))
