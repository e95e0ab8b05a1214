"""Learning by reinforcement, beyond what `science` has; and recommenders with long histories and crosses."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Made, normal, program, uniform, whole


class MuZero(nn.Module):
    """Unrolled dynamics with categorical supports and scaled gradients; UCB scores of a batch of trees."""

    def __init__(self, ch: int, a: int, s: int) -> None:
        super().__init__()

        def conv(i: Tensor) -> Any:
            return nn.Sequential(
                nn.Conv2d(i, ch, 3, padding=1, bias=False),
                nn.BatchNorm2d(ch, track_running_stats=False),
                nn.ReLU(),
                nn.Conv2d(ch, ch, 3, padding=1),
            )

        self.rep, self.dyn = (conv(4), conv(ch + 1))
        self.r, self.p, self.v = (nn.Linear(ch * 64, s), nn.Linear(ch * 64, a), nn.Linear(ch * 64, s))
        self.a = a

    def scaled(self, h: Tensor) -> Any:
        low, top = (h.amin((1, 2, 3), keepdim=True), h.amax((1, 2, 3), keepdim=True))
        return (h - low) / (top - low + 1e-05)

    def forward(self, obs: Tensor, act: Tensor, prior: Tensor, visits: Tensor, q: Tensor) -> Any:
        h, out = (self.scaled(self.rep(obs)), [])
        for k in range(act.shape[1]):
            plane = (act[:, k] / self.a).to(h.dtype)[:, None, None, None].expand(-1, 1, 8, 8)
            h = self.scaled(self.dyn(torch.cat((h, plane), 1)) + h)
            out.append(torch.cat((self.r(h.flatten(1)), self.p(h.flatten(1)), self.v(h.flatten(1))), -1))
        total = visits.sum(-1, keepdim=True).float()
        c = torch.log((total + 19652 + 1) / 19652) + 1.25
        ucb = q.float() + c * torch.softmax(prior.float(), -1) * total.sqrt() / (1 + visits)
        return (torch.stack(out, 1), ucb.argmax(-1))


@program(small={"b": 2, "ch": 4, "a": 5, "s": 7, "k": 2}, training=True)
def muzero(b: int = 256, ch: int = 64, a: int = 18, s: int = 601, k: int = 5) -> Made:
    """An unrolled model and the scores of a search."""
    return (MuZero(ch, a, s), normal(b, 4, 8, 8), whole(a, b, k), normal(b, a), whole(50, b, a), normal(b, a))


def mlp(*sizes: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Layers of these widths, with an activation between."""
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


class Qmix(nn.Module):
    """Distributional critics: quantile Huber of all pairs; a monotone mixer by hypernetworks."""

    def __init__(self, o: int, d: int, a: int, n: int, agents: int) -> None:
        super().__init__()
        self.q, self.n, self.ag = (mlp(o, d, a * n), n, agents)
        self.w1, self.b1, self.w2, self.b2 = (
            nn.Linear(o, agents * 32),
            nn.Linear(o, 32),
            nn.Linear(o, 32),
            mlp(o, 32, 1),
        )

    def forward(self, obs: Tensor, act: Tensor, target: Tensor) -> Any:
        b, g, _ = obs.shape
        z = self.q(obs).view(b, g, -1, self.n)
        z = z.gather(2, act[..., None, None].expand(-1, -1, 1, self.n)).squeeze(2)
        s = obs.mean(1)
        h = f.elu(torch.einsum("bgn,bgk->bnk", z, self.w1(s).abs().view(b, g, 32)) + self.b1(s)[:, None])
        tot = (h * self.w2(s).abs()[:, None]).sum(-1) + self.b2(s)
        td = target.float()[:, None] - tot.float()[..., None]
        tau = (torch.arange(self.n, device=obs.device) + 0.5) / self.n
        huber = torch.where(td.abs() < 1, 0.5 * td.square(), td.abs() - 0.5)
        return ((tau[:, None] - (td.detach() < 0).float()).abs() * huber).sum(1).mean()


@program(small={"b": 3, "g": 2, "o": 6, "d": 8, "a": 4, "n": 5}, training=True)
def quantile_mixer(b: int = 1024, g: int = 8, o: int = 128, d: int = 256, a: int = 12, n: int = 51) -> Made:
    """Quantiles mixed for agents."""
    return (Qmix(o, d, a, n, g), normal(b, g, o), whole(a, b, g), normal(b, n))


class Din(nn.Module):
    """Target attention over a history with a Dice activation, then DIEN"s AUGRU."""

    def __init__(self, items: int, d: int, hidden: int) -> None:
        super().__init__()
        self.e, self.cat = (nn.Embedding(items, d), nn.Embedding(1000, d))
        self.gru = nn.GRU(2 * d, 2 * d, batch_first=True)
        self.att = mlp(8 * d, 80, 40, 1, act=nn.Sigmoid)
        self.gates = nn.Linear(4 * d, 6 * d)
        self.out = mlp(6 * d, hidden, 80, 1, act=nn.PReLU)

    def forward(self, item: Tensor, cat: Tensor, hist: Tensor, hcat: Tensor, length: Tensor) -> Any:
        t = torch.cat((self.e(item), self.cat(cat)), -1)
        h = torch.cat((self.e(hist), self.cat(hcat)), -1)
        tt = t[:, None].expand_as(h)
        s = self.att(torch.cat((tt, h, tt - h, tt * h), -1)).squeeze(-1)
        mask = torch.arange(h.shape[1], device=h.device) < length[:, None]
        w = torch.softmax(s.float().masked_fill(~mask, -1000000000.0), -1).to(h.dtype)
        pooled = (w[..., None] * h).sum(1)
        state = torch.zeros_like(t)
        for i in range(h.shape[1]):
            z, r, c = self.gates(torch.cat((h[:, i], state), -1)).chunk(3, -1)
            z = torch.sigmoid(z) * w[:, i : i + 1]
            state = torch.where(mask[:, i : i + 1], (1 - z) * state + z * torch.tanh(torch.sigmoid(r) * c), state)
        return self.out(torch.cat((t, pooled, state), -1)).squeeze(-1)


@program(small={"b": 4, "n": 5, "items": 30, "d": 4, "hidden": 16}, training=True)
def dien(b: int = 1024, n: int = 20, items: int = 100000, d: int = 18, hidden: int = 200) -> Made:
    """Interests that evolve."""
    return (
        Din(items, d, hidden),
        whole(items, b),
        whole(1000, b),
        whole(items, b, n),
        whole(1000, b, n),
        1 + whole(n, b),
    )


class XDeep(nn.Module):
    """xDeepFM: compressed interaction network; plus an FFM part and AFM attention."""

    def __init__(self, fields: int, d: int, words: int) -> None:
        super().__init__()
        self.e, self.w = (nn.Embedding(fields * words, d), nn.Embedding(fields * words, 1))
        self.words, self.fields = (words, fields)
        self.cin = nn.ModuleList((nn.Conv1d(fields * fields, 64, 1), nn.Conv1d(64 * fields, 64, 1)))
        self.deep, self.last = (mlp(fields * d, 400, 400, 1), nn.Linear(128, 1))
        self.att = mlp(d, 16, 1)

    def forward(self, ids: Tensor) -> Any:
        ids = ids + torch.arange(self.fields, device=ids.device) * self.words
        x = self.e(ids)
        hid, outs = (x, [])
        for c in self.cin:
            z = (hid[:, :, None] * x[:, None]).flatten(1, 2)
            hid = torch.relu(c(z))
            outs.append(hid.sum(-1))
        a, b = torch.triu_indices(self.fields, self.fields, 1, device=ids.device)
        pair = x[:, a] * x[:, b]
        w = torch.softmax(self.att(pair).float(), 1).to(x.dtype)
        afm = (w * pair).sum(1).sum(-1, keepdim=True)
        return (self.w(ids).sum(1) + self.last(torch.cat(outs, -1)) + self.deep(x.flatten(1)) + afm).squeeze(-1)


@program(small={"b": 4, "fields": 4, "d": 4, "words": 10}, training=True)
def xdeepfm(b: int = 2048, fields: int = 26, d: int = 16, words: int = 10000) -> Made:
    """Crosses of fields in a compressed network."""
    return (XDeep(fields, d, words), whole(words, b, fields))


class SasRec(nn.Module):
    """Causal self-attention with time intervals (TiSASRec), BCE against a negative."""

    def __init__(self, items: int, n: int, d: int, spans: int) -> None:
        super().__init__()
        self.e, self.p, self.tk, self.tv = (
            nn.Embedding(items, d),
            nn.Embedding(n, d),
            nn.Embedding(spans + 1, d),
            nn.Embedding(spans + 1, d),
        )
        self.q, self.k, self.v = (nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d))
        self.n1, self.n2, self.c1, self.c2 = (nn.LayerNorm(d), nn.LayerNorm(d), nn.Conv1d(d, d, 1), nn.Conv1d(d, d, 1))
        self.spans = spans

    def forward(self, seq: Tensor, time: Tensor, pos: Tensor, neg: Tensor) -> Any:
        n = seq.shape[1]
        x = self.e(seq) * math.sqrt(self.e.weight.shape[1]) + self.p.weight
        x = x * (seq != 0)[..., None].to(x.dtype)
        gap = (time[:, :, None] - time[:, None]).abs().clamp(max=self.spans)
        y = self.n1(x)
        q, k, v = (self.q(y), self.k(x), self.v(x))
        tk = self.tk(gap)
        s = (q @ k.transpose(1, 2) + (q[:, :, None] * tk).sum(-1)).float() / math.sqrt(x.shape[-1])
        s = s.masked_fill(torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1), float("-inf"))
        w = torch.softmax(s, -1).to(x.dtype)
        z = y + w @ v + (w[..., None] * self.tv(gap)).sum(2)
        z = self.n2(z)
        z = z + self.c2(torch.relu(self.c1(z.transpose(1, 2)))).transpose(1, 2)
        lp, ln = ((z * self.e(pos)).sum(-1).float(), (z * self.e(neg)).sum(-1).float())
        keep = (pos != 0).float()
        return ((f.softplus(-lp) + f.softplus(ln)) * keep).sum() / keep.sum()


@program(small={"b": 3, "n": 6, "items": 20, "d": 8, "spans": 5}, training=True)
def tisasrec(b: int = 128, n: int = 50, items: int = 50000, d: int = 64, spans: int = 256) -> Made:
    """Attention over a history with time intervals."""
    return (
        SasRec(items, n, d, spans),
        whole(items, b, n),
        whole(1000, b, n),
        1 + whole(items - 1, b, n),
        whole(items, b, n),
    )


class TwoTower(nn.Module):
    """In-batch softmax with log-q correction and hard negatives by topk."""

    def __init__(self, users: int, items: int, d: int) -> None:
        super().__init__()
        self.u, self.i = (nn.Embedding(users, d), nn.Embedding(items, d))
        self.a, self.b = (mlp(d, 256, 128), mlp(d, 256, 128))

    def forward(self, u: Tensor, i: Tensor, logq: Tensor) -> Any:
        a, b = (f.normalize(self.a(self.u(u)), dim=-1), f.normalize(self.b(self.i(i)), dim=-1))
        s = (a @ b.T).float() / 0.05 - logq.float()
        same = i[:, None] == i
        eye = torch.eye(len(u), dtype=torch.bool, device=u.device)
        s = s.masked_fill(same & ~eye, -1000000000.0)
        pos = s.diagonal()
        return ((torch.logsumexp(s, -1) - pos).mean(), pos)


@program(small={"b": 6, "users": 20, "items": 8, "d": 8}, training=True)
def in_batch_softmax(b: int = 4096, users: int = 200000, items: int = 100000, d: int = 64) -> Made:
    """Two towers, every item of the batch a negative."""
    return (TwoTower(users, items, d), whole(users, b), whole(items, b), uniform(b))
