"""`mma.sync`: the matrix instructions of a warp. The fragments are those of the PTX ISA, section "Matrix Fragments for
mma".
"""

from __future__ import annotations

from terrazzo.errors import UserError
from terrazzo.hw.instruction import Fragment, MatrixInstruction
from terrazzo.ir.layout import Layout
from terrazzo.ir.types import DType, bf16, f16, f32, i8, i32

# What the bits of an element's number within a lane, and of the lane, add to the coordinates. All of them pack
# neighbours along k into a register, give each group of four lanes a row (or a column of b), and each lane two
# neighbours of d.
_SHORT = {  # 16-bit operands, k = 8
    "a": "reg: k1 m8; lane: k2 k4 m1 m2 m4",
    "b": "reg: k1; lane: k2 k4 n1 n2 n4",
}
_LONG = {  # 16-bit operands, k = 16
    "a": "reg: k1 m8 k8; lane: k2 k4 m1 m2 m4",
    "b": "reg: k1 k8; lane: k2 k4 n1 n2 n4",
}
_BYTES = {  # 8-bit operands, k = 32
    "a": "reg: k1 k2 m8 k16; lane: k4 k8 m1 m2 m4",
    "b": "reg: k1 k2 k16; lane: k4 k8 n1 n2 n4",
}
_D = "reg: n1 m8; lane: n2 n4 m1 m2 m4"


def _record(k: int, operand: DType, d: DType, ptx: str, layouts: dict[str, str], since: int) -> MatrixInstruction:
    a, b = (Fragment(operand, Layout.parse(layouts[x])) for x in "ab")
    out = "s32" if d is i32 else d.name
    return MatrixInstruction(
        f"mma.m16n8k{k}.{d.name}.{operand.name}",
        f"mma.sync.aligned.m16n8k{k}.row.col.{out}.{ptx}.{ptx}.{out}",
        (16, 8, k), a, b, Fragment(d, Layout.parse(_D)), since,
    )  # fmt: skip


INSTRUCTIONS: tuple[MatrixInstruction, ...] = (
    _record(8, f16, f32, "f16", _SHORT, 75),
    _record(8, bf16, f32, "bf16", _SHORT, 80),
    _record(16, f16, f32, "f16", _LONG, 80),
    _record(16, bf16, f32, "bf16", _LONG, 80),
    _record(32, i8, i32, "s8", _BYTES, 80),
)

PRODUCTS = {i.name: i for i in INSTRUCTIONS}


def product(name: str) -> MatrixInstruction:
    """The instruction called `name`."""
    if name not in PRODUCTS:
        raise UserError(f"unknown instruction {name}; known: {', '.join(PRODUCTS)}")
    return PRODUCTS[name]
