"""Rows that are copied with zeros behind them: who goes no further than these asks no more where rows end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from terrazzo.hw.gpu import GPUS
from terrazzo.interp.loop import run
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.sites import product
from terrazzo.ir.text import parse
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop_to_tile.choose import schedule
from terrazzo.rules.loop_to_tile.products.packed import padded

TEXT = """
@loop
def f(x: bf16[{m}, {k}], w: bf16[{n}, {k}]):
    with kernel('z', z=f32[{m}, {n}]):
        for a0 in free({m}):
            for a1 in free({n}):
                for r0 in reduce({steps}):
                    in0 = x[a0, r0] if r0 < {k} else 0
                    v0 = f32(in0)
                    in1 = w[a1, r0] if r0 < {k} else 0
                    v1 = f32(in1)
                    v2 = mul(v0, v1)
                    acc0 <- sum(v2)
                z[a0, a1] = acc0
    return (z,)
"""


def kernel(m: int, n: int, k: int, steps: int) -> Any:
    return parse(TEXT.format(m=m, n=n, k=k, steps=steps))


@pytest.mark.parametrize(("steps", "asks"), [(24, False), (22, False), (25, True)])
def test_rows_that_end_in_zeros(steps: int, asks: bool) -> None:
    """Rows of 21 have 24 places then."""
    p = kernel(5, 6, 21, steps)
    made = padded(p.steps[0])
    found = product(made[-1])
    assert found is not None and len(made) == 3
    assert [bool(x.inside) for x in found.operands if isinstance(x, l.Load)] == [asks, asks]
    rng = np.random.default_rng(0)
    given = {b.name: rng.integers(-4, 5, b.type.static_shape).astype(np.float32) for b in p.inputs}
    same = l.Program("f", p.inputs, made, p.results)
    np.testing.assert_array_equal(run(same, given)[0], run(p, given)[0])


def test_whole_rows_are_summed_by_one_kernel() -> None:
    """TMA would bring what a guard leaves out, so this was a split sum, whose parts were brought otherwise."""
    p = kernel(16016, 160, 1391, 1392)
    found = schedule(p, GPUS["sm_90a"], Log())
    assert [s.name for s in found.loop.steps] == ["z_x", "z_w", "z"]
    assert "tma" in str(dict(found.schedules)[2])
