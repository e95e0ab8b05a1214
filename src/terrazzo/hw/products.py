"""The registry of instructions that multiply: multiply-adds, those of a warp, those of a warpgroup."""

from __future__ import annotations

import re
from functools import lru_cache

from terrazzo.errors import UserError
from terrazzo.hw.gpu import Gpu
from terrazzo.hw.instruction import MatrixInstruction
from terrazzo.hw.mma_sync import PRODUCTS as OF_A_WARP
from terrazzo.hw.movmatrix import TURN
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
def continued(first: Matrix, second: Matrix, letter: str = "a", along: str = "n") -> str:
    """How the sums of one instruction, packed, come to be a factor of another ("a" or "b"), part by part, where what
    was `along` its rows or columns ("m" or "n") is a k: by "nothing", through "registers", by "movmatrix", or through
    "lanes" or "memory". Where four warps have one instruction and each another, what they have lies side by side.
    """
    factor, other = (second.a, "m") if letter == "a" else (second.b, "n")  # type: ignore[union-attr]
    names = {along: "k", "n" if along == "m" else "m": "f"}
    source, target = str(first.d.layout), str(factor.layout)
    source = re.sub(r"\b[mn](?=\d)", lambda x: names[x[0]], source)
    target = re.sub(rf"\b{other}(?=\d)", "f", target)
    beside = next((x for x in (source, target) if "warp" in x), "").partition("; warp:")[2]
    layouts = [x if "warp" in x or not beside else f"{x}; warp:{beside}" for x in (source, target)]
    bits = {c: max(dict(Layout.parse(x).extents).get(c, 0) for x in layouts) for c in "kf"}
    one, two = (_whole(x, bits) for x in layouts)
    way = moves(one, two)
    if way == "lanes" and factor.dtype.size == 2 and moves(TURN.turned(one), two) in ("nothing", "registers"):
        return TURN.name
    return way


def _whole(layout: str, bits: dict[str, int]) -> Layout:
    """A layout with further parts in each lane's registers, up to so many bits of its coordinates."""
    every = [f"{c}{1 << bit}" for c in "kf" for bit in range(bits[c])]
    more = "".join(f" {x}" for x in every if x not in re.findall(r"\w+", layout))
    return Layout.parse(layout.replace("; lane", f"{more}; lane"))
