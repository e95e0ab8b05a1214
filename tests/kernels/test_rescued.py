"""Three products of float16 in the place of one of float32, and sums on CUDA cores where these will not do: kernels in
the simulator.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.hw.sass import sass
from tests.rules.test_parts import text
from tests.rules.test_scaled_parts import halved

from terrazzo.errors import UserError
from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.interp import loop
from terrazzo.interp.costs import Costs
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Loaded
from terrazzo.ir.node import topological
from terrazzo.ir.parse_plan import parse_plan
from terrazzo.ir.plan import Rescue
from terrazzo.ir.sites import product
from terrazzo.ir.text import parse, show
from terrazzo.ir.verify_kernel import places
from terrazzo.options import Options
from terrazzo.pipelines import stages
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop_to_tile.products import warpgroups
from terrazzo.rules.tile.verify import verify
from terrazzo.rules.tile_to_kernel.lower import derived

SM90 = Options(target="sm_90a", libraries="never")


@lru_cache
def lowered(m: int, n: int, depth: int, more: str = "y[a0, a1] = acc0") -> Any:
    """A product in two parts each, down to Kernel IR."""
    program = halved(text(m, n, depth).replace("y[a0, a1] = acc0", more))
    below = stages(program, SM90, Log(), ("schedule", "plan", "derive"))
    return {"loop": program, **{p.dst: found for p, found, _ in below}}


def hard(m: int, n: int, depth: int) -> tuple[Any, Any]:
    """Factors of normal numbers, of which some rows are hard: few results of a warp will not do, or many."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((rows, depth)).astype(np.float32) for rows in (m, n))
    d = 2.0 ** rng.integers(-60, 61, depth).astype(np.float32)
    x[3] *= d  # beside w's row 5, and those of 16 columns
    w[5] /= d
    w[16:32] /= d
    x[40], x[40, 3], x[40, 4], w[:, 4] = 0, 1e-30, 1e10, 0
    x[9, 7], x[10, 8], w[7, 9], w[8, 2] = np.nan, np.inf, -np.inf, np.nan
    w[20] *= 1e-30
    return x, w


def judged(y: Any, x: Any, w: Any) -> None:
    """Infinite and NaN where float32 is; elsewhere as close."""
    with np.errstate(all="ignore"):
        products = x[:, None].astype(np.float64) * w[None].astype(np.float64)
        exact, size = products.sum(-1), np.abs(products).sum(-1)
        plain = exact.astype(np.float32)
        assert np.array_equal(np.isnan(y), np.isnan(plain)) and np.isnan(y).any()
        assert np.array_equal(y[np.isinf(plain)], plain[np.isinf(plain)]) and np.isinf(plain).any()
        good = np.isfinite(plain)
        assert (np.abs(y - exact)[good] <= 2e-6 * size[good] + 2.0**-149).all()


@pytest.mark.parametrize("shape", [(64, 64, 256), (72, 56, 264), (128, 96, 320), (64, 48, 258), (64, 64, 257)])
def test_kernels_are_right_whatever_the_numbers(shape: tuple[int, int, int]) -> None:
    """Few results of a warp are doubted, or more than its lanes find one after the other; edges of tiles among them."""
    x, w = hard(*shape)
    (y,) = simulator.run(lowered(*shape)["kernel"], {"x": x, "w": w}, truncates=True)
    judged(y, x, w)


def test_sums_are_as_large_as_they_should_be_where_tensor_cores_truncate() -> None:
    """To 1e-8 in the mean, where 5e-8 are cut off; those of whole numbers, of which nothing is, are exact."""
    shape, sm_90a, rng = (64, 64, 1024), gpu("sm_90a"), np.random.default_rng(0)
    program = halved(text(*shape))
    p = product(program.steps[-1])
    assert p is not None
    plan = next(x for x in warpgroups.plans(p, sm_90a) if x.tile.share == 1)
    made = derived(p.kernel, warpgroups.schedule(p, plan, sm_90a), sm_90a)
    done = k.Program("f", program.inputs, (*lowered(*shape)["kernel"].steps[:-1], made), program.results)
    x, w = (rng.standard_normal((64, 1024)).astype(np.float32) for _ in range(2))
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    (y,) = simulator.run(done, {"x": x, "w": w}, truncates=True)
    assert abs(((y - exact) * exact).sum() / (exact * exact).sum()) < 1e-8
    x, w = np.round(x * 40), np.round(w * 40)
    assert np.array_equal(simulator.run(done, {"x": x, "w": w}, truncates=True)[0], x @ w.T)


def test_blocks_that_share_steps_rescue_their_parts_of_the_columns() -> None:
    shape, sm_90a = (64, 64, 1024), gpu("sm_90a")
    program = halved(text(*shape))
    p = product(program.steps[-1])
    assert p is not None
    plan = next(x for x in warpgroups.plans(p, sm_90a) if x.tile.share == 2 and x.tile.parts == 2)
    shared = derived(p.kernel, warpgroups.schedule(p, plan, sm_90a), sm_90a)
    assert isinstance(shared, k.Kernel) and shared.cluster == 2
    makers = lowered(*shape)["kernel"].steps[:-1]
    x, w = hard(*shape)
    done = k.Program("f", program.inputs, (*makers, shared), program.results)
    (y,) = simulator.run(done, {"x": x, "w": w}, truncates=True)
    judged(y, x, w)


@pytest.mark.parametrize("depth, kept", [(320, True), (500, True), (257, True), (50000, False)])
def test_parts_are_computed_once(depth: int, kept: bool) -> None:
    """They stay in registers between the sum of what they leave and the stores, where there is room for them."""
    found = lowered(8, 5, depth) if depth < 1000 else lowered(64, 64, depth)
    maker, schedule = found["kernel"].steps[0], str(found["tile"].schedules[0][1])
    parts = [b.name for b in maker.writes if b.name.endswith(("_1", "_2"))]
    assert all((f"{name} = reg()" in schedule) == kept for name in parts) and len(parts) == 2
    assert (show(found["kernel"]).count(" = f16(") == 2) == kept
    if kept:
        x, w = (v[:rows] for v, rows in zip(hard(64, 64, depth), (8, 5), strict=True))
        x[3, 100], x[2, :3] = 1e-40, (0.0, -0.0, -1e-45)
        loops = l.Program("f", found["loop"].inputs, found["loop"].steps[:1], maker.writes)
        kernels = k.Program("f", found["loop"].inputs, (maker,), maker.writes)
        with np.errstate(all="ignore"):
            meant = dict(zip(maker.writes, loop.run(loops, {"x": x, "w": w}), strict=True))
            got = dict(zip(maker.writes, simulator.run(kernels, {"x": x, "w": w}), strict=True))
        assert all(np.array_equal(meant[b], got[b], equal_nan=True) for b in maker.writes if "least" not in b.name)
        assert all(np.allclose(meant[b], got[b], rtol=1e-6, atol=0) for b in maker.writes if "least" in b.name)


def test_what_follows_the_sums_is_made_of_those_that_will_do() -> None:
    shape = (64, 64, 256)
    x, w = hard(*shape)
    (y,) = simulator.run(lowered(*shape, "y[a0, a1] = max(acc0, f32(0.0))")["kernel"], {"x": x, "w": w})
    (z,) = simulator.run(lowered(*shape)["kernel"], {"x": x, "w": w})
    with np.errstate(all="ignore"):
        assert np.array_equal(y, np.maximum(z, 0), equal_nan=True)


def test_nobody_reads_the_factors_unless_a_result_is_doubted() -> None:
    """They stand behind a vote, once for few results and once for all."""
    kernel = lowered(256, 256, 1024)["kernel"].steps[-1]

    def read(body: Any, voted: bool) -> set[tuple[str, bool]]:
        found: set[tuple[str, bool]] = set()
        for s in body:
            if isinstance(s, k.For | k.If | k.Role):
                data = isinstance(s, k.If) and any(isinstance(x, Loaded) for x in topological(s.inside))
                found |= read(s.body, voted or data)
            else:
                found |= {(x.name, voted) for x, _ in places(s)}
        return found

    found = {(name, voted) for name, voted in read(kernel.body, False) if name in ("x", "w")}
    assert found == {("x", True), ("w", True)}


def test_what_lies_beyond_the_results_is_not_doubted() -> None:
    """Sums are 0 there, and every row has lost something: the last columns of a layer behind a GELU, 6304 x 1536 x 384,
    took all of its warps half a millisecond (H100).
    """
    shape = (72, 56, 264)
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((rows, shape[2])).astype(np.float32) for rows in shape[:2])
    x[:, 0] = w[:, 1] = 1e-9
    program, costs = lowered(*shape)["kernel"], Costs()
    (y,) = simulator.run(program, {"x": x, "w": w}, costs=costs)
    np.testing.assert_allclose(y, x.astype(np.float64) @ w.T.astype(np.float64), rtol=0, atol=1e-4)
    mine = {*k.walk(program.steps[-1].body)}
    read = {b.name for (s, _), n in costs.accesses.items() if s in mine and n.requests for b, _ in places(s)}
    assert "y" in read and read.isdisjoint({"x", "w"})


def test_a_plan_says_what_rescues_it_and_may_not_leave_it_out() -> None:
    done = lowered(256, 256, 1024)
    program, (number, plan) = done["tile"], done["tile"].plans[-1]
    kernel = program.loop.steps[number]
    assert plan.all(Rescue) == (Rescue("acc1", "acc0"),)
    schedule = dict(program.schedules)[number]
    assert parse_plan(str(plan)) == plan
    lines = str(plan).splitlines()
    without = parse_plan("\n".join(x for x in lines if "rescue(" not in x))
    with pytest.raises(UserError, match=r"follows from the term.*rescue"):
        verify(kernel, schedule, without, gpu("sm_90a"))


def test_machine_code_multiplies_asynchronously_and_spills_nothing(tmp_path: Path) -> None:
    kernel = next(s for s in lowered(4096, 4096, 4096)["kernel"].steps if s.name == "y")
    lines = sass(kernel, "sm_90a", tmp_path)
    assert sum("HGMMA" in line for line in lines) == 12  # three terms of four instructions
    assert not any("STL" in line or "LDL" in line for line in lines)


def test_texts_are_read_back() -> None:
    done = lowered(64, 64, 256)
    for ir in ("loop", "tile", "kernel"):
        assert parse(show(done[ir])) == done[ir]


def test_batches_are_scaled_row_by_row() -> None:
    """Each has rows of its own, and reads its own factors where results will not do."""
    source = """@loop
def f(x: f32[2, 64, 256], w: f32[2, 48, 256]):
    with kernel('y', y=f32[2, 64, 48]):
        for a0 in free(2):
            for a1 in free(64):
                for a2 in free(48):
                    for r0 in reduce(256):
                        acc0 <- sum(mul(x[a0, a1, r0], w[a0, a2, r0]))
                    y[a0, a1, a2] = acc0
    return (y,)
"""
    both = [hard(64, 48, 256), tuple(np.flip(v, 0).copy() for v in hard(64, 48, 256))]
    x, w = (np.stack(v) for v in zip(*both, strict=True))
    done = stages(halved(source), SM90, Log(), ("schedule", "plan", "derive"))[-1][1]
    (y,) = simulator.run(done, {"x": x, "w": w}, truncates=True)
    for n in range(2):
        judged(y[n], x[n], w[n])


@pytest.mark.parametrize(
    ("side", "across", "told"),
    [
        (1024, False, "a product of float32 is 3 of float16"),
        (512, True, "a product of float32 is 6 of bfloat16"),
        (2048, True, "a product of float32 is 3 of float16"),
    ],
)
def test_rows_across_memory_are_scaled_for_long_products(side: int, across: bool, told: str) -> None:
    """Three kernels scale them, each of which goes through memory, and two of which meet afterwards."""
    source = text(side, side, side)
    log = Log()
    options = Options(target="sm_90a", libraries="never", fp32="split")
    stages(parse(source.replace("w[a1, r0]", "w[r0, a1]") if across else source), options, log, ("parts",))
    assert [e.reason for e in log.events if e.subject == "y" and e.fired] == [told]


def waits(shape: tuple[int, int, int], columns: int) -> list[int]:
    """Of the waits for products in a kernel in tiles of 64 rows and so many columns, how many groups stay open."""
    sm_90a = gpu("sm_90a")
    p = product(halved(text(*shape)).steps[-1])
    assert p is not None
    tiles = [x for x in warpgroups.plans(p, sm_90a) if x.tile.share == 1]
    plan = next(x for x in tiles if (x.tile.m, x.tile.n) == (64, columns))
    kernel = derived(p.kernel, warpgroups.schedule(p, plan, sm_90a), sm_90a)
    assert isinstance(kernel, k.Kernel)
    return [s.open for s in k.walk(kernel.body) if isinstance(s, k.WaitGroups)]


def test_sums_are_added_up_while_later_products_are_on_their_way() -> None:
    """Where registers have room for those of all three groups of a step."""
    assert waits((64, 64, 512), 64) == [2, 1, 0]
    assert waits((64, 128, 512), 128) == [0, 0, 0]


@pytest.mark.parametrize("shape", [(512, 512, 3584), (512, 256, 2048)])
def test_blocks_share_the_steps_of_few_columns(shape: tuple[int, int, int]) -> None:
    """Instructions of narrower tiles would read both factors from shared memory too often."""
    p = product(halved(text(*shape)).steps[-1])
    assert p is not None
    assert warpgroups.plans(p, gpu("sm_90a"))[0].tile.share > 1
