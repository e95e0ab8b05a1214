"""Slabs that span loops (`over=`): with a halo, what several steps need of an operand is brought once."""

from __future__ import annotations

import re

import pytest
from tests.kernels.chains import Chain
from tests.kernels.convolutions import Convolution
from tests.kernels.test_arrangements import ADR, derived, right

from terrazzo.errors import Limitation, UserError
from terrazzo.ir.dialects import kernel as k

CONVOLUTION = ADR["10_convolution"].read_text()
LAST = {
    "w: bf16[80, 32, 3, 3]": "w: bf16[80, 32, 3, 3] @ (288, 1, 96, 32)",
    "x: bf16[1, 32, 6, 16]": "x: bf16[1, 32, 6, 16] @ (3072, 1, 512, 32)",
}
"""Channels last."""
COPIED = LAST | {'by="ld"': 'by="cp.async"', "ring=2": "ring=3"}
BOXES = LAST | {'by="ld"': 'by="tma"', "sm_80": "sm_90a", ", pad=8": ""}
DILATED = {
    "a2 + r1 - 1": "a2 + r1 * 2 - 2", "a3 + r2 - 1": "a3 + r2 * 2 - 2", "-a2 - r1 + 6": "-a2 - r1 * 2 + 7",
    "-a3 - r2 + 16": "-a3 - r2 * 2 + 17",
}  # fmt: skip
VALID = {
    " if a2 + r1 - 1 >= 0 and -a2 - r1 + 6 >= 0 and a3 + r2 - 1 >= 0 and -a3 - r2 + 16 >= 0 else 0": "",
    "a2 + r1 - 1": "a2 + r1", "a3 + r2 - 1": "a3 + r2", "x: bf16[1, 32, 6, 16]": "x: bf16[1, 32, 8, 18]",
}  # fmt: skip
ON_CUDA_CORES = {
    "bf16": "f32", "mul(f32(in0), f32(in1))": "mul(in0, in1)", "f32(acc0)": "acc0", "mma.m16n8k16.f32.f32": "fma.f32",
    "a1 = warp(2) * reg(2) * inst.m(16)": "a1 = warp(2) * lane(8) * reg(4)",
    "a3 = reg(2) * inst.n(8)": "a3 = lane(4) * reg(4)", "r0 = inst.k(16)": "r0 = reg(8) * reg(2)", "swizzle=32, ": "",
}  # fmt: skip


def changed(changes: dict[str, str], text: str = CONVOLUTION) -> str:
    for before, after in changes.items():
        assert before in text, before
        text = text.replace(before, after)
    return text


CASES = {
    "channels last": LAST,
    "copied": COPIED,
    "boxes": BOXES,
    "dilated": DILATED,
    "dilated, copied": COPIED | DILATED,
    "no padding": VALID,
    "on CUDA cores": ON_CUDA_CORES,
    "one loop of two": {'over=("r1", "r2")': 'over=("r2",)'},
    "one loop, by its name": {'over=("r1", "r2")': 'over="r1"'},
}


@pytest.mark.parametrize("name", CASES)
def test_a_slab_with_a_halo_is_right(name: str) -> None:
    right(changed(CASES[name]))


def test_an_operand_is_brought_once_for_all_taps() -> None:
    """In each of two steps 18 products, nine for each row of a warp; without `over`, slabs come eighteen times."""
    (kernel,) = derived(changed(COPIED)).steps
    assert isinstance(kernel, k.Kernel)
    sizes = {s.name: s.type.static_shape for s in kernel.shared}
    assert sizes == {"w_s0": (3, 64, 3, 3, 16), "x_s0": (3, 6, 18, 16)}
    loops = [s.axis.extent for s in k.walk(kernel.body) if isinstance(s, k.For) and not s.unrolled]
    assert loops == [2, 3, 3]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {
                "in0 = w[a1, r0, r1, r2]": "in0 = add(f32(w[a1, r0, r1, r2]), f32(w[a1, r0, r1, r2]))",
                "mma.m16n8k16.f32.bf16": "fma.f32",
                "mul(f32(in0)": "mul(in0",
                "a1 = warp(2) * reg(2) * inst.m(16)": "a1 = warp(2) * lane(8) * reg(4)",
                "a3 = reg(2) * inst.n(8)": "a3 = lane(4) * reg(4)",
                "r0 = inst.k(16)": "r0 = reg(16)",
            },
            "w is computed on its way, and spans no loops",
        ),
        (
            {'swizzle=32, along="r0", over=("r1", "r2")': 'swizzle=32, along="r0"'},
            "all operands of a product span the same loops: w spans none, x spans r1, r2",
        ),
        ({'("r1", "r2")': '"r3"'}, "over='r3': a slab spans loops that take one element a step, which are r1, r2"),
        ({'("r1", "r2")': '("r0",)'}, "over='r0': a slab spans loops that take one element a step"),
        (
            {'pad=8, along="r0"': "pad=14"},
            "x_s: its rows run along a3, along which a loop moves them, and ldmatrix reads rows that begin at",
        ),
        (
            VALID | {"x: bf16[1, 32, 8, 18]": "x: bf16[1, 32, 13, 18]", "a2 + r1,": "a2 * 2 + r1,"},
            "x: loops that a slab spans move it along one axis with a stride of one, not r1 + a2 * 2",
        ),
        (VALID | {"a2 + r1,": "a2 - r1 + 2,"}, "x: loops that a slab spans move it forward, not as -r1 + a2 + 2"),
        (
            VALID | {"x: bf16[1, 32, 8, 18]": "x: bf16[3, 32, 8, 18]", "x[a0,": "x[r1,"},
            "x: an axis that a spanned loop moves is in several dimensions",
        ),
    ],
)  # fmt: skip
def test_what_is_no_image_of_the_tile_is_refused(changes: dict[str, str], reason: str) -> None:
    text = changed(changes)
    with pytest.raises((Limitation, UserError), match=re.escape(reason)):
        derived(text)


def test_wgmma_spans_no_loops() -> None:
    text = Convolution().text.replace("swizzle=128", 'swizzle=128, over=("r1", "r2")')
    with pytest.raises(Limitation, match="wgmma reads rows that lie where its swizzle begins anew"):
        derived(text)


def test_a_chain_spans_no_loops() -> None:
    text = Chain().text
    assert "v = smem(" in text
    with pytest.raises(Limitation, match="slabs span loops of one product only"):
        derived(text.replace("v = smem(", 'v = smem(over="r1", '))
