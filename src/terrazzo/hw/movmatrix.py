"""`movmatrix`: an 8 x 8 matrix of 16-bit elements in the registers of a warp, a 32-bit register of each lane, is
transposed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from terrazzo.ir.layout import Layout, conversion


@dataclass(frozen=True)
class MatrixTurn:
    """`source` and `target` say which row r and column c of the matrix a lane's element is, before and after. `since`
    is the first architecture that has it (75 for sm_75).
    """

    name: str
    mnemonic: str
    source: Layout
    target: Layout
    since: int

    def run(self, held: Any) -> Any:
        """What the lanes hold afterwards, [..., lanes, 2]: the meaning of the instruction."""
        reg, lane = np.meshgrid(np.arange(2), np.arange(32))
        matrix = np.zeros((*held.shape[:-2], 8, 8), held.dtype)
        there, here = (layout.coordinates(reg=reg, lane=lane) for layout in (self.source, self.target))
        matrix[(..., there["r"], there["c"])] = held
        return matrix[(..., here["r"], here["c"])]

    def turned(self, layout: Layout) -> Layout:
        """How values lie once each such matrix of them was transposed: the first bit of a register's number and those
        of the lane's are exchanged.
        """
        back = conversion(self.source, self.target)
        assert back is not None
        mine = (layout.part("reg")[0], *layout.part("lane"))
        images = [sum(x for n, x in enumerate(mine) if bits >> n & 1) for bits in back]
        places = {"reg": (images[0], *layout.part("reg")[1:]), "lane": tuple(images[1:])}
        return Layout(tuple((name, places.get(name, part)) for name, part in layout.places), layout.extents)

    @property
    def cuda(self) -> str:
        """A function `void movmatrix(x, y)`, each a register of 32 bits."""
        return (
            "TZ void movmatrix(u32 (&x)[1], const u32 (&y)[1]) {\n"
            f'  asm volatile("{self.mnemonic} %0, %1;" : "=r"(x[0]) : "r"(y[0]));\n'
            "}\n"
        )


TURN = MatrixTurn(
    "movmatrix",
    "movmatrix.sync.aligned.m8n8.trans.b16",
    Layout.parse("reg: c1; lane: c2 c4 r1 r2 r4"),
    Layout.parse("reg: r1; lane: r2 r4 c1 c2 c4"),
    75,
)
