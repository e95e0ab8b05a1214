"""Densities, mixtures, samples and prices: probabilistic models, and what banks compute."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Learned, Made, normal, program, uniform, whole


class MixtureDensity(nn.Module):
    """A net whose outputs are a mixture of correlated Gaussians; the likelihood of places (handwriting's)."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.net, self.out = nn.Sequential(nn.Linear(width, width), nn.Tanh()), nn.Linear(width, 6 * parts + 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.out(self.net(x)).float()
        end, (pi, mx, my, sx, sy, rho) = out[..., 0], out[..., 1:].chunk(6, -1)
        rho = torch.tanh(rho)
        dx, dy = (y[..., :1] - mx) * torch.exp(-sx), (y[..., 1:2] - my) * torch.exp(-sy)
        z = dx.square() + dy.square() - 2 * rho * dx * dy
        log = -z / (2 * (1 - rho.square()) + 1e-6) - sx - sy - 0.5 * torch.log(1 - rho.square() + 1e-6)
        nll = -torch.logsumexp(log + torch.log_softmax(pi, -1), -1)
        return (nll + f.binary_cross_entropy_with_logits(end, (y[..., 2] > 0).float(), reduction="none")).mean()


@program(small={"count": 2, "length": 3, "width": 8, "parts": 4}, training=True)
def mixture_density(count: int = 64, length: int = 600, width: int = 400, parts: int = 20) -> Made:
    """A mixture density network."""
    return MixtureDensity(width, parts), normal(count, length, width), normal(count, length, 3)


def expectation(x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Two steps of expectation and maximisation of a mixture with diagonal covariances."""
    x = x.float()
    mean, var, weight = mean.float(), scale.float().square() + 0.1, torch.softmax(weight.float(), 0)
    for _ in range(2):
        log = -0.5 * (x.square() @ (1 / var).T - 2 * x @ (mean / var).T + (mean.square() / var).sum(1))
        log = log - 0.5 * torch.log(var).sum(1) + torch.log(weight)
        r = torch.softmax(log, 1)
        n = r.sum(0) + 1e-6
        mean = (r.T @ x) / n[:, None]
        var = (r.T @ x.square()) / n[:, None] - mean.square() + 1e-3
        weight = n / n.sum()
    return mean, var, weight, torch.logsumexp(log, 1).mean()


@program(small={"count": 20, "width": 4, "parts": 3}, dtypes=("f32",))
def gaussian_mixture(count: int = 262_144, width: int = 32, parts: int = 64) -> Made:
    """Mixtures of Gaussians, fitted."""
    return expectation, normal(count, width), normal(parts, width), uniform(parts, width), normal(parts)


def clusters(x: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Five rounds of Lloyd's: the nearest centre, and means by adding rows at indices."""
    at = torch.zeros(len(x), dtype=torch.long, device=x.device)
    for _ in range(5):
        at = (centres.square().sum(1) - 2 * x @ centres.T).argmin(1)
        total = torch.zeros_like(centres).index_add_(0, at, x)
        count = torch.zeros_like(centres[:, 0]).index_add_(0, at, torch.ones_like(x[:, 0]))
        centres = total / count.clamp(min=1)[:, None]
    return centres, at


@program(small={"count": 30, "width": 4, "centres": 3}, dtypes=("f32",))
def k_means(count: int = 262_144, width: int = 64, centres: int = 256) -> Made:
    """Clusters by Lloyd's algorithm."""
    return clusters, normal(count, width), normal(centres, width)


def transported(x: Tensor, y: Tensor, directions: Tensor) -> Tensor:
    """Sliced Wasserstein and energy distances, and the maximum mean discrepancy of five widths."""
    a, b = ((t @ f.normalize(directions, dim=0)).float().sort(0).values for t in (x, y))
    sliced = (a - b).square().mean()
    both = torch.cat((x, y))
    d = (both.square().sum(1)[:, None] + both.square().sum(1) - 2 * both @ both.T).float().clamp(min=0)
    k = sum(torch.exp(-d / (s * x.shape[1])) for s in (0.25, 0.5, 1.0, 2.0, 4.0))
    n = len(x)
    return sliced + k[:n, :n].mean() + k[n:, n:].mean() - 2 * k[:n, n:].mean()


@program(small={"count": 6, "width": 4, "slices": 5}, training=True)
def distribution_distances(count: int = 4096, width: int = 128, slices: int = 512) -> Made:
    """How far samples are from each other."""
    return Learned(transported, normal(count, width)), normal(count, width), normal(width, slices)


class Weighted(nn.Module):
    """An importance-weighted autoencoder with fifty samples, planar flows behind the encoder, Bernoulli pixels."""

    def __init__(self, pixels: int, width: int, latent: int, samples: int) -> None:
        super().__init__()
        self.enc, self.mu, self.log = nn.Linear(pixels, width), nn.Linear(width, latent), nn.Linear(width, latent)
        self.flows = nn.Parameter(torch.randn(4, 2, latent) * 0.1)
        self.dec, self.out, self.samples = nn.Linear(latent, width), nn.Linear(width, pixels), samples

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        h = torch.tanh(self.enc(x))
        mu, log = self.mu(h)[:, None], self.log(h)[:, None]
        z = mu + torch.exp(0.5 * log) * noise
        logq = (-0.5 * (noise.square() + log).float()).sum(-1)
        for u, w in self.flows:
            a = torch.tanh(z @ w)[..., None]
            logq = logq - torch.log((1 + (1 - a.square()) * (u @ w)).abs().float() + 1e-6)[..., 0]
            z = z + u * a
        logits = self.out(torch.tanh(self.dec(z))).float()
        logp = -(f.softplus(logits) - logits * x[:, None].float()).sum(-1) - 0.5 * z.float().square().sum(-1)
        return -(torch.logsumexp(logp - logq, 1) - math.log(self.samples)).mean()


@program(small={"count": 2, "pixels": 12, "width": 8, "latent": 3, "samples": 4}, training=True)
def importance_weighted(
    count: int = 128, pixels: int = 784, width: int = 200, latent: int = 50, samples: int = 50
) -> Made:
    """An autoencoder with many samples."""
    return Weighted(pixels, width, latent, samples), uniform(count, pixels), normal(count, samples, latent)


def stein(x: Tensor, data: Tensor, label: Tensor) -> Tensor:
    """A step of Stein variational gradient descent for logistic regressions."""
    logits = (x @ data.T).float()
    score = ((label.float() - torch.sigmoid(logits)).to(x.dtype) @ data) - x
    d = (x[:, None] - x).square().sum(-1).float()
    width = d.flatten().topk(d.numel() // 2).values[-1] / math.log(len(x) + 1)
    k = torch.exp(-d / width)
    repel = (k.sum(1, keepdim=True) * x.float() - k @ x.float()) * 2 / width
    return x + 0.01 * ((k @ score.float() + repel) / len(x)).to(x.dtype)


@program(small={"particles": 6, "rows": 10, "width": 4}, dtypes=("f32",))
def stein_particles(particles: int = 1024, rows: int = 16384, width: int = 64) -> Made:
    """Particles that follow a posterior."""
    return stein, normal(particles, width), normal(rows, width), whole(2, rows)


def unscented(m: Tensor, p: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """An unscented Kalman filter over steps: Cholesky by columns, sigma points through a net, and the gain."""
    n = m.shape[-1]
    eye = torch.eye(n, device=m.device)
    p = p @ p.transpose(-1, -2) + eye
    outs = []
    for t in range(y.shape[1]):
        columns, left = [], p
        for k in range(n):
            c = left[..., k] / left[..., k, k].clamp(min=1e-6).sqrt()[..., None]
            c = torch.where(torch.arange(n, device=m.device) >= k, c, 0.0)
            columns.append(c)
            left = left - c[..., None] * c[..., None, :]
        root = torch.stack(columns, -2) * math.sqrt(n)
        points = torch.cat((m[:, None] + root, m[:, None] - root), 1)
        points = points + 0.1 * torch.tanh(points @ w)
        m = points.mean(1)
        d = points - m[:, None]
        p = torch.einsum("bki,bkj->bij", d, d) / (2 * n) + 0.1 * eye
        seen = points[..., 0] - points[..., 1]
        e = seen - seen.mean(1, keepdim=True)
        s = e.square().mean(1) + 0.5
        gain = (d * e[..., None]).mean(1) / s[:, None]
        m = m + gain * (y[:, t] - seen.mean(1))[:, None]
        p = p - gain[..., None] * gain[..., None, :] * s[:, None, None]
        outs.append(m)
    return torch.stack(outs, 1), p


@program(small={"count": 2, "width": 3, "steps": 2}, dtypes=("f32",))
def unscented_filter(count: int = 4096, width: int = 6, steps: int = 8) -> Made:
    """A Kalman filter with sigma points."""
    return (
        unscented,
        normal(count, width),
        0.3 * normal(count, width, width),
        normal(count, steps),
        0.3 * normal(width, width),
    )


def greeks(spot: Tensor, strike: Tensor, vol: Tensor, time: Tensor) -> tuple[Tensor, ...]:
    """Black and Scholes: prices, first derivatives by differentiation, and implied volatilities by Newton."""

    def price(s: Tensor, v: Tensor, t: Tensor) -> Tensor:
        root = v * t.sqrt()
        d1 = (torch.log(s / strike) + (0.02 + 0.5 * v * v) * t) / root
        cdf = [0.5 * (1 + torch.erf(d / math.sqrt(2.0))) for d in (d1, d1 - root)]
        return s * cdf[0] - strike * torch.exp(-0.02 * t) * cdf[1]

    delta, vega, theta = torch.func.grad(lambda *x: price(*x).sum(), (0, 1, 2))(spot, vol, time)
    target, guess = price(spot, vol, time), torch.full_like(vol, 0.4)
    for _ in range(4):
        g = torch.func.grad(lambda v: price(spot, v, time).sum())(guess)
        guess = (guess - (price(spot, guess, time) - target) / g.clamp(min=1e-3)).clamp(0.05, 2)
    return target, delta, vega, theta, guess


@program(small={"options": 10}, dtypes=("f32",))
def option_greeks(options: int = 4_194_304) -> Made:
    """Prices of options and their derivatives."""
    return (
        greeks,
        80 + 40 * uniform(options),
        80 + 40 * uniform(options),
        0.1 + 0.4 * uniform(options),
        0.2 + uniform(options),
    )


def heston(noise: Tensor, other: Tensor, kappa: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Paths of a stochastic volatility; European, Asian, barrier and lookback prices."""
    v, log, dt = torch.full_like(noise[0], 0.04), torch.zeros_like(noise[0]), 1 / noise.shape[0]
    logs = []
    for a, b in zip(noise, other, strict=True):
        root = v.clamp(min=0).sqrt()
        log = log - 0.5 * v.clamp(min=0) * dt + root * math.sqrt(dt) * a
        v = v + kappa * (theta - v.clamp(min=0)) * dt + 0.3 * root * math.sqrt(dt) * (-0.7 * a + 0.714 * b)
        logs.append(log)
    path = torch.exp(torch.stack(logs))
    last, mean, top = path[-1], path.mean(0), path.amax(0)
    pay = torch.stack((f.relu(last - 1), f.relu(mean - 1), f.relu(last - 1) * (top < 1.3), top - last))
    return pay.mean(1), pay.std(1)


@program(small={"steps": 4, "paths": 20}, dtypes=("f32",))
def heston_paths(steps: int = 64, paths: int = 262_144) -> Made:
    """Prices by paths of a stochastic volatility."""
    return heston, normal(steps, paths), normal(steps, paths), torch.tensor(2.0), torch.tensor(0.04)


def american(noise: Tensor) -> Tensor:
    """Longstaff and Schwartz's: regressions backwards by normal equations of three functions, solved by elimination."""
    dt = 1 / noise.shape[0]
    path = 36 * torch.exp(
        (0.06 - 0.02) * dt * torch.arange(1, noise.shape[0] + 1, device=noise.device)[:, None]
        + 0.2 * math.sqrt(dt) * noise.cumsum(0)
    )
    cash = f.relu(40 - path[-1])
    for t in range(noise.shape[0] - 2, -1, -1):
        cash = cash * math.exp(-0.06 * dt)
        x, pay = path[t] / 40, f.relu(40 - path[t])
        inside = (pay > 0).float()
        basis = torch.stack((torch.ones_like(x), x, x * x)) * inside
        a = torch.cat((basis @ basis.T + 1e-4 * torch.eye(3, device=x.device), (basis @ cash)[:, None]), 1)
        for k in range(3):
            row = a[k] / a[k, k]
            keep = (torch.arange(3, device=x.device) != k).float()
            a = a * keep[:, None] - (a[:, k] * keep)[:, None] * row + (1 - keep)[:, None] * row
        cash = torch.where((pay > 0) & (pay > a[:, 3] @ basis), pay, cash)
    return cash.mean() * math.exp(-0.06 * dt)


@program(small={"steps": 4, "paths": 40}, dtypes=("f32",))
def american_option(steps: int = 50, paths: int = 100_000) -> Made:
    """An option that may be exercised early."""
    return american, normal(steps, paths)


def volatilities(returns: Tensor, omega: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """GARCH(1, 1): the likelihood of many series under their own parameters."""
    o, a, b = f.softplus(omega.float()), torch.sigmoid(alpha.float()) * 0.3, torch.sigmoid(beta.float()) * 0.69
    v = returns.float().var(1)
    total = torch.zeros_like(v)
    for t in range(returns.shape[1]):
        r = returns[:, t].float()
        total = total + 0.5 * (torch.log(v) + r * r / v)
        v = o + a * r * r + b * v
    return total / returns.shape[1]


@program(small={"series": 3, "steps": 6}, dtypes=("f32",))
def garch(series: int = 8192, steps: int = 128) -> Made:
    """Likelihoods of volatilities."""
    return volatilities, normal(series, steps), normal(series), normal(series), normal(series)
