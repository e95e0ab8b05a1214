"""Detection and segmentation: pyramids, heads, boxes, masks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.huggingface import TINY, pictures
from terrazzo.bench.programs.registry import Made, normal, program, uniform
from terrazzo.bench.programs.vision import convolution

pictures(
    "segformer",
    "SegformerModel",
    (8, 512),
    {"hidden_sizes": [8, 16, 16, 32], "num_attention_heads": [1, 2, 2, 4]},
    family="detection",
    training=True,
)
pictures("dpt", "DPTModel", (4, 384), {**TINY, "image_size": 64}, family="detection", num_hidden_layers=2)
pictures("glpn", "GLPNModel", (4, 480), {"hidden_sizes": [8, 16, 16, 32], "num_attention_heads": [1, 2, 2, 4]},
         family="detection")  # fmt: skip
pictures(
    "swin2sr",
    "Swin2SRModel",
    (4, 64),
    {"image_size": 16, "embed_dim": 16, "depths": [1], "num_heads": [2], "window_size": 4},
    family="detection",
    short=(1, 16),
    image_size=64,
    depths=[2, 2],
    num_heads=[6, 6],
)


class Pyramid(nn.Module):
    """Features at four sizes, each with what is above it added (FPN's)."""

    def __init__(self, widths: Sequence[int], out: int) -> None:
        super().__init__()
        self.side = nn.ModuleList(nn.Conv2d(w, out, 1) for w in widths)
        self.smooth = nn.ModuleList(nn.Conv2d(out, out, 3, padding=1) for _ in widths)

    def forward(self, *features: Tensor) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for side, x in reversed(list(zip(self.side, features, strict=True))):
            y = side(x)
            found.insert(0, y + f.interpolate(found[0], size=y.shape[-2:], mode="nearest") if found else y)
        return tuple(smooth(y) for smooth, y in zip(self.smooth, found, strict=True))


def levels(images: int, size: int, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """Features of a picture at sizes that halve."""
    return tuple(normal(images, w, size >> k, size >> k) for k, w in enumerate(widths))


@program(small={"images": 1, "size": 16, "widths": (8, 8, 16), "out": 8}, training=True)
def feature_pyramid(
    images: int = 4, size: int = 160, widths: Sequence[int] = (256, 512, 1024, 2048), out: int = 256
) -> Made:
    """A pyramid of features over ResNet's."""
    return Pyramid(widths, out), *levels(images, size, widths)


class Heads(nn.Module):
    """Convolutions that classes and boxes share over all levels (RetinaNet's)."""

    def __init__(self, width: int, anchors: int, classes: int) -> None:
        super().__init__()
        self.kinds, self.boxes = self.branch(width, anchors * classes), self.branch(width, anchors * 4)
        self.classes = classes

    @staticmethod
    def branch(width: int, out: int) -> nn.Module:
        layers = (layer for _ in range(2) for layer in (nn.Conv2d(width, width, 3, padding=1), nn.ReLU()))
        return nn.Sequential(*layers, nn.Conv2d(width, out, 3, padding=1))

    def forward(self, *features: Tensor) -> tuple[Tensor, Tensor]:
        kinds, boxes = (
            torch.cat([branch(x).permute(0, 2, 3, 1).reshape(len(x), -1, n) for x in features], 1)
            for branch, n in ((self.kinds, self.classes), (self.boxes, 4))
        )
        return torch.sigmoid(kinds), boxes


@program(small={"images": 1, "size": 8, "width": 8, "anchors": 2, "classes": 3}, training=True)
def retinanet_head(images: int = 4, size: int = 80, width: int = 256, anchors: int = 9, classes: int = 80) -> Made:
    """RetinaNet's heads over three levels."""
    return Heads(width, anchors, classes), *levels(images, size, (width,) * 3)


class CrossStage(nn.Module):
    """Half of the channels through bottlenecks whose steps are all kept (YOLO's)."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.into, half = convolution(width, width, 1, act=nn.SiLU), width // 2
        self.blocks = nn.ModuleList(
            nn.Sequential(convolution(half, half, act=nn.SiLU), convolution(half, half, act=nn.SiLU))
            for _ in range(blocks)
        )
        self.out = convolution((2 + blocks) * half, width, 1, act=nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.into(x).chunk(2, 1))
        for block in self.blocks:
            parts.append(parts[-1] + block(parts[-1]))
        return self.out(torch.cat(parts, 1))


@program(small={"images": 1, "size": 32, "width": 8}, training=True)
def yolo_backbone(images: int = 8, size: int = 640, width: int = 32) -> Made:
    """YOLO's backbone down to a sixteenth, with pooling at the end."""
    layers: list[nn.Module] = [convolution(3, width, 3, 2)]
    for k in range(3):
        layers += [convolution(width << k, width << (k + 1), 3, 2), CrossStage(width << (k + 1), 1 + k % 2)]
    return nn.Sequential(*layers, Pooled(width << 3)), normal(images, 3, size, size)


class Pooled(nn.Module):
    """The largest in three neighbourhoods beside the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = convolution(width, width // 2, 1), convolution(2 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.into(x)]
        for _ in range(3):
            parts.append(f.max_pool2d(parts[-1], 5, 1, 2))
        return self.out(torch.cat(parts, 1))


class Boxes(nn.Module):
    """Boxes from distributions over distances, and their overlaps with others (YOLO's decoding)."""

    def __init__(self, bins: int) -> None:
        super().__init__()
        self.bins = bins

    def forward(self, x: Tensor, places: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        reach = torch.softmax(x.unflatten(-1, (4, self.bins)), -1) @ torch.arange(
            self.bins, device=x.device, dtype=x.dtype
        )
        low, high = places - reach[..., :2], places + reach[..., 2:]
        corner, end = (
            torch.maximum(low[:, :, None], others[None, None, :, :2]),
            torch.minimum(high[:, :, None], others[None, None, :, 2:]),
        )
        shared = (end - corner).clamp(min=0).prod(-1)
        size = (high - low).prod(-1)[..., None] + (others[:, 2:] - others[:, :2]).prod(-1)
        return torch.cat((low, high), -1), shared / (size - shared + 1e-6)


@program(small={"images": 1, "places": 20, "others": 6, "bins": 4})
def box_decoding(images: int = 16, places: int = 8400, others: int = 100, bins: int = 16) -> Made:
    """Boxes decoded, and their overlaps with 100 others."""
    low = uniform(others, 2)
    return (
        Boxes(bins),
        normal(images, places, 4 * bins),
        80 * uniform(places, 2),
        torch.cat((60 * low, 60 * low + 20), -1),
    )


class Detr(nn.Module):
    """A transformer over the places of a picture, and queries that become boxes (DETR's)."""

    def __init__(self, width: int, heads: int, queries: int, classes: int) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(width, heads, 8 * width, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(width, heads, 8 * width, dropout=0.0, batch_first=True)
        self.queries, self.into = nn.Parameter(torch.randn(queries, width)), nn.Conv2d(8 * width, width, 1)
        self.kinds = nn.Linear(width, classes + 1)
        self.boxes = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4), nn.Sigmoid())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.into(x).flatten(2).transpose(1, 2)
        y = self.decoder(self.queries.expand(len(x), -1, -1), self.encoder(y))
        return self.kinds(y), self.boxes(y)


@program(small={"images": 1, "size": 4, "width": 16, "heads": 2, "queries": 5, "classes": 3}, training=True)
def detr(
    images: int = 8, size: int = 25, width: int = 256, heads: int = 8, queries: int = 100, classes: int = 91
) -> Made:
    """A layer each of DETR's encoder and decoder."""
    return Detr(width, heads, queries, classes), normal(images, 8 * width, size, size)


class DeformableAttention(nn.Module):
    """Every query reads a picture at a few places that it finds itself."""

    def __init__(self, width: int, heads: int, points: int) -> None:
        super().__init__()
        self.heads, self.points = heads, points
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.places, self.weights = nn.Linear(width, heads * points * 2), nn.Linear(width, heads * points)

    def forward(self, query: Tensor, at: Tensor, x: Tensor) -> Tensor:
        count, channels, height, width = x.shape
        value = self.value(x.flatten(2).transpose(1, 2)).view(count, height, width, self.heads, -1)
        value = value.permute(0, 3, 4, 1, 2).flatten(0, 1)
        away = self.places(query).unflatten(-1, (self.heads, self.points, 2)) / width
        grid = (2 * (at[:, :, None, None] + away) - 1).transpose(1, 2).flatten(0, 1)
        weight = (
            torch.softmax(self.weights(query).unflatten(-1, (self.heads, self.points)), -1)
            .transpose(1, 2)
            .flatten(0, 1)
        )
        read = f.grid_sample(value, grid, align_corners=False)
        return self.out((read * weight[:, None]).sum(-1).view(count, channels, -1).transpose(1, 2))


@program(small={"images": 2, "queries": 9, "size": 5, "width": 16, "heads": 2, "points": 3}, dtypes=("f32",))  # places
def deformable_attention(
    images: int = 4, queries: int = 900, size: int = 64, width: int = 256, heads: int = 8, points: int = 4
) -> Made:
    """Deformable attention over one level."""
    net = DeformableAttention(width, heads, points)
    return net, normal(images, queries, width), uniform(images, queries, 2), normal(images, width, size, size)


class Nested(nn.Module):
    """A U-Net whose skips are nets themselves (U-Net++)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.nets = nn.ModuleDict()
        for i in range(depth):
            self.nets[f"{i}_0"] = self.pair(3 if not i else width << (i - 1), width << i)
            for j in range(1, depth - i):
                self.nets[f"{i}_{j}"] = self.pair((width << i) * j + (width << (i + 1)), width << i)
        self.out = nn.Conv2d(width, 1, 1)

    @staticmethod
    def pair(width: int, out: int) -> nn.Module:
        return nn.Sequential(convolution(width, out), convolution(out, out))

    def forward(self, x: Tensor) -> Tensor:
        found: dict[tuple[int, int], Tensor] = {}
        for i in range(self.depth):
            found[i, 0] = self.nets[f"{i}_0"](x if not i else f.max_pool2d(found[i - 1, 0], 2))
        for j in range(1, self.depth):
            for i in range(self.depth - j):
                up = f.interpolate(found[i + 1, j - 1], scale_factor=2, mode="bilinear", align_corners=True)
                found[i, j] = self.nets[f"{i}_{j}"](torch.cat((*(found[i, k] for k in range(j)), up), 1))
        return self.out(found[0, self.depth - 1])


@program(small={"images": 1, "size": 16, "width": 4, "depth": 3}, training=True)
def unet_plus(images: int = 4, size: int = 256, width: int = 32, depth: int = 4) -> Made:
    """U-Net++ of four levels."""
    return Nested(width, depth), normal(images, 3, size, size)


class Atrous(nn.Module):
    """Convolutions of several reaches, and the whole picture's mean, side by side (DeepLab's)."""

    def __init__(self, width: int, out: int, classes: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, out, 3, padding=d, dilation=d, bias=False), nn.BatchNorm2d(out), nn.ReLU())
            for d in (6, 12, 18)
        )
        self.one, self.mean = convolution(width, out, 1), nn.Sequential(nn.Conv2d(width, out, 1), nn.ReLU())
        self.join, self.last = convolution(5 * out, out, 1), nn.Conv2d(out, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.mean(x.mean((2, 3), keepdim=True)).expand(-1, -1, *x.shape[-2:])
        y = self.join(torch.cat((self.one(x), *(branch(x) for branch in self.branches), mean), 1))
        return f.interpolate(self.last(y), scale_factor=8, mode="bilinear", align_corners=False)


@program(small={"images": 1, "size": 8, "width": 16, "out": 8, "classes": 3}, training=True)
def deeplab_head(images: int = 4, size: int = 64, width: int = 2048, out: int = 256, classes: int = 21) -> Made:
    """DeepLab's head."""
    return Atrous(width, out, classes), normal(images, width, size, size)


class Pose(nn.Module):
    """Heat maps, and where their mass lies."""

    def __init__(self, width: int, joints: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [nn.ConvTranspose2d(width, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.up, self.out = nn.Sequential(*layers), nn.Conv2d(width, joints, 1)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.out(self.up(x))
        weight = torch.softmax(maps.flatten(2).float(), -1).view(maps.shape)
        ys, xs = (torch.linspace(0, 1, n, device=x.device) for n in maps.shape[-2:])
        return torch.stack(((weight.sum(2) * xs).sum(-1), (weight.sum(3) * ys).sum(-1)), -1).to(x.dtype)


@program(small={"images": 1, "height": 4, "width": 8, "joints": 3}, training=True)
def pose_head(images: int = 32, height: int = 16, width: int = 256, joints: int = 17) -> Made:
    """The head of a net that finds joints."""
    return Pose(width, joints), normal(images, width, height, height * 3 // 4)


class Dice(nn.Module):
    """Dice and focal loss of masks."""

    def forward(self, x: Tensor, masks: Tensor) -> Tensor:
        x, y = x.float().flatten(1), (masks > 0.5).float().flatten(1)
        p = torch.sigmoid(x)
        dice = 1 - (2 * (p * y).sum(1) + 1) / (p.sum(1) + y.sum(1) + 1)
        right = p * y + (1 - p) * (1 - y)
        focal = f.binary_cross_entropy_with_logits(x, y, reduction="none") * (1 - right).square()
        return dice.mean() + focal.mean()


@program(small={"count": 2, "size": 8})
def mask_losses(count: int = 64, size: int = 256) -> Made:
    """Losses of masks."""
    return Dice(), normal(count, size, size), uniform(count, size, size)
