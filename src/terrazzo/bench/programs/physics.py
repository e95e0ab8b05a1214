"""Fields, lattices, particles, filters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Made, normal, program, uniform, whole


class Navier(nn.Module):
    """Residuals of Navier-Stokes: second derivatives by autograd, and the weights' gradients beyond them."""

    def __init__(self, w: int, n: int) -> None:
        super().__init__()
        self.l = nn.ModuleList(nn.Linear(3 if k == 0 else w, 3 if k == n else w) for k in range(n + 1))

    def net(self, x: Tensor) -> Any:
        for l in self.l[:-1]:
            x = torch.tanh(l(x))
        return self.l[-1](x)

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = self.net(x)
            g = [torch.autograd.grad(y[:, k].sum(), x, create_graph=True)[0] for k in range(3)]
            u, v = y[:, 0], y[:, 1]
            res = []
            for k in (0, 1):
                lap = sum(torch.autograd.grad(g[k][:, d].sum(), x, create_graph=True)[0][:, d] for d in (0, 1))
                res.append(g[k][:, 2] + u * g[k][:, 0] + v * g[k][:, 1] + g[2][:, k] - 0.01 * lap)
            return torch.stack((*res, g[0][:, 0] + g[1][:, 1]), 1)


@program(small={"count": 6, "width": 8, "layers": 2}, training=True, dtypes=("f32",))
def navier_stokes(count: int = 16384, width: int = 128, layers: int = 5) -> Made:
    """A net of a flow: its residuals have second derivatives."""
    return Navier(width, layers), uniform(count, 3)


class CosineOperator(nn.Module):
    """A neural operator in cosines: products with matrices of modes on both axes, mixed for each mode."""

    def __init__(self, n: int, w: int, m: int, layers: int) -> None:
        super().__init__()
        i = torch.arange(n, device="cpu").float()
        self.register_buffer(
            "d",
            (torch.cos(math.pi * (i + 0.5) * torch.arange(m, device="cpu")[:, None] / n) * (2 / n) ** 0.5).to(
                torch.get_default_device()
            ),
        )
        self.i, self.o = nn.Linear(3, w), nn.Linear(w, 1)
        self.w = nn.ParameterList(nn.Parameter(torch.randn(m, m, w, w) / w) for _ in range(layers))
        self.l = nn.ModuleList(nn.Conv2d(w, w, 1) for _ in range(layers))

    def forward(self, x: Tensor) -> Any:
        _b, _n, _, _ = x.shape
        x = self.i(x).permute(0, 3, 1, 2)
        for w, l in zip(self.w, self.l, strict=False):
            z = self.d @ x @ self.d.T
            z = torch.einsum("bixy,xyio->boxy", z, w)
            x = f.gelu(self.d.T @ z @ self.d + l(x))
        return self.o(x.permute(0, 2, 3, 1))


@program(small={"count": 2, "size": 8, "width": 4, "modes": 3, "layers": 1}, training=True)
def cosine_operator(count: int = 16, size: int = 64, width: int = 64, modes: int = 16, layers: int = 3) -> Made:
    """A neural operator in cosines."""
    return CosineOperator(size, width, modes, layers), normal(count, size, size, 3)


class Boltzmann(nn.Module):
    """A lattice Boltzmann method: nine directions, relaxed and moved."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.n = steps
        self.tau = nn.Parameter(torch.tensor(0.6))

    def forward(self, z: Tensor, wall: Tensor) -> Any:
        c = [(0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (-1, -1), (1, -1)]
        w = [4 / 9] + [1 / 9] * 4 + [1 / 36] * 4
        opp = [0, 3, 4, 1, 2, 7, 8, 5, 6]
        z = list(z.unbind(0))
        m = wall > 0.95
        for _ in range(self.n):
            rho = sum(z)
            u = sum(k[0] * a for k, a in zip(c, z, strict=False) if k[0]) / rho
            v = sum(k[1] * a for k, a in zip(c, z, strict=False) if k[1]) / rho
            sq = 1.5 * (u * u + v * v)
            new = []
            for k, q, a in zip(c, w, z, strict=False):
                d = 3 * (k[0] * u + k[1] * v)
                new.append(a - (a - q * rho * (1 + d + 0.5 * d * d - sq)) / self.tau)
            new = [torch.where(m, z[opp[k]], new[k]) for k in range(9)]
            z = [a.roll(k, (1, 0)) for k, a in zip(c, new, strict=False)]
        return torch.stack(z)


@program(small={"size": 8, "steps": 2}, training=True, dtypes=("f32",))
def lattice_boltzmann(size: int = 512, steps: int = 6) -> Made:
    """A lattice Boltzmann flow around obstacles."""
    return Boltzmann(steps), uniform(9, size, size) * 0.1 + 0.1, uniform(size, size)


class Heat(nn.Module):
    """Explicit steps of the heat equation."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n
        self.k = nn.Parameter(torch.tensor(0.2))

    def forward(self, u: Tensor, q: Tensor) -> Any:
        for _ in range(self.n):
            p = f.pad(u[:, None], (1, 1, 1, 1), mode="replicate")[:, 0]
            u = u + self.k * (p[:, 2:, 1:-1] + p[:, :-2, 1:-1] + p[:, 1:-1, 2:] + p[:, 1:-1, :-2] - 4 * u) + 0.01 * q
        return u


@program(small={"count": 2, "size": 8, "steps": 3}, training=True)
def heat_equation(count: int = 4, size: int = 512, steps: int = 20) -> Made:
    """The heat equation, step by step."""
    return Heat(steps), uniform(count, size, size), uniform(count, size, size)


def nbody(x: Tensor, v: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    def force(x: Tensor) -> Tensor:
        d = x[None] - x[:, None]
        r = (d.square().sum(-1) + 1e-2).rsqrt()
        return ((m * r**3)[..., None] * d).sum(1)

    a = force(x)
    for _ in range(4):
        v = v + 0.005 * a
        x = x + 0.01 * v
        a = force(x)
        v = v + 0.005 * a
    d = x[None] - x[:, None]
    e = 0.5 * (m * v.square().sum(-1)).sum() - 0.5 * (m * m[:, None] * (d.square().sum(-1) + 1e-2).rsqrt()).sum()
    return x, v, e


@program(small={"count": 6}, dtypes=("f32",))
def n_body(count: int = 4096) -> Made:
    """Bodies that attract each other, four leapfrog steps."""
    return nbody, normal(count, 3), normal(count, 3), uniform(count)


class Jones(nn.Module):
    """Lennard-Jones energies with a cutoff, periodic; forces by autograd; the virial."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.g = nn.Parameter(torch.rand(4, 4) + 0.5), nn.Parameter(torch.rand(4, 4) * 0.1 + 0.3)

    def forward(self, x: Tensor, kind: Tensor) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            d = x[:, None] - x[None]
            d = d - 3 * torch.round(d / 3)
            r2 = d.square().sum(-1) + torch.eye(len(x), device=x.device)
            e, g = self.e[kind[:, None], kind], self.g[kind[:, None], kind]
            q = (g * g / r2).clamp(max=1.5) ** 3
            on = (r2 < 1) & ~torch.eye(len(x), dtype=torch.bool, device=x.device)
            u = torch.where(on, 4 * e * (q * q - q), 0).sum() / 2
            (fo,) = torch.autograd.grad(u, x, create_graph=True)
            return fo, u


@program(small={"count": 7}, training=True, dtypes=("f32",))
def lennard_jones(count: int = 2048) -> Made:
    """Forces of Lennard-Jones between kinds, and gradients of them."""
    return Jones(), uniform(count, 3) * 3, whole(4, count)


class Sinkhorn(nn.Module):
    """A plan between two sets of points."""

    def __init__(self, d: int, w: int, n: int) -> None:
        super().__init__()
        self.n = n
        self.f = nn.Sequential(nn.Linear(d, w), nn.ReLU(), nn.Linear(w, d))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        c = torch.cdist(self.f(x).float(), y.float()).square()
        eps = 0.05 * c.detach().mean()
        u, v = torch.zeros_like(c[:, 0]), torch.zeros_like(c[0])
        n, m = c.shape
        for _ in range(self.n):
            u = -eps * torch.logsumexp((v - c) / eps - math.log(m), 1)
            v = -eps * torch.logsumexp((u[:, None] - c) / eps - math.log(n), 0)
        p = torch.exp((u[:, None] + v - c) / eps) / (n * m)
        return (p * c).sum(), p


@program(small={"count": 6, "width": 4, "inner": 8, "steps": 2}, training=True, dtypes=("f32",))
def sinkhorn(count: int = 2048, width: int = 64, inner: int = 256, steps: int = 10) -> Made:
    """Optimal transport by Sinkhorn's steps."""
    return Sinkhorn(width, inner, steps), normal(count, width), normal(count, width)


class Kalman(nn.Module):
    """Kalman filters side by side, Joseph's form, the likelihood of what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.F, self.q, self.r = (
            nn.Parameter(torch.eye(4) + 0.1 * torch.randn(4, 4)),
            nn.Parameter(torch.zeros(4)),
            nn.Parameter(torch.zeros(2)),
        )

    def forward(self, z: Tensor) -> Any:
        b, t, _ = z.shape
        x = torch.zeros(b, 4, 1, device=z.device, dtype=z.dtype)
        eye = torch.eye(4, device=z.device, dtype=z.dtype)
        p = eye.expand(b, -1, -1)
        h = eye[:2]
        q, r = torch.diag(self.q.exp() * 0.1), torch.diag(self.r.exp())
        ll = 0.0
        out = []
        for k in range(t):
            x = self.F @ x
            p = self.F @ p @ self.F.T + q
            y = z[:, k, :, None] - h @ x
            c = h @ p @ h.T + r
            det = c[:, 0, 0] * c[:, 1, 1] - c[:, 0, 1] * c[:, 1, 0]
            inv = torch.stack((c[:, 1, 1], -c[:, 0, 1], -c[:, 1, 0], c[:, 0, 0]), -1).view(b, 2, 2) / det[:, None, None]
            g = p @ h.T @ inv
            x = x + g @ y
            i = eye - g @ h
            p = i @ p @ i.transpose(1, 2) + g @ r @ g.transpose(1, 2)
            ll = ll - 0.5 * ((y.transpose(1, 2) @ inv @ y)[:, 0, 0] + det.log())
            out.append(x[..., 0])
        return torch.stack(out, 1), ll


@program(small={"count": 3, "steps": 3}, training=True, dtypes=("f32",))
def kalman_filter(count: int = 4096, steps: int = 8) -> Made:
    """Kalman filters side by side."""
    return Kalman(), normal(count, steps, 2)


class Hmm(nn.Module):
    """Forward, backward and Viterbi's best path in a hidden Markov model."""

    def __init__(self, k: int, v: int) -> None:
        super().__init__()
        self.a, self.e, self.p = (
            nn.Parameter(torch.randn(k, k)),
            nn.Parameter(torch.randn(k, v)),
            nn.Parameter(torch.randn(k)),
        )

    def forward(self, x: Tensor) -> Any:
        a, e, p = self.a.log_softmax(1), self.e.log_softmax(1), self.p.log_softmax(0)
        l = e.T[x]
        al = p + l[:, 0]
        be = al
        back = []
        for t in range(1, x.shape[1]):
            al = torch.logsumexp(al[:, :, None] + a, 1) + l[:, t]
            best = (be[:, :, None] + a).max(1)
            be = best.values + l[:, t]
            back.append(best.indices)
        at = be.argmax(1)
        path = [at]
        for b in reversed(back):
            at = b.gather(1, at[:, None])[:, 0]
            path.insert(0, at)
        return torch.logsumexp(al, 1), torch.stack(path, 1)


@program(small={"count": 3, "steps": 4, "states": 5, "kinds": 6}, training=True, dtypes=("f32",))
def hidden_markov(count: int = 256, steps: int = 16, states: int = 64, kinds: int = 100) -> Made:
    """A hidden Markov model: likelihoods, and best paths."""
    return Hmm(states, kinds), whole(kinds, count, steps)


class GaussianProcess(nn.Module):
    """Conjugate gradients on a kernel matrix, ten steps, and predictions."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.l, self.n = nn.Parameter(torch.zeros(d)), nn.Parameter(torch.tensor(-1.0))

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Any:
        def k(a: Tensor, b: Tensor) -> Tensor:
            return torch.exp(
                -0.5 * (a / self.l.exp()).square().sum(-1)[:, None]
                - 0.5 * (b / self.l.exp()).square().sum(-1)
                + (a / self.l.exp()) @ (b / self.l.exp()).T
            )

        K = k(x, x) + (self.n.exp() + 1e-2) * torch.eye(len(x), device=x.device, dtype=x.dtype)
        v = torch.zeros_like(y)
        r = y
        p = r
        rr = r @ r
        for _ in range(10):
            q = K @ p
            al = rr / (p @ q)
            v = v + al * p
            r = r - al * q
            n = r @ r
            p = r + n / rr * p
            rr = n
        return k(z, x) @ v, y @ v


@program(small={"count": 8, "asked": 4, "width": 3}, training=True, dtypes=("f32",))
def gaussian_process(count: int = 2048, asked: int = 512, width: int = 8) -> Made:
    """A Gaussian process by conjugate gradients."""
    return GaussianProcess(width), normal(count, width), normal(count), normal(asked, width)


class Hamiltonian(nn.Module):
    """A net's energy, its symplectic steps by gradients, and training through them."""

    def __init__(self, d: int, w: int) -> None:
        super().__init__()
        self.n = nn.Sequential(nn.Linear(2 * d, w), nn.Softplus(), nn.Linear(w, w), nn.Softplus(), nn.Linear(w, 1))
        self.d = d

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = x
            for _ in range(3):
                (g,) = torch.autograd.grad(self.n(y).sum(), y, create_graph=True)
                y = y + 0.1 * torch.cat((g[:, self.d :], -g[:, : self.d]), 1)
            return y


@program(small={"count": 5, "width": 2, "inner": 8}, training=True, dtypes=("f32",))
def hamiltonian_net(count: int = 8192, width: int = 16, inner: int = 256) -> Made:
    """A Hamiltonian net: steps along its gradient, trained through."""
    return Hamiltonian(width, inner), normal(count, 2 * width)
