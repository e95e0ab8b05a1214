"""Operators, one at a time, at sizes that matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as f

from terrazzo.bench.programs.registry import DTYPES, Function, Made, declare, normal, scattered


def operator(
    name: str, call: Callable[..., Any], *shapes: tuple[int, ...], dtypes: Sequence[str] = tuple(DTYPES)
) -> None:
    """Declares a function of random tensors of these shapes."""

    def make() -> Made:
        return Function(call), *(normal(*shape) for shape in shapes)

    declare(name, "operators", make, {}, dtypes=dtypes)


def counted(high: int, x: Tensor, *shape: int) -> Tensor:
    """Indices where `x` is."""
    return scattered(high, *shape).to(x.device)


# Reductions.
operator("softmax", lambda x: torch.softmax(x, -1), (4096, 50257))
operator("log_softmax_middle", lambda x: torch.log_softmax(x, 1), (64, 1000, 64))
operator("cross_entropy", lambda x: f.cross_entropy(x, counted(31999, x, 8192)), (8192, 32000))
operator(
    "kl", lambda a, b: f.kl_div(f.log_softmax(a, -1), f.softmax(b, -1), reduction="batchmean"), *((2048, 32000),) * 2
)
operator("sum_all", lambda x: x.sum(), (1 << 26,))
operator("mean_columns", lambda x: x.mean(0), (65536, 1024))
operator("variance_middle", lambda x: x.var(1), (64, 4096, 256))
operator("argmax", lambda x: x.argmax(-1), (4096, 32000))
operator("norms", lambda x: x / x.norm(dim=-1, keepdim=True), (65536, 512))
operator("rms_norm", lambda x, w: f.rms_norm(x, (4096,), w), (8192, 4096), (4096,))
operator("layer_norm_wide", lambda x: f.layer_norm(x, (65536,)), (512, 65536))
operator("group_norm", lambda x: f.group_norm(x, 32), (16, 512, 64, 64))
operator("instance_norm", lambda x: f.instance_norm(x), (16, 64, 256, 256))
operator("logsumexp_rows", lambda x: torch.logsumexp(x, -1), (8192, 16384))
operator("max_rows", lambda x: x.amax(-1), (8192, 16384))

# Scans and orders.
operator("cumsum_long", lambda x: torch.cumsum(x, -1), (64, 1 << 18))
operator("cumsum_columns", lambda x: torch.cumsum(x, 0), (1 << 14, 1024))
operator("cumprod", lambda x: torch.cumprod(x, -1), (1024, 4096))
operator("logcumsumexp", lambda x: torch.logcumsumexp(x, -1), (256, 8192))
operator("sort", lambda x: torch.sort(x, -1).values, (1024, 16384))
operator("topk", lambda x: torch.topk(x, 50, -1).values, (256, 50257))
operator("median", lambda x: x.median(-1).values, (1024, 4096))

# Moves.
operator("transpose", lambda x: x.transpose(1, 2).contiguous(), (64, 1024, 1024))
operator("permute", lambda x: x.permute(0, 3, 1, 2).contiguous() * 2, (32, 128, 128, 64))
operator("roll", lambda x: torch.roll(x, (3, 5), (1, 2)), (32, 512, 512))
operator("unfold", lambda x: f.unfold(x, 3, padding=1), (16, 64, 64, 64))
operator("pixel_shuffle", lambda x: f.pixel_shuffle(x, 2), (16, 256, 64, 64))
operator("concatenate", lambda a, b, c: torch.cat((a, b.relu(), c), 1), *((4096, 2048),) * 3)
operator("pad", lambda x: f.pad(x, (3, 3, 3, 3), mode="reflect"), (16, 64, 128, 128))
operator("flip", lambda x: x.flip(-1), (8192, 4096))

# Indices.
operator("gather", lambda x: x.gather(1, counted(4093, x, 4096, 64)), (4096, 4096))
operator("index_add", lambda x: x.new_zeros(1000, 512).index_add(0, counted(997, x, 65536), x), (65536, 512))
operator("embedding_sum", lambda w: f.embedding(counted(99991, w, 4096, 64), w).sum(1), (100000, 128))
operator("histogram", lambda x: f.one_hot((x * 10).long().clamp(0, 63), 64).sum(0), (100000,))
operator("grid_sample", lambda x, g: f.grid_sample(x, g, align_corners=False), (8, 32, 128, 128), (8, 128, 128, 2))

# Pooling and sizes.
operator("max_pool", lambda x: f.max_pool2d(x, 3, 2, 1), (64, 64, 112, 112))
operator("mean_pool", lambda x: f.avg_pool2d(x, 7), (64, 512, 49, 49))
operator("adaptive_pool", lambda x: f.adaptive_avg_pool2d(x, (5, 7)), (64, 256, 56, 56))
operator("bicubic", lambda x: f.interpolate(x, scale_factor=2, mode="bicubic"), (8, 32, 128, 128))
operator("bilinear", lambda x: f.interpolate(x, size=(250, 300), mode="bilinear"), (8, 64, 128, 128))

# Products.
operator("einsum", lambda a, b: torch.einsum("bhqd,bkhd->bhqk", a, b), (8, 16, 512, 64), (8, 512, 16, 64))
operator("batched", lambda a, b: a @ b, *((64, 512, 512),) * 2)
operator("matrix_vector", lambda a, b: a @ b, (16384, 16384), (16384,))
operator("vector_matrix", lambda a, b: b @ a, (16384, 16384), (16384,))
operator("outer", lambda a, b: torch.outer(a, b), (8192,), (8192,))
operator("odd_sizes", lambda a, b: a @ b, (1000, 1001), (1001, 999))
operator("tall", lambda a, b: a.T @ b, *((100000, 64),) * 2)
operator("gram", lambda a: a @ a.T, (4096, 1024))
operator("triangles", lambda a: torch.triu(a) @ torch.tril(a), (2048, 2048))
operator("swiglu", lambda x, a, b: f.silu(x @ a) * (x @ b), (2048, 4096), (4096, 14336), (4096, 14336))
operator("distances", lambda a, b: torch.cdist(a, b), *((2048, 128),) * 2)

# Attention.
operator("attention", f.scaled_dot_product_attention, *((4, 32, 2048, 128),) * 3)
operator(
    "attention_causal_80",
    lambda q, k, v: f.scaled_dot_product_attention(q, k, v, is_causal=True),
    *((4, 16, 1000, 80),) * 3,
)
operator("attention_masked", lambda q, k, v, m: f.scaled_dot_product_attention(q, k, v, attn_mask=m),
         *((4, 16, 1024, 64),) * 3, (4, 1, 1024, 1024))  # fmt: skip
operator("attention_decode", f.scaled_dot_product_attention, (16, 32, 1, 128), *((16, 32, 8192, 128),) * 2)
operator("attention_linear", lambda q, k, v: torch.softmax(q, -1) @ (torch.softmax(k, -2).transpose(-1, -2) @ v),
         *((16, 8, 1024, 64),) * 3)  # fmt: skip

# Element by element.
operator("pointwise_chain", lambda x: torch.where(x > 0, x.exp(), x.sin()) * x.sigmoid() + x.tanh(), (1 << 25,))
operator("quantise", lambda x: (x * 1.1).clamp(-1, 1).round().to(torch.int32).bitwise_and(255), (1 << 24,))

# Convolutions and Fourier transforms.
operator("depthwise", lambda x, w: f.conv2d(x, w, padding=3, groups=256), (16, 256, 56, 56), (256, 1, 7, 7))
operator("grouped", lambda x, w: f.conv2d(x, w, padding=1, groups=8), (16, 256, 56, 56), (256, 32, 3, 3))
operator("fourier", lambda x: torch.fft.rfft(x).abs(), (64, 4096), dtypes=("f32",))
