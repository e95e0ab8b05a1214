"""Rows that begin anywhere, which TMA moves in no boxes: results gather in shared memory all the same, and threads
carry whole rows of them off; operands come in pieces of as many elements as lie together.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.hw.sass import sass
from tests.kernels.test_filled import chosen

from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.interp import loop
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.schedule import Schedule
from terrazzo.ir.sites import product
from terrazzo.ir.text import parse
from terrazzo.rules.loop_to_tile.products import products, warpgroups
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


@pytest.mark.parametrize(
    ("shape", "by"),
    [((70, 21, 131), "ld"), ((70, 22, 130), "cp.async"), ((33, 20, 132), "cp.async"), ((9, 77, 65), "ld")],
)
def test_operands_come_in_pieces(shape: tuple[int, int, int], by: str) -> None:
    m, n, depth = shape
    program = parse(f"""@loop
def f(x: f16[{m}, {depth}], w: f16[{depth}, {n}]):
    with kernel('y', y=f16[{m}, {n}]):
        for a0 in free({m}):
            for a1 in free({n}):
                for r0 in reduce({depth}):
                    acc0 <- sum(mul(f32(x[a0, r0]), f32(w[r0, a1])))
                y[a0, a1] = f16(acc0)
    return (y,)
""")
    p = product(program.steps[0])
    assert p is not None
    rng = np.random.default_rng(0)
    given = {b.name: rng.standard_normal(b.type.static_shape).astype(np.float16) for b in program.inputs}
    (exact,) = loop.run(program, given)
    for plan in [x for x in products.plans(p, H200) if x.pieces == 1][:3]:
        assert plan.instruction and plan.by == by
        kernel = derived(p.kernel, products.schedule(p, plan, H200), H200)
        assert isinstance(kernel, k.Kernel)
        whole = k.Program("f", program.inputs, (kernel,), program.results)
        check(whole, H200)
        (found,) = simulator.run(whole, given, seed=3)
        off = np.abs(np.asarray(found, np.float64) - np.asarray(exact, np.float64)).max()
        assert off <= 2**-10 * np.abs(np.asarray(exact, np.float64)).max()


def test_few_columns_of_odd_rows_are_copied_nowhere() -> None:
    """To copy 2938 x 4343 numbers takes longer than to multiply them by 53 columns."""
    done = chosen(torch.matmul, (2938, 4343), (4343, 53))
    schedule = str(done.at("tile").schedules[0][1])
    assert "mma.m16n8k16" in schedule and 'smem(by="ld"' in schedule and len(done.loop.steps) == 2


def test_neighbours_are_stored_one_after_the_other(tmp_path: Path) -> None:
    """A warp stores 64 bytes of a row at once, and waits for no store: all are loaded from shared memory before."""
    _, _, kernel = scheduled(1024, 50257, 768, (2, 1, 256))
    lines = sass(kernel, "sm_90a", tmp_path)
    assert not any("LDL" in line or "STL" in line for line in lines)
    stores = [n for n, line in enumerate(lines) if "STG.E.U16" in line]
    loads = [n for n, line in enumerate(lines) if "LDS.U16" in line]
    assert len(stores) == len(loads) and any(b - a == 1 for a, b in pairwise(stores))
