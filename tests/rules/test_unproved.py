"""A fusion of which the proofs do not find that its indices stay in their tensors is not made."""

from __future__ import annotations

import numpy as np
import pytest

from terrazzo.interp.loop import run
from terrazzo.ir.text import parse
from terrazzo.ir.verify import problem, verify
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.cost import Rates
from terrazzo.rules.loop.fusion.fuse import fuse

ROWS = 1 << 18
"""So few that what one of them reads can be tried, and so many that what 16 of them read cannot."""
PROGRAM = """
@loop
def f(x: f32[50]):
    with kernel('t', t=f32[ROWS]):
        for a0 in free(ROWS):
            in0 = x[(a0 // 1000) * (a0 % 1000)] if a0 // 1000 < 7 and a0 % 1000 < 7 else 0
            v0 = FN(in0)
            t[a0] = v0
    with kernel('z', z=f32[ROWS]):
        for a0 in free(ROWS):
            for r0 in reduce(16):
                in0 = t[a0 - r0] if a0 - r0 >= 0 else 0
                acc0 <- sum(in0)
            z[a0] = acc0
    return (RESULTS,)
"""


@pytest.mark.parametrize(
    ("rule", "fn", "results"), [("view", "f64", "z"), ("inline", "neg", "z"), ("merge", "neg", "t, z")]
)
def test_what_is_not_proved_is_not_fused(rule: str, fn: str, results: str) -> None:
    text = PROGRAM.replace("ROWS", str(ROWS)).replace("FN", fn).replace("RESULTS", results)
    program = parse(text if fn != "f64" else text.replace("t=f32", "t=f64").replace("z=f32", "z=f64"))
    assert not problem(program)
    log = Log()
    fused = fuse(program, log, Rates(), decide=lambda c: next(x for x in c.options if x != "apart"))
    verify(fused, "fuse")
    reasons = [e.reason for e in log.events if e.rule == rule and not e.fired]
    assert any("it would not be proved right: the load x" in r for r in reasons), reasons
    x = {"x": np.arange(50, dtype=np.float32)}
    for ours, plain in zip(run(fused, x), run(program, x), strict=True):
        assert np.array_equal(ours, plain)
