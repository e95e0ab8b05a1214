"""Blocks of nets for images: attention to channels, windows that are normed, pyramids, gates, decoders, masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f
from torch.nn.utils.parametrizations import spectral_norm

from terrazzo.bench.programs.agents import mlp
from terrazzo.bench.programs.registry import Made, normal, program, uniform


def layers(i: int, o: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """A convolution, its norm and a ReLU."""
    conv = nn.Conv2d(i, o, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(o), nn.ReLU())


class Cbam(nn.Module):
    """Gates of channels, then of places, from means and maxima."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.channels, self.places = mlp(c, c // 8, c), nn.Conv2d(2, 1, 7, padding=3)

    def forward(self, x: Tensor) -> Any:
        gate = torch.sigmoid(self.channels(x.mean((2, 3))) + self.channels(x.amax((2, 3))))
        x = x * gate[:, :, None, None]
        return x * torch.sigmoid(self.places(torch.cat((x.mean(1, True), x.amax(1, True)), 1)))


@program(small={"b": 2, "c": 8, "s": 8}, training=True)
def cbam(b: int = 32, c: int = 256, s: int = 56) -> Made:
    """Attention to channels and places."""
    return Cbam(c), normal(b, c, s, s)


class SelectiveKernel(nn.Module):
    """Branches of several widths, weighed by what all of them are."""

    def __init__(self, c: int) -> None:
        super().__init__()
        wide = nn.Conv2d(c, c, 3, padding=2, dilation=2, groups=min(32, c), bias=False)
        self.branches = nn.ModuleList(
            (layers(c, c, groups=min(32, c)), nn.Sequential(wide, nn.BatchNorm2d(c), nn.ReLU()))
        )
        self.squeeze, self.weigh = mlp(c, 32), nn.Linear(32, 2 * c)

    def forward(self, x: Tensor) -> Any:
        branches = torch.stack([k(x) for k in self.branches], 1)
        z = self.squeeze(branches.sum(1).mean((2, 3)))
        a = torch.softmax(self.weigh(z).view(len(x), 2, -1), 1)
        return (branches * a[..., None, None]).sum(1)


@program(small={"b": 2, "c": 8, "s": 8}, training=True)
def selective_kernel(b: int = 32, c: int = 128, s: int = 56) -> Made:
    """A selective kernel unit."""
    return SelectiveKernel(c), normal(b, c, s, s)


class Standardized(nn.Conv2d):
    """A convolution whose weights have mean 0 and variance 1."""

    def __init__(self, i: int, o: int, kernel: int, groups: int = 1) -> None:
        super().__init__(i, o, kernel, padding=kernel // 2, groups=groups)
        self.gain = nn.Parameter(torch.ones(o, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        v, m = torch.var_mean(w, (1, 2, 3), keepdim=True, unbiased=False)
        w = (w - m) * torch.rsqrt(v * w[0].numel() + 1e-4) * self.gain
        return f.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


class NfNet(nn.Module):
    """A block without batch statistics."""

    def __init__(self, c: int) -> None:
        super().__init__()
        half, groups = c // 2, max(c // 256, 1)
        self.first, self.last = Standardized(c, half, 1), Standardized(half, c, 1)
        self.middle = nn.ModuleList(Standardized(half, half, 3, groups) for _ in range(2))
        self.gate, self.gain = mlp(c, c // 4, c), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Any:
        y = f.gelu(self.first(f.gelu(x) * 1.7015 * 0.9)) * 1.7015
        for k in self.middle:
            y = f.gelu(k(y)) * 1.7015
        y = self.last(y)
        return x + 0.4 * y * torch.sigmoid(self.gate(y.mean((2, 3))))[:, :, None, None] * self.gain


@program(small={"b": 2, "c": 8, "s": 8}, training=True)
def nfnet(b: int = 32, c: int = 512, s: int = 28) -> Made:
    """A block of a net without batch norms."""
    return NfNet(c), normal(b, c, s, s)


class Tokens(nn.Module):
    """Overlapping patches, attended to and cut anew."""

    def __init__(self, i: int, d: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(i), nn.Linear(i, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = v + self.out(f.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0])
        h = int(x.shape[1] ** 0.5)
        return f.unfold(x.transpose(1, 2).reshape(len(x), -1, h, h), 3, stride=2, padding=1).transpose(1, 2)


class TokensToToken(nn.Module):
    """Two such steps, and a projection."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.first, self.second, self.out = Tokens(147, d), Tokens(9 * d, d), nn.Linear(9 * d, 6 * d)

    def forward(self, x: Tensor) -> Any:
        x = f.unfold(x, 7, stride=4, padding=2).transpose(1, 2)
        return self.out(self.second(self.first(x)))


@program(small={"b": 2, "s": 32, "d": 16}, training=True)
def tokens_to_token(b: int = 32, s: int = 224, d: int = 64) -> Made:
    """The stem of a T2T-ViT."""
    return TokensToToken(d), normal(b, 3, s, s)


class SpatialGate(nn.Module):
    """A layer whose places are mixed by one matrix."""

    def __init__(self, n: int, d: int) -> None:
        super().__init__()
        self.norm, self.gate_norm = nn.LayerNorm(d), nn.LayerNorm(3 * d)
        self.into, self.out = nn.Linear(d, 6 * d), nn.Linear(3 * d, d)
        self.mix, self.bias = nn.Parameter(torch.randn(n, n) / n), nn.Parameter(torch.ones(n))

    def forward(self, x: Tensor) -> Any:
        u, v = f.gelu(self.into(self.norm(x))).chunk(2, -1)
        v = torch.einsum("bnd,mn->bmd", self.gate_norm(v), self.mix) + self.bias[:, None]
        return x + self.out(u * v)


@program(small={"b": 2, "n": 9, "d": 16}, training=True)
def gmlp(b: int = 32, n: int = 256, d: int = 512) -> Made:
    """A layer of a gated MLP."""
    return SpatialGate(n, d), normal(b, n, d)


class PyramidPooling(nn.Module):
    """Means of four grids, beside what they are means of."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(layers(c, c // 4, 1) for _ in range(4))
        self.out = layers(2 * c, c // 4)

    def forward(self, x: Tensor) -> Any:
        size = x.shape[-2:]
        pooled = (k(f.adaptive_avg_pool2d(x, n)) for n, k in zip((1, 2, 3, 6), self.parts, strict=True))
        grown = [f.interpolate(y, size, mode="bilinear", align_corners=True) for y in pooled]
        return self.out(torch.cat([x, *grown], 1))


@program(small={"b": 1, "c": 8, "s": 12}, training=True)
def pyramid_pooling(b: int = 8, c: int = 2048, s: int = 60) -> Made:
    """The head of a PSPNet."""
    return PyramidPooling(c), normal(b, c, s, s)


class Fusion(nn.Module):
    """Images of three sizes, each with what the others say."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.own = nn.ModuleList(nn.Sequential(layers(k, k), layers(k, k)) for k in (c, 2 * c, 4 * c))
        self.yx, self.zx, self.zy = layers(2 * c, c, 1), layers(4 * c, c, 1), layers(4 * c, 2 * c, 1)
        self.xy, self.yz = layers(c, 2 * c, 3, 2), layers(2 * c, 4 * c, 3, 2)
        self.xz = nn.Sequential(layers(c, c, 3, 2), layers(c, 4 * c, 3, 2))

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Any:
        def up(t: Tensor, like: Tensor) -> Tensor:
            return f.interpolate(t, size=like.shape[-2:], mode="bilinear", align_corners=False)

        x, y, z = (k(t) for k, t in zip(self.own, (x, y, z), strict=True))
        first = f.relu(x + up(self.yx(y), x) + up(self.zx(z), x))
        return first, f.relu(self.xy(x) + y + up(self.zy(z), y)), f.relu(self.xz(x) + self.yz(y) + z)


@program(small={"b": 1, "s": 16, "c": 8}, training=True)
def high_resolution_fusion(b: int = 16, s: int = 64, c: int = 48) -> Made:
    """A stage of an HRNet."""
    return Fusion(c), normal(b, c, s, s), normal(b, 2 * c, s // 2, s // 2), normal(b, 4 * c, s // 4, s // 4)


class GatedSkip(nn.Module):
    """A skip of a U-Net, gated by what lies below."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.x, self.g, self.p = nn.Conv2d(c, c // 2, 1), nn.Conv2d(2 * c, c // 2, 1), nn.Conv2d(c // 2, 1, 1)
        self.up, self.out = nn.ConvTranspose2d(2 * c, c, 2, 2), layers(2 * c, c)

    def forward(self, x: Tensor, g: Tensor) -> Any:
        a = torch.sigmoid(self.p(f.relu(self.x(x) + f.interpolate(self.g(g), x.shape[-2:], mode="bilinear"))))
        return self.out(torch.cat((x * a, self.up(g)), 1))


@program(small={"b": 1, "c": 4, "s": 16}, training=True)
def gated_skip(b: int = 16, c: int = 256, s: int = 64) -> Made:
    """A step of an attention U-Net's decoder."""
    return GatedSkip(c), normal(b, c, s, s), normal(b, 2 * c, s // 2, s // 2)


class NonLocal(nn.Module):
    """Attention between the pixels of an image, channels first."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Conv2d(c, c // 2, 1) for _ in range(3))
        self.out = nn.Sequential(nn.Conv2d(c // 2, c, 1), nn.BatchNorm2d(c))

    def forward(self, x: Tensor) -> Any:
        q = self.q(x).flatten(2)
        k, v = (f.max_pool2d(y, 2).flatten(2) for y in (self.k(x), self.v(x)))
        weights = torch.softmax(q.transpose(1, 2) @ k, -1)
        return x + self.out((v @ weights.transpose(1, 2)).unflatten(2, x.shape[2:]))


@program(small={"b": 1, "c": 8, "s": 6}, training=True)
def non_local(b: int = 8, c: int = 512, s: int = 28) -> Made:
    """A non-local block."""
    return NonLocal(c), normal(b, c, s, s)


class Conditioned(nn.Module):
    """A block of a large generator: norms by a code, weights of bounded norm, a deviation as a last channel."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.g1, self.b1, self.g2, self.b2 = (nn.Linear(128, k) for k in (c, c, c // 2, c // 2))
        self.k1 = spectral_norm(nn.Conv2d(c, c // 2, 3, padding=1))
        self.k2 = spectral_norm(nn.Conv2d(c // 2, c // 2, 3, padding=1))
        self.skip = spectral_norm(nn.Conv2d(c, c // 2, 1))

    def normed(self, x: Tensor, g: Tensor, b: Tensor) -> Tensor:
        v, m = torch.var_mean(x, (0, 2, 3), keepdim=True, unbiased=False)
        return (x - m) * torch.rsqrt(v + 1e-5) * (1 + g[:, :, None, None]) + b[:, :, None, None]

    def forward(self, x: Tensor, z: Tensor) -> Any:
        y = self.k1(f.interpolate(f.relu(self.normed(x, self.g1(z), self.b1(z))), scale_factor=2))
        y = self.k2(f.relu(self.normed(y, self.g2(z), self.b2(z)))) + self.skip(f.interpolate(x, scale_factor=2))
        four = y.view(4, len(y) // 4, *y.shape[1:])
        off = (four.var(0, unbiased=False) + 1e-8).sqrt().mean((1, 2, 3))
        return torch.cat((y, off.view(-1, 1, 1, 1).repeat(4, 1, *y.shape[2:])), 1)


@program(small={"b": 4, "c": 8, "s": 4}, training=True)
def conditioned_block(b: int = 32, c: int = 256, s: int = 32) -> Made:
    """A block of a BigGAN, with a minibatch's deviation."""
    return Conditioned(c), normal(b, c, s, s), normal(b, 128)


class Spade(nn.Module):
    """Norms whose scales and shifts are made of a segmentation."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm, self.shared = nn.InstanceNorm2d(c), nn.Conv2d(19, 128, 3, padding=1)
        self.scale, self.shift, self.out = (nn.Conv2d(k, c, 3, padding=1) for k in (128, 128, c))

    def forward(self, x: Tensor, segments: Tensor) -> Any:
        s = f.relu(self.shared(f.interpolate(segments, x.shape[-2:], mode="nearest")))
        return self.out(f.leaky_relu(self.norm(x) * (1 + self.scale(s)) + self.shift(s), 0.2))


@program(small={"b": 1, "c": 8, "s": 8}, training=True)
def spade(b: int = 4, c: int = 256, s: int = 64) -> Made:
    """Spatially adaptive normalization."""
    return Spade(c), normal(b, c, s, s), normal(b, 19, 2 * s, 2 * s)


class Masked(nn.Module):
    """A masked autoencoder: a random quarter is encoded, all is decoded, and what was hidden is compared."""

    def __init__(self, n: int, d: int) -> None:
        super().__init__()
        self.encode, self.decode = mlp(d, 4 * d, d, act=nn.GELU), mlp(d, 4 * d, d, act=nn.GELU)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, d)), nn.Parameter(torch.randn(1, n, d))

    def forward(self, x: Tensor, noise: Tensor) -> Any:
        b, n, d = x.shape
        order = noise.argsort(1)
        back = order.argsort(1)
        seen = self.encode(x.gather(1, order[:, : n // 4, None].expand(-1, -1, d)))
        y = torch.cat((seen, self.token.expand(b, n - n // 4, -1)), 1)
        y = self.decode(y.gather(1, back[..., None].expand(-1, -1, d)) + self.places)
        hidden = torch.ones_like(noise)
        hidden[:, : n // 4] = 0
        hidden = hidden.gather(1, back)
        return ((y - x).square().mean(-1) * hidden).sum() / hidden.sum()


@program(small={"b": 2, "n": 16, "d": 16}, training=True)
def masked_autoencoder(b: int = 64, n: int = 196, d: int = 768) -> Made:
    """The loss of a masked autoencoder."""
    return Masked(n, d), normal(b, n, d), uniform(b, n)


class RoiAlign(nn.Module):
    """Boxes of an image, resampled, pooled and classified."""

    def __init__(self, c: int, width: int) -> None:
        super().__init__()
        self.head = mlp(49 * c, width, 81)

    def forward(self, x: Tensor, boxes: Tensor) -> Any:
        steps = torch.linspace(-1, 1, 14, device=x.device, dtype=x.dtype)
        across, down = (boxes[:, k : k + 1] + steps * boxes[:, k + 2 : k + 3].abs() * 0.3 for k in (0, 1))
        grid = torch.stack((across[:, None].expand(-1, 14, -1), down[:, :, None].expand(-1, -1, 14)), -1)
        y = f.grid_sample(x.expand(len(boxes), -1, -1, -1), grid, align_corners=False)
        return self.head(f.avg_pool2d(y, 2).flatten(1))


@program(small={"n": 3, "c": 4, "s": 12, "width": 16}, training=True)
def roi_align(n: int = 512, c: int = 256, s: int = 64, width: int = 1024) -> Made:
    """Regions of interest of a detector."""
    return RoiAlign(c, width), normal(1, c, s, s), uniform(n, 4) * 2 - 1


def decoded(heat: Tensor, size: Tensor, off: Tensor, count: int) -> Any:
    """The boxes around the highest peaks of a map."""
    h, w = heat.shape[-2:]
    heat = heat.sigmoid()
    heat = heat * (f.max_pool2d(heat, 3, 1, 1) == heat)
    score, at = heat.flatten(1).topk(count)
    kind, at = at // (h * w), at % (h * w)
    centre = torch.stack((at % w, at // w), -1).to(size.dtype)

    def there(t: Tensor) -> Tensor:
        return t.flatten(2).gather(2, at[:, None].expand(-1, 2, -1)).transpose(1, 2)

    centre = centre + there(off)
    return torch.cat((centre - there(size) / 2, centre + there(size) / 2), -1), score, kind


@program(small={"b": 2, "k": 3, "s": 8, "count": 5})
def peak_decoding(b: int = 16, k: int = 80, s: int = 128, count: int = 100) -> Made:
    """What a CenterNet finds."""
    maps = normal(b, k, s, s), normal(b, 2, s, s), normal(b, 2, s, s)
    return lambda heat, size, off: decoded(heat, size, off, count), *maps
