"""First factors that threads make in registers of slabs that TMA brings: parts of numbers in float32 (ADR 016)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.hw.sass import sass
from tests.kernels.test_split import CASES

from terrazzo.errors import Limitation, UserError
from terrazzo.front.capture import capture
from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.interp import loop
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.parse_plan import parse_plan
from terrazzo.ir.parse_schedule import parse_schedule
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering, stages
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.precision.parts import into_parts
from terrazzo.rules.tile.complete import Refused, complete
from terrazzo.rules.tile.verify import verify
from terrazzo.rules.tile_to_kernel.lower import lower
from terrazzo.targets.cuda.check import check
from terrazzo.targets.cuda.emit import gathers

H = gpu("sm_90a")


def plain(m: int, n: int, depth: int, x: str = "x[a0, r0]", w: str = "w[a1, r0]", inputs: str = "") -> l.Program:
    """A product in float32."""
    shapes = {
        "x": (m, depth) if x.endswith("r0]") else (depth, m),
        "w": (n, depth) if w.endswith("r0]") else (depth, n),
    }
    inputs = inputs or ", ".join(f"{name}: f32[{a}, {b}]" for name, (a, b) in shapes.items())
    return parse(f"""@loop
def f({inputs}):
    with kernel('y', y=f32[{m}, {n}]):
        for a0 in free({m}):
            for a1 in free({n}):
                for r0 in reduce({depth}):
                    acc0 <- sum(mul({x}, {w}))
                y[a0, a1] = acc0
    return (y,)
""")


def made(program: l.Program, count: int = 3) -> l.Program:
    """With parts made where they are multiplied, of the larger factor: there are the fewest kernels."""
    return into_parts(program, Log(), count, lambda old, new, beaten: (-float(len(new)), ""))


def schedule(m: int, n: int, depth: int, columns: int = 128) -> str:
    stored = "\n".join(f'        x_{p} = smem(by="tma", swizzle=128)' for p in (3, 2, 1))
    return f"""with schedule("y", target="sm_90a"):
    a0 = grid({-(-m // columns)}) * block({columns})
    a1 = grid({-(-n // 128)}) * block(128)
    r0 = time({-(-depth // 64)}, ring=2, promote=True) * block(64)
    persistent(2)
    roles(load=warp(1), math=warpgroup(2), registers=(40, 232), lag=True)
    with site("acc0", on="wgmma.m64n{columns}k16.f32.bf16"):
        a1 = warpgroup(2) * inst.m(64)
        a0 = inst.n({columns})
        r0 = reg(4) * inst.k(16)
{stored}
        w = smem(by="tma", swizzle=128)
    with site("y"):
        a0 = like("acc0")
        a1 = like("acc0")
"""


def kernel(program: l.Program, text: str) -> k.Kernel:
    (last,) = (s for s in program.steps if s.name == "y")
    assert isinstance(last, l.Kernel)
    return lower(last, parse_schedule(text), H)


def run(program: l.Program, text: str, given: dict[str, Any], seed: int | None) -> Any:
    """What the kernel makes of what those before it store."""
    *before, last = program.steps
    stored = tuple(b for s in before for b in s.writes)
    found = loop.run(l.Program("f", program.inputs, tuple(before), stored), given)
    every = {**given, **{b.name: v for b, v in zip(stored, found, strict=True)}}
    done = kernel(program, text)
    (y,) = simulator.run(k.Program("f", last.reads, (done,), last.writes), every, seed=seed)
    return y


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize(
    ("sizes", "x", "w"),
    [
        ((128, 256, 192), "x[a0, r0]", "w[a1, r0]"),
        ((100, 200, 168), "x[a0, r0]", "w[a1, r0]"),
        ((64, 136, 128), "x[r0, a0]", "w[r0, a1]"),
    ],
    ids=["whole", "odd", "turned"],
)
def test_the_pinned_schedule_is_as_exact_as_float32(
    sizes: tuple[int, int, int], x: str, w: str, seed: int | None
) -> None:
    rng = np.random.default_rng(0)
    program = made(plain(*sizes, x, w))
    assert [s.name for s in program.steps] == ["x_parts", "y"]
    given = {b.name: rng.standard_normal(b.type.static_shape).astype(np.float32) for b in program.inputs}
    y = run(program, schedule(*sizes, columns=64), given, seed)
    a, b = (v if t.endswith("r0]") else v.T for v, t in zip(given.values(), (x, w), strict=True))
    exact = a.astype(np.float64) @ b.T.astype(np.float64)
    off, usual = (np.linalg.norm(z - exact) for z in (y, a @ b.T))
    assert off < usual


def test_what_is_no_ordinary_number_is_as_in_parts_that_are_stored() -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((n, 128)).astype(np.float32) for n in (64, 128))
    some = [np.inf, -np.inf, np.nan, 0.0, -0.0, np.finfo(np.float32).max, 2.0**-149, -(2.0**-130)]
    x[:8, 3] = w[8:16, 65] = some
    w[:8, 3], x[:, 7], w[20:24] = some, 0.0, 2.0**-140
    given = {"x": x, "w": w}
    stored = into_parts(plain(64, 128, 128), Log(), 3, lambda old, new, beaten: (float(len(new)), ""))
    with np.errstate(all="ignore"):
        (theirs,) = loop.run(stored, given)
        ours = run(made(plain(64, 128, 128)), schedule(64, 128, 128, columns=64), given, 1)
    odd = ~np.isfinite(theirs)
    assert odd.any() and np.array_equal(ours[odd], theirs[odd], equal_nan=True)
    assert np.allclose(ours[~odd], theirs[~odd], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["a linear layer", "in batches", "two products of one factor", "in pieces of a long sum"]
)
def test_functions_are_as_exact_as_float32(name: str) -> None:
    fn, shapes = CASES[name]
    options = Options(target="sm_90a", libraries="never", fp32="exact")
    exact = lowering(capture(fn, tuple(map(torch.zeros, shapes)), {}).program, options)
    program = made(next(program for p, program, _ in exact.stages if p.name == "parts"))
    _, planned, derived = stages(program, Options(target="sm_90a"), Log(), ("schedule", "plan", "derive"))
    assert 'a="converted"' in "".join(str(p) for _, p in planned[1].plans)
    check(derived[1], H)
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    given = dict(zip((b.name for b in program.inputs), args, strict=True))
    (ours,) = simulator.run(derived[1], given, seed=3)
    theirs, best = (fn(*(torch.from_numpy(x).to(t) for x in args)) for t in (torch.float32, torch.float64))
    off, usual = (np.linalg.norm(np.asarray(x, np.float64) - best.numpy()) for x in (ours, theirs))
    assert off <= 1.2 * usual  # the simulator rounds once for an instruction


def planned() -> tuple[l.Kernel, Any, Any]:
    """A kernel with its schedule and plan."""
    last, text = made(plain(128, 256, 192)).steps[-1], parse_schedule(schedule(128, 256, 192))
    assert isinstance(last, l.Kernel)
    plan, _ = complete(last, text, H)
    assert not isinstance(plan, Refused)
    return last, text, plan


def test_the_plan_says_who_makes_what_and_reads_back() -> None:
    _, _, plan = planned()
    lines = str(plan).splitlines()
    assert any('a="converted", b="shared"' in x for x in lines)
    assert any(x.strip().startswith('w_s = stream(operand="w[a1, r0]"') and "panel=32" in x for x in lines)
    assert any('convert(value="w_s", to="acc0.a", by="parts"' in x for x in lines)
    assert any("teams=2" in x and "lag=True" in x for x in lines)
    assert str(parse_plan(str(plan))) == str(plan)


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ('b="shared"', 'b="ldmatrix"', "b comes from ldmatrix: wgmma.m64n128k16.f32.bf16 takes shared"),
        ('to="acc0.a", by="parts"', 'to="acc0.a", by="ld"', "w_s comes to acc0.a by parts, not by ld"),
        (", lag=True", "", "its teams lag behind one another"),
        ("panel=32", "panel=64", "panels are 64 wide, and wgmma.m64n128k16.f32.bf16 takes 32"),
    ],
)
def test_a_plan_that_says_otherwise_is_refused(before: str, after: str, reason: str) -> None:
    last, text, plan = planned()
    edited = str(plan).replace(before, after)
    assert edited != str(plan)
    with pytest.raises(UserError, match=re.escape(reason)):
        verify(last, text, parse_plan(edited), H)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("    roles(load=warp(1), math=warpgroup(2), registers=(40, 232), lag=True)\n", ""), "there are no roles"),
        (("w = smem(", "w = smem(pad=8, "), "TMA leaves no room between rows"),
    ],
)
def test_a_schedule_that_does_not_fit_says_why(change: tuple[str, str], reason: str) -> None:
    text = schedule(128, 256, 192)
    assert change[0] in text
    with pytest.raises((Limitation, UserError), match=reason):
        kernel(made(plain(128, 256, 192)), text.replace(*change))


def test_fragments_are_made_of_a_slab_and_of_what_lies_beside_it() -> None:
    """Scales along what is summed over, which threads load themselves, step by step."""
    scaled = plain(64, 256, 192, w="mul(w[a1, r0], s[r0])", inputs="x: f32[64, 192], w: f32[256, 192], s: f32[192]")
    rng = np.random.default_rng(0)
    given = {b.name: rng.standard_normal(b.type.static_shape).astype(np.float32) for b in scaled.inputs}
    y = run(made(scaled), schedule(64, 256, 192, columns=64), given, None)
    x, w, s = (v.astype(np.float64) for v in given.values())
    exact, usual = x @ (w * s).T, given["x"] @ (given["w"] * given["s"]).T
    assert np.linalg.norm(y - exact) <= np.linalg.norm(usual - exact)


def test_slabs_that_threads_read_are_not_multicast() -> None:
    """The simulator saw boxes come to a slot that a warp of the other block still read."""
    text = schedule(128, 256, 192, columns=64).replace("a0 = grid(2)", "a0 = grid(1) * cluster(2)")
    text = text.replace("w = smem(", "w = smem(multicast=True, ")
    with pytest.raises(Limitation, match="w: slots that threads read themselves are freed in their own block"):
        kernel(made(plain(128, 256, 192)), text)


def test_weights_are_not_stored_where_that_is_faster() -> None:
    """128 rows, which took 251 us so and 337 with parts stored (H200, 22 November 2026); pieces fill the last wave."""
    program = capture(F.linear, (torch.zeros(128, 3584), torch.zeros(18944, 3584)), {}).program
    done = lowering(program, Options(target="sm_90a", fp32="split", libraries="never"))
    stored = [b.type.static_shape for s in done.loop.steps for b in s.writes]
    assert (18944, 3584) not in stored and stored[:3] == [(128, 3584)] * 3
    plans = [str(plan) for _, plan in done.at("tile").plans]
    assert any('a="converted"' in x and "tiles=(s(" in x for x in plans)


def test_parts_are_stored_where_that_is_faster() -> None:
    """512 rows: 724 us with parts stored, 937 with parts of the weights made four times."""
    program = capture(F.linear, (torch.zeros(512, 3584), torch.zeros(18944, 3584)), {}).program
    done = lowering(program, Options(target="sm_90a", fp32="split", libraries="never"))
    assert "converted" not in str(done.at("tile").plans)


def test_machine_code(tmp_path: Path) -> None:
    """At full size: 24 products for each warpgroup, with the first factor in registers; conversions of the usual rate;
    nothing spilled.
    """
    done = kernel(made(plain(512, 18944, 3584)), schedule(512, 18944, 3584))
    assert not gathers(done)  # what a vote says is in its range, and nothing has to be noted
    lines = sass(done, "sm_90a", tmp_path)
    products = [x for x in lines if "HGMMA.64x128x16.F32.BF16" in x]
    assert len(products) == 48 and all(re.search(r"BF16 R\d+, R\d+, gdesc", x) for x in products)
    assert not any(op in x for x in lines for op in ("F2F.", "LDL", "STL", "CALL"))
