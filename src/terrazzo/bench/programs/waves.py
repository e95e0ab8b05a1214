"""Waves and spectra: complex fields, Fourier optics, transforms of sound, nets of complex numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Learned, Made, normal, program, uniform


def kinetic(n: int, like: Tensor) -> Tensor:
    """Squares of wave numbers on a grid."""
    k = torch.fft.fftfreq(n, 1 / n, device=like.device)
    return k[:, None].square() + k.square()


def split_steps(psi: Tensor, potential: Tensor) -> tuple[Tensor, Tensor]:
    """Schroedinger's equation: phases in space and in wave numbers by turns."""
    wave = torch.view_as_complex(psi.float())
    phase = torch.polar(torch.ones_like(potential), -0.05 * potential)
    turn = torch.exp(-0.0005j * kinetic(wave.shape[-1], potential))
    for _ in range(4):
        wave = torch.fft.ifft2(torch.fft.fft2(wave * phase) * turn) * phase
        wave = wave * (1 - 0.01j * wave.abs().square())
    return torch.view_as_real(wave), wave.abs().square().mean((-2, -1))


@program(small={"count": 1, "size": 8}, dtypes=("f32",))
def quantum_waves(count: int = 8, size: int = 512) -> Made:
    """Split steps of a nonlinear Schroedinger equation."""
    return split_steps, normal(count, size, size, 2), uniform(size, size)


def phases(amplitude: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
    """Gerchberg and Saxton's: known amplitudes in both planes, phases kept; hybrid input and output between."""
    field = torch.polar(torch.ones_like(guess), guess)
    for k in range(6):
        far = torch.fft.fft2(field, norm="ortho")
        far = amplitude * far / (far.abs() + 1e-3)
        new = torch.fft.ifft2(far, norm="ortho")
        inside = new.real > 0
        field = torch.where(inside, new, field - 0.7 * new) if k % 2 else new
    return torch.view_as_real(field), (far.abs() - amplitude).square().mean()


@program(small={"count": 1, "size": 6}, dtypes=("f32",))
def phase_retrieval(count: int = 16, size: int = 256) -> Made:
    """Phases from amplitudes."""
    return phases, uniform(count, size, size), uniform(count, size, size)


def hologram(depth: Tensor, image: Tensor) -> Tensor:
    """The angular spectrum of a phase plate, propagated to a plane; how far its intensity is from an image."""
    n = image.shape[-1]
    field = torch.exp(1j * depth.float())
    transfer = torch.exp(1j * 40 * torch.sqrt((1 - kinetic(n, image) * (0.4 / n) ** 2).clamp(min=0)))
    far = torch.fft.ifft2(torch.fft.fft2(field) * transfer)
    return (far.real.square() + far.imag.square() - image.float()).square().mean((-2, -1))


@program(small={"count": 1, "size": 8}, training=True, dtypes=("f32",))
def computed_holograms(count: int = 8, size: int = 512) -> Made:
    """Holograms fitted to images."""
    return Learned(hologram, normal(count, size, size)), uniform(count, size, size)


class ModRelu(nn.Module):
    """Layers of complex numbers: complex weights, a ReLU of moduli, a norm by covariances of both parts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(width, width) / width**0.5) for _ in range(2))
        self.bias, self.out = nn.Parameter(torch.randn(width) * 0.1), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        for _ in range(2):
            z = z @ torch.complex(self.a.float(), self.b.float())
            m = z.abs()
            z = z * (f.relu(m + self.bias.float()) / (m + 1e-3))
            z = z - z.mean(0)
            z = z / (z.real.square().mean(0) + z.imag.square().mean(0) + 1e-5).sqrt()
        return self.out(torch.view_as_real(z).flatten(-2).to(x.dtype))


@program(small={"rows": 5, "width": 4}, training=True, dtypes=("f32",))
def complex_layers(rows: int = 8192, width: int = 512) -> Made:
    """A net of complex numbers."""
    return ModRelu(width), normal(rows, 2 * width)


def stretched(x: Tensor, window: Tensor) -> Tensor:
    """A phase vocoder: magnitudes between frames, phases added up, sound put together again."""
    s = torch.stft(x.float(), 512, 128, window=window.float(), return_complex=True)
    at = torch.arange(0, s.shape[-1] - 1, 1.25, device=x.device)
    low, part = at.long(), at - at.floor()
    a, b = s[..., low], s[..., low + 1]
    magnitude = (1 - part) * a.abs() + part * b.abs()
    expected = torch.arange(s.shape[1], device=x.device)[:, None] * (math.tau * 128 / 512)
    turn = b.angle() - a.angle() - expected
    turn = turn - math.tau * torch.round(turn / math.tau) + expected
    phase = a.angle()[..., :1] + torch.cat((torch.zeros_like(turn[..., :1]), turn[..., :-1].cumsum(-1)), -1)
    return torch.istft(torch.polar(magnitude, phase), 512, 128, window=window.float())


@program(small={"count": 1, "length": 2048}, dtypes=("f32",))
def phase_vocoder(count: int = 32, length: int = 131_072) -> Made:
    """Sound made longer."""
    return stretched, normal(count, length), 0.1 + uniform(512)


class Vocos(nn.Module):
    """A vocoder of ConvNeXt blocks whose head says magnitudes and phases; an inverse Fourier transform, overlapped."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(100, width, 7, padding=3)
        self.deep = nn.ModuleList(nn.Conv1d(width, width, 7, padding=3, groups=width) for _ in range(3))
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.up, self.down = (
            nn.ModuleList(nn.Linear(*s) for _ in range(3)) for s in ((width, 3 * width), (3 * width, width))
        )
        self.scale, self.head = nn.Parameter(torch.full((3, width), 0.1)), nn.Linear(width, 514)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for k in range(3):
            y = self.norm[k](self.deep[k](x).transpose(1, 2))
            x = x + (self.scale[k] * self.down[k](f.gelu(self.up[k](y)))).transpose(1, 2)
        m, p = self.head(x.transpose(1, 2)).float().chunk(2, -1)
        frames = torch.fft.irfft(torch.polar(torch.exp(m).clamp(max=100), p), n=512)
        frames = frames * torch.hann_window(512, device=x.device, dtype=frames.dtype)
        y = f.fold(frames.transpose(1, 2), (1, 512 + 128 * (x.shape[-1] - 1)), (1, 512), stride=(1, 128))
        return y[:, 0, 0, 192:-192]


@program(small={"count": 1, "length": 6, "width": 8}, training=True)
def spectral_vocoder(count: int = 16, length: int = 256, width: int = 512) -> Made:
    """Vocos: sound by spectra."""
    return Vocos(width), normal(count, 100, length)


def cosine_frames(mask: Tensor, x: Tensor) -> Tensor:
    """A modified discrete cosine transform by a product, bands masked, and back with overlaps added in place."""
    n = 256
    frames = x.unfold(-1, 2 * n, n)
    k, i = torch.arange(n, device=x.device), torch.arange(2 * n, device=x.device)
    basis = torch.cos(math.pi / n * (i[:, None] + 0.5 + n / 2) * (k + 0.5)) * (2 / n) ** 0.5
    window = torch.sin(math.pi * (i + 0.5) / (2 * n))
    basis = (window[:, None] * basis).to(x.dtype)
    y = (frames @ basis) * torch.sigmoid(mask)
    back = y @ basis.T
    out = torch.zeros_like(x)
    out.view(len(x), -1, n)[:, :-1] += back[..., :n]  # each frame's halves, where they lie
    out.view(len(x), -1, n)[:, 1:] += back[..., n:]
    return out


@program(small={"count": 2, "length": 1024}, training=True)
def cosine_codec(count: int = 64, length: int = 65536) -> Made:
    """Masks of a modified cosine transform."""
    return Learned(cosine_frames, normal(256)), normal(count, length)


class BandSplit(nn.Module):
    """BS-RoFormer: bands of a spectrum each with a layer of its own, attention along time and along bands, masks."""

    def __init__(self, width: int, heads: int, bands: tuple[int, ...]) -> None:
        super().__init__()
        self.bands, self.heads = bands, heads
        self.split = nn.ModuleList(nn.Sequential(nn.RMSNorm(2 * b), nn.Linear(2 * b, width)) for b in bands)
        self.qkv, self.out = (nn.ModuleList(nn.Linear(width, k * width) for _ in range(2)) for k in (3, 1))
        self.norm = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.mask = nn.ModuleList(nn.Linear(width, 2 * b) for b in bands)

    def attend(self, x: Tensor, k: int) -> Tensor:
        q, key, v = self.qkv[k](self.norm[k](x)).unflatten(-1, (3, self.heads, -1)).transpose(-2, -4).unbind(-3)
        d = q.shape[-1]
        rates = 10000 ** (-torch.arange(0, d, 2, device=x.device) / d)
        t = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
        c, s = torch.cos(t).to(x.dtype), torch.sin(t).to(x.dtype)

        def turned(y: Tensor) -> Tensor:
            a, b = y[..., ::2], y[..., 1::2]
            return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)

        y = f.scaled_dot_product_attention(turned(q), turned(key), v)
        return x + self.out[k](y.transpose(-2, -3).flatten(-2))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.stack([layer(part) for layer, part in zip(self.split, self.cut(x), strict=True)], 1)
        y = self.attend(y, 0)
        y = self.attend(y.transpose(1, 2), 1).transpose(1, 2)
        masks = torch.cat([layer(y[:, k]) for k, layer in enumerate(self.mask)], -1)
        a, b, c, d = x[..., ::2], x[..., 1::2], masks[..., ::2], masks[..., 1::2]
        return torch.stack((a * c - b * d, a * d + b * c), -1)

    def cut(self, x: Tensor) -> list[Tensor]:
        return list(x.split([2 * b for b in self.bands], -1))


@program(small={"count": 1, "frames": 4, "width": 8, "heads": 2, "part": 2}, training=True)
def band_split_attention(count: int = 4, frames: int = 400, width: int = 256, heads: int = 8, part: int = 8) -> Made:
    """A layer of a band-split transformer."""
    bands = (part,) * 8 + (2 * part,) * 8 + (4 * part,) * 4
    return BandSplit(width, heads, bands), normal(count, frames, 2 * sum(bands))


def delay_network(mix: Tensor, gains: Tensor, x: Tensor) -> Tensor:
    """A feedback delay network in the frequency domain: a small complex system solved at every frequency."""
    n = x.shape[-1]
    delays = torch.tensor([149, 211, 263, 293], device=x.device)
    turn = torch.arange(n // 2 + 1, device=x.device)[:, None] * (-math.tau / n) * delays
    turn = turn.to(mix.dtype)
    z = torch.polar(torch.ones_like(turn), turn)
    a = (0.3 * torch.tanh(mix.float())) * z[:, None, :]
    state = (gains.float() * torch.ones_like(z))[..., None]
    term = state
    for _ in range(6):  # Neumann's series
        term = a @ term
        state = state + term
    response = (gains.float() * (z * state[..., 0])).sum(-1)
    return torch.fft.irfft(torch.fft.rfft(x.float()) * response, n=n)


@program(small={"count": 2, "length": 64}, training=True, dtypes=("f32",))
def reverberation(count: int = 64, length: int = 65536) -> Made:
    """A reverberation fitted."""
    return Learned(delay_network, normal(4, 4), normal(4)), normal(count, length)


def spectral_poisson(rho: Tensor, charge: Tensor) -> tuple[Tensor, ...]:
    """Particles in a cell: Poisson's equation by real transforms, fields by differences, particles moved by them."""
    n = rho.shape[-1]
    k = torch.fft.fftfreq(n, 1 / n, device=rho.device)[:, None], torch.fft.rfftfreq(n, 1 / n, device=rho.device)
    square = k[0].square() + k[1].square()
    square = torch.where(square == 0, torch.ones_like(square), square)
    phi = torch.fft.irfft2(torch.fft.rfft2(rho) / square, s=(n, n))
    ex, ey = (phi.roll(-1, d) - phi.roll(1, d) for d in (-2, -1))
    at = (charge * n).long().clamp(max=n - 1)
    pull = torch.stack([e[:, at[:, 0], at[:, 1]] for e in (ex, ey)], -1)
    moved = (charge + 1e-3 * pull) % 1
    flat = (moved * n).long().clamp(max=n - 1)
    cells = rho.new_zeros(len(rho), n * n)
    cells.scatter_add_(1, flat[..., 0] * n + flat[..., 1], torch.ones_like(moved[..., 0]))
    return phi, pull, cells.view_as(rho)


@program(small={"count": 2, "size": 8, "particles": 10}, dtypes=("f32",))
def particles_in_cells(count: int = 8, size: int = 512, particles: int = 262_144) -> Made:
    """A step of a plasma."""
    return spectral_poisson, normal(count, size, size), uniform(particles, 2)
