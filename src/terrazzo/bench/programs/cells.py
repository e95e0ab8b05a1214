"""Cells of recurrent nets, state spaces, nets of few bits, solvers of diffusions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Learned, Made, normal, program, uniform, whole


class Peepholes(nn.Module):
    """An LSTM whose gates see the cell, with a projection."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.x, self.h, self.out = (
            nn.Linear(width, 4 * hidden),
            nn.Linear(width, 4 * hidden, False),
            nn.Linear(hidden, width),
        )
        self.peep = nn.Parameter(torch.randn(3, hidden) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        given, out = self.x(x), []
        h = torch.zeros_like(x[:, 0])
        c = torch.zeros_like(given[:, 0, : self.peep.shape[1]])
        for k in range(x.shape[1]):
            i, g, u, o = (given[:, k] + self.h(h)).chunk(4, -1)
            c = torch.sigmoid(g + self.peep[0] * c) * c + torch.sigmoid(i + self.peep[1] * c) * torch.tanh(u)
            h = self.out(torch.sigmoid(o + self.peep[2] * c) * torch.tanh(c))
            out.append(h)
        return torch.stack(out, 1)


@program(small={"count": 2, "length": 3, "width": 4, "hidden": 8}, training=True)
def peephole_lstm(count: int = 128, length: int = 16, width: int = 512, hidden: int = 1024) -> Made:
    """An LSTM with peepholes and projections."""
    return Peepholes(width, hidden), normal(count, length, width)


class Phased(nn.Module):
    """A phased LSTM: a clock opens every unit's gate for a part of its period, by remainders of times."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)
        self.period, self.shift = nn.Parameter(torch.rand(width) * 3), nn.Parameter(torch.rand(width) * 5)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = c = torch.zeros_like(x[:, 0])
        tau = torch.exp(self.period.float())
        for k in range(x.shape[1]):
            phase = torch.remainder(time[:, k, None].float() - self.shift.float(), tau) / tau
            rise, fall = phase * 40, 2 - phase * 40
            gate = torch.where(phase < 0.025, rise, torch.where(phase < 0.05, fall, 0.001 * phase)).to(x.dtype)
            nh, nc = self.cell(x[:, k], (h, c))
            h, c = gate * nh + (1 - gate) * h, gate * nc + (1 - gate) * c
        return h


@program(small={"count": 2, "length": 3, "width": 6}, training=True)
def phased_lstm(count: int = 256, length: int = 12, width: int = 512) -> Made:
    """Cells with clocks."""
    return Phased(width), normal(count, length, width), uniform(count, length) * 20


class Clockwork(nn.Module):
    """A clockwork net: groups of units that change every first, second, fourth step, written to slices in place."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.x, self.w, self.groups = (
            nn.Linear(width, width),
            nn.Parameter(torch.randn(width, width) / width**0.5),
            groups,
        )

    def forward(self, x: Tensor) -> Tensor:
        h, out, size = torch.zeros_like(x[:, 0]), [], x.shape[-1] // self.groups
        for k in range(x.shape[1]):
            active = sum(k % (1 << g) == 0 for g in range(self.groups)) * size
            new = torch.tanh(self.x(x[:, k])[:, :active] + h @ self.w[:, :active])
            h = h.clone()
            h[:, :active] = new
            out.append(h)
        return torch.stack(out, 1)


@program(small={"count": 2, "length": 4, "width": 8, "groups": 2}, training=True)
def clockwork_net(count: int = 128, length: int = 16, width: int = 1024, groups: int = 4) -> Made:
    """A clockwork net."""
    return Clockwork(width, groups), normal(count, length, width)


class S5(nn.Module):
    """A diagonal system of complex states for all channels, by a scan that doubles."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.rate, self.turn = nn.Parameter(torch.rand(states)), nn.Parameter(torch.randn(states))
        self.b, self.c = (nn.Parameter(torch.randn(2, *s) / s[1] ** 0.5) for s in ((states, width), (width, states)))
        self.d, self.gate = nn.Parameter(torch.randn(width)), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        step = torch.complex(-0.01 - f.softplus(self.rate.float()), self.turn.float()) * 0.1
        a = torch.exp(step)
        u = torch.complex(x.float(), torch.zeros_like(x.float())) @ torch.complex(*self.b.float()).T * ((a - 1) / step)
        k, power = 1, a
        while k < x.shape[1]:
            u = torch.cat((u[:, :k], u[:, k:] + power * u[:, :-k]), 1)
            k, power = 2 * k, power * power
        y = f.gelu((u @ torch.complex(*self.c.float()).T).real.to(x.dtype) + self.d * x)
        return x + y * torch.sigmoid(self.gate(y))


@program(small={"count": 1, "length": 6, "width": 4, "states": 3}, training=True, dtypes=("f32",))
def doubling_states(count: int = 8, length: int = 2048, width: int = 256, states: int = 128) -> Made:
    """An S5 layer."""
    return S5(width, states), normal(count, length, width)


class HungryHippo(nn.Module):
    """H3: a shift, a product, a long convolution by Fourier transforms, another product."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.shift, self.long = nn.Parameter(torch.randn(width, 1, 4)), nn.Parameter(torch.randn(width, length) * 0.05)
        self.decay, self.d = nn.Parameter(torch.rand(width)), nn.Parameter(torch.randn(2, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).transpose(1, 2).chunk(3, 1)
        n = x.shape[1]
        k = f.conv1d(f.pad(k, (3, 0)), self.shift, groups=k.shape[1]) + self.d[0][:, None] * k
        kv = (k * v).float()
        t = torch.arange(n, device=x.device)
        filters = self.long.float() * torch.exp(-f.softplus(self.decay.float())[:, None] * t / n)
        y = torch.fft.irfft(torch.fft.rfft(kv, n=2 * n) * torch.fft.rfft(filters, n=2 * n), n=2 * n)[..., :n]
        return self.out((q * (y + self.d[1].float()[:, None] * kv).to(x.dtype)).transpose(1, 2))


@program(small={"count": 1, "length": 8, "width": 4}, training=True)
def hungry_hippo(count: int = 4, length: int = 2048, width: int = 768) -> Made:
    """An H3 layer."""
    return HungryHippo(width, length), normal(count, length, width)


def normal_floats(codes: Tensor, scales: Tensor, second: Tensor, x: Tensor) -> Tensor:
    """NF4 with scales that are quantised themselves: two codes a byte, a table, a product."""
    table = torch.tensor(
        [
            -1.0,
            -0.696,
            -0.525,
            -0.395,
            -0.284,
            -0.185,
            -0.091,
            0.0,
            0.08,
            0.161,
            0.246,
            0.338,
            0.441,
            0.563,
            0.723,
            1.0,
        ],
        device=x.device,
    )
    both = torch.stack((codes >> 4, codes & 15), -1).flatten(-2).long()
    scale = (scales.float() / 127).unflatten(-1, (-1, 4)) * second.float()[..., None]
    w = table[both].unflatten(-1, (-1, 64)) * scale.flatten(-2)[..., None]
    return x @ w.flatten(-2).to(x.dtype).T


@program(small={"rows": 3, "width": 256, "out": 5})
def normal_float_weights(rows: int = 64, width: int = 4096, out: int = 11008) -> Made:
    """A layer in NF4, quantised twice."""
    codes = whole(256, out, width // 2).to(torch.uint8)
    return (
        normal_floats,
        codes,
        whole(127, out, width // 64).to(torch.int8),
        uniform(out, width // 256),
        normal(rows, width),
    )


class SignNet(nn.Module):
    """XNOR: convolutions of signs with a scale a channel, gradients straight through where numbers are small."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.randn(width, width, 3, 3) * 0.1) for _ in range(2))
        self.norm = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        def signs(t: Tensor) -> Tensor:
            held = t.clamp(-1, 1)
            return held + (torch.where(t >= 0, 1.0, -1.0).to(t.dtype) - held).detach()

        for w, norm in zip(self.w, self.norm, strict=True):
            scale = w.abs().mean((1, 2, 3), keepdim=True)
            x = x + norm(f.conv2d(signs(x), signs(w) * scale, padding=1))
        return f.hardtanh(x)


@program(small={"images": 1, "width": 4, "size": 6}, training=True)
def signs_only(images: int = 32, width: int = 256, size: int = 28) -> Made:
    """A residual block of signs."""
    return SignNet(width), normal(images, width, size, size)


def rounded_up_or_down(v: Tensor, w: Tensor, x: Tensor) -> Tensor:
    """AdaRound: which way weights are rounded is learned by a stretched sigmoid, with a penalty that decides it."""
    step = w.abs().amax(1, keepdim=True) / 7
    h = (torch.sigmoid(v) * 1.2 - 0.1).clamp(0, 1)
    q = ((w / step).floor() + h).clamp(-8, 7) * step
    error = (f.linear(x, q) - f.linear(x, w)).float().square().mean(-1)
    return error + 0.01 * (1 - (2 * h.float() - 1).abs().pow(3)).mean()


@program(small={"rows": 4, "width": 6, "out": 5}, training=True)
def learned_rounding(rows: int = 2048, width: int = 2048, out: int = 2048) -> Made:
    """Rounding that is learned."""
    return Learned(rounded_up_or_down, normal(out, width)), normal(out, width), normal(rows, width)


def fixed_point(x: Tensor, taps: Tensor) -> Tensor:
    """Filters in whole numbers: 16 bits times 16 bits in 32, shifted with rounding, and saturated."""
    acc = torch.zeros(len(x), x.shape[1] - taps.shape[0] + 1, dtype=torch.int32, device=x.device)
    for k in range(taps.shape[0]):
        acc += x[:, k : k + acc.shape[1]].int() * taps[k].int()
    y = ((acc + (1 << 13)) >> 14).clamp(-32768, 32767).to(torch.int16)
    return torch.where(y.abs() > 20000, torch.full_like(y, 20000) * y.sign(), y)


@program(small={"rows": 2, "length": 40}, dtypes=("f32",))
def fixed_point_filters(rows: int = 256, length: int = 65536) -> Made:
    """Filters in fixed point."""
    return fixed_point, (whole(65536, rows, length) - 32768).to(torch.int16), (whole(16384, 16) - 8192).to(torch.int16)


class Denoiser(nn.Module):
    """A small net of a sample and a noise level, as Karras et al. scale it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width + 16, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        c = (sigma.square() + 0.25).rsqrt()
        at = torch.log(sigma) / 4 * torch.arange(1, 9, device=x.device, dtype=sigma.dtype)
        known = torch.cat((torch.sin(at), torch.cos(at)), -1).to(x.dtype).expand(len(x), -1)
        y = self.net(torch.cat(((c * x).to(x.dtype), known), -1))
        return (0.25 * c.square() * x + sigma * 0.5 * c * y).to(x.dtype)


class Heun(nn.Module):
    """The deterministic sampler of EDM: Euler's steps corrected by trapezoids, with a churn of noise."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.net, self.steps = Denoiser(width), steps

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        ramp = torch.linspace(0, 1, self.steps, device=x.device)
        sigma = (80 ** (1 / 7) + ramp * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7
        x = x * sigma[0].to(x.dtype)
        for k in range(self.steps - 1):
            more = sigma[k] * 1.05
            x = x + (more.square() - sigma[k].square()).sqrt().to(x.dtype) * noise[k]
            d = (x - self.net(x, more)) / more.to(x.dtype)
            step = (sigma[k + 1] - more).to(x.dtype)
            guess = x + step * d
            d2 = (guess - self.net(guess, sigma[k + 1])) / sigma[k + 1].to(x.dtype)
            x = x + step * (d + d2) / 2
        return x


@program(small={"steps": 3, "count": 2, "width": 6})
def heun_sampler(steps: int = 6, count: int = 4096, width: int = 512) -> Made:
    """A sampler of the second order."""
    return Heun(width, steps), normal(count, width), normal(steps, count, width)


class MultiStep(nn.Module):
    """DPM-Solver++ of two steps with dynamic thresholds: quantiles of samples clip what is predicted."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.net, self.steps = Denoiser(width), steps

    def forward(self, x: Tensor) -> Tensor:
        t = torch.linspace(0.95, 0.05, self.steps, device=x.device)
        alpha, sigma = torch.cos(t * math.pi / 2), torch.sin(t * math.pi / 2)
        lam, last = torch.log(alpha / sigma), None
        for k in range(self.steps - 1):
            d = self.net(x, sigma[k]).float()
            s = torch.quantile(d.abs(), 0.995, dim=-1, keepdim=True).clamp(min=1)
            d = torch.maximum(torch.minimum(d, s), -s) / s
            h = lam[k + 1] - lam[k]
            r = (lam[k] - lam[k - 1]) / h if k else h
            mixed = d if last is None else (1 + 1 / (2 * r)) * d - last / (2 * r)
            x = ((sigma[k + 1] / sigma[k]) * x - alpha[k + 1] * torch.expm1(-h) * mixed).to(x.dtype)
            last = d
        return x


@program(small={"steps": 3, "count": 2, "width": 6}, dtypes=("f32",))
def multistep_sampler(steps: int = 6, count: int = 4096, width: int = 512) -> Made:
    """A sampler with thresholds by quantiles."""
    return MultiStep(width, steps), normal(count, width)


def einsums(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """Sums of products of many forms: traces, diagonals, three factors, axes in other orders, sums of one factor."""
    n = a.shape[1]
    square = a[:, :, :n]
    return (
        torch.einsum("bij,bkj,k->bi", a, b, c[: b.shape[1]]),
        torch.einsum("bii->bi", square),
        torch.einsum("bij,bji->b", square, square),
        torch.einsum("bij,cij->bc", a, a),
        torch.einsum("bij,bik->jk", a, a),
        torch.einsum("bij->jb", a),
        torch.einsum("bij,bkj,blj->bikl", a[:, :8], b[:, :8], b[:, -8:]),
        torch.einsum("...ij,...kj->...ki", a, b),
    )


@program(small={"count": 2, "n": 4, "m": 5, "k": 3}, training=False)
def einsum_zoo(count: int = 64, n: int = 256, m: int = 384, k: int = 256) -> Made:
    """Many einsums."""
    return einsums, normal(count, n, m), normal(count, k, m), normal(max(n, k))


def rotary_positions(q: Tensor, inertia: Tensor, torque: Tensor) -> tuple[Tensor, Tensor]:
    """Rigid bodies: quaternions turned by rates of Euler's equations, normed again."""
    q, rate = f.normalize(q, dim=-1), torch.zeros_like(torque)
    main = 1 + inertia.abs()
    for _ in range(8):
        rate = rate + 0.02 * (torque - torch.linalg.cross(rate, main * rate)) / main
        x, y, z = (0.01 * rate).unbind(-1)
        a, b, c, d = q.unbind(-1)
        q = q + torch.stack(
            (-b * x - c * y - d * z, a * x + c * z - d * y, a * y + d * x - b * z, a * z + b * y - c * x), -1
        )
        q = f.normalize(q, dim=-1)
    return q, rate


@program(small={"count": 5}, training=True, dtypes=("f32",))
def rigid_bodies(count: int = 262_144) -> Made:
    """Bodies that turn."""
    return Learned(rotary_positions, normal(count, 4)), normal(count, 3), normal(count, 3)
