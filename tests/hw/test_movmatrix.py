"""movmatrix: what it does to a matrix in registers, and to how values lie."""

from __future__ import annotations

import numpy as np

from terrazzo.hw import mma_sync
from terrazzo.hw.movmatrix import TURN
from terrazzo.ir.layout import Layout, moves


def test_it_transposes() -> None:
    matrix = np.arange(64).reshape(8, 8)
    held = matrix.reshape(32, 2)  # lane 4 r + c // 2 has the neighbours c and c + 1 of row r
    assert np.array_equal(TURN.run(held), matrix.T.reshape(32, 2))
    assert np.array_equal(TURN.run(TURN.run(held)), held)


def test_turned_sums_are_a_second_factor() -> None:
    """Rows of what was summed become its k."""
    product = mma_sync.product("mma.m16n8k16.f32.bf16")
    sums = Layout.parse(str(product.d.layout).replace("m", "k"))
    assert moves(sums, product.b.layout) == "lanes"
    assert TURN.turned(sums) == product.b.layout
    assert TURN.turned(TURN.turned(sums)) == sums
