"""Retrieval, graphs as whole numbers, sketches, orders: indices that are computed, bits, and what is sorted."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Learned, Made, normal, program, uniform, whole


def late_interaction(q: Tensor, d: Tensor, lengths: Tensor) -> Tensor:
    """ColBERT: every word of a question takes its best word of a document; an in-batch cross-entropy."""
    q, d = f.normalize(q, dim=-1), f.normalize(d, dim=-1)
    s = torch.einsum("qiw,djw->qdij", q, d)
    there = torch.arange(d.shape[1], device=d.device) < lengths[:, None]
    best = s.masked_fill(~there[None, :, None], -1e4).amax(-1).float().sum(-1)
    return f.cross_entropy(best, torch.arange(len(q), device=q.device) % len(d), reduction="none")


@program(small={"questions": 3, "words": 4, "documents": 5, "length": 6, "width": 8}, training=True)
def late_interactions(
    questions: int = 32, words: int = 32, documents: int = 64, length: int = 180, width: int = 128
) -> Made:
    """Late interaction of questions and documents."""
    high = 1 + whole(length, documents)
    return Learned(late_interaction, normal(questions, words, width)), normal(documents, length, width), high


class Splade(nn.Module):
    """A head that spreads words over the vocabulary, their maxima over the text, and the floating-point operations."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.body, self.norm, self.out = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.out(self.norm(f.gelu(self.body(x))))
        y = (torch.log1p(f.relu(logits)) * mask[..., None].to(x.dtype)).amax(1)
        return y, y.float().abs().mean(0).square().sum()


@program(small={"count": 2, "length": 3, "width": 8, "words": 11}, training=True)
def sparse_lexical(count: int = 16, length: int = 256, width: int = 768, words: int = 30522) -> Made:
    """SPLADE's head."""
    return Splade(width, words), normal(count, length, width), whole(2, count, length)


def inverted_lists(q: Tensor, centres: Tensor, codes: Tensor, books: Tensor) -> tuple[Tensor, Tensor]:
    """Two stages: the nearest lists, and in them product codes by tables; the best ten of all."""
    near = (q @ centres.T).topk(4, -1).indices
    tables = torch.einsum("qmd,mkd->qmk", q.unflatten(-1, (books.shape[0], -1)), books)
    found = codes[near].flatten(1, 2).long()  # questions, candidates, codes
    scores = tables.gather(2, found.transpose(1, 2)).sum(1)
    best = scores.topk(10, -1)
    return best.values, near.gather(1, best.indices // codes.shape[1]) * codes.shape[1] + best.indices % codes.shape[1]


@program(small={"questions": 3, "lists": 6, "length": 5, "parts": 2, "width": 8}, dtypes=("f32",))
def inverted_search(
    questions: int = 256, lists: int = 1024, length: int = 512, parts: int = 16, width: int = 128
) -> Made:
    """An inverted file with product codes."""
    codes = whole(256, lists, length, parts).to(torch.uint8)
    return inverted_lists, normal(questions, width), normal(lists, width), codes, normal(parts, 256, width // parts)


def least_hashes(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """MinHash: affine hashes of a set's members modulo a prime, their least; how alike neighbours are."""
    h = (x[:, :, None] * a + b) % 2147483647 % 65536
    least = h.amin(1)
    return least, (least[1:] == least[:-1]).float().mean(-1)


@program(small={"sets": 3, "members": 4, "hashes": 5}, dtypes=("f32",))
def minimum_hashes(sets: int = 4096, members: int = 200, hashes: int = 128) -> Made:
    """Signatures of sets."""
    return least_hashes, whole(1 << 20, sets, members), 1 + whole(1 << 20, hashes), whole(1 << 20, hashes)


def count_sketch(x: Tensor, at: Tensor, sign: Tensor) -> Tensor:
    """Tensors sketched: values added at hashed places with hashed signs, convolved by Fourier transforms."""
    zero = x.float().new_zeros(len(x), 4096)
    s = [zero.index_add(1, at[k], x.float() * sign[k]) for k in range(2)]
    product = torch.fft.irfft(torch.fft.rfft(s[0]) * torch.fft.rfft(s[1]), n=4096)
    return torch.sign(product) * (product.abs() + 1e-4).sqrt()


@program(small={"rows": 2, "width": 6}, dtypes=("f32",))
def compact_bilinear(rows: int = 1024, width: int = 2048) -> Made:
    """Compact bilinear pooling."""
    return count_sketch, normal(rows, width), whole(4096, 2, width), whole(2, 2, width) * 2 - 1


def shortest(d: Tensor) -> Tensor:
    """Floyd and Warshall's paths over the first nodes, in place: a step for every node between."""
    d = d.clone()
    for k in range(24):
        d.copy_(torch.minimum(d, d[:, :, k : k + 1] + d[:, k : k + 1]))
    return d


@program(small={"graphs": 2, "nodes": 24}, dtypes=("f32",))
def shortest_paths(graphs: int = 64, nodes: int = 512) -> Made:
    """Shortest paths between all nodes of graphs."""
    return shortest, uniform(graphs, nodes, nodes) * 10


def components(source: Tensor, target: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Connected components: the least label of the neighbours, and pointers jumped; how large they are."""
    label = start.clone()
    for _ in range(5):
        label = label.scatter_reduce(0, target, label[source], "amin")
        label = label.scatter_reduce(0, source, label[target], "amin")
        label = label[label]
    return label, torch.zeros_like(label).scatter_add_(0, label, torch.ones_like(label))


@program(small={"nodes": 12, "edges": 20}, dtypes=("f32",))
def connected_components(nodes: int = 262_144, edges: int = 1_048_576) -> Made:
    """Connected components of a graph."""
    return components, whole(nodes, edges), whole(nodes, edges), torch.arange(nodes)


class TemporalGraph(nn.Module):
    """TGN: messages of events to the memories of both ends, the last one counting; memories updated by a GRU."""

    def __init__(self, nodes: int, width: int) -> None:
        super().__init__()
        self.register_buffer("memory", torch.sin(torch.arange(nodes * width).float()).view(nodes, width))
        self.register_buffer("seen", torch.zeros(nodes))
        self.rate, self.cell = nn.Parameter(torch.rand(width)), nn.GRUCell(4 * width, width)
        self.out = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, a: Tensor, b: Tensor, time: Tensor, event: Tensor) -> tuple[Tensor, Tensor]:
        ends, others = torch.cat((a, b)), torch.cat((b, a))
        when = torch.cat((time, time))
        since = torch.cos((when - self.seen[ends].to(time.dtype))[:, None] * self.rate)
        x = torch.cat((self.memory[ends], self.memory[others], since, event.repeat(2, 1)), -1)
        last = torch.full((len(self.memory),), -1, device=a.device, dtype=torch.long)
        last = last.scatter_reduce(0, ends, torch.arange(len(ends), device=a.device), "amax")
        new = self.cell(x, self.memory[ends])
        memory = torch.where((last >= 0)[:, None], new[last.clamp(min=0)], self.memory)
        return self.out(torch.cat((memory[a], memory[b]), -1))[:, 0], memory


@program(small={"nodes": 9, "events": 6, "width": 4}, training=True, dtypes=("f32",))
def temporal_graph(nodes: int = 65536, events: int = 8192, width: int = 128) -> Made:
    """Memories of nodes that events change."""
    return (
        TemporalGraph(nodes, width),
        whole(nodes, events),
        whole(nodes, events),
        uniform(events),
        normal(events, width),
    )


class GatedGraph(nn.Module):
    """GGNN: edges of several kinds, messages added at their targets, and a GRU's cell, four times."""

    def __init__(self, width: int, kinds: int) -> None:
        super().__init__()
        self.kinds = nn.Parameter(torch.randn(kinds, width, width) / width**0.5)
        self.cell, self.read = nn.GRUCell(width, width), nn.Linear(2 * width, 2)

    def forward(self, x: Tensor, source: Tensor, target: Tensor, kind: Tensor, graph: Tensor) -> Tensor:
        h = x
        for _ in range(4):
            sent = torch.einsum("nd,kde->nke", h, self.kinds)[source, kind]
            h = self.cell(torch.zeros_like(h).index_add_(0, target, sent), h)
        gate, value = self.read(torch.cat((h, x), -1)).float().chunk(2, -1)
        y = torch.sigmoid(gate) * torch.tanh(value)
        return y.new_zeros(64, 1).index_add_(0, graph, y)[:, 0]


@program(small={"nodes": 10, "edges": 15, "width": 6, "kinds": 2}, training=True, dtypes=("f32",))
def gated_graph(nodes: int = 16384, edges: int = 65536, width: int = 128, kinds: int = 4) -> Made:
    """A gated graph net."""
    ends = whole(nodes, edges), whole(nodes, edges), whole(kinds, edges)
    return GatedGraph(width, kinds), normal(nodes, width), *ends, whole(64, nodes)


def merging_network(x: Tensor) -> Tensor:
    """Batcher's odd-even merge sort as minima and maxima of strided views, written in place."""
    x, n = x.clone(), x.shape[-1]
    p = 1
    while p < n:
        k = p
        while k >= 1:
            for j in range(k % p, n - k, 2 * k):
                i = [j + t for t in range(min(k, n - j - k)) if (t + j) // (2 * p) == (t + j + k) // (2 * p)]
                if i:
                    a, b = x[:, i[0] : i[-1] + 1], x[:, i[0] + k : i[-1] + k + 1]
                    low, high = torch.minimum(a, b), torch.maximum(a, b)
                    x[:, i[0] : i[-1] + 1], x[:, i[0] + k : i[-1] + k + 1] = low, high
            k //= 2
        p *= 2
    return x


@program(small={"rows": 4, "length": 8})
def sorting_network(rows: int = 262_144, length: int = 16) -> Made:
    """Short rows sorted by a network."""
    return merging_network, normal(rows, length)


def run_lengths(x: Tensor) -> tuple[Tensor, ...]:
    """Runs of equal numbers: where they begin, which they are, how long; packed to the front by scattering."""
    new = torch.cat((torch.ones_like(x[:, :1], dtype=torch.bool), x[:, 1:] != x[:, :-1]), 1)
    which = new.long().cumsum(1) - 1
    values = torch.zeros_like(x).scatter(1, which, x)
    lengths = torch.zeros_like(x).scatter_add(1, which, torch.ones_like(x))
    return values, lengths, which[:, -1] + 1, (lengths * values).cummax(1).values


@program(small={"rows": 3, "length": 9}, dtypes=("f32",))
def run_length_codes(rows: int = 1024, length: int = 8192) -> Made:
    """Run-length codes."""
    return run_lengths, whole(3, rows, length)


def counting_ranks(keys: Tensor) -> tuple[Tensor, Tensor]:
    """A pass of a radix sort: digits' counts, places by exclusive sums, keys moved there."""
    for shift in (0, 4):
        digit = (keys >> shift) & 15
        hot = f.one_hot(digit, 16).to(torch.int32)
        before = hot.cumsum(1).gather(2, digit[..., None])[..., 0] - 1
        first = hot.sum(1).cumsum(1) - hot.sum(1)
        place = first.gather(1, digit) + before
        keys = torch.empty_like(keys).scatter(1, place.long(), keys)
    return keys, place


@program(small={"rows": 2, "length": 12}, dtypes=("f32",))
def radix_passes(rows: int = 256, length: int = 4096) -> Made:
    """Keys of a byte sorted by their digits."""
    return counting_ranks, whole(256, rows, length)


def checksums(x: Tensor) -> tuple[Tensor, ...]:
    """Hashes of rows of bytes: FNV's by xor and product, Fletcher's by sums, parities by shifts."""
    h = torch.full_like(x[:, 0], 0x811C9DC5, dtype=torch.int64)
    for k in range(x.shape[1]):
        h = ((h ^ x[:, k].long()) * 0x01000193) & 0xFFFFFFFF
    a = x.long().sum(1) % 65535
    b = x.long().cumsum(1).sum(1) % 65535
    p = x ^ (x >> 4)
    p = p ^ (p >> 2)
    return h, (b << 16) | a, ((p ^ (p >> 1)) & 1).sum(1, dtype=torch.int32)


@program(small={"rows": 3, "length": 5}, dtypes=("f32",))
def row_checksums(rows: int = 1 << 20, length: int = 32) -> Made:
    """Checksums of short texts."""
    return checksums, whole(256, rows, length).to(torch.uint8)


def soft_sorted(x: Tensor, values: Tensor) -> Tensor:
    """NeuralSort: a relaxed permutation of every row by distances to all others, and what it sorts."""
    n = x.shape[-1]
    distance = (x[:, :, None] - x[:, None]).abs().sum(-1)
    scale = n + 1 - 2 * torch.arange(1, n + 1, device=x.device)
    p = torch.softmax((scale[:, None] * x[:, None].float() - distance[:, None].float()) / 5, -1).to(x.dtype)
    return p @ values


@program(small={"rows": 3, "length": 5, "width": 4}, training=True)
def relaxed_sorting(rows: int = 64, length: int = 512, width: int = 64) -> Made:
    """Rows sorted softly."""
    return Learned(soft_sorted, normal(rows, length)), normal(rows, length, width)
