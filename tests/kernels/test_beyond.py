"""Boxes that go beyond what a block may read: steps that blocks of a cluster share go on behind the last one, and
slices end amid others. What lies there is somebody else's, be it infinite.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import lowered

from terrazzo.errors import Limitation
from terrazzo.interp import kernel as simulator
from terrazzo.interp.torch import call_numpy
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop_to_tile.products import product_candidates

PIECES, PIECE, SHARED = 3, 448, 4
"""Of seven blocks of 64 rows a piece, which four blocks of a cluster take in two steps each."""
PROGRAM = """
@loop
def f(g: bf16[{rows}, 64], x: bf16[{rows}, 64]):
    with kernel('z', z=f32[3, 64, 64]):
        for s in free(3):
            for a0 in free(64):
                for a1 in free(64):
                    for r0 in reduce(448):
                        in0 = g[r0 + s * 448, a0]{guard}
                        v0 = f32(in0)
                        in1 = x[r0 + s * 448, a1]{guard}
                        v1 = f32(in1)
                        v2 = mul(v0, v1)
                        acc0 <- sum(v2)
                    z[s, a0, a1] = acc0
    return (z,)
"""
SCHEDULE = """with schedule("z", target="sm_90a"):
    s = grid(3)
    a0 = grid(1) * block(64)
    a1 = grid(1) * block(64)
    r0 = cluster(4) * time(2, ring=4) * block(64)
    roles(load=warp(1), math=warpgroup(1))
    with site("acc0", on="wgmma.m64n64k16.f32.bf16"):
        a0 = warpgroup(1) * inst.m(64)
        a1 = inst.n(64)
        r0 = reg(4) * inst.k(16)
        g = smem(by="tma", swizzle=128)
        x = smem(by="tma", swizzle=128)
    with site("z"):
        a0 = like("acc0")
        a1 = like("acc0")
"""


def pieces(rows: int) -> Any:
    """The kernel of sums over pieces of so many rows, of which the last may be shorter."""
    guard = f" if r0 + s * {PIECE} < {rows} else 0" if rows < PIECES * PIECE else ""
    program = parse(PROGRAM.format(rows=rows, guard=guard))
    return lowering(program, Options(target="sm_90a", schedules=(SCHEDULE,))).at("kernel")


def test_blocks_that_share_steps_do_not_read_the_next_piece() -> None:
    """The eighth step of a piece is none: it is beyond the tensor, and all zeros."""
    rows = PIECES * PIECE
    rng = np.random.default_rng(0)
    given = {n: rng.standard_normal((rows, 64)).astype(ml_dtypes.bfloat16) for n in ("g", "x")}
    (found,) = simulator.run(pieces(rows), given, call=call_numpy)
    g, x = (given[n].astype(np.float64).reshape(PIECES, PIECE, 64) for n in ("g", "x"))
    np.testing.assert_allclose(found, g.transpose(0, 2, 1) @ x, atol=1e-3)


def test_a_schedule_under_which_they_would_is_none() -> None:
    with pytest.raises(Limitation, match="TMA"):
        pieces(PIECES * PIECE - 44)


@pytest.mark.parametrize("first", [8, 20])
def test_what_lies_behind_a_slice_of_channels_is_not_multiplied(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_candidates, "best", lambda *_: 1e12)
    monkeypatch.setattr(product_candidates, "after", lambda *_: 1e12)

    def sliced(x: Any, w: Any) -> Any:
        return F.conv2d(x[:, first : first + 20], w, padding=1)

    torch.manual_seed(0)
    x, w = torch.randn(2, 48, 9, 16), torch.randn(24, 20, 3, 3)
    x[:, first + 20 :] = torch.inf
    x[:, :first] = torch.nan
    args = x.bfloat16().to(memory_format=torch.channels_last), w.bfloat16()
    found = lowered(sliced, args, "sm_90a")
    assert any(e.fired and e.rule == "boxes" for e in found.lowering.log.events)
    exact = sliced(*(v.double() for v in args)).numpy()
    (ours,) = found.simulated()
    assert np.abs(ours.astype(np.float64) - exact).max() <= 2.0**-7 * np.abs(exact).max()
