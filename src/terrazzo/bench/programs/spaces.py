"""State spaces, long convolutions and other recurrences that replace attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Made, normal, program


def long_convolution(x: Tensor, taps: Tensor) -> Tensor:
    """Rows of x with the taps of their channels, causal, by Fourier transforms in float32."""
    n = x.shape[-1]
    y = torch.fft.rfft(x.float(), n=2 * n) * torch.fft.rfft(taps.float(), n=2 * n)
    return torch.fft.irfft(y, n=2 * n)[..., :n].to(x.dtype)


class DiagonalSpace(nn.Module):
    """S4D: taps from exponentials of complex poles, a long convolution, and a gated linear unit."""

    def __init__(self, width: int, state: int) -> None:
        super().__init__()
        self.log_dt = nn.Parameter(torch.rand(width) * 4 - 6)
        self.log_real = nn.Parameter(torch.full((width, state), -0.7))
        self.imaginary = nn.Parameter(3.14 * torch.arange(state).expand(width, -1).float())
        self.c = nn.Parameter(torch.randn(width, state, 2))
        self.skip, self.norm = nn.Parameter(torch.randn(width)), nn.LayerNorm(width)
        self.out = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        a = torch.complex(-self.log_real.float().exp(), self.imaginary.float())
        da = a * self.log_dt.float().exp()[:, None]
        c = torch.view_as_complex(self.c.float().contiguous()) * (da.exp() - 1) / a
        power = torch.exp(da[..., None] * torch.arange(n, device=x.device))
        taps = 2 * torch.einsum("hn,hnl->hl", c, power).real
        u = self.norm(x).transpose(1, 2)
        y = long_convolution(u, taps) + self.skip[:, None] * u
        return x + f.glu(self.out(f.gelu(y).transpose(1, 2)), -1)


@program(small={"count": 2, "length": 12, "width": 8, "state": 4}, training=True)
def diagonal_space(count: int = 8, length: int = 1024, width: int = 256, state: int = 32) -> Made:
    """A diagonal state space as a convolution (S4D's)."""
    return DiagonalSpace(width, state), normal(count, length, width)


class Hyena(nn.Module):
    """Gated long convolutions whose taps a small net makes of places."""

    def __init__(self, width: int, order: int, hidden: int) -> None:
        super().__init__()
        self.project, self.short = (
            nn.Linear(width, (order + 1) * width),
            nn.Parameter(torch.randn((order + 1) * width, 1, 3)),
        )
        self.net = nn.Sequential(nn.Linear(9, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.last, self.out, self.order = nn.Linear(hidden, order * width), nn.Linear(width, width), order
        self.decay = nn.Parameter(torch.linspace(0.5, 5, width))

    def forward(self, x: Tensor) -> Tensor:
        n, d = x.shape[1:]
        t = torch.arange(n, device=x.device, dtype=torch.float32) / n
        z = torch.cat((t[:, None], (t[:, None] * 6.28 * torch.arange(1, 5, device=x.device)).sin()), -1)
        z = torch.cat((z, (t[:, None] * 6.28 * torch.arange(1, 5, device=x.device)).cos()), -1).to(x.dtype)
        taps = self.last(self.net(z)).view(n, self.order, d) * torch.exp(-t[:, None] * self.decay)[:, None].to(x.dtype)
        u = f.conv1d(f.pad(self.project(x).transpose(1, 2), (2, 0)), self.short, groups=self.short.shape[0])
        v, *gates = u.chunk(self.order + 1, 1)
        for k, gate in enumerate(gates):
            v = gate * long_convolution(v, taps[:, k].T)
        return self.out(v.transpose(1, 2))


@program(small={"count": 2, "length": 10, "width": 8, "order": 2, "hidden": 8}, training=True)
def hyena(count: int = 4, length: int = 2048, width: int = 512, order: int = 2, hidden: int = 64) -> Made:
    """Long convolutions with taps of a net."""
    return Hyena(width, order, hidden), normal(count, length, width)


class MatrixMemory(nn.Module):
    """xLSTM's matrix memory, all steps at once: exponential gates in one stabilised matrix."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.up, self.conv = nn.Linear(width, 4 * width), nn.Parameter(torch.randn(2 * width, 1, 4) * 0.3)
        self.q, self.k, self.v = (nn.Linear(2 * width, 2 * width, bias=False) for _ in range(3))
        self.gates, self.heads = nn.Linear(6 * width, 2 * heads), heads
        self.norm, self.group, self.down = (
            nn.LayerNorm(width),
            nn.GroupNorm(heads, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        u, z = self.up(self.norm(x)).chunk(2, -1)
        c = f.silu(f.conv1d(f.pad(u.transpose(1, 2), (3, 0)), self.conv, groups=2 * d)).transpose(1, 2)
        q, k, v = self.q(c), self.k(c), self.v(u)
        i, forget = self.gates(torch.cat((q, k, v), -1)).float().transpose(1, 2).chunk(2, 1)
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        f_sum = f.logsigmoid(forget).cumsum(-1)
        log = f_sum[..., :, None] - f_sum[..., None, :] + i[..., None, :]
        log = log.masked_fill(torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1), float("-inf"))
        top = log.amax(-1, keepdim=True)
        c_matrix = (q @ k.transpose(-1, -2)).float() * (q.shape[-1] ** -0.5) * torch.exp(log - top)
        norm = torch.maximum(c_matrix.sum(-1, keepdim=True).abs(), torch.exp(-top))
        h = (c_matrix / (norm + 1e-6)).to(x.dtype) @ v
        h = self.group(h.transpose(1, 2).reshape(b * n, 2 * d)).view(b, n, -1)
        return x + self.down((h + c) * f.silu(z))


@program(small={"count": 2, "length": 6, "width": 8, "heads": 2}, training=True)
def matrix_memory(count: int = 4, length: int = 1024, width: int = 512, heads: int = 4) -> Made:
    """A block of xLSTM with a matrix memory."""
    return MatrixMemory(width, heads), normal(count, length, width)


class RealGated(nn.Module):
    """Griffin's recurrent block: a gated linear recurrence, found in blocks of doubling lengths."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.x, self.y = nn.RMSNorm(width), nn.Linear(width, inner), nn.Linear(width, inner)
        self.conv = nn.Conv1d(inner, inner, 4, padding=3, groups=inner)
        self.gates = nn.Parameter(torch.randn(2, 8, inner // 8, inner // 8) * 0.1)
        self.decay, self.out = nn.Parameter(torch.rand(inner)), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        u = self.norm(x)
        v = self.conv(self.x(u).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        blocks = v.unflatten(-1, (8, -1))
        r, i = (torch.sigmoid(torch.einsum("btgc,gcd->btgd", blocks, w).flatten(2).float()) for w in self.gates)
        log = -8 * r * f.softplus(self.decay.float())
        a, h = log.exp(), (1 - (2 * log).exp()).clamp(min=1e-6).sqrt() * i * v.float()
        step = 1
        while step < x.shape[1]:
            h = h + a * f.pad(h, (0, 0, step, 0))[:, : x.shape[1]]
            a = a * f.pad(a, (0, 0, step, 0), value=1.0)[:, : x.shape[1]]
            step *= 2
        return x + self.out(h.to(x.dtype) * f.gelu(self.y(u)))


@program(small={"count": 2, "length": 7, "width": 8, "inner": 16}, training=True)
def real_gated_recurrence(count: int = 4, length: int = 2048, width: int = 1024, inner: int = 1280) -> Made:
    """A block of Griffin."""
    return RealGated(width, inner), normal(count, length, width)


class MovingAverage(nn.Module):
    """Mega: a damped moving average in several dimensions before one gated head of attention."""

    def __init__(self, width: int, z: int, hidden: int, dims: int) -> None:
        super().__init__()
        self.alpha, self.delta, self.beta, self.gamma = (nn.Parameter(torch.randn(width, dims) * 0.5) for _ in range(4))
        self.norm, self.v, self.mx = (
            nn.LayerNorm(width),
            nn.Linear(width, hidden),
            nn.Linear(width, z + hidden + 2 * width),
        )
        self.qk, self.h, self.sizes = (
            nn.Parameter(torch.randn(2, z)),
            nn.Linear(hidden, width),
            (width, z, hidden, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        u = self.norm(x)
        p = torch.sigmoid(self.alpha.float())
        q = 1 - p * torch.sigmoid(self.delta.float())
        taps = torch.einsum("dh,dhl->dl", p * self.beta * self.gamma, q[..., None] ** torch.arange(n, device=x.device))
        mx = f.silu(long_convolution(u.transpose(1, 2), taps).transpose(1, 2) + u)
        gate, z, r, hx = self.mx(mx).split(self.sizes, -1)
        q_, k_ = (f.silu(z)[..., None, :] * (1 + self.qk)).unbind(-2)
        s = (q_ @ k_.transpose(-1, -2)).float() / n
        w = torch.relu(s).square().tril().to(x.dtype)
        h = w @ f.silu(self.v(u))
        out = f.silu(hx + self.h(h * f.silu(r)))
        g = torch.sigmoid(gate)
        return x + g * (out - x)


@program(small={"count": 2, "length": 7, "width": 8, "z": 4, "hidden": 16, "dims": 3}, training=True)
def moving_average_attention(
    count: int = 4, length: int = 1024, width: int = 512, z: int = 128, hidden: int = 1024, dims: int = 16
) -> Made:
    """A layer of Mega."""
    return MovingAverage(width, z, hidden, dims), normal(count, length, width)


class AttentionFree(nn.Module):
    """AFT-full: weights of places and keys, no queries times keys; rows of exponentials as two products."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.qkv, self.out, self.bias = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            nn.Parameter(torch.randn(length, length)),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        w = torch.exp(self.bias.float() - self.bias.float().amax(-1, keepdim=True)).tril().to(x.dtype)
        e = torch.exp(k.float() - k.float().amax(1, keepdim=True)).to(x.dtype)
        return self.out(torch.sigmoid(q) * (w @ (e * v)) / (w @ e))


@program(small={"count": 2, "length": 8, "width": 8}, training=True)
def attention_free(count: int = 8, length: int = 1024, width: int = 512) -> Made:
    """An attention-free layer."""
    return AttentionFree(width, length), normal(count, length, width)


class Reader(nn.Module):
    """TTT-linear: the state is a matrix that a step of gradient descent moves on, chunk by chunk."""

    def __init__(self, width: int, heads: int, chunk: int) -> None:
        super().__init__()
        self.qkv, self.rate, self.out = nn.Linear(width, 3 * width), nn.Linear(width, heads), nn.Linear(width, width)
        self.state, self.norm = (
            nn.Parameter(torch.randn(heads, width // heads, width // heads) * 0.02),
            nn.LayerNorm(width // heads),
        )
        self.heads, self.chunk = heads, chunk

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        rate = torch.sigmoid(self.rate(x)).transpose(1, 2)[..., None] / d
        w, outs = self.state.expand(b, -1, -1, -1), []
        for at in range(0, n, self.chunk):
            qc, kc, vc, rc = (t[:, :, at : at + self.chunk] for t in (q, k, v, rate))
            grad = rc * (self.norm(kc @ w) - (vc - kc))
            scores = (qc @ kc.transpose(-1, -2)).tril()
            outs.append(qc + self.norm(qc @ w - scores @ grad))
            w = w - kc.transpose(-1, -2) @ grad
        return self.out(torch.cat(outs, 2).transpose(1, 2).reshape(b, n, d))


@program(small={"count": 2, "length": 8, "width": 8, "heads": 2, "chunk": 4}, training=True)
def learning_at_test_time(
    count: int = 4, length: int = 1024, width: int = 768, heads: int = 12, chunk: int = 64
) -> Made:
    """A layer that learns as it reads (TTT-linear's)."""
    return Reader(width, heads, chunk), normal(count, length, width)


class ScalarMemory(nn.Module):
    """xLSTM: exponential gates with a running maximum, block-diagonal recurrent weights."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.x, self.r, self.heads = (
            nn.Linear(width, 4 * width),
            nn.Parameter(torch.randn(heads, width // heads, 4 * width // heads) * 0.1),
            heads,
        )
        self.norm = nn.GroupNorm(heads, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        given = self.x(x).view(b, n, self.heads, -1)
        h = c = norm = x.new_zeros(b, self.heads, d // self.heads)
        top, outs = h - 30, []
        for t in range(n):
            z, i, forget, o = (given[:, t] + torch.einsum("bhd,hde->bhe", h, self.r)).chunk(4, -1)
            log = f.logsigmoid(forget) + top
            new = torch.maximum(log, i)
            keep, add = torch.exp(log - new), torch.exp(i - new)
            c, norm, top = keep * c + add * torch.tanh(z), keep * norm + add, new
            h = torch.sigmoid(o) * c / norm.clamp(min=1e-6)
            outs.append(h)
        y = torch.stack(outs, 1).reshape(b * n, d)
        return self.norm(y).view(b, n, d)


@program(small={"count": 2, "length": 4, "width": 8, "heads": 2}, training=True)
def scalar_memory(count: int = 32, length: int = 32, width: int = 512, heads: int = 4) -> Made:
    """Steps of xLSTM's scalar memory."""
    return ScalarMemory(width, heads), normal(count, length, width)
