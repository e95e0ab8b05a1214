"""Products in float32 on tensor cores: factors as sums of bfloat16 parts, several products in every step, whose sums
CUDA cores add up.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.hw.sass import sass
from tests.kernels.arrangements import F, M, Product
from tests.kernels.test_arrangements import derived, right

from terrazzo.errors import Limitation, UserError
from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.ir.contraction import contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import topological
from terrazzo.ir.parse_plan import parse_plan
from terrazzo.ir.text import parse
from terrazzo.ir.types import bf16
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.tile.verify import verify
from terrazzo.run.cache import Cache
from terrazzo.run.nvrtc import compile_each
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


def test_six_products_are_as_exact_as_float32() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((256, 320), np.float32), rng.standard_normal((128, 320), np.float32)
    names = [f"{a}{p}" for a in "xw" for p in (1, 2, 3)]
    given = dict(zip(names, [*rounded(x, 3), *rounded(w, 3)], strict=True))
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    (y,) = simulator.run(derived(text(256, 128, 320, blocks=2)), given, seed=1)
    off, plain = (np.linalg.norm(z - exact) for z in (y, x @ w.T))
    assert off < plain


def test_the_small_products_come_first_and_the_first_one_overwrites() -> None:
    steps = str(derived(text(128, 128, 192, blocks=1)))
    products = re.findall(r"multiply_async\(.*?(x\d)_s.*?(w\d)_s\d?\[[^]]*\](.*)\)", steps)
    assert [f"{x}{w}" for x, w, _ in products] == [f"x{a}w{b}" for a, b in PAIRS] * 2
    assert ["fresh" in rest for *_, rest in products] == [True, *[False] * 5] * 2


def test_machine_code(tmp_path: Path) -> None:
    """At full size: 24 products for each warpgroup, the first overwriting, 64 additions, nothing spilled."""
    (kernel,) = derived(text(4096, 4096, 4096)).steps
    lines = sass(kernel, "sm_90a", tmp_path)
    products = [line for line in lines if "HGMMA.64x128x16.F32.BF16" in line]
    assert len(products) == 48 and sum(", RZ, !UPT" in line for line in products) == 2
    assert sum("FADD" in line for line in lines) == 128
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


@pytest.mark.parametrize("product", [Product(**M), Product(**F)], ids=["warps", "CUDA cores"])
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


def test_promotion_is_refused_on_cuda_cores() -> None:
    with pytest.raises((UserError, Limitation), match="acc0: sums on CUDA cores need no promotion"):
        derived(Product(**F | {"promote": True}).text)


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
