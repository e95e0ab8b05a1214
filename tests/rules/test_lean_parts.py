"""Parts are made on their way where that saves much memory and takes little time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.text import parse
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.precision.lean_parts import lean_parts
from terrazzo.rules.loop.precision.parts import into_parts

LAYERS = """
@loop
def f(x: f32[256, 512], w0: f32[512, 512], w1: f32[512, 512]):
    with kernel('y', y=f32[256, 512]):
        for a0 in free(256):
            for a1 in free(512):
                for r0 in reduce(512):
                    in0 = x[a0, r0]
                    in1 = w0[a1, r0]
                    v0 = mul(in0, in1)
                    acc0 <- sum(v0)
                y[a0, a1] = acc0
    with kernel('z', z=f32[256, 512]):
        for a0 in free(256):
            for a1 in free(512):
                for r0 in reduce(512):
                    in0 = y[a0, r0]
                    in1 = w1[a1, r0]
                    v0 = mul(in0, in1)
                    acc0 <- sum(v0)
                z[a0, a1] = acc0
    return (z,)
"""


def gained(_: Sequence[l.Kernel], new: Sequence[l.Kernel], beaten: float) -> tuple[float, str]:
    """Whatever stores more parts is faster."""
    return float(sum(b.type.span for s in new for b in s.writes)), ""


@pytest.mark.parametrize("slower", [1.0, 10.0, -1.0])
def test_weights_are_made_into_parts_on_their_way(slower: float) -> None:
    program = parse(LAYERS)

    def make(lean: Collection[l.Kernel], log: Log) -> l.Program:
        return into_parts(program, log, 3, gained, lean=lean)

    def price(steps: Sequence[Any]) -> float:
        """Hundred for a product, a little else where it makes parts of a weight."""
        products = [s for s in steps if s.name in "yz"]
        return sum(100 + slower * any(b.name in ("w0", "w1") for b in s.reads) for s in products)

    log = Log()
    found = lean_parts(program, log, make, price, worth=1 << 20)
    told = [e for e in log.events if e.rule == "lean"]
    stored = {b.name for s in found.steps for b in s.writes}
    if slower > 6:  # 3 % of the time of both
        assert found == make((), Log()) and not told and {"w0_1", "w1_1"} <= stored
        return
    assert stored == {"x_1", "x_2", "x_3", "y", "y_1", "y_2", "y_3", "z"}
    assert [e.subject for e in told] == ["y", "z"], "equal layers are treated alike"
    assert all(e.fired and "MB less of" in e.reason for e in told)
    assert lean_parts(program, Log(), make, price) == make((), Log())


def test_where_nothing_is_saved_nothing_is_asked() -> None:
    program = parse(LAYERS)
    asked: list[Collection[l.Kernel]] = []

    def make(lean: Collection[l.Kernel], log: Log) -> l.Program:
        asked.append(lean)
        return program

    assert lean_parts(program, Log(), make, lambda steps: 1.0, worth=1) == program
    assert not any(asked)
