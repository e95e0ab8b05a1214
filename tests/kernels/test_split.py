"""Products in float32 on tensor cores: factors as sums of bfloat16 parts, several products in every step, whose sums
CUDA cores add up.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.hw.sass import sass
from tests.kernels.arrangements import F as CORES
from tests.kernels.arrangements import M, Product
from tests.kernels.test_arrangements import derived, right
from tests.rules.test_parts import in_bfloat16, split
from tests.rules.test_parts import text as whole

from terrazzo.errors import Limitation, UserError
from terrazzo.front.capture import capture
from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.interp import loop
from terrazzo.ir.contraction import contraction
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.node import topological
from terrazzo.ir.parse_plan import parse_plan
from terrazzo.ir.text import parse, show
from terrazzo.ir.types import bf16
from terrazzo.options import Options
from terrazzo.pipelines import lowering, stages
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.precision.parts import into_parts
from terrazzo.rules.tile.verify import verify
from terrazzo.run.cache import Cache
from terrazzo.run.nvrtc import compile_each
from terrazzo.targets.cuda.check import check
from terrazzo.targets.cuda.emit import emit

PAIRS = ((3, 1), (2, 2), (1, 3), (2, 1), (1, 2), (1, 1))
"""Which parts are multiplied, the small products first."""


def text(m: int, n: int, k: int, pairs: tuple[tuple[int, int], ...] = PAIRS, blocks: int = 132, ring: int = 2) -> str:
    """The sum of products of parts, on two warpgroups with a producer warp: as the kernel by hand that was measured."""
    parts = range(1, 1 + max(a for a, _ in pairs))
    names = [*(f"x{p}: bf16[{m}, {k}]" for p in parts), *(f"w{p}: bf16[{n}, {k}]" for p in parts)]
    total = ""
    for a, b in pairs:
        product = f"mul(f32(x{a}[a0, r0]), f32(w{b}[a1, r0]))"
        total = f"add({total}, {product})" if total else product
    operands = "\n".join(f'            {x}{p} = smem(by="tma", swizzle=128)' for x in "xw" for p in parts)
    down, across = -(-m // 128), -(-n // 128)
    group = next(g for g in (8, 4, 2, 1) if down % g == 0)
    return f"""@tile
def f({", ".join(names)}):
    with kernel('y', y=f32[{m}, {n}]):
        for a0 in free({m}):
            for a1 in free({n}):
                for r0 in reduce({k}):
                    acc0 <- sum({total})
                y[a0, a1] = acc0
    with schedule("y", target="sm_90a"):
        a0 = grid({down}) * block(128)
        a1 = grid({across}) * block(128)
        r0 = time({-(-k // 64)}, ring={ring}, promote=True) * block(64)
        persistent({blocks}, order=grouped({group}))
        roles(load=warp(1), math=warpgroup(2), registers=(40, 232))
        with site("acc0", on="wgmma.m64n128k16.f32.bf16"):
            a0 = warpgroup(2) * inst.m(64)
            a1 = inst.n(128)
            r0 = reg(4) * inst.k(16)
{operands}
        with site("y"):
            a0 = like("acc0")
            a1 = like("acc0")
    return (y,)
"""


def rounded(x: Any, count: int) -> list[Any]:
    """Parts of ordinary numbers."""
    found = []
    for _ in range(count):
        found.append(x.astype(bf16.numpy))
        x = x - found[-1].astype(np.float32)
    return found


@pytest.mark.parametrize("pairs", [PAIRS, PAIRS[3:], PAIRS[5:]], ids=["six", "three", "one"])
def test_products_of_parts_are_right(pairs: tuple[tuple[int, int], ...]) -> None:
    right(text(256, 128, 192, pairs, blocks=1))


def paired(alone: str, rows: int) -> str:
    """Clusters of two along so many rows of tiles, whose blocks fetch halves of what both need."""
    pairs = {f"a0 = grid({rows}) * block(128)": f"a0 = grid({rows // 2}) * cluster(2) * block(128)"}
    pairs |= {"grouped(4)": "grouped(2)"} if rows == 4 else {}
    pairs |= {f"w{p} = smem(": f"w{p} = smem(multicast=True, " for p in (1, 2, 3)}
    for before, after in pairs.items():
        assert before in alone
        alone = alone.replace(before, after)
    return alone


def test_products_of_parts_in_clusters_are_right() -> None:
    right(paired(text(512, 128, 192, blocks=2), 4))


def ahead(source: str) -> str:
    """A product whose second factor comes in three slots, and the first one in two."""
    for p in (1, 2, 3):
        source = source.replace(f'w{p} = smem(by="tma", swizzle=128)', f'w{p} = smem(by="tma", swizzle=128, slots=3)')
    return source


def test_a_factor_may_run_further_ahead() -> None:
    """In a ring of its own, which is filled first."""
    source = ahead(
        text(256, 64, 512, blocks=2).replace("block(128)\n        r0", "block(64)\n        r0").replace("n128", "n64")
    )
    source = source.replace("inst.n(128)", "inst.n(64)")
    right(source)
    plan = str(lowering(parse(source), Options(target="sm_90a")).at("tile").plans[0][1])
    assert re.findall(r"ring\d = ring\(.*?slots=(\d)", plan) == ["3", "2"] and "rings=(ring0, ring1)" in plan
    assert set(re.findall(r'operand="([xw]).*?ring=(ring\d)', plan)) == {("w", "ring0"), ("x", "ring1")}


@pytest.mark.parametrize("slots", ["-1", '"three"'])
def test_slots_are_a_number(slots: str) -> None:
    with pytest.raises(UserError, match="slots are a number"):
        derived(ahead(text(256, 128, 512, blocks=2)).replace("slots=3", f"slots={slots}"))


def test_six_products_are_as_exact_as_float32() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((256, 320), np.float32), rng.standard_normal((128, 320), np.float32)
    names = [f"{a}{p}" for a in "xw" for p in (1, 2, 3)]
    given = dict(zip(names, [*rounded(x, 3), *rounded(w, 3)], strict=True))
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    (y,) = simulator.run(derived(text(256, 128, 320, blocks=2)), given, seed=1)
    off, plain = (np.linalg.norm(z - exact) for z in (y, x @ w.T))
    assert off < plain


def test_sums_are_smaller_where_tensor_cores_truncate() -> None:
    """The simulator adds up as a Hopper does where it is told to: in one sum a step, 5e-8 are lost in the mean."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((128, 128), np.float32), rng.standard_normal((128, 128), np.float32)
    names = [f"{a}{p}" for a in "xw" for p in (1, 2, 3)]
    given = dict(zip(names, [*rounded(x, 3), *rounded(w, 3)], strict=True))
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    kernels = derived(text(128, 128, 128, blocks=1))
    results = [simulator.run(kernels, given, truncates=truncates)[0] for truncates in (False, True)]
    plain, cut = (((y - exact) * exact).sum() / (exact * exact).sum() for y in results)
    assert abs(plain) < 5e-9 and -1e-7 < cut < -3e-8


def test_the_small_products_come_first_and_the_first_one_overwrites() -> None:
    steps = str(derived(text(128, 128, 192, blocks=1)))
    products = re.findall(r"multiply_async\(.*?(x\d)_s.*?(w\d)_s\d?\[[^]]*\](.*)\)", steps)
    assert [f"{x}{w}" for x, w, _ in products] == [f"x{a}w{b}" for a, b in PAIRS] * 2
    assert ["fresh" in rest for *_, rest in products] == [True, *[False] * 5] * 2


def test_machine_code(tmp_path: Path) -> None:
    """At full size: 24 products, the first overwriting, and 64 additions, for both warpgroups; nothing spilled."""
    (kernel,) = derived(text(4096, 4096, 4096)).steps
    lines = sass(kernel, "sm_90a", tmp_path)
    products = [line for line in lines if "HGMMA.64x128x16.F32.BF16" in line]
    assert len(products) == 24 and sum(", RZ, !UPT" in line for line in products) == 1
    assert sum("FADD" in line for line in lines) == 64
    assert not any("MEMBAR" in line or "STL" in line for line in lines)
    (made,) = compile_each([emit(kernel)[1]], "sm_90a", Cache(tmp_path, 1 << 30)).values()
    assert not made.facts.problem() and made.facts.registers <= 168


def test_terms_know_the_same_axes_or_are_no_contraction() -> None:
    def terms(summand: str) -> int:
        program = parse(f"""@loop
def f(x: f32[8, 8], v: f32[8, 8], w: f32[8, 8]):
    with kernel('y', y=f32[8, 8]):
        for a0 in free(8):
            for a1 in free(8):
                for r0 in reduce(8):
                    acc0 <- sum({summand})
                y[a0, a1] = acc0
    return (y,)
""")
        (r,) = [x for x in topological(program.steps) if isinstance(x, l.Reduce)]
        found = contraction(r)
        return len(found.terms) if found else 0

    one, turned, other = "mul(x[a0, r0], w[a1, r0])", "mul(v[a1, r0], w[a0, r0])", "mul(x[a0, a1], w[a1, r0])"
    assert terms(one) == 1
    assert terms(f"add({one}, add({turned}, {one}))") == 3
    assert terms(f"add({one}, {other})") == terms(f"add({one}, x[a0, r0])") == terms(f"sub({one}, {turned})") == 0


@pytest.mark.parametrize("product", [Product(**M), Product(**CORES)], ids=["warps", "CUDA cores"])
def test_two_terms_on_other_instructions(product: Product) -> None:
    """x w + w x, of rows of both."""
    before, after = "sum(mul(f32(x[a0, r0]), f32(w[a1, r0])))", "sum(add(mul(A, B), mul(C, D)))"
    names = {"A": "x[a0, r0]", "B": "w[a1, r0]", "C": "w[a0, r0]", "D": "x[a1, r0]"}
    if not product.wide:
        before = "sum(mul(x[a0, r0], w[a1, r0]))"
    square = Product(**{**vars(product), "shape": (64, 64, 96)}).text
    assert before in square
    for letter, load in names.items():
        after = after.replace(letter, f"f32({load})" if product.wide else load)
    right(square.replace(before, after))


def test_sums_on_cuda_cores_may_be_promoted() -> None:
    right(Product(**CORES | {"promote": True}).text)


@pytest.mark.parametrize("long", [True, False])
def test_long_sums_on_cuda_cores_are(long: bool) -> None:
    """Those of two axes, which blocks cannot share; others are cut in pieces, or are short."""
    deep = 64 if long else 32
    given = [torch.empty(shape, device="meta") for shape in ((32, deep), (32, 128), (32, deep, 128))]
    form = lambda x, y, w: (x[:, None, :, None] * y[:, None, None] * w).sum((2, 3))  # noqa: E731
    program = capture(form, given).program
    ((_, chosen),) = lowering(program, Options(target="sm_90a", libraries="never")).at("tile").schedules
    assert ("promote=True" in str(chosen)) is long and "fma" in str(chosen)


def test_promotion_is_asked_for_or_not() -> None:
    with pytest.raises(UserError, match="y: promote is True or False, not 2"):
        derived(text(128, 128, 128).replace("promote=True", "promote=2"))


def test_a_plan_promotes_as_its_schedule_does() -> None:
    program = text(128, 128, 128, blocks=1)
    (_, plan), *_ = lowering(parse(program), Options(target="sm_90a")).at("tile").plans
    edited = parse_plan(str(plan).replace(", promote=True", ""))
    assert edited != plan
    (step,), ((_, schedule),) = parse(program).loop.steps, parse(program).schedules
    with pytest.raises(UserError, match="promote is False, and the schedule has True"):
        verify(step, schedule, edited, gpu("sm_90a"))
    late = parse_plan(str(plan).replace("consumer=math)", "consumer=math, late=True)"))
    with pytest.raises(UserError, match="sums that are promoted are waited for in every step"):
        verify(step, schedule, late, gpu("sm_90a"))


# -- from a function to its kernels ------------------------------------------------------------------------------------

CASES: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "a linear layer": (F.linear, ((130, 128), (72, 128), (72,))),
    "tokens": (F.linear, ((2, 64, 128), (72, 128), (72,))),
    "odd sizes": (torch.matmul, ((67, 101), (101, 75))),
    "turned": (lambda x, w: x.t() @ w, ((128, 72), (128, 64))),
    "with itself": (lambda x: x @ x.t(), ((72, 128),)),
    "in batches": (torch.matmul, ((3, 64, 128), (3, 128, 40))),
    "with a scale on the way": (lambda x, s, w: (x * s).relu() @ w, ((64, 128), (128,), (128, 64))),
    "two products of one factor": (lambda x, w, v: F.silu(x @ w) * (x @ v), ((64, 128), (128, 64), (128, 64))),
    "one after the other": (lambda x, w, v: F.relu(x @ w) @ v, ((64, 128), (128, 192), (192, 64))),
    "after a norm": (lambda x, w: F.rms_norm(x, (128,)) @ w, ((64, 128), (128, 64))),
    "in pieces of a long sum": (torch.matmul, ((64, 2048), (2048, 64))),
    "of what others read": (lambda x, w: (x.relu() @ w, x.relu().sum(0)), ((64, 128), (128, 64))),
    "heads in its steps": (lambda x, w: x.transpose(0, 1).reshape(64, 128) @ w, ((2, 64, 64), (128, 64))),
    "heads in its rows": (lambda x, w: x.transpose(1, 2).reshape(128, 64) @ w, ((2, 64, 64), (64, 64))),
}


def in_parts(name: str, count: int = 3) -> tuple[tile.Program, k.Program]:
    """A function with all its products in parts, whatever they cost, and its kernels."""
    fn, shapes = CASES[name]
    options = Options(target="sm_90a", libraries="never")
    exact = lowering(capture(fn, tuple(map(torch.zeros, shapes)), {}).program, options)
    before = next(program for p, program, _ in exact.stages if p.name == "parts")
    program = into_parts(before, Log(), count, in_bfloat16)
    _, planned, derived = stages(program, Options(target="sm_90a"), Log(), ("schedule", "plan", "derive"))
    return planned[1], derived[1]


@pytest.mark.parametrize("name", CASES)
def test_functions_in_parts_are_as_exact_as_float32(name: str) -> None:
    program, kernels = in_parts(name)
    assert any("promote=True" in str(schedule) for _, schedule in program.schedules)
    check(kernels, gpu("sm_90a"))
    fn, shapes = CASES[name]
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    given = dict(zip((b.name for b in program.loop.inputs), args, strict=True))
    results = simulator.run(kernels, given, seed=3)
    plain, best = (fn(*(torch.from_numpy(x).to(t) for x in args)) for t in (torch.float32, torch.float64))
    plain, best = ((x,) if isinstance(x, torch.Tensor) else x for x in (plain, best))
    for ours, theirs, exact in zip(results, plain, best, strict=True):
        off, usual = (np.linalg.norm(np.asarray(x, np.float64) - exact.numpy()) for x in (ours, theirs))
        assert off <= 1.2 * usual  # the simulator rounds once for an instruction


def test_parts_are_of_windows_where_whole_tensors_are_refused() -> None:
    """TMA takes no rows that begin 3 elements later."""
    program = capture(lambda x, w: x[:, 3:1027] @ w, (torch.zeros(512, 1100), torch.zeros(1024, 1024)), {}).program
    done = lowering(program, Options(target="sm_90a", fp32="split", libraries="never"))
    types = {b.name: b.type.static_shape for s in done.loop.steps for b in s.writes}
    assert types["x_1"] == (512, 1024)


def test_parts_are_of_what_a_product_reads_where_that_is_no_box_of_the_buffer() -> None:
    """The gradient of the weights of queries, keys and values, which are stacked: rows of these are columns there."""

    def fn(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return g.permute(0, 3, 5, 1, 2, 4).reshape(768, 1792) @ x

    program = capture(fn, (torch.zeros(3, 8, 8, 4, 28, 64), torch.zeros(1792, 256)), {}).program
    done = lowering(program, Options(target="sm_90a", fp32="split", libraries="never"))
    types = {b.name: b.type.static_shape for s in done.loop.steps for b in s.writes}
    assert types["g_1"] == (1792, 768) and types["x_1"] == (1792, 256)  # columns lie side by side, as they did
    assert any("wgmma" in str(chosen) for _, chosen in done.at("tile").schedules)


def test_who_multiplies_the_same_term_shares_its_parts() -> None:
    both = parse("""@loop
def f(x: f32[64, 64], w: f32[64, 64]):
    with kernel('y', y=f32[64, 64]):
        for a0 in free(64):
            for a1 in free(64):
                for r0 in reduce(64):
                    acc0 <- sum(mul(exp(x[a0, r0]), w[a1, r0]))
                y[a0, a1] = acc0
    with kernel('z', z=f32[64, 64]):
        for a0 in free(64):
            for a1 in free(64):
                for r0 in reduce(64):
                    acc0 <- sum(mul(exp(x[a0, r0]), w[r0, a1]))
                z[a0, a1] = acc0
    with kernel('t', t=f32[64, 64]):
        for a0 in free(64):
            for a1 in free(64):
                for r0 in reduce(64):
                    acc0 <- sum(mul(exp(x[r0, a0]), w[r0, a1]))
                t[a0, a1] = acc0
    return (y, z, t)
""")
    made = into_parts(both, Log(), 3, lambda old, new, beaten: (1.0, ""))
    assert [s.name for s in made.steps] == ["x_parts", "y", "z", "x_parts_2", "t"]  # and w's with x's
    x = {n: np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32) for n in "xw"}
    for ours, theirs in zip(loop.run(made, x), loop.run(both, x, precise=True), strict=True):
        assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize("count", [2, 3])
def test_kernels_with_infinities_nan_and_zeros(count: int) -> None:
    """As the interpreter has it, to the bit of what is not finite."""
    program, kernels = in_parts("with itself", count)
    (b,) = program.loop.inputs
    x = np.random.default_rng(0).standard_normal(b.type.static_shape).astype(np.float32)
    some = [np.inf, -np.inf, np.nan, 0.0, -0.0, np.finfo(np.float32).max, 2.0**-149, 2.0**-130]
    x[:8, 3] = x[8:16, 65] = some
    x[:, 7] = 0.0
    with np.errstate(all="ignore"):
        exact = (x[:, None].astype(np.float64) * x[None].astype(np.float64)).sum(-1).astype(np.float32)
    with np.errstate(all="ignore"):
        (y,) = simulator.run(kernels, {b.name: x}, seed=1)
    odd = ~np.isfinite(exact)
    assert np.array_equal(y[odd], exact[odd], equal_nan=True) and np.isfinite(y[~odd]).all()
    assert odd.any() and np.allclose(y[~odd], exact[~odd], rtol=1e-3, atol=1e-3)


def in_six(m: int, n: int, k: int) -> dict[str, Any]:
    """A product of float32 as six of bfloat16, where three of float16 would be faster: the last stage of each IR."""
    options = Options(target="sm_90a", libraries="never")
    below = stages(split(whole(m, n, k)), options, Log(), ("schedule", "plan", "derive"))
    return {p.dst: found for p, found, _ in below}


def test_making_parts_is_a_wide_copy(tmp_path: Path) -> None:
    """Four numbers at a time come, and four parts of each rank leave; nothing is computed by a call or a branch."""
    maker = in_six(1024, 1024, 1024)["kernel"].steps[0]
    lines = sass(maker, "sm_90a", tmp_path)
    assert sum("LDG.E.128" in line for line in lines) == 1 and sum("STG.E.64" in line for line in lines) == 3
    assert not any("CALL" in line or "LDL" in line for line in lines)


def test_the_model_takes_the_kernel_that_was_measured() -> None:
    """4096 x 4096 x 4096: 128 x 128 on two warpgroups, a ring of two, six products a step; in an order of its own."""
    plan = str(in_six(4096, 4096, 4096)["tile"].plans[-1][1])
    measured = parse(paired(text(4096, 4096, 4096), 32))
    wanted = str(lowering(measured, Options(target="sm_90a")).at("tile").plans[0][1])
    for line in ("load =", "math =", "ring0 =", "product("):
        (ours,), (theirs,) = ([x for x in p.splitlines() if x.strip().startswith(line)] for p in (plan, wanted))
        assert ours == theirs


@pytest.mark.parametrize(("depth", "step"), [(128, 32), (256, 64)])
def test_short_sums_are_added_up_more_often(depth: int, step: int) -> None:
    done = lowering(
        capture(F.linear, (torch.zeros(8192, depth), torch.zeros(8192, depth)), {}).program,
        Options(target="sm_90a", libraries="never"),
    )
    schedule = str(done.at("tile").schedules[-1][1])
    assert f"r0 = time({depth // step}, ring=" in schedule and f"promote=True) * block({step})" in schedule


def test_many_products_are_in_parts_one_by_one() -> None:
    """Parts of four products fit in no tile: each has a kernel of its own, the last of which adds up all."""

    def fn(x: Any, y: Any, z: Any, v: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        return x @ a + y @ b + z @ c + v @ d

    args = (*[torch.zeros(6000, 768)] * 4, *[torch.zeros(768, 768)] * 4)
    done = lowering(capture(fn, args, {}).program, Options(target="sm_90a", libraries="never"))
    products = [str(s) for _, s in done.at("tile").schedules if " on=" in str(s)]
    assert len(products) == 4 and all("wgmma" in s and "promote=True" in s for s in products)


@pytest.mark.parametrize(("target", "tiles"), [("sm_80", False), ("sm_90a", True)])
def test_sums_of_two_products_are_chosen_for_warpgroups(target: str, tiles: bool) -> None:
    program = parse("""@loop
def f(x: bf16[256, 512], v: bf16[256, 512], w: bf16[256, 512]):
    with kernel('y', y=f32[256, 256]):
        for a0 in free(256):
            for a1 in free(256):
                for r0 in reduce(512):
                    acc0 <- sum(add(mul(f32(x[a0, r0]), f32(w[a1, r0])), mul(f32(w[a1, r0]), f32(v[a0, r0]))))
                y[a0, a1] = acc0
    return (y,)
""")
    events = lowering(program, Options(target=target)).log.events
    assert any(e.fired and e.rule == "tile" for e in events) == tiles
    told = [e.reason for e in events if e.rule == "tensor_cores"]
    assert told == (
        [] if tiles else ["it sums 2 products in a step, which instructions of warpgroups are chosen for only"]
    )


def test_few_rows_multiply_parts_of_weights_made_on_their_way() -> None:
    program = capture(F.linear, (torch.zeros(32, 4096), torch.zeros(14336, 4096)), {}).program
    done = lowering(program, Options(target="sm_90a", fp32="split", libraries="never"))
    makers = [e for e in done.log.events if e.rule == "into_parts" and "stores parts" in e.reason]
    assert len(makers) == 1 and 'to="acc0.a", by="parts"' in show(done.at("tile"))


@pytest.mark.parametrize(
    ("shape", "target", "reason"),
    [
        ((32, 32, 4096), "sm_90a", "32 x 32 results fill no tile of 64 rows"),
        ((16, 4096, 4096), "sm_90a", "16 x 4096 results wait for memory on CUDA cores too"),
        ((128, 256, 2048), "sm_90a", r"[\d.]+ us with parts made, [\d.]+ us as it is, by the model"),
        (
            (4096, 4096, 64),
            "sm_90a",
            "it sums 64 products, and CUDA cores are as exact where there are fewer than 128",
        ),
        ((4096, 4096, 4096), "sm_80", "parts are multiplied by wgmma, and the target is sm_80"),
    ],
)
def test_what_stays_on_cuda_cores_says_why(shape: tuple[int, int, int], target: str, reason: str) -> None:
    m, n, depth = shape
    program = capture(F.linear, (torch.zeros(m, depth), torch.zeros(n, depth)), {}).program
    done = lowering(program, Options(target=target, fp32="split", libraries="never"))
    (told,) = [e.reason for e in done.log.events if e.pass_name == "parts"]
    assert re.fullmatch(reason, told) and "bf16" not in str(done.loop.steps)


SCALED = text(256, 128, 192, blocks=1).replace(
    "add(add(mul(f32(x3[a0, r0]), f32(w1[a1, r0])), mul(f32(x2[a0, r0]), f32(w2[a1, r0]))), "
    "mul(f32(x1[a0, r0]), f32(w3[a1, r0])))",
    "mul(add(add(mul(f32(x3[a0, r0]), f32(w1[a1, r0])), mul(f32(x2[a0, r0]), f32(w2[a1, r0]))), "
    "mul(f32(x1[a0, r0]), f32(w3[a1, r0]))), f32(0.25))",
)


ONE = "mul(f32(x{}[a0, r0]), f32(w{}[a1, r0]))".format
LAST = f"mul(add(add({ONE(3, 1)}, {ONE(2, 2)}), {ONE(1, 3)}), f32(0.25))"
SMALL = f"add({LAST}, mul(add({ONE(2, 1)}, {ONE(1, 2)}), f32(0.5)))"
THREE = re.sub(r"sum\(.*\)\n", f"sum(add({SMALL}, {ONE(1, 1)}))\n", SCALED)
SHORT = THREE.replace("time(3,", "time(6,").replace("block(64)", "block(32)").replace("reg(4)", "reg(2)")


@pytest.mark.parametrize(
    ("source", "begun", "ends"), [(THREE, 3, 1), (SHORT.replace("swizzle=128", "swizzle=64"), 2, 0)]
)
def test_the_large_products_of_three_scales_are_promoted_every_32(source: str, begun: int, ends: int) -> None:
    """By each of two warpgroups: twice in a step of 64, once in one of 32; and otherwise in the last step, where there
    are no sums of a few steps.
    """
    assert "f32(0.5)" in source
    right(source)
    steps = str(derived(source))
    assert steps.count("fresh") == 2 * begun and len(re.findall(r"add\(acc\d\[", steps)) == 2 * (begun + ends)


@pytest.mark.parametrize("steps", [3, 4, 6])
@pytest.mark.parametrize("whole", [False, True])
def test_sums_are_as_large_as_they_should_be_where_tensor_cores_truncate(steps: int, whole: bool) -> None:
    """To 1e-8 in the mean, with sums of a few steps apart (6) or without, where 2.4e-8 are cut off; and those of whole
    numbers, of which nothing is, are exact.
    """
    depth, rng = 64 * steps, np.random.default_rng(0)
    x, w = (rng.standard_normal((128, depth), np.float32) for _ in range(2))
    if whole:
        x, w = (np.round(v * 40) for v in (x, w))
    tile = THREE.replace("256", "128").replace("grid(2)", "grid(1)").replace("grouped(2)", "grouped(1)")
    source = re.sub(r"\b192\b", str(depth), tile).replace("time(3,", f"time({steps},")
    given = {}
    for name, left in (("x", x), ("w", w)):
        for part in (1, 2, 3):  # each scaled by 2 once more than the one before it
            given[f"{name}{part}"] = left.astype(bf16.numpy)
            left = (left - given[f"{name}{part}"].astype(np.float32)) * 2
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    (y,) = simulator.run(derived(source), given, truncates=True)
    if whole:
        assert np.array_equal(y, exact) and np.abs(exact).max() > 2**12
    assert abs(((y - exact) * exact).sum() / (exact * exact).sum()) < 1e-8


@pytest.mark.parametrize(("steps", "columns", "held"), [(6, 128, True), (3, 128, False), (6, 144, False)])
def test_sums_of_a_few_steps_are_held_where_registers_have_room(steps: int, columns: int, held: bool) -> None:
    """A third set of sums, for 128 columns and fewer."""
    source = re.sub(r"\b192\b", str(64 * steps), THREE).replace("time(3,", f"time({steps},")
    source = source.replace("128", str(columns)).replace(f"swizzle={columns}", "swizzle=128")
    source = source.replace(f"a0 = grid(2) * block({columns})", "a0 = grid(2) * block(128)")
    if columns == 128:
        right(source)
    assert ("few0" in str(derived(source))) == held


def test_products_that_are_scaled_are_added_up_by_themselves() -> None:
    """In one set of registers: three products, which CUDA cores add, scaled; then three more."""
    assert "0.25" in SCALED
    right(SCALED)
    steps = str(derived(SCALED))
    assert re.findall(r"fresh|mul\(part\d\[e\d+\], f32\(0.25\)\)", steps)[:2] == ["fresh", "mul(part0[e9], f32(0.25))"]
    assert len(set(re.findall(r"part\d = registers", steps))) == 2  # one for each team
    assert steps.count("fresh") == 4


def test_what_is_scaled_is_promoted() -> None:
    with pytest.raises(Limitation, match=r"acc0: sums that are scaled are promoted, and its loop does not say promote"):
        derived(SCALED.replace(", promote=True", ""))


def test_what_is_scaled_otherwise_shares_no_steps() -> None:
    """Two sums over the same steps, of which one is scaled."""
    both = text(128, 128, 128, ((2, 1), (1, 2)), blocks=1)
    (summand,) = re.findall(r"acc0 <- sum\((.*)\)", both)
    changes = {
        summand: f"mul({summand}, f32(0.25))",
        "y=f32[128, 128])": "y=f32[128, 128], z=f32[128, 128])",
        "                y[a0": f"{' ' * 20}acc1 <- sum({summand})\n{' ' * 16}z[a0, a1] = acc1\n{' ' * 16}y[a0",
        'site("acc0", on': 'site("acc0", "acc1", on',
        'site("y")': 'site("y", "z")',
        "(y,)": "(y, z)",
    }
    for old, new in changes.items():
        assert old in both
        both = both.replace(old, new)
    with pytest.raises(Limitation, match=r"acc0: its sums are scaled otherwise than those beside them"):
        derived(both)
