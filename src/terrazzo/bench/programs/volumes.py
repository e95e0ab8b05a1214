"""Three dimensions, and pictures that move."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Made, normal, program, uniform


class SlowFast(nn.Module):
    """Two paths, of few frames and of many."""

    def __init__(self, w: int) -> None:
        super().__init__()
        u = w // 8
        self.s, self.f = (
            nn.Conv3d(3, w, (1, 7, 7), (1, 2, 2), (0, 3, 3), bias=False),
            nn.Conv3d(3, u, (5, 7, 7), (1, 2, 2), (2, 3, 3), bias=False),
        )
        self.sn, self.fn = nn.BatchNorm3d(w), nn.BatchNorm3d(u)
        self.lat = nn.Conv3d(u, 2 * u, (5, 1, 1), (4, 1, 1), (2, 0, 0))
        self.sb = nn.Sequential(
            nn.Conv3d(w + 2 * u, w, 1),
            nn.BatchNorm3d(w),
            nn.ReLU(),
            nn.Conv3d(w, w, (1, 3, 3), padding=(0, 1, 1)),
            nn.ReLU(),
            nn.Conv3d(w, 4 * w, 1),
        )
        self.fb = nn.Sequential(
            nn.Conv3d(u, u, (3, 1, 1), padding=(1, 0, 0)),
            nn.BatchNorm3d(u),
            nn.ReLU(),
            nn.Conv3d(u, u, (1, 3, 3), padding=(0, 1, 1)),
            nn.ReLU(),
            nn.Conv3d(u, 4 * u, 1),
        )
        self.o = nn.Linear(4 * (w + u), 400)

    def forward(self, x: Tensor) -> Any:
        a = f.max_pool3d(f.relu(self.sn(self.s(x[:, :, ::4]))), (1, 3, 3), (1, 2, 2), (0, 1, 1))
        b = f.max_pool3d(f.relu(self.fn(self.f(x))), (1, 3, 3), (1, 2, 2), (0, 1, 1))
        a = self.sb(torch.cat((a, self.lat(b)), 1))
        b = self.fb(b)
        return self.o(torch.cat((a.mean((2, 3, 4)), b.mean((2, 3, 4))), 1))


@program(small={"clips": 1, "frames": 8, "size": 16, "width": 16}, training=True)
def slowfast(clips: int = 4, frames: int = 32, size: int = 112, width: int = 64) -> Made:
    """SlowFast: a path of few frames, and one of many."""
    return SlowFast(width), normal(clips, 3, frames, size, size)


class DividedAttention(nn.Module):
    """Attention over time, then over places."""

    def __init__(self, w: int, h: int) -> None:
        super().__init__()
        self.h = h
        self.a = nn.ModuleList(nn.ModuleList([nn.LayerNorm(w), nn.Linear(w, 3 * w), nn.Linear(w, w)]) for _ in range(2))
        self.n, self.m = nn.LayerNorm(w), nn.Sequential(nn.Linear(w, 4 * w), nn.GELU(), nn.Linear(4 * w, w))

    def forward(self, x: Tensor) -> Any:
        _b, _t, _n, c = x.shape
        for k, (m, q, o) in enumerate(self.a):
            y = m(x).transpose(1, 2) if k == 0 else m(x)
            a, d, e = q(y).unflatten(-1, (3, self.h, c // self.h)).permute(3, 0, 1, 4, 2, 5)
            y = o(f.scaled_dot_product_attention(a, d, e).transpose(2, 3).flatten(3))
            x = x + (y.transpose(1, 2) if k == 0 else y)
        return x + self.m(self.n(x))


@program(small={"clips": 1, "frames": 4, "places": 6, "width": 16, "heads": 2}, training=True)
def timesformer(clips: int = 8, frames: int = 8, places: int = 196, width: int = 768, heads: int = 12) -> Made:
    """TimeSformer: attention over time, then over places."""
    return DividedAttention(width, heads), normal(clips, frames, places, width)


class TemporalShift(nn.Module):
    """Channels of the frames before and after."""

    def __init__(self, w: int, t: int) -> None:
        super().__init__()
        self.t = t
        self.c = nn.ModuleList(
            nn.Sequential(nn.Conv2d(w, w, 3, padding=1, bias=False), nn.BatchNorm2d(w)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Any:
        for c in self.c:
            _n, w, h, v = x.shape
            y = x.view(-1, self.t, w, h, v)
            k = w // 8
            z = torch.zeros_like(y)
            z[:, :-1, :k] = y[:, 1:, :k]
            z[:, 1:, k : 2 * k] = y[:, :-1, k : 2 * k]
            z[:, :, 2 * k :] = y[:, :, 2 * k :]
            x = f.relu(x + c(z.view_as(x)))
        return x


@program(small={"clips": 1, "frames": 4, "size": 6, "width": 16}, training=True)
def temporal_shift(clips: int = 8, frames: int = 8, size: int = 56, width: int = 64) -> Made:
    """TSM: channels move along time, written in place."""
    return TemporalShift(width, frames), normal(clips * frames, width, size, size)


def nearest(x: Tensor, y: Tensor, k: int) -> Tensor:
    return torch.cdist(x.float(), y.float()).topk(k, -1, largest=False).indices


def rows(x: Tensor, at: Tensor) -> Tensor:
    b = x.shape[0]
    return x[torch.arange(b, device=x.device).view(b, *(1,) * (at.dim() - 1)), at]


class PointTransformer(nn.Module):
    """Vectors of weights for neighbours."""

    def __init__(self, w: int, k: int) -> None:
        super().__init__()
        self.k = k
        self.q, self.kk, self.v = (nn.Linear(w, w) for _ in range(3))
        self.p = nn.Sequential(nn.Linear(3, w), nn.ReLU(), nn.Linear(w, w))
        self.g = nn.Sequential(nn.Linear(w, w), nn.ReLU(), nn.Linear(w, w))
        self.o = nn.Linear(w, w)

    def forward(self, p: Tensor, x: Tensor) -> Any:
        at = nearest(p, p, self.k)
        d = self.p(p[:, :, None] - rows(p, at))
        a = self.g(self.q(x)[:, :, None] - rows(self.kk(x), at) + d).softmax(2)
        return x + self.o((a * (rows(self.v(x), at) + d)).sum(2))


@program(small={"clouds": 2, "points": 12, "width": 8, "k": 4}, training=True, dtypes=("f32",))
def point_transformer(clouds: int = 8, points: int = 1024, width: int = 128, k: int = 16) -> Made:
    """Point Transformer: vector attention among neighbours."""
    return PointTransformer(width, k), uniform(clouds, points, 3), normal(clouds, points, width)


class TriPlane(nn.Module):
    """Features from three planes, and light along rays."""

    def __init__(self, c: int, r: int, w: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(3, c, r, r) * 0.1)
        self.n = nn.Sequential(nn.Linear(c, w), nn.Softplus(), nn.Linear(w, 4))

    def forward(self, o: Tensor, d: Tensor) -> Any:
        n = 48
        t = torch.linspace(0.1, 1.9, n, device=o.device, dtype=o.dtype)
        x = o[:, None] + d[:, None] * t[:, None]
        x = x - x.detach().floor() - 0.5
        uv = torch.stack((x[..., [0, 1]], x[..., [0, 2]], x[..., [1, 2]])) * 2
        g = (
            f.grid_sample(self.p, uv, mode="bilinear", align_corners=False, padding_mode="border")
            .mean(0)
            .permute(1, 2, 0)
        )
        y = self.n(g)
        sig, rgb = f.softplus(y[..., 0].float() - 1), torch.sigmoid(y[..., 1:].float())
        a = 1 - torch.exp(-sig * (1.8 / n))
        T = torch.cumprod(torch.cat((torch.ones_like(a[:, :1]), 1 - a + 1e-10), 1), 1)[:, :-1]
        w = a * T
        return (w[..., None] * rgb).sum(1), (w * t.float()).sum(1)


@program(small={"rays": 5, "channels": 4, "size": 8, "width": 8}, training=True, dtypes=("f32",))
def triplane(rays: int = 4096, channels: int = 32, size: int = 256, width: int = 64) -> Made:
    """EG3D's triplanes, rendered along rays."""
    return TriPlane(channels, size, width), uniform(rays, 3), uniform(rays, 3)


class MipNerf(nn.Module):
    """Integrated encodings of cones, and a resampling of the intervals by their weights."""

    def __init__(self, w: int, L: int) -> None:
        super().__init__()
        self.L = L
        self.a, self.b = nn.Sequential(nn.Linear(6 * L, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU()), nn.Linear(w, 4)

    def render(self, o: Tensor, d: Tensor, t: Tensor) -> Any:
        m, v = (t[:, 1:] + t[:, :-1]) / 2, (t[:, 1:] - t[:, :-1]).square() / 12
        x = o[:, None] + d[:, None] * m[..., None]
        var = d.square()[:, None] * v[..., None]
        k = 2.0 ** torch.arange(self.L, device=o.device, dtype=o.dtype)
        y, z = (x[..., None] * k).flatten(-2), (var[..., None] * k * k).flatten(-2)
        e = torch.exp(-0.5 * z)
        r = self.b(self.a(torch.cat((y.sin() * e, y.cos() * e), -1)))
        a = 1 - torch.exp(-f.softplus(r[..., 0]) * (t[:, 1:] - t[:, :-1]))
        w = a * torch.exp(torch.log1p(-a.clamp(max=0.9999)).cumsum(1) - torch.log1p(-a.clamp(max=0.9999)))
        return (w[..., None] * torch.sigmoid(r[..., 1:])).sum(1), w

    def forward(self, o: Tensor, d: Tensor, u: Tensor) -> Any:
        n = 64
        t = torch.linspace(0.1, 4, n + 1, device=o.device, dtype=o.dtype).expand(o.shape[0], -1)
        c, w = self.render(o, d, t)
        p = w.detach() + 0.01
        cdf = f.pad((p / p.sum(-1, keepdim=True)).cumsum(-1), (1, 0))
        u = u.sort(-1).values
        i = torch.searchsorted(cdf.contiguous(), u.contiguous(), right=True).clamp(1, n)
        lo, hi = cdf.gather(1, i - 1), cdf.gather(1, i)
        a, b = t.gather(1, i - 1), t.gather(1, i)
        t2 = a + (u - lo) / (hi - lo).clamp(min=1e-5) * (b - a)
        return self.render(o, d, t2)[0], c


@program(small={"rays": 5, "width": 8, "octaves": 3}, training=True, dtypes=("f32",))
def mip_nerf(rays: int = 2048, width: int = 256, octaves: int = 12) -> Made:
    """Mip-NeRF: cones, coarse and fine."""
    return MipNerf(width, octaves), uniform(rays, 3), normal(rays, 3), uniform(rays, 65)


class Raft(nn.Module):
    """All pairs of two pictures, a pyramid of them looked up around the flow, and a recurrent update."""

    def __init__(self, w: int, r: int, steps: int) -> None:
        super().__init__()
        self.r, self.n = r, steps
        k = 2 * (2 * r + 1) ** 2
        self.e = nn.Conv2d(k + 2, w, 3, padding=1)
        self.z, self.rr, self.q = (nn.Conv2d(2 * w, w, 3, padding=1) for _ in range(3))
        self.o = nn.Conv2d(w, 2, 3, padding=1)

    def forward(self, a: Tensor, b: Tensor, h: Tensor) -> Any:
        B, C, H, W = a.shape
        c = (a.flatten(2).transpose(1, 2) @ b.flatten(2) / C**0.5).view(B * H * W, 1, H, W)
        pyr = [c, f.avg_pool2d(c, 2)]
        y, x = torch.meshgrid(
            torch.arange(H, device=a.device, dtype=a.dtype),
            torch.arange(W, device=a.device, dtype=a.dtype),
            indexing="ij",
        )
        base = torch.stack((x, y), -1)[None].expand(B, -1, -1, -1)
        off = torch.arange(-self.r, self.r + 1, device=a.device, dtype=a.dtype)
        dy, dx = torch.meshgrid(off, off, indexing="ij")
        d = torch.stack((dx, dy), -1)[None]
        at = base
        for _ in range(self.n):
            at = at.detach()
            got = []
            for k, p in enumerate(pyr):
                g = at.reshape(-1, 1, 1, 2) / 2**k + d
                size = torch.tensor([p.shape[3] - 1, p.shape[2] - 1], device=a.device, dtype=a.dtype)
                got.append(f.grid_sample(p, 2 * g / size - 1, align_corners=True).view(B, H, W, -1))
            m = f.relu(self.e(torch.cat((*got, at - base), -1).permute(0, 3, 1, 2)))
            hx = torch.cat((h, m), 1)
            z = torch.sigmoid(self.z(hx))
            r = torch.sigmoid(self.rr(hx))
            h = (1 - z) * h + z * torch.tanh(self.q(torch.cat((r * h, m), 1)))
            at = at + self.o(h).permute(0, 2, 3, 1)
        return at - base


@program(
    small={"images": 1, "size": 6, "channels": 8, "width": 8, "radius": 1, "steps": 2}, training=True, dtypes=("f32",)
)
def raft(
    images: int = 1, size: int = 48, channels: int = 256, width: int = 128, radius: int = 4, steps: int = 3
) -> Made:
    """RAFT: optical flow from all pairs, refined step by step."""
    return (
        Raft(width, radius, steps),
        normal(images, channels, size, size),
        normal(images, channels, size, size),
        normal(images, width, size, size),
    )


class Splat(nn.Module):
    """Gaussians, sorted by depth, blended in each pixel."""

    def forward(self, mean: Tensor, scale: Tensor, angle: Tensor, colour: Tensor, opacity: Tensor) -> Any:
        n = 32
        g = (torch.arange(n, device=mean.device, dtype=mean.dtype) + 0.5) / n
        y, x = torch.meshgrid(g, g, indexing="ij")
        p = torch.stack((x, y), -1).view(-1, 1, 2)
        order = mean[:, 2].argsort(stable=True)
        m = mean[order, :2]
        c, q = angle[order].cos(), angle[order].sin()
        v = 1 / (scale[order] * 0.1 + 0.02)
        d = p - m
        a, b = (d[..., 0] * c + d[..., 1] * q) * v[:, 0], (d[..., 1] * c - d[..., 0] * q) * v[:, 1]
        al = (opacity[order] * torch.exp(-0.5 * (a * a + b * b))).clamp(max=0.99)
        T = torch.cumprod(1 - al, 1)
        T = torch.cat((torch.ones_like(T[:, :1]), T[:, :-1]), 1)
        return ((al * T) @ colour[order]).view(n, n, 3)


@program(small={"count": 7}, dtypes=("f32",))
def gaussian_splats(count: int = 8192) -> Made:
    """Gaussian splats, blended front to back."""
    return Splat(), uniform(count, 3), uniform(count, 2), uniform(count), uniform(count, 3), uniform(count)
