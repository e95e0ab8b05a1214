"""Pictures of scenes: rays, grids, triangles, splats, warps, skins."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Learned, Made, normal, program, scattered, uniform, whole


def harmonics(d: Tensor) -> Tensor:
    """The nine spherical harmonics up to degree two."""
    x, y, z = d.unbind(-1)
    one = torch.full_like(x, 0.28209479)
    first = [-0.48860251 * y, 0.48860251 * z, -0.48860251 * x]
    second = [1.0925484 * x * y, -1.0925484 * y * z, 0.31539157 * (2 * z * z - x * x - y * y), -1.0925484 * x * z]
    return torch.stack((one, *first, *second, 0.5462742 * (x * x - y * y)), -1)


def voxels(density: Tensor, coefficients: Tensor, origin: Tensor, direction: Tensor, steps: int) -> Tensor:
    """Plenoxels: a grid of densities and harmonics, read between its corners along rays."""
    t = torch.linspace(0.0, 2.0, steps, device=origin.device, dtype=origin.dtype)
    d = f.normalize(direction, dim=-1)
    at = (origin[:, None] + t[:, None] * d[:, None])[None, None]
    sigma = f.relu(f.grid_sample(density[None], at, align_corners=True, padding_mode="zeros"))[0, 0, 0]
    c = f.grid_sample(coefficients[None], at, align_corners=True)[0, :, 0].unflatten(0, (3, 9))
    colour = torch.sigmoid((c * harmonics(d).T[None, :, :, None]).sum(1))
    alpha = 1 - torch.exp(-sigma.float() * (2.0 / steps))
    light = torch.cumprod(torch.cat((torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-7), -1), -1)[:, :-1]
    return torch.einsum("rs,crs->rc", light * alpha, colour.float())


@program(small={"rays": 6, "size": 4, "steps": 5}, training=True, dtypes=("f32",))
def plenoxels(rays: int = 8192, size: int = 128, steps: int = 128) -> Made:
    """A radiance field without a net."""

    def call(density: Tensor, coefficients: Tensor, origin: Tensor, direction: Tensor) -> Tensor:
        return voxels(density, coefficients, origin, direction, steps)

    grid = (size, size, size)
    return Learned(call, normal(1, *grid), normal(27, *grid)), normal(rays, 3) * 0.3, normal(rays, 3)


class Factors(nn.Module):
    """TensoRF: planes times lines, read between entries, a small net for colours."""

    def __init__(self, size: int, rank: int, width: int) -> None:
        super().__init__()
        self.planes, self.lines = (
            nn.Parameter(torch.randn(3, rank, size, size)),
            nn.Parameter(torch.randn(3, rank, size, 1)),
        )
        self.basis = nn.Linear(3 * rank, 27, bias=False)
        self.net = nn.Sequential(nn.Linear(30, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, x: Tensor, d: Tensor) -> Tensor:
        plane = torch.stack((x[:, (0, 1)], x[:, (0, 2)], x[:, (1, 2)]))[:, :, None]
        line = x[:, (2, 1, 0)].T
        line = torch.stack((torch.zeros_like(line), line), -1)[:, :, None]
        a = f.grid_sample(self.planes, plane, align_corners=True)[..., 0]
        b = f.grid_sample(self.lines, line, align_corners=True)[..., 0]
        features = (a * b).flatten(0, 1).T
        return torch.cat(
            (torch.sigmoid(self.net(torch.cat((self.basis(features), d), -1))), features.sum(-1, keepdim=True)), -1
        )


@program(small={"places": 10, "size": 6, "rank": 4, "width": 8}, training=True, dtypes=("f32",))
def tensor_field(places: int = 262_144, size: int = 300, rank: int = 16, width: int = 128) -> Made:
    """A radiance field in factors."""
    return Factors(size, rank, width), 2 * uniform(places, 3) - 1, normal(places, 3)


class Surface(nn.Module):
    """NeuS: a signed distance net with its gradient, opacities from its sigmoid, and the eikonal term."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 1)
        self.colour, self.sharp = nn.Linear(width + 6, 3), nn.Parameter(torch.tensor(3.0))

    def distance(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = f.softplus(self.second(f.softplus(self.first(x), beta=100)), beta=100)
        return self.last(h)[..., 0] + x.norm(dim=-1) - 0.5, h

    def forward(self, o: Tensor, d: Tensor, t: Tensor) -> Tensor:
        d = f.normalize(d, dim=-1)
        x = o[:, None] + t.sort(-1).values[..., None] * d[:, None]
        g, (s, h) = torch.func.grad(lambda x: (self.distance(x)[0].sum(), self.distance(x)), has_aux=True)(x)
        colour = torch.sigmoid(self.colour(torch.cat((h, g, d[:, None].expand_as(g)), -1)))
        c = torch.sigmoid(s.float() * self.sharp.float().exp())
        alpha = ((c[:, :-1] - c[:, 1:]) / c[:, :-1].clamp(min=1e-5)).clamp(0, 1)
        light = torch.exp(f.pad(torch.log(1 - alpha + 1e-7).cumsum(-1), (1, 0))[:, :-1])
        picture = ((light * alpha)[..., None] * colour[:, :-1].float()).sum(1)
        eikonal = (g.float().norm(dim=-1) - 1).square().mean()
        return torch.cat((picture, eikonal.expand(len(o), 1)), -1)


@program(small={"rays": 3, "steps": 5, "width": 8}, training=True)
def neural_surface(rays: int = 1024, steps: int = 64, width: int = 256) -> Made:
    """A surface found from pictures (NeuS')."""
    return Surface(width), normal(rays, 3) * 0.1, normal(rays, 3), 2 * uniform(rays, steps)


def traced(origin: Tensor, direction: Tensor, centres: Tensor, radii: Tensor) -> Tensor:
    """Sphere tracing of a smooth union of spheres and a plane, normals by differences, soft shadows."""

    def distance(x: Tensor) -> Tensor:
        d = (x[:, None] - centres).square().sum(-1).clamp(min=1e-12).sqrt() - radii
        return torch.minimum(-torch.logsumexp(-8 * d, -1) / 8, x[:, 1] + 1.5)

    d = f.normalize(direction, dim=-1)
    t = torch.zeros_like(origin[:, 0])
    for _ in range(24):
        t = t + distance(origin + t[:, None] * d).clamp(max=1.0)
    x = origin + t[:, None] * d
    step = 1e-2 * torch.eye(3, device=x.device, dtype=x.dtype)
    normal_ = torch.stack([distance(x + step[k]) - distance(x - step[k]) for k in range(3)], -1)
    normal_ = f.normalize(normal_, dim=-1)
    light = torch.tensor((0.5, 0.7, 0.5), device=x.device, dtype=x.dtype)
    shade, s = torch.ones_like(t), torch.full_like(t, 0.05)
    for _ in range(8):
        h = distance(x + s[:, None] * light)
        shade, s = torch.minimum(shade, 8 * h / s), s + h.clamp(0.02, 0.5)
    return (normal_ @ light).clamp(min=0) * shade.clamp(0, 1)


@program(small={"rays": 10, "spheres": 3}, dtypes=("f32",))
def sphere_tracing(rays: int = 262_144, spheres: int = 16) -> Made:
    """A picture of distances."""
    return traced, normal(rays, 3) * 0.1, normal(rays, 3), normal(spheres, 3) * 2, uniform(spheres)


def hits(origin: Tensor, direction: Tensor, corners: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest of all triangles for every ray (Möller and Trumbore's)."""
    a, b, c = corners.unbind(1)
    e1, e2 = b - a, c - a
    p = torch.linalg.cross(direction[:, None], e2[None].expand(len(direction), -1, -1))
    det = (p * e1).sum(-1)
    s = origin[:, None] - a
    inverse = torch.where(det.abs() > 1e-9, 1 / det, 0.0)
    u = (s * p).sum(-1) * inverse
    q = torch.linalg.cross(s, e1[None].expand_as(s))
    v = (direction[:, None] * q).sum(-1) * inverse
    t = (e2 * q).sum(-1) * inverse
    good = (u >= 0) & (v >= 0) & (u + v <= 1) & (t > 1e-5) & (det.abs() > 1e-9)
    return torch.where(good, t, torch.inf).min(-1)


@program(small={"rays": 6, "triangles": 10}, dtypes=("f32",))
def triangle_hits(rays: int = 16384, triangles: int = 2048) -> Made:
    """Rays against all triangles."""
    return hits, normal(rays, 3), normal(rays, 3), normal(triangles, 3, 3)


class Skinned(nn.Module):
    """SMPL: shapes and poses blended, joints by a chain of rotations, linear blend skinning."""

    def __init__(self, corners: int, joints: int, shapes: int) -> None:
        super().__init__()
        self.template, self.shapes = (
            nn.Parameter(torch.randn(corners, 3)),
            nn.Parameter(torch.randn(corners, 3, shapes) * 0.03),
        )
        self.poses = nn.Parameter(torch.randn(9 * (joints - 1), 3 * corners) * 0.01)
        self.regressor, self.weights = (
            nn.Parameter(torch.rand(joints, corners)),
            nn.Parameter(torch.randn(corners, joints)),
        )
        self.parents = [0, *(k // 2 for k in range(1, joints))]

    def forward(self, beta: Tensor, theta: Tensor) -> Tensor:
        b = beta.shape[0]
        v = self.template + torch.einsum("bs,vds->bvd", beta, self.shapes)
        j = torch.einsum("jv,bvd->bjd", torch.softmax(self.regressor.float(), -1).to(v.dtype), v)
        angle = (theta.float().square().sum(-1, keepdim=True) + 1e-8).sqrt()
        x, y, z = (theta.float() / angle).unbind(-1)
        zero = torch.zeros_like(x)
        k = torch.stack((zero, -z, y, z, zero, -x, -y, x, zero), -1).unflatten(-1, (3, 3))
        eye = torch.eye(3, device=v.device)
        r = (eye + angle.sin()[..., None] * k + (1 - angle.cos())[..., None] * (k @ k)).to(v.dtype)
        v = v + ((r[:, 1:] - eye.to(v.dtype)).flatten(1) @ self.poses).view(b, -1, 3)
        turns, places = [r[:, 0]], [j[:, 0]]
        for n, parent in enumerate(self.parents[1:], 1):
            turns.append(turns[parent] @ r[:, n])
            places.append((turns[parent] @ (j[:, n] - j[:, parent])[..., None])[..., 0] + places[parent])
        turn, place = torch.stack(turns, 1), torch.stack(places, 1)
        moved = place - (turn @ j[..., None])[..., 0]
        w = torch.softmax(self.weights.float(), -1).to(v.dtype)
        t = torch.einsum("vj,bjk->bvk", w, torch.cat((turn.flatten(2), moved), -1))
        return (t[..., :9].unflatten(-1, (3, 3)) @ v[..., None])[..., 0] + t[..., 9:]


@program(small={"count": 2, "corners": 10, "joints": 5, "shapes": 3}, training=True)
def skinned_bodies(count: int = 64, corners: int = 6890, joints: int = 24, shapes: int = 10) -> Made:
    """Bodies that are posed (SMPL's)."""
    return Skinned(corners, joints, shapes), normal(count, shapes), normal(count, joints, 3) * 0.3


def chamfer(x: Tensor, y: Tensor) -> Tensor:
    """Distances of two clouds of points both ways, and an F-score."""
    d = (x[:, :, None] - y[:, None]).float().square().sum(-1)
    a, b = d.amin(2), d.amin(1)
    precision, recall = (a < 0.05).float().mean(1), (b < 0.05).float().mean(1)
    return a.mean(1) + b.mean(1) + 0 * precision * recall


@program(small={"count": 2, "points": 12}, training=True)
def chamfer_distance(count: int = 32, points: int = 2048) -> Made:
    """How far clouds are from each other."""
    return Learned(chamfer, normal(count, points, 3)), normal(count, points, 3)


def mesh_losses(v: Tensor, faces: Tensor, edges: Tensor) -> Tensor:
    """Normals of faces added at corners, the Laplacian by edges, lengths of edges, consistency of normals."""
    a, b, c = (v[faces[:, k]] for k in range(3))
    n = torch.linalg.cross(b - a, c - a)
    corner = torch.zeros_like(v).index_add(0, faces.flatten(), n.repeat_interleave(3, 0))
    corner = f.normalize(corner, dim=-1)
    d = v[edges[:, 0]] - v[edges[:, 1]]
    degree = torch.zeros_like(v[:, :1]).index_add(0, edges.flatten(), torch.ones_like(d[:, :1]).repeat(2, 1))
    lap = torch.zeros_like(v).index_add(0, edges[:, 0], -d).index_add(0, edges[:, 1], d) / degree.clamp(min=1)
    smooth = (corner[edges[:, 0]] * corner[edges[:, 1]]).sum(-1)
    return d.square().sum(-1).mean() + lap.norm(dim=-1).mean() + (1 - smooth).mean()


@program(small={"corners": 12, "faces": 20}, training=True, dtypes=("f32",))
def mesh_smoothness(corners: int = 100_000, faces: int = 200_000) -> Made:
    """What keeps meshes smooth."""
    edges = torch.stack((scattered(corners, 3 * faces // 2), whole(corners, 3 * faces // 2)), -1)
    return Learned(mesh_losses, normal(corners, 3)), whole(corners, faces, 3), edges


def warped(left: Tensor, right: Tensor, depth: Tensor, pose: Tensor) -> Tensor:
    """Monodepth: pixels put into another camera, sampled there, compared by SSIM and absolute differences."""
    b, _, h, w = left.shape
    y, x = torch.meshgrid(torch.arange(h, device=left.device), torch.arange(w, device=left.device), indexing="ij")
    pixel = (
        torch.stack((x / w - 0.5, y / h - 0.5, torch.ones_like(x, dtype=torch.float32)), 0).flatten(1).to(left.dtype)
    )
    disparity = 0.01 + 10 * torch.sigmoid(depth.flatten(2))
    space = pixel / disparity
    moved = pose[:, :, :3] @ space + pose[:, :, 3:]
    at = 2 * moved[:, :2] / moved[:, 2:].clamp(min=1e-3)
    seen = f.grid_sample(right, at.view(b, 2, h, w).permute(0, 2, 3, 1), padding_mode="border", align_corners=False)

    def mean(t: Tensor) -> Tensor:
        return f.avg_pool2d(f.pad(t, (1, 1, 1, 1), mode="reflect"), 3, 1)

    mx, my = mean(left), mean(seen)
    sx, sy, sxy = mean(left * left) - mx * mx, mean(seen * seen) - my * my, mean(left * seen) - mx * my
    ssim = (2 * mx * my + 1e-4) * (2 * sxy + 9e-4) / ((mx * mx + my * my + 1e-4) * (sx + sy + 9e-4))
    photo = 0.425 * (1 - ssim).clamp(0, 2) + 0.15 * (left - seen).abs()
    gx = depth.diff(dim=-1).abs() * torch.exp(-left.diff(dim=-1).abs().mean(1, keepdim=True))
    return photo.mean() + 0.1 * gx.mean()


@program(small={"images": 1, "size": 8}, training=True, dtypes=("f32",))
def depth_from_motion(images: int = 8, size: int = 320) -> Made:
    """Depth and motion without labels."""

    def call(depth: Tensor, pose: Tensor, left: Tensor, right: Tensor) -> Tensor:
        eye = torch.eye(3, 4, device=pose.device, dtype=pose.dtype)
        return warped(left, right, depth, eye + 0.05 * pose)

    learned = normal(images, 1, size, size), normal(images, 3, 4)
    return Learned(call, *learned), uniform(images, 3, size, size), uniform(images, 3, size, size)


def planes(images: Tensor, weights: Tensor, cameras: int) -> Tensor:
    """MVSNet: features of other views warped by planes, their variance as a cost, a soft argmin over depths."""
    b, (c, h, w) = images.shape[0] // cameras, images.shape[1:]
    feature = f.relu(f.conv2d(images, weights[:, :c], padding=1)).unflatten(0, (b, cameras))
    total, square = feature[:, 0][:, :, None].expand(-1, -1, 16, -1, -1), feature[:, 0].square()[:, :, None]
    square = square.expand(-1, -1, 16, -1, -1)
    grid = f.affine_grid(
        torch.eye(2, 3, device=images.device, dtype=images.dtype).expand(b, -1, -1), [b, 1, h, w], align_corners=False
    )
    for k in range(1, cameras):
        views = []
        for depth in range(16):
            shift = torch.tensor((0.01 * k * depth, 0.0), device=images.device, dtype=images.dtype)
            views.append(f.grid_sample(feature[:, k], grid + shift, align_corners=False))
        v = torch.stack(views, 2)
        total, square = total + v, square + v.square()
    cost = (square / cameras - (total / cameras).square()).mean(1)
    p = torch.softmax(-cost.float(), 1)
    return (p * torch.arange(16, device=p.device).view(-1, 1, 1)).sum(1)


@program(small={"scenes": 1, "cameras": 2, "size": 8}, dtypes=("f32",))
def plane_sweep(scenes: int = 2, cameras: int = 3, size: int = 192) -> Made:
    """Depth by sweeping planes."""
    return (
        lambda images, weights: planes(images, weights, cameras),
        normal(scenes * cameras, 3, size, size),
        normal(32, 3, 3, 3) / math.sqrt(27),
    )
