"""Steps of serving a language model: caches, sampling, weights of few bits; and layers with odd attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.mixers import RMS, rope
from terrazzo.bench.programs.registry import Made, normal, program, uniform, whole


class MlaDecode(nn.Module):
    """MLA decode with absorbed weights over a latent cache."""

    def __init__(self, d: int, heads: int, rank: int, nope: int, rot: int, vd: int) -> None:
        super().__init__()
        self.h, self.nope, self.rot, self.vd = (heads, nope, rot, vd)
        self.q = nn.Linear(d, heads * (nope + rot), bias=False)
        self.uk = nn.Parameter(torch.randn(heads, nope, rank) / math.sqrt(nope))
        self.uv = nn.Parameter(torch.randn(heads, rank, vd) / math.sqrt(rank))
        self.o = nn.Linear(heads * vd, d, bias=False)

    def forward(self, x: Tensor, cache: Tensor, krope: Tensor, length: Tensor) -> Any:
        b = x.shape[0]
        qn, qr = self.q(x).view(b, self.h, -1).split((self.nope, self.rot), -1)
        ql = torch.einsum("bhn,hnr->bhr", qn, self.uk)
        s = torch.einsum("bhr,blr->bhl", ql, cache) + torch.einsum("bhe,ble->bhl", qr, krope)
        s = s / math.sqrt(self.nope + self.rot)
        mask = torch.arange(cache.shape[1], device=x.device) < length[:, None, None]
        p = torch.softmax(s.masked_fill(~mask, float("-inf")).float(), -1).to(x.dtype)
        y = torch.einsum("bhl,blr->bhr", p, cache)
        return self.o(torch.einsum("bhr,hrv->bhv", y, self.uv).flatten(1))


@program(small={"b": 2, "n": 16, "d": 32, "heads": 2, "rank": 8, "nope": 8, "rot": 4, "vd": 8})
def mla_decode(
    b: int = 32,
    n: int = 4096,
    d: int = 2048,
    heads: int = 16,
    rank: int = 512,
    nope: int = 128,
    rot: int = 64,
    vd: int = 128,
) -> Made:
    """A step of decoding over a latent cache, with projections absorbed."""
    return (
        MlaDecode(d, heads, rank, nope, rot, vd),
        normal(b, d),
        normal(b, n, rank),
        normal(b, n, rot),
        1 + whole(n, b),
    )


class KvDecode(nn.Module):
    """A GQA decode step: cache written in place by index_copy_, attention, MLP."""

    def __init__(self, d: int, heads: int, kv: int, size: int, inner: int) -> None:
        super().__init__()
        self.h, self.kv, self.size = (heads, kv, size)
        self.qkv, self.o = (nn.Linear(d, (heads + 2 * kv) * size, bias=False), nn.Linear(heads * size, d, bias=False))
        self.n1, self.n2 = (RMS(d), RMS(d))
        self.gu, self.dn = (nn.Linear(d, 2 * inner, bias=False), nn.Linear(inner, d, bias=False))

    def forward(self, x: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Any:
        k, v = (k.clone(), v.clone())
        b = x.shape[0]
        q, nk, nv = self.qkv(self.n1(x)).view(b, 1, -1, self.size).transpose(1, 2).split((self.h, self.kv, self.kv), 1)
        k.index_copy_(2, at, nk)
        v.index_copy_(2, at, nv)
        mask = (torch.arange(k.shape[2], device=x.device) <= at)[None, None, None]
        y = f.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, 1, -1))
        a, g = self.gu(self.n2(x)).chunk(2, -1)
        return (x + self.dn(f.silu(a) * g), k, v)


@program(small={"b": 2, "n": 16, "d": 32, "heads": 4, "kv": 2, "size": 8, "inner": 48})
def kv_decode(
    b: int = 16, n: int = 2048, d: int = 4096, heads: int = 32, kv: int = 8, size: int = 128, inner: int = 14336
) -> Made:
    """A step of decoding: the cache is written at a place, then read."""
    return (
        KvDecode(d, heads, kv, size, inner),
        normal(b, 1, d),
        normal(b, kv, n, size),
        normal(b, kv, n, size),
        torch.tensor([n // 2]),
    )


class PagedDecode(nn.Module):
    """Attention over paged caches with block tables."""

    def forward(self, q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Any:
        b, h, s = q.shape
        k, v = (kp[table].flatten(1, 2), vp[table].flatten(1, 2))
        g = h // k.shape[2]
        qg = q.view(b, k.shape[2], g, s)
        sc = torch.einsum("bkgs,blks->bkgl", qg, k) / math.sqrt(s)
        mask = torch.arange(k.shape[1], device=q.device) < lengths[:, None]
        p = torch.softmax(sc.float().masked_fill(~mask[:, None, None], float("-inf")), -1).to(q.dtype)
        return torch.einsum("bkgl,blks->bkgs", p, v).reshape(b, h, s)


@program(small={"b": 2, "h": 4, "kv": 2, "s": 8, "pages": 6, "page": 4, "per": 3})
def paged_decode(
    b: int = 32, h: int = 32, kv: int = 8, s: int = 128, pages: int = 4096, page: int = 16, per: int = 128
) -> Made:
    """A step of decoding over paged caches."""
    return (
        PagedDecode(),
        normal(b, h, s),
        normal(pages, page, kv, s),
        normal(pages, page, kv, s),
        whole(pages, b, per),
        1 + whole(page * per, b),
    )


@program(small={"b": 2, "d": 5, "words": 50})
def speculative(b: int = 64, d: int = 8, words: int = 32000) -> Made:
    """Verification of drafted tokens: accepted prefix and a resampling distribution."""

    def verify(draft: Tensor, target: Tensor, tokens: Tensor, noise: Tensor) -> Any:
        p, q = (torch.softmax(target.float(), -1), torch.softmax(draft.float(), -1))
        pt, qt = (x.gather(-1, tokens[..., None]).squeeze(-1) for x in (p[:, :-1], q))
        ok = noise.float() < (pt / qt).clamp(max=1)
        n = ok.int().cumprod(-1).sum(-1)
        pad = torch.cat((q, torch.zeros_like(q[:, :1])), 1)
        rest = (p - pad).clamp(min=0)
        rest = rest / rest.sum(-1, keepdim=True).clamp(min=1e-09)
        at = n[:, None, None].expand(-1, 1, rest.shape[-1]).long()
        return (n, rest.gather(1, at).squeeze(1), ok)

    return (verify, normal(b, d, words), normal(b, d + 1, words), whole(words, b, d), uniform(b, d))


@program(small={"b": 3, "words": 40, "k": 5})
def nucleus(b: int = 64, words: int = 50257, k: int = 50) -> Made:
    """Temperature, repetition penalty, top-k then top-p, probabilities of what is left."""

    def sample(x: Tensor, seen: Tensor) -> Any:
        x = x.float()
        hit = torch.zeros_like(x, dtype=torch.bool).scatter(1, seen, True)
        x = torch.where(hit, torch.where(x > 0, x / 1.2, x * 1.2), x) / 0.8
        least = x.topk(k, -1).values[:, -1:]
        x = x.masked_fill(x < least, float("-inf"))
        values, order = x.sort(-1, descending=True)
        p = torch.softmax(values, -1)
        drop = p.cumsum(-1) - p > 0.9
        values = values.masked_fill(drop, float("-inf"))
        return (torch.softmax(values, -1).scatter(1, order, torch.softmax(values, -1)), order[:, :1])

    return (sample, normal(b, words), whole(words, b, 7))


@program(small={"b": 2, "beams": 3, "words": 20, "layers": 2, "h": 2, "n": 6, "d": 4})
def beam_reorder(
    b: int = 16, beams: int = 4, words: int = 32000, layers: int = 4, h: int = 8, n: int = 512, d: int = 64
) -> Made:
    """A step of beam search: scores, the best of all beams" words, caches taken along."""

    def stepped(logits: Tensor, scores: Tensor, cache: Tensor) -> Any:
        lp = torch.log_softmax(logits.float(), -1) + scores.float().view(-1, 1)
        best, at = lp.view(b, -1).topk(2 * beams, -1)
        beam, word = (at // words, at % words)
        beam = (beam[:, :beams] + torch.arange(b, device=at.device)[:, None] * beams).flatten()
        return (best[:, :beams], word[:, :beams], cache.index_select(1, beam))

    return (stepped, normal(b * beams, words), normal(b * beams), normal(layers, b * beams, h, n, d))


class Int8(nn.Module):
    """Weight-only int8 and int4 linear layers with group scales."""

    def __init__(self, d: int, o: int, g: int) -> None:
        super().__init__()
        self.g = g
        self.register_buffer("w8", (torch.arange(o * d) * 7919 % 255 - 127).view(o, d).to(torch.int8))
        self.register_buffer("w4", (torch.arange(o * d // 2) * 7919 % 256).view(o, d // 2).to(torch.uint8))
        self.s8, self.s4 = (nn.Parameter(torch.rand(o, 1) / 1000), nn.Parameter(torch.rand(o, d // g, 1) / 100))

    def forward(self, x: Tensor) -> Any:
        y = f.linear(x, self.w8.to(x.dtype) * self.s8)
        low, high = (self.w4 & 15, self.w4 >> 4)
        w = (torch.stack((low, high), -1).flatten(-2).to(torch.int8) - 8).to(x.dtype)
        w = (w.unflatten(-1, (-1, self.g)) * self.s4).flatten(-2)
        return (y, f.linear(x, w))


@program(small={"t": 4, "d": 16, "o": 8, "g": 4})
def weight_only(t: int = 16, d: int = 4096, o: int = 4096, g: int = 128) -> Made:
    """Layers with weights of 8 and of 4 bits."""
    return (Int8(d, o, g), normal(t, d))


class Synth(nn.Module):
    """Attention, clipped, with low-rank adapters by task."""

    def __init__(self, d: int, heads: int, r: int, tasks: int) -> None:
        super().__init__()
        self.h = heads
        self.qkv, self.o = (nn.Linear(d, 3 * d), nn.Linear(d, d))
        self.a, self.b = (
            nn.Parameter(torch.randn(tasks, d, r) / math.sqrt(d)),
            nn.Parameter(torch.randn(tasks, r, 3 * d) / math.sqrt(r)),
        )

    def forward(self, x: Tensor, task: Tensor) -> Any:
        b, n, _ = x.shape
        y = self.qkv(x) + torch.bmm(torch.bmm(x, self.a[task]), self.b[task])
        q, k, v = y.clamp(-8, 8).view(b, n, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        y = f.scaled_dot_product_attention(q, k, v)
        return x + self.o(y.transpose(1, 2).flatten(2))


@program(small={"b": 3, "n": 8, "d": 16, "heads": 2, "r": 4, "tasks": 5}, training=True)
def lora_per_task(b: int = 16, n: int = 512, d: int = 1024, heads: int = 16, r: int = 16, tasks: int = 50) -> Made:
    """Attention with adapters of the task."""
    return (Synth(d, heads, r, tasks), normal(b, n, d), whole(tasks, b))


class QKNorm(nn.Module):
    """A sandwich-normed layer: qk norm, gqa, local/global with soft-capped scores, gelu gated mlp."""

    def __init__(self, d: int, heads: int, kv: int, size: int, inner: int, window: int) -> None:
        super().__init__()
        self.h, self.kv, self.s, self.w = (heads, kv, size, window)
        self.q, self.k, self.v, self.o = (
            nn.Linear(d, heads * size, bias=False),
            nn.Linear(d, kv * size, bias=False),
            nn.Linear(d, kv * size, bias=False),
            nn.Linear(heads * size, d, bias=False),
        )
        self.qn, self.kn = (RMS(size), RMS(size))
        self.n = nn.ModuleList(RMS(d) for _ in range(4))
        self.g, self.u, self.dn = (
            nn.Linear(d, inner, bias=False),
            nn.Linear(d, inner, bias=False),
            nn.Linear(inner, d, bias=False),
        )

    def forward(self, x: Tensor) -> Any:
        b, n, _ = x.shape
        y = self.n[0](x)

        def cut(t: Tensor) -> Any:
            return t.view(b, n, -1, self.s).transpose(1, 2)

        q, k, v = (rope(self.qn(cut(self.q(y)))), rope(self.kn(cut(self.k(y)))), cut(self.v(y)))
        k, v = (t.repeat_interleave(self.h // self.kv, 1) for t in (k, v))
        at = torch.arange(n, device=x.device)
        gap = at[:, None] - at
        s = 50 * torch.tanh(q @ k.transpose(-1, -2) * self.s ** (-0.5) / 50)
        s = s.masked_fill((gap < 0) | (gap >= self.w), torch.finfo(x.dtype).min)
        y = (torch.softmax(s.float(), -1).to(x.dtype) @ v).transpose(1, 2).flatten(2)
        x = x + self.n[1](self.o(y))
        y = self.n[2](x)
        return x + self.n[3](self.dn(f.gelu(self.g(y), approximate="tanh") * self.u(y)))


@program(small={"b": 2, "n": 16, "d": 32, "heads": 4, "kv": 2, "size": 8, "inner": 48, "window": 5}, training=True)
def capped_local_layer(
    b: int = 1,
    n: int = 2048,
    d: int = 2304,
    heads: int = 8,
    kv: int = 4,
    size: int = 256,
    inner: int = 9216,
    window: int = 1024,
) -> Made:
    """A layer with normed queries and keys and capped scores."""
    return (QKNorm(d, heads, kv, size, inner, window), normal(b, n, d))


class Parallel(nn.Module):
    """Falcon"s parallel block with multi-query attention and alibi."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.h = heads
        self.norm = nn.LayerNorm(d)
        self.qkv, self.o = (nn.Linear(d, d + 2 * (d // heads), bias=False), nn.Linear(d, d, bias=False))
        self.up, self.down = (nn.Linear(d, 4 * d), nn.Linear(4 * d, d))

    def forward(self, x: Tensor) -> Any:
        b, n, d = x.shape
        s = d // self.h
        y = self.norm(x)
        q, k, v = self.qkv(y).split((d, s, s), -1)
        q = q.view(b, n, self.h, s).transpose(1, 2)
        slope = 2 ** (-8 * torch.arange(1, self.h + 1, device=x.device, dtype=torch.float32) / self.h)
        bias = slope[:, None, None] * (torch.arange(n, device=x.device) - n + 1)
        bias = bias + torch.full((n, n), float("-inf"), device=x.device).triu(1)
        w = torch.softmax((q @ k[:, None].transpose(-1, -2)).float() / math.sqrt(s) + bias, -1).to(x.dtype)
        y2 = (w @ v[:, None]).transpose(1, 2).flatten(2)
        return x + self.o(y2) + self.down(f.gelu(self.up(y)))


@program(small={"b": 2, "n": 16, "d": 32, "heads": 4}, training=True)
def parallel_block_alibi(b: int = 2, n: int = 2048, d: int = 2048, heads: int = 32) -> Made:
    """A layer with attention and MLP side by side, one key for all heads, and biases by distance."""
    return (Parallel(d, heads), normal(b, n, d))


class XLDecoder(nn.Module):
    """Transformer-XL attention: relative shift, memory, and adaptive softmax."""

    def __init__(self, d: int, heads: int, words: int) -> None:
        super().__init__()
        self.h = heads
        self.q, self.kv, self.r, self.o = (
            nn.Linear(d, d, bias=False),
            nn.Linear(d, 2 * d, bias=False),
            nn.Linear(d, d, bias=False),
            nn.Linear(d, d, bias=False),
        )
        self.u, self.v = (
            nn.Parameter(torch.randn(heads, 1, d // heads)),
            nn.Parameter(torch.randn(heads, 1, d // heads)),
        )
        self.head = nn.Linear(d, words)

    def forward(self, x: Tensor, mem: Tensor, y: Tensor) -> Any:
        b, n, d = x.shape
        both = torch.cat((mem, x), 1)
        m = both.shape[1]
        at = torch.arange(m - 1, -1, -1, device=x.device, dtype=torch.float32)
        rate = 1 / 10000 ** (torch.arange(0, d, 2, device=x.device) / d)
        pos = torch.cat(((at[:, None] * rate).sin(), (at[:, None] * rate).cos()), -1).to(x.dtype)
        q = self.q(x).view(b, n, self.h, -1).transpose(1, 2)
        k, v = self.kv(both).view(b, m, 2, self.h, -1).permute(2, 0, 3, 1, 4)
        r = self.r(pos).view(m, self.h, -1).transpose(0, 1)
        ac = (q + self.u) @ k.transpose(-1, -2)
        bd = (q + self.v) @ r.transpose(-1, -2)
        bd = f.pad(bd, (1, 0)).view(b, self.h, m + 1, n)[:, :, 1:].reshape(b, self.h, n, m)
        s = (ac + bd) / math.sqrt(q.shape[-1])
        s = s.masked_fill(torch.ones(n, m, dtype=torch.bool, device=x.device).triu(m - n + 1), float("-inf"))
        z = (torch.softmax(s.float(), -1).to(x.dtype) @ v).transpose(1, 2).flatten(2)
        return f.cross_entropy(self.head(x + self.o(z)).flatten(0, 1).float(), y.flatten())


@program(small={"b": 2, "n": 6, "m": 4, "d": 16, "heads": 2, "words": 30}, training=True)
def transformer_xl(b: int = 8, n: int = 256, m: int = 256, d: int = 512, heads: int = 8, words: int = 20000) -> Made:
    """A layer with a memory, and its loss."""
    return (XLDecoder(d, heads, words), normal(b, n, d), normal(b, m, d), whole(words, b, n))
