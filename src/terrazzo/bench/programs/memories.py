"""Nets with memories, routes, hypernetworks and unusual attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Made, normal, program, whole


class Slots(nn.Module):
    """Slot attention: three rounds in which slots compete for places, each moved on by a GRU cell."""

    def __init__(self, width: int, slots: int) -> None:
        super().__init__()
        self.start, self.kv, self.q = (
            nn.Parameter(torch.randn(slots, width)),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
        )
        self.x, self.h = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )
        self.given, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        k, v = self.kv(self.given(x)).chunk(2, -1)
        s = self.start + 0.1 * noise
        for _ in range(3):
            q = self.q(self.norm(s))
            w = torch.softmax((k @ q.transpose(1, 2)).float() * x.shape[-1] ** -0.5, -1) + 1e-8
            u = (w / w.sum(1, keepdim=True)).to(x.dtype).transpose(1, 2) @ v
            (a, b, c), (d, e, g) = self.x(u).chunk(3, -1), self.h(s).chunk(3, -1)
            z = torch.sigmoid(b + e)
            s = (1 - z) * torch.tanh(c + torch.sigmoid(a + d) * g) + z * s
            s = s + self.mlp(s)
        return s


@program(small={"count": 2, "places": 9, "width": 8, "slots": 3}, training=True)
def slot_attention(count: int = 64, places: int = 1024, width: int = 64, slots: int = 7) -> Made:
    """Slots for the objects of a picture."""
    return Slots(width, slots), normal(count, places, width), normal(count, slots, width)


class Turing(nn.Module):
    """A neural Turing machine: content and shifted addresses, erased and added rows, for a few steps."""

    def __init__(self, width: int, rows: int, depth: int) -> None:
        super().__init__()
        self.control, self.depth = nn.Linear(width + depth, width), depth
        self.read, self.write = nn.Linear(width, depth + 6), nn.Linear(width, 3 * depth + 6)
        self.out, self.start = nn.Linear(width + depth, width), nn.Parameter(torch.randn(rows, depth) * 0.1)

    def address(self, memory: Tensor, key: Tensor, extra: Tensor, last: Tensor) -> Tensor:
        near = (f.normalize(memory, dim=-1) @ f.normalize(key, dim=-1)[..., None])[..., 0].float()
        w = torch.softmax(f.softplus(extra[:, :1]).float() * near, -1)
        g = torch.sigmoid(extra[:, 1:2]).float()
        w = g * w + (1 - g) * last
        s = torch.softmax(extra[:, 2:5].float(), -1)
        w = s[:, :1] * w.roll(1, -1) + s[:, 1:2] * w + s[:, 2:] * w.roll(-1, -1)
        w = (w + 1e-8) ** (1 + f.softplus(extra[:, 5:]).float())
        return w / w.sum(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape[0], x.shape[1], self.depth
        memory = self.start.expand(b, -1, -1)
        read, outs = memory[:, 0], []
        wr = ww = torch.softmax(memory[..., 0].float() * 0, -1)
        for t in range(n):
            h = torch.tanh(self.control(torch.cat((x[:, t], read), -1)))
            p = self.write(h)
            ww = self.address(memory, p[:, :d], p[:, 3 * d :], ww)
            u = ww.to(x.dtype)[..., None]
            memory = memory * (1 - u * torch.sigmoid(p[:, None, d : 2 * d])) + u * torch.tanh(p[:, None, 2 * d : 3 * d])
            p = self.read(h)
            wr = self.address(memory, p[:, :d], p[:, d:], wr)
            read = (wr.to(x.dtype)[:, None] @ memory)[:, 0]
            outs.append(self.out(torch.cat((h, read), -1)))
        return torch.stack(outs, 1)


@program(small={"count": 2, "length": 2, "width": 8, "rows": 5, "depth": 4}, training=True)
def turing_machine(count: int = 64, length: int = 12, width: int = 256, rows: int = 128, depth: int = 32) -> Made:
    """Steps of a neural Turing machine."""
    return Turing(width, rows, depth), normal(count, length, width)


class ProductKeys(nn.Module):
    """A memory with keys that are pairs: topk of both halves, topk of their sums, and rows picked and weighted."""

    def __init__(self, width: int, keys: int, heads: int, best: int) -> None:
        super().__init__()
        self.q, self.keys = nn.Linear(width, heads * 128), nn.Parameter(torch.randn(heads, 2, keys, 64))
        self.values, self.best, self.heads = nn.Embedding(keys * keys, width), best, heads

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(-1, self.heads, 2, 64)
        a, b = (torch.einsum("nhd,hkd->nhk", q[:, :, k], self.keys[:, k]).topk(self.best) for k in range(2))
        both = (a[0][..., :, None] + b[0][..., None, :]).flatten(-2)
        at = (a[1][..., :, None] * self.keys.shape[2] + b[1][..., None, :]).flatten(-2)
        top, place = both.topk(self.best)
        w = torch.softmax(top.float(), -1).to(x.dtype)
        rows = self.values(at.gather(-1, place))
        return x + (w[..., None] * rows).sum((1, 2))


@program(small={"rows": 4, "width": 8, "keys": 5, "heads": 2, "best": 3}, training=True, dtypes=("f32",))
def product_keys(rows: int = 4096, width: int = 512, keys: int = 256, heads: int = 4, best: int = 32) -> Made:
    """A large memory with product keys."""
    return ProductKeys(width, keys, heads, best), normal(rows, width)


class SoftExperts(nn.Module):
    """Soft MoE: every slot is a mixture of tokens, experts as a batched product, tokens mixed again of slots."""

    def __init__(self, width: int, experts: int, slots: int) -> None:
        super().__init__()
        self.phi, self.scale = nn.Parameter(torch.randn(width, experts, slots)), nn.Parameter(torch.ones(()))
        self.up, self.down = (
            nn.Parameter(torch.randn(experts, a, b) * 0.02) for a, b in ((width, 2 * width), (2 * width, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.einsum(
            "bnd,des->bnes", f.normalize(x, dim=-1), self.scale * f.normalize(self.phi, dim=0)
        ).float()
        dispatch = torch.softmax(logits, 1).to(x.dtype)
        combine = torch.softmax(logits.flatten(2), -1).view_as(logits).to(x.dtype)
        y = torch.einsum("bnd,bnes->ebsd", x, dispatch)
        y = f.gelu(torch.einsum("ebsd,edf->ebsf", y, self.up))
        return torch.einsum("ebsd,bnes->bnd", torch.einsum("ebsf,efd->ebsd", y, self.down), combine)


@program(small={"count": 2, "length": 6, "width": 8, "experts": 3, "slots": 2}, training=True)
def soft_experts(count: int = 32, length: int = 196, width: int = 384, experts: int = 32, slots: int = 6) -> Made:
    """Experts that get mixtures of tokens."""
    return SoftExperts(width, experts, slots), normal(count, length, width)


class ExpertChoice(nn.Module):
    """Experts that choose their tokens by topk; what they compute is added back at these."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up, self.gate, self.down = (
            nn.Parameter(torch.randn(experts, a, b) * 0.02)
            for a, b in ((width, 2 * width), (width, 2 * width), (2 * width, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        n, e = x.shape[0], self.up.shape[0]
        p = torch.softmax(self.router(x).float(), -1)
        w, at = p.T.topk(2 * n // e, -1)
        rows = x[at]
        y = (f.silu(torch.bmm(rows, self.gate)) * torch.bmm(rows, self.up)) @ self.down
        return torch.zeros_like(x).index_add(0, at.flatten(), (y * w[..., None].to(x.dtype)).flatten(0, 1))


@program(small={"rows": 8, "width": 8, "experts": 4}, training=True, dtypes=("f32",))
def expert_choice(rows: int = 8192, width: int = 1024, experts: int = 16) -> Made:
    """Experts that choose."""
    return ExpertChoice(width, experts), normal(rows, width)


class Hopfield(nn.Module):
    """A modern Hopfield layer: stored patterns, three rounds of retrieval, with norms between."""

    def __init__(self, width: int, patterns: int) -> None:
        super().__init__()
        self.patterns, self.q, self.out = (
            nn.Parameter(torch.randn(patterns, width)),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        s = self.q(x)
        for _ in range(3):
            s = f.layer_norm(s, s.shape[-1:])
            w = torch.softmax(s @ self.patterns.T * 0.125, -1, dtype=torch.float32)
            s = w.to(x.dtype) @ self.patterns
        return self.out(s)


@program(small={"rows": 5, "width": 8, "patterns": 7}, training=True)
def hopfield(rows: int = 4096, width: int = 256, patterns: int = 8192) -> Made:
    """Patterns that are retrieved."""
    return Hopfield(width, patterns), normal(rows, width)


class Hyper(nn.Module):
    """A hypernetwork writes the weights of a small convolutional net for every sample."""

    def __init__(self, width: int, ch: int) -> None:
        super().__init__()
        self.ch, sizes = ch, (ch * 3 * 9 + ch, ch * ch * 9 + ch, 3 * ch + 3)
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, n)) for n in sizes
        )

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        b, c = z.shape[0], self.ch
        one, two, three = (head(z) for head in self.heads)
        y = x.reshape(1, -1, *x.shape[2:])
        y = f.conv2d(y, one[:, c:].reshape(-1, 3, 3, 3), one[:, :c].flatten(), padding=1, groups=b)
        y = f.conv2d(f.relu(y), two[:, c:].reshape(-1, c, 3, 3), two[:, :c].flatten(), padding=1, groups=b)
        y = f.relu(y).view(b, c, -1)
        return torch.baddbmm(three[:, :3, None], three[:, 3:].view(b, 3, c), y).view_as(x)


@program(small={"count": 2, "width": 8, "ch": 4, "size": 6}, training=True)
def hypernetwork(count: int = 16, width: int = 256, ch: int = 16, size: int = 64) -> Made:
    """Filters for each sample."""
    return Hyper(width, ch), normal(count, width), normal(count, 3, size, size)


class Depths(nn.Module):
    """A mixture of depths: an eighth of the tokens goes through attention and a feed-forward net, in their order."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.router, self.qkv, self.out = nn.Linear(width, 1), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp, self.heads = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)), heads

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        score = self.router(x)[..., 0].float()
        at = score.topk(n // 8, -1).indices.sort(-1).values
        index = at[..., None].expand(-1, -1, d)
        y = x.gather(1, index)
        q, k, v = (
            t.view(b, -1, self.heads, d // self.heads).transpose(1, 2)
            for t in self.qkv(f.rms_norm(y, (d,))).chunk(3, -1)
        )
        a = f.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, -1, d)
        z = y + self.out(a)
        z = self.mlp(f.rms_norm(z, (d,))) + z - y
        return x.scatter_add(1, index, z * torch.sigmoid(score.gather(1, at)).to(x.dtype)[..., None])


@program(small={"count": 2, "length": 16, "width": 8, "heads": 2}, training=True, dtypes=("f32",))
def mixture_of_depths(count: int = 4, length: int = 2048, width: int = 768, heads: int = 12) -> Made:
    """Layers that most tokens pass by."""
    return Depths(width, heads), normal(count, length, width)


class LowRank(nn.Module):
    """Linformer's, Performer's cosine and Synthesizer's weights side by side: what keys become before they meet."""

    def __init__(self, width: int, length: int, rank: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.e, self.heads = (
            nn.Linear(width, 3 * width),
            nn.Parameter(torch.randn(2, rank, length) * length**-0.5),
            heads,
        )
        self.random, self.out = nn.Parameter(torch.randn(heads, length, length)), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        c = q.shape[-1]
        low = torch.softmax((q @ (self.e[0] @ k).transpose(-1, -2)).float() * c**-0.5, -1).to(x.dtype) @ (self.e[1] @ v)
        angle = torch.arange(n, device=x.device)[:, None] * (math.pi / 2 / n)
        qr, kr = f.relu(q), f.relu(k)
        qc, kc = (torch.cat((t * angle.cos().to(x.dtype), t * angle.sin().to(x.dtype)), -1) for t in (qr, kr))
        cosine = (qc @ (kc.transpose(-1, -2) @ v)) / (qc @ kc.sum(-2)[..., None] + 1)
        fixed = torch.softmax(self.random.float(), -1).to(x.dtype) @ v
        return self.out(torch.cat([t.transpose(1, 2).reshape(b, n, d) for t in (low, cosine, fixed)], -1))


@program(small={"count": 2, "length": 6, "width": 8, "rank": 3, "heads": 2}, training=True)
def cheap_attention(count: int = 8, length: int = 1024, width: int = 512, rank: int = 128, heads: int = 8) -> Made:
    """Three kinds of attention without all pairs."""
    return LowRank(width, length, rank, heads), normal(count, length, width)


class ManySoftmaxes(nn.Module):
    """A mixture of softmaxes over words, and the loss of the next ones with several heads (multi-token prediction)."""

    def __init__(self, width: int, words: int, parts: int, ahead: int) -> None:
        super().__init__()
        self.prior, self.latent, self.words = (
            nn.Linear(width, parts),
            nn.Linear(width, parts * width),
            nn.Linear(width, words),
        )
        self.next, self.parts = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(ahead)), parts

    def forward(self, h: Tensor, target: Tensor) -> Tensor:
        n, d = h.shape
        log = torch.log_softmax(self.words(torch.tanh(self.latent(h)).view(n, self.parts, d)).float(), -1)
        mixed = torch.logsumexp(log + torch.log_softmax(self.prior(h).float(), -1)[..., None], 1)
        loss = -mixed.gather(1, target[:n, None]).mean()
        for k, layer in enumerate(self.next, 1):
            h = layer(torch.cat((f.rms_norm(h, (d,)), self.words.weight[target[k - 1 : k - 1 + n]]), -1))
            loss = loss + 0.3 * f.cross_entropy(self.words(h).float(), target[k : k + n])
        return loss


@program(small={"rows": 4, "width": 8, "words": 12, "parts": 2, "ahead": 2}, training=True)
def many_softmaxes(rows: int = 512, width: int = 512, words: int = 32000, parts: int = 4, ahead: int = 2) -> Made:
    """Losses of several heads over many words."""
    return ManySoftmaxes(width, words, parts, ahead), normal(rows, width), whole(words, rows + ahead)
