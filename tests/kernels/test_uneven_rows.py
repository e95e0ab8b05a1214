"""Results whose rows begin anywhere, which TMA takes away in no boxes: they gather in shared memory all the same, and
threads carry whole rows of them off.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tests.hw.sass import sass

from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.interp import loop
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.schedule import Schedule
from terrazzo.ir.sites import product
from terrazzo.ir.text import parse
from terrazzo.rules.loop_to_tile import warpgroups
from terrazzo.rules.tile_to_kernel.lower import derived
from terrazzo.targets.cuda.check import check

H200 = gpu("sm_90a")


def scheduled(m: int, n: int, depth: int, tile: tuple[int, int, int]) -> tuple[l.Program, Schedule, k.Kernel]:
    """A linear layer in tiles of so many warpgroups, instructions of rows, and columns."""
    program = parse(f"""@loop
def f(x: bf16[{m}, {depth}], w: bf16[{n}, {depth}], b: bf16[{n}]):
    with kernel('y', y=bf16[{m}, {n}]):
        for a0 in free({m}):
            for a1 in free({n}):
                for r0 in reduce({depth}):
                    acc0 <- sum(mul(f32(x[a0, r0]), f32(w[a1, r0])))
                y[a0, a1] = bf16(add(acc0, f32(b[a1])))
    return (y,)
""")
    p = product(program.steps[0])
    assert p is not None
    plan = next(
        x
        for x in warpgroups.plans(p, H200)
        if (x.pieces, x.tile.split, x.tile.rows) == (1, None, p.m) and (x.tile.groups, x.tile.each, x.tile.n) == tile
    )
    schedule = warpgroups.schedule(p, plan, H200)
    kernel = derived(p.kernel, schedule, H200)
    assert isinstance(kernel, k.Kernel)
    return program, schedule, kernel


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((130, 77, 128), (2, 1, 64)),
        ((70, 150, 64), (1, 1, 64)),
        ((130, 203, 64), (2, 1, 128)),
        ((64, 100, 64), (1, 1, 96)),
    ],
)
def test_rows_of_results_leave_shared_memory(shape: tuple[int, int, int], tile: tuple[int, int, int]) -> None:
    program, schedule, kernel = scheduled(*shape, tile)
    assert 'y = smem(by="ld"' in str(schedule)
    whole = k.Program("f", program.inputs, (kernel,), program.results)
    check(whole, H200)
    rng = np.random.default_rng(0)
    given = {b.name: rng.standard_normal(b.type.static_shape).astype(ml_dtypes.bfloat16) for b in program.inputs}
    found, exact = (np.asarray(f(p, given, **how)[0], np.float64) for f, p, how in (
        (simulator.run, whole, {"seed": 3}), (loop.run, program, {})
    ))  # fmt: skip
    assert np.abs(found - exact).max() <= 2**-8 * np.abs(exact).max()


def test_neighbours_are_stored_one_after_the_other(tmp_path: Path) -> None:
    """A warp stores 64 bytes of a row at once, and waits for no store: all are loaded from shared memory before."""
    _, _, kernel = scheduled(1024, 50257, 768, (2, 1, 256))
    lines = sass(kernel, "sm_90a", tmp_path)
    assert not any("LDL" in line or "STL" in line for line in lines)
    stores = [n for n, line in enumerate(lines) if "STG.E.U16" in line]
    loads = [n for n, line in enumerate(lines) if "LDS.U16" in line]
    assert len(stores) == len(loads) and any(b - a == 1 for a, b in pairwise(stores))
