"""Molecules, proteins and genomes: frames, triangles, bonds, alignments, counts of cells."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Learned, Made, normal, program, scattered, uniform, whole


class PointAttention(nn.Module):
    """AlphaFold's invariant point attention: scalars, points in local frames, and pairs, in one softmax."""

    def __init__(self, width: int, pair: int, heads: int, points: int) -> None:
        super().__init__()
        self.heads, self.points = heads, points
        self.q, self.kv = nn.Linear(width, 16 * heads), nn.Linear(width, 32 * heads)
        self.qp, self.kvp = nn.Linear(width, 3 * points * heads), nn.Linear(width, 9 * points * heads)
        self.bias, self.gain = nn.Linear(pair, heads), nn.Parameter(torch.zeros(heads))
        self.out = nn.Linear(heads * (16 + pair + 8 * points), width)

    def forward(self, s: Tensor, z: Tensor, turn: Tensor, place: Tensor) -> Tensor:
        n, h, p = s.shape[0], self.heads, self.points
        q, (k, v) = self.q(s).view(n, h, 16), self.kv(s).view(n, h, 32).chunk(2, -1)

        def moved(x: Tensor, count: int) -> Tensor:
            return torch.einsum("nij,nhpj->nhpi", turn, x.view(n, h, count, 3)) + place[:, None, None]

        qp, kvp = moved(self.qp(s), p), moved(self.kvp(s), 3 * p)
        kp, vp = kvp[:, :, :p], kvp[:, :, p:]
        far = (qp[:, None] - kp[None]).float().square().sum((-1, -2))
        a = torch.einsum("nhc,mhc->nmh", q, k).float() / math.sqrt(48) + self.bias(z).float() / math.sqrt(3)
        a = a - 0.5 * f.softplus(self.gain.float()) * math.sqrt(2 / (27 * p)) * far
        w = torch.softmax(a, 1).to(s.dtype)
        o = torch.einsum("nmh,mhc->nhc", w, v).flatten(1)
        pair = torch.einsum("nmh,nmc->nhc", w, z).flatten(1)
        op = torch.einsum("nmh,mhpi->nhpi", w, vp) - place[:, None, None]
        op = torch.einsum("nji,nhpj->nhpi", turn, op)
        norm = (op.float().square().sum(-1) + 1e-8).sqrt().to(s.dtype)
        return self.out(torch.cat((o, op.flatten(1), norm.flatten(1), pair), -1))


@program(small={"residues": 5, "width": 8, "pair": 6, "heads": 2, "points": 2}, training=True)
def invariant_points(residues: int = 512, width: int = 384, pair: int = 128, heads: int = 12, points: int = 4) -> Made:
    """Attention over points in frames."""
    return (
        PointAttention(width, pair, heads, points),
        normal(residues, width),
        normal(residues, residues, pair),
        normal(residues, 3, 3),
        normal(residues, 3),
    )


class OuterMean(nn.Module):
    """The outer product mean of an alignment, and pairs averaged by weights (AlphaFold 3's)."""

    def __init__(self, width: int, pair: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.out, self.v, self.g = (
            nn.Linear(hidden * hidden, pair),
            nn.Linear(width, 8 * hidden),
            nn.Linear(width, 8 * hidden),
        )
        self.bias, self.back = nn.Linear(pair, 8), nn.Linear(8 * hidden, width)

    def forward(self, m: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(m)
        o = torch.einsum("sic,sjd->ijcd", self.a(x), self.b(x)) / m.shape[0]
        z = z + self.out(o.flatten(2))
        w = torch.softmax(self.bias(z).float(), 1).to(m.dtype)
        v = self.v(x).unflatten(-1, (8, -1))
        y = torch.einsum("ijh,sjhc->sihc", w, v).flatten(2) * torch.sigmoid(self.g(x))
        return z, m + self.back(y)


@program(small={"rows": 3, "residues": 4, "width": 8, "pair": 6, "hidden": 4}, training=True)
def alignment_pairs(rows: int = 256, residues: int = 256, width: int = 64, pair: int = 128, hidden: int = 32) -> Made:
    """Alignments and pairs of residues."""
    return OuterMean(width, pair, hidden), normal(rows, residues, width), normal(residues, residues, pair)


def aligned(scores: Tensor, gap: Tensor) -> Tensor:
    """Smith and Waterman's, smoothed, along diagonals that were sheared into rows."""
    b, n, m = scores.shape
    sheared = f.pad(scores, (0, n)).flatten(1)[:, : n * (n + m - 1)].view(b, n, n + m - 1)
    low = torch.finfo(torch.float32).min / 4
    one = torch.full((b, n), low, device=scores.device)
    two = one
    outs = []
    for k in range(n + m - 1):
        diagonal, step = f.pad(two[:, :-1], (1, 0), value=low), f.pad(one[:, :-1], (1, 0), value=low)
        best = torch.logsumexp(torch.stack((diagonal, step + gap, one + gap, torch.zeros_like(one))), 0)
        one, two = sheared[:, :, k].float() + best, one
        outs.append(one)
    return torch.logsumexp(torch.stack(outs, -1).flatten(1), 1)


@program(small={"count": 2, "rows": 3, "columns": 4}, training=True, dtypes=("f32",))
def smooth_alignment(count: int = 64, rows: int = 32, columns: int = 32) -> Made:
    """Local alignments, smoothed."""
    return (Learned(aligned, normal(count, rows, columns), -torch.ones(1)),)


class Equivariant(nn.Module):
    """PaiNN: scalars and vectors of atoms, messages over edges by radial functions, an update of both."""

    def __init__(self, width: int, radial: int) -> None:
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 3 * width))
        self.w, self.uv = nn.Linear(radial, 3 * width), nn.Linear(width, 2 * width, bias=False)
        self.a, self.radial = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, 3 * width)), radial

    def forward(self, s: Tensor, v: Tensor, place: Tensor, edge: Tensor) -> tuple[Tensor, Tensor]:
        i, j = edge
        d = place[i] - place[j]
        r = (d.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        rbf = torch.sin(torch.arange(1, self.radial + 1, device=s.device, dtype=s.dtype) * math.pi * r / 5) / r
        w = self.w(rbf) * (0.5 * (torch.cos(math.pi * r / 5) + 1)) * (r < 5)
        a, b, c = (self.phi(s)[j] * w).chunk(3, -1)
        s = s.index_add(0, i, a)
        v = v.index_add(0, i, v[j] * b[:, None] + (d / r)[..., None] * c[:, None])
        x, y = self.uv(v).chunk(2, -1)
        ass, asv, avv = self.a(torch.cat((s, (y.float().square().sum(1) + 1e-8).sqrt().to(s.dtype)), -1)).chunk(3, -1)
        return s + ass + asv * (x * y).sum(1), v + x * avv[:, None]


@program(small={"atoms": 6, "edges": 12, "width": 8, "radial": 4}, training=True)
def polarizable_atoms(atoms: int = 8192, edges: int = 131_072, width: int = 128, radial: int = 20) -> Made:
    """Messages of scalars and vectors (PaiNN's)."""
    edge = torch.stack((scattered(atoms, edges), whole(atoms, edges)))
    return Equivariant(width, radial), normal(atoms, width), normal(atoms, 3, width), 3 * normal(atoms, 3), edge


class Directional(nn.Module):
    """DimeNet++: messages of edges, angles between pairs of edges in a spherical basis, triplets added to edges."""

    def __init__(self, width: int, small: int) -> None:
        super().__init__()
        self.rbf, self.sbf = nn.Linear(6, width, bias=False), nn.Linear(42, small, bias=False)
        self.down, self.up = nn.Linear(width, small, bias=False), nn.Linear(small, width, bias=False)
        self.ji, self.kj, self.last = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, d: Tensor, angle: Tensor, kj: Tensor, ji: Tensor) -> Tensor:
        n = torch.arange(1, 7, device=x.device)
        u = (1 / d.float() - 28 * d.float() ** 5 + 48 * d.float() ** 6 - 21 * d.float() ** 7)[:, None]
        rbf = (u * torch.sin(n * math.pi * d.float()[:, None])).to(x.dtype)
        order = torch.arange(7, device=x.device)
        sbf = (rbf.float()[kj][:, None] * torch.cos(order * angle.float()[:, None])[..., None]).flatten(1).to(x.dtype)
        m = f.silu(self.down(f.silu(self.kj(x)) * self.rbf(rbf)))
        m = torch.zeros_like(m).index_add(0, ji, m[kj] * self.sbf(sbf))
        return x + f.silu(self.last(f.silu(self.ji(x)) + f.silu(self.up(m))))


@program(small={"edges": 8, "triplets": 14, "width": 8, "small": 4}, training=True)
def directional_messages(edges: int = 65536, triplets: int = 400_000, width: int = 128, small: int = 64) -> Made:
    """Messages with angles (DimeNet's)."""
    return (
        Directional(width, small),
        normal(edges, width),
        0.1 + 0.9 * uniform(edges),
        3 * uniform(triplets),
        whole(edges, triplets),
        scattered(edges, triplets),
    )


def bonded(x: Tensor, bonds: Tensor, angles: Tensor, torsions: Tensor, charge: Tensor) -> Tensor:
    """A force field: bonds, angles, torsions, reaction-field charges and dispersion of all pairs."""
    x = x.float()
    r = (x[bonds[:, 0]] - x[bonds[:, 1]]).norm(dim=-1)
    a, b, c = (x[angles[:, k]] for k in range(3))
    u, v = f.normalize(a - b, dim=-1), f.normalize(c - b, dim=-1)
    theta = torch.acos((u * v).sum(-1).clamp(-0.999, 0.999))
    p = [x[torsions[:, k]] for k in range(4)]
    b1, b2, b3 = (p[k + 1] - p[k] for k in range(3))
    n1, n2 = torch.linalg.cross(b1, b2), torch.linalg.cross(b2, b3)
    m1 = torch.linalg.cross(n1, f.normalize(b2, dim=-1))
    phi = torch.atan2((m1 * n2).sum(-1), (n1 * n2).sum(-1) + 1e-6)
    d2 = (x[:, None] - x).square().sum(-1)
    near = (d2 < 81) & ~torch.eye(len(x), dtype=torch.bool, device=x.device)
    d2 = torch.where(near, d2 + 0.5, 1.0)
    six = (3.0 / d2) ** 3
    pair = torch.where(near, 0.1 * (six * six - six) + charge.float()[:, None] * charge.float() * d2.rsqrt(), 0.0)
    return ((r - 1.0).square().sum() + (theta - 1.9).square().sum() + (1 + torch.cos(3 * phi)).sum()) + 0.5 * pair.sum()


@program(small={"atoms": 8}, training=True, dtypes=("f32",))
def force_field(atoms: int = 8192) -> Made:
    """Energies and forces of a molecule."""
    bonds, angles, torsions = ((torch.arange(atoms - k)[:, None] + torch.arange(k + 1)) for k in (1, 2, 3))
    return Learned(bonded, 3 * normal(atoms, 3)), bonds, angles, torsions, normal(atoms)


class CellCounts(nn.Module):
    """scVI: a variational autoencoder of counts with a zero-inflated negative binomial."""

    def __init__(self, genes: int, width: int, latent: int) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(genes, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 2 * latent))
        self.dec = nn.Sequential(nn.Linear(latent, width), nn.LayerNorm(width), nn.ReLU())
        self.rate, self.drop, self.dispersion = (
            nn.Linear(width, genes),
            nn.Linear(width, genes),
            nn.Parameter(torch.zeros(genes)),
        )

    def forward(self, counts: Tensor, noise: Tensor) -> Tensor:
        x = counts.to(noise.dtype)
        mean, log = self.enc(torch.log1p(x)).chunk(2, -1)
        h = self.dec(mean + torch.exp(0.5 * log) * noise)
        n = counts.float()
        mu = torch.softmax(self.rate(h).float(), -1) * n.sum(-1, keepdim=True) + 1e-8
        theta, pi = torch.exp(self.dispersion.float()), self.drop(h).float()
        both = torch.log(theta + mu)
        zero = f.softplus(theta * (torch.log(theta) - both) - pi) - f.softplus(-pi)
        some = -f.softplus(-pi) - pi + theta * (torch.log(theta) - both) + n * (torch.log(mu) - both)
        some = some + torch.lgamma(n + theta) - torch.lgamma(theta) - torch.lgamma(n + 1)
        kl = 0.5 * (mean.float().square() + log.float().exp() - 1 - log.float()).sum(-1)
        return (-torch.where(counts == 0, zero, some).sum(-1) + kl).mean()


@program(small={"cells": 4, "genes": 10, "width": 8, "latent": 3}, training=True)
def cell_counts(cells: int = 1024, genes: int = 20000, width: int = 128, latent: int = 10) -> Made:
    """Counts of single cells."""
    return CellCounts(genes, width, latent), whole(4, cells, genes), normal(cells, latent)


class Genome(nn.Module):
    """Enformer's: one-hot bases, convolutions with pooling by attention, dilated ones with residuals."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.stem, self.pools = (
            nn.Conv1d(4, width, 15, padding=7),
            nn.ModuleList(nn.Linear(width, width) for _ in range(3)),
        )
        self.tower = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2) for _ in range(3))
        self.dilated = nn.ModuleList(nn.Conv1d(width, width, 3, padding=2**k, dilation=2**k) for k in range(1, 5))
        self.norms, self.head = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(7)), nn.Linear(width, out)

    def forward(self, bases: Tensor) -> Tensor:
        x = self.stem(f.one_hot(bases, 4).to(self.stem.weight.dtype).transpose(1, 2))
        for conv, pool, norm in zip(self.tower, self.pools, self.norms, strict=False):
            x = x + conv(f.gelu(norm(x)))
            pairs = x.unflatten(-1, (-1, 2))
            score = torch.einsum("bcnt,dc->bdnt", pairs, pool.weight).float()
            x = (pairs * torch.softmax(score, -1).to(x.dtype)).sum(-1)
        for conv, norm in zip(self.dilated, self.norms[3:], strict=True):
            x = x + conv(f.gelu(norm(x)))
        return f.softplus(self.head(x.transpose(1, 2)))


@program(small={"count": 1, "length": 32, "width": 16, "out": 5}, training=True)
def genome_tracks(count: int = 2, length: int = 65536, width: int = 192, out: int = 512) -> Made:
    """Tracks along a genome."""
    return Genome(width, out), whole(4, count, length)
