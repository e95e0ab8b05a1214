"""What is done to pictures without a net: colours, filters, losses."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Made, program, uniform


def colours(x: Tensor) -> tuple[Tensor, Tensor]:
    r, g, b = x.unbind(1)
    hi, lo = x.amax(1), x.amin(1)
    d = hi - lo
    safe = torch.where(d == 0, 1, d)
    h = torch.where(hi == r, ((g - b) / safe) % 6, torch.where(hi == g, (b - r) / safe + 2, (r - g) / safe + 4)) / 6
    h = torch.where(d == 0, 0, h)
    s = d / hi.clamp(min=1e-6)
    h = (h + 0.1) % 1
    s = (s * 1.2).clamp(max=1)
    torch.arange(3, device=x.device)[:, None, None]
    n = torch.stack([(o + h * 6) % 6 for o in (5, 3, 1)], 1)
    y = hi[:, None] - (hi * s)[:, None] * torch.minimum(n, 4 - n).clamp(0, 1)
    lin = torch.where(y > 0.04045, ((y + 0.055) / 1.055) ** 2.4, y / 12.92)
    m = torch.tensor(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]], device=x.device, dtype=x.dtype
    )
    xyz = torch.einsum("ij,bjhw->bihw", m, lin)
    t = torch.where(xyz > 0.008856, xyz.clamp(min=1e-4) ** (1 / 3), 7.787 * xyz + 16 / 116)
    return y, torch.stack((116 * t[:, 1] - 16, 500 * (t[:, 0] - t[:, 1]), 200 * (t[:, 1] - t[:, 2])), 1)


@program(small={"images": 1, "size": 8}, dtypes=("f32",))
def colour_spaces(images: int = 16, size: int = 512) -> Made:
    """Hue moved, saturation raised, and to CIELAB."""
    return colours, uniform(images, 3, size, size)


def ssim(x: Tensor, y: Tensor) -> Tensor:
    c = x.shape[1]
    t = torch.arange(11, device=x.device, dtype=x.dtype) - 5
    g = torch.exp(-t * t / 4.5)
    g = g / g.sum()
    w, v = g.view(1, 1, 1, 11).expand(c, -1, -1, -1), g.view(1, 1, 11, 1).expand(c, -1, -1, -1)

    def blur(z: Tensor) -> Tensor:
        return f.conv2d(f.conv2d(z, w, groups=c), v, groups=c)

    out = []
    for k in range(3):
        a, b = blur(x), blur(y)
        va, vb, ab = blur(x * x) - a * a, blur(y * y) - b * b, blur(x * y) - a * b
        cs = (2 * ab + 9e-4) / (va + vb + 9e-4)
        out.append((cs if k < 2 else cs * (2 * a * b + 1e-4) / (a * a + b * b + 1e-4)).mean((1, 2, 3)).clamp(min=1e-3))
        x, y = f.avg_pool2d(x, 2), f.avg_pool2d(y, 2)
    return 1 - (out[0] ** 0.3 * out[1] ** 0.3 * out[2] ** 0.4).mean()


class Learnt(nn.Module):
    """A function of a picture that is learnt."""

    def __init__(self, h: int, w: int, fn: Any) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.rand(h, w))
        self.fn = fn

    def forward(self, *a: Tensor) -> Any:
        return self.fn(torch.sigmoid(self.x), *a)


@program(small={"images": 1, "size": 64}, training=True, dtypes=("f32",))
def ms_ssim(images: int = 8, size: int = 256) -> Made:
    """Structural similarity at three scales."""
    return Learnt(size, size, lambda z, y: ssim(z.expand_as(y), y)), uniform(images, 3, size, size)


def tv_step(x: Tensor, y: Tensor) -> Tensor:
    p = torch.zeros(2, *y.shape, device=y.device, dtype=y.dtype)
    for _ in range(10):
        div = p[0] - f.pad(p[0], (1, 0))[..., :-1] + p[1] - f.pad(p[1], (0, 0, 1, 0))[..., :-1, :]
        u = y + 0.1 * div
        g = torch.stack((f.pad(u[..., 1:] - u[..., :-1], (0, 1)), f.pad(u[..., 1:, :] - u[..., :-1, :], (0, 0, 0, 1))))
        p = p + 0.25 / 0.1 * g
        p = p / torch.sqrt(p.square().sum(0)).clamp(min=1)
    return (y + 0.1 * div) * x


@program(small={"images": 1, "size": 8}, training=True, dtypes=("f32",))
def total_variation(images: int = 8, size: int = 512) -> Made:
    """Ten steps of Chambolle's against total variation."""
    return Learnt(size, size, tv_step), uniform(images, 1, size, size)


class Bilateral(nn.Module):
    """Neighbours weighted by how far and how unlike they are."""

    def __init__(self, r: int) -> None:
        super().__init__()
        self.r = r
        self.a, self.b = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor, g: Tensor) -> Any:
        p, q = f.pad(x, (self.r,) * 4, mode="reflect"), f.pad(g, (self.r,) * 4, mode="reflect")
        h, w = x.shape[2:]
        n = d = 0.0
        for i in range(2 * self.r + 1):
            for j in range(2 * self.r + 1):
                u, v = p[..., i : i + h, j : j + w], q[..., i : i + h, j : j + w]
                k = torch.exp(
                    -((i - self.r) ** 2 + (j - self.r) ** 2) / (2 * self.a**2)
                    - (v - g).square().sum(1, keepdim=True) / (2 * self.b**2)
                )
                n, d = n + k * u, d + k
        return n / d


@program(small={"images": 1, "size": 8, "radius": 1}, training=True, dtypes=("f32",))
def bilateral(images: int = 4, size: int = 256, radius: int = 3) -> Made:
    """A joint bilateral filter with learnt widths."""
    return Bilateral(radius), uniform(images, 3, size, size), uniform(images, 3, size, size)


class Jpeg(nn.Module):
    """Blocks of 8 x 8, cosines, a table, straight-through rounding, and back; chroma at half the size."""

    def __init__(self) -> None:
        super().__init__()
        k = torch.arange(8, device="cpu").float()
        d = torch.cos((2 * k[None] + 1) * k[:, None] * math.pi / 16) * torch.where(k == 0, 0.125, 0.25).sqrt()[:, None]
        self.register_buffer("d", d.to(torch.get_default_device()))
        self.q = nn.Parameter((1 + k[:, None] + k) / 64)

    def plane(self, x: Tensor) -> Any:
        b, h, w = x.shape
        y = self.d @ x.view(b, h // 8, 8, w // 8, 8).transpose(2, 3) @ self.d.T
        z = y / self.q
        z = z + (z.round() - z).detach()
        return (self.d.T @ (z * self.q) @ self.d).transpose(2, 3).reshape(b, h, w)

    def forward(self, x: Tensor) -> Any:
        m = torch.tensor(
            [[0.299, 0.587, 0.114], [-0.169, -0.331, 0.5], [0.5, -0.419, -0.081]], device=x.device, dtype=x.dtype
        )
        y = torch.einsum("ij,bjhw->bihw", m, x)
        c = f.avg_pool2d(y[:, 1:], 2)
        b, _, h, w = c.shape
        c = f.interpolate(self.plane(c.reshape(-1, h, w)).view(b, 2, h, w), scale_factor=2, mode="nearest")
        return torch.einsum(
            "ij,bjhw->bihw",
            torch.linalg.inv(m.float()).to(x.dtype)
            if False
            else torch.tensor([[1, 0, 1.402], [1, -0.344, -0.714], [1, 1.772, 0]], device=x.device, dtype=x.dtype),
            torch.cat((self.plane(y[:, 0])[:, None], c), 1),
        )


@program(small={"images": 1, "size": 16}, training=True, dtypes=("f32",))
def jpeg(images: int = 8, size: int = 256) -> Made:
    """A picture through JPEG's table, with gradients."""
    return Jpeg(), uniform(images, 3, size, size)


def rank_filters(x: Tensor) -> tuple[Tensor, ...]:
    c = x.cumsum(2).cumsum(3)
    p = f.pad(c, (1, 0, 1, 0))
    k = 15
    box = (p[..., k:, k:] - p[..., :-k, k:] - p[..., k:, :-k] + p[..., :-k, :-k]) / k**2
    v = x[..., k // 2 : -(k // 2), k // 2 : -(k // 2)]
    mask = v > box - 0.02
    proj = mask.float().sum(2)
    run = torch.where(mask, 1.0, 0.0)
    return mask, proj, (run * torch.arange(run.shape[-1], device=x.device)).amax(-1), torch.cummax(v, 3).values


@program(small={"images": 1, "size": 24}, dtypes=("f32",))
def integral_threshold(images: int = 8, size: int = 512) -> Made:
    """A local threshold by an integral image, and its projections."""
    return rank_filters, uniform(images, 1, size, size)


class Perceptual(nn.Module):
    """Gram matrices and differences of a fixed net's features: style transfer's loss and the picture's gradient."""

    def __init__(self, w: int, size: int) -> None:
        super().__init__()
        self.c = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, w), (w, w), (w, 2 * w), (2 * w, 2 * w)))
        self.c.requires_grad_(False)
        self.x = nn.Parameter(torch.rand(1, 3, size, size))

    def feats(self, x: Tensor) -> Any:
        out = []
        for k, c in enumerate(self.c):
            x = f.relu(c(x))
            out.append(x)
            x = f.avg_pool2d(x, 2) if k % 2 else x
        return out

    def forward(self, style: Tensor, content: Tensor) -> Any:
        def gram(z: Tensor) -> Tensor:
            return z.flatten(2) @ z.flatten(2).transpose(1, 2) / z[0].numel()

        a, b, c = self.feats(self.x), self.feats(style), self.feats(content)
        return (
            sum((gram(u) - gram(v)).square().sum() for u, v in zip(a, b, strict=False)) * 1e3
            + (a[2] - c[2]).square().mean()
            + 1e-3
            * (
                (self.x[..., 1:] - self.x[..., :-1]).abs().mean()
                + (self.x[..., 1:, :] - self.x[..., :-1, :]).abs().mean()
            )
        )


@program(small={"size": 8, "width": 8}, training=True)
def style_transfer(size: int = 256, width: int = 64) -> Made:
    """Style transfer's loss, and its gradient by the picture."""
    return Perceptual(width, size), uniform(1, 3, size, size), uniform(1, 3, size, size)
