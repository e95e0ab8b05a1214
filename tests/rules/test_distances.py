"""Gradients of distances are sums that are computed where they are needed; PyTorch's op writes all their terms."""

from __future__ import annotations

import math

import pytest
import torch

import terrazzo
from terrazzo.front.capture import capture
from terrazzo.ir.dialects import loop
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop.memory.lifetimes import in_use


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf])
def test_as_of_pytorch(p: float) -> None:
    torch.manual_seed(0)
    x, y, grad = torch.randn(2, 5, 3), torch.randn(1, 7, 3), torch.randn(2, 5, 7)
    y[0, 1], y[0, 2, 0] = x[0, 2], x[1, 3, 0]  # two points in one place, and two beside each other
    fn = lambda g, a, b, d: torch.ops.aten._cdist_backward(g, a, b, p, d)  # noqa: E731
    dist = torch.cdist(x, y, p, compute_mode="donot_use_mm_for_euclid_dist")
    ours = terrazzo.compile(fn, grad, x, y, dist, options={"target": "interpreter", "strict": True})(grad, x, y, dist)
    wide = [v.double() for v in (x, y)]
    exact = fn(grad.double(), *wide, torch.cdist(*wide, p, compute_mode="donot_use_mm_for_euclid_dist"))
    assert torch.isfinite(exact).all()
    assert torch.allclose(ours.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("points", "dim"), [(2048, 3), (4096, 64)])
def test_no_terms_in_memory(points: int, dim: int) -> None:
    """One kernel, and some transposed operands; no tensor of points x points x dim, which takes 4 GB of 4096 x 64."""
    shapes = ((points, points), (points, dim), (points, dim), (points, points))
    args = tuple(torch.empty(s, device="meta") for s in shapes)
    fn = lambda g, x, y, d: torch.ops.aten._cdist_backward(g, x, y, 2.0, d)  # noqa: E731
    done = lowering(capture(fn, args, {}).program, Options(target="sm_90a"))
    assert all(isinstance(s, loop.Kernel) for s in done.loop.steps)
    assert max(in_use(done.loop.steps, done.loop.results)) < 2 * 4 * points * points
