"""Graphs given by edges or neighbours; series that are decomposed or cut into segments."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.agents import mlp
from terrazzo.bench.programs.registry import Made, normal, program, whole


def segment_softmax(s: Tensor, to: Tensor, n: int) -> Tensor:
    """A softmax over the edges that end where one does."""
    top = s.new_full((n, *s.shape[1:]), float("-inf")).scatter_reduce(
        0, to.view(-1, *[1] * (s.ndim - 1)).expand_as(s), s, "amax"
    )
    e = torch.exp(s - top[to])
    total = torch.zeros_like(top).index_add(0, to, e)
    return e / total[to]


class GatV2(nn.Module):
    """Attention to neighbours, by what both ends are."""

    def __init__(self, i: int, o: int, heads: int) -> None:
        super().__init__()
        self.h = heads
        self.l, self.r = (nn.Linear(i, o * heads), nn.Linear(i, o * heads))
        self.a = nn.Parameter(torch.randn(heads, o))

    def forward(self, x: Tensor, src: Tensor, to: Tensor) -> Any:
        n = x.shape[0]
        l, r = (self.l(x).view(n, self.h, -1), self.r(x).view(n, self.h, -1))
        m = f.leaky_relu(l[src] + r[to], 0.2)
        w = segment_softmax((m * self.a).float().sum(-1), to, n).to(x.dtype)
        out = torch.zeros_like(l).index_add(0, to, l[src] * w[..., None])
        return f.elu(out.flatten(1))


@program(small={"n": 12, "e": 40, "i": 8, "o": 4, "heads": 2}, training=True)
def gat_v2(n: int = 20000, e: int = 200000, i: int = 256, o: int = 32, heads: int = 8) -> Made:
    """A layer of graph attention."""
    return (GatV2(i, o, heads), normal(n, i), whole(n, e), whole(n, e))


class Pna(nn.Module):
    """Four aggregators times three scalers."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.pre, self.post = (mlp(2 * d, d), mlp(13 * d, d, d))

    def forward(self, x: Tensor, src: Tensor, to: Tensor) -> Any:
        n, d = x.shape
        m = self.pre(torch.cat((x[src], x[to]), -1)).float()
        at = to[:, None].expand_as(m)
        zero = m.new_zeros(n, d)
        deg = m.new_zeros(n).index_add(0, to, torch.ones_like(m[:, 0])).clamp(min=1)[:, None]
        mean = zero.index_add(0, to, m) / deg
        var = (zero.index_add(0, to, m * m) / deg - mean * mean).clamp(min=1e-05)
        top = zero.scatter_reduce(0, at, m, "amax", include_self=False)
        low = zero.scatter_reduce(0, at, m, "amin", include_self=False)
        a = torch.cat((mean, var.sqrt(), top, low), -1)
        s = torch.log(deg + 1)
        return self.post(torch.cat((x.float(), a, a * s / 2.5, a * 2.5 / s), -1).to(x.dtype)) + x


@program(small={"n": 10, "e": 30, "d": 4}, training=True)
def pna(n: int = 10000, e: int = 100000, d: int = 128) -> Made:
    """A layer with many aggregators."""
    return (Pna(d), normal(n, d), whole(n, e), whole(n, e))


class Sage(nn.Module):
    """Mean, max pooling sampled neighbours as a table."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.s, self.m, self.p, self.q = (nn.Linear(i, o), nn.Linear(i, o), nn.Linear(i, i), nn.Linear(i, o))

    def forward(self, x: Tensor, near: Tensor) -> Any:
        y = x[near]
        pooled = torch.relu(self.p(y)).amax(1)
        return f.normalize(torch.relu(self.s(x) + self.m(y.mean(1)) + self.q(pooled)), dim=-1)


@program(small={"n": 10, "k": 3, "i": 6, "o": 4}, training=True)
def sage_pool(n: int = 20000, k: int = 10, i: int = 128, o: int = 128) -> Made:
    """A layer over sampled neighbours."""
    return (Sage(i, o), normal(n, i), whole(n, n, k))


class Graphormer(nn.Module):
    """Dense graph transformer: shortest path bias, degree embeddings, masks, virtual node."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.h = heads
        self.deg, self.path, self.virtual = (
            nn.Embedding(64, d),
            nn.Embedding(32, heads),
            nn.Parameter(torch.randn(1, 1, d)),
        )
        self.qkv, self.o = (nn.Linear(d, 3 * d), nn.Linear(d, d))
        self.n1, self.n2, self.m = (nn.LayerNorm(d), nn.LayerNorm(d), mlp(d, 4 * d, d, act=nn.GELU))

    def forward(self, x: Tensor, degree: Tensor, dist: Tensor, mask: Tensor) -> Any:
        b, n, _ = x.shape
        x = torch.cat((self.virtual.expand(b, -1, -1), x + self.deg(degree)), 1)
        bias = f.pad(self.path(dist).permute(0, 3, 1, 2), (1, 0, 1, 0))
        mask = f.pad(mask, (1, 0), value=True)
        bias = bias.masked_fill(~mask[:, None, None], float("-inf"))
        q, k, v = self.qkv(self.n1(x)).view(b, n + 1, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        y = f.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
        x = x + self.o(y)
        return x + self.m(self.n2(x))


@program(small={"b": 2, "n": 6, "d": 16, "heads": 2}, training=True)
def graphormer(b: int = 64, n: int = 127, d: int = 512, heads: int = 32) -> Made:
    """A layer of a graph transformer."""
    return (Graphormer(d, heads), normal(b, n, d), whole(64, b, n), whole(32, b, n, n), whole(3, b, n) > 0)


class Rgcn(nn.Module):
    """Relations with basis decomposition; DistMult scores."""

    def __init__(self, n: int, d: int, rel: int, bases: int) -> None:
        super().__init__()
        self.e, self.b, self.c, self.s = (
            nn.Embedding(n, d),
            nn.Parameter(torch.randn(bases, d, d) / math.sqrt(d)),
            nn.Parameter(torch.randn(rel, bases)),
            nn.Linear(d, d),
        )
        self.r = nn.Embedding(rel, d)

    def forward(self, src: Tensor, rel: Tensor, to: Tensor, h: Tensor, r: Tensor, t: Tensor) -> Any:
        x = self.e.weight
        proj = torch.einsum("nd,bde->nbe", x, self.b)
        m = (proj[src] * self.c[rel][..., None]).sum(1)
        deg = x.new_zeros(len(x)).index_add(0, to, torch.ones_like(m[:, 0])).clamp(min=1)
        x = torch.relu(self.s(x) + torch.zeros_like(x).index_add(0, to, m) / deg[:, None])
        return (x[h] * self.r(r) * x[t]).sum(-1)


@program(small={"n": 10, "d": 6, "rel": 3, "bases": 2, "e": 25, "q": 7}, training=True)
def rgcn(n: int = 15000, d: int = 128, rel: int = 237, bases: int = 8, e: int = 150000, q: int = 4096) -> Made:
    """A relational layer, and scores of links."""
    return (Rgcn(n, d, rel, bases), whole(n, e), whole(rel, e), whole(n, e), whole(n, q), whole(rel, q), whole(n, q))


class NHits(nn.Module):
    """Pooled inputs, and coefficients that are interpolated."""

    def __init__(self, n: int, horizon: int, d: int) -> None:
        super().__init__()
        self.pools, self.downs, self.h, self.n = ((16, 8, 1), (24, 12, 1), horizon, n)
        self.nets = nn.ModuleList(
            (mlp(-(-n // p), d, d, -(-n // q) + -(-horizon // q)) for p, q in zip(self.pools, self.downs, strict=True))
        )

    def forward(self, x: Tensor) -> Any:
        out = 0
        for p, q, net in zip(self.pools, self.downs, self.nets, strict=True):
            theta = net(f.max_pool1d(x[:, None], p, p, ceil_mode=True).squeeze(1))
            back, fore = (theta[:, None, : -(-self.n // q)], theta[:, None, -(-self.n // q) :])
            x = x - f.interpolate(back, size=self.n, mode="linear").squeeze(1)
            out = out + f.interpolate(fore, size=self.h, mode="linear").squeeze(1)
        return out


@program(small={"b": 3, "n": 48, "horizon": 24, "d": 8}, training=True)
def nhits(b: int = 1024, n: int = 480, horizon: int = 96, d: int = 512) -> Made:
    """Blocks at several rates."""
    return (NHits(n, horizon, d), normal(b, n))


class AutoCorr(nn.Module):
    """Autoformer: decomposition by moving averages, autocorrelation by FFT, delays by topk and gathers."""

    def __init__(self, d: int, heads: int, k: int) -> None:
        super().__init__()
        self.h, self.k = (heads, k)
        self.q, self.kk, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.f1, self.f2 = (nn.Conv1d(d, 4 * d, 1, bias=False), nn.Conv1d(4 * d, d, 1, bias=False))

    def decompose(self, x: Tensor) -> Any:
        y = torch.cat((x[:, :1].expand(-1, 12, -1), x, x[:, -1:].expand(-1, 12, -1)), 1)
        mean = f.avg_pool1d(y.transpose(1, 2), 25, 1).transpose(1, 2)
        return (x - mean, mean)

    def forward(self, x: Tensor) -> Any:
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, self.h, -1).permute(0, 2, 3, 1) for t in (self.q(x), self.kk(x), self.v(x)))
        corr = torch.fft.irfft(torch.fft.rfft(q.float()) * torch.fft.rfft(k.float()).conj(), n)
        w, delay = corr.mean((1, 2)).topk(self.k, -1)
        w = torch.softmax(w, -1).to(x.dtype)
        vv = torch.cat((v, v), -1)
        at = torch.arange(n, device=x.device)
        out = torch.zeros_like(v)
        for i in range(self.k):
            place = (at + delay[:, i, None])[:, None, None].expand_as(v)
            out = out + vv.gather(-1, place) * w[:, i, None, None, None]
        x, _ = self.decompose(x + self.o(out.permute(0, 3, 1, 2).flatten(2)))
        y = self.f2(f.gelu(self.f1(x.transpose(1, 2)))).transpose(1, 2)
        x, trend = self.decompose(x + y)
        return (x, trend)


@program(small={"b": 2, "n": 30, "d": 8, "heads": 2, "k": 2}, training=True)
def auto_correlation(b: int = 32, n: int = 336, d: int = 512, heads: int = 8, k: int = 5) -> Made:
    """A layer of autocorrelation."""
    return (AutoCorr(d, heads, k), normal(b, n, d))


class Crossformer(nn.Module):
    """Segments, attention in time, then routers across dimensions."""

    def __init__(self, seg: int, d: int, heads: int, routers: int, n: int, v: int) -> None:
        super().__init__()
        self.seg = seg
        self.e, self.pos, self.r = (
            nn.Linear(seg, d),
            nn.Parameter(torch.randn(v, n // seg, d)),
            nn.Parameter(torch.randn(n // seg, routers, d)),
        )
        self.t, self.s1, self.s2 = (nn.MultiheadAttention(d, heads, batch_first=True) for _ in range(3))
        self.n1, self.n2, self.m = (nn.LayerNorm(d), nn.LayerNorm(d), mlp(d, 2 * d, d, act=nn.GELU))

    def forward(self, x: Tensor) -> Any:
        b, _, v = x.shape
        y = self.e(x.transpose(1, 2).unflatten(2, (-1, self.seg))) + self.pos
        l, d = (y.shape[2], y.shape[3])
        y = y.flatten(0, 1)
        y = self.n1(y + self.t(y, y, y, need_weights=False)[0])
        z = y.view(b, v, l, d).transpose(1, 2).flatten(0, 1)
        r = self.r.repeat(b, 1, 1)
        buf = self.s1(r, z, z, need_weights=False)[0]
        z = self.n2(z + self.s2(z, buf, buf, need_weights=False)[0])
        return (z + self.m(z)).view(b, l, v, d)


@program(small={"b": 2, "n": 8, "v": 3, "seg": 4, "d": 8, "heads": 2, "routers": 2}, training=True)
def crossformer(
    b: int = 32, n: int = 168, v: int = 21, seg: int = 6, d: int = 256, heads: int = 4, routers: int = 10
) -> Made:
    """A layer over time and dimensions."""
    return (Crossformer(seg, d, heads, routers, n, v), normal(b, n, v))
