"""Nets over graphs and sets of points: messages gathered by index and added by index."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Made, normal, program, uniform, whole


def gathered(messages: Tensor, at: Tensor, nodes: int) -> Tensor:
    """The sum of the messages at every node."""
    return messages.new_zeros(nodes, *messages.shape[1:]).index_add(0, at, messages)


class GraphConvolution(nn.Module):
    """Neighbours, weighted by both degrees (GCN's)."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        degree = gathered(torch.ones_like(target, dtype=torch.float32), target, len(x)) + 1
        weight = torch.rsqrt(degree[source] * degree[target]).to(x.dtype)[:, None]
        for k, layer in enumerate(self.layers):
            y = layer(x)
            y = gathered(y[source] * weight, target, len(x)) + y / degree[:, None].to(x.dtype)
            x = f.relu(y) if k < len(self.layers) - 1 else y
        return x


@program(small={"nodes": 10, "edges": 30, "width": 8}, training=True)
def gcn(nodes: int = 50_000, edges: int = 400_000, width: int = 128) -> Made:
    """Two graph convolutions."""
    return GraphConvolution(width, width, 40), normal(nodes, width), whole(nodes, edges), whole(nodes, edges)


class GraphAttention(nn.Module):
    """Neighbours, weighted by a softmax over the edges of a node (GAT's)."""

    def __init__(self, width: int, heads: int, size: int) -> None:
        super().__init__()
        self.heads, self.into = heads, nn.Linear(width, heads * size, bias=False)
        self.left, self.right = (nn.Parameter(torch.randn(heads, size)) for _ in range(2))

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        y = self.into(x).unflatten(-1, (self.heads, -1))
        score = f.leaky_relu((y * self.left).sum(-1)[source] + (y * self.right).sum(-1)[target], 0.2).float()
        most = score.new_full((len(x), self.heads), float("-inf"))
        most = most.scatter_reduce(0, target[:, None].expand(-1, self.heads), score, "amax")
        weight = torch.exp(score - most[target])
        weight = (weight / gathered(weight, target, len(x))[target]).to(x.dtype)
        return gathered(y[source] * weight[..., None], target, len(x)).flatten(1)


@program(small={"nodes": 10, "edges": 30, "width": 8, "heads": 2, "size": 4})
def gat(nodes: int = 20_000, edges: int = 200_000, width: int = 128, heads: int = 8, size: int = 16) -> Made:
    """A layer of graph attention."""
    return GraphAttention(width, heads, size), normal(nodes, width), whole(nodes, edges), whole(nodes, edges)


class Sage(nn.Module):
    """A node beside the mean of its neighbours (GraphSAGE's)."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(width, out), nn.Linear(width, out, bias=False)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        count = gathered(torch.ones_like(target, dtype=x.dtype), target, len(x)).clamp(min=1)
        mean = gathered(x[source], target, len(x)) / count[:, None]
        return f.normalize(f.relu(self.own(x) + self.others(mean)), dim=-1)


@program(small={"nodes": 10, "edges": 30, "width": 8}, training=True)
def graph_sage(nodes: int = 50_000, edges: int = 500_000, width: int = 128) -> Made:
    """A layer of GraphSAGE."""
    return Sage(width, 256), normal(nodes, width), whole(nodes, edges), whole(nodes, edges)


class Isomorphism(nn.Module):
    """(1 + e) x + sum of neighbours, by an MLP; graphs read out by their sums (GIN's)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(layers))
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(layers)
        )

    def forward(self, x: Tensor, source: Tensor, target: Tensor, graph: Tensor) -> Tensor:
        for scale, net in zip(self.scale, self.nets, strict=True):
            x = f.relu(net((1 + scale) * x + gathered(x[source], target, len(x))))
        return gathered(x, graph, 128)


@program(small={"nodes": 10, "edges": 30, "width": 8, "layers": 2}, training=True)
def gin(nodes: int = 40_000, edges: int = 160_000, width: int = 256, layers: int = 3) -> Made:
    """GIN over 128 graphs."""
    ends = whole(nodes, edges), whole(nodes, edges)
    return Isomorphism(width, layers), normal(nodes, width), *ends, whole(128, nodes)


class MessagePassing(nn.Module):
    """Messages by a net over both ends and the edge, nodes by a GRU cell (MPNN's)."""

    def __init__(self, width: int, edge: int, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.message = nn.Sequential(nn.Linear(2 * width + edge, width), nn.ReLU(), nn.Linear(width, width))
        self.update = nn.GRUCell(width, width)

    def forward(self, x: Tensor, edges: Tensor, source: Tensor, target: Tensor) -> Tensor:
        for _ in range(self.steps):
            messages = self.message(torch.cat((x[source], x[target], edges), -1))
            x = self.update(gathered(messages, target, len(x)), x)
        return x


@program(small={"nodes": 10, "edges": 30, "width": 8, "edge": 4}, training=True)
def message_passing(
    nodes: int = 20_000, edges: int = 100_000, width: int = 128, edge: int = 16, steps: int = 2
) -> Made:
    """Messages over the bonds of molecules."""
    ends = whole(nodes, edges), whole(nodes, edges)
    return MessagePassing(width, edge, steps), normal(nodes, width), normal(edges, edge), *ends


class Equivariant(nn.Module):
    """Messages by distances; places move along their differences (EGNN's)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.move = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))
        self.node = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, x: Tensor, place: Tensor, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        away = place[source] - place[target]
        m = self.message(torch.cat((x[source], x[target], away.square().sum(-1, keepdim=True)), -1))
        place = place + gathered(away * self.move(m), target, len(x)) / 8
        return x + self.node(torch.cat((x, gathered(m, target, len(x))), -1)), place


@program(small={"nodes": 10, "edges": 30, "width": 8}, training=True)
def egnn(nodes: int = 20_000, edges: int = 160_000, width: int = 128) -> Made:
    """An equivariant layer."""
    return Equivariant(width), normal(nodes, width), normal(nodes, 3), whole(nodes, edges), whole(nodes, edges)


class Smooth(nn.Module):
    """Continuous filters: Gaussians of distances, cut off smoothly (SchNet's)."""

    def __init__(self, width: int, gaussians: int) -> None:
        super().__init__()
        self.register_buffer("centres", torch.linspace(0, 5, gaussians))
        self.filter = nn.Sequential(nn.Linear(gaussians, width), nn.Softplus(), nn.Linear(width, width))
        self.into, self.out = (
            nn.Linear(width, width, bias=False),
            nn.Sequential(nn.Linear(width, width), nn.Softplus(), nn.Linear(width, width)),
        )

    def forward(self, x: Tensor, distance: Tensor, source: Tensor, target: Tensor) -> Tensor:
        cut = 0.5 * (torch.cos(distance * torch.pi / 5) + 1) * (distance < 5)
        w = self.filter(torch.exp(-10 * (distance[:, None] - self.centres).square())) * cut[:, None]
        return x + self.out(gathered(self.into(x)[source] * w, target, len(x)))


@program(small={"nodes": 10, "edges": 30, "width": 8, "gaussians": 6}, training=True)
def schnet(nodes: int = 20_000, edges: int = 200_000, width: int = 128, gaussians: int = 50) -> Made:
    """An interaction of SchNet."""
    ends = whole(nodes, edges), whole(nodes, edges)
    return Smooth(width, gaussians), normal(nodes, width), 6 * uniform(edges), *ends


class PointNet(nn.Module):
    """The same net for every point, and the largest of each feature."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in ((3, width), (width, 2 * width), (2 * width, 16 * width)):
            layers += [nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()]
        self.points = nn.Sequential(*layers)
        self.out = nn.Sequential(nn.Linear(16 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.points(x).amax(-1))


@program(small={"clouds": 2, "points": 32, "width": 8}, training=True)
def pointnet(clouds: int = 32, points: int = 2048, width: int = 64) -> Made:
    """PointNet."""
    return PointNet(width, 40), normal(clouds, 3, points)


class EdgeConvolution(nn.Module):
    """Features of a point and its `k` nearest, and the largest of them (DGCNN's)."""

    def __init__(self, width: int, out: int, k: int) -> None:
        super().__init__()
        self.k, self.net = k, nn.Sequential(nn.Linear(2 * width, out), nn.LeakyReLU(0.2), nn.Linear(out, out))

    def forward(self, x: Tensor) -> Tensor:
        square = x.square().sum(-1)
        distance = square[:, :, None] - 2 * x @ x.transpose(1, 2) + square[:, None]
        near = distance.topk(self.k, -1, largest=False).indices
        at = near.flatten(1)[..., None].expand(-1, -1, x.shape[-1])
        others = x.gather(1, at).unflatten(1, (-1, self.k))
        own = x[:, :, None].expand_as(others)
        return self.net(torch.cat((own, others - own), -1)).amax(2)


@program(small={"clouds": 2, "points": 16, "width": 8, "k": 4}, dtypes=("f32",))  # in bfloat16 the nearest differ
def dgcnn(clouds: int = 16, points: int = 1024, width: int = 64, k: int = 20) -> Made:
    """An edge convolution over the nearest points."""
    return EdgeConvolution(3, width, k), normal(clouds, points, 3)


class SetAttention(nn.Module):
    """A set attends to a few points of its own, and back (the set transformer's)."""

    def __init__(self, width: int, heads: int, seeds: int) -> None:
        super().__init__()
        self.heads, self.seeds = heads, nn.Parameter(torch.randn(1, seeds, width))
        self.q, self.kv, self.out = (nn.Linear(width, n * width) for n in (1, 2, 1))

    def attend(self, x: Tensor, y: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + f.relu(self.out(f.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, self.attend(self.seeds.expand(len(x), -1, -1), x))


@program(small={"count": 2, "points": 24, "width": 16, "heads": 2, "seeds": 4}, training=True)
def set_transformer(count: int = 16, points: int = 2048, width: int = 256, heads: int = 8, seeds: int = 32) -> Made:
    """A layer of a set transformer."""
    return SetAttention(width, heads, seeds), normal(count, points, width)
