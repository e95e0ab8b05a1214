"""Gradients of windows that are not all of one size."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from terrazzo.front.capture import capture
from terrazzo.interp import kernel as simulator
from terrazzo.ir.dialects import loop as l
from terrazzo.options import Options
from terrazzo.pipelines import lowering

SIZES = [((2, 3, 7, 9), (3, 4)), ((1, 2, 16, 16), (7, 7)), ((2, 2, 5, 4), (7, 6)), ((1, 2, 5, 7, 6), (3, 2, 4))]


@pytest.mark.parametrize(("shape", "size"), SIZES, ids=str)
def test_a_place_gets_its_share_of_all_windows_it_is_in(shape: tuple[int, ...], size: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    pool = F.adaptive_avg_pool2d if len(size) == 2 else F.adaptive_avg_pool3d
    y = pool(x.requires_grad_(), size)
    grad = torch.randn_like(y)
    y.backward(grad)
    op = getattr(torch.ops.aten, f"_adaptive_avg_pool{len(size)}d_backward").default
    program = capture(lambda g, x: op(g, x), (grad, x.detach())).program
    done = lowering(program, Options(target="sm_90a", libraries="never"))
    assert all(isinstance(s, l.Kernel) for s in done.loop.steps)
    given = {b.name: v.detach().numpy() for b, v in zip(program.inputs, (grad, x), strict=False)}
    (found,) = simulator.run(done.at("kernel"), given)
    torch.testing.assert_close(torch.from_numpy(found), x.grad)
