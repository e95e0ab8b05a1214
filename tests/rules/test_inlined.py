"""Products that other kernels read at places of their own: they are stored, where each of their sums would be taken for
one point, or again for many.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from terrazzo.front.capture import capture
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.sites import product, sites
from terrazzo.ir.text import parse
from terrazzo.ir.verify import problem
from terrazzo.options import Options
from terrazzo.pipelines import LOWER, stages
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.cost import cost
from terrazzo.rules.loop.fusion.fuse import fuse
from terrazzo.targets import target

UPPER = LOWER[: LOWER.index("fuse") + 1]


def relative(q: Any, k: Any, p: Any) -> Any:
    """Scores of distances, each row moved by one place more than the one before it (Transformer-XL's)."""
    batch, heads, rows, _ = q.shape
    far = F.pad(q @ p.mT, (1, 0)).view(batch, heads, -1, rows)[:, :, 1:].view(batch, heads, rows, -1)
    return q @ k.mT + far[..., :rows]


def styled(s: Any, w: Any, weight: Any) -> Any:
    """Weights of a convolution, scaled for every image."""
    return weight * (1 + F.linear(s, w))[:, None, :, None, None]


def modulated(t: Any, w: Any, x: Any) -> Any:
    """A time step's features, added to every place."""
    return x + F.silu(F.linear(t, w))[:, None]


def merged(s: Any, v: Any, r: Any) -> Any:
    """Heads side by side, with what they are added to: the second factor alone knows where in its head it is."""
    return F.relu((s @ v).transpose(1, 2).flatten(2) + r)


def gated(x: Any, w: Any, p: Any) -> Any:
    """A number for each row, times its few columns: taken before these."""
    return p * F.linear(x, w)


def fused(fn: Any, shapes: Any, dtype: torch.dtype, arch: str) -> list[l.Kernel]:
    args = [torch.empty(s, dtype=dtype, device="meta") for s in shapes]
    program = capture(fn, args, {}).program
    steps = stages(program, Options(target=arch, libraries="never"), Log(), UPPER)[-1][1].steps
    return [s for s in steps if isinstance(s, l.Kernel)]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (relative, ((2, 12, 249, 64), (2, 12, 249, 64), (1, 12, 497, 64))),
        (relative, ((64, 4, 100, 32), (64, 4, 100, 32), (1, 4, 199, 32))),
        (styled, ((8, 512), (256, 512), (1, 256, 256, 3, 3))),
        (styled, ((64, 100), (96, 100), (1, 33, 96, 1, 1))),
        (modulated, ((8, 512), (768, 512), (8, 1024, 768))),
    ],
)
def test_they_are_tiles(fn: Any, shapes: Any, dtype: torch.dtype, arch: str) -> None:
    """Every sum of products is one of a kernel that is a product."""
    found = [x for x in fused(fn, shapes, dtype, arch) if sites(x).contractions]
    assert found
    assert all(product(x) is not None for x in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_taken_once_is_inlined(dtype: torch.dtype) -> None:
    assert len(fused(merged, ((4096, 2, 39, 39), (4096, 2, 39, 32), (4096, 39, 64)), dtype, "sm_90a")) == 1
    assert len(fused(gated, ((20000, 64), (1, 64), (20000, 3)), dtype, "sm_90a")) == 1


def test_what_is_loaded_at_every_point_has_a_price() -> None:
    """The larger factor, where the other has no axis of its own."""
    rates = target("sm_90a").rates
    (one,) = fused(lambda a, b: (a * b).sum(-1), ((512, 1024), (1, 1024)), torch.float32, "sm_90a")
    (tile,) = fused(lambda a, b: a @ b.mT, ((512, 1024), (512, 1024)), torch.float32, "sm_90a")
    assert cost(one, rates) - rates.launch > 512 * 1024 * rates.load
    assert cost(tile, rates) - rates.launch < 512 * 512 * 1024 * rates.load / 4


def turned(q: Any, k: Any, v: Any, cos: Any, sin: Any) -> Any:
    """Attention whose queries and keys are turned by their places."""

    def turn(x: Any) -> Any:
        one, other = x.chunk(2, -1)
        return x * cos + torch.cat((-other, one), -1) * sin

    return F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)


def stacked(*factors: Any) -> Any:
    """Small matrices by place, each a sum over many rows, as gradients of a stack of weights."""
    return torch.stack([x.mT @ y for x, y in zip(factors[::2], factors[1::2], strict=True)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_small_matrices_are_not_multiplied_for_all_of_a_stack(dtype: torch.dtype) -> None:
    """Two rows and columns are no tile: each multiply-add loads both factors, and five times as many would be taken."""
    done = fused(stacked, [(512, 2048, 2)] * 10, dtype, "sm_90a")
    found = [s for s in done if sites(s).contractions]
    assert len(found) == 5 and all(math.prod(a.extent for a in s.axes) == 512 * 2 * 2 for s in found)


@pytest.mark.parametrize("heads", [32, 28])
def test_queries_of_few_tokens_are_turned_before_their_scores(heads: int) -> None:
    """On their way to the products they would be made of five loads for each of their elements, on CUDA cores."""
    shapes = [(1, heads, 32, 128)] * 3 + [(1, 1, 32, 128)] * 2
    kernels = fused(turned, shapes, torch.bfloat16, "sm_90a")
    assert [len(x.reads) for x in kernels if sites(x).contractions] == [2, 2]


def test_a_view_that_is_stored_beside_something_else_leaves_that_alone() -> None:
    """Readers of the view look through it; who stores it stores the other thing for its own readers."""
    text = (
        "@loop\n"
        "def f(x: f32[4, 4]):\n"
        "    with kernel('t', t=f32[4, 4], u=f32[4, 4]):\n"
        "        for a0 in free(4):\n"
        "            for a1 in free(4):\n"
        "                in0 = x[a1, a0]\n"
        "                v0 = exp(in0)\n"
        "                t[a0, a1] = in0\n"
        "                u[a0, a1] = v0\n"
        "    with kernel('z', z=f32[4, 4]):\n"
        "        for a0 in free(4):\n"
        "            for a1 in free(4):\n"
        "                in0 = t[a1, a0]\n"
        "                v0 = tanh(in0)\n"
        "                z[a0, a1] = v0\n"
        "    with kernel('y', y=f32[4, 4]):\n"
        "        for a0 in free(4):\n"
        "            for a1 in free(4):\n"
        "                in0 = u[a1, a0]\n"
        "                v0 = tanh(in0)\n"
        "                y[a0, a1] = v0\n"
        "    return (z, y)\n"
    )
    fused = fuse(parse(text), Log(), target("cpu").rates)
    assert not problem(fused)
    assert {b.name for s in fused.steps for b in s.writes} >= {"z", "y"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_is_not_stored_window_by_window(dtype: torch.dtype, stride: int) -> None:
    """By what pools it: two axes would walk each dimension of its image, which is no box then. In float32 it left the
    tensor cores, and a step of 32 x 64 x 64 x 64 took 1572 us by the model, where 552 are enough.
    """

    def windows(x: Any, w: Any) -> Any:
        y = F.conv2d(x, w, stride=stride, padding=1)
        return y.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 1, 2, 4, 3, 5).contiguous()

    kernels = fused(windows, ((32, 64, 64, 64), (64, 64, 3, 3)), dtype, "sm_90a")
    (kernel,) = [x for x in kernels if product(x) is not None]
    assert [s.buffer.type.rank for s in kernel.stores] == [4]


def test_what_windows_read_beyond_the_edge_is_stored_first() -> None:
    """In float32: it is 0 there, and one more than that is not, so it would have no parts for tensor cores. Without an
    edge, parts are of what is computed.
    """
    x, w = torch.randn(2, 32, 16, 16), torch.randn(64, 32, 3, 3)

    def made(padding: int) -> list[str]:
        program = capture(lambda x, w: F.conv2d(x + 1, w, padding=padding), (x, w), {}).program
        found = stages(program, Options(target="sm_90a", libraries="never"), Log(), UPPER)[-1][1]
        return [s.name for s in found.steps]

    assert made(1) == ["add", "convolution"] and made(0) == ["convolution"]
