"""`wgmma.mma_async`: the matrix instructions of four warps on Hopper (sm_90a), whose operands lie in shared memory.

An operand is a slab: rows as wide as their swizzle (32, 64 or 128 bytes), eight of which are an atom. Rows go along k
(K-major), and the next k slice of an instruction is 32 bytes further; or every k is a row of m or n (MN-major,
"transposed"), and the next slice is 16 rows further. The first operand may be in registers instead. A descriptor names
a slab. See the PTX ISA, "Asynchronous warpgroup level matrix instructions", for the fragments and the descriptor's
bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from terrazzo.errors import UserError
from terrazzo.hw.instruction import Fragment
from terrazzo.ir.dialects.kernel import Shared
from terrazzo.ir.layout import HARDWARE, Layout
from terrazzo.ir.types import DType, bf16, f16, f32

MODES = {128: 1, 64: 2, 32: 3}
"""Bits 62 and 63 of a descriptor, for each swizzle."""
ATOM = 8
"""Rows of an atom."""


@dataclass(frozen=True)
class Slab:
    """Where an operand lies, in bytes: rows of `span` bytes under a swizzle of as many, one behind the other.

    `panel` is how far it is from the first row of a panel to that of the next, for an MN-major operand that is wider
    than a row. It is the descriptor's leading byte offset; its stride byte offset is that from atom to atom.
    """

    span: int
    panel: int = 16

    def __post_init__(self) -> None:
        if self.span not in MODES:
            raise UserError(f"wgmma: a slab is swizzled by 32, 64 or 128 bytes, not {self.span}")

    @property
    def bits(self) -> int:
        """The descriptor but for the address."""
        return self.panel >> 4 << 16 | self.atom >> 4 << 32 | MODES[self.span] << 62

    @property
    def atom(self) -> int:
        """How far it is from atom to atom."""
        return ATOM * self.span

    def bytes(self, rows: int, width: int) -> int:
        """From its first byte to the end of its last, for so many rows of so many bytes."""
        last = (width - 1) // self.span
        return last * self.panel + (rows - 1) * self.span + width - last * self.span


def descriptor(address: int, slab: Slab) -> int:
    """Names a slab that begins at an address of shared memory."""
    return (address & 0x3FFFF) >> 4 | slab.bits


def addresses(descriptor: int, rows: int, width: int) -> Any:
    """The addresses of the bytes that a descriptor names, [rows, width]: its bits are decoded, nothing else is known.
    Rows are wider than the span only where they go along m or n.
    """
    start, panel, atom = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    span = {mode: span for span, mode in MODES.items()}[descriptor >> 62]
    row, byte = np.meshgrid(np.arange(rows), np.arange(width), indexing="ij")
    at = byte // span * panel + row // ATOM * atom + row % ATOM * span + byte % span
    return HARDWARE[span](start + at)  # the XOR is of address bits: a slice may start inside an atom


def slab(place: Shared, transposed: bool) -> Slab:
    """The slab of an operand in a place of shared memory, whose last two dimensions are rows. Of one that is
    `transposed` and wider than a row, the dimension before counts panels.
    """
    if not transposed or place.type.rank < 3:
        return Slab(place.swizzle)
    panel = place.type.element_strides[-3]
    assert isinstance(panel, int)
    return Slab(place.swizzle, panel * place.type.dtype.size)


def truncated(c: Any, a: Any, b: Any) -> Any:
    """c + a b, [m, n], of a [m, k] and b [k, n], as Hopper's tensor cores add: the products and c are aligned to the
    largest of them, with two bits more than float32 has; what is below is cut off, of the result too. Products of
    normal numbers by sums of such are 2e-8 too small in the mean, and were so on an H200 (ADR 009).
    """

    def cut(v: Any, unit: Any) -> Any:
        return np.trunc(v / unit) * unit

    def unit(v: Any, bits: int) -> Any:
        return np.ldexp(1.0, np.maximum(np.frexp(v)[1] - 1, -126) - bits)

    products = a[:, None].astype(np.float64) * b.T[None].astype(np.float64)
    least = unit(np.maximum(np.abs(products).max(-1), np.abs(c)), 25)
    total = cut(products, least[..., None]).sum(-1) + cut(c, least)
    return cut(total, unit(total, 23))


@dataclass(frozen=True)
class WarpgroupInstruction:
    """d[m, n] += sum over k of a[m, k] * b[n, k], products exact, by the 128 threads of a warpgroup, asynchronously.

    `a` is how they hold the first operand where it is in registers. Fragments have parts reg, lane and warp. Between
    `wgmma.fence` and `wait_group` no other instruction may touch the registers of d, nor those of a.
    """

    name: str
    mnemonic: str
    shape: tuple[int, int, int]
    operand: DType
    a: Fragment
    d: Fragment
    since: int = 90

    def extent(self, operand: str, transposed: bool) -> tuple[int, int]:
        """Rows and bytes in a row of operand "a" or "b" in shared memory."""
        m, n, depth = self.shape
        rows, columns = (m if operand == "a" else n), depth
        rows, columns = (columns, rows) if transposed else (rows, columns)
        return rows, columns * self.operand.size

    def run(self, a: Any, b: Any, c: Any, truncates: bool = False) -> Any:
        """What the threads hold of d, [128, elements], given matrices a [m, k] and b [n, k], and what they hold of c
        (None where d begins with the product). Sums are rounded once; or, where it `truncates`, as a Hopper adds up.
        """
        at = _coordinates(self.d)
        if truncates and self.d.dtype is f32:
            begun = np.zeros(self.shape[:2])
            begun[at["m"], at["n"]] = 0.0 if c is None else c
            return truncated(begun, a, b.T)[at["m"], at["n"]].astype(np.float32)
        total = (a.astype(np.float64) @ b.astype(np.float64).T)[at["m"], at["n"]]
        if c is not None:
            total = total + c.astype(np.float64)
        return total.astype(self.d.dtype.numpy)

    def distribute(self, matrix: Any) -> Any:
        """What each thread holds of a matrix [m, n]."""
        at = _coordinates(self.d)
        return matrix[at["m"], at["n"]]

    def collect(self, held: Any) -> Any:
        """The matrix a [m, k] of which the threads hold [128, elements]."""
        at, matrix = _coordinates(self.a), np.zeros((self.shape[0], self.shape[2]), held.dtype)
        matrix[at["m"], at["k"]] = held
        return matrix

    def narrow(self, parts: int) -> WarpgroupInstruction:
        """The instruction of so many-th of the columns, whose sums lie as this one's first ones do."""
        m, n, _ = self.shape
        return product(self.name.replace(f".m{m}n{n}k", f".m{m}n{n // parts}k"))

    def function(self, transposed: str = "") -> str:
        """The name of its function in CUDA; of `transposed` operands, "a" or "b" or both, rows go along m or n."""
        return self.name.replace(".", "_") + (f"_t{transposed}" if transposed else "")

    def cuda(self, registers: bool = False, fresh: bool = False, transposed: str = "") -> str:
        """A function `void name(float (&d)[n / 2], a, descriptor b)` that accumulates; a is a descriptor, or its
        registers. Where it may be `fresh`, one more argument says whether d is added to the product.
        """
        count, held = self.d.registers, self.a.registers
        d = "{" + ", ".join(f"%{i}" for i in range(count)) + "}"
        outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
        flags = [f"{int('a' in transposed)}", f"{int('b' in transposed)}"]
        if registers:
            kind, given = f"const unsigned (&a)[{held}]", ", ".join(f'"r"(a[{i}])' for i in range(held))
            a, last, flags = "{" + ", ".join(f"%{count + i}" for i in range(held)) + "}", count + held, flags[1:]
        else:
            kind, given, a, last = "unsigned long long a", '"l"(a)', f"%{count}", count + 1
        adds = "adds" if fresh else "1"
        text = f"{self.mnemonic} {d}, {a}, %{last}, {', '.join([adds, '1', '1', *flags])};"
        if fresh:
            text = f"{{\\n .reg .pred adds;\\n setp.ne.b32 adds, %{last + 1}, 0;\\n {text}\\n}}"
        more, operand = (", int adds", ', "r"(adds)') if fresh else ("", "")
        return (
            f"__device__ __forceinline__ void {self.function(transposed)}"
            f"(float (&d)[{count}], {kind}, unsigned long long b{more}) {{\n"
            f'  asm volatile("{text}" : {outputs} : {given}, "l"(b){operand});\n'
            "}\n"
        )


@cache
def _coordinates(fragment: Fragment) -> dict[str, Any]:
    reg, thread = np.meshgrid(np.arange(fragment.elements), np.arange(128))
    return fragment.coordinates(reg, lane=thread % 32, warp=thread // 32)


UNIT = 16
"""Bytes that an address in a descriptor counts."""

DESCRIPTOR = """// A slab in shared memory, so many times 16 bytes after an address; `bits` is what its
// descriptor says of rows, atoms and panels. Slabs end before 2^18, so there is no carry out of the address.
template <unsigned long long bits>
__device__ __forceinline__ unsigned long long slab_descriptor(unsigned address, unsigned units) {
  const unsigned low = ((address & 0x3ffffu) >> 4) + units + unsigned(bits);
  return bits >> 32 << 32 | low;
}
"""

GROUPS = """// What orders the products of a warpgroup with everything else.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int open> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(open) : "memory");
}
// The compiler may not use these registers earlier than here.
template <class T, int count> __device__ __forceinline__ void wgmma_settled(T (&d)[count]) {
#pragma unroll
  for (int i = 0; i < count; i++) asm volatile("" : "+f"(d[i]) :: "memory");
}
"""


def _record(n: int, operand: DType) -> WarpgroupInstruction:
    part = n & -n  # the largest power of two that divides it
    registers = ["n1", "m8", *(f"n{1 << i}" for i in range(3, part.bit_length() - 1))]
    d = Layout.parse(f"reg: {' '.join(registers)}; lane: n2 n4 m1 m2 m4; warp: m16 m32")
    a = Layout.parse("reg: k1 m8 k8; lane: k2 k4 m1 m2 m4; warp: m16 m32")
    name, ptx = operand.name, f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{operand.name}.{operand.name}"
    return WarpgroupInstruction(
        f"wgmma.m64n{n}k16.f32.{name}", ptx, (64, n, 16), operand, Fragment(operand, a), Fragment(f32, d, n // part)
    )


INSTRUCTIONS: tuple[WarpgroupInstruction, ...] = tuple(
    _record(n, operand) for operand in (f16, bf16) for n in range(8, 257, 8)
)


PRODUCTS = {i.name: i for i in INSTRUCTIONS}


def product(name: str) -> WarpgroupInstruction:
    """The instruction called `name`."""
    if name not in PRODUCTS:
        some = ", ".join(i.name for i in INSTRUCTIONS[:: len(INSTRUCTIONS) // 2])
        raise UserError(f"unknown instruction {name}; known: {some}, and so on for every n that is a multiple of 8")
    return PRODUCTS[name]
