"""Small models of the usual kinds, written out, with their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Two 3×3 convolutions with a shortcut, as in ResNet-18."""

    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout)
        self.conv2, self.bn2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False), nn.BatchNorm2d(cout)
        same = stride == 1 and cin == cout
        self.short = (
            nn.Identity() if same else nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))
        )

    def forward(self, x: Any) -> Any:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.short(x))


def resnet18() -> nn.Module:
    """The shape of ResNet-18, at an eighth of its width."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 8, 7, 2, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    width = 8
    for k, out in enumerate((8, 16, 32, 64)):
        layers += [Block(width, out, 1 if k == 0 else 2), Block(out, out, 1)]
        width = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class UNet(nn.Module):
    """Down twice, up twice, with skips; group norm, SiLU, transposed convolution and nearest upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.Conv2d(16, 32, 3, padding=1),
        )
        self.norms = nn.ModuleList(nn.GroupNorm(4, n) for n in (8, 16, 32))
        self.up1 = nn.ConvTranspose2d(32, 16, 2, 2)
        self.d, self.e, self.out = nn.Conv2d(32, 16, 3, padding=1), nn.Conv2d(24, 8, 3, padding=1), nn.Conv2d(8, 1, 1)

    def forward(self, x: Any) -> Any:
        a = F.silu(self.norms[0](self.a(x)))
        b = F.silu(self.norms[1](self.b(F.max_pool2d(a, 2))))
        c = F.silu(self.norms[2](self.c(F.avg_pool2d(b, 2))))
        d = F.silu(self.d(torch.cat([self.up1(c), b], 1)))
        e = F.silu(self.e(torch.cat([F.interpolate(d, scale_factor=2, mode="nearest"), a], 1)))
        return self.out(e)


class Mixer(nn.Module):
    """One MLP-mixer block over patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, 4)
        self.n1, self.n2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.tokens = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 64))
        self.channels = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Any) -> Any:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return (x + self.channels(self.n2(x))).mean(1)


def lstm_cell() -> nn.Module:
    """One step of an LSTM."""
    return nn.LSTMCell(24, 32)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "resnet18": (resnet18, lambda: (torch.randn(2, 3, 64, 64),)),
    "unet": (UNet, lambda: (torch.randn(1, 3, 32, 32),)),
    "mixer": (Mixer, lambda: (torch.randn(2, 3, 32, 32),)),
    "lstm cell": (lstm_cell, lambda: (torch.randn(4, 24), (torch.randn(4, 32), torch.randn(4, 32)))),
}
