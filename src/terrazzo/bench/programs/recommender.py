"""Recommenders: embeddings of many features, and what is made of their products."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Made, normal, program, whole


def tower(*sizes: int) -> nn.Module:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Dlrm(nn.Module):
    """Embeddings and dense features, their products by pairs, a tower (DLRM's)."""

    def __init__(
        self, features: int, rows: int, width: int, dense: int, bottom: Sequence[int], top: Sequence[int]
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(features))
        self.bottom = tower(dense, *bottom, width)
        pairs = (features + 1) * features // 2
        self.top = tower(width + pairs, *top, 1)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        every = torch.stack((x, *(table(sparse[:, k]) for k, table in enumerate(self.tables))), 1)
        products = every @ every.transpose(1, 2)
        place = torch.tril_indices(every.shape[1], every.shape[1], -1, device=dense.device)
        return self.top(torch.cat((x, products[:, place[0], place[1]]), -1))


@program(
    small={"count": 4, "features": 3, "rows": 20, "width": 8, "dense": 5, "bottom": (8,), "top": (16,)}, training=True
)
def dlrm(
    count: int = 4096, features: int = 26, rows: int = 100_000, width: int = 128, dense: int = 13,
    bottom: Sequence[int] = (512, 256), top: Sequence[int] = (1024, 1024, 512, 256),
) -> Made:  # fmt: skip
    """DLRM with 26 tables."""
    return Dlrm(features, rows, width, dense, bottom, top), normal(count, dense), whole(rows, count, features)


class Factorisation(nn.Module):
    """A factorisation machine beside a tower (DeepFM's), over one table of all features."""

    def __init__(self, features: int, rows: int, width: int) -> None:
        super().__init__()
        self.table, self.weights = nn.Embedding(rows, width), nn.Embedding(rows, 1)
        self.tower = tower(features * width, 400, 400, 1)

    def forward(self, x: Tensor) -> Tensor:
        v = self.table(x)
        pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(-1, keepdim=True)
        return torch.sigmoid(self.weights(x).sum(1) + pairs + self.tower(v.flatten(1)))


@program(small={"count": 4, "features": 5, "rows": 50, "width": 8}, training=True)
def deepfm(count: int = 8192, features: int = 39, rows: int = 1_000_000, width: int = 16) -> Made:
    """DeepFM."""
    return Factorisation(features, rows, width), whole(rows, count, features)


class WideDeep(nn.Module):
    """A linear model of crossed features beside a tower of embeddings."""

    def __init__(self, features: int, rows: int, width: int) -> None:
        super().__init__()
        self.wide, self.table = nn.EmbeddingBag(rows, 1, mode="sum"), nn.Embedding(rows, width)
        self.tower = tower(features * width, 1024, 512, 256, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(x) + self.tower(self.table(x).flatten(1))


@program(small={"count": 4, "features": 5, "rows": 50, "width": 8}, training=True)
def wide_deep(count: int = 8192, features: int = 26, rows: int = 200_000, width: int = 32) -> Made:
    """Wide and deep."""
    return WideDeep(features, rows, width), whole(rows, count, features)


class CrossLayer(nn.Module):
    """x0 * (W x + b) + x, several times (DCN's second version)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.tower, self.out = tower(width, 1024, 512), nn.Linear(width + 512, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = x * layer(y) + y
        return self.out(torch.cat((y, self.tower(x)), -1))


@program(small={"count": 4, "width": 24, "layers": 2}, training=True)
def deep_cross(count: int = 8192, width: int = 1024, layers: int = 3) -> Made:
    """Deep and cross."""
    return CrossLayer(width, layers), normal(count, width)


class TwoTowers(nn.Module):
    """Users and items, each by a tower; the loss of each against all in the batch."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(rows, width), nn.Embedding(rows, width)
        self.user, self.item = tower(width, 512, width), tower(width, 512, width)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        a, b = f.normalize(self.user(self.users(user)), dim=-1), f.normalize(self.item(self.items(item)), dim=-1)
        return f.cross_entropy((a @ b.T).float() / 0.05, torch.arange(len(user), device=user.device))


@program(small={"count": 8, "rows": 50, "width": 16}, training=True)
def two_towers(count: int = 4096, rows: int = 200_000, width: int = 128) -> Made:
    """Two towers, contrasted."""
    return TwoTowers(rows, width), whole(rows, count), whole(rows, count)


class Interest(nn.Module):
    """A history weighted by how it fits a candidate (DIN's)."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.items, self.fit, self.out = (
            nn.Embedding(rows, width),
            tower(4 * width, 80, 40, 1),
            tower(2 * width, 200, 80, 1),
        )

    def forward(self, history: Tensor, item: Tensor) -> Tensor:
        keys, query = self.items(history), self.items(item)[:, None].expand(-1, history.shape[1], -1)
        fit = self.fit(torch.cat((query, keys, query - keys, query * keys), -1))
        fit = torch.where((history > 0)[..., None], fit, float("-inf")).softmax(1)
        return self.out(torch.cat(((fit * keys).sum(1), query[:, 0]), -1))


@program(small={"count": 4, "length": 6, "rows": 50, "width": 8}, training=True)
def deep_interest(count: int = 2048, length: int = 100, rows: int = 500_000, width: int = 64) -> Made:
    """Deep interest."""
    return Interest(rows, width), 1 + whole(rows - 1, count, length), whole(rows, count)


class Sequential(nn.Module):
    """A transformer over what was bought, scored against all items (SASRec's, transformer4rec's)."""

    def __init__(self, rows: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(rows, width), nn.Parameter(torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList((layer,))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.items(x) + self.places
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        for layer in self.layers:
            y = layer(y, src_mask=mask)
        return self.norm(y)[:, -1] @ self.items.weight.T


@program(small={"count": 4, "length": 6, "rows": 50, "width": 16, "heads": 2}, training=True)
def transformer4rec(count: int = 256, length: int = 200, rows: int = 50_000, width: int = 256, heads: int = 4) -> Made:
    """A sequential recommender."""
    return Sequential(rows, width, heads, length), whole(rows, count, length)


class SelfInteraction(nn.Module):
    """Attention over features (AutoInt's)."""

    def __init__(self, features: int, rows: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.table = heads, nn.Embedding(rows, width)
        self.qkv, self.same = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.out = nn.Linear(features * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        v = self.table(x)
        q, k, w = self.qkv(v).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = (torch.softmax(q @ k.transpose(-1, -2), -1) @ w).transpose(1, 2).flatten(2)
        return self.out(f.relu(mixed + self.same(v)).flatten(1))


@program(small={"count": 4, "features": 5, "rows": 50, "width": 8, "heads": 2}, training=True)
def autoint(count: int = 4096, features: int = 39, rows: int = 500_000, width: int = 64, heads: int = 2) -> Made:
    """AutoInt."""
    return SelfInteraction(features, rows, width, heads), whole(rows, count, features)


class MixedExperts(nn.Module):
    """Shared experts, weighted by a gate for each task (MMoE's)."""

    def __init__(self, width: int, experts: int, tasks: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(tower(width, 512, 256) for _ in range(experts))
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(tasks))
        self.heads = nn.ModuleList(tower(256, 64, 1) for _ in range(tasks))

    def forward(self, x: Tensor) -> Tensor:
        every = torch.stack([expert(x) for expert in self.experts], 1)
        found = (torch.softmax(gate(x), -1)[:, None] @ every for gate in self.gates)
        return torch.cat([head(y[:, 0]) for head, y in zip(self.heads, found, strict=True)], -1)


@program(small={"count": 4, "width": 12, "experts": 2, "tasks": 2}, training=True)
def multi_task_experts(count: int = 8192, width: int = 512, experts: int = 8, tasks: int = 3) -> Made:
    """MMoE."""
    return MixedExperts(width, experts, tasks), normal(count, width)
