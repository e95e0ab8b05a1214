"""What is free below nodes."""

from __future__ import annotations

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.expr import Loaded
from terrazzo.ir.program import Input
from terrazzo.ir.types import Type, i64


def test_lookups_nest_as_deep_as_a_loop_has_steps() -> None:
    """The way back through a Viterbi decoder looks each step up where the next one says."""
    table = Input("table", Type(i64, (3000, 4)))
    found = Input("first", Type(i64, (4,)))
    (here,) = t.coordinates((4,))
    for step in range(3000):
        found = t.IndexMap(table, (4,), (step, Loaded(t.Read(found, (here,)), 4)), ())
    assert not found.free  # the coordinates that a tensor is made with are its own
    assert Loaded(t.Read(found, (here,)), 4).free == {here}
