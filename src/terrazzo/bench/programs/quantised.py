"""Numbers of few bits: fake quantisation, float8, whole-number products, codebooks, rotated weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Learned, Made, normal, program, uniform, whole


def learned_steps(w: Tensor, step_w: Tensor, step_x: Tensor, x: Tensor) -> Tensor:
    """LSQ: weights per channel and activations per tensor on learned grids, gradients straight through."""

    def quantised(t: Tensor, step: Tensor, low: int, high: int) -> Tensor:
        scaled = (t / step).clamp(low, high)
        return (scaled + (scaled.round() - scaled).detach()) * step

    y = f.linear(quantised(x, step_x, -128, 127), quantised(w, step_w, -8, 7))
    return f.relu(y)


@program(small={"rows": 6, "width": 8}, training=True)
def learned_quantisation(rows: int = 4096, width: int = 2048) -> Made:
    """A linear layer with learned step sizes."""
    return (
        Learned(learned_steps, normal(4 * width, width), 0.1 + uniform(4 * width, 1), 0.05 + uniform(1)),
        normal(rows, width),
    )


def observed(x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, ...]:
    """Moving minima and maxima, an affine grid, and numbers rounded to it by channel."""
    low, high = 0.9 * low + 0.1 * x.amin((0, 2, 3)), 0.9 * high + 0.1 * x.amax((0, 2, 3))
    scale = ((high - low) / 255).float().clamp(min=1e-6)
    zero = (-(low.float() / scale).round()).clamp(0, 255).to(torch.int32)[:, None, None]
    q = ((x.float() / scale[:, None, None]).round().to(torch.int32) + zero).clamp(0, 255).to(torch.uint8)
    return q, (q.to(torch.int32) - zero) * scale[:, None, None], low, high


@program(small={"images": 2, "channels": 3, "size": 4}, dtypes=("f32",))
def observers(images: int = 32, channels: int = 64, size: int = 112) -> Made:
    """Observed ranges, and fake quantisation."""
    return observed, normal(images, channels, size, size), -uniform(channels), uniform(channels)


def eight_bits(x: Tensor, w: Tensor, smooth: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """SmoothQuant: rows scaled to whole numbers on their way, a product of whole numbers, scales, and GELU."""
    y = x.float() / smooth.float()
    top = y.abs().amax(-1, keepdim=True) / 127
    q = (y / top).round().clamp(-127, 127).to(torch.int8)
    out = torch._int_mm(q, w.T).float() * top * scale.float() + bias.float()
    return f.gelu(out).to(x.dtype)


@program(small={"rows": 32, "width": 16, "out": 24})
def smooth_products(rows: int = 2048, width: int = 4096, out: int = 11008) -> Made:
    """A layer in int8 with smoothed rows."""
    return (
        eight_bits,
        normal(rows, width),
        (whole(255, out, width) - 127).to(torch.int8),
        0.5 + uniform(width),
        uniform(out),
        normal(out),
    )


def float8(x: Tensor, w: Tensor) -> Tensor:
    """DeepSeek-V3's blocks: activations in float8 by groups of 128, weights by squares, products in float32."""
    n, k = x.shape
    xg = x.float().view(n, k // 128, 128)
    sx = xg.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 448
    xq = (xg / sx).to(torch.float8_e4m3fn).to(x.dtype) * sx.to(x.dtype)
    wg = w.float().view(w.shape[0] // 128, 128, k // 128, 128)
    sw = wg.abs().amax((1, 3), keepdim=True).clamp(min=1e-6) / 448
    wq = (wg / sw).to(torch.float8_e4m3fn).to(x.dtype) * sw.to(x.dtype)
    return xq.view(n, k) @ wq.view_as(w).T


@program(small={"rows": 4, "width": 128, "out": 128})
def float8_blocks(rows: int = 4096, width: int = 4096, out: int = 4096) -> Made:
    """A product of numbers of 8 bits with block scales."""
    return float8, normal(rows, width), normal(out, width)


NORMAL_FLOAT = (
    -1.0,
    -0.6962,
    -0.5251,
    -0.3949,
    -0.2844,
    -0.1848,
    -0.0911,
    0.0,
    0.0796,
    0.1609,
    0.2461,
    0.3379,
    0.4407,
    0.5626,
    0.7230,
    1.0,
)


class FourBits(nn.Module):
    """QLoRA: weights of four bits by a table and blocks' scales, which are whole numbers too; an adapter beside."""

    def __init__(self, width: int, out: int, block: int, rank: int) -> None:
        super().__init__()
        self.register_buffer("codes", (torch.arange(out * width // 2) * 7919 % 256).to(torch.uint8))
        self.register_buffer("scales", (torch.arange(out * width // block) * 31 % 255 - 127).to(torch.int8))
        self.register_buffer("table", torch.tensor(NORMAL_FLOAT))
        self.a, self.b = nn.Parameter(torch.randn(rank, width) * 0.02), nn.Parameter(torch.randn(out, rank) * 0.02)
        self.block, self.shape = block, (out, width)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.stack((self.codes >> 4, self.codes & 15), -1).flatten()
        scale = (self.scales.float() / 127 + 1.5) * 0.02
        w = (self.table.float()[both.long()].view(-1, self.block) * scale[:, None]).view(self.shape).to(x.dtype)
        return x @ w.T + 0.5 * (x @ self.a.T) @ self.b.T


@program(small={"rows": 4, "width": 16, "out": 8, "block": 8, "rank": 2}, training=True)
def four_bit_adapter(rows: int = 2048, width: int = 4096, out: int = 4096, block: int = 64, rank: int = 16) -> Made:
    """A layer of QLoRA."""
    return FourBits(width, out, block, rank), normal(rows, width)


def rotated(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """QuaRot: a fast Hadamard transform of rows, four bits by rows, and the product."""
    n = x.shape[-1]
    y, h = x.float(), 1
    while h < n:
        a, b = y.unflatten(-1, (-1, 2, h)).unbind(-2)
        y = torch.stack((a + b, a - b), -2).flatten(-3)
        h *= 2
    y = y * n**-0.5
    step = y.abs().amax(-1, keepdim=True) / 7
    q = (y / step).round().clamp(-8, 7) * step
    return (q.to(x.dtype) @ w.to(x.dtype).T) * scale


@program(small={"rows": 4, "width": 16, "out": 8})
def rotated_rows(rows: int = 2048, width: int = 4096, out: int = 4096) -> Made:
    """Rows rotated by Hadamard's matrix before they are quantised."""
    return rotated, normal(rows, width), (whole(16, out, width) - 8).to(torch.int8), uniform(out)


def microscaled(x: Tensor, w: Tensor) -> Tensor:
    """MX formats: a shared power of two for 32 numbers, each of four bits (E2M1), rounded by hand."""

    def coded(t: Tensor) -> Tensor:
        g = t.float().unflatten(-1, (-1, 32))
        power = torch.exp2(torch.floor(torch.log2(g.abs().amax(-1, keepdim=True).clamp(min=1e-20))) - 2)
        v = (g / power).abs().clamp(max=6)
        step = torch.where(v < 2, 0.5, torch.where(v < 4, 1.0, 2.0))
        return (torch.sign(g) * (v / step).round() * step * power).flatten(-2).to(t.dtype)

    return coded(x) @ coded(w).T


@program(small={"rows": 4, "width": 64, "out": 8})
def microscaling(rows: int = 4096, width: int = 4096, out: int = 4096) -> Made:
    """A product of numbers of four bits with shared exponents."""
    return microscaled, normal(rows, width), normal(out, width)


def product_codes(query: Tensor, books: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest rows by product quantisation: a table for each query and subspace, sums of what codes pick, topk."""
    parts = query.unflatten(-1, (books.shape[0], -1))
    table = (
        parts.square().sum(-1)[..., None] - 2 * torch.einsum("qmd,mkd->qmk", parts, books) + books.square().sum(-1)
    ).float()
    at = codes.long().T[None].expand(query.shape[0], -1, -1)
    far = table.gather(2, at).sum(1)
    return far.topk(10, -1, largest=False)


@program(small={"queries": 2, "parts": 4, "words": 8, "depth": 2, "rows": 30}, dtypes=("f32",))
def product_quantised_search(
    queries: int = 16, parts: int = 16, words: int = 256, depth: int = 8, rows: int = 200_000
) -> Made:
    """A search in compressed rows."""
    return (
        product_codes,
        normal(queries, parts * depth),
        normal(parts, words, depth),
        whole(words, rows, parts).to(torch.uint8),
    )


class Residual(nn.Module):
    """Residual vector quantisation: the nearest of a book, what is left to the next, usage counted by adding."""

    def __init__(self, books: int, words: int, width: int) -> None:
        super().__init__()
        self.books = nn.Parameter(torch.randn(books, words, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left, total, codes, counts = x, torch.zeros_like(x), [], []
        for book in self.books:
            far = left.square().sum(-1, keepdim=True) - 2 * left @ book.T + book.square().sum(-1)
            at = far.argmin(-1)
            found = book[at]
            total, left = total + found, left - found.detach()
            codes.append(at)
            counts.append(
                torch.zeros(book.shape[0], device=x.device).index_add_(0, at, torch.ones(at.shape, device=x.device))
            )
        return x + (total - x), torch.stack(codes, -1), torch.stack(counts)


@program(small={"rows": 20, "books": 2, "words": 8, "width": 4}, training=True, dtypes=("f32",))
def residual_codes(rows: int = 16384, books: int = 8, words: int = 1024, width: int = 128) -> Made:
    """Codes of what codes leave."""
    return Residual(books, words, width), normal(rows, width)


def cached(q: Tensor, k: Tensor, v: Tensor, ks: Tensor, vs: Tensor, length: Tensor) -> Tensor:
    """Attention of one token over keys and values in int8, with scales by head and token."""
    key = k.to(q.dtype) * ks[..., None]
    s = (q @ key.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    s = s.masked_fill(torch.arange(k.shape[2], device=q.device) >= length[:, None, None, None], float("-inf"))
    return torch.softmax(s, -1).to(q.dtype) @ (v.to(q.dtype) * vs[..., None])


@program(small={"count": 2, "heads": 2, "length": 9, "width": 8})
def eight_bit_cache(count: int = 16, heads: int = 8, length: int = 8192, width: int = 128) -> Made:
    """A decoding step over a cache of int8."""
    k, v = ((whole(255, count, heads, length, width) - 127).to(torch.int8) for _ in range(2))
    return (
        cached,
        normal(count, heads, 4, width),
        k,
        v,
        uniform(count, heads, length),
        uniform(count, heads, length),
        1 + whole(length, count),
    )
