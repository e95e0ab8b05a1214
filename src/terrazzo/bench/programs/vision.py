"""Nets for pictures: transformers, and convolutional nets by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.huggingface import TINY, pictures
from terrazzo.bench.programs.registry import Made, normal, program

TWO: dict[str, Any] = {"num_hidden_layers": 2}
SMALL: dict[str, Any] = {**TINY, "image_size": 64, "patch_size": 16}
STAGES: dict[str, Any] = {"depths": [1, 1, 2, 1]}

pictures("vit", "ViTModel", (32, 224), SMALL, training=True, **TWO)
pictures("deit", "DeiTModel", (32, 224), SMALL, **TWO)
pictures("beit", "BeitModel", (32, 224), SMALL, **TWO)
pictures("dinov2", "Dinov2Model", (16, 224), SMALL, image_size=224, training=True, **TWO)
pictures("vit_msn", "ViTMSNModel", (32, 224), SMALL, **TWO)
pictures("yolos", "YolosModel", (4, 512), {**SMALL, "image_size": [64, 64], "num_detection_tokens": 10}, **TWO)
pictures("ijepa", "IJepaModel", (16, 224), SMALL, hidden_size=1280, num_attention_heads=16, intermediate_size=5120,
         patch_size=14, **TWO)  # fmt: skip
pictures(
    "swin",
    "SwinModel",
    (16, 224),
    {"embed_dim": 16, "num_heads": [1, 2, 2, 4], "window_size": 2, "image_size": 64},
    depths=[2, 2, 2, 2],
    training=True,
)
pictures("swinv2", "Swinv2Model", (8, 224), {"embed_dim": 16, "num_heads": [1, 2, 2, 4], "window_size": 2,
         "image_size": 64}, depths=[2, 2, 2, 2], window_size=7)  # fmt: skip
pictures("convnext", "ConvNextModel", (32, 224), {"hidden_sizes": [8, 16, 16, 32]}, training=True, **STAGES)
pictures("convnextv2", "ConvNextV2Model", (32, 224), {"hidden_sizes": [8, 16, 16, 32]}, training=True, **STAGES)
pictures("resnet50", "ResNetModel", (32, 224), {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32],
         "depths": [1, 1, 1, 1]}, training=True)  # fmt: skip
pictures("regnet", "RegNetModel", (16, 224), {"embedding_size": 8, "hidden_sizes": [16, 16, 32, 32], "groups_width": 8},
         **STAGES)  # fmt: skip
pictures("mobilenetv1", "MobileNetV1Model", (32, 224), {"depth_multiplier": 0.25})
pictures("mobilenetv2", "MobileNetV2Model", (32, 224), {"depth_multiplier": 0.25}, training=True)
pictures("efficientnet", "EfficientNetModel", (16, 224), {"width_coefficient": 0.25, "hidden_dim": 320},
         image_size=224, width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280)  # fmt: skip
pictures("poolformer", "PoolFormerModel", (16, 224), {"hidden_sizes": [8, 16, 16, 32]})
pictures(
    "mobilevit",
    "MobileViTModel",
    (16, 256),
    {
        "hidden_sizes": [16, 24, 32],
        "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32],
        "num_attention_heads": 4,
        "image_size": 64,
    },
)
pictures("mobilevitv2", "MobileViTV2Model", (16, 256), {"width_multiplier": 0.25, "image_size": 64})
pictures(
    "levit",
    "LevitModel",
    (32, 224),
    {"image_size": 64, "hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 2, 2], "key_dim": [16, 16, 16]},
)
pictures("cvt", "CvtModel", (8, 224), {"embed_dim": [16, 24, 32], "num_heads": [1, 2, 2], "depth": [1, 1, 2]})
pictures("focalnet", "FocalNetModel", (8, 224), {"embed_dim": 16, "image_size": 64}, **STAGES)
pictures("pvt", "PvtModel", (16, 224), {"image_size": 64, "hidden_sizes": [8, 16, 16, 32],
         "num_attention_heads": [1, 2, 2, 4]})  # fmt: skip
pictures("pvt_v2", "PvtV2Model", (16, 224), {"image_size": 64, "hidden_sizes": [8, 16, 16, 32],
         "num_attention_heads": [1, 2, 2, 4]})  # fmt: skip
pictures(
    "hiera",
    "HieraModel",
    (16, 224),
    {"embed_dim": 16, "image_size": [64, 64], "num_heads": [1, 2, 2, 4]},
    depths=[1, 1, 2, 1],
)
pictures("swiftformer", "SwiftFormerModel", (16, 224), {"embed_dims": [8, 16, 16, 32]}, depths=[1, 1, 2, 1])
pictures(
    "bit", "BitModel", (16, 224), {"embedding_size": 8, "hidden_sizes": [32, 32, 32, 64], "num_groups": 4}, **STAGES
)
pictures("siglip", "SiglipVisionModel", (32, 224), SMALL, **TWO)
pictures("clip_vision", "CLIPVisionModel", (32, 224), SMALL, training=True, **TWO)
pictures("vitmae", "ViTMAEModel", (16, 224), SMALL, **TWO)
pictures("sam_encoder", "SamVisionModel", (1, 1024), {"image_size": 64, "hidden_size": 32, "num_attention_heads": 2,
         "mlp_dim": 64, "output_channels": 16, "window_size": 2, "global_attn_indexes": [1]}, **TWO,
         global_attn_indexes=[1])  # fmt: skip
pictures("blip_vision", "BlipVisionModel", (16, 384), SMALL, **TWO)
pictures("dinov3", "DINOv3ViTModel", (16, 224), SMALL, **TWO)


def convolution(
    width: int, out: int, taps: int = 3, stride: int = 1, groups: int = 1, act: Callable[[], nn.Module] | None = nn.ReLU
) -> nn.Module:
    """A convolution that keeps the size (up to its stride), with batch norm and, if not None, what follows it."""
    layers = [nn.Conv2d(width, out, taps, stride, taps // 2, groups=groups, bias=False), nn.BatchNorm2d(out)]
    return nn.Sequential(*layers, *([act()] if act else []))


def head(width: int, classes: int) -> Sequence[nn.Module]:
    """The mean over the picture, and a linear layer."""
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)


@program(small={"images": 2, "size": 32, "widths": (8, 8, 16)}, training=True)
def vgg(images: int = 32, size: int = 224, widths: Sequence[int] = (64, 128, 256)) -> Made:
    """VGG's first three levels, and its wide linear layers."""
    layers: list[nn.Module] = []
    for before, width in zip((3, *widths), widths, strict=False):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    wide = 16 * widths[-1]
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(49 * widths[-1], wide), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(wide, 1000)), normal(images, 3, size, size)


@program(small={"images": 2, "size": 80, "width": 8}, training=True)
def alexnet(images: int = 64, size: int = 224, width: int = 64) -> Made:
    """AlexNet."""
    layers = [
        nn.Conv2d(3, width, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(width, 3 * width, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(3 * width, 6 * width, 3, padding=1), nn.ReLU(),
        nn.Conv2d(6 * width, 4 * width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(6), nn.Flatten(),
        nn.Linear(36 * 4 * width, 64 * width), nn.ReLU(), nn.Linear(64 * width, 1000),
    ]  # fmt: skip
    return nn.Sequential(*layers), normal(images, 3, size, size)


class Dense(nn.Module):
    """Every layer sees all before it (DenseNet's)."""

    def __init__(self, width: int, growth: int, layers: int) -> None:
        super().__init__()
        wide = [width + growth * k for k in range(layers)]
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(w), nn.ReLU(), convolution(w, 4 * growth, 1), nn.Conv2d(4 * growth, growth, 3, padding=1)
            )
            for w in wide
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat((x, layer(x)), 1)
        return x


@program(small={"images": 2, "size": 32, "growth": 4, "blocks": (2, 2)}, training=True)
def densenet(images: int = 32, size: int = 224, growth: int = 32, blocks: Sequence[int] = (6, 12, 24, 16)) -> Made:
    """DenseNet-121."""
    width = 2 * growth
    layers: list[nn.Module] = [convolution(3, width, 7, 2), nn.MaxPool2d(3, 2, 1)]
    for number, count in enumerate(blocks):
        layers.append(Dense(width, growth, count))
        width += growth * count
        if number < len(blocks) - 1:
            layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1), nn.AvgPool2d(2)]
            width //= 2
    return nn.Sequential(*layers, nn.BatchNorm2d(width), nn.ReLU(), *head(width, 1000)), normal(images, 3, size, size)


class Branches(nn.Module):
    """Branches over one input, side by side."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def inception_block(width: int, a: int, b: int, c: int, d: int) -> nn.Module:
    """Four branches: 1 x 1, 3 x 3, two 3 x 3, pooled."""
    return Branches(
        convolution(width, a, 1),
        nn.Sequential(convolution(width, b // 2, 1), convolution(b // 2, b)),
        nn.Sequential(convolution(width, c // 2, 1), convolution(c // 2, c), convolution(c, c)),
        nn.Sequential(nn.MaxPool2d(3, 1, 1), convolution(width, d, 1)),
    )


@program(small={"images": 2, "size": 32, "w": 4}, training=True)
def inception(images: int = 32, size: int = 224, w: int = 32) -> Made:
    """GoogLeNet's shape: six blocks of four branches."""
    layers: list[nn.Module] = [convolution(3, 2 * w, 7, 2), nn.MaxPool2d(3, 2, 1), convolution(2 * w, 6 * w)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    width = 6 * w
    for k, (a, b, c, d) in enumerate(
        ((2, 4, 1, 1), (4, 6, 3, 2), (6, 6, 2, 2), (5, 7, 2, 2), (8, 10, 4, 4), (12, 12, 4, 4))
    ):
        layers.append(inception_block(width, a * w, b * w, c * w, d * w))
        width = (a + b + c + d) * w
        if k in (1, 4):
            layers.append(nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(*layers, *head(width, 1000)), normal(images, 3, size, size)


class Shuffle(nn.Module):
    """Half of the channels pass through, and then the halves are mixed (ShuffleNet's second version)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.body = nn.Sequential(
            convolution(half, half, 1), convolution(half, half, groups=half, act=None), convolution(half, half, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        return torch.stack((a, self.body(b)), 2).flatten(1, 2)


@program(small={"images": 2, "size": 32, "widths": (8, 16)}, training=True)
def shufflenet(images: int = 64, size: int = 224, widths: Sequence[int] = (116, 232, 464)) -> Made:
    """ShuffleNet's shape."""
    layers: list[nn.Module] = [convolution(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1)]
    for before, width in zip((24, *widths), widths, strict=False):
        layers += [convolution(before, width, 3, 2), *(Shuffle(width) for _ in range(3))]
    return nn.Sequential(*layers, *head(widths[-1], 1000)), normal(images, 3, size, size)


class Squeeze(nn.Module):
    """Channels scaled by what their means say."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * f.hardsigmoid(self.up(f.relu(self.down(x.mean((2, 3), keepdim=True)))))


class Inverted(nn.Module):
    """Wide, by channel, squeezed, narrow again (MobileNetV3's)."""

    def __init__(self, width: int, inner: int, out: int, taps: int, stride: int) -> None:
        super().__init__()
        self.same = width == out and stride == 1
        self.body = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.Hardswish(),
            nn.Conv2d(inner, inner, taps, stride, taps // 2, groups=inner, bias=False), nn.BatchNorm2d(inner),
            nn.Hardswish(), Squeeze(inner), nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.same else self.body(x)


@program(small={"images": 2, "size": 32, "scale": 0.5}, training=True)
def mobilenetv3(images: int = 64, size: int = 224, scale: float = 1.0) -> Made:
    """MobileNetV3, the large one."""
    rows = ((16, 16, 3, 1), (64, 24, 3, 2), (72, 24, 3, 1), (72, 40, 5, 2), (120, 40, 5, 1), (240, 80, 3, 2),
            (184, 80, 3, 1), (480, 112, 3, 1), (672, 160, 5, 2), (960, 160, 5, 1))  # fmt: skip
    layers: list[nn.Module] = [convolution(3, int(16 * scale), 3, 2)]
    width = int(16 * scale)
    for inner, out, taps, stride in rows:
        layers.append(Inverted(width, int(inner * scale), int(out * scale), taps, stride))
        width = int(out * scale)
    return nn.Sequential(*layers, *head(width, 1000)), normal(images, 3, size, size)


class Mixer(nn.Module):
    """Tokens mixed, then channels."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 256), nn.GELU(), nn.Linear(256, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.second(x))


@program(small={"images": 2, "tokens": 16, "width": 32}, training=True)
def mlpmixer(images: int = 32, tokens: int = 196, width: int = 512) -> Made:
    """Two layers of MLP-Mixer."""
    return nn.Sequential(Mixer(tokens, width), Mixer(tokens, width)), normal(images, tokens, width)


class ConvMixer(nn.Module):
    """A convolution of each channel with a shortcut, and one over the channels."""

    def __init__(self, width: int, taps: int) -> None:
        super().__init__()
        self.depth = nn.Sequential(
            nn.Conv2d(width, width, taps, groups=width, padding="same"), nn.GELU(), nn.BatchNorm2d(width)
        )
        self.point = nn.Sequential(nn.Conv2d(width, width, 1), nn.GELU(), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.point(x + self.depth(x))


@program(small={"images": 2, "size": 28, "width": 16, "taps": 3}, training=True)
def convmixer(images: int = 16, size: int = 224, width: int = 512, taps: int = 9) -> Made:
    """Three layers of ConvMixer."""
    layers = [nn.Conv2d(3, width, 7, 7), nn.GELU(), *(ConvMixer(width, taps) for _ in range(3)), *head(width, 1000)]
    return nn.Sequential(*layers), normal(images, 3, size, size)


@program(small={"clips": 1, "frames": 4, "size": 16, "width": 8}, training=True)
def conv3d(clips: int = 4, frames: int = 16, size: int = 112, width: int = 32) -> Made:
    """Convolutions over time and pictures."""
    first = nn.Conv3d(3, width, 3, padding=1), nn.BatchNorm3d(width), nn.ReLU(), nn.MaxPool3d(2)
    layers = *first, nn.Conv3d(width, 2 * width, 3, padding=1), nn.ReLU()
    return nn.Sequential(*layers), normal(clips, 3, frames, size, size)


class Factored(nn.Module):
    """A convolution over the picture, and one over time (R(2+1)D's)."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.space = nn.Conv3d(width, out, (1, 3, 3), padding=(0, 1, 1), bias=False)
        self.time = nn.Conv3d(out, out, (3, 1, 1), padding=(1, 0, 0), bias=False)
        self.norms = nn.ModuleList((nn.BatchNorm3d(out), nn.BatchNorm3d(out)))

    def forward(self, x: Tensor) -> Tensor:
        return f.relu(self.norms[1](self.time(f.relu(self.norms[0](self.space(x))))))


@program(small={"clips": 1, "frames": 4, "size": 16, "width": 8})
def r2plus1d(clips: int = 4, frames: int = 16, size: int = 112, width: int = 64) -> Made:
    """A video net of factored convolutions."""
    layers = Factored(3, width), nn.MaxPool3d((1, 2, 2)), Factored(width, 2 * width)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten()), normal(clips, 3, frames, size, size)


class Ghost(nn.Module):
    """Half of the channels are made of the other half, cheaply (GhostNet's)."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.first, self.cheap = convolution(width, out // 2, 1), convolution(out // 2, out // 2, 3, groups=out // 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return torch.cat((x, self.cheap(x)), 1)


@program(small={"images": 2, "size": 32, "width": 8}, training=True)
def ghostnet(images: int = 32, size: int = 224, width: int = 64) -> Made:
    """Ghost modules at three sizes."""
    layers: list[nn.Module] = [convolution(3, width, 3, 2)]
    for k in range(3):
        layers += [Ghost(width << k, width << k), Ghost(width << k, width << (k + 1)), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, *head(width << 3, 1000)), normal(images, 3, size, size)


class RepVgg(nn.Module):
    """Three branches that are added: 3 x 3, 1 x 1, the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow, self.same = (
            convolution(width, width, act=None),
            convolution(width, width, 1, act=None),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return f.relu(self.wide(x) + self.narrow(x) + self.same(x))


@program(small={"images": 2, "size": 16, "width": 8}, training=True)
def repvgg(images: int = 32, size: int = 56, width: int = 96) -> Made:
    """RepVGG's blocks as they are trained."""
    return nn.Sequential(RepVgg(width), RepVgg(width), RepVgg(width)), normal(images, width, size, size)


@program(small={"images": 2, "size": 16, "width": 8, "groups": 4})
def resnext(images: int = 32, size: int = 56, width: int = 128, groups: int = 32) -> Made:
    """ResNeXt's block: a convolution in groups between two of 1 x 1."""
    layers = (
        convolution(2 * width, width, 1),
        convolution(width, width, groups=groups),
        convolution(width, 2 * width, 1),
    )
    return nn.Sequential(*layers, *layers), normal(images, 2 * width, size, size)


class SuperResolution(nn.Module):
    """Residual blocks without norms, and pixels shuffled (EDSR's)."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(blocks)
        )
        self.last = nn.Sequential(
            nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(width, 3, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + 0.1 * block(x)
        return self.last(x)


@program(small={"images": 2, "size": 12, "width": 8, "blocks": 2}, training=True)
def super_resolution(images: int = 8, size: int = 96, width: int = 64, blocks: int = 4) -> Made:
    """EDSR's shape."""
    return SuperResolution(width, blocks), normal(images, 3, size, size)


class SpatialTransformer(nn.Module):
    """A picture is read at places that a small net finds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.find = nn.Sequential(convolution(3, width, 7, 4), convolution(width, width, 5, 4), *head(width, 6))

    def forward(self, x: Tensor) -> Tensor:
        theta = 0.1 * self.find(x).view(-1, 2, 3) + torch.eye(2, 3, dtype=x.dtype, device=x.device)
        ys, xs = (torch.linspace(-1, 1, n, dtype=x.dtype, device=x.device) for n in x.shape[-2:])
        base = torch.stack(
            (xs.expand(len(ys), -1), ys[:, None].expand(-1, len(xs)), torch.ones_like(ys)[:, None].expand(-1, len(xs))),
            -1,
        )
        return f.grid_sample(x, torch.einsum("nij,hwj->nhwi", theta, base), align_corners=True)


@program(small={"images": 2, "size": 32, "width": 8}, dtypes=("f32",))  # where it reads is not known in bfloat16
def spatial_transformer(images: int = 32, size: int = 224, width: int = 32) -> Made:
    """A spatial transformer."""
    return SpatialTransformer(width), normal(images, 3, size, size)
