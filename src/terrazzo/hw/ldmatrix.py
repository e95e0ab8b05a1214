"""`ldmatrix` and `stmatrix`: 8 x 8 matrices of 16-bit elements between shared memory and the lanes of a warp.

Lane 8 j + i names the address of row i of matrix j, 16 bytes; every lane gets two neighbours of every matrix. Whether
an instruction can load a fragment, and which rows its lanes must name then, follows from the two layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from terrazzo.errors import UserError
from terrazzo.ir.layout import Layout, Vector

ROWS, COLUMNS = 3, 3
"""log2 of the rows and columns of a matrix."""


@dataclass(frozen=True)
class MatrixMove:
    """Moves `count` matrices. `layout` says which row r and column c of which matrix j a lane's element is.

    `store` is the direction, registers to shared memory; `since` the first architecture that has it (75 for sm_75).
    """

    name: str
    mnemonic: str
    count: int
    layout: Layout
    store: bool
    since: int

    def rows(self, fragment: Layout, along: str | None = None) -> tuple[Vector, ...] | None:
        """For each bit of a lane's number, the coordinates (as `fragment` packs them) it adds to the row the lane
        names.

        None where this instruction does not move such a fragment: its elements are not spread over the lanes in this
        way, or the columns of its matrices are not the neighbours along one coordinate (`along`, where it is given).
        """
        mine = dict(self.layout.places)
        theirs = dict(fragment.places)
        if [len(mine[p]) for p in ("reg", "lane")] != [len(theirs.get(p, ())) for p in ("reg", "lane")]:
            return None
        meaning = dict(
            zip((*mine["reg"], *mine["lane"]), (*theirs["reg"], *theirs["lane"]), strict=True)
        )  # a bit of (c, j, r) -> theirs
        column, matrix, row = self._bits()
        columns = [meaning[1 << b] for b in column]
        if columns != [columns[0] << k for k in range(COLUMNS)] or columns[0] not in _units(fragment, along):
            return None
        return tuple(meaning[1 << b] for b in (*row, *matrix))

    def _bits(self) -> tuple[range, range, range]:
        """Which bits of the packed coordinates are of c, j and r."""
        shift, found = 0, []
        for _, bits in self.layout.extents:
            found.append(range(shift, shift + bits))
            shift += bits
        return (found[0], found[1], found[2]) if len(found) == 3 else (found[0], range(0), found[1])

    def load(self, memory: Any, addresses: Any) -> Any:
        """What each lane holds, [32, elements]: `memory` is flat, `addresses` has the first element of the row each
        lane names.
        """
        at = self._places(addresses)
        return memory[at]

    def put(self, memory: Any, addresses: Any, held: Any) -> None:
        """The reverse: what the lanes hold goes to the rows they name."""
        memory[self._places(addresses)] = held

    def _places(self, addresses: Any) -> Any:
        reg, lane = np.meshgrid(np.arange(1 << self.layout.bits("reg")), np.arange(32))
        where = self.layout.coordinates(reg=reg, lane=lane)
        return addresses[where.get("j", 0) * 8 + where["r"]] + where["c"]

    @property
    def reverse(self) -> str:
        """The name of what moves the same in the other direction."""
        return self.name.replace("stmatrix", "ldmatrix") if self.store else self.name.replace("ldmatrix", "stmatrix")

    @property
    def function(self) -> str:
        """The name of its function in CUDA."""
        return self.name.replace(".", "_")

    def cuda(self) -> str:
        """A function `void name(unsigned (&x)[count], unsigned address)`; the address is one of shared memory, in
        bytes.
        """
        registers = "{" + ", ".join(f"%{k + self.store}" for k in range(self.count)) + "}"
        each = ", ".join(f'"{"" if self.store else "="}r"(x[{k}])' for k in range(self.count))
        if self.store:
            const, body = "const ", f'"{self.mnemonic} [%0], {registers};" :: "r"(address), {each}'
        else:
            const, body = "", f'"{self.mnemonic} {registers}, [%{self.count}];" : {each} : "r"(address)'
        head = f"__device__ __forceinline__ void {self.function}({const}unsigned (&x)[{self.count}], unsigned address)"
        return f'{head} {{\n  asm volatile({body} : "memory");\n}}\n'


def _units(layout: Layout, along: str | None) -> set[Vector]:
    """The packed form of the first element's neighbour along each coordinate, or along one."""
    units, shift = set(), 0
    for name, bits in layout.extents:
        if along in (None, name):
            units.add(1 << shift)
        shift += bits
    return units


def _record(count: int, transposed: bool, store: bool) -> MatrixMove:
    matrices = [f"j{1 << k}" for k in range(count.bit_length() - 1)]
    across, along = ("r", "c") if transposed else ("c", "r")
    layout = Layout.parse(
        f"reg: {' '.join([f'{across}1', *matrices])}; lane: {across}2 {across}4 {along}1 {along}2 {along}4"
    )
    what, trans = "stmatrix" if store else "ldmatrix", ".trans" if transposed else ""
    mnemonic = f"{what}.sync.aligned.m8n8.x{count}{trans}.shared.b16"
    return MatrixMove(f"{what}.x{count}{trans}", mnemonic, count, layout, store, 90 if store else 75)


INSTRUCTIONS: tuple[MatrixMove, ...] = tuple(
    _record(count, transposed, store) for store in (False, True) for count in (1, 2, 4) for transposed in (False, True)
)


MOVES = {i.name: i for i in INSTRUCTIONS}


def move(name: str) -> MatrixMove:
    """The instruction called `name`."""
    if name not in MOVES:
        raise UserError(f"unknown instruction {name}; known: {', '.join(MOVES)}")
    return MOVES[name]


@lru_cache(maxsize=1024)
def loader(fragment: Layout, arch: int, along: str | None = None) -> tuple[MatrixMove, tuple[Vector, ...]] | None:
    """The load that brings in this fragment whole, on this architecture, with the rows its lanes name; None where there
    is none.

    `along` is the coordinate that is contiguous in memory, where that is settled.
    """
    for instruction in INSTRUCTIONS:
        if (
            not instruction.store
            and instruction.since <= arch
            and (rows := instruction.rows(fragment, along)) is not None
        ):
            return instruction, rows
    return None
