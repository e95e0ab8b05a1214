"""The registry of instructions that multiply: multiply-adds, those of a warp, those of a warpgroup."""

from __future__ import annotations

from terrazzo.errors import UserError
from terrazzo.hw.gpu import Gpu
from terrazzo.hw.instruction import MatrixInstruction
from terrazzo.hw.mma_sync import PRODUCTS as OF_A_WARP
from terrazzo.hw.transfer import FMA
from terrazzo.hw.wgmma import PRODUCTS as OF_A_WARPGROUP
from terrazzo.hw.wgmma import WarpgroupInstruction
from terrazzo.ir.layout import Layout

Matrix = MatrixInstruction | WarpgroupInstruction

PRODUCTS: dict[str, Matrix] = {**OF_A_WARP, **OF_A_WARPGROUP}
"""The matrix instructions by name. `FMA`, on CUDA cores, multiplies elements and has no fragments."""


def matrix(name: str | None) -> Matrix | None:
    """The matrix instruction of this name, None for CUDA cores; UserError names the known ones."""
    if name in (None, FMA.name):
        return None
    if name not in PRODUCTS:
        raise UserError(f"unknown instruction {name}; known: {', '.join((FMA.name, *PRODUCTS))}")
    return PRODUCTS[name]


def missing(instruction: Matrix, gpu: Gpu) -> str:
    """What a machine lacks for an instruction, or nothing."""
    if isinstance(instruction, WarpgroupInstruction):
        return "" if "wgmma" in gpu.features else "sm_90a"
    return "" if instruction.since <= gpu.number else f"sm_{instruction.since}"


def operands(instruction: Matrix) -> tuple[object, object]:
    """The types of the elements of the first and the second factor."""
    if isinstance(instruction, WarpgroupInstruction):
        return instruction.operand, instruction.operand
    return instruction.a.dtype, instruction.b.dtype


def warps(instruction: Matrix | None) -> int:
    """How many warps issue an instruction together."""
    return 4 if isinstance(instruction, WarpgroupInstruction) else 1


def continues(first: Matrix, second: Matrix) -> bool:
    """Whether the sums of one instruction, packed, are the first factor of another, part by part: what was a column is
    a k.
    """
    sums, factor = _places(first.d.layout, "n"), _places(second.a.layout, "k")
    deep, wide = dict(second.a.layout.extents)["k"], dict(first.d.layout.extents)["n"]
    part = [x for x in sums["reg"] if x[0] == "m" or int(x[1:]) < 1 << deep]
    return {**sums, "reg": part + [f"k{1 << bit}" for bit in range(wide, deep)]} == factor


def _places(layout: Layout, along: str) -> dict[str, list[str]]:
    """What every bit of each part adds to the coordinates, `along` being called k."""
    parts = (part.split(":") for part in str(layout).split(";"))
    return {name.strip(): images.replace(along, "k").split() for name, images in parts}
