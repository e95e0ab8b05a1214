"""Results in 32 bits on their way through shared memory: put there in pairs of columns, or one by one where memory runs
along a tile's rows, they leave in boxes or whole rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.hw.sass import sass
from tests.kernels.test_on_gpu import agree, on_gpu

from terrazzo.front.capture import capture
from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.interp.costs import Costs
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.sites import Product, product
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop_to_tile.products import boxes, leaving, warpgroups
from terrazzo.rules.loop_to_tile.products.results import scatter
from terrazzo.rules.loop_to_tile.walked.collapse import merge_product_axes
from terrazzo.rules.tile.complete import complete
from terrazzo.rules.tile.draft import Draft
from terrazzo.rules.tile.reasons import reasons
from terrazzo.rules.tile_to_kernel.lower import program as derive
from terrazzo.targets.cuda.check import check

H = gpu("sm_90a")
HALF = torch.bfloat16
PRODUCT = """@tile
def f(x: bf16[{m}, 128], w: bf16[{n}, 128], b: bf16[{n}], r: f32[{m}, {n}], s: f32[{m}]):
    with kernel('y', y=f32[{m}, {n}]):
        for a0 in free({m}):
            in2 = s[a0]
            for a1 in free({n}):
                in3 = f32(b[a1])
                for r0 in reduce(128):
                    in0 = x[a0, r0]
                    in1 = w[a1, r0]
                    acc0 <- sum(mul(f32(in0), f32(in1)))
                v0 = mul(acc0, in2)
                v1 = add(v0, in3)
                v2 = max(v1, f32(0.0))
                y[a0, a1] = {result}
    with schedule("y", target="sm_90a"):
        a0 = grid({down}) * block({height})
        a1 = grid({across}) * block({width})
        r0 = time(2, ring=2) * block(64)
        persistent(2)
        roles(load=warp(1), math=warpgroup(2), registers=(40, 232){turns})
        with site("acc0", on="wgmma.m64n{columns}k16.f32.bf16"):
            {rows_of} = {rows}
            {columns_of} = inst.n({columns})
            r0 = reg(4) * inst.k(16)
            x = smem(by="tma", swizzle=128)
            w = smem(by="tma", swizzle=128)
        with site("y"):
            {columns_of} = time({subtiles}, ring=2) * block({subtile})
            y = smem(by="{by}", swizzle={swizzle})
    return (y,)
"""


def text(m: int, n: int, *, turned: bool = False, turns: bool = False, residual: bool = False, by: str = "tma",
         columns: int = 64, subtile: int = 32) -> str:  # fmt: skip
    """A product of m x n results in tiles of 128 rows of its own, or of its columns where they are `turned`."""
    rows = "reg(2) * inst.m(64)" if turns else "warpgroup(2) * inst.m(64)"
    height, width = (columns, 128) if turned else (128, columns)
    return PRODUCT.format(
        m=m, n=n, by=by, rows=rows, height=height, width=width, columns=columns, subtile=subtile,
        rows_of="a1" if turned else "a0", columns_of="a0" if turned else "a1", down=-(-m // height),
        across=-(-n // width), turns=", turns=True" if turns else "", result="add(v2, r[a0, a1])" if residual else "v2",
        subtiles=columns // subtile, swizzle=128 if turned else 4 * subtile,
    )  # fmt: skip


def kernel_of(program: Any) -> k.Kernel:
    (found,) = (s for s in program.steps if isinstance(s, k.Kernel))
    return found


def leaves(kernel: k.Kernel) -> tuple[int, int]:
    """How many statements store boxes, and how many others store to global memory."""
    every = list(k.walk(kernel.body))
    stores = [s for s in every if isinstance(s, l.Store) and s.buffer in kernel.writes]
    moves = [s for s in every if isinstance(s, k.Move) and s.target in kernel.writes]
    return sum(isinstance(s, k.TensorStore) for s in every), len(stores) + len(moves)


def in_halves(x: torch.Tensor) -> Any:
    return x.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def inputs_of(m: int, n: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(m + n)
    x, w, b = (in_halves(torch.randn(shape, generator=g).to(HALF)) for shape in ((m, 128), (n, 128), (n,)))
    r, s = (torch.randn(shape, generator=g).numpy() for shape in ((m, n), (m,)))
    return {"x": x, "w": w, "b": b, "r": r, "s": s}


def close(ours: Any, exact: Any) -> None:
    """As close as sums in float32 are."""
    assert np.linalg.norm(ours.astype(np.float64) - exact) < 2e-7 * np.linalg.norm(exact)


CASES = [
    {"m": 256, "n": 64},
    {"m": 200, "n": 72, "residual": True},
    {"m": 130, "n": 68, "subtile": 16},
    {"m": 130, "n": 67, "by": "ld", "residual": True},
    {"m": 300, "n": 64, "turns": True},
    {"m": 64, "n": 256, "turned": True},
    {"m": 60, "n": 136, "turned": True, "residual": True, "subtile": 16},
    {"m": 64, "n": 300, "turned": True, "turns": True},
]


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_words_gather(case: dict[str, Any], seed: Any) -> None:
    """Row by row and turned, that end amid tiles or not, with what belongs to rows, columns and points."""
    m, n = case["m"], case["n"]
    program = derive(parse(text(**case)), H)
    check(program, H)
    found = leaves(kernel_of(program))
    assert found[0] == 0 < found[1] if case.get("by") == "ld" else found[0] > 0 == found[1]
    costs, inputs = Costs(), inputs_of(m, n)
    (y,) = simulator.run(program, inputs, seed=seed, costs=costs)
    x, w, b, r, s = (inputs[name].astype(np.float64) for name in "xwbrs")
    exact = np.maximum(x @ w.T * s[:, None] + b, 0.0)
    close(y, exact + r if case.get("residual") else exact)
    put = costs.total("shared write")
    assert put.conflicts == 0 if case.get("turned") else put.conflicts <= put.wavefronts // 2


CONVOLUTION = """@loop
def f(x: bf16[{n}, {h}, {w}, 64], f: bf16[{o}, 3, 3, 64], b: f32[{o}], r: f32[{n}, {o}, {h}, {w}]):
    with kernel('y', y=f32[{n}, {o}, {h}, {w}]):
        for a0 in free({n}):
            for a1 in free({o}):
                in0 = b[a1]
                for a2 in free({h}):
                    for a3 in free({w}):
                        for r0, r1, r2 in reduce(64, 3, 3):
                            in1 = x[a0, r1 + a2 - 1, r2 + a3 - 1, r0] if r1 + a2 >= 1 and {h} - r1 - a2 >= 0 \
and r2 + a3 >= 1 and {w} - r2 - a3 >= 0 else 0
                            acc0 <- sum(mul(f32(in1), f32(f[a1, r1, r2, r0])))
                        in2 = r[a0, a1, a2, a3]
                        v0 = max(add(acc0, in0), f32(0.0))
                        y[a0, a1, a2, a3] = add(v0, in2)
    return (y,)
"""


@pytest.mark.parametrize(("out", "h", "w", "box"), [
    (32, 4, 64, (1, 2, 64)), (32, 5, 36, (1, 4, 32)), (40, 9, 20, (1, 8, 16)), (32, 9, 12, (2, 8, 8)),
])  # fmt: skip
def test_boxes_of_convolutions_leave_in_runs(out: int, h: int, w: int, box: tuple[int, ...]) -> None:
    """Channels first: what lies side by side of a warpgroup's pixels is a panel, and images end amid boxes."""
    program = parse(CONVOLUTION.format(n=2, o=out, h=h, w=w))
    found, why = boxes.moved(program.steps[0])
    assert found is not None, why
    on = next(i for i in warpgroups.INSTRUCTIONS if i.shape[1] == 32 and i.operand.name == "bf16")
    schedule = boxes._schedule(found, boxes.Plan(boxes.Tile(box, 2 if np.prod(box) > 64 else 1, 32), on, 0.0), H, True)
    done = derive(tile.Program(program, ((0, schedule),)), H)
    check(done, H)
    stored, others = leaves(kernel_of(done))
    assert stored > 0 == others
    g = torch.Generator().manual_seed(out)
    x, f = (torch.randn(shape, generator=g).to(HALF) for shape in ((2, 64, h, w), (out, 64, 3, 3)))
    b, r = torch.randn(out, generator=g), torch.randn(2, out, h, w, generator=g)
    inputs = {name: in_halves(z.permute(0, 2, 3, 1)) for name, z in (("x", x), ("f", f))}
    (y,) = simulator.run(done, {**inputs, "b": b.numpy(), "r": r.numpy()}, seed=1)
    close(y, (torch.relu(F.conv2d(x.double(), f.double(), b.double(), padding=1)) + r.double()).numpy())


@pytest.mark.parametrize(("turned", "told"), [
    (False, "y_s: lanes put 8 bytes each in rows of 128 bytes: 4 wavefronts swizzled by 128"),
    (True, "y_s: lanes put 4 bytes each in rows of 128 bytes: 1 wavefronts swizzled by 128"),
])  # fmt: skip
def test_what_lanes_put_is_told(turned: bool, told: str) -> None:
    program = parse(text(256, 256, turned=turned))
    (kernel,), ((_, schedule),) = program.loop.steps, program.schedules
    plan, _ = complete(kernel, schedule, H)
    assert told in [why for _, why in reasons(plan, Draft(kernel, schedule, H))]


def chosen(fn: Any, *shapes: tuple[int, ...], **options: Any) -> tuple[Product, k.Kernel]:
    """What a function of tensors in float32 ends with: the product, and its kernel."""
    given = tuple(torch.empty(s, device="meta") for s in shapes)
    done = lowering(capture(fn, given, {}).program, Options(target="sm_90a", libraries="never", tf32=True, **options))
    last = done.at("tile").loop.steps[-1]
    p = product(last)
    assert p is not None
    return product(merge_product_axes(last, p.sites)) or p, done.at("kernel").steps[-1]


def pointwise(x: Any, w: Any, b: Any) -> Any:
    return torch.relu(F.conv2d(x, w, b))


@pytest.mark.parametrize(("fn", "shapes"), [
    (pointwise, ((4, 64, 256, 256), (128, 64, 1, 1), (128,))),
    (torch.matmul, ((8192, 64), (64, 8192))),
    (torch.matmul, ((64, 512, 64), (64, 64, 1024))),
    (lambda x, w: (x @ w).mT.contiguous(), ((8192, 64), (64, 4096))),
])  # fmt: skip
def test_more_results_than_the_cache_has_leave_in_boxes(fn: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Also where each image has a scale of its own."""
    _, kernel = chosen(fn, *shapes, fp32="tf32")
    stored, others = leaves(kernel)
    assert stored > 0 == others


def test_few_results_leave_registers() -> None:
    _, kernel = chosen(torch.matmul, (1024, 64), (64, 2048), fp32="tf32")
    stored, others = leaves(kernel)
    assert stored == 0 < others


def test_which_way_results_leave_is_a_matter_of_price() -> None:
    """The same tiles are there with both, and differ by what results take."""
    p, _ = chosen(torch.matmul, (8192, 64), (64, 8192), fp32="tf32")
    assert scatter(p)
    best: dict[bool, float] = {}
    for plan in (x for x in warpgroups.plans(p, H) if x.tile.n >= 16):
        assert plan.tile.direct is (leaving.leaves(p, plan.tile) == "")
        best.setdefault(plan.tile.direct, plan.time)
    assert best[False] < best[True]


@pytest.mark.parametrize("case", [{"m": 130, "n": 68}, {"m": 130, "n": 68, "turns": True}], ids=str)
def test_what_rows_and_columns_know_is_loaded_once_for_each(case: dict[str, Any], tmp_path: Path) -> None:
    """Of both teams, a thread has two rows or four and 16 columns, and asks whether these are inside: 36 loads and 40,
    not two for every result.
    """
    lines = sass(kernel_of(derive(parse(text(**case)), H)), "sm_90a", tmp_path)
    assert sum("LDG" in line for line in lines) < 50


def test_boxes_are_all_that_leaves(tmp_path: Path) -> None:
    """No lane stores to global memory; pairs go to shared memory at once."""
    lines = sass(kernel_of(derive(parse(text(256, 64)), H)), "sm_90a", tmp_path)
    used = {line.split()[1 if line.startswith("@") else 0] for line in lines}
    assert {"STS.64", "UTMASTG.2D"} <= used and not any(x.startswith("STG") for x in used)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_gpu_stores_what_the_simulator_does(case: dict[str, Any]) -> None:
    program = derive(parse(text(**case)), H)
    inputs = inputs_of(case["m"], case["n"])
    for ours, simulated in zip(on_gpu(program, inputs), simulator.run(program, inputs), strict=True):
        agree(ours, simulated)
