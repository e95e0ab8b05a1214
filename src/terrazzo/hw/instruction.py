"""The record of a matrix instruction: what it computes, which lane and register holds which element, and how it is
written.

Everything that needs to know an instruction reads its record: the chooser of schedules, the layout engine, the
simulator, the emitter of CUDA. A new instruction is a new record in a file of its family.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from terrazzo.ir.dialects.loop import Buffer
from terrazzo.ir.layout import Layout
from terrazzo.ir.types import DType


@dataclass(frozen=True)
class Fragment:
    """An operand as the lanes of a warp hold it: `reg` counts a lane's elements, of which `packed` share a 32-bit
    register.

    Where an extent is no power of two, the layout is of a part of it, and lanes hold `repeats` such parts one behind
    the other, each further on along `n`.
    """

    dtype: DType
    layout: Layout
    repeats: int = 1

    @property
    def packed(self) -> int:
        """Elements in a 32-bit register."""
        return 4 // self.dtype.size

    @property
    def elements(self) -> int:
        """Elements a lane holds."""
        return self.repeats << self.layout.bits("reg")

    @property
    def registers(self) -> int:
        """32-bit registers a lane holds them in."""
        return self.elements // self.packed

    def held_in(self, place: Buffer) -> int:
        """How many elements of registers hold it: 32-bit ones, or such as it is of."""
        return self.elements * self.dtype.size // place.type.dtype.size

    def coordinates(self, reg: Any, **places: Any) -> dict[str, Any]:
        """The coordinates of elements, given which they are in every part of a place."""
        part, inner = np.divmod(reg, self.elements // self.repeats)
        found = self.layout.coordinates(reg=inner, **places)
        if self.repeats > 1:
            found["n"] = found["n"] + part * (1 << dict(self.layout.extents)["n"])
        return found

    @property
    def steps(self) -> list[tuple[str, int]]:
        """Along which coordinate, and how far, each bit of an element's number goes."""
        images = str(self.layout).partition(";")[0].removeprefix("reg:").split()
        return [(x[0], int(x[1:])) for x in images]

    @cached_property
    def _coordinates(self) -> list[Any]:
        reg, lane = np.meshgrid(np.arange(self.elements), np.arange(1 << self.layout.bits("lane")))
        return list(self.layout.coordinates(reg=reg, lane=lane).values())

    def distribute(self, matrix: Any) -> Any:
        """What each lane holds of matrices, [..., lanes, elements]. Coordinates come last, in the order of their
        names.
        """
        return matrix[(..., *self._coordinates)]

    def collect(self, held: Any) -> Any:
        """The matrices that lanes hold, from [..., lanes, elements]."""
        matrix = np.zeros([*held.shape[:-2], *(1 << bits for _, bits in self.layout.extents)], held.dtype)
        matrix[(..., *self._coordinates)] = held
        return matrix


@dataclass(frozen=True)
class MatrixInstruction:
    """d[m, n] = c[m, n] + sum over k of a[m, k] * b[k, n], products exact, the sum in the type of d, by one warp.

    `mnemonic` is PTX; `since` the first architecture that has it (80 for sm_80). Coordinates of fragments are k, m and
    n.
    """

    name: str
    mnemonic: str
    shape: tuple[int, int, int]
    a: Fragment
    b: Fragment
    d: Fragment
    since: int

    def run(self, a: Any, b: Any, c: Any) -> Any:
        """What the lanes hold of d, given what they hold of a, b and c: the meaning of the instruction."""
        wide = np.float64 if self.d.dtype.is_float else np.int64
        left, right = self.a.collect(a).astype(wide), self.b.collect(b).astype(wide)  # [k, m] and [k, n]
        total = left.swapaxes(-1, -2) @ right + self.d.collect(c).astype(wide)
        return self.d.distribute(total).astype(self.d.dtype.numpy)

    @property
    def function(self) -> str:
        """The name of its function in CUDA."""
        return self.name.replace(".", "_")

    def cuda(self) -> str:
        """A function `void name(d, a, b)` that accumulates in registers."""
        element = {"f32": ("float", "f"), "i32": ("int", "r")}[self.d.dtype.name]
        nd, na, nb = self.d.registers, self.a.registers, self.b.registers
        d, a, b = (_operands(n, start) for n, start in ((nd, 0), (na, nd), (nb, nd + na)))
        outputs = ", ".join(f'"+{element[1]}"(d[{i}])' for i in range(nd))
        inputs = ", ".join(f'"r"({name}[{i}])' for name, n in (("a", na), ("b", nb)) for i in range(n))
        parameters = f"{element[0]} (&d)[{nd}], const unsigned (&a)[{na}], const unsigned (&b)[{nb}]"
        return (
            f"__device__ __forceinline__ void {self.function}({parameters}) {{\n"
            f'  asm volatile("{self.mnemonic} {d}, {a}, {b}, {d};" : {outputs} : {inputs});\n'
            "}\n"
        )


def _operands(count: int, start: int) -> str:
    return "{" + ", ".join(f"%{start + i}" for i in range(count)) + "}"
