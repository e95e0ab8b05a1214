"""Arms, cars and plans: kinematics, control, maps, policies."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Learned, Made, normal, program, uniform, whole


def turned(axis: int, angle: Tensor) -> Tensor:
    """Rotations about an axis."""
    c, s, zero, one = angle.cos(), angle.sin(), torch.zeros_like(angle), torch.ones_like(angle)
    rows = (
        (one, zero, zero, zero, c, -s, zero, s, c),
        (c, zero, s, zero, one, zero, -s, zero, c),
        (c, -s, zero, s, c, zero, zero, zero, one),
    )
    return torch.stack(rows[axis], -1).unflatten(-1, (3, 3))


def arm(q: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """The hand of an arm with joints about alternating axes, where its joints are, and about what they turn."""
    r = torch.eye(3, device=q.device, dtype=q.dtype).expand(q.shape[0], 3, 3)
    p = torch.zeros_like(q[:, :3])
    places, axes = [], []
    for k in range(q.shape[1]):
        places.append(p)
        axes.append(r[:, :, k % 3])
        r = r @ turned(k % 3, q[:, k])
        p = p + lengths[k] * r[:, :, 2]
    return p, r, places, axes


def reaching(q: Tensor, lengths: Tensor, goal: Tensor) -> Tensor:
    """Damped least squares: Jacobians from geometry, a 3 x 3 inverse by cofactors, four steps."""
    for _ in range(4):
        p, _r, places, axes = arm(q, lengths)
        j = torch.stack([torch.linalg.cross(a, p - x) for a, x in zip(axes, places, strict=True)], -1)
        m = j @ j.transpose(1, 2) + 0.05 * torch.eye(3, device=q.device, dtype=q.dtype)
        a, b, c = m.unbind(-1)
        inverse = torch.stack((torch.linalg.cross(b, c), torch.linalg.cross(c, a), torch.linalg.cross(a, b)), 1)
        det = (a * torch.linalg.cross(b, c)).sum(-1)
        e = goal - p
        y = (inverse @ e[..., None])[..., 0] / det[:, None]
        q = q + (j.transpose(1, 2) @ y[..., None])[..., 0]
    return q


@program(small={"count": 3, "joints": 4}, dtypes=("f32",))
def inverse_kinematics(count: int = 65536, joints: int = 7) -> Made:
    """Arms that reach."""
    return reaching, normal(count, joints), 0.2 + 0.2 * uniform(joints), normal(count, 3) * 0.5


def riccati(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """A linear-quadratic regulator backwards over steps (2 x 2 inverses), and the path forwards."""
    n = a.shape[-1]
    eye = torch.eye(n, device=a.device)
    a, p, gains = eye + 0.1 * a, eye.expand_as(a), []
    for _ in range(12):
        pb = p @ b
        s = b.transpose(1, 2) @ pb + 0.5 * torch.eye(2, device=a.device)
        det = s[:, 0, 0] * s[:, 1, 1] - s[:, 0, 1] * s[:, 1, 0]
        flipped = torch.stack((s[:, 1, 1], -s[:, 0, 1], -s[:, 1, 0], s[:, 0, 0]), -1).view(-1, 2, 2)
        k = (flipped / det[:, None, None]) @ (pb.transpose(1, 2) @ a)
        p = eye + a.transpose(1, 2) @ p @ (a - b @ k)
        gains.append(k)
    path = []
    for k in reversed(gains):
        x = ((a - b @ k) @ x[..., None])[..., 0]
        path.append(x)
    return torch.stack(path, 1), p


@program(small={"count": 3, "width": 4}, dtypes=("f32",))
def quadratic_regulator(count: int = 16384, width: int = 8) -> Made:
    """Feedback by Riccati's equation."""
    return riccati, normal(count, width, width), normal(count, width, 2), normal(count, width)


def aligned(x: Tensor, y: Tensor) -> Tensor:
    """Iterative closest points by Horn's quaternions, found by powers of a 4 x 4 matrix."""
    r, shift = torch.eye(3, device=x.device).expand(len(x), 3, 3), torch.zeros_like(x[:, :1])
    for _ in range(3):
        moved = x @ r.transpose(1, 2) + shift
        d = moved.square().sum(-1)[:, :, None] - 2 * moved @ y.transpose(1, 2) + y.square().sum(-1)[:, None]
        near = y.gather(1, d.argmin(-1)[..., None].expand(-1, -1, 3))
        cx, cy = x.mean(1, keepdim=True), near.mean(1, keepdim=True)
        s = (x - cx).transpose(1, 2) @ (near - cy) / x.shape[1]
        t = s.diagonal(dim1=1, dim2=2).sum(-1)
        v = torch.stack((s[:, 1, 2] - s[:, 2, 1], s[:, 2, 0] - s[:, 0, 2], s[:, 0, 1] - s[:, 1, 0]), -1)
        low = s + s.transpose(1, 2) - t[:, None, None] * torch.eye(3, device=x.device)
        m = torch.cat((torch.cat((t[:, None], v), -1)[:, None], torch.cat((v[..., None], low), -1)), 1)
        m = m + 4 * torch.eye(4, device=x.device)
        for _ in range(5):
            m = m @ m
            m = m / m.abs().amax((1, 2), keepdim=True)
        w, i, j, k = f.normalize(m.sum(-1), dim=-1).unbind(-1)
        r = torch.stack((
            1 - 2 * (j * j + k * k), 2 * (i * j - k * w), 2 * (i * k + j * w),
            2 * (i * j + k * w), 1 - 2 * (i * i + k * k), 2 * (j * k - i * w),
            2 * (i * k - j * w), 2 * (j * k + i * w), 1 - 2 * (i * i + j * j),
        ), -1).view(-1, 3, 3)  # fmt: skip
        shift = cy - cx @ r.transpose(1, 2)
    return torch.cat((r, shift), 1)


@program(small={"count": 2, "points": 10}, dtypes=("f32",))
def closest_points(count: int = 16, points: int = 2048) -> Made:
    """Clouds that are brought together."""
    return aligned, normal(count, points, 3), normal(count, points, 3)


class Denoiser(nn.Module):
    """A diffusion policy: a U-net along time, conditioned by FiLM."""

    def __init__(self, action: int, width: int, given: int) -> None:
        super().__init__()
        self.into, self.time = (
            nn.Conv1d(action, width, 5, padding=2),
            nn.Sequential(nn.Linear(64, 256), nn.Mish(), nn.Linear(256, 256)),
        )
        self.convs = nn.ModuleList(
            nn.Conv1d(a, b, 5, padding=2) for a, b in ((width, width), (width, 2 * width), (3 * width, width))
        )
        self.films = nn.ModuleList(nn.Linear(256 + given, 2 * c) for c in (width, 2 * width, width))
        self.norms = nn.ModuleList(nn.GroupNorm(8, c) for c in (width, 2 * width, width))
        self.down, self.up = nn.Conv1d(width, width, 3, 2, 1), nn.ConvTranspose1d(2 * width, 2 * width, 4, 2, 1)
        self.out = nn.Conv1d(width, action, 1)

    def block(self, k: int, x: Tensor, c: Tensor) -> Tensor:
        scale, shift = self.films[k](c)[..., None].chunk(2, 1)
        return f.mish(self.norms[k](self.convs[k](x)) * (1 + scale) + shift)

    def forward(self, x: Tensor, step: Tensor, given: Tensor) -> Tensor:
        freq = torch.exp(-9.2 * torch.arange(32, device=x.device, dtype=torch.float32) / 31)
        angle = step[:, None].float() * freq
        c = torch.cat((self.time(torch.cat((angle.sin(), angle.cos()), -1).to(x.dtype)), given), -1)
        y = self.block(0, self.into(x.transpose(1, 2)), c)
        z = self.up(self.block(1, self.down(y), c))
        return self.out(self.block(2, torch.cat((y, z), 1), c)).transpose(1, 2)


@program(small={"count": 2, "length": 8, "action": 3, "width": 8, "given": 4}, training=True)
def diffusion_policy(count: int = 256, length: int = 16, action: int = 10, width: int = 256, given: int = 512) -> Made:
    """Actions by denoising."""
    return Denoiser(action, width, given), normal(count, length, action), whole(100, count), normal(count, given)


def lifted(features: Tensor, depth: Tensor, cell: Tensor, cells: int) -> Tensor:
    """Lift, splat: features times depth probabilities, added up in the cells of a map from above."""
    p = torch.softmax(depth.float(), 1).to(features.dtype)
    both = torch.einsum("bdhw,bchw->bdhwc", p, features).flatten(0, 3)
    found = torch.zeros(cells, features.shape[1], device=features.device, dtype=features.dtype)
    return found.index_add(0, cell.flatten(), both)


@program(small={"cameras": 2, "depths": 3, "size": 4, "width": 4, "cells": 10}, training=True)
def lift_and_splat(cameras: int = 6, depths: int = 41, size: int = 28, width: int = 64, cells: int = 40_000) -> Made:
    """A map from cameras."""

    def call(features: Tensor, depth: Tensor, cell: Tensor) -> Tensor:
        return lifted(features, depth, cell, cells)

    learned = normal(cameras, width, size, size), normal(cameras, depths, size, size)
    return Learned(call, *learned), whole(cells, cameras, depths, size, size)


def bundled(pose: Tensor, point: Tensor, camera: Tensor, at: Tensor, seen: Tensor) -> Tensor:
    """Bundle adjustment's robust residual: angles and axes, a lens with distortion, gathered by observation."""
    w, t = pose[camera, :3], pose[camera, 3:6]
    x = point[at]
    theta = (w.square().sum(-1, keepdim=True) + 1e-12).sqrt()
    k = w / theta
    c, s = theta.cos(), theta.sin()
    y = x * c + torch.linalg.cross(k, x) * s + k * (k * x).sum(-1, keepdim=True) * (1 - c) + t
    p = -y[:, :2] / (y[:, 2:] + 5)
    r2 = p.square().sum(-1, keepdim=True)
    lens = pose[camera, 6:9]
    p = lens[:, :1] * p * (1 + lens[:, 1:2] * r2 + lens[:, 2:] * r2 * r2)
    e = (p - seen).square().sum(-1)
    return torch.where(e < 1, e, 2 * (e + 1e-12).sqrt() - 1).sum()


@program(small={"cameras": 3, "points": 6, "seen": 12}, training=True, dtypes=("f32",))
def bundle_adjustment(cameras: int = 512, points: int = 100_000, seen: int = 1_000_000) -> Made:
    """Cameras and points, adjusted."""
    return (
        Learned(bundled, 0.1 * normal(cameras, 9), normal(points, 3)),
        whole(cameras, seen),
        whole(points, seen),
        normal(seen, 2),
    )


def costs(grid: Tensor, start: Tensor) -> Tensor:
    """Value iteration on a map with eight neighbours, thirty times."""
    big = 1e4
    v = torch.where(start > 0.999, 0.0, big)
    step = 1 + 9 * (grid > 0.7).to(grid.dtype)
    for _ in range(30):
        p = f.pad(v, (1, 1, 1, 1), value=big)
        h, w = v.shape[-2:]
        for dy, dx in ((0, 1), (1, 0), (1, 2), (2, 1)):
            v = torch.minimum(v, p[..., dy : dy + h, dx : dx + w] + step)
        for dy, dx in ((0, 0), (0, 2), (2, 0), (2, 2)):
            v = torch.minimum(v, p[..., dy : dy + h, dx : dx + w] + math.sqrt(2) * step)
    return v


@program(small={"maps": 1, "size": 8}, dtypes=("f32",))
def cost_to_go(maps: int = 16, size: int = 256) -> Made:
    """Costs of ways through maps."""
    return costs, uniform(maps, size, size), uniform(maps, size, size)
