"""Values have layouts: where they change them is a line of the plan, and the layout engine says how."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tests.kernels.arrangements import EVERY, Product
from tests.kernels.chains import EVERY as CHAINS
from tests.kernels.chains import Chain
from tests.kernels.test_arrangements import derived, right

from terrazzo.errors import UserError
from terrazzo.hw.ldmatrix import loader
from terrazzo.hw.memory import matrix_wavefronts
from terrazzo.hw.products import PRODUCTS, continued
from terrazzo.hw.wgmma import WarpgroupInstruction
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.layout import HARDWARE, Layout
from terrazzo.ir.plan import Convert, Plan, Stream
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.swizzles import swizzled


def plan(case: Product | Chain) -> Plan:
    ((_, found),) = lowering(parse(case.text), Options(target=case.target)).at("tile").plans
    return found


def ways(case: Product | Chain) -> dict[tuple[str, str], str]:
    return {(x.value, x.to): x.by for x in plan(case).all(Convert)}


def test_fragments_sums_and_results_are_converted() -> None:
    plain = {("x_s", "acc0.a"): "ldmatrix.x4", ("w_s", "acc0.b"): "ldmatrix.x4"}
    assert ways(EVERY["mma"]) == plain
    assert ways(EVERY["wgmma"]) == {} == ways(EVERY["fma"])  # wgmma reads slabs as they are, multiply-adds elements
    assert ways(EVERY["x in registers"]) == {("x_s", "acc0.a"): "ldmatrix.x4"}
    assert ways(EVERY["staged by tma"]) == {("y", "y_s"): "stmatrix.x4"}
    assert ways(EVERY["f32 staged"]) == {("y", "y_s"): "st"}
    assert ways(CHAINS["warpgroups"]) == {("acc3", "acc4.a"): "registers"}
    assert ways(CHAINS["products of k = 8"])["v_s", "acc4.b"] == "ldmatrix.x2.trans"


@pytest.mark.parametrize(
    "name", ["mma", "mma, both turned", "x in registers", "staged by tma", "mma, staged by stmatrix"]
)
def test_the_kernel_moves_matrices_as_its_plan_says(name: str) -> None:
    (kernel,) = derived(EVERY[name].text).steps
    moves = {s.instruction for s in k.walk(kernel.body) if isinstance(s, k.LoadMatrix | k.StoreMatrix)}
    assert moves == {x for x in ways(EVERY[name]).values() if "matrix" in x}


def test_what_sums_have_to_move_through() -> None:
    """Sums of an instruction are the next one's first factor where the layouts agree; else it is known how far off
    they are.
    """
    halves = [x for x in PRODUCTS.values() if "i8" not in x.name]
    for first in halves:
        for second in halves:
            assert continued(first, second) == "nothing", (first.name, second.name)
            four = isinstance(second, WarpgroupInstruction)  # whose rows four warps divide
            down = "memory" if four and isinstance(first, WarpgroupInstruction) else "movmatrix"
            assert continued(first, second, along="m") == down, (first.name, second.name)
            if not four:
                assert continued(first, second, "b", "m") == "movmatrix"
                assert continued(first, second, "b", "n") in ("nothing", "registers")
    bytes_ = PRODUCTS["mma.m16n8k32.i32.i8"]
    assert continued(bytes_, bytes_) == "lanes"


def test_no_chain_needs_shuffles() -> None:
    """Only factors of 8 bits would: and no load brings the other one of those from shared memory."""
    for second in PRODUCTS.values():
        ways = {continued(x, second, *how) for x in PRODUCTS.values() for how in (("a", "n"), ("a", "m"))}
        brought = any(loader(second.a.layout, 90, x) for x in "mk") or isinstance(second, WarpgroupInstruction)
        assert ("lanes" in ways) == (not brought), second.name


@pytest.mark.parametrize("row", range(16, 1040, 16))
def test_swizzles_leave_no_conflicts(row: int) -> None:
    """Of all rows that a swizzle divides, and of an odd number of 16 bytes without one."""
    span = swizzled(row)
    width = span or row
    assert row % width == 0
    rounds, _ = matrix_wavefronts(HARDWARE[span](np.arange(32) % 8 * width)[None], np.ones((1, 32), bool), 1)
    assert rounds[0] == 1
    assert span == max(s for s in HARDWARE if not s or row % s == 0)  # panels are as wide as they can be


@pytest.mark.parametrize(
    ("case", "spans"),
    [
        (Product(swizzle=0), [128, 128]),
        (Product(swizzle=0, tile=(64, 64, 32)), [64, 64]),
        (Product(swizzle=0, on="mma", target="sm_80", by="cp.async", tile=(64, 64, 16), shape=(64, 64, 80)), [32, 32]),
        (Product(swizzle=0, on="mma", target="sm_90a", by="tma", tile=(64, 64, 128), shape=(64, 64, 256)), [128, 128]),
    ],
)  # fmt: skip
def test_a_swizzle_that_nobody_wrote_follows_from_the_rows(case: Product, spans: list[int]) -> None:
    assert "swizzle" not in case.text
    assert [s.swizzle for s in plan(case).all(Stream)] == spans
    right(case.text)


def test_layouts_read_back() -> None:
    for name in ("mma", "x in registers", "staged by tma"):
        for x in plan(EVERY[name]).all(Convert):
            assert str(Layout.parse(x.layout)) == x.layout


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("swizzle=64", "swizzle=7", "x: slabs are swizzled by 32, 64 or 128 bytes, or not (0): not by 7"),
        ("swizzle=64", "swizzle=256", "x: slabs are swizzled by 32, 64 or 128 bytes, or not (0): not by 256"),
        ("swizzle=64", "pad=-8", "x: a pad is a number of elements, not -8"),
        ("y = smem(swizzle=128", "y = smem(swizzle=12", "y: slabs are swizzled by 32, 64 or 128 bytes"),
        ("y = smem(swizzle=128", "y = smem(pad=-1", "y: a pad is a number of elements, not -1"),
    ],
)
def test_what_no_slab_can_lie_like_is_refused(before: str, after: str, reason: str) -> None:
    text = EVERY["mma, staged"].text
    assert before in text
    with pytest.raises(UserError, match=re.escape(reason)):
        derived(text.replace(before, after, 1))
