"""`wgmma.mma_async`: the matrix instructions of four warps on Hopper (sm_90a), whose operands lie in shared memory.

Both operands are K-major slabs: rows as wide as their swizzle (32, 64 or 128 bytes), eight of which are an atom; the
first operand may be in registers instead. A descriptor names a slab; the next k slice of an instruction is 32 bytes
further. See the PTX ISA, "Asynchronous warpgroup level matrix instructions", for the fragments and the descriptor's
bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from terrazzo.errors import UserError
from terrazzo.hw.instruction import Fragment
from terrazzo.ir.layout import HARDWARE, Layout
from terrazzo.ir.types import DType, bf16, f16, f32

MODES = {128: 1, 64: 2, 32: 3}
"""Bits 62 and 63 of a descriptor, for each swizzle."""


def descriptor(address: int, span: int) -> int:
    """Names a K-major slab: its first byte in shared memory, and its swizzle. Atoms of eight rows lie one behind the
    other.
    """
    if span not in MODES:
        raise UserError(f"wgmma: a slab is swizzled by 32, 64 or 128 bytes, not {span}")
    return (address & 0x3FFFF) >> 4 | 1 << 16 | 8 * span >> 4 << 32 | MODES[span] << 62


def addresses(descriptor: int, rows: int, width: int) -> Any:
    """The addresses of the bytes that a descriptor names, [rows, width]: its bits are decoded, nothing else is
    known.
    """
    start, atom = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    span = {mode: span for span, mode in MODES.items()}[descriptor >> 62]
    row, byte = np.meshgrid(np.arange(rows), np.arange(width), indexing="ij")
    return HARDWARE[span](
        start + row // 8 * atom + row % 8 * span + byte
    )  # the XOR is of address bits: a slice may start inside an atom


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

    def run(self, a: Any, b: Any, c: Any) -> Any:
        """What the threads hold of d, [128, elements], given matrices a [m, k] and b [n, k], and what they hold of
        c.
        """
        at = _coordinates(self.d)
        total = (a.astype(np.float64) @ b.astype(np.float64).T)[at["m"], at["n"]] + c.astype(np.float64)
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

    @property
    def function(self) -> str:
        """The name of its function in CUDA."""
        return self.name.replace(".", "_")

    def cuda(self, registers: bool = False) -> str:
        """A function `void name(float (&d)[n / 2], a, descriptor b)` that accumulates; a is a descriptor, or its
        registers.
        """
        count, held = self.d.registers, self.a.registers
        d = "{" + ", ".join(f"%{i}" for i in range(count)) + "}"
        outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
        if registers:
            kind, given = f"const unsigned (&a)[{held}]", ", ".join(f'"r"(a[{i}])' for i in range(held))
            a, last, scales = "{" + ", ".join(f"%{count + i}" for i in range(held)) + "}", count + held, "1, 1, 1, 0"
        else:
            kind, given, a, last, scales = "unsigned long long a", '"l"(a)', f"%{count}", count + 1, "1, 1, 1, 0, 0"
        return (
            f"__device__ __forceinline__ void {self.function}(float (&d)[{count}], {kind}, unsigned long long b) {{\n"
            f'  asm volatile("{self.mnemonic} {d}, {a}, %{last}, {scales};" : {outputs} : {given}, "l"(b));\n'
            "}\n"
        )


@cache
def _coordinates(fragment: Fragment) -> dict[str, Any]:
    reg, thread = np.meshgrid(np.arange(fragment.elements), np.arange(128))
    return fragment.layout.coordinates(reg=reg, lane=thread % 32, warp=thread // 32)


DESCRIPTOR = """// A K-major slab in shared memory under a swizzle of `span` bytes; 2 more in the low word is the next 32 bytes of k.
template <int span> __device__ __forceinline__ unsigned long long slab_descriptor(unsigned address) {
  constexpr unsigned long long mode = span == 128 ? 1 : span == 64 ? 2 : 3;
  return (address & 0x3ffffu) >> 4 | 1ull << 16 | (8ull * span >> 4) << 32 | mode << 62;
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
    registers = ["n1", "m8", *(f"n{1 << i}" for i in range(3, n.bit_length() - 1))]
    d = Layout.parse(f"reg: {' '.join(registers)}; lane: n2 n4 m1 m2 m4; warp: m16 m32")
    a = Layout.parse("reg: k1 m8 k8; lane: k2 k4 m1 m2 m4; warp: m16 m32")
    name, ptx = operand.name, f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{operand.name}.{operand.name}"
    return WarpgroupInstruction(
        f"wgmma.m64n{n}k16.f32.{name}", ptx, (64, n, 16), operand, Fragment(operand, a), Fragment(f32, d)
    )


INSTRUCTIONS: tuple[WarpgroupInstruction, ...] = tuple(
    _record(n, operand) for operand in (f16, bf16) for n in (8, 16, 32, 64, 128, 256)
)


PRODUCTS = {i.name: i for i in INSTRUCTIONS}


def product(name: str) -> WarpgroupInstruction:
    """The instruction called `name`."""
    if name not in PRODUCTS:
        raise UserError(f"unknown instruction {name}; known: {', '.join(PRODUCTS)}")
    return PRODUCTS[name]
