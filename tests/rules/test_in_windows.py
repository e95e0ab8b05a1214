"""What is stored only to be read soon is made in windows: which kernels go together, what stays, what calls give."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from terrazzo.interp.loop import run
from terrazzo.interp.torch import call_numpy
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.regions import WHOLE, WINDOW, regions
from terrazzo.ir.text import parse, show
from terrazzo.ir.verify import problem
from terrazzo.options import Options
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.memory.in_windows import in_windows
from terrazzo.rules.loop.memory.lifetimes import in_use
from terrazzo.run.compiled import compile_program
from terrazzo.run.misfit import shared
from terrazzo.run.plan import Plan

PARTS = """
    with kernel('{x}_parts', {x}_1=f32[{n}, 512]):
        for a0 in free({n}):
            for a1 in free(512):
                in0 = {x}[a0, a1]
                v0 = neg(in0)
                {x}_1[a0, a1] = v0"""
PRODUCT = """
    with kernel('{y}', {y}=f32[{m}, {n}]):
        for a0 in free({m}):
            for a1 in free({n}):
                for r0 in reduce(512):
                    in0 = {x}[{row}]
                    in1 = {w}[{column}]
                    v0 = mul(in0, in1)
                    acc0 <- sum(v0)
                {y}[a0, a1] = acc0"""


def parts(x: str, n: int) -> str:
    return PARTS.format(x=x, n=n)


def product(x: str, w: str, y: str, m: int, n: int, row: str = "a0, r0", column: str = "a1, r0") -> str:
    return PRODUCT.format(x=x, w=w, y=y, m=m, n=n, row=row, column=column)


def program(*kernels: str, results: str, inputs: str = "x: f32[256, 512], w: f32[2048, 512]") -> Any:
    return parse(f"@loop\ndef f({inputs}):" + "".join(kernels) + f"\n    return ({results},)")


def windowed(p: Any, price: Any = lambda steps: 1.0) -> tuple[Any, list[Any]]:
    log = Log()
    found = in_windows(p, log, price, lambda maker: True, worth=1 << 20)
    assert not problem(found)
    return found, [e for e in log.events if e.fired]


def same(p: Any, q: Any) -> None:
    """Both give the same; of small whole numbers whatever the order of sums."""
    rng = np.random.default_rng(0)
    given = {b.name: rng.integers(-4, 5, b.type.static_shape).astype(np.float32) for b in p.inputs}
    for one, other in zip(run(p, given, call=call_numpy), run(q, given, call=call_numpy), strict=True):
        np.testing.assert_array_equal(one, other)


def most(p: Any) -> int:
    return max(in_use(p.steps, p.results))


def test_a_weight_in_windows_of_columns() -> None:
    p = program(parts("w", 2048), product("x", "w_1", "y", 256, 2048), results="y")
    found, told = windowed(p)
    named = regions(found.steps, found.results)
    assert told and most(found) < 0.6 * most(p)
    assert named.calls == {s for s in found.steps if isinstance(s, l.Call)}
    assert {s.name for s in named.calls} == {WINDOW, WHOLE}
    (y,) = found.results
    starts = sorted(start for whole, start in named.of.values() if whole is y)
    assert starts[0] == 0 and starts[1] % 256 == 0, "columns of rows"
    assert parse(show(found)) == found
    same(p, found)


def test_who_reads_it_too_goes_along() -> None:
    """Two products read it by rows; where a third one sums over its rows, it stays whole."""
    inputs = "x: f32[4096, 512], w: f32[64, 512], v: f32[64, 4096]"
    both = parts("x", 4096), product("x_1", "w", "y", 4096, 64), product("x_1", "w", "z", 4096, 64)
    p = program(*both, results="y, z", inputs=inputs)
    found, told = windowed(p)
    assert {e.subject for e in told} == {"x_parts", "y", "z"} and most(found) < 0.7 * most(p)
    same(p, found)
    over = product("v", "x_1", "t", 64, 512, column="r0, a1").replace("reduce(512)", "reduce(4096)")
    p = program(*both, over, results="y, z, t", inputs=inputs)
    assert windowed(p)[0] == p


HEADS = """
    with kernel('y', y=f32[16, 64]):
        for a0 in free(16):
            for a1 in free(64):
                for r0 in reduce(256):
                    in0 = x_1[r0 + (a0 // 4) * 256, (a0 % 4) * 128 + a1]
                    in1 = x_1[r0 + (a0 // 4) * 256, (a0 % 4) * 128 + a1 + 64]
                    v0 = mul(in0, in1)
                    acc0 <- sum(v0)
                y[a0, a1] = acc0"""


def test_heads_that_lie_side_by_side_in_rows() -> None:
    """Each window makes the rows that it reads, once for all that reads them."""
    p = program(parts("x", 1024), HEADS, results="y", inputs="x: f32[1024, 512]")
    found, told = windowed(p)
    assert {e.subject for e in told} == {"x_parts", "y"}
    made = [b.type.span for s in found.steps if s.name.startswith("x_parts") for b in s.writes]
    assert sum(made) == 4 * 1024 * 512
    same(p, found)


def test_time_counts() -> None:
    p = program(parts("w", 2048), product("x", "w_1", "y", 256, 2048), results="y")
    found, told = windowed(p, lambda steps: float(len(steps)))
    assert found == p and not told


def test_what_pytorch_reads_stays() -> None:
    sort = "\n    z, k = call('aten.sort.default', w_1, _types=(f32[2048, 512], i64[2048, 512]))"
    p = program(parts("w", 2048), product("x", "w_1", "y", 256, 2048), sort, results="y, z")
    assert windowed(p)[0] == p


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
def test_calls_of_such_programs(tmp_path: Path) -> None:
    """Nothing is called or copied: windows are of inputs, pieces of temporaries."""
    last = product("y", "v", "z", 256, 64, row="a0, r0 * 4")
    p = program(
        parts("w", 2048),
        product("x", "w_1", "y", 256, 2048),
        last,
        results="z",
        inputs="x: f32[256, 512], w: f32[2048, 512], v: f32[64, 512]",
    )
    found, _ = windowed(p)
    options = Options(target="cpu", cache_dir=tmp_path, fuse=False)
    torch.manual_seed(0)
    given = [torch.randint(-4, 5, b.type.static_shape).float() for b in p.inputs]
    plain, ours = (compile_program(x, {}, options) for x in (p, found))
    for one, other in zip(plain(given), ours(given), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    made = ours.plan
    assert all(s.key for s in made.steps) and any(s.of is not None for s in made.slots) and not shared(made)
    assert made.arena < plain.plan.arena
    assert Plan.from_json(made.to_json()) == made
    again = compile_program(found, {}, options)
    assert again.program is None, "it came from the cache"
    torch.testing.assert_close(again(given)[0], plain(given)[0], rtol=0, atol=0)
