"""Nothing in a schedule is unread: a word that no rule takes is an error, with its line and a caret."""

from __future__ import annotations

import re

import pytest
import torch
from tests.kernels.programs import lowered
from tests.kernels.test_schedules import HALVES, ROWS, TENSOR_CORES, matmul, norm, tensors

from terrazzo.errors import Limitation, UserError

ROW = ROWS


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("grid(5)", "grid(5, nonsense=7)", "nothing reads `a0 = ... nonsense=7 ...`: line 2, column 18"),
        ("r0 = time(4)", "r0 = time(4, overlap=1)", "nothing reads `acc0: r0 = ... overlap=1 ...`: line 4, column 22"),
        ("r0 = time(4)", "r0 = time(4, ring=3)", "nothing reads `acc0: r0 = ... ring=3 ...`"),
        ("        r0 =", '        x = smem(by="tma")\n        r0 =', "nothing reads `acc0: x = ... smem ...`"),
        ("        a1 =", "        mul = smem(swizzle=128)\n        a1 =",
         "mul gathers in shared memory, and there is no tile"),
        ("grid(5)\n", "grid(5)\n    y = reg()\n", "nothing reads `y = ... reg ...`: line 3"),
        ("grid(5)\n", "grid(5)\n    roles(load=warp(1), math=warp(2))\n",
         "roles give 2 warps to math, and its sites bind 4"),
        ("grid(5)\n", "grid(5)\n    persistent(4, order=grouped(8))\n",
         "tiles in groups of rows have another axis inside of that of the rows"),
        ("grid(5)", "grid(5, order=grouped(5))",
         "tiles in groups of rows have another axis inside of that of the rows"),
    ],
)  # fmt: skip
def test_words_that_a_row_has_no_use_for(before: str, after: str, reason: str) -> None:
    assert before in ROW
    with pytest.raises((UserError, Limitation), match=re.escape(reason)):
        lowered(norm, tensors((5, 1024)), "sm_90a", schedules=(ROW.replace(before, after, 1),))


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("swizzle=64)\n        w", 'swizzle=64, over=("r0",))\n        w',
         "all operands of a product span the same loops: x spans r0, w spans none"),
        ("swizzle=64)\n        w", "swizzle=64, colour=3)\n        w",
         "nothing reads `acc0: x = ... colour=3 ...`: line 9"),
        ("swizzle=64)\n        w", "swizzle=64, multicast=True)\n        w", "there is no cluster to multicast to"),
        ("ring=4", "ring=4, overlap=1",
         "nothing reads `r0 = ... overlap=1 ...`; what overlaps are two products in a row, "
         "of which the second takes what is made of the first: line 4, column 27"),
        ('with site("mm"):\n', 'with site("mm"):\n        mm = smem(swizle=128)\n',
         "nothing reads `mm: mm = ... swizle=128"),
    ],
)  # fmt: skip
def test_words_that_a_product_has_no_use_for(before: str, after: str, reason: str) -> None:
    assert before in TENSOR_CORES
    text = TENSOR_CORES.replace(before, after, 1)
    with pytest.raises((UserError, Limitation), match=re.escape(reason)):
        lowered(matmul, tensors(*HALVES, dtype=torch.bfloat16), "sm_90a", schedules=(text,))


@pytest.mark.parametrize("word", ["longest_first", "grouped(2)"])
def test_only_the_grid_has_an_order(word: str) -> None:
    text = f'with schedule("mul", target="sm_90a"):\n    a0 = grid(1) * lane(32, order={word})\n'
    with pytest.raises(UserError, match="a0: order is that in which tiles are walked: grid has one, and not lane"):
        lowered(lambda x: x * 2, tensors((32,)), "sm_90a", schedules=(text,))
