"""Sequences as people write them by hand: cut into chunks, sorted into buckets, decoded, scored, quantised."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.agents import mlp
from terrazzo.bench.programs.registry import Made, normal, program, uniform, whole


def heads(x: Tensor, count: int) -> Tensor:
    """Heads before places."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


class Chunked(nn.Module):
    """Attention to neighbours, by overlapping chunks of keys."""

    def __init__(self, d: int, count: int, w: int) -> None:
        super().__init__()
        self.count, self.w, self.qkv, self.out = count, w, nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Any:
        n, w = x.shape[1], self.w
        q, k, v = (heads(t, self.count) for t in self.qkv(x).chunk(3, -1))
        k, v = (f.pad(t, (0, 0, w, w)).unfold(2, 3 * w, w).transpose(-1, -2) for t in (k, v))
        s = torch.einsum("bhcwd,bhcud->bhcwu", q.unflatten(2, (n // w, w)) / math.sqrt(q.shape[-1]), k)
        i, j = torch.arange(w, device=x.device)[:, None], torch.arange(3 * w, device=x.device)
        at = j[None] + torch.arange(n // w, device=x.device)[:, None] * w - w
        near = ((j - i >= 0) & (j - i <= 2 * w))[None] & ((at >= 0) & (at < n))[:, None]
        a = torch.softmax(s.masked_fill(~near, float("-inf")), -1)
        return self.out(torch.einsum("bhcwu,bhcud->bhcwd", a, v).flatten(2, 3).transpose(1, 2).flatten(2))


@program(small={"b": 1, "n": 16, "d": 16, "count": 2, "w": 4}, training=True)
def chunked_attention(b: int = 4, n: int = 4096, d: int = 768, count: int = 12, w: int = 256) -> Made:
    """A Longformer's attention."""
    return Chunked(d, count, w), normal(b, n, d)


class Hashed(nn.Module):
    """Attention within buckets of similar keys, which are sorted side by side."""

    def __init__(self, d: int, count: int, w: int) -> None:
        super().__init__()
        self.count, self.w = count, w
        self.qk, self.v, self.out = (nn.Linear(d, d) for _ in range(3))

    def forward(self, x: Tensor, turn: Tensor) -> Any:
        n, w = x.shape[1], self.w
        qk, v = heads(self.qk(x), self.count), heads(self.v(x), self.count)
        r = qk @ turn
        order = (torch.cat((r, -r), -1).argmax(-1) * n + torch.arange(n, device=x.device)).argsort(-1)
        back = order.argsort(-1)
        q, v = (t.gather(2, order[..., None].expand_as(t)).unflatten(2, (n // w, w)) for t in (qk, v))

        def with_before(t: Tensor) -> Tensor:
            return torch.cat((t, t.roll(1, 2)), 3)

        s = q @ with_before(f.normalize(q, dim=-1)).transpose(-1, -2) / 8
        own = order.unflatten(2, (n // w, w))
        s = s.masked_fill(own[..., None] == with_before(own)[..., None, :], -5e4)
        y = (torch.softmax(s.float(), -1).to(x.dtype) @ with_before(v)).flatten(2, 3)
        return self.out(y.gather(2, back[..., None].expand_as(y)).transpose(1, 2).flatten(2))


@program(small={"b": 1, "n": 16, "d": 16, "count": 2, "w": 4}, training=True)
def hashed_attention(b: int = 4, n: int = 4096, d: int = 512, count: int = 8, w: int = 64) -> Made:
    """A Reformer's attention."""
    return Hashed(d, count, w), normal(b, n, d), normal(d // count, w // 2)


class Features(nn.Module):
    """Attention by positive random features."""

    def __init__(self, d: int, count: int) -> None:
        super().__init__()
        self.count, self.qkv, self.out = count, nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor, w: Tensor) -> Any:
        q, k, v = (heads(t, self.count) for t in self.qkv(x).chunk(3, -1))

        def phi(t: Tensor, *over: int) -> Tensor:
            t = t * t.shape[-1] ** -0.25
            u = t @ w.T
            return torch.exp(u - t.square().sum(-1, True) / 2 - u.amax(over, True).detach()) + 1e-4

        q, k = phi(q, -1), phi(k, -1, -2)
        scale = 1 / torch.einsum("bhnr,bhr->bhn", q, k.sum(2))
        y = torch.einsum("bhnr,bhrd,bhn->bhnd", q, torch.einsum("bhnr,bhnd->bhrd", k, v), scale)
        return self.out(y.transpose(1, 2).flatten(2))


@program(small={"b": 1, "n": 16, "d": 16, "count": 2, "r": 8}, training=True)
def random_features(b: int = 4, n: int = 2048, d: int = 512, count: int = 8, r: int = 256) -> Made:
    """A Performer's attention."""
    return Features(d, count), normal(b, n, d), normal(r, d // count)


class Copying(nn.Module):
    """A decoder that copies words of its source, or makes them."""

    def __init__(self, d: int, v: int) -> None:
        super().__init__()
        self.h, self.e, self.gate, self.out = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(2 * d, 1), nn.Linear(2 * d, v)
        self.v = nn.Parameter(torch.randn(d) / math.sqrt(d))

    def forward(self, h: Tensor, source: Tensor, words: Tensor) -> Any:
        a = torch.softmax((torch.tanh(self.h(h)[:, :, None] + self.e(source)[:, None]) @ self.v).float(), -1)
        both = torch.cat((h, a.to(h.dtype) @ source), -1)
        g = torch.sigmoid(self.gate(both).float())
        made = g * torch.softmax(self.out(both).float(), -1)
        return torch.log(made.scatter_add(2, words[:, None].expand(-1, h.shape[1], -1), (1 - g) * a) + 1e-9)


@program(small={"b": 2, "n": 5, "d": 8, "v": 30, "s": 7}, training=True)
def pointer_generator(b: int = 16, n: int = 100, d: int = 256, v: int = 50000, s: int = 400) -> Made:
    """A summarizer's decoder."""
    return Copying(d, v), normal(b, n, d), normal(b, s, d), whole(v, b, s)


class Tags(nn.Module):
    """The negative log-likelihood of a chain of tags."""

    def __init__(self, d: int, k: int) -> None:
        super().__init__()
        self.score = nn.Linear(d, k)
        self.start, self.end, self.step = (nn.Parameter(torch.randn(s) / math.sqrt(k)) for s in (k, k, (k, k)))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        e = self.score(x)
        a = e[:, 0] + self.start
        for t in range(1, x.shape[1]):
            a = torch.logsumexp(a[:, :, None] + self.step, 1) + e[:, t]
        score = self.start[y[:, 0]] + e.gather(2, y[..., None])[..., 0].sum(1)
        score = score + self.step[y[:, :-1], y[:, 1:]].sum(1) + self.end[y[:, -1]]
        return (torch.logsumexp(a + self.end, 1) - score).mean()


@program(small={"b": 2, "n": 5, "k": 4, "d": 8}, training=True, dtypes=("f32",))
def tag_chain(b: int = 64, n: int = 128, k: int = 32, d: int = 256) -> Made:
    """A conditional random field."""
    return Tags(d, k), normal(b, n, d), whole(k, b, n)


class Slots(nn.Module):
    """Experts of limited capacity: tokens are put into slots, and those beyond the last are left as they are."""

    def __init__(self, d: int, e: int) -> None:
        super().__init__()
        self.gate, self.e = nn.Linear(d, e), e
        self.a, self.b = (nn.Parameter(torch.randn(e, *s) / math.sqrt(s[0])) for s in ((d, 4 * d), (4 * d, d)))

    def forward(self, x: Tensor) -> Any:
        n, d = x.shape
        e, room = self.e, n // self.e * 5 // 4
        weights = torch.softmax(self.gate(x).float(), -1)
        w, i = weights.max(-1)
        chosen = f.one_hot(i, e)
        at = (chosen.cumsum(0) * chosen).sum(-1) - 1
        slot = torch.where(at < room, i * room + at, e * room)
        taken = x.new_zeros(e * room + 1, d).index_put((slot,), x)[:-1].view(e, room, d)
        y = torch.bmm(f.relu(torch.bmm(taken, self.a)), self.b).view(e * room, d)
        y = torch.cat((y, y.new_zeros(1, d)))[slot] * (w * (at < room)).to(x.dtype)[:, None]
        return x + y, e * (chosen.float().mean(0) * weights.mean(0)).sum()


@program(small={"n": 24, "d": 8, "e": 4}, training=True)
def switch_layer(n: int = 8192, d: int = 1024, e: int = 16) -> Made:
    """A switch transformer's layer."""
    return Slots(d, e), normal(n, d)


class MinGru(nn.Module):
    """A recurrence without a loop: sums of logarithms along time."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.z, self.h = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Any:
        k, h = self.z(x).float(), self.h(x).float()
        g = torch.where(h >= 0, (f.relu(h) + 0.5).log(), -f.softplus(-h))
        a = (-f.softplus(k)).cumsum(1)
        return torch.exp(a + torch.logcumsumexp(g - f.softplus(-k) - a, 1)).to(x.dtype)


@program(small={"b": 2, "n": 12, "d": 8}, training=True)
def min_gru(b: int = 16, n: int = 1024, d: int = 512) -> Made:
    """A minGRU in logarithms."""
    return MinGru(d), normal(b, n, d)


class Differential(nn.Module):
    """Two attentions, of which one is subtracted."""

    def __init__(self, count: int, d: int) -> None:
        super().__init__()
        self.count, self.d = count, d
        self.q, self.k, self.v, self.out = (nn.Linear(2 * count * d, 2 * count * d) for _ in range(4))
        self.weights = nn.Parameter(torch.randn(4, d) / d)

    def forward(self, x: Tensor) -> Any:
        n = x.shape[1]
        q, k, v = (
            heads(t, c) for t, c in ((self.q(x), 2 * self.count), (self.k(x), 2 * self.count), (self.v(x), self.count))
        )
        later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        s = (q @ k.transpose(-1, -2) / math.sqrt(self.d)).masked_fill(later, float("-inf"))
        a = torch.softmax(s.float(), -1).to(x.dtype).unflatten(1, (self.count, 2))
        first, second = ((self.weights[i] * self.weights[i + 1]).sum().exp() for i in (0, 2))
        y = f.rms_norm((a[:, :, 0] - (first - second + 0.8) * a[:, :, 1]) @ v, (2 * self.d,)) * 0.2
        return self.out(y.transpose(1, 2).flatten(2))


@program(small={"b": 1, "n": 8, "count": 2, "d": 8}, training=True)
def differential_attention(b: int = 4, n: int = 2048, count: int = 8, d: int = 64) -> Made:
    """A differential transformer's attention."""
    return Differential(count, d), normal(b, n, 2 * count * d)


def preferred(chosen: Tensor, other: Tensor, first: Tensor, second: Tensor, *data: Tensor) -> Any:
    """The loss of preferences between two answers, beside a reference's."""
    tokens, mask = data[:2], data[2:]

    def likely(logits: Tensor, k: int) -> Tensor:
        found = f.log_softmax(logits[:, :-1].float(), -1).gather(2, tokens[k][:, 1:, None])[..., 0]
        return (found * mask[k][:, 1:]).sum(-1)

    margin = likely(chosen, 0) - likely(other, 1) - likely(first, 0) + likely(second, 1)
    return -f.logsigmoid(0.1 * margin).mean(), (margin > 0).float().mean()


@program(small={"b": 2, "n": 8, "v": 16})
def preference_loss(b: int = 4, n: int = 512, v: int = 32000) -> Made:
    """Direct preference optimization."""
    logits = (normal(b, n, v) for _ in range(4))
    return preferred, *logits, whole(v, b, n), whole(v, b, n), uniform(b, n), uniform(b, n)


def unpacked(x: Tensor, words: Tensor, zeros: Tensor, scale: Tensor, group: Tensor) -> Tensor:
    """A linear layer whose weights are eight to a word, in groups of rows."""
    shift = torch.arange(0, 32, 4, device=x.device, dtype=torch.int32)
    w = ((words[:, None] >> shift[:, None]) & 15).view(-1, words.shape[1])
    z = ((zeros[:, :, None] >> shift) & 15).view(len(zeros), -1)
    return x @ (scale[group] * (w - z[group] - 1).to(x.dtype))


@program(small={"n": 4, "d": 64, "o": 32})
def packed_linear(n: int = 32, d: int = 4096, o: int = 4096) -> Made:
    """A GPTQ layer."""
    words, zeros = whole(2**31 - 1, d // 8, o).int(), whole(2**31 - 1, d // 32, o // 8).int()
    return unpacked, normal(n, d), words, zeros, uniform(d // 32, o), torch.arange(d) // 32


def sparse(x: Tensor) -> Tensor:
    """The projection of rows to the simplex."""
    s = x.float().sort(-1, descending=True).values
    c = s.cumsum(-1) - 1
    k = (s * torch.arange(1, x.shape[-1] + 1, device=x.device) > c).sum(-1, True)
    return (x - c.gather(-1, k - 1) / k).clamp(min=0).to(x.dtype)


@program(small={"b": 2, "n": 12})
def sparsemax(b: int = 8192, n: int = 1024) -> Made:
    """Sparsemax of many rows."""
    return sparse, normal(b, n)


class Ternary(nn.Module):
    """A layer whose weights and inputs are rounded, with gradients as if they were not."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(s) / math.sqrt(d)) for s in ((4 * d, d), (d, 4 * d)))

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        x = f.rms_norm(x, (x.shape[-1],))
        s = 127 / x.abs().amax(-1, True).clamp(min=1e-5)
        x = x + ((x * s).round().clamp(-128, 127) / s - x).detach()
        t = 1 / w.abs().mean().clamp(min=1e-5)
        return f.linear(x, w + ((w * t).round().clamp(-1, 1) / t - w).detach())

    def forward(self, x: Tensor) -> Any:
        return self.linear(f.relu(self.linear(x, self.a)).square(), self.b)


@program(small={"n": 8, "d": 16}, training=True)
def ternary_layers(n: int = 2048, d: int = 2048) -> Made:
    """Two BitNet layers."""
    return Ternary(d), normal(n, d)


class Factors(nn.Module):
    """Interest capsules of a user's history, which route by agreement."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(d, d, bias=False), mlp(d, d, d)

    def forward(self, x: Tensor, length: Tensor, start: Tensor) -> Any:
        seen = torch.arange(x.shape[1], device=x.device) < length[:, None]
        h, logits = self.into(x), start
        for step in range(3):
            w = torch.softmax(logits.masked_fill(~seen[:, None], -1e4), -1) * seen[:, None]
            z = w @ h
            size = z.square().sum(-1, True)
            u = size / (1 + size) * z / (size + 1e-9).sqrt()
            logits = logits + u @ h.mT if step < 2 else logits
        return self.out(u)


@program(small={"b": 3, "n": 5, "k": 2, "d": 8}, training=True)
def interest_capsules(b: int = 512, n: int = 50, k: int = 4, d: int = 64) -> Made:
    """A MIND recommender's user."""
    return Factors(d), normal(b, n, d), whole(n, b) + 1, normal(b, k, n)
