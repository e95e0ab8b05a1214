"""Layers of language models that mix words in other ways than attention does, or choose experts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Made, normal, program


class RMS(nn.Module):
    """A root mean square norm, in float32."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Any:
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-06)).to(x.dtype) * self.weight


def rope(x: Tensor, base: float = 10000.0) -> Tensor:
    """Rotated by places."""
    n, d = (x.shape[-2], x.shape[-1])
    rate = base ** (-torch.arange(0, d, 2, device=x.device, dtype=torch.float32) / d)
    angle = torch.arange(n, device=x.device, dtype=torch.float32)[:, None] * rate
    cos, sin = (torch.cat((angle, angle), -1).cos().to(x.dtype), torch.cat((angle, angle), -1).sin().to(x.dtype))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class DeepSeek(nn.Module):
    """MLA with rope parts + MoE with shared experts, top-k grouped routing by sort/gather of rows."""

    def __init__(
        self,
        d: int,
        heads: int,
        q_rank: int,
        kv_rank: int,
        nope: int,
        rot: int,
        vd: int,
        experts: int,
        inner: int,
        k: int,
        shared: int,
    ) -> None:
        super().__init__()
        self.h, self.nope, self.rot, self.vd, self.kv_rank, self.k, self.e = (heads, nope, rot, vd, kv_rank, k, experts)
        self.qa, self.qn, self.qb = (
            nn.Linear(d, q_rank, bias=False),
            RMS(q_rank),
            nn.Linear(q_rank, heads * (nope + rot), bias=False),
        )
        self.kva, self.kvn, self.kvb = (
            nn.Linear(d, kv_rank + rot, bias=False),
            RMS(kv_rank),
            nn.Linear(kv_rank, heads * (nope + vd), bias=False),
        )
        self.o = nn.Linear(heads * vd, d, bias=False)
        self.n1, self.n2 = (RMS(d), RMS(d))
        self.gate = nn.Linear(d, experts, bias=False)
        self.bias = nn.Parameter(torch.zeros(experts))
        self.up = nn.Parameter(torch.randn(experts, d, 2 * inner) / math.sqrt(d))
        self.down = nn.Parameter(torch.randn(experts, inner, d) / math.sqrt(inner))
        self.sg, self.su, self.sd = (
            nn.Linear(d, shared, bias=False),
            nn.Linear(d, shared, bias=False),
            nn.Linear(shared, d, bias=False),
        )

    def attention(self, x: Tensor) -> Any:
        b, n, _ = x.shape
        q = self.qb(self.qn(self.qa(x))).view(b, n, self.h, -1).transpose(1, 2)
        qn, qr = q.split((self.nope, self.rot), -1)
        c, kr = self.kva(x).split((self.kv_rank, self.rot), -1)
        k, v = self.kvb(self.kvn(c)).view(b, n, self.h, -1).transpose(1, 2).split((self.nope, self.vd), -1)
        kr = rope(kr)[:, None].expand(-1, self.h, -1, -1)
        q, k = (torch.cat((qn, rope(qr)), -1), torch.cat((k, kr), -1))
        y = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))

    def experts(self, x: Tensor) -> Any:
        t, d = x.shape
        scores = torch.sigmoid(self.gate(x.float().to(x.dtype)).float())
        chosen = (scores + self.bias).topk(self.k, -1).indices
        w = scores.gather(-1, chosen)
        w = (w / w.sum(-1, keepdim=True)).to(x.dtype)
        flat = chosen.flatten()
        hot = f.one_hot(flat, self.e)
        place = (hot.cumsum(0) * hot).sum(-1) - 1
        cap = max(4, t * self.k * 2 // self.e)
        keep = place < cap
        slot = torch.where(keep, flat * cap + place, self.e * cap)
        rows = x.repeat_interleave(self.k, 0)
        buffer = x.new_zeros(self.e * cap + 1, d).index_copy(0, slot, rows)[:-1].view(self.e, cap, d)
        a, g = torch.bmm(buffer, self.up).chunk(2, -1)
        out = torch.bmm(f.silu(a) * g, self.down).flatten(0, 1)
        out = torch.cat((out, out.new_zeros(1, d)))[slot].view(t, self.k, d)
        return (out * w[..., None]).sum(1) + self.sd(f.silu(self.sg(x)) * self.su(x))

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(self.n1(x))
        return x + self.experts(self.n2(x).flatten(0, 1)).view_as(x)


@program(
    small={
        "b": 2,
        "n": 16,
        "d": 32,
        "heads": 2,
        "q_rank": 16,
        "kv_rank": 8,
        "nope": 8,
        "rot": 4,
        "vd": 8,
        "experts": 4,
        "inner": 16,
        "k": 2,
        "shared": 16,
    },
    training=True,
)
def mla_moe(
    b: int = 1,
    n: int = 2048,
    d: int = 2048,
    heads: int = 16,
    q_rank: int = 768,
    kv_rank: int = 512,
    nope: int = 128,
    rot: int = 64,
    vd: int = 128,
    experts: int = 32,
    inner: int = 1408,
    k: int = 6,
    shared: int = 2816,
) -> Made:
    """A layer of latent attention with rotary parts, and experts chosen by sorting scores, with capacities."""
    return (DeepSeek(d, heads, q_rank, kv_rank, nope, rot, vd, experts, inner, k, shared), normal(b, n, d))


class GLA(nn.Module):
    """Gated linear attention in chunks."""

    def __init__(self, d: int, heads: int, chunk: int) -> None:
        super().__init__()
        self.h, self.c = (heads, chunk)
        self.qkv, self.g, self.o = (nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d), nn.Linear(d, d, bias=False))
        self.r, self.n = (nn.Linear(d, d), RMS(d // heads))

    def forward(self, x: Tensor) -> Any:
        b, n, d = x.shape
        s = d // self.h

        def cut(t: Tensor) -> Any:
            return t.view(b, n // self.c, self.c, self.h, s).permute(0, 3, 1, 2, 4)

        q, k, v = (cut(t) for t in self.qkv(x).chunk(3, -1))
        g = cut(f.logsigmoid(self.g(x).float()) / 16)
        cum = g.cumsum(3)
        last = cum[:, :, :, -1:]
        qd, kd, kl = (q.float() * cum.exp() * s ** (-0.5), k.float() * (-cum).exp(), k.float() * (last - cum).exp())
        inner = (qd @ kd.transpose(-1, -2)).tril() @ v.float()
        states = kl.transpose(-1, -2) @ v.float()
        state = torch.zeros_like(states[:, :, 0])
        outs = []
        for i in range(n // self.c):
            outs.append(qd[:, :, i] @ state)
            state = state * last[:, :, i].exp().transpose(-1, -2) + states[:, :, i]
        y = (inner + torch.stack(outs, 2)).permute(0, 2, 3, 1, 4).reshape(b, n, self.h, s).to(x.dtype)
        return self.o(self.n(y).flatten(2) * f.silu(self.r(x)))


@program(small={"b": 2, "n": 16, "d": 16, "heads": 2, "chunk": 4}, training=True)
def gated_linear_attention(b: int = 4, n: int = 2048, d: int = 1024, heads: int = 4, chunk: int = 128) -> Made:
    """A layer of linear attention with gates, in chunks."""
    return (GLA(d, heads, chunk), normal(b, n, d))


class Delta(nn.Module):
    """DeltaNet with the chunked WY form: a triangular inverse by forward substitution."""

    def __init__(self, d: int, heads: int, chunk: int) -> None:
        super().__init__()
        self.h, self.c = (heads, chunk)
        self.qkv, self.b, self.o = (nn.Linear(d, 3 * d, bias=False), nn.Linear(d, heads), nn.Linear(d, d, bias=False))

    def forward(self, x: Tensor) -> Any:
        b, n, d = x.shape
        c = self.c

        def cut(t: Tensor) -> Any:
            return t.view(b, n // c, c, self.h, -1).permute(0, 3, 1, 2, 4).float()

        q, k, v = (cut(t) for t in self.qkv(x).chunk(3, -1))
        beta = cut(torch.sigmoid(self.b(x)))
        q, k = (f.normalize(q, dim=-1), f.normalize(k, dim=-1))
        kb, vb = (k * beta, v * beta)
        a = -(kb @ k.transpose(-1, -2)).tril(-1)
        t = a
        for i in range(1, c):
            row = t[..., i, :] + (t[..., i, :, None] * t).sum(-2)
            t = torch.cat((t[..., :i, :], row[..., None, :], t[..., i + 1 :, :]), -2)
        t = t + torch.eye(c, device=x.device)
        w, u = (t @ kb, t @ vb)
        state = torch.zeros_like(k[:, :, 0].transpose(-1, -2) @ v[:, :, 0])
        outs = []
        for i in range(n // c):
            fresh = u[:, :, i] - w[:, :, i] @ state
            outs.append(q[:, :, i] @ state + (q[:, :, i] @ k[:, :, i].transpose(-1, -2)).tril() @ fresh)
            state = state + k[:, :, i].transpose(-1, -2) @ fresh
        y = torch.stack(outs, 2).permute(0, 2, 3, 1, 4).reshape(b, n, d)
        return self.o(y.to(x.dtype))


@program(small={"b": 1, "n": 8, "d": 8, "heads": 2, "chunk": 4}, training=True)
def delta_net(b: int = 4, n: int = 512, d: int = 1024, heads: int = 8, chunk: int = 16) -> Made:
    """A layer with the delta rule, in chunks."""
    return (Delta(d, heads, chunk), normal(b, n, d))


class RetNetChunk(nn.Module):
    """Retention: products within a chunk, a state between chunks."""

    def __init__(self, d: int, heads: int, chunk: int) -> None:
        super().__init__()
        self.h, self.c = (heads, chunk)
        self.q, self.k, self.v, self.g, self.o = (
            nn.Linear(d, d, bias=False),
            nn.Linear(d, d, bias=False),
            nn.Linear(d, 2 * d, bias=False),
            nn.Linear(d, 2 * d, bias=False),
            nn.Linear(2 * d, d, bias=False),
        )

    def forward(self, x: Tensor) -> Any:
        b, n, d = x.shape
        c = self.c

        def cut(t: Tensor) -> Any:
            return t.view(b, n // c, c, self.h, -1).permute(0, 3, 1, 2, 4)

        q, k, v = (cut(self.q(x)), cut(self.k(x)) * (d // self.h) ** (-0.5), cut(self.v(x)))
        gamma = torch.log(1 - 2.0 ** (-5 - torch.arange(self.h, device=x.device, dtype=torch.float32)))
        at = torch.arange(c, device=x.device, dtype=torch.float32)
        gap = at[:, None] - at
        mask = torch.where(gap >= 0, torch.exp(gamma[:, None, None] * gap), 0).to(x.dtype)[:, None]
        inner = q @ k.transpose(-1, -2) * mask @ v
        kd = k * torch.exp(gamma[:, None] * (c - 1 - at)).to(x.dtype)[:, None, :, None]
        kv = kd.transpose(-1, -2) @ v
        state, before = (torch.zeros_like(kv[:, :, 0]), [])
        fade = torch.exp(gamma * c).to(x.dtype)[:, None, None]
        for i in range(n // c):
            before.append(state)
            state = state * fade + kv[:, :, i]
        cross = q * torch.exp(gamma[:, None] * (at + 1)).to(x.dtype)[:, None, :, None] @ torch.stack(before, 2)
        y = (inner + cross).permute(0, 2, 3, 1, 4).reshape(b, n, self.h, -1)
        y = f.layer_norm(y, y.shape[-1:]).flatten(2)
        return self.o(f.silu(self.g(x)) * y)


@program(small={"b": 2, "n": 16, "d": 16, "heads": 2, "chunk": 4}, training=True)
def retnet_chunks(b: int = 4, n: int = 2048, d: int = 1024, heads: int = 4, chunk: int = 256) -> Made:
    """A layer of retention, in chunks."""
    return (RetNetChunk(d, heads, chunk), normal(b, n, d))


class Based(nn.Module):
    """Taylor feature map linear attention with cumsum states."""

    def __init__(self, d: int, heads: int, feat: int) -> None:
        super().__init__()
        self.h, self.f = (heads, feat)
        self.q, self.k, self.v, self.o = (
            nn.Linear(d, heads * feat),
            nn.Linear(d, heads * feat),
            nn.Linear(d, d),
            nn.Linear(d, d),
        )

    def taylor(self, x: Tensor) -> Any:
        two = (x[..., None] * x[..., None, :]).flatten(-2) / math.sqrt(2) / math.sqrt(self.f)
        return torch.cat((torch.ones_like(x[..., :1]), x / self.f**0.25, two), -1)

    def forward(self, x: Tensor) -> Any:
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, self.h, -1).transpose(1, 2) for t in (self.q(x), self.k(x), self.v(x)))
        q, k = (self.taylor(q), self.taylor(k))
        w = (q @ k.transpose(-1, -2)).tril()
        y = w @ v / (w.float().sum(-1, keepdim=True) + 1e-06).to(x.dtype)
        return self.o(y.transpose(1, 2).flatten(2))


@program(small={"b": 2, "n": 12, "d": 16, "heads": 2, "feat": 3}, training=True)
def based(b: int = 4, n: int = 1024, d: int = 1024, heads: int = 16, feat: int = 16) -> Made:
    """A layer of linear attention with a feature map of second order."""
    return (Based(d, heads, feat), normal(b, n, d))


class Rwkv7(nn.Module):
    """A time mix with a generalised delta rule, step by step."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.h = heads
        self.mix = nn.Parameter(torch.rand(6, d))
        self.p = nn.ModuleList(nn.Linear(d, d, bias=False) for _ in range(6))
        self.w1, self.w2 = (nn.Linear(d, 32, bias=False), nn.Linear(32, d))
        self.norm = nn.GroupNorm(heads, d, eps=0.00064)

    def forward(self, x: Tensor) -> Any:
        b, n, d = x.shape
        prev = f.pad(x, (0, 0, 1, -1))
        r, w, k, v, a, g = (x + (prev - x) * m for m in self.mix)
        r, k, v, a, g = (p(t) for p, t in zip(self.p[:5], (r, k, v, a, g), strict=True))
        w = torch.exp(-0.606531 * torch.sigmoid(self.w2(torch.tanh(self.w1(w))).float()))
        a, g = (torch.sigmoid(a), torch.sigmoid(g))
        kk = f.normalize(k.view(b, n, self.h, -1).float(), dim=-1)
        r, w, k, v, a = (t.view(b, n, self.h, -1).float() for t in (r, w, k, v, a))
        state = torch.zeros(b, self.h, d // self.h, d // self.h, device=x.device)
        outs = []
        for t in range(n):
            sa = state @ -kk[:, t, :, :, None]
            state = (
                state * w[:, t, :, None]
                + sa * (kk[:, t] * a[:, t])[:, :, None]
                + v[:, t, :, :, None] * k[:, t, :, None]
            )
            outs.append((state @ r[:, t, :, :, None]).squeeze(-1))
        y = torch.stack(outs, 1).flatten(2).to(x.dtype)
        return self.p[5](self.norm(y.flatten(0, 1)).view(b, n, d) * g)


@program(small={"b": 2, "n": 5, "d": 16, "heads": 2}, training=True)
def rwkv7(b: int = 8, n: int = 32, d: int = 1024, heads: int = 16) -> Made:
    """A layer of time mixing, step by step."""
    return (Rwkv7(d, heads), normal(b, n, d))


class SSD(nn.Module):
    """Mamba2"s block with the state-space dual in chunks."""

    def __init__(self, d: int, heads: int, p: int, state: int, chunk: int) -> None:
        super().__init__()
        self.h, self.p, self.s, self.c = (heads, p, state, chunk)
        inner = heads * p
        self.inp = nn.Linear(d, 2 * inner + 2 * state + heads, bias=False)
        self.conv = nn.Conv1d(inner + 2 * state, inner + 2 * state, 4, groups=inner + 2 * state, padding=3)
        self.a, self.dt, self.dd = (
            nn.Parameter(torch.rand(heads)),
            nn.Parameter(torch.randn(heads)),
            nn.Parameter(torch.ones(heads)),
        )
        self.norm, self.out = (RMS(inner), nn.Linear(inner, d, bias=False))

    @staticmethod
    def seg(x: Tensor) -> Any:
        t = x.shape[-1]
        x = x[..., None].expand(*x.shape, t)
        x = x.masked_fill(~torch.ones(t, t, dtype=torch.bool, device=x.device).tril(-1), 0).cumsum(-2)
        return x.masked_fill(~torch.ones(t, t, dtype=torch.bool, device=x.device).tril(), float("-inf"))

    def forward(self, x: Tensor) -> Any:
        b, n, _ = x.shape
        inner = self.h * self.p
        z, xbc, dt = self.inp(x).split((inner, inner + 2 * self.s, self.h), -1)
        xbc = f.silu(self.conv(xbc.transpose(1, 2))[..., :n].transpose(1, 2))
        u, bb, cc = xbc.split((inner, self.s, self.s), -1)
        dt = f.softplus(dt.float() + self.dt)
        a = -torch.exp(self.a.float()) * dt
        u = u.view(b, n, self.h, self.p).float()

        def cut(t: Tensor) -> Any:
            return t.unflatten(1, (-1, self.c))

        ud, a, bb, cc = (cut(u * dt[..., None]), cut(a).permute(0, 3, 1, 2), cut(bb.float()), cut(cc.float()))
        cum = a.cumsum(-1)
        l = torch.exp(self.seg(a))
        y = torch.einsum("bcls,bczs,bhclz,bczhp->bclhp", cc, bb, l, ud)
        states = torch.einsum("bcls,bhcl,bclhp->bchps", bb, torch.exp(cum[..., -1:] - cum), ud)
        states = torch.cat((torch.zeros_like(states[:, :1]), states), 1)
        decay = torch.exp(self.seg(f.pad(cum[..., -1], (1, 0))))
        states = torch.einsum("bhzc,bchps->bzhps", decay, states)[:, :-1]
        y = y + torch.einsum("bcls,bchps,bhcl->bclhp", cc, states, torch.exp(cum))
        y = (y.flatten(1, 2) + u * self.dd[:, None]).flatten(2).to(x.dtype)
        return self.out(self.norm(y * f.silu(z)))


@program(small={"b": 2, "n": 8, "d": 8, "heads": 2, "p": 4, "state": 4, "chunk": 4}, training=True)
def ssd_block(
    b: int = 2, n: int = 2048, d: int = 1024, heads: int = 32, p: int = 64, state: int = 128, chunk: int = 128
) -> Made:
    """A block of the state-space dual."""
    return (SSD(d, heads, p, state, chunk), normal(b, n, d))
