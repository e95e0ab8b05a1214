"""What is done with logits and noise: samplers of words, schedules of diffusion, searches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Made, normal, program, uniform, whole


def penalised(logits: Tensor, seen: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Repetition and frequency penalties, min-p, and a Gumbel draw."""
    x = logits.float()
    count = torch.zeros_like(x).scatter_add_(1, seen, torch.ones_like(seen, dtype=x.dtype))
    x = torch.where(count > 0, torch.where(x > 0, x / 1.2, x * 1.2), x) - 0.1 * count - 0.2 * (count > 0)
    p = torch.softmax(x / 0.8, -1)
    keep = p >= 0.05 * p.amax(-1, keepdim=True)
    drawn = (torch.log(p) - torch.log(-torch.log(noise.float().clamp(1e-6, 1 - 1e-6)))).masked_fill(
        ~keep, float("-inf")
    )
    at = drawn.argmax(-1)
    return at, torch.log(p.gather(1, at[:, None])[:, 0])


@program(small={"rows": 3, "words": 20, "seen": 4}, dtypes=("f32",))
def penalised_draw(rows: int = 64, words: int = 128256, seen: int = 1024) -> Made:
    """A draw with penalties of what was said."""
    return penalised, normal(rows, words), whole(words, rows, seen), uniform(rows, words)


def typical(logits: Tensor, noise: Tensor) -> Tensor:
    """Locally typical sampling: words of nearly the expected information, by sorting."""
    log = torch.log_softmax(logits.float(), -1)
    p = log.exp()
    at = (-log - -(p * log).sum(-1, keepdim=True)).abs().argsort(-1)
    q = p.gather(1, at)
    keep = q.cumsum(-1) - q < 0.9
    q = q * keep
    place = ((q.cumsum(-1) / q.sum(-1, keepdim=True)) < noise.float()).sum(-1, keepdim=True)
    return at.gather(1, place.clamp(max=at.shape[1] - 1))[:, 0]


@program(small={"rows": 3, "words": 20}, dtypes=("f32",))
def typical_draw(rows: int = 64, words: int = 50257) -> Made:
    """A typical word."""
    return typical, normal(rows, words), uniform(rows, 1)


def searched(logits: Tensor, scores: Tensor, ended: Tensor, text: Tensor) -> tuple[Tensor, ...]:
    """A step of beam search: beams that ended only go on with padding, lengths are made up for, no trigram twice."""
    k, v = logits.shape[1:]
    log = torch.log_softmax(logits.float(), -1)
    pad = torch.full((v,), float("-inf"), device=log.device)
    pad[0] = 0
    log = torch.where(ended[..., None], pad, log)
    same = (text[..., :-2] == text[..., -2:-1]) & (text[..., 1:-1] == text[..., -1:])
    banned = torch.zeros_like(log).scatter_add_(-1, text[..., 2:], same.float()) > 0
    log = log.masked_fill(banned & ~ended[..., None], -1e9)
    total = (scores.float()[..., None] + log).flatten(1)
    best, at = total.topk(k, -1)
    beam, word = at // v, at % v
    told = torch.cat((text.gather(1, beam[..., None].expand(-1, -1, text.shape[-1])), word[..., None]), -1)
    done = ended.gather(1, beam) | (word == 1)
    return best, told, done, best / ((5 + told.shape[-1]) / 6) ** 0.6


@program(small={"count": 2, "beams": 3, "words": 12, "length": 5}, dtypes=("f32",))
def beam_step(count: int = 32, beams: int = 8, words: int = 32128, length: int = 128) -> Made:
    """A step of beam search without repeated trigrams."""
    return (
        searched,
        normal(count, beams, words),
        normal(count, beams),
        whole(4, count, beams) == 0,
        whole(words, count, beams, length),
    )


def guided(noise: Tensor, cond: Tensor, free: Tensor, before: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Classifier-free guidance rescaled, dynamic thresholds by a quantile, and a step of DPM-Solver++ (2M)."""
    eps = free + 7.5 * (cond - free)
    spread = cond.float().std((1, 2, 3), keepdim=True) / eps.float().std((1, 2, 3), keepdim=True)
    eps = 0.7 * eps * spread.to(eps.dtype) + 0.3 * eps
    alpha, sigma, last = (t.view(-1, 1, 1, 1) for t in torch.sigmoid(step).unbind(-1))
    x0 = (noise - sigma * eps) / alpha
    limit = x0.float().abs().flatten(1).topk(x0[0].numel() // 200 + 1, -1).values[:, -1].clamp(min=1).view(-1, 1, 1, 1)
    x0 = (x0.float().clamp(-limit, limit) / limit).to(x0.dtype)
    lam, old = torch.log(alpha / sigma), torch.log(last / sigma)
    h = lam - old
    mixed = (1 + h / 2) * x0 - h / 2 * before
    return last * noise - alpha * torch.expm1(-h) * mixed, x0


@program(small={"count": 2, "size": 16}, dtypes=("f32",))
def guided_step(count: int = 16, size: int = 128) -> Made:
    """A step of a guided sampler."""
    four = [normal(count, 4, size, size) for _ in range(4)]
    return guided, *four, normal(count, 3)


class Consistency(nn.Module):
    """EDM's preconditioning around a small net, Heun's step, and a consistency loss between both ends."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(4, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def denoised(self, x: Tensor, sigma: Tensor) -> Tensor:
        s = sigma.view(-1, 1, 1, 1)
        total = (s.square() + 0.25).sqrt()
        plane = (s.log() / 4).expand(-1, 1, *x.shape[2:])
        return x * 0.25 / total.square() + self.net(torch.cat((x / total, plane), 1)) * s * 0.5 / total

    def forward(self, x: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        a = torch.exp(level)
        b = a * 0.8
        noisy = x + a.view(-1, 1, 1, 1) * noise
        d = (noisy - self.denoised(noisy, a)) / a.view(-1, 1, 1, 1)
        nxt = noisy + (b - a).view(-1, 1, 1, 1) * d
        e = (nxt - self.denoised(nxt, b)) / b.view(-1, 1, 1, 1)
        nxt = noisy + (b - a).view(-1, 1, 1, 1) * (d + e) / 2
        gap = self.denoised(noisy, a) - self.denoised(nxt, b).detach()
        return ((gap.float().square().sum((1, 2, 3)) + 1e-4).sqrt() / (a - b).float()).mean()


@program(small={"count": 2, "size": 6, "width": 8}, training=True)
def consistency(count: int = 32, size: int = 64, width: int = 128) -> Made:
    """A consistency model's loss."""
    return Consistency(width), normal(count, 3, size, size), normal(count, 3, size, size), normal(count)


class RectifiedFlow(nn.Module):
    """Flow matching in patches: logit-normal times, straight paths, weights by time."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.patch = patch
        self.into, self.time = (
            nn.Linear(3 * patch * patch, width),
            nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, 2 * width)),
        )
        self.mlp, self.out = (
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
            nn.Linear(width, 3 * patch * patch),
        )

    def forward(self, x: Tensor, noise: Tensor, u: Tensor) -> Tensor:
        t = torch.sigmoid(u)
        h, w = x.shape[2:]
        z = (1 - t)[:, None, None, None] * x + t[:, None, None, None] * noise
        rows = f.unfold(z, self.patch, stride=self.patch).transpose(1, 2)
        freq = torch.exp(-9.2 * torch.arange(32, device=x.device, dtype=torch.float32) / 32)
        angle = 1000 * t.float()[:, None] * freq
        shift, scale = self.time(torch.cat((angle.cos(), angle.sin()), -1).to(x.dtype))[:, None].chunk(2, -1)
        y = self.into(rows)
        y = y + self.mlp(f.layer_norm(y, y.shape[-1:]) * (1 + scale) + shift)
        v = f.fold(self.out(y).transpose(1, 2), (h, w), self.patch, stride=self.patch)
        loss = (v - (noise - x)).float().square().mean((1, 2, 3))
        return (loss * (1 + torch.log1p(t.float()))).mean()


@program(small={"count": 2, "size": 8, "width": 16, "patch": 2}, training=True)
def rectified_flow(count: int = 32, size: int = 128, width: int = 768, patch: int = 8) -> Made:
    """A step of flow matching."""
    return RectifiedFlow(width, patch), normal(count, 3, size, size), normal(count, 3, size, size), normal(count)


def unmasked(logits: Tensor, tokens: Tensor, noise: Tensor, ratio: Tensor) -> Tensor:
    """MaskGIT: the least sure of what was drawn are masked again, by ranks."""
    p = torch.softmax(logits.float(), -1)
    gumbel = -torch.log(-torch.log(noise.float().clamp(1e-6, 1 - 1e-6)))
    drawn = (torch.log(p) + gumbel).argmax(-1)
    sure = p.gather(-1, drawn[..., None])[..., 0]
    masked = tokens == 0
    sure = torch.where(masked, sure, torch.inf)
    rank = sure.argsort(-1).argsort(-1)
    again = rank < (torch.cos(ratio.float() * 1.5708) * masked.sum(-1)).long()[:, None]
    return torch.where(masked, torch.where(again, 0, drawn), tokens)


@program(small={"count": 2, "length": 6, "words": 8}, dtypes=("f32",))
def masked_tokens(count: int = 16, length: int = 256, words: int = 8192) -> Made:
    """A step of a masked image model."""
    return (
        unmasked,
        normal(count, length, words),
        whole(2, count, length) * 3,
        uniform(count, length, words),
        uniform(count),
    )


def accepted(target: Tensor, draft: Tensor, tokens: Tensor, u: Tensor, parents: Tensor) -> tuple[Tensor, ...]:
    """A tree of drafted words is verified: which path is accepted, and what is left of the target's probabilities."""
    p, q = torch.softmax(target.float(), -1), torch.softmax(draft.float(), -1)
    above = parents.clamp(min=0)
    mine = p.gather(1, above[..., None].expand(-1, -1, p.shape[-1])).gather(2, tokens[..., None])[..., 0]
    theirs = q.gather(1, above[..., None].expand(-1, -1, q.shape[-1])).gather(2, tokens[..., None])[..., 0]
    good = (u.float() < mine / theirs.clamp(min=1e-9)) | (parents < 0)
    depth = torch.zeros_like(parents)
    for _ in range(6):
        good, depth = good & good.gather(1, above), torch.where(parents < 0, 0, depth.gather(1, above) + 1)
    last = torch.where(good, depth, -1).argmax(-1)
    at = last[:, None, None].expand(-1, 1, p.shape[-1])
    left = f.relu(p.gather(1, at) - q.gather(1, at))[:, 0]
    return last, left / left.sum(-1, keepdim=True).clamp(min=1e-9)


@program(small={"count": 2, "nodes": 7, "words": 12}, dtypes=("f32",))
def tree_verification(count: int = 8, nodes: int = 63, words: int = 32000) -> Made:
    """Speculation with a tree."""
    parents = ((torch.arange(nodes) + 1) // 2 - 1).expand(count, -1).contiguous()
    return (
        accepted,
        normal(count, nodes, words),
        normal(count, nodes, words),
        whole(words, count, nodes),
        uniform(count, nodes),
        parents,
    )
