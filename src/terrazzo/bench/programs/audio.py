"""Nets for sound and speech."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.huggingface import TINY, other, tokens
from terrazzo.bench.programs.registry import Made, normal, program

TWO: dict[str, Any] = {"num_hidden_layers": 2}
CONVOLVED: dict[str, Any] = {
    **TINY,
    "conv_dim": (16,) * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}


def wave(count: int, length: int) -> Mapping[str, Tensor]:
    """Sound, sampled."""
    return {"input_values": normal(count, length)}


def heard(count: int, bins: int, frames: int, length: int) -> Mapping[str, Tensor]:
    """A spectrogram, and the text so far."""
    return {"input_features": normal(count, bins, frames), "decoder_input_ids": tokens(count, length)}


def spectrogram(count: int, frames: int, bins: int) -> Mapping[str, Tensor]:
    """Frames of a spectrogram."""
    return {"input_features": normal(count, frames, bins)}


def wave_frames(count: int, frames: int, bins: int) -> Mapping[str, Tensor]:
    """The same by another name."""
    return {"input_values": normal(count, frames, bins)}


other("wav2vec2", "audio", "Wav2Vec2Model", wave, (4, 160_000), (1, 4000), CONVOLVED, training=True, **TWO)
other("hubert", "audio", "HubertModel", wave, (4, 80_000), (1, 4000), CONVOLVED, **TWO)
other("wavlm", "audio", "WavLMModel", wave, (4, 80_000), (1, 4000), CONVOLVED, **TWO)
other("unispeech", "audio", "UniSpeechModel", wave, (4, 80_000), (1, 4000), CONVOLVED, **TWO)
other("data2vec_audio", "audio", "Data2VecAudioModel", wave, (4, 80_000), (1, 4000), CONVOLVED, **TWO)
other(
    "whisper",
    "audio",
    "WhisperModel",
    heard,
    (4, 80, 3000, 128),
    (1, 80, 64, 8),
    {
        "d_model": 64,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "max_source_positions": 32,
    },
    training=True,
    encoder_layers=2,
    decoder_layers=2,
    d_model=768,
    encoder_attention_heads=12,
    decoder_attention_heads=12,
    encoder_ffn_dim=3072,
    decoder_ffn_dim=3072,
    use_cache=False,
)
other("wav2vec2_conformer", "audio", "Wav2Vec2ConformerModel", wave, (2, 80_000), (1, 4000), CONVOLVED, **TWO)
other("wav2vec2_bert", "audio", "Wav2Vec2BertModel", spectrogram, (4, 500, 160), (1, 20, 160), TINY, **TWO)
other(
    "encodec",
    "audio",
    "EncodecModel",
    lambda count, length: {"input_values": normal(count, 1, length)},
    (2, 24_000),
    (1, 640),
    {"hidden_size": 16, "num_filters": 4, "codebook_size": 16},
    pick=lambda out: out.audio_values,
)
other(
    "spectrogram_transformer",
    "audio",
    "ASTModel",
    wave_frames,
    (8, 1024, 128),
    (1, 64, 32),
    {**TINY, "max_length": 64, "num_mel_bins": 32},
    training=True,
    **TWO,
)


class ConformerBlock(nn.Module):
    """Half a feed-forward net, attention, a convolution over time, half a feed-forward net."""

    def __init__(self, width: int, heads: int, taps: int) -> None:
        super().__init__()
        self.heads = heads
        self.feed = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
            for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.into, self.outof = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.depth, self.batch = nn.Conv1d(width, width, taps, padding=taps // 2, groups=width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.feed[0](x)
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(f.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y = f.glu(self.into(self.norms[1](x).transpose(1, 2)), 1)
        x = x + self.outof(f.silu(self.batch(self.depth(y)))).transpose(1, 2)
        return self.norms[2](x + 0.5 * self.feed[1](x))


@program(small={"count": 2, "length": 24, "width": 32, "heads": 4, "taps": 5}, training=True)
def conformer(count: int = 16, length: int = 512, width: int = 512, heads: int = 8, taps: int = 31) -> Made:
    """Two blocks of a conformer."""
    blocks = (ConformerBlock(width, heads, taps) for _ in range(2))
    return nn.Sequential(*blocks), normal(count, length, width)


class SpeechEncoder(nn.Module):
    """Convolutions over characters, and an LSTM in both directions (Tacotron 2's encoder)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = (nn.Conv1d(width, width, 5, padding=2), nn.BatchNorm1d(width), nn.ReLU())
        self.convolutions = nn.Sequential(
            *layers, nn.Conv1d(width, width, 5, padding=2), nn.BatchNorm1d(width), nn.ReLU()
        )
        self.memory = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.memory(self.convolutions(x).transpose(1, 2))[0]


@program(small={"count": 2, "length": 6, "width": 16})
def tacotron_encoder(count: int = 16, length: int = 64, width: int = 512) -> Made:
    """Tacotron 2's encoder."""
    return SpeechEncoder(width), normal(count, width, length)


@program(small={"count": 2, "frames": 20, "bins": 8, "width": 16}, training=True)
def tacotron_postnet(count: int = 16, frames: int = 800, bins: int = 80, width: int = 512) -> Made:
    """Tacotron 2's last convolutions."""
    sizes = (bins, width, width, width, width, bins)
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Conv1d(before, after, 5, padding=2), nn.BatchNorm1d(after), nn.Tanh()]
    return nn.Sequential(*layers[:-1]), normal(count, bins, frames)


class Gated(nn.Module):
    """A dilated convolution, gated, with a shortcut and a way out (WaveNet's)."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.pad = dilation
        self.both, self.out = nn.Conv1d(width, 2 * width, 2, dilation=dilation), nn.Conv1d(width, 2 * width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.both(f.pad(x, (self.pad, 0))).chunk(2, 1)
        kept, skipped = self.out(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
        return x + kept, skipped


class WaveNet(nn.Module):
    """Gated convolutions of growing reach; what skips is added."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 1)
        self.layers = nn.ModuleList(Gated(width, 1 << k) for k in range(layers))
        self.last = nn.Sequential(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, 256, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        total = torch.zeros_like(x)
        for layer in self.layers:
            x, skipped = layer(x)
            total = total + skipped
        return self.last(total)


@program(small={"count": 1, "length": 64, "width": 8, "layers": 3}, training=True)
def wavenet(count: int = 4, length: int = 16_000, width: int = 128, layers: int = 10) -> Made:
    """WaveNet over a second."""
    return WaveNet(width, layers), normal(count, 1, length)


class Residual(nn.Module):
    """Dilated convolutions, added (HiFi-GAN's)."""

    def __init__(self, width: int, taps: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(width, width, taps, dilation=d, padding=taps // 2 * d) for d in (1, 3, 5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(f.leaky_relu(x, 0.1))
        return x


class Vocoder(nn.Module):
    """From a spectrogram to sound: transposed convolutions, each with the mean of three residual nets."""

    def __init__(self, bins: int, width: int, rates: tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(bins, width, 7, padding=3), nn.Conv1d(width >> len(rates), 1, 7, padding=3)
        self.ups = nn.ModuleList(
            nn.ConvTranspose1d(width >> k, width >> (k + 1), 2 * r, r, r // 2) for k, r in enumerate(rates)
        )
        self.nets = nn.ModuleList(
            nn.ModuleList(Residual(width >> (k + 1), taps) for taps in (3, 7, 11)) for k in range(len(rates))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for up, nets in zip(self.ups, self.nets, strict=True):
            x = up(f.leaky_relu(x, 0.1))
            x = sum(net(x) for net in nets) / len(nets)
        return torch.tanh(self.last(f.leaky_relu(x)))


@program(small={"count": 1, "frames": 8, "bins": 8, "width": 32, "rates": (2, 2)}, training=True)
def hifigan(
    count: int = 4, frames: int = 128, bins: int = 80, width: int = 512, rates: tuple[int, ...] = (8, 8, 2, 2)
) -> Made:
    """HiFi-GAN's generator."""
    return Vocoder(bins, width, rates), normal(count, bins, frames)


class Coder(nn.Module):
    """Sound down to frames by strided convolutions, and up again (EnCodec's, without its codes)."""

    def __init__(self, width: int, rates: tuple[int, ...]) -> None:
        super().__init__()
        down: list[nn.Module] = [nn.Conv1d(1, width, 7, padding=3)]
        up: list[nn.Module] = []
        for k, r in enumerate(rates):
            down += [nn.ELU(), nn.Conv1d(width << k, width << (k + 1), 2 * r, r, r // 2)]
            up = [nn.ELU(), nn.ConvTranspose1d(width << (k + 1), width << k, 2 * r, r, r // 2), *up]
        self.down, self.up = nn.Sequential(*down), nn.Sequential(*up, nn.ELU(), nn.Conv1d(width, 1, 7, padding=3))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


@program(small={"count": 1, "length": 64, "width": 4, "rates": (2, 4)}, training=True)
def sound_coder(count: int = 8, length: int = 48_000, width: int = 32, rates: tuple[int, ...] = (2, 4, 4, 8)) -> Made:
    """EnCodec's convolutions."""
    return Coder(width, rates), normal(count, 1, length)


class Separator(nn.Module):
    """Sound to frames, masks by depthwise convolutions over time, and back (Conv-TasNet's)."""

    def __init__(self, width: int, inner: int, blocks: int) -> None:
        super().__init__()
        self.into, self.back = nn.Conv1d(1, width, 16, 8, bias=False), nn.ConvTranspose1d(width, 1, 16, 8, bias=False)
        self.norm = nn.GroupNorm(1, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(width, inner, 1),
                nn.PReLU(),
                nn.GroupNorm(1, inner),
                nn.Conv1d(inner, inner, 3, padding=1 << k, dilation=1 << k, groups=inner),
                nn.PReLU(),
                nn.GroupNorm(1, inner),
                nn.Conv1d(inner, width, 1),
            )
            for k in range(blocks)
        )
        self.mask = nn.Conv1d(width, 2 * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        frames = self.into(x)
        y = self.norm(frames)
        for block in self.blocks:
            y = y + block(y)
        masks = torch.sigmoid(self.mask(y)).unflatten(1, (2, -1))
        return self.back((frames[:, None] * masks).flatten(0, 1)).view(len(x), 2, -1)


@program(small={"count": 1, "length": 128, "width": 16, "inner": 24, "blocks": 2}, training=True)
def conv_tasnet(count: int = 4, length: int = 32_000, width: int = 256, inner: int = 512, blocks: int = 6) -> Made:
    """Conv-TasNet's shape."""
    return Separator(width, inner, blocks), normal(count, 1, length)


class MelNet(nn.Module):
    """A spectrogram by a Fourier transform, its bands, and a small convolutional net."""

    def __init__(self, window: int, bins: int, width: int) -> None:
        super().__init__()
        self.window = window
        self.register_buffer("shape", torch.hann_window(window))
        self.bands = nn.Parameter(torch.rand(window // 2 + 1, bins))
        self.net = nn.Sequential(nn.Conv2d(1, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU())
        self.out = nn.Linear(width, 35)

    def forward(self, x: Tensor) -> Tensor:
        power = torch.fft.rfft(x.unfold(-1, self.window, self.window // 2) * self.shape).abs().square()
        return self.out(self.net(torch.log(power @ self.bands + 1e-3)[:, None]).mean((2, 3)))


@program(small={"count": 2, "length": 256, "window": 64, "bins": 8, "width": 4}, dtypes=("f32",))
def keyword_spotting(count: int = 64, length: int = 16_000, window: int = 512, bins: int = 80, width: int = 64) -> Made:
    """Words found in a second of sound."""
    return MelNet(window, bins, width), normal(count, length)
