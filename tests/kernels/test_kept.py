"""What registers keep of a row serves loops that read no more of it than was loaded."""

from __future__ import annotations

import pytest
from tests.kernels.test_arrangements import derived, right

from terrazzo.ir.dialects import kernel as k


def text(first: int, then: int) -> str:
    """The square sum of the first elements of a row, and so many elements divided by it."""
    return f"""@tile
def f(x: f32[4, 32]):
    with kernel('y', y=f32[4, {then}]):
        for a0 in free(4):
            for r0 in reduce({first}):
                in0 = x[a0, r0]
                acc0 <- sum(mul(in0, in0))
            for a1 in free({then}):
                y[a0, a1] = div(x[a0, a1], acc0)
    with schedule("y", target="sm_90a"):
        a0 = grid(4)
        x = reg()
        with site("acc0"):
            r0 = reg(1) * lane(32)
        with site("y"):
            a1 = reg(1) * lane(32)
    return (y,)
"""


@pytest.mark.parametrize(
    ("first", "then", "kept"),
    [(16, 16, 1), (16, 12, 1), (32, 16, 1), (16, 22, 2), (16, 32, 2)],  # lanes 16 to 21 read what nobody had loaded
)
def test_kept_elements_serve_loops_that_read_no_more(first: int, then: int, kept: int) -> None:
    right(text(first, then))
    (kernel,) = derived(text(first, then)).steps
    assert sum(isinstance(s, k.Declare) and s.place.name.startswith("x") for s in k.walk(kernel.body)) == kept
