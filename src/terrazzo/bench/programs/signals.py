"""Signals: spectra, filters, wavelets, arrays of microphones, pictures of pulses."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Made, normal, program, uniform


class Spectrum(nn.Module):
    """STFT, mel filters, logarithms, a cosine transform, deltas: MFCCs with their means taken away."""

    def __init__(self, size: int, mels: int, kept: int) -> None:
        super().__init__()
        self.size = size
        edges = torch.linspace(0, size / 2, mels + 2)
        bins = torch.arange(size // 2 + 1)[:, None]
        up, down = (bins - edges[:-2]) / edges.diff()[:-1], (edges[2:] - bins) / edges.diff()[1:]
        self.mel = nn.Parameter(torch.minimum(up, down).clamp(min=0))
        angle = (torch.arange(mels) + 0.5)[:, None] * torch.arange(kept) * (math.pi / mels)
        self.register_buffer("cosine", angle.cos() * math.sqrt(2 / mels))

    def forward(self, x: Tensor) -> Tensor:
        emphasised = (x[:, 1:] - 0.97 * x[:, :-1]).float()
        window = torch.hann_window(self.size, device=x.device)
        s = torch.stft(emphasised, self.size, self.size // 4, window=window, return_complex=True)
        power = s.real.square() + s.imag.square()
        mel = torch.log(power.transpose(1, 2) @ self.mel.float() + 1e-6)
        c = (mel @ self.cosine.float()).transpose(1, 2)
        c = c - c.mean(-1, keepdim=True)
        padded = f.pad(c, (2, 2), mode="replicate")
        delta = (padded[..., 3:-1] - padded[..., 1:-3] + 2 * (padded[..., 4:] - padded[..., :-4])) / 10
        return torch.cat((c, delta), 1)


@program(small={"count": 2, "samples": 200, "size": 32, "mels": 8, "kept": 5}, training=True, dtypes=("f32",))
def cepstra(count: int = 32, samples: int = 160_000, size: int = 512, mels: int = 80, kept: int = 40) -> Made:
    """Mel-frequency cepstra of sounds."""
    return Spectrum(size, mels, kept), normal(count, samples)


def phases(magnitude: Tensor) -> Tensor:
    """Griffin and Lim: four times to the signal and back; windows overlap by three quarters."""
    size = 2 * (magnitude.shape[1] - 1)
    hop, frames = size // 4, magnitude.shape[2]
    window = torch.hann_window(size, device=magnitude.device)

    def signal(s: Tensor) -> Tensor:
        y = torch.fft.irfft(s, n=size, dim=1) * window[:, None]
        length = (1, size + hop * (frames - 1))
        return f.fold(y, length, (1, size), stride=(1, hop))[:, 0, 0] / 1.5

    s = torch.complex(magnitude.float(), torch.zeros_like(magnitude, dtype=torch.float32))
    for _ in range(4):
        back = torch.fft.rfft(signal(s).unfold(-1, size, hop) * window, dim=-1).transpose(1, 2)
        s = magnitude * back / back.abs().clamp(min=1e-8)
    return signal(s)


@program(small={"count": 2, "bins": 17, "frames": 12}, dtypes=("f32",))
def griffin_lim(count: int = 16, bins: int = 513, frames: int = 400) -> Made:
    """Phases found from magnitudes."""
    return phases, uniform(count, bins, frames)


class Resampler(nn.Module):
    """Windowed sincs for every phase (polyphase), then a band by FIR filters with many taps."""

    def __init__(self, up: int, down: int, taps: int) -> None:
        super().__init__()
        self.up, self.down, self.width = up, down, taps
        at = torch.arange(-taps, taps + down) / down - torch.arange(up)[:, None] / up
        self.kernel = nn.Parameter(
            (torch.sinc(at) * torch.cos((at * down / taps / 2).clamp(-1, 1) * math.pi).square())[:, None]
        )
        self.band = nn.Parameter(torch.hann_window(255).view(1, 1, -1) / 128)

    def forward(self, x: Tensor) -> Tensor:
        y = f.conv1d(f.pad(x[:, None], (self.width, self.width + self.down)), self.kernel, stride=self.down)
        y = y.transpose(1, 2).reshape(x.shape[0], 1, -1)
        return f.conv1d(y, self.band, padding=127)[:, 0]


@program(small={"count": 2, "samples": 300, "up": 3, "down": 2, "taps": 4}, training=True)
def resampling(count: int = 16, samples: int = 441_000, up: int = 160, down: int = 441, taps: int = 475) -> Made:
    """From 44100 to 16000 samples a second."""
    return Resampler(up, down, taps), normal(count, samples)


LOW = (0.4829629131, 0.8365163037, 0.2241438680, -0.1294095226)
"""The Daubechies wavelet of four taps."""


def wavelets(x: Tensor, limit: Tensor) -> Tensor:
    """Three levels of a separable wavelet transform, soft thresholds, and back."""
    low = torch.tensor(LOW, device=x.device, dtype=x.dtype)
    high = low.flip(0) * torch.tensor((1, -1, 1, -1), device=x.device, dtype=x.dtype)
    bank = torch.stack([torch.outer(a, b) for a in (low, high) for b in (low, high)])[:, None]
    kept, channels = [], x.shape[1]
    filters = bank.repeat(channels, 1, 1, 1)
    for level in range(3):
        y = f.conv2d(f.pad(x, (2, 2, 2, 2), mode="circular")[..., 1:-1, 1:-1], filters, stride=2, groups=channels)
        y = y.unflatten(1, (channels, 4))
        detail = y[:, :, 1:]
        kept.append(torch.sign(detail) * f.relu(detail.abs() - limit[level]))
        x = y[:, :, 0]
    for detail in reversed(kept):
        y = torch.cat((x[:, :, None], detail), 2).flatten(1, 2)
        x = f.conv_transpose2d(f.pad(y, (1, 1, 1, 1), mode="circular"), filters, stride=2, groups=channels)[
            ..., 3:-3, 3:-3
        ]
    return x


@program(small={"images": 1, "size": 32})
def wavelet_shrinkage(images: int = 16, size: int = 512) -> Made:
    """Noise taken away between wavelets."""
    return wavelets, normal(images, 3, size, size), uniform(3)


def lifted(x: Tensor) -> Tensor:
    """The 9/7 wavelet of JPEG 2000 by lifting, rows and columns, two levels, in place in one picture."""
    a, b, c, d = -1.586134342, -0.052980118, 0.882911075, 0.443506852
    out = x.clone()
    n = x.shape[-1]
    for _ in range(2):
        part = out[..., :n, :n]
        for _ in range(2):
            even, odd = part[..., ::2], part[..., 1::2]
            odd = odd + a * (even + torch.cat((even[..., 1:], even[..., -1:]), -1))
            even = even + b * (odd + torch.cat((odd[..., :1], odd[..., :-1]), -1))
            odd = odd + c * (even + torch.cat((even[..., 1:], even[..., -1:]), -1))
            even = even + d * (odd + torch.cat((odd[..., :1], odd[..., :-1]), -1))
            part = torch.cat((even * 0.81289, odd * 1.2302), -1).transpose(-1, -2)
        out[..., :n, :n] = part
        n //= 2
    return out


@program(small={"images": 1, "size": 16})
def lifting(images: int = 24, size: int = 512) -> Made:
    """Wavelets by lifting, written in place."""
    return lifted, normal(images, 3, size, size)


def beamformed(x: Tensor, mask: Tensor) -> Tensor:
    """MVDR by power iteration and a recursive inverse: spatial covariances of speech and noise for every frequency."""
    s = torch.complex(x[..., 0].float(), x[..., 1].float())  # microphones, frequencies, frames
    m = mask.float()
    speech = torch.einsum("bcft,bdft,bft->bfcd", s, s.conj(), torch.complex(m, m * 0))
    noise = torch.einsum("bcft,bdft,bft->bfcd", s, s.conj(), torch.complex(1 - m, m * 0))
    eye = torch.eye(s.shape[1], device=x.device)
    noise = noise / noise.diagonal(dim1=-2, dim2=-1).real.sum(-1)[..., None, None] + 0.1 * eye
    inverse = eye.to(noise.dtype) / (noise.abs().sum(-1).amax(-1)[..., None, None])
    for _ in range(6):
        inverse = inverse @ (2 * eye - noise @ inverse)
    w = inverse @ speech
    w = w[..., 0] / w.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None]
    return torch.view_as_real(torch.einsum("bfc,bcft->bft", w.conj(), s))


@program(small={"count": 1, "microphones": 3, "bins": 5, "frames": 7}, dtypes=("f32",))
def beamformer(count: int = 8, microphones: int = 6, bins: int = 257, frames: int = 500) -> Made:
    """A beamformer from masks."""
    return beamformed, normal(count, microphones, bins, frames, 2), uniform(count, bins, frames)


def pitches(x: Tensor, low: int, high: int, window: int) -> tuple[Tensor, Tensor]:
    """YIN: differences by lag, normalised by their running mean, the first dip refined by a parabola."""
    frames = x.unfold(-1, window + high, window // 2).float()
    base = frames[..., :window]
    lags = frames.unfold(-1, window, 1)[..., :high, :]
    d = (base[..., None, :] - lags).square().sum(-1)
    running = d * torch.arange(high, device=x.device) / d.cumsum(-1).clamp(min=1e-8)
    c = running[..., low:]
    dips = (c < 0.3) & (c <= torch.roll(c, -1, -1)) & (c <= torch.roll(c, 1, -1))
    first = torch.where(dips.any(-1), dips.float().argmax(-1), c.argmin(-1)).clamp(1, high - low - 2)
    a, b, e = (c.gather(-1, (first + k)[..., None])[..., 0] for k in (-1, 0, 1))
    return first + low + (a - e) / (2 * (a - 2 * b + e) + 1e-8), b


@program(small={"count": 2, "samples": 200, "low": 3, "high": 20, "window": 32}, dtypes=("f32",))
def pitch(count: int = 16, samples: int = 160_000, low: int = 32, high: int = 400, window: int = 1024) -> Made:
    """The pitch of voices (YIN's)."""
    return lambda x: pitches(x, low, high, window), normal(count, samples)


def radar(x: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    """Range, speed and angle by Fourier transforms; then cells that stand out of their surroundings (CFAR)."""
    s = torch.complex(x[..., 0].float(), x[..., 1].float()) * window.float()
    s = torch.fft.fft(torch.fft.fft(s, dim=-1), dim=-2)
    s = torch.fft.fftshift(torch.fft.fft(s, n=64, dim=1), dim=(1, 2))
    power = torch.log1p(s.abs()).amax(1, keepdim=True)
    outer, inner = (f.avg_pool2d(power, n, 1, n // 2, divisor_override=1) for n in (17, 5))
    around = (outer - inner) / (17 * 17 - 25)
    peak = (power == f.max_pool2d(power, 3, 1, 1)) & (power > around + 0.4)
    return peak[:, 0], power[:, 0]


@program(small={"count": 1, "antennas": 3, "pulses": 20, "samples": 24}, dtypes=("f32",))
def radar_cube(count: int = 8, antennas: int = 12, pulses: int = 128, samples: int = 256) -> Made:
    """Targets in a radar's cube."""
    return radar, normal(count, antennas, pulses, samples, 2), uniform(samples)


class Oscillators(nn.Module):
    """DDSP: controls of a GRU-less net, harmonics by summed phases, filtered noise by windows of spectra."""

    def __init__(self, width: int, harmonics: int, bands: int, hop: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.LayerNorm(width), nn.LeakyReLU(), nn.Linear(width, harmonics + bands + 1)
        )
        self.harmonics, self.hop = harmonics, hop

    def forward(self, pitch: Tensor, loud: Tensor, noise: Tensor) -> Tensor:
        out = self.net(torch.stack((pitch, loud), -1)).float()
        amp, h, bands = out.split((1, self.harmonics, out.shape[-1] - 1 - self.harmonics), -1)
        hz = (80 + 400 * torch.sigmoid(pitch.float()))[..., None]
        k = torch.arange(1, self.harmonics + 1, device=pitch.device)
        h = torch.softmax(h.masked_fill(hz * k > 8000, -1e9), -1) * torch.sigmoid(amp)
        up = f.interpolate(h.transpose(1, 2), scale_factor=self.hop, mode="linear")
        rate = f.interpolate(hz.transpose(1, 2), scale_factor=self.hop, mode="linear")[:, 0]
        phase = (6.283185307 * rate / 16000).cumsum(-1)
        tone = (torch.sin(phase[:, None] * k[:, None]) * up).sum(1)
        taps = torch.fft.irfft(torch.complex(torch.sigmoid(bands), bands * 0))
        taps = torch.roll(taps, taps.shape[-1] // 2, -1) * torch.hann_window(taps.shape[-1], device=pitch.device)
        n = self.hop + taps.shape[-1] - 1
        wet = torch.fft.irfft(torch.fft.rfft(noise.float(), n) * torch.fft.rfft(taps, n), n)[..., : self.hop]
        return tone + wet.flatten(1)


@program(small={"count": 2, "frames": 5, "width": 8, "harmonics": 4, "bands": 5, "hop": 16}, training=True)
def synthesiser(
    count: int = 8, frames: int = 250, width: int = 512, harmonics: int = 64, bands: int = 65, hop: int = 160
) -> Made:
    """A synthesiser with learned controls."""
    return (
        Oscillators(width, harmonics, bands, hop),
        normal(count, frames),
        normal(count, frames),
        normal(count, frames, hop),
    )


def biquads(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Recursive filters of second order in series, blocks of samples by powers of their companion matrix."""
    n = 32
    rows = x.float().unflatten(-1, (-1, n))
    for k in range(a.shape[0]):
        a1, a2 = torch.tanh(a[k].float()).unbind()
        taps = [torch.ones_like(a1), -a1]
        for _ in range(n - 2):
            taps.append(-a1 * taps[-1] - a2 * taps[-2])
        h = torch.stack(taps)
        i = torch.arange(n, device=x.device)
        toeplitz = torch.where(i[:, None] >= i, h[(i[:, None] - i).clamp(min=0)], 0.0)
        bk = b[k].float()
        moved = f.pad(rows.flatten(1), (2, 0))
        u = (bk[0] * moved[:, 2:] + bk[1] * moved[:, 1:-1] + bk[2] * moved[:, :-2]).unflatten(-1, (-1, n))
        free = u @ toeplitz.T
        one, two = torch.cat((h[1:], -a1 * h[-1:] - a2 * h[-2:-1])), -a2 * h
        state, outs = rows.new_zeros(2, x.shape[0]), []
        for block in range(rows.shape[1]):
            y = free[:, block] + state[0][:, None] * one + state[1][:, None] * two
            state = torch.stack((y[:, -1], y[:, -2]))
            outs.append(y)
        rows = torch.stack(outs, 1)
    return rows.flatten(1)


@program(small={"count": 2, "samples": 96, "filters": 2}, dtypes=("f32",))
def recursive_filters(count: int = 512, samples: int = 1024, filters: int = 3) -> Made:
    """An equaliser of recursive filters."""
    return biquads, normal(count, samples), normal(filters, 2) * 0.3, normal(filters, 3)
