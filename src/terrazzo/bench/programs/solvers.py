"""What iterates until it is solved: optimisers within a graph, sweeps in place, eliminations, orbits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Learned, Made, normal, program, uniform, whole


def multipliers(a: Tensor, penalty: Tensor, y: Tensor) -> Tensor:
    """The lasso by alternating directions: the inverse by Newton's iteration, then soft thresholds and duals."""
    n = a.shape[1]
    one = torch.eye(n, dtype=a.dtype, device=a.device)
    gram = a.T @ a + one
    inverse = 2 * one / gram.diagonal().sum()
    for _ in range(12):
        inverse = inverse @ (2 * one - gram @ inverse)
    z = u = torch.zeros(len(y), n, dtype=y.dtype, device=y.device)
    aty, t = y @ a, f.softplus(penalty)
    for _ in range(8):
        x = (aty + z - u) @ inverse
        z = torch.sign(x + u) * f.relu((x + u).abs() - t)
        u = u + x - z
    return z


@program(small={"count": 3, "rows": 8, "columns": 6}, training=True, dtypes=("f32",))
def lasso_multipliers(count: int = 4096, rows: int = 512, columns: int = 512) -> Made:
    """Sparse codes by ADMM, unrolled."""
    return Learned(multipliers, normal(rows, columns) / rows**0.5, torch.tensor(-2.0)), normal(count, rows)


def two_loops(s: Tensor, y: Tensor, g: Tensor) -> Tensor:
    """The direction of L-BFGS from a history of steps, for many problems at once."""
    rho = 1 / ((s * y).sum(-1) + 1e-3)
    q, alphas = g, []
    for k in reversed(range(s.shape[0])):
        alpha = rho[k] * (s[k] * q).sum(-1)
        q = q - alpha[:, None] * y[k]
        alphas.append(alpha)
    r = q * ((s[-1] * y[-1]).sum(-1) / y[-1].square().sum(-1))[:, None]
    for k, alpha in zip(range(s.shape[0]), reversed(alphas), strict=True):
        r = r + s[k] * (alpha - rho[k] * (y[k] * r).sum(-1))[:, None]
    return -r


@program(small={"steps": 3, "count": 2, "width": 8})
def limited_memory_step(steps: int = 10, count: int = 256, width: int = 16384) -> Made:
    """Directions of a quasi-Newton method."""

    def call(s: Tensor, noise: Tensor, g: Tensor) -> Tensor:
        return two_loops(s, s + 0.1 * noise, g)

    return call, normal(steps, count, width), normal(steps, count, width), normal(count, width)


def preconditioned(w: Tensor, left: Tensor, right: Tensor, momentum: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Shampoo: statistics of rows and columns, their inverse fourth roots by coupled Newton steps, in place."""

    def root(m: Tensor) -> Tensor:
        one = torch.eye(len(m), dtype=m.dtype, device=m.device)
        m = m + 1e-3 * m.diagonal().amax() * one
        scale = m.square().sum().sqrt()
        x, m = one * scale.pow(-0.25), m / scale
        for _ in range(6):
            t = (5 * one - m) / 4
            x, m = x @ t, torch.linalg.matrix_power(t, 4) @ m
        return x

    left.mul_(0.95).add_(g @ g.T, alpha=0.05)
    right.mul_(0.95).add_(g.T @ g, alpha=0.05)
    step = root(left) @ g @ root(right)
    momentum.mul_(0.9).add_(step * (g.norm() / (step.norm() + 1e-8)))
    w.sub_(momentum, alpha=0.01)
    return w, left, right, momentum


@program(small={"rows": 6, "columns": 4}, dtypes=("f32",))
def shampoo_step(rows: int = 1024, columns: int = 768) -> Made:
    """A step of Shampoo."""

    def call(w: Tensor, a: Tensor, b: Tensor, m: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        return preconditioned(w.clone(), a @ a.T / len(a), b @ b.T / len(b), m.clone(), g)

    return call, *(normal(*s) for s in ((rows, columns), (rows, rows), (columns, columns), *((rows, columns),) * 2))


def clipped_curvature(w: Tensor, m: Tensor, h: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, ...]:
    """Sophia's and AdEMAMix' steps for a list of weights, as optimisers write them: by _foreach and in place."""
    ws, ms, hs, gs, us = (list(t.clone().unbind()) for t in (w, m, h, g, u))
    torch._foreach_lerp_(ms, gs, 0.1)
    torch._foreach_mul_(hs, 0.99)
    torch._foreach_addcmul_(hs, gs, us, 0.01)
    for weight, mean, bend in zip(ws, ms, hs, strict=True):
        step = (mean / (0.05 * bend).clamp_(min=1e-2)).clamp_(-1, 1)
        weight.mul_(1 - 1e-3).add_(step, alpha=-0.01)
    return torch.stack(ws), torch.stack(ms), torch.stack(hs)


@program(small={"count": 2, "rows": 3, "width": 4})
def sophia_step(count: int = 6, rows: int = 2048, width: int = 2048) -> Made:
    """A step with clipped curvature."""
    return (
        clipped_curvature,
        *(normal(count, rows, width) for _ in range(2)),
        uniform(count, rows, width),
        *(normal(count, rows, width) for _ in range(2)),
    )


def red_and_black(u: Tensor, source: Tensor) -> Tensor:
    """Gauss and Seidel's sweeps over the colours of a board: strided slices of one tensor, written in place."""
    u = u.clone()
    for _ in range(4):
        for i, j in ((1, 1), (2, 2), (1, 2), (2, 1)):
            n = u.shape[1] - 1  # odd: each colour has as many rows and columns
            rows, columns = slice(i, n, 2), slice(j, n, 2)
            around = u[:, i - 1 : n - 1 : 2, columns] + u[:, i + 1 : n + 1 : 2, columns]
            around = around + u[:, rows, j - 1 : n - 1 : 2] + u[:, rows, j + 1 : n + 1 : 2]
            u[:, rows, columns] = 0.25 * (around + source[:, rows, columns])
    return u


@program(small={"count": 1, "size": 10}, training=False)
def checkered_sweeps(count: int = 16, size: int = 1026) -> Made:
    """Poisson's equation by coloured sweeps."""
    return red_and_black, normal(count, size, size), normal(count, size, size)


def three_diagonals(lower: Tensor, main: Tensor, upper: Tensor, x: Tensor) -> Tensor:
    """Thomas' algorithm: an elimination down and a substitution up, row by row."""
    c, d = list[Tensor](), list[Tensor]()
    main = 3 + main.abs()
    for i in range(x.shape[-1]):
        over = main[:, i] - (lower[:, i] * c[-1] if i else 0)
        c.append(upper[:, i] / over)
        d.append((x[:, i] - (lower[:, i] * d[-1] if i else 0)) / over)
    found = [d[-1]]
    for i in reversed(range(len(d) - 1)):
        found.append(d[i] - c[i] * found[-1])
    return torch.stack(found[::-1], -1)


@program(small={"count": 3, "n": 5}, training=True, dtypes=("f32",))
def tridiagonal_splines(count: int = 65536, n: int = 24) -> Made:
    """Systems of three diagonals."""
    return Learned(three_diagonals, *(normal(1, n) * 0.3 for _ in range(3))), normal(count, n)


def maxwell(ex: Tensor, ey: Tensor, hz: Tensor, eps: Tensor) -> tuple[Tensor, ...]:
    """Yee's leapfrog: fields on grids half a step apart, updated in place between their edges."""
    ex, ey, hz = ex.clone(), ey.clone(), hz.clone()
    for t in range(8):
        ex[:, :, 1:] += 0.5 / eps[:, 1:] * (hz[:, :, 1:] - hz[:, :, :-1])
        ey[:, 1:] -= 0.5 / eps[1:] * (hz[:, 1:] - hz[:, :-1])
        hz[:, :-1, :-1] += 0.5 * (ex[:, :-1, 1:] - ex[:, :-1, :-1] - ey[:, 1:, :-1] + ey[:, :-1, :-1])
        hz[:, hz.shape[1] // 2, hz.shape[2] // 2] += 0.1 * t
    return ex, ey, hz


@program(small={"count": 1, "size": 8})
def light_on_a_grid(count: int = 4, size: int = 1024) -> Made:
    """Finite differences in the time domain."""
    return maxwell, *(normal(count, size, size) for _ in range(3)), 1 + uniform(size, size)


def life(x: Tensor) -> tuple[Tensor, Tensor]:
    """Conway's rules in bytes, and how many live."""
    counts = []
    for _ in range(6):
        rows = x + x.roll(1, -2) + x.roll(-1, -2)
        around = rows + rows.roll(1, -1) + rows.roll(-1, -1) - x
        x = ((around == 3) | ((around == 2) & (x == 1))).to(torch.uint8)
        counts.append(x.sum((-2, -1)))
    return x, torch.stack(counts)


@program(small={"boards": 2, "size": 6}, dtypes=("f32",))
def game_of_life(boards: int = 64, size: int = 1024) -> Made:
    """A cellular automaton."""
    return life, whole(2, boards, size, size).to(torch.uint8)


def spins(s: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
    """Metropolis on a chequerboard: spins in int8 turned where that pays or chance has it."""
    n = s.shape[-1]
    i = torch.arange(n, device=s.device)
    colour = (i[:, None] + i) % 2 == 0
    for k in range(draw.shape[0]):
        field = sum(s.roll(d, a) for d in (1, -1) for a in (-1, -2))
        cost = 2 * s * field
        turn = (draw[k] < torch.exp(-0.44 * cost.float())) & (colour if k % 2 else ~colour)
        s = torch.where(turn, -s, s)
    energy = -(s.int() * (s.roll(1, -1) + s.roll(1, -2)).int()).sum((-2, -1))
    return s, energy


@program(small={"sweeps": 2, "count": 2, "size": 6}, dtypes=("f32",))
def ising_sweeps(sweeps: int = 6, count: int = 16, size: int = 512) -> Made:
    """Sweeps of the Ising model."""
    return spins, (whole(2, count, size, size) * 2 - 1).to(torch.int8), uniform(sweeps, count, size, size)


def subspace(a: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The largest eigenvectors by powers of a block, made orthonormal column by column in place."""
    for _ in range(3):
        v = a @ v
        v = v / v.norm(dim=1, keepdim=True)
        for k in range(v.shape[2]):
            w = v[:, :, k] - (v[:, :, :k] @ (v[:, :, :k].transpose(1, 2) @ v[:, :, k : k + 1]))[..., 0]
            v[:, :, k] = w / w.norm(dim=1, keepdim=True)
    return v, torch.einsum("bik,bij,bjk->bk", v, a, v)


@program(small={"count": 2, "n": 8, "k": 3}, dtypes=("f32",))
def subspace_iteration(count: int = 64, n: int = 512, k: int = 8) -> Made:
    """Leading eigenvectors of many matrices."""

    def call(a: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return subspace(a @ a.transpose(1, 2) / n + torch.diag_embed(torch.arange(n, device=a.device) / 32), v)

    return call, normal(count, n, n), normal(count, n, k)


class DeepEquilibrium(nn.Module):
    """A fixed point by Anderson's mixing of two earlier steps, in closed form; the gradient through the last step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w, self.u, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        def step(z: Tensor) -> Tensor:
            return self.norm(torch.tanh(0.5 * self.w(z) + self.u(x)))

        with torch.no_grad():
            z = torch.zeros_like(x)
            before, last = z, step(z)
            r = last - before
            for _ in range(6):
                fz = step(last)
                new = fz - last
                d = (new - r).float()
                mix = ((new.float() * d).sum(-1, keepdim=True) / (d.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
                before, last, r = last, fz - mix.clamp(-1, 1) * (fz - last - r + last - before) * 0.5, new
        return step(last)


@program(small={"rows": 4, "width": 8}, training=True)
def deep_equilibrium(rows: int = 8192, width: int = 1024) -> Made:
    """A deep equilibrium layer."""
    return DeepEquilibrium(width), normal(rows, width)


def orbits(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Runge, Kutta and Nystrom in float64 about an oblate planet."""
    x, v = x.double() + torch.tensor([2.0, 0, 0], dtype=torch.float64, device=x.device), v.double()

    def pull(x: Tensor) -> Tensor:
        r2 = x.square().sum(-1, keepdim=True) + 0.5
        z2 = x[..., 2:].square() / r2
        weigh = torch.cat((1 - 5 * z2, 1 - 5 * z2, 3 - 5 * z2), -1)
        return -x / r2**1.5 * (1 + 1e-3 * weigh / r2)

    h = 0.01
    for _ in range(8):
        k1 = pull(x)
        k2 = pull(x + h / 2 * v + h * h / 8 * k1)
        k3 = pull(x + h * v + h * h / 2 * k2)
        x, v = x + h * v + h * h / 6 * (k1 + 2 * k2), v + h / 6 * (k1 + 4 * k2 + k3)
    return x, v


@program(small={"count": 5}, dtypes=("f32",))
def satellites(count: int = 1 << 20) -> Made:
    """Orbits in double precision."""
    return orbits, normal(count, 3) * 0.3, normal(count, 3) * 0.3


def frank_and_wolfe(a: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Sparse weights on a simplex: the best corner by argmin, and a step towards it, scattered in place."""
    w = torch.full((len(y), a.shape[1]), 1 / a.shape[1], dtype=a.dtype, device=a.device)
    for k in range(6):
        g = (w @ a.T - y) @ a
        at = g.argmin(-1, keepdim=True)
        rate = 2 / (k + 2.5)
        w.mul_(1 - rate).scatter_add_(1, at, torch.full_like(at, rate, dtype=w.dtype))
    return w, (w @ a.T - y).square().mean(-1)


@program(small={"count": 3, "rows": 6, "columns": 5}, dtypes=("f32",))
def simplex_weights(count: int = 4096, rows: int = 256, columns: int = 1024) -> Made:
    """Portfolios by Frank and Wolfe's method."""
    return frank_and_wolfe, normal(rows, columns), normal(count, rows)
