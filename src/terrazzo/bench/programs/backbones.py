"""Nets for pictures by hand: mixers of places and channels, trees and parts of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Made, normal, program
from terrazzo.bench.programs.vision import convolution


class Squeeze(nn.Module):
    """Channels weighted by what a small net says of their means."""

    def __init__(self, width: int, part: int = 4) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(width, width // part, 1), nn.Conv2d(width // part, width, 1)

    def forward(self, x: Tensor) -> Any:
        return x * torch.sigmoid(self.b(f.relu(self.a(x.mean((2, 3), keepdim=True)))))


class RelativeAttention(nn.Module):
    """Attention with a bias for each distance of two places."""

    def __init__(self, width: int, heads: int, size: int) -> None:
        super().__init__()
        self.h, self.size = heads, size
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn(heads, (2 * size - 1) ** 2) * 0.02)
        a = torch.arange(size, device="cpu")
        a = torch.stack(torch.meshgrid(a, a, indexing="ij"), -1).view(-1, 2)
        d = a[:, None] - a[None] + size - 1
        self.register_buffer("index", (d[..., 0] * (2 * size - 1) + d[..., 1]).to(self.bias.device))

    def forward(self, x: Tensor) -> Any:
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.h, c // self.h).permute(2, 0, 3, 1, 4)
        a = q @ k.transpose(-1, -2) * (c // self.h) ** -0.5 + self.bias[:, self.index]
        return self.o((a.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))


class MBConv(nn.Module):
    """An inverted residual with channels weighted (MBConv)."""

    def __init__(self, a: int, b: int, stride: int = 1) -> None:
        super().__init__()
        w = 4 * b
        self.body = nn.Sequential(
            nn.BatchNorm2d(a),
            nn.Conv2d(a, w, 1, bias=False),
            nn.BatchNorm2d(w),
            nn.GELU(),
            nn.Conv2d(w, w, 3, stride, 1, groups=w, bias=False),
            nn.BatchNorm2d(w),
            nn.GELU(),
            Squeeze(w),
            nn.Conv2d(w, b, 1),
        )
        self.short = (
            nn.Sequential(nn.AvgPool2d(stride) if stride > 1 else nn.Identity(), nn.Conv2d(a, b, 1))
            if stride > 1 or a != b
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Any:
        return self.short(x) + self.body(x)


class CoAtNet(nn.Module):
    """Convolutions, then attention."""

    def __init__(self, widths: Any, size: int) -> None:
        super().__init__()
        a, b, c, d = widths
        self.stem = nn.Sequential(convolution(3, a, 3, 2, act=nn.GELU), nn.Conv2d(a, a, 3, padding=1))
        self.conv = nn.Sequential(MBConv(a, b, 2), MBConv(b, b), MBConv(b, c, 2), MBConv(c, c))
        self.down, n = nn.Conv2d(c, d, 1), size // 16
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.LayerNorm(d),
                    RelativeAttention(d, d // 32, n),
                    nn.LayerNorm(d),
                    nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)),
                ]
            )
            for _ in range(2)
        )
        self.head = nn.Linear(d, 1000)

    def forward(self, x: Tensor) -> Any:
        x = self.down(f.max_pool2d(self.conv(self.stem(x)), 2)).flatten(2).transpose(1, 2)
        for n, a, m, g in self.layers:
            x = x + a(n(x))
            x = x + g(m(x))
        return self.head(x.mean(1))


@program(small={"images": 2, "size": 64, "widths": (8, 8, 16, 32)}, training=True)
def coatnet(images: int = 32, size: int = 224, widths: Sequence[int] = (64, 96, 192, 384)) -> Made:
    """CoAtNet: convolutions, then attention with relative places."""
    return CoAtNet(widths, size), normal(images, 3, size, size)


class MaxVitBlock(nn.Module):
    """A convolution, attention in windows, attention in a grid."""

    def __init__(self, width: int, p: int) -> None:
        super().__init__()
        self.p = p
        self.conv = MBConv(width, width)
        self.parts = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.LayerNorm(width),
                    RelativeAttention(width, width // 32, p),
                    nn.LayerNorm(width),
                    nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
                ]
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Any:
        x = self.conv(x)
        b, c, h, w = x.shape
        p = self.p
        for grid, (n, a, m, g) in enumerate(self.parts):
            if grid:
                y = x.view(b, c, p, h // p, p, w // p).permute(0, 3, 5, 2, 4, 1)
            else:
                y = x.view(b, c, h // p, p, w // p, p).permute(0, 2, 4, 3, 5, 1)
            s0 = y.shape
            y = y.reshape(-1, p * p, c)
            y = y + a(n(y))
            y = y + g(m(y))
            y = y.view(s0)
            x = (y.permute(0, 5, 3, 1, 4, 2) if grid else y.permute(0, 5, 1, 3, 2, 4)).reshape(b, c, h, w)
        return x


@program(small={"images": 2, "size": 16, "width": 32, "p": 4}, training=True)
def maxvit(images: int = 8, size: int = 56, width: int = 64, p: int = 7) -> Made:
    """MaxViT's block: attention in windows, then in a grid."""
    return MaxVitBlock(width, p), normal(images, width, size, size)


class CrossCovariance(nn.Module):
    """Attention between channels, and depthwise convolutions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.h = heads
        self.qkv, self.o, self.t = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            nn.Parameter(torch.ones(heads, 1, 1)),
        )
        self.n = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.local = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, groups=width),
            nn.GELU(),
            nn.BatchNorm2d(width),
            nn.Conv2d(width, width, 3, padding=1, groups=width),
        )
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.g = nn.Parameter(torch.full((3, width), 0.1))

    def forward(self, x: Tensor, side: int) -> Any:
        b, n, c = x.shape
        q, k, v = self.qkv(self.n[0](x)).view(b, n, 3, self.h, c // self.h).permute(2, 0, 3, 4, 1)
        q, k = f.normalize(q, dim=-1), f.normalize(k, dim=-1)
        a = (q @ k.transpose(-1, -2) * self.t).softmax(-1)
        x = x + self.g[0] * self.o((a @ v).permute(0, 3, 1, 2).reshape(b, n, c))
        y = self.n[1](x).transpose(1, 2).view(b, c, side, side)
        x = x + self.g[1] * self.local(y).flatten(2).transpose(1, 2)
        return x + self.g[2] * self.mlp(self.n[2](x))


class Xcit(nn.Module):
    """Patches, and layers of attention between channels."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.layers = nn.ModuleList(CrossCovariance(width, heads) for _ in range(layers))

    def forward(self, x: Tensor) -> Any:
        x = self.patch(x)
        side = x.shape[-1]
        x = x.flatten(2).transpose(1, 2)
        for y in self.layers:
            x = y(x, side)
        return x


@program(small={"images": 2, "size": 64, "width": 32, "heads": 2, "layers": 1}, training=True)
def xcit(images: int = 32, size: int = 224, width: int = 384, heads: int = 8, layers: int = 2) -> Made:
    """XCiT: attention between channels."""
    return Xcit(width, heads, layers), normal(images, 3, size, size)


class ClassAttention(nn.Module):
    """Attention whose heads are mixed before and after, then that of one token."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.h = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.n = nn.LayerNorm(width)
        self.l1, self.l2 = nn.Linear(heads, heads), nn.Linear(heads, heads)
        self.first = nn.Linear(width, 3 * width)
        self.fo = nn.Linear(width, width)
        self.n0 = nn.LayerNorm(width)
        self.cls = nn.Parameter(torch.randn(1, 1, width))
        self.g = nn.Parameter(torch.full((2, width), 0.1))

    def forward(self, x: Tensor) -> Any:
        b, n, c = x.shape
        d = c // self.h
        q, k, v = self.first(self.n0(x)).view(b, n, 3, self.h, d).permute(2, 0, 3, 1, 4)
        a = (q * d**-0.5) @ k.transpose(-1, -2)
        a = self.l1(a.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(-1)  # talking heads
        a = self.l2(a.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        x = x + self.g[0] * self.fo((a @ v).transpose(1, 2).reshape(b, n, c))
        t = self.cls.expand(b, -1, -1)
        u = self.n(torch.cat((t, x), 1))
        q = self.q(u[:, :1]).view(b, 1, self.h, d).transpose(1, 2)
        k, v = (y(u).view(b, n + 1, self.h, d).transpose(1, 2) for y in (self.k, self.v))
        return t + self.g[1] * self.o(f.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, 1, c))


@program(small={"images": 2, "tokens": 20, "width": 32, "heads": 2}, training=True)
def cait(images: int = 32, tokens: int = 196, width: int = 384, heads: int = 8) -> Made:
    """CaiT: talking heads, and class attention."""
    return ClassAttention(width, heads), normal(images, tokens, width)


class Outlook(nn.Module):
    """Weights for the neighbours of each place, from the place alone."""

    def __init__(self, width: int, heads: int, taps: int = 3) -> None:
        super().__init__()
        self.h, self.k = heads, taps
        self.v, self.a, self.o = (
            nn.Linear(width, width, bias=False),
            nn.Linear(width, taps**4 * heads),
            nn.Linear(width, width),
        )
        self.n, self.m = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x: Tensor) -> Any:
        b, h, w, c = x.shape
        y = self.n(x)
        k = self.k
        v = f.unfold(self.v(y).permute(0, 3, 1, 2), k, padding=k // 2, stride=2)
        n = math.ceil(h / 2) * math.ceil(w / 2)
        v = v.view(b, self.h, c // self.h, k * k, n).permute(0, 1, 4, 3, 2)
        a = f.avg_pool2d(y.permute(0, 3, 1, 2), 2, 2, ceil_mode=True).permute(0, 2, 3, 1)
        a = (self.a(a).view(b, n, self.h, k * k, k * k).permute(0, 2, 1, 3, 4) * (c // self.h) ** -0.5).softmax(-1)
        z = (a @ v).permute(0, 1, 4, 3, 2).reshape(b, c * k * k, n)
        x = x + self.o(f.fold(z, (h, w), k, padding=k // 2, stride=2).permute(0, 2, 3, 1))
        return x + self.mlp(self.m(x))


@program(small={"images": 2, "size": 8, "width": 16, "heads": 2}, training=True)
def volo(images: int = 16, size: int = 28, width: int = 192, heads: int = 6) -> Made:
    """VOLO's outlook attention: unfold, weights for each place, fold."""
    return Outlook(width, heads), normal(images, size, size, width)


class Res2(nn.Module):
    """Parts of the channels, each with what the one before it found."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.n = parts
        w = width // parts
        self.a, self.b = convolution(width, width, 1), convolution(width, width, 1, act=None)
        self.convs = nn.ModuleList(convolution(w, w) for _ in range(parts - 1))

    def forward(self, x: Tensor) -> Any:
        p = self.a(x).chunk(self.n, 1)
        out = [p[0]]
        y = None
        for m, q in zip(self.convs, p[1:], strict=False):
            y = m(q if y is None else q + y)
            out.append(y)
        return f.relu(x + self.b(torch.cat(out, 1)))


@program(small={"images": 2, "size": 8, "width": 16, "layers": 1}, training=True)
def res2net(images: int = 32, size: int = 56, width: int = 208, layers: int = 2) -> Made:
    """Res2Net: parts of the channels, each with what the one before it found."""
    return nn.Sequential(*[Res2(width, 4) for _ in range(layers)]), normal(images, width, size, size)


class Involution(nn.Module):
    """Filters that are made for each place."""

    def __init__(self, width: int, taps: int = 7, group: int = 16) -> None:
        super().__init__()
        self.k, self.g = taps, width // group
        self.r, self.w = convolution(width, width // 4, 1), nn.Conv2d(width // 4, taps * taps * self.g, 1)

    def forward(self, x: Tensor) -> Any:
        b, c, h, w = x.shape
        k = self.w(self.r(x)).view(b, self.g, 1, self.k**2, h, w)
        u = f.unfold(x, self.k, padding=self.k // 2).view(b, self.g, c // self.g, self.k**2, h, w)
        return (k * u).sum(3).view(b, c, h, w)


@program(small={"images": 2, "size": 8, "width": 32}, training=True)
def involution(images: int = 16, size: int = 56, width: int = 64) -> Made:
    """Involution: filters made for each place."""
    return nn.Sequential(Involution(width), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 1)), normal(
        images, width, size, size
    )


class DualPath(nn.Module):
    """A residual stream, and a dense one beside it."""

    def __init__(self, width: int, inc: int, groups: int, layers: int) -> None:
        super().__init__()
        self.w = width
        self.first = nn.Conv2d(width, width + 2 * inc, 1)
        self.body = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(width + inc * (k + 2)),
                nn.ReLU(),
                nn.Conv2d(width + inc * (k + 2), width // 2, 1),
                nn.BatchNorm2d(width // 2),
                nn.ReLU(),
                nn.Conv2d(width // 2, width // 2, 3, padding=1, groups=groups),
                nn.ReLU(),
                nn.Conv2d(width // 2, width + inc, 1),
            )
            for k in range(layers)
        )

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        r, d = y[:, : self.w], y[:, self.w :]
        for m in self.body:
            z = m(torch.cat((r, d), 1))
            r = r + z[:, : self.w]
            d = torch.cat((d, z[:, self.w :]), 1)
        return torch.cat((r, d), 1)


@program(small={"images": 2, "size": 8, "width": 16, "inc": 4, "groups": 2, "layers": 2}, training=True)
def dpn(images: int = 32, size: int = 28, width: int = 256, inc: int = 32, groups: int = 32, layers: int = 3) -> Made:
    """Dual path: a residual stream and a dense one."""
    return DualPath(width, inc, groups, layers), normal(images, width, size, size)


class TwinsLocal(nn.Module):
    """Attention in windows, then to a smaller picture."""

    def __init__(self, width: int, heads: int, window: int, ratio: int) -> None:
        super().__init__()
        self.h, self.w = heads, window
        self.n = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q, self.kv, self.o2, self.sr = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
            nn.Conv2d(width, width, ratio, ratio),
        )
        self.pos = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Any:
        b, H, W, c = x.shape
        w = self.w
        y = self.n[0](x).view(b, H // w, w, W // w, w, c).transpose(2, 3).reshape(-1, w * w, c)
        q, k, v = self.qkv(y).view(-1, w * w, 3, self.h, c // self.h).permute(2, 0, 3, 1, 4)
        y = self.o(f.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, w * w, c))
        x = x + y.view(b, H // w, W // w, w, w, c).transpose(2, 3).reshape(b, H, W, c)
        x = x + self.mlp[0](self.n[1](x))
        x = x + self.pos(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        y = self.n[2](x)
        q = self.q(y).view(b, H * W, self.h, c // self.h).transpose(1, 2)
        z = self.n[3](self.sr(y.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2))
        k, v = self.kv(z).view(b, -1, 2, self.h, c // self.h).permute(2, 0, 3, 1, 4)
        x = x + self.o2(f.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, H, W, c))
        return x + self.mlp[1](self.n[4](x))


@program(small={"images": 2, "size": 8, "width": 16, "heads": 2, "window": 4, "ratio": 4}, training=True)
def twins(images: int = 16, size: int = 56, width: int = 64, heads: int = 2, window: int = 7, ratio: int = 8) -> Made:
    """Twins: attention in windows, then to a smaller picture."""
    return TwinsLocal(width, heads, window, ratio), normal(images, size, size, width)


class VAN(nn.Module):
    """A large kernel, in parts, as a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.n, self.m = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.a, self.b = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.c5, self.c7, self.c1 = (
            nn.Conv2d(width, width, 5, padding=2, groups=width),
            nn.Conv2d(width, width, 7, padding=9, dilation=3, groups=width),
            nn.Conv2d(width, width, 1),
        )
        self.u, self.dw, self.d = (
            nn.Conv2d(width, 4 * width, 1),
            nn.Conv2d(4 * width, 4 * width, 3, padding=1, groups=4 * width),
            nn.Conv2d(4 * width, width, 1),
        )
        self.g = nn.Parameter(torch.full((2, width, 1, 1), 0.01))

    def forward(self, x: Tensor) -> Any:
        y = f.gelu(self.a(self.n(x)))
        y = self.b(y * self.c1(self.c7(self.c5(y))))
        x = x + self.g[0] * y
        return x + self.g[1] * self.d(f.gelu(self.dw(self.u(self.m(x)))))


@program(small={"images": 2, "size": 12, "width": 8}, training=True)
def visual_attention(images: int = 16, size: int = 56, width: int = 64) -> Made:
    """VAN: attention as a large kernel, dilated and depthwise."""
    return VAN(width), normal(images, width, size, size)


class CondConv(nn.Module):
    """Filters mixed for each picture."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(experts, width, width, 3, 3) / (9 * width) ** 0.5)
        self.r = nn.Linear(width, experts)

    def forward(self, x: Tensor) -> Any:
        b, c, h, w = x.shape
        r = torch.sigmoid(self.r(x.mean((2, 3))))
        k = (r @ self.w.flatten(1)).view(b * c, c, 3, 3)
        return f.conv2d(x.reshape(1, b * c, h, w), k, padding=1, groups=b).view(b, c, h, w)


@program(small={"images": 2, "size": 6, "width": 8, "experts": 2}, training=True)
def condconv(images: int = 16, size: int = 28, width: int = 128, experts: int = 4) -> Made:
    """CondConv: filters mixed for each picture, applied as groups."""
    return CondConv(width, experts), normal(images, width, size, size)
