"""Buffers with the dimensions by which products read them, where who stores them can say where."""

from __future__ import annotations

from terrazzo.ir.text import parse
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.layout.dimensions import dimensions_of_products

BANDS = """
@loop
def f(x: f32[4, 8, 9], w: f32[5, 8]):
    with kernel('t', t=f32[4, 8, 9]):
        for a0 in free(4):
            for a1 in free(8):
                for a2 in free(9):
                    in0 = x[a0, a1, a2]
                    v0 = exp(in0)
                    t[a0, a1, a2] = v0
    with kernel('z', z=f32[4, 9, 5]):
        for a0 in free(4):
            for a1 in free(9):
                for a2 in free(5):
                    for r0 in reduce(8):
                        in0 = t[a0, (a1 * 8 + r0) // 9, (a1 * 8 + r0) % 9]
                        in1 = w[a2, r0]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    z[a0, a1, a2] = acc0
    return (z,)
"""


def test_rows_that_are_cut_elsewhere_stay() -> None:
    """Bands of a matrix are seen with rows of 8 where they are stored in rows of 9: no digit of one is one of the
    other, so nobody could prove that all is stored.
    """
    program, log = parse(BANDS), Log()
    assert dimensions_of_products(program, log) == program
    assert "does not cover" in next(e.reason for e in log.events if e.rule == "dimensions_of_products")
