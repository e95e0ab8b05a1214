"""Results whose memory runs along the tile's rows: matrices are turned on their way to shared memory
(stmatrix.trans), from where they leave in boxes.
"""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from terrazzo.errors import TerrazzoError
from terrazzo.front.capture import capture
from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.ir.sites import product
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop_to_tile.products import leaving, warpgroups
from terrazzo.targets.cuda.check import check

H = gpu("sm_90a")
HALF = torch.bfloat16
SCHEDULE = """with schedule("{name}", target="sm_90a"):
    a0 = grid({across}) * block({n})
    a1 = grid({down}) * block(128)
    r0 = time(2, ring=2) * block(64)
    persistent(2)
    roles(load=warp(1), math=warpgroup(2), registers=(40, 232))
    with site("acc0", on="wgmma.m64n{n}k16.f32.bf16"):
        a1 = warpgroup(2) * inst.m(64)
        a0 = inst.n({n})
        r0 = reg(4) * inst.k(16)
        x = smem(by="tma", swizzle=128)
        w = smem(by="tma", swizzle=128)
    with site("{name}"):
        a0 = time({subtiles}, ring=2) * block({width})
        {name} = smem(by="tma", swizzle=128)
"""


def plain(x: Any, w: Any) -> Any:
    return torch.nn.functional.linear(x, w)


def residual(x: Any, w: Any, r: Any) -> Any:
    return torch.nn.functional.linear(x, w) + r


def bias(x: Any, w: Any, b: Any) -> Any:
    return torch.relu(torch.nn.functional.linear(x, w, b))


def lowered(fn: Any, rows: int, columns: int, n: int, width: int) -> tuple[Any, tuple[Any, ...]]:
    make = lambda *s: torch.randn(s, generator=torch.Generator().manual_seed(sum(s))).to(HALF)  # noqa: E731
    more = {plain: (), residual: ((rows, columns),), bias: ((columns,),)}[fn]
    given = tuple(make(*s) for s in ((rows, 128), (columns, 128), *more))
    program = capture(fn, given, {}).program
    name = re.search(r'schedule\("(\w+)"', str(lowering(program, Options(target="sm_90a")).at("tile").schedules[0][1]))
    assert name is not None
    pinned = SCHEDULE.format(
        name=name[1], n=n, width=width, subtiles=n // width, across=-(-rows // n), down=-(-columns // 128)
    )
    return lowering(program, Options(target="sm_90a", libraries="never", schedules=(pinned,))), given


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(("fn", "rows", "columns", "n", "width"), [
    (plain, 64, 256, 32, 32), (plain, 50, 200, 32, 16), (residual, 64, 136, 32, 32), (bias, 60, 256, 64, 32),
])  # fmt: skip
def test_results_along_the_rows_are_turned(fn: Any, rows: int, columns: int, n: int, width: int, seed: Any) -> None:
    """Of several tiles and subtiles, that end amid a tile or not, with what is read beside them."""
    done, given = lowered(fn, rows, columns, n, width)
    program = done.at("kernel")
    (plan,) = (p for _, p in done.at("tile").plans)
    assert "turned=True" in str(plan) and "stmatrix.x4.trans" in str(plan)
    check(program, H)
    inputs = {b.name: x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
              for b, x in zip(program.inputs, given, strict=True)}  # fmt: skip
    (y,) = simulator.run(program, inputs, seed=seed)
    exact = fn(*(x.double() for x in given)).numpy()
    eager = fn(*given).double().numpy()
    off, usual = (np.linalg.norm(z - exact) for z in (y.astype(np.float64), eager))
    assert off <= 1.05 * usual


@pytest.mark.parametrize(("before", "after", "why"), [
    ('mm = smem(by="tma", swizzle=128)', 'mm = smem(by="ld", swizzle=128)', "leave by TMA"),
    ('mm = smem(by="tma", swizzle=128)', 'mm = smem(by="tma", swizzle=64)', "128 bytes wide, and the swizzle 64"),
])  # fmt: skip
def test_what_turns_no_results_is_refused(before: str, after: str, why: str) -> None:
    given = tuple(torch.empty(s, dtype=HALF, device="meta") for s in ((64, 128), (256, 128)))
    text = SCHEDULE.format(name="mm", n=32, width=32, subtiles=1, across=2, down=2).replace(before, after)
    assert after in text
    with pytest.raises(TerrazzoError, match=why):
        lowering(capture(plain, given, {}).program, Options(target="sm_90a", libraries="never", schedules=(text,)))


def test_many_columns_of_weights_made_in_registers_are_turned() -> None:
    """128 x 256 results stored one by one took 5 to 9 us (H200)."""

    def eight(x: Any, q: Any, s: Any) -> Any:
        return torch.nn.functional.linear(x, q.to(x.dtype)) * s

    kinds = (((4096, 4096), HALF), ((4096, 4096), torch.int8), ((4096,), HALF))
    given = tuple(torch.empty(s, dtype=d, device="meta") for s, d in kinds)
    done = lowering(capture(eight, given, {}).program, Options(target="sm_90a", libraries="never"))
    p = product(next(s for s in done.at("tile").loop.steps))
    assert p is not None
    best = warpgroups.plans(p, H)[0]
    assert best.tile.rows is p.n and leaving.leaves(p, best.tile) == "tma"
    (step,) = done.at("kernel").steps
    assert any("stmatrix.x4.trans" in line for line in str(step).splitlines())
