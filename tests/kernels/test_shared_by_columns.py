"""What the columns that a thread has side by side share is loaded once, where the first of them is in range."""

from __future__ import annotations

import numpy as np
import torch

from terrazzo.interp import kernel as simulator
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering

HEADS = """
@tile
def f(scores: f32[25, 2], to: i64[25], most: f32[9, 2]):
    with kernel('z', z=f32[25, 2]):
        for a0 in free(50):
            in0 = scores[a0 // 2, a0 % 2]
            in1 = to[a0 // 2]
            in2 = most[at(in1, 9), a0 % 2]
            v0 = sub(in0, in2)
            v1 = exp(v0)
            v2 = index(at(in1, 9))
            for r0 in reduce(25):
                in3 = to[r0]
                v3 = index(at(in3, 9))
                v4 = eq(v3, v2)
                in4 = scores[r0, a0 % 2]
                in5 = most[at(in3, 9), a0 % 2]
                v5 = sub(in4, in5)
                v6 = exp(v5)
                v7 = where(v4, v6, f32(0.0))
                acc0 <- sum(v7)
            v8 = div(v1, acc0)
            z[a0 // 2, a0 % 2] = v8
    with schedule("z", target="sm_90a"):
        a0 = grid(7) * lane(4) * reg(2)
        with site("acc0"):
            r0 = reg(4) * lane(8)
    return (z,)
"""
"""Weights of the edges of a graph (GAT), of two heads: 50 columns, which tiles of 8 overhang. Heads share the node that
an edge goes to.
"""


def test_heads_share_the_node_of_an_edge() -> None:
    torch.manual_seed(0)
    scores, to = torch.randn(25, 2), torch.randint(0, 9, (25,))
    most = torch.full((9, 2), -torch.inf).scatter_reduce(0, to[:, None].expand(-1, 2), scores, "amax")
    program = lowering(parse(HEADS), Options(target="sm_90a")).at("kernel")
    (found,) = simulator.run(program, {"scores": scores.numpy(), "to": to.numpy(), "most": most.numpy()})
    weights = (scores.double() - most.double()[to]).exp()
    exact = weights / torch.zeros(9, 2, dtype=torch.float64).index_add(0, to, weights)[to]
    assert np.abs(found - exact.numpy()).max() <= 1e-6
