"""Nets that make pictures: U-Nets, diffusion transformers, autoencoders, generators."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Made, normal, program, uniform


def level(width: int, out: int) -> nn.Module:
    """Two convolutions with group norm."""
    layers = nn.Conv2d(width, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU()
    return nn.Sequential(*layers, nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU())


class UNet(nn.Module):
    """Three levels down and up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList((level(3, width), level(width, 2 * width), level(2 * width, 4 * width)))
        self.up, self.last = level(6 * width, 2 * width), level(3 * width, width)
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down[0](x)
        b = self.down[1](f.max_pool2d(a, 2))
        c = self.down[2](f.max_pool2d(b, 2))
        y = self.up(torch.cat((f.interpolate(c, scale_factor=2, mode="bilinear"), b), 1))
        return self.out(self.last(torch.cat((f.interpolate(y, scale_factor=2), a), 1)))


@program(small={"images": 1, "size": 16, "width": 8}, training=True)
def unet(images: int = 8, size: int = 256, width: int = 64) -> Made:
    """A U-Net."""
    return UNet(width), normal(images, 3, size, size)


def timestep(t: Tensor, width: int) -> Tensor:
    """Sines and cosines of a time."""
    rate = torch.exp(-math.log(10000) * torch.arange(width // 2, device=t.device, dtype=torch.float32) / (width // 2))
    angle = 1000 * t.float()[:, None] * rate
    return torch.cat((angle.cos(), angle.sin()), -1).to(t.dtype)


class ResidualBlock(nn.Module):
    """Two convolutions with a shortcut; the time shifts between them."""

    def __init__(self, width: int, out: int, time: int) -> None:
        super().__init__()
        groups = 32 if min(width, out) >= 64 else 4
        self.first = nn.Sequential(nn.GroupNorm(groups, width), nn.SiLU(), nn.Conv2d(width, out, 3, padding=1))
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time, out))
        self.second = nn.Sequential(nn.GroupNorm(groups, out), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1))
        self.same = nn.Identity() if width == out else nn.Conv2d(width, out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.same(x) + self.second(self.first(x) + self.time(time)[:, :, None, None])


class CrossAttention(nn.Module):
    """A transformer layer over the places of a picture that reads a text (Stable Diffusion's)."""

    def __init__(self, width: int, heads: int, text: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(32 if width >= 64 else 4, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.query = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.text = nn.Linear(text, 2 * width, bias=False)
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.wide, self.narrow = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def parts(self, x: Tensor, count: int) -> tuple[Tensor, ...]:
        return x.unflatten(-1, (count, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        y = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.parts(self.own(self.norms[0](y)), 3)
        y = y + self.out[0](f.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        (q,), (k, v) = self.parts(self.query(self.norms[1](y)), 1), self.parts(self.text(text), 2)
        y = y + self.out[1](f.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        a, b = self.wide(self.norms[2](y)).chunk(2, -1)
        y = y + self.narrow(a * f.gelu(b))
        return x + y.transpose(1, 2).view_as(x)


class ConditionedUNet(nn.Module):
    """Two levels of residual blocks with attention to a text."""

    def __init__(self, width: int, heads: int, text: int) -> None:
        super().__init__()
        self.width, wide = width, 4 * width
        self.time = nn.Sequential(nn.Linear(width, wide), nn.SiLU(), nn.Linear(wide, wide))
        self.into, self.out = nn.Conv2d(4, width, 3, padding=1), nn.Conv2d(width, 4, 3, padding=1)
        self.blocks = nn.ModuleList(
            ResidualBlock(a, b, wide)
            for a, b in ((width, width), (width, 2 * width), (2 * width, 2 * width), (3 * width, width))
        )
        sizes = (width, 2 * width, 2 * width, width)
        self.attention = nn.ModuleList(CrossAttention(w, heads, text) for w in sizes)
        self.down = nn.Conv2d(width, width, 3, 2, 1)

    def forward(self, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
        time = self.time(timestep(t, self.width))
        a = self.attention[0](self.blocks[0](self.into(x), time), text)
        b = self.attention[1](self.blocks[1](self.down(a), time), text)
        b = self.attention[2](self.blocks[2](b, time), text)
        c = torch.cat((f.interpolate(b, scale_factor=2.0), a), 1)
        return self.out(self.attention[3](self.blocks[3](c, time), text))


@program(small={"images": 1, "size": 8, "width": 16, "heads": 2, "text": 12, "words": 5}, training=True)
def stable_diffusion(
    images: int = 4, size: int = 64, width: int = 320, heads: int = 8, text: int = 768, words: int = 77
) -> Made:
    """Two levels of Stable Diffusion's U-Net."""
    net = ConditionedUNet(width, heads, text)
    return net, normal(images, 4, size, size), uniform(images), normal(images, words, text)


class DiffusionLayer(nn.Module):
    """A transformer layer that a condition scales and shifts (DiT's)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.condition(c)[:, None].chunk(6, -1)
        y = self.norms[0](x) * (1 + scale) + shift
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate * self.out(f.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y = self.norms[1](x) * (1 + scale2) + shift2
        return x + gate2 * self.narrow(f.gelu(self.wide(y), approximate="tanh"))


class DiffusionTransformer(nn.Module):
    """Patches, layers under the time's condition, and patches again."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.width = width
        self.into, self.out = nn.Conv2d(4, width, 2, 2), nn.Linear(width, 16)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.layers = nn.ModuleList(DiffusionLayer(width, heads) for _ in range(layers))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        y = self.into(x)
        height, width = y.shape[-2:]
        y, c = y.flatten(2).transpose(1, 2), self.time(timestep(t, self.width))
        for layer in self.layers:
            y = layer(y, c)
        parts = self.out(y).view(len(x), height, width, 4, 2, 2)
        return parts.permute(0, 3, 1, 4, 2, 5).reshape(x.shape)


@program(small={"images": 2, "size": 8, "width": 32, "heads": 4, "layers": 1}, training=True)
def diffusion_transformer(
    images: int = 16, size: int = 32, width: int = 1152, heads: int = 16, layers: int = 2
) -> Made:
    """Two layers of DiT-XL/2."""
    return DiffusionTransformer(width, heads, layers), normal(images, 4, size, size), uniform(images)


class PlaceAttention(nn.Module):
    """Attention of one head over the places of a picture, by convolutions of 1 x 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32 if width >= 64 else 4, width)
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.flatten(2).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, 1))
        return x + self.out(f.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


class Autoencoder(nn.Module):
    """A variational autoencoder of pictures, its noise an input (Stable Diffusion's shape)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            self.group(width),
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            self.group(2 * width),
            nn.Conv2d(2 * width, 2 * width, 3, 2, 1),
            PlaceAttention(2 * width),
            nn.Conv2d(2 * width, 8, 1),
        )
        self.decode = nn.Sequential(
            nn.Conv2d(4, 2 * width, 3, padding=1),
            PlaceAttention(2 * width),
            self.group(2 * width),
            nn.Upsample(scale_factor=2.0),
            nn.Conv2d(2 * width, width, 3, padding=1),
            self.group(width),
            nn.Upsample(scale_factor=2.0),
            nn.Conv2d(width, 3, 3, padding=1),
        )

    @staticmethod
    def group(width: int) -> nn.Module:
        layers = nn.GroupNorm(32 if width >= 64 else 4, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)
        return nn.Sequential(*layers)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.encode(x).chunk(2, 1)
        spread = spread.clamp(-30, 20)
        divergence = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum((1, 2, 3))
        return self.decode(mean + torch.exp(0.5 * spread) * noise), divergence


@program(small={"images": 1, "size": 16, "width": 8}, training=True)
def autoencoder(images: int = 4, size: int = 256, width: int = 128) -> Made:
    """A convolutional VAE."""
    return Autoencoder(width), normal(images, 3, size, size), normal(images, 4, size // 4, size // 4)


@program(small={"images": 2, "noise": 8, "width": 8}, training=True)
def gan_generator(images: int = 64, noise: int = 100, width: int = 128) -> Made:
    """DCGAN's generator."""
    layers: list[nn.Module] = [nn.ConvTranspose2d(noise, 4 * width, 4, 1, 0), nn.BatchNorm2d(4 * width), nn.ReLU()]
    for a, b in ((4, 2), (2, 1)):
        layers += [nn.ConvTranspose2d(a * width, b * width, 4, 2, 1), nn.BatchNorm2d(b * width), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh()), normal(images, noise, 1, 1)


@program(small={"images": 2, "size": 16, "width": 8}, training=True)
def gan_critic(images: int = 64, size: int = 64, width: int = 64) -> Made:
    """DCGAN's discriminator."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2)]
    for k in range(2):
        layers += [
            nn.Conv2d(width << k, width << (k + 1), 4, 2, 1),
            nn.BatchNorm2d(width << (k + 1)),
            nn.LeakyReLU(0.2),
        ]
    return nn.Sequential(*layers, nn.Conv2d(4 * width, 1, size // 8)), normal(images, 3, size, size)


class StyledConvolution(nn.Module):
    """A convolution whose weights each picture scales and norms (StyleGAN 2's), as one in groups."""

    def __init__(self, width: int, out: int, style: int) -> None:
        super().__init__()
        self.weight, self.style = nn.Parameter(torch.randn(out, width, 3, 3)), nn.Linear(style, width)

    def forward(self, x: Tensor, s: Tensor) -> Tensor:
        count, _, height, width = x.shape
        weight = self.weight * (1 + self.style(s))[:, None, :, None, None]
        weight = weight * torch.rsqrt(weight.float().square().sum((2, 3, 4), keepdim=True) + 1e-8).to(x.dtype)
        y = f.conv2d(x.reshape(1, -1, height, width), weight.flatten(0, 1), padding=1, groups=count)
        return f.leaky_relu(y.view(count, -1, height, width), 0.2)


@program(small={"images": 2, "width": 8, "size": 8, "style": 8})
def stylegan_layer(images: int = 8, width: int = 256, size: int = 64, style: int = 512) -> Made:
    """A layer of StyleGAN 2."""
    return StyledConvolution(width, width, style), normal(images, width, size, size), normal(images, style)


class Quantiser(nn.Module):
    """The nearest of a book's entries for every place (VQ-VAE's)."""

    def __init__(self, entries: int, width: int) -> None:
        super().__init__()
        self.book = nn.Parameter(torch.randn(entries, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.movedim(1, -1).flatten(0, -2)
        distance = flat.square().sum(-1, keepdim=True) - 2 * flat @ self.book.T + self.book.square().sum(-1)
        near = self.book[distance.argmin(-1)].view(x.movedim(1, -1).shape).movedim(-1, 1)
        return near, (near - x).square().mean()


@program(small={"images": 2, "size": 4, "entries": 16, "width": 8}, dtypes=("f32",))  # in bfloat16 the nearest differ
def vector_quantiser(images: int = 32, size: int = 32, entries: int = 1024, width: int = 256) -> Made:
    """VQ-VAE's quantiser."""
    return Quantiser(entries, width), normal(images, width, size, size)
