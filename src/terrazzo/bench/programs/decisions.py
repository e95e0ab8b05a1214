"""Agents and solvers as they are written: distributions of returns, plans, trees, particles, samplers, fields."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vjp, vmap
from torch.nn import functional as f

from terrazzo.bench.programs.agents import mlp
from terrazzo.bench.programs.registry import Made, normal, program, uniform, whole

ATOMS = 51


class Distributed(nn.Module):
    """A distribution of returns, projected to its atoms; noise in the last layer's weights."""

    def __init__(self, d: int, actions: int) -> None:
        super().__init__()
        self.net, self.actions = mlp(d, d, d), actions
        self.w, self.noise = (nn.Parameter(torch.randn(actions * ATOMS, d) * k / math.sqrt(d)) for k in (1.0, 0.1))
        self.b = nn.Parameter(torch.zeros(actions * ATOMS))

    def scores(self, x: Tensor, given: Tensor, made: Tensor) -> Tensor:
        given, made = (e.sign() * e.abs().sqrt() for e in (given, made))
        w = self.w + self.noise * torch.outer(made, given)
        return f.linear(self.net(x), w, self.b).view(len(x), self.actions, ATOMS).float()

    def forward(self, x: Tensor, after: Tensor, act: Tensor, reward: Tensor, done: Tensor, *noise: Tensor) -> Any:
        z = torch.linspace(-10, 10, ATOMS, device=x.device)
        with torch.no_grad():
            p = self.scores(after, *noise).softmax(-1)
            p = p[torch.arange(len(x), device=x.device), (p * z).sum(-1).argmax(1)]
            at = (reward[:, None] + 0.99 * (1 - done.float())[:, None] * z).clamp(-10, 10) / 0.4 + 25
            low, high = at.floor().clamp(0, ATOMS - 1), at.ceil().clamp(0, ATOMS - 1)
            target = torch.zeros_like(p).scatter_add(1, low.long(), p * (high - at + (low == high).float()))
            target = target.scatter_add(1, high.long(), p * (at - low))
        found = f.log_softmax(self.scores(x, *noise), -1).gather(1, act[:, None, None].expand(-1, 1, ATOMS))
        return -(target * found[:, 0]).sum(-1).mean()


@program(small={"b": 4, "d": 8, "actions": 3}, training=True)
def distributed_returns(b: int = 512, d: int = 512, actions: int = 18) -> Made:
    """The loss of a noisy C51 agent."""
    data = normal(b, d), normal(b, d), whole(actions, b), normal(b), whole(2, b) > 0
    return Distributed(d, actions), *data, normal(d), normal(actions * ATOMS)


def advantages(r: Tensor, v: Tensor, after: Tensor, done: Tensor, new: Tensor, old: Tensor) -> Any:
    """V-trace targets and normed advantages, backwards in time."""
    c = torch.exp(new - old).clamp(max=1)
    g = 0.99 * (1 - done.float())
    delta = c * (r + g * after - v)
    a = torch.zeros_like(v[:, 0])
    targets: list[Tensor] = []
    for i in reversed(range(v.shape[1])):
        a = delta[:, i] + g[:, i] * c[:, i] * a
        targets.insert(0, a + v[:, i])
    found = torch.stack(targets, 1)
    gain = found - v
    return found, (gain - gain.mean()) / (gain.std() + 1e-8)


@program(small={"b": 3, "t": 6})
def vtrace(b: int = 256, t: int = 128) -> Made:
    """Off-policy targets of an actor-critic."""
    r, v, after, new, old = (normal(b, t) for _ in range(5))
    return advantages, r, v, after, whole(20, b, t) == 0, new, old


def fisher(x: Tensor, *given: Tensor) -> Any:
    """A product with the Fisher matrix of a policy, by a forward derivative of a gradient."""
    weights, along = given[:2], given[2:]

    def distance(w: tuple[Tensor, ...]) -> Tensor:
        mean = torch.tanh(x @ w[0]) @ w[1]
        return (mean - mean.detach()).square().sum(-1).mean() / 2

    _, found = jvp(lambda *w: grad(distance)(w), weights, along)
    return tuple(a + 0.1 * b for a, b in zip(found, along, strict=True))


@program(small={"b": 4, "d": 8}, dtypes=("f32",))
def fisher_product(b: int = 4096, d: int = 256) -> Made:
    """A step of TRPO's conjugate gradients."""
    return fisher, normal(b, d), normal(d, d) * 0.05, normal(d, 8) * 0.1, normal(d, d), normal(d, 8)


def planned(first: Tensor, mean: Tensor, noise: Tensor, into: Tensor, out: Tensor, cost: Tensor) -> Any:
    """Many rollouts of a model, weighed; and the best of them."""
    u = (mean + noise).clamp(-1, 1)
    s, total = first.expand(len(noise), -1), torch.zeros_like(noise[:, 0, 0])
    for t in range(mean.shape[0]):
        s = s + torch.tanh(torch.cat((s, u[:, t]), -1) @ into) @ out
        total = total + (s @ cost)[:, 0] - 0.01 * u[:, t].square().sum(-1)
    w = torch.softmax((total - total.amax()).float() / 0.5, 0).to(u.dtype)
    best = u[total.topk(len(u) // 64).indices]
    return (w[:, None, None] * u).sum(0), best.mean(0), best.std(0)


@program(small={"b": 128, "h": 3, "d": 8})
def path_integral_plan(b: int = 4096, h: int = 20, d: int = 200) -> Made:
    """A plan by MPPI, and by the cross-entropy method."""
    model = normal(23, d) * 0.2, normal(d, 17) * 0.1, normal(17, 1)
    return planned, normal(17), normal(h, 6), normal(b, h, 6), *model


class Operator(nn.Module):
    """Functions by their values, at places."""

    def __init__(self, n: int, d: int) -> None:
        super().__init__()
        self.branch, self.trunk = mlp(n, d, d, d, act=nn.Tanh), mlp(2, d, d, d, act=nn.Tanh)
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, u: Tensor, y: Tensor) -> Any:
        return torch.einsum("bp,qp->bq", self.branch(u), self.trunk(y)) + self.shift


@program(small={"b": 2, "n": 12, "q": 6, "d": 8}, training=True)
def deep_operator(b: int = 512, n: int = 100, q: int = 1024, d: int = 256) -> Made:
    """A DeepONet."""
    return Operator(n, d), normal(b, n), normal(q, 2)


class Flow(nn.Module):
    """A continuous flow, its divergence estimated by random directions."""

    def __init__(self, d: int, width: int, steps: int) -> None:
        super().__init__()
        self.net, self.steps = mlp(d + 1, width, d, act=nn.Tanh), steps

    def forward(self, x: Tensor, e: Tensor) -> Any:
        total, h = torch.zeros_like(x[:, 0]), 1 / self.steps
        for i in range(self.steps):
            field, back = vjp(lambda z, i=i: self.net(torch.cat((z, torch.full_like(z[:, :1], i * h)), -1)), x)
            total = total - h * (back(e)[0] * e).sum(-1)
            x = x + h * field
        return -0.5 * x.square().sum(-1) - total


@program(small={"b": 2, "d": 8, "width": 8, "steps": 3}, training=True, dtypes=("f32",))
def continuous_flow(b: int = 1024, d: int = 64, width: int = 256, steps: int = 8) -> Made:
    """The log-likelihood of an FFJORD."""
    return Flow(d, width, steps), normal(b, d), normal(b, d)


def waves(u: Tensor, v: Tensor, speed: Tensor, steps: int) -> Any:
    """Finite differences in time, written in place, with two kinds of borders."""
    for _ in range(steps):
        lap = torch.zeros_like(u)
        lap[1:-1, 1:-1] = u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1]
        u, v = 2 * u - v + speed * lap, u
        u[0], u[-1] = 0, 0
        u[:, 0], u[:, -1] = u[:, 1], u[:, -2]
    return u, v


@program(small={"n": 16, "steps": 3})
def wave_equation(n: int = 1024, steps: int = 20) -> Made:
    """A wave in a box."""
    return lambda u, v, speed: waves(u, v, speed, steps), normal(n, n), normal(n, n), uniform(n, n) * 0.2


def conjugate(a: Tensor, b: Tensor, steps: int) -> Any:
    """A linear system with several right-hand sides."""
    a = a @ a.T / len(a) + torch.eye(len(a), device=a.device, dtype=a.dtype)
    x, r, q, old = torch.zeros_like(b), b, b, (b * b).sum(0)
    for _ in range(steps):
        aq = a @ q
        step = old / (q * aq).sum(0)
        x, r = x + step * q, r - step * aq
        new = (r * r).sum(0)
        q, old = r + new / old * q, new
    return x, old.sqrt()


@program(small={"n": 12, "steps": 4}, dtypes=("f32",))
def conjugate_gradients(n: int = 2048, steps: int = 20) -> Made:
    """Steps of conjugate gradients."""
    return lambda a, b: conjugate(a, b, steps), normal(n, n), normal(n, 8)


def filtered(x: Tensor, seen: Tensor, noise: Tensor, at: Tensor) -> Any:
    """Particles, weighed by what is seen and drawn anew by sorted search."""
    total = torch.zeros_like(seen[0])
    for i in range(len(seen)):
        x = x / 2 + 25 * x / (1 + x * x) + 8 * math.cos(1.2 * i) + noise[i]
        w = -0.5 * (seen[i] - x * x / 20).square()
        total = total + torch.logsumexp(w, 0)
        ends = torch.softmax(w, 0).cumsum(0)
        drawn = torch.searchsorted(ends, (torch.arange(len(x), device=x.device) + at[i]) / len(x))
        x = x[drawn.clamp(max=len(x) - 1)]
    return x.mean(), total


@program(small={"b": 6, "t": 3}, dtypes=("f32",))
def particle_filter(b: int = 65536, t: int = 10) -> Made:
    """A particle filter."""
    return filtered, normal(b), normal(t), normal(t, b), uniform(t)


def sampled(x: Tensor, y: Tensor, w: Tensor, push: Tensor, chance: Tensor) -> Any:
    """Hamiltonian steps of many chains of a logistic regression, each kept or not."""

    def energy(w: Tensor) -> Tensor:
        return f.softplus(-(y * (x @ w))).sum() + 0.5 * (w * w).sum()

    force, q = vmap(grad(energy)), w
    p = push - 0.5 * 0.01 * force(q)
    for step in range(5):
        q = q + 0.01 * p
        p = p - 0.01 * force(q) * (1 if step < 4 else 0.5)
    kinetic = 0.5 * (push.square().sum(-1) - p.square().sum(-1))
    kept = torch.log(chance) < vmap(energy)(w) - vmap(energy)(q) + kinetic
    return torch.where(kept[:, None], q, w), kept


@program(small={"b": 4, "d": 3, "n": 8}, dtypes=("f32",))
def hamiltonian_samples(b: int = 256, d: int = 64, n: int = 4096) -> Made:
    """A step of Hamiltonian Monte Carlo."""
    return sampled, normal(n, d), normal(n).sign(), normal(b, d) * 0.1, normal(b, d), uniform(b)


class Trees(nn.Module):
    """Soft trees whose levels ask one question each."""

    def __init__(self, d: int, trees: int, depth: int) -> None:
        super().__init__()
        self.features = nn.Parameter(torch.randn(d, trees, depth))
        self.thresholds, self.scales = (nn.Parameter(torch.randn(trees, depth)) for _ in range(2))
        self.leaves = nn.Parameter(torch.randn(trees, 2**depth, 8))

    def forward(self, x: Tensor) -> Any:
        v = torch.einsum("nd,dtk->ntk", x, torch.softmax(self.features, 0))
        g = torch.sigmoid((v - self.thresholds) * torch.exp(-self.scales))
        ways = torch.stack((1 - g, g), -1)
        w = ways[:, :, 0]
        for k in range(1, ways.shape[2]):
            w = (w[..., :, None] * ways[:, :, k, None, :]).flatten(2)
        return torch.einsum("ntc,tco->no", w, self.leaves) / w.shape[1]


@program(small={"n": 12, "d": 4, "trees": 3, "depth": 2}, training=True)
def oblivious_trees(n: int = 4096, d: int = 128, trees: int = 512, depth: int = 6) -> Made:
    """Neural oblivious decision trees."""
    return Trees(d, trees, depth), normal(n, d)


class Rotated(nn.Module):
    """Relations as turns of complex numbers, with hard negatives weighed."""

    def __init__(self, n: int, d: int) -> None:
        super().__init__()
        self.d, self.things, self.turns = d, nn.Embedding(n, 2 * d), nn.Embedding(100, d)

    def forward(self, head: Tensor, turn: Tensor, tail: Tensor, others: Tensor) -> Any:
        a, b = self.things(head).chunk(2, -1)
        c, s = torch.cos(self.turns(turn) * math.pi), torch.sin(self.turns(turn) * math.pi)
        x, y = a * c - b * s, a * s + b * c

        def score(t: Tensor) -> Tensor:
            u, v = t.chunk(2, -1)
            return 12 - ((x[:, None] - u).square() + (y[:, None] - v).square() + 1e-9).sqrt().sum(-1)

        right, wrong = score(self.things(tail)[:, None])[:, 0], score(self.things(others))
        w = torch.softmax(wrong, -1).detach()
        return -(f.logsigmoid(right).mean() + (w * f.logsigmoid(-wrong)).sum(-1).mean()) / 2


@program(small={"n": 10, "d": 4, "b": 6, "k": 3}, training=True, dtypes=("f32",))
def rotations(n: int = 40000, d: int = 256, b: int = 1024, k: int = 64) -> Made:
    """A RotatE knowledge graph."""
    return Rotated(n, d), whole(n, b), whole(100, b), whole(n, b), whole(n, b, k)


class Pooled(nn.Module):
    """The best half of a graph's nodes, a layer on them, and the way back."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.w, self.layer = nn.Parameter(torch.randn(d)), nn.Linear(d, d)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Any:
        n, k = len(x), len(x) // 2
        score, kept = torch.tanh((x @ self.w) / self.w.norm()).topk(k)
        few = x[kept] * score[:, None]
        place = torch.full((n,), -1, device=x.device).scatter(0, kept, torch.arange(k, device=x.device))
        s, t = place[source], place[target]
        there = ((s >= 0) & (t >= 0)).to(x.dtype)[:, None]
        y = torch.zeros_like(few).index_add(0, t.clamp(min=0), few[s.clamp(min=0)] * there)
        return torch.cat((torch.zeros_like(x).index_copy(0, kept, f.relu(self.layer(y))), x), -1)


@program(small={"n": 12, "e": 30, "d": 8}, training=True)
def graph_pooling(n: int = 10000, e: int = 80000, d: int = 128) -> Made:
    """A level of a graph U-Net."""
    return Pooled(d), normal(n, d), whole(n, e), whole(n, e)
