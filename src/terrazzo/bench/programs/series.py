"""Nets for series in time."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.huggingface import other
from terrazzo.bench.programs.registry import Made, normal, program

other(
    "patchtst",
    "series",
    "PatchTSTModel",
    lambda count, length, channels: {"past_values": normal(count, length, channels)},
    (32, 512, 7),
    (2, 64, 2),
    {"context_length": 64, "num_input_channels": 2, "d_model": 16, "ffn_dim": 32},
    training=True,
    context_length=512,
    num_input_channels=7,
)
other(
    "patchtsmixer",
    "series",
    "PatchTSMixerModel",
    lambda count, length, channels: {"past_values": normal(count, length, channels)},
    (32, 512, 7),
    (2, 64, 2),
    {"context_length": 64, "num_input_channels": 2, "d_model": 8},
    context_length=512,
    num_input_channels=7,
    d_model=64,
)


class Temporal(nn.Module):
    """Two dilated causal convolutions with a shortcut."""

    def __init__(self, width: int, out: int, dilation: int) -> None:
        super().__init__()
        self.pad = 2 * dilation
        self.first, self.second = nn.Conv1d(width, out, 3, dilation=dilation), nn.Conv1d(out, out, 3, dilation=dilation)
        self.same = nn.Conv1d(width, out, 1) if width != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = f.relu(self.first(f.pad(x, (self.pad, 0))))
        return f.relu(self.same(x) + f.relu(self.second(f.pad(y, (self.pad, 0)))))


@program(small={"count": 2, "length": 24, "width": 4, "inner": 8, "layers": 2}, training=True)
def tcn(count: int = 32, length: int = 2048, width: int = 32, inner: int = 128, layers: int = 5) -> Made:
    """A temporal convolutional net."""
    blocks = [Temporal(width if not k else inner, inner, 1 << k) for k in range(layers)]
    return nn.Sequential(*blocks, nn.Conv1d(inner, width, 1)), normal(count, width, length)


@program(small={"count": 2, "length": 32, "width": 4, "inner": 8})
def dilated_pair(count: int = 32, length: int = 4096, width: int = 64, inner: int = 128) -> Made:
    """Two dilated convolutions."""
    layers = (
        nn.Conv1d(width, inner, 3, padding=2, dilation=2),
        nn.ReLU(),
        nn.Conv1d(inner, inner, 3, padding=4, dilation=4),
        nn.ReLU(),
    )
    return nn.Sequential(*layers), normal(count, width, length)


class Block(nn.Module):
    """What explains a series, and what it says of the next part (N-BEATS's)."""

    def __init__(self, length: int, ahead: int, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for k in range(4):
            layers += [nn.Linear(width if k else length, width), nn.ReLU()]
        self.net, self.both, self.length = nn.Sequential(*layers), nn.Linear(width, length + ahead), length

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        both = self.both(self.net(x))
        return x - both[:, : self.length], both[:, self.length :]


class NBeats(nn.Module):
    """Blocks, each over what those before left."""

    def __init__(self, length: int, ahead: int, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(length, ahead, width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor | float = 0.0
        for block in self.blocks:
            x, said = block(x)
            total = total + said
        return total


@program(small={"count": 3, "length": 12, "ahead": 4, "width": 16, "blocks": 2}, training=True)
def nbeats(count: int = 4096, length: int = 240, ahead: int = 48, width: int = 512, blocks: int = 6) -> Made:
    """N-BEATS."""
    return NBeats(length, ahead, width, blocks), normal(count, length)


class SparseAttention(nn.Module):
    """Only the queries that differ most attend, the others take the mean (Informer's, over every key)."""

    def __init__(self, width: int, heads: int, queries: int) -> None:
        super().__init__()
        self.heads, self.queries = heads, queries
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.distil = nn.Sequential(
            nn.Conv1d(width, width, 3, padding=1), nn.BatchNorm1d(width), nn.ELU(), nn.MaxPool1d(3, 2, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        spread = scores.amax(-1) - scores.mean(-1)
        least = spread.topk(self.queries, -1).values[..., -1:]
        mixed = torch.where((spread >= least)[..., None], torch.softmax(scores, -1) @ v, v.mean(2, keepdim=True))
        return self.distil((x + self.out(mixed.transpose(1, 2).flatten(2))).transpose(1, 2)).transpose(1, 2)


@program(small={"count": 2, "length": 16, "width": 16, "heads": 2, "queries": 4}, dtypes=("f32",))  # which attend
def informer(count: int = 16, length: int = 512, width: int = 512, heads: int = 8, queries: int = 32) -> Made:
    """A layer of Informer."""
    return SparseAttention(width, heads, queries), normal(count, length, width)


class Decomposed(nn.Module):
    """A moving mean, and a linear layer for it and for the rest (DLinear's)."""

    def __init__(self, length: int, ahead: int, taps: int) -> None:
        super().__init__()
        self.taps, self.slow, self.fast = taps, nn.Linear(length, ahead), nn.Linear(length, ahead)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        slow = f.avg_pool1d(f.pad(x, (self.taps // 2, self.taps // 2), mode="replicate"), self.taps, 1)
        return (self.slow(slow) + self.fast(x - slow)).transpose(1, 2)


@program(small={"count": 2, "length": 16, "channels": 3, "ahead": 4, "taps": 5}, training=True)
def dlinear(count: int = 64, length: int = 512, channels: int = 321, ahead: int = 96, taps: int = 25) -> Made:
    """DLinear."""
    return Decomposed(length, ahead, taps), normal(count, length, channels)


class Variables(nn.Module):
    """A transformer whose tokens are whole series (iTransformer's), each normed by its own mean and spread."""

    def __init__(self, length: int, ahead: int, width: int, heads: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(length, width), nn.Linear(width, ahead)
        self.layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, activation="gelu"
        )

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = x.mean(1, keepdim=True), torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5)
        y = self.out(self.layer(self.into(((x - mean) / spread).transpose(1, 2))))
        return y.transpose(1, 2) * spread + mean


@program(small={"count": 2, "length": 12, "channels": 5, "ahead": 4, "width": 16, "heads": 2}, training=True)
def itransformer(
    count: int = 32, length: int = 96, channels: int = 321, ahead: int = 96, width: int = 512, heads: int = 8
) -> Made:
    """A layer of iTransformer."""
    return Variables(length, ahead, width, heads), normal(count, length, channels)


class Periods(nn.Module):
    """A series folded by a period, as a picture (TimesNet's, for one period)."""

    def __init__(self, width: int, period: int) -> None:
        super().__init__()
        self.period = period
        kernels = (nn.Conv2d(width, width, 2 * k + 1, padding=k) for k in range(3))
        self.kernels, self.norm = nn.ModuleList(kernels), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(1, 2).unflatten(-1, (-1, self.period))
        y = f.gelu(torch.stack([kernel(y) for kernel in self.kernels], -1).mean(-1))
        return self.norm(x + y.flatten(2).transpose(1, 2))


@program(small={"count": 2, "length": 12, "width": 8, "period": 4}, training=True)
def timesnet(count: int = 32, length: int = 192, width: int = 64, period: int = 24) -> Made:
    """A block of TimesNet."""
    return Periods(width, period), normal(count, length, width)


class Frequencies(nn.Module):
    """A linear layer over the low frequencies of a series, and a kernel of weights there (FNO's)."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes, self.skip = modes, nn.Conv1d(width, width, 1)
        self.real, self.imaginary = (nn.Parameter(torch.randn(width, width, modes) / width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        low = torch.fft.rfft(x)[..., : self.modes]
        real = torch.einsum("bim,iom->bom", low.real, self.real) - torch.einsum(
            "bim,iom->bom", low.imag, self.imaginary
        )
        imaginary = torch.einsum("bim,iom->bom", low.real, self.imaginary) + torch.einsum(
            "bim,iom->bom", low.imag, self.real
        )
        return f.gelu(torch.fft.irfft(torch.complex(real, imaginary), n=x.shape[-1]) + self.skip(x))


@program(small={"count": 2, "width": 4, "length": 16, "modes": 4}, dtypes=("f32",))
def fourier_operator(count: int = 32, width: int = 64, length: int = 1024, modes: int = 32) -> Made:
    """A layer of a Fourier neural operator."""
    return Frequencies(width, modes), normal(count, width, length)
