"""`wgmma.mma_async`: the matrix instructions of four warps on Hopper (sm_90a), whose operands lie in shared memory.

Both operands are K-major slabs of rows of 128 bytes under the 128-byte swizzle: row r, 16-byte piece p is at 128 r + 16 (p ^ r % 8).
A descriptor names a slab; the next k slice of an instruction is 32 bytes further. See the PTX ISA, "Asynchronous warpgroup level
matrix instructions", for the accumulator's fragment and the descriptor's bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from terrazzo.hw.instruction import Fragment
from terrazzo.ir.layout import HARDWARE, Layout, Swizzle
from terrazzo.ir.types import DType, bf16, f16, f32

ROW = 128
"""Bytes of a row of a slab; eight rows are an atom of the swizzle, to which slabs are aligned."""
ATOM = 8 * ROW
SWIZZLE: Swizzle = HARDWARE[ROW]


@dataclass(frozen=True)
class WarpgroupInstruction:
    """d[m, n] += sum over k of a[m, k] * b[n, k], products exact, by the 128 threads of a warpgroup, asynchronously.

    `d` has parts reg, lane and warp. Between `wgmma.fence` and `wait_group` no other instruction may touch the registers of d.
    """

    name: str
    mnemonic: str
    shape: tuple[int, int, int]
    operand: DType
    d: Fragment
    since: int = 90

    def run(self, memory: Any, a: int, b: int, c: Any) -> Any:
        """What the threads hold of d, [128, elements], given c. `memory` is bytes of shared memory; a and b the slabs' addresses."""
        m, n, k = self.shape
        left, right = (self._slab(memory, address, rows, k) for address, rows in ((a, m), (b, n)))
        at = self._coordinates()
        total = (left @ right.T)[at["m"], at["n"]] + c.astype(np.float64)
        return total.astype(self.d.dtype.numpy)

    def distribute(self, matrix: Any) -> Any:
        """What each thread holds of a matrix [m, n]."""
        at = self._coordinates()
        return matrix[at["m"], at["n"]]

    def _coordinates(self) -> dict[str, Any]:
        reg, thread = np.meshgrid(np.arange(self.d.elements), np.arange(128))
        return self.d.layout.coordinates(reg=reg, lane=thread % 32, warp=thread // 32)

    def _slab(self, memory: Any, address: int, rows: int, k: int) -> Any:
        size = self.operand.size
        row, column, byte = np.meshgrid(np.arange(rows), np.arange(k), np.arange(size), indexing="ij")
        place = SWIZZLE(address + row * ROW + column * size + byte)  # the XOR is of address bits, so a slice may start inside an atom
        return np.ascontiguousarray(memory[place]).view(self.operand.numpy)[..., 0].astype(np.float64)

    @property
    def function(self) -> str:
        """The name of its function in CUDA."""
        return self.name.replace(".", "_")

    def cuda(self) -> str:
        """A function `void name(float (&d)[n / 2], descriptor a, descriptor b)` that accumulates."""
        count = self.d.registers
        d = "{" + ", ".join(f"%{i}" for i in range(count)) + "}"
        outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
        return (
            f"__device__ __forceinline__ void {self.function}(float (&d)[{count}], unsigned long long a, unsigned long long b) {{\n"
            f'  asm volatile("{self.mnemonic} {d}, %{count}, %{count + 1}, 1, 1, 1, 0, 0;" : {outputs} : "l"(a), "l"(b));\n'
            "}\n"
        )


DESCRIPTOR = f"""// A K-major slab in shared memory under the 128-byte swizzle; 2 more in the low word is the next 32 bytes of k.
__device__ __forceinline__ unsigned long long slab_descriptor(unsigned address) {{
  return (address & 0x3ffffu) >> 4 | 1ull << 16 | {ATOM >> 4}ull << 32 | 1ull << 62;
}}
"""


def _record(n: int, operand: DType) -> WarpgroupInstruction:
    registers = ["n1", "m8", *(f"n{1 << i}" for i in range(3, n.bit_length() - 1))]
    layout = Layout.parse(f"reg: {' '.join(registers)}; lane: n2 n4 m1 m2 m4; warp: m16 m32")
    name, ptx = operand.name, f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{operand.name}.{operand.name}"
    return WarpgroupInstruction(f"wgmma.m64n{n}k16.f32.{name}", ptx, (64, n, 16), operand, Fragment(f32, layout))


INSTRUCTIONS: tuple[WarpgroupInstruction, ...] = tuple(_record(n, operand) for operand in (f16, bf16) for n in (8, 16, 32, 64, 128, 256))
