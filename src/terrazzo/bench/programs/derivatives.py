"""Derivatives inside of a forward: torch.func, products with Jacobians and Hessians, penalties, steps within steps."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Made, normal, program, whole


def net(*sizes: int, act: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Layers of these widths with activations between."""
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


class PerSample(nn.Module):
    """Gradients of every sample, clipped by their norms and summed: DP-SGD."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.net = net(width, width, classes, act=nn.ReLU)

    def forward(self, x: Tensor, y: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        weights = {k: p.detach() for k, p in self.net.named_parameters()}

        def loss(w: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return f.cross_entropy(functional_call(self.net, w, (x[None],)).float(), y[None])

        found = vmap(grad(loss), (None, 0, 0))(weights, x, y)
        norm = torch.stack([g.flatten(1).float().square().sum(1) for g in found.values()]).sum(0).sqrt()
        scale = (1 / norm.clamp(min=1)).to(x.dtype)
        return tuple((g * scale.view(-1, *(1,) * (g.ndim - 1))).sum(0) + 0.1 * noise[0] for g in found.values())


@program(small={"count": 4, "width": 6, "classes": 3})
def private_gradients(count: int = 256, width: int = 512, classes: int = 10) -> Made:
    """Clipped gradients of samples."""
    return PerSample(width, classes), normal(count, width), whole(classes, count), normal(1)


class Ensemble(nn.Module):
    """Many small nets at once by vmap over stacked weights; their mean and spread."""

    def __init__(self, members: int, width: int, hidden: int) -> None:
        super().__init__()
        self.one = net(width, hidden, hidden, 1, act=nn.SiLU)
        self.weights = nn.ParameterDict(
            {
                k.replace(".", "_"): nn.Parameter(torch.randn(members, *p.shape) * 0.1)
                for k, p in self.one.named_parameters()
            }
        )
        self.one.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        def call(w: dict[str, Tensor]) -> Tensor:
            return functional_call(self.one, w, (x,))

        given = {k: self.weights[k.replace(".", "_")] for k, _ in self.one.named_parameters()}
        y = vmap(call)(given)[..., 0].float()
        return torch.stack((y.mean(0), y.var(0)), -1)


@program(small={"members": 3, "count": 5, "width": 4, "hidden": 8}, training=True)
def ensemble(members: int = 16, count: int = 4096, width: int = 64, hidden: int = 256) -> Made:
    """An ensemble of nets at once."""
    return Ensemble(members, width, hidden), normal(count, width)


class Inner(nn.Module):
    """MAML: three steps of gradient descent on every task's support set, the loss on its query set."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.net = net(1, hidden, hidden, 1, act=nn.ReLU)

    def forward(self, xs: Tensor, ys: Tensor, xq: Tensor, yq: Tensor) -> Tensor:
        start = dict(self.net.named_parameters())

        def loss(w: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return f.mse_loss(functional_call(self.net, w, (x,)), y)

        def task(xs: Tensor, ys: Tensor, xq: Tensor, yq: Tensor) -> Tensor:
            w = start
            for _ in range(3):
                g = grad(loss)(w, xs, ys)
                w = {k: w[k] - 0.01 * g[k] for k in w}
            return loss(w, xq, yq)

        return vmap(task)(xs, ys, xq, yq)


@program(small={"tasks": 2, "count": 3, "hidden": 4}, training=True)
def meta_learning(tasks: int = 32, count: int = 64, hidden: int = 128) -> Made:
    """Learning to learn (MAML's)."""
    return Inner(hidden), *(normal(tasks, count, 1) for _ in range(4))


class Critic(nn.Module):
    """WGAN-GP: the norm of the critic's gradient between real and made samples is to be 1."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.net = net(width, hidden, hidden, 1, act=nn.SiLU)

    def forward(self, real: Tensor, made: Tensor, mix: Tensor) -> Tensor:
        between = mix * real + (1 - mix) * made
        g = grad(lambda x: self.net(x).sum())(between)
        penalty = ((g.float().square().sum(-1) + 1e-12).sqrt() - 1).square().mean()
        return self.net(made).float().mean() - self.net(real).float().mean() + 10 * penalty


@program(small={"count": 4, "width": 6, "hidden": 8}, training=True)
def gradient_penalty(count: int = 4096, width: int = 256, hidden: int = 512) -> Made:
    """A critic with a penalty on its gradient."""
    return Critic(width, hidden), normal(count, width), normal(count, width), torch.rand(count, 1)


class Scores(nn.Module):
    """Sliced score matching: a product with the Jacobian along random directions."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.net = net(width, hidden, hidden, width, act=nn.Softplus)

    def forward(self, x: Tensor, v: Tensor) -> Tensor:
        s, ds = jvp(self.net, (x,), (v,))
        return ((v * ds).sum(-1).float() + 0.5 * s.float().square().sum(-1)).mean()


@program(small={"count": 4, "width": 6, "hidden": 8}, training=True)
def score_matching(count: int = 8192, width: int = 128, hidden: int = 512) -> Made:
    """Score matching along slices."""
    return Scores(width, hidden), normal(count, width), normal(count, width)


class Curvature(nn.Module):
    """Five steps of conjugate gradients with products of the Hessian and a vector (reverse over reverse)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.net = net(width, hidden, 1)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        w = {k: p.detach().float() for k, p in self.net.named_parameters()}
        x, y = x.float(), y.float()

        def loss(w: dict[str, Tensor]) -> Tensor:
            return f.mse_loss(functional_call(self.net, w, (x,)), y)

        r = grad(loss)(w)
        p, s = r, {k: torch.zeros_like(v) for k, v in w.items()}

        def dot(a: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
            return torch.stack([(a[k] * b[k]).sum() for k in a]).sum()

        rr = dot(r, r)
        for _ in range(5):
            hp = vjp(grad(loss), w)[1](p)[0]
            hp = {k: hp[k] + 0.1 * p[k] for k in p}
            step = rr / dot(p, hp)
            s, r = {k: s[k] + step * p[k] for k in s}, {k: r[k] - step * hp[k] for k in r}
            new = dot(r, r)
            p, rr = {k: r[k] + new / rr * p[k] for k in p}, new
        return tuple(s.values())


@program(small={"count": 6, "width": 4, "hidden": 5}, dtypes=("f32",))
def hessian_free(count: int = 4096, width: int = 256, hidden: int = 512) -> Made:
    """A step of Hessian-free optimisation."""
    return Curvature(width, hidden), normal(count, width), normal(count, 1)


class TangentKernel(nn.Module):
    """The empirical neural tangent kernel of two batches, from Jacobians."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.net = net(width, hidden, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        w = {k: p.detach() for k, p in self.net.named_parameters()}

        def one(w: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(self.net, w, (x[None],))[0, 0]

        ja, jb = (vmap(jacrev(one), (None, 0))(w, t) for t in (a, b))
        return torch.stack([ja[k].flatten(1) @ jb[k].flatten(1).T for k in ja]).sum(0)


@program(small={"count": 4, "width": 4, "hidden": 5}, dtypes=("f32",))
def tangent_kernel(count: int = 256, width: int = 64, hidden: int = 512) -> Made:
    """A tangent kernel."""
    return TangentKernel(width, hidden), normal(count, width), normal(count, width)


class Laplacian(nn.Module):
    """A wave function's local energy: the Laplacian of its logarithm by forward over reverse along every axis."""

    def __init__(self, particles: int, hidden: int) -> None:
        super().__init__()
        self.net = net(3 * particles, hidden, hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        eye = torch.eye(x.shape[-1], device=x.device, dtype=x.dtype)

        def log(x: Tensor) -> Tensor:
            r = x.view(-1, 3)
            d = (r[:, None] - r).square().sum(-1)
            return self.net(x)[0] - 0.1 * (d + 1).sqrt().sum()

        def energy(x: Tensor) -> Tensor:
            g = grad(log)
            first, second = vmap(lambda v: jvp(g, (x,), (v,)))(eye)
            return -0.5 * (second.diagonal().sum() + first[0].square().sum())

        return vmap(energy)(x)


@program(small={"walkers": 3, "particles": 2, "hidden": 6}, dtypes=("f32",))
def local_energy(walkers: int = 1024, particles: int = 6, hidden: int = 64) -> Made:
    """Energies of a neural wave function."""
    return Laplacian(particles, hidden), normal(walkers, 3 * particles)


class Sharpness(nn.Module):
    """SAM's two gradients; the second at weights moved along the first."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.net = net(width, 2 * width, classes, act=nn.GELU)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        w = {k: p.detach() for k, p in self.net.named_parameters()}

        def loss(w: dict[str, Tensor]) -> Tensor:
            return f.cross_entropy(functional_call(self.net, w, (x,)).float(), y)

        _, pull = vjp(loss, w)
        (g,) = pull(torch.ones((), device=x.device))
        norm = torch.stack([v.float().square().sum() for v in g.values()]).sum().sqrt()
        moved = {k: w[k] + (0.05 / (norm + 1e-12)).to(x.dtype) * g[k] for k in w}
        second = grad(loss)(moved)
        return tuple(w[k] - 0.1 * second[k] for k in w)


@program(small={"count": 4, "width": 6, "classes": 3})
def sharpness_aware(count: int = 1024, width: int = 1024, classes: int = 1000) -> Made:
    """A step with sharpness in mind (SAM's)."""
    return Sharpness(width, classes), normal(count, width), whole(classes, count)
