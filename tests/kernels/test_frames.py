"""Reductions in a frame of what lies in memory: rows too long for registers are read once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.test_arrangements import SEEDS
from tests.kernels.test_joined import lowered

from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.interp import loop
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.targets.cuda.check import check

ROWS = """@tile
def f(x: f32[5, {columns}]):
    with kernel("z", z=f32[5]):
        for a0 in free(5):
            for r0 in reduce({columns}):
                acc0 <- logsumexp(x[a0, r0], f32(1.0))
            z[a0] = add(get(acc0, 0), log(get(acc0, 1)))
    with schedule("z", target="sm_80"):
        a0 = grid(5)
        with site("acc0"):
            r0 = {bound}
    return (z,)
"""
CASES = {
    "steps": (1024, "time(2) * reg(2) * warp(2) * lane(32) * reg(4)"),
    "ragged": (700, "time(3) * reg(2) * warp(2) * lane(32) * reg(2)"),
    "odd": (701, "time(3) * reg(4) * warp(2) * lane(32)"),
    "one step": (500, "reg(4) * lane(32) * reg(4)"),
    "elements": (130, "time(3) * warp(2) * lane(32)"),
}


def values(columns: int) -> Any:
    x = np.random.default_rng(0).standard_normal((5, columns)).astype(np.float32) * 40
    x[1] = -np.inf
    x[2, 7] = np.inf
    x[3, columns - 1] = np.nan
    x[4, : columns // 2] = -np.inf
    return x


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_in_one_frame(name: str, seed: int | None) -> None:
    columns, bound = CASES[name]
    program = parse(ROWS.format(columns=columns, bound=bound))
    assert isinstance(program, tile.Program)
    kernels = lowering(program, Options(target="sm_80")).at("kernel")
    check(kernels, gpu("sm_80"))
    given = {"x": values(columns)}
    with np.errstate(all="ignore"):
        ((ours,), (best,)) = simulator.run(kernels, given, seed=seed), loop.run(program.loop, given, precise=True)
        exact = torch.logsumexp(torch.from_numpy(given["x"]).double(), -1).numpy()
    np.testing.assert_allclose(ours, best, rtol=1e-6)
    np.testing.assert_allclose(ours, exact, rtol=1e-6)
    exponentials = [s for x in kernels.steps for s in k.walk(x.body) if "approx_exp2" in str(getattr(s, "value", ""))]
    assert len(exponentials) >= 2


def loss(x: Any, y: Any) -> Any:
    return F.cross_entropy(x.float(), y)


@pytest.mark.parametrize(
    ("rows", "columns", "once"), [(2048, 128256, True), (2048, 8192, False), (2048, 50257, False), (64, 128256, False)]
)
def test_rows_that_neither_registers_nor_the_cache_hold_are_read_once(rows: int, columns: int, once: bool) -> None:
    given = torch.empty(rows, columns).bfloat16(), torch.zeros(rows, dtype=torch.int64)
    program = lowered(loss, given).at("tile").loop
    monoids = [r.monoid.name for s in program.steps if isinstance(s, l.Kernel) for r in s.carried]
    assert ("logsumexp" in monoids) == once
