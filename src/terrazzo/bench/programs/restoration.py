"""Nets that restore pictures."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Made, normal, program, uniform


class Rcab(nn.Module):
    """A residual block whose channels are weighted."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.b = nn.Sequential(nn.Conv2d(w, w, 3, padding=1), nn.ReLU(), nn.Conv2d(w, w, 3, padding=1))
        self.a = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(w, w // 8, 1), nn.ReLU(), nn.Conv2d(w // 8, w, 1), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Any:
        y = self.b(x)
        return x + y * self.a(y)


class Rcan(nn.Module):
    """Residual blocks, and pixels shuffled."""

    def __init__(self, w: int, layers: int, scale: int) -> None:
        super().__init__()
        self.head, self.body, self.last = (
            nn.Conv2d(3, w, 3, padding=1),
            nn.Sequential(*[Rcab(w) for _ in range(layers)]),
            nn.Conv2d(w, w, 3, padding=1),
        )
        self.up = nn.Sequential(
            nn.Conv2d(w, w * scale**2, 3, padding=1), nn.PixelShuffle(scale), nn.Conv2d(w, 3, 3, padding=1)
        )
        self.register_buffer("mean", torch.tensor([0.45, 0.44, 0.40]).view(1, 3, 1, 1))

    def forward(self, x: Tensor) -> Any:
        x = self.head(x - self.mean)
        x = x + self.last(self.body(x))
        return self.up(x) + self.mean


@program(small={"images": 1, "size": 8, "width": 8, "layers": 1}, training=True)
def rcan(images: int = 8, size: int = 96, width: int = 64, layers: int = 3) -> Made:
    """RCAN: residual channel attention, and pixels shuffled."""
    return Rcan(width, layers, 2), uniform(images, 3, size, size)


class Edsr(nn.Module):
    """Residual blocks without norms, twice shuffled."""

    def __init__(self, w: int, layers: int) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, w, 3, padding=1)
        self.body = nn.ModuleList(
            nn.Sequential(nn.Conv2d(w, w, 3, padding=1), nn.ReLU(), nn.Conv2d(w, w, 3, padding=1))
            for _ in range(layers)
        )
        self.up = nn.Sequential(
            nn.Conv2d(w, 4 * w, 3, padding=1),
            nn.PixelShuffle(2),
            nn.Conv2d(w, 4 * w, 3, padding=1),
            nn.PixelShuffle(2),
            nn.Conv2d(w, 3, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Any:
        y = x = self.head(x)
        for m in self.body:
            y = y + 0.1 * m(y)
        return self.up(x + y)


@program(small={"images": 1, "size": 8, "width": 8, "layers": 1}, training=True)
def edsr(images: int = 4, size: int = 48, width: int = 256, layers: int = 4) -> Made:
    """EDSR, four times as large."""
    return Edsr(width, layers), uniform(images, 3, size, size)


class ChannelNorm(nn.Module):
    """A norm over the channels of each pixel."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.ones(w)), nn.Parameter(torch.zeros(w))

    def forward(self, x: Tensor) -> Any:
        m = x.mean(1, keepdim=True)
        v = (x - m).pow(2).mean(1, keepdim=True)
        return (x - m) / (v + 1e-6).sqrt() * self.w[:, None, None] + self.b[:, None, None]


class Naf(nn.Module):
    """Gates of halves of the channels."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.n, self.m = ChannelNorm(w), ChannelNorm(w)
        self.c1, self.c2, self.c3, self.sca = (
            nn.Conv2d(w, 2 * w, 1),
            nn.Conv2d(2 * w, 2 * w, 3, padding=1, groups=2 * w),
            nn.Conv2d(w, w, 1),
            nn.Conv2d(w, w, 1),
        )
        self.c4, self.c5 = nn.Conv2d(w, 2 * w, 1), nn.Conv2d(w, w, 1)
        self.beta, self.gamma = nn.Parameter(torch.full((1, w, 1, 1), 0.1)), nn.Parameter(torch.full((1, w, 1, 1), 0.1))

    def forward(self, x: Tensor) -> Any:
        a, b = self.c2(self.c1(self.n(x))).chunk(2, 1)
        y = a * b
        y = y * self.sca(y.mean((2, 3), keepdim=True))
        x = x + self.beta * self.c3(y)
        a, b = self.c4(self.m(x)).chunk(2, 1)
        return x + self.gamma * self.c5(a * b)


class NafNet(nn.Module):
    """A U-Net of gated blocks."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.i, self.o = nn.Conv2d(3, w, 3, padding=1), nn.Conv2d(w, 3, 3, padding=1)
        self.e, self.d, self.mid, self.u, self.f = (
            Naf(w),
            nn.Conv2d(w, 2 * w, 2, 2),
            Naf(2 * w),
            nn.Sequential(nn.Conv2d(2 * w, 4 * w, 1, bias=False), nn.PixelShuffle(2)),
            Naf(w),
        )

    def forward(self, x: Tensor) -> Any:
        y = self.e(self.i(x))
        return x + self.o(self.f(y + self.u(self.mid(self.d(y)))))


@program(small={"images": 1, "size": 8, "width": 8}, training=True)
def nafnet(images: int = 4, size: int = 256, width: int = 32) -> Made:
    """NAFNet: gates instead of activations."""
    return NafNet(width), uniform(images, 3, size, size)


class Mdta(nn.Module):
    """Attention between channels, and a gated depthwise net."""

    def __init__(self, w: int, h: int) -> None:
        super().__init__()
        self.h, self.n, self.m = h, ChannelNorm(w), ChannelNorm(w)
        self.t = nn.Parameter(torch.ones(h, 1, 1))
        self.qkv, self.dw, self.o = (
            nn.Conv2d(w, 3 * w, 1, bias=False),
            nn.Conv2d(3 * w, 3 * w, 3, padding=1, groups=3 * w, bias=False),
            nn.Conv2d(w, w, 1, bias=False),
        )
        g = int(w * 2.66)
        self.u, self.gd, self.d = (
            nn.Conv2d(w, 2 * g, 1, bias=False),
            nn.Conv2d(2 * g, 2 * g, 3, padding=1, groups=2 * g, bias=False),
            nn.Conv2d(g, w, 1, bias=False),
        )

    def forward(self, x: Tensor) -> Any:
        b, c, H, W = x.shape
        q, k, v = (y.reshape(b, self.h, c // self.h, H * W) for y in self.dw(self.qkv(self.n(x))).chunk(3, 1))
        a = (f.normalize(q, dim=-1) @ f.normalize(k, dim=-1).transpose(-1, -2) * self.t).softmax(-1)
        x = x + self.o((a @ v).reshape(b, c, H, W))
        a, b = self.gd(self.u(self.m(x))).chunk(2, 1)
        return x + self.d(f.gelu(a) * b)


@program(small={"images": 1, "size": 8, "width": 8, "heads": 2}, training=True)
def restormer(images: int = 2, size: int = 128, width: int = 48, heads: int = 1) -> Made:
    """Restormer: attention between channels of depthwise convolutions, and a gated one."""
    return nn.Sequential(Mdta(width, heads), Mdta(width, heads)), normal(images, width, size, size)


class Rrdb(nn.Module):
    """Dense blocks in residual ones."""

    def __init__(self, w: int, g: int) -> None:
        super().__init__()
        self.c = nn.ModuleList(
            nn.ModuleList(nn.Conv2d(w + k * g, g if k < 4 else w, 3, padding=1) for k in range(5)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Any:
        y = x
        for row in self.c:
            z = y
            for k, c in enumerate(row):
                t = c(z)
                if k < 4:
                    z = torch.cat((z, f.leaky_relu(t, 0.2)), 1)
            y = y + 0.2 * t
        return x + 0.2 * y


@program(small={"images": 1, "size": 6, "width": 8, "growth": 4}, training=True)
def esrgan(images: int = 4, size: int = 64, width: int = 64, growth: int = 32) -> Made:
    """ESRGAN's residual of residual dense blocks."""
    return Rrdb(width, growth), normal(images, width, size, size)


class ZeroDce(nn.Module):
    """Curves for each pixel, applied again and again."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.c = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1)
            for a, b in ((3, w), (w, w), (w, w), (w, w), (2 * w, w), (2 * w, w), (2 * w, 24))
        )

    def forward(self, x: Tensor) -> Any:
        a = f.relu(self.c[0](x))
        b = f.relu(self.c[1](a))
        c = f.relu(self.c[2](b))
        d = f.relu(self.c[3](c))
        e = f.relu(self.c[4](torch.cat((c, d), 1)))
        g = f.relu(self.c[5](torch.cat((b, e), 1)))
        r = torch.tanh(self.c[6](torch.cat((a, g), 1)))
        for k in r.split(3, 1):
            x = x + k * (x.square() - x)
        return x, r


@program(small={"images": 1, "size": 8, "width": 8}, training=True)
def zero_dce(images: int = 4, size: int = 256, width: int = 32) -> Made:
    """Zero-DCE: curves for each pixel, applied eight times."""
    return ZeroDce(width), uniform(images, 3, size, size)


class Kpn(nn.Module):
    """Kernel prediction: each pixel's own filter for each frame of a burst."""

    def __init__(self, frames: int, w: int, k: int) -> None:
        super().__init__()
        self.n, self.k = frames, k
        self.c = nn.Sequential(
            nn.Conv2d(frames, w, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(w, w, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(w, frames * k * k, 1),
        )

    def forward(self, x: Tensor) -> Any:
        b, n, h, w = x.shape
        core = self.c(x).view(b, n, self.k**2, h, w).softmax(2)
        p = self.k // 2
        y = f.pad(x, (p, p, p, p))
        t: Any = 0
        for i in range(self.k):
            for j in range(self.k):
                t = t + core[:, :, i * self.k + j] * y[:, :, i : i + h, j : j + w]
        return t.mean(1, keepdim=True), t


@program(small={"images": 1, "size": 8, "width": 8, "frames": 3, "k": 3}, training=True)
def kernel_prediction(images: int = 4, size: int = 128, width: int = 64, frames: int = 8, k: int = 5) -> Made:
    """A filter for each pixel of a burst."""
    return Kpn(frames, width, k), uniform(images, frames, size, size)


class Unfolded(nn.Module):
    """ISTA-Net: soft thresholds between a net and its mirror."""

    def __init__(self, m: int, n: int, w: int, steps: int) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(m, n) / n**0.5)
        self.side = math.isqrt(n)
        self.steps = steps
        self.a = nn.ParameterList(
            nn.Parameter(torch.randn(a, b, 3, 3) / (9 * b) ** 0.5) for a, b in ((w, 1), (w, w), (w, w), (1, w))
        )
        self.l, self.t = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(0.01))

    def forward(self, y: Tensor) -> Any:
        x = y @ self.phi
        for _ in range(self.steps):
            x = x - self.l * (x @ self.phi.T - y) @ self.phi
            z = x.view(-1, 1, self.side, self.side)
            for k, w in enumerate(self.a):
                z = f.conv2d(z, w, padding=1)
                if k == 0:
                    z = f.relu(z)
                if k == 1:
                    z = torch.sign(z) * f.relu(z.abs() - self.t)
                if k == 2:
                    z = f.relu(z)
            x = x + z.flatten(1)
        return x


@program(small={"images": 2, "m": 8, "n": 36, "width": 4, "steps": 2}, training=True)
def ista_net(images: int = 64, m: int = 272, n: int = 1089, width: int = 32, steps: int = 4) -> Made:
    """ISTA-Net: compressed sensing, unfolded."""
    return Unfolded(m, n, width, steps), normal(images, m)


class Pansharpen(nn.Module):
    """A Laplacian pyramid, each level corrected."""

    def __init__(self, w: int, levels: int) -> None:
        super().__init__()
        self.n = levels
        self.c = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, w, 3, padding=1), nn.LeakyReLU(0.1), nn.Conv2d(w, 3, 3, padding=1))
            for _ in range(levels + 1)
        )

    def forward(self, x: Tensor) -> Any:
        lo, bands = x, []
        for _ in range(self.n):
            d = f.avg_pool2d(lo, 2)
            bands.append(lo - f.interpolate(d, scale_factor=2, mode="bilinear", align_corners=True))
            lo = d
        y = lo + self.c[-1](lo)
        for k in reversed(range(self.n)):
            y = f.interpolate(y, scale_factor=2, mode="bilinear", align_corners=True) + bands[k] + self.c[k](bands[k])
        return y


@program(small={"images": 1, "size": 16, "width": 4, "levels": 2}, training=True)
def laplacian_pyramid(images: int = 4, size: int = 512, width: int = 16, levels: int = 3) -> Made:
    """A pyramid of differences, corrected level by level."""
    return Pansharpen(width, levels), uniform(images, 3, size, size)
