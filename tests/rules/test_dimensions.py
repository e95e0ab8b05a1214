"""Buffers with the dimensions by which products read them, where who stores them can say where."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from terrazzo.interp.loop import run
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.text import parse
from terrazzo.ir.verify import verify
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.layout.dimensions import dimensions_of_products
from terrazzo.rules.loop.layout.layout import store_as_read

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


FROM_THE_END = """\
@loop
def f(x: f32[4, 50, 8], w: f32[200, 6]):
    with kernel('t', t=f32[4, 50, 8]):
        for a0 in free(4):
            for a2 in free(8):
                for a1 in scan(50):
                    in0 = x[a0, -a1 + 49, a2]
                    acc0 <- sum(in0)
                    t[a0, -a1 + 49, a2] = acc0
    with kernel('z', z=f32[8, 6]):
        for a0 in free(8):
            for a1 in free(6):
                for r0 in reduce(200):
                    in0 = t[r0 // 50, r0 % 50, a0]
                    in1 = w[r0, a1]
                    v0 = mul(in0, in1)
                    acc0 <- sum(v0)
                z[a0, a1] = acc0
    return (z,)
"""


@pytest.mark.parametrize("rule", [dimensions_of_products, store_as_read])
def test_what_is_stored_from_the_end_is_merged(rule: Callable[[l.Program, Log], l.Program]) -> None:
    """Gradients of scans are scans from the end; a weight's gradient sums over all their steps."""
    program = parse(FROM_THE_END)
    merged = rule(program, Log())
    (t, _) = merged.steps
    assert len(t.writes[0].type.shape) == 2
    verify(merged)
    draws = np.random.default_rng(0)
    given = {b.name: draws.standard_normal(b.type.shape, dtype=np.float32) for b in program.inputs}
    assert np.array_equal(*(run(p, given)[0] for p in (program, merged)))
