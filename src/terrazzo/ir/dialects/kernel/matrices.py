"""Statements of whole warps: fragments loaded and stored, products of matrices."""

from __future__ import annotations

from terrazzo.errors import UserError
from terrazzo.ir.dialects.kernel.statement import Cuda, Function, Statement, one_of
from terrazzo.ir.dialects.kernel.values import Registers, Shared
from terrazzo.ir.dialects.loop import Buffer
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.types import u32


class LoadMatrix(Statement, dialect="kernel", op="load_matrix"):
    """ldmatrix: `instruction` names a record of hw.ldmatrix; every lane names a row. Registers are 32 bits wide, or
    hold elements of the source's type.
    """

    writes, together = ("target",), "warp"

    instruction: str
    target: Registers
    to: tuple[IntExpr, ...]
    source: Shared
    at: tuple[IntExpr, ...]

    def check(self) -> None:
        if (kind := self.target.type.dtype) not in (u32, self.source.type.dtype):
            raise UserError(f"load_matrix: {self.target.name} holds {kind}, neither u32 nor as {self.source.name}")

    def functions(self, cluster: int) -> tuple[Function, ...]:
        return (("instruction", self.instruction),)

    def cuda(self, w: Cuda) -> list[str]:
        move = w.record(self.instruction)
        words = w.group if self.target.type.dtype is u32 else w.words
        return [f"{move.function}({words(self.target, self.to, move.count)}, {w.shared(self.source, self.at)});"]


class StoreMatrix(Statement, dialect="kernel", op="store_matrix"):
    """stmatrix: the reverse of ldmatrix. Registers are 32 bits wide, or hold elements of the target's type."""

    writes, together = ("target",), "warp"

    instruction: str
    target: Shared
    to: tuple[IntExpr, ...]
    source: Registers
    at: tuple[IntExpr, ...]

    def functions(self, cluster: int) -> tuple[Function, ...]:
        return (("instruction", self.instruction),)

    def cuda(self, w: Cuda) -> list[str]:
        move = w.record(self.instruction)
        return [f"{move.function}({w.packed(self.source, self.at, move.count)}, {w.shared(self.target, self.to)});"]


class TurnMatrix(Statement, dialect="kernel", op="turn_matrix"):
    """movmatrix: an 8 x 8 matrix of 16-bit elements, a 32-bit register of every lane, is transposed (hw.movmatrix).
    Registers are 32 bits wide, or hold such elements.
    """

    writes, together = ("target",), "warp"
    uses = ("movmatrix",)

    target: Registers
    to: tuple[IntExpr, ...]
    source: Registers
    at: tuple[IntExpr, ...]

    def check(self) -> None:
        for place in (self.target, self.source):
            if (kind := place.type.dtype) is not u32 and kind.size != 2:
                raise UserError(f"turn_matrix: {place.name} holds {kind}, and its matrices are of 16-bit elements")

    def cuda(self, w: Cuda) -> list[str]:
        return [f"movmatrix({w.words(self.target, self.to, 1)}, {w.packed(self.source, self.at, 1)});"]


class Multiply(Statement, dialect="kernel", op="multiply"):
    """d += a * b by a matrix instruction, a record of hw.mma_sync. Registers of a and b are 32 bits wide, or
    elements.
    """

    writes, together = ("d",), "warp"

    instruction: str
    d: Registers
    d_at: tuple[IntExpr, ...]
    a: Registers
    a_at: tuple[IntExpr, ...]
    b: Registers
    b_at: tuple[IntExpr, ...]

    def functions(self, cluster: int) -> tuple[Function, ...]:
        return (("instruction", self.instruction),)

    def cuda(self, w: Cuda) -> list[str]:
        record = w.record(self.instruction)
        a, b = w.packed(self.a, self.a_at, record.a.registers), w.packed(self.b, self.b_at, record.b.registers)
        return [f"{record.function}({w.group(self.d, self.d_at, record.d.registers)}, {a}, {b});"]


class MultiplyAsync(Statement, dialect="kernel", op="multiply_async"):
    """d += a * b by the four warps of a warpgroup, a record of hw.wgmma; d may be used again once its group was waited
    for. Where `fresh` is >= 0, d becomes a * b, whatever it was.

    b is a slab of shared memory, swizzled, whose rows are as wide as the swizzle; a too, or it is in registers, 32 bits
    wide or elements. Rows go along k; of operands that are `transposed` ("a", "b" or "ab"), along m or n.
    """

    writes, together = ("d",), "warpgroup"
    named = {"transposed": "word", "fresh": "condition"}

    instruction: str
    d: Registers
    d_at: tuple[IntExpr, ...]
    a: Buffer
    a_at: tuple[IntExpr, ...]
    b: Shared
    b_at: tuple[IntExpr, ...]
    fresh: IntExpr = -1
    transposed: str = ""

    def check(self) -> None:
        one_of("transposed", self.transposed, ("", "a", "b", "ab"))
        if "a" in self.transposed and isinstance(self.a, Registers):
            raise UserError("multiply_async: an operand in registers is not transposed")
        for place in (self.a, self.b):
            if isinstance(place, Shared) and place.swizzle:
                kind = place.type
                wide = kind.static_shape[-1] * kind.dtype.size if kind.rank > 1 else 0
                if (wide, *kind.element_strides[-2:]) != (place.swizzle, *kind.static_shape[-1:], 1):
                    raise UserError(
                        f"multiply_async: rows of {place.name} are {wide} bytes wide, its swizzle spans {place.swizzle}"
                    )

    def functions(self, cluster: int) -> tuple[Function, ...]:
        held = isinstance(self.a, Registers)
        return ("wgmma",), ("instruction", self.instruction, held, self.fresh != -1, self.transposed)

    def cuda(self, w: Cuda) -> list[str]:
        record = w.record(self.instruction)
        d, b = w.group(self.d, self.d_at, record.d.registers), w.descriptor(self.b, self.b_at, "b" in self.transposed)
        if isinstance(self.a, Registers):
            a = w.packed(self.a, self.a_at, record.a.registers)
        else:
            a = w.descriptor(self.a, self.a_at, "a" in self.transposed)
        adds = f", !({w.guard((self.fresh,))})" if self.fresh != -1 else ""
        return [f"{record.function(self.transposed)}({d}, {a}, {b}{adds});"]
