"""The registry of instructions that multiply: multiply-adds, those of a warp, those of a warpgroup."""

from __future__ import annotations

import re
from functools import lru_cache

from terrazzo.errors import UserError
from terrazzo.hw.gpu import Gpu
from terrazzo.hw.instruction import MatrixInstruction
from terrazzo.hw.mma_sync import PRODUCTS as OF_A_WARP
from terrazzo.hw.transfer import FMA
from terrazzo.hw.wgmma import PRODUCTS as OF_A_WARPGROUP
from terrazzo.hw.wgmma import WarpgroupInstruction
from terrazzo.ir.layout import Layout, moves

Matrix = MatrixInstruction | WarpgroupInstruction

PRODUCTS: dict[str, Matrix] = {**OF_A_WARP, **OF_A_WARPGROUP}
"""The matrix instructions by name. `FMA`, on CUDA cores, multiplies elements and has no fragments."""


def matrix(name: str | None) -> Matrix | None:
    """The matrix instruction of this name, None for CUDA cores; UserError names the known ones."""
    if name in (None, FMA.name):
        return None
    if name not in PRODUCTS:
        wide = "and wgmma.m64n8k16.f32.f16 or .bf16, with any n up to 256 that is a multiple of 8"
        raise UserError(f"unknown instruction {name}; known: {', '.join((FMA.name, *OF_A_WARP))}, {wide}")
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


@lru_cache(maxsize=1024)
def continued(first: Matrix, second: Matrix) -> str:
    """How the sums of one instruction, packed, come to be the first factor of another, part by part, where what was a
    column is a k: by "nothing", or through "registers", "lanes" or "memory".
    """
    factor, deep = second.a.layout, dict(second.a.layout.extents)["k"]
    wide = dict(first.d.layout.extents)["n"]
    sums = re.sub(r"\bn(?=\d)", "k", str(first.d.layout))
    if wide > deep:  # of so many columns a factor has a part, which is a part of each lane's registers
        sums = re.sub(r" k(\d+)", lambda x: x[0] if int(x[1]) < 1 << deep else "", sums)
    more = "".join(f" k{1 << bit}" for bit in range(wide, deep))  # columns of the next instruction
    rows = 1 << dict(first.d.layout.extents)["m"]
    beside = f"; warp: m{rows} m{2 * rows}" if warps(first) < warps(second) else ""  # each has the next rows
    source = Layout.parse(sums.replace("; lane", f"{more}; lane") + beside)
    return moves(source, factor) if source.extents == factor.extents else "memory"
