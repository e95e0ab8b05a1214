"""Random programs keep their meaning and their text through every pass."""

from __future__ import annotations

import zlib

from hypothesis import HealthCheck, example, given, settings
from tests.fuzz.judge import Judge
from tests.fuzz.programs import tensor_programs
from tests.harness import assert_round_trip, random_inputs, run

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.program import Program
from terrazzo.ir.text import parse, show
from terrazzo.ir.verify import verify
from terrazzo.rewrite.rule import Choice, Log, cheapest
from terrazzo.rules.loop.cost import Rates
from terrazzo.rules.loop.fusion.fuse import fuse
from terrazzo.rules.loop.layout.layout import store_as_read
from terrazzo.rules.loop.precision.relax import relax
from terrazzo.rules.tensor_to_loop.lift import lift


def coin(choice: Choice) -> str:
    """A policy without a system, the same in every run."""
    return sorted(choice.options)[zlib.crc32(choice.subject.encode()) % 2]


slow = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def assert_right(judge: Judge, after: l.Program) -> None:
    problem = judge.problem(run(after, random_inputs(after.inputs)))
    assert not problem, f"{problem}\n{show(after)}"


@slow
@given(tensor_programs(opaque=False))
def test_lifting(program: Program) -> None:
    verify(program)
    assert_round_trip(program)
    lifted = lift(program)
    verify(lifted, "tensor_to_loop")
    assert_round_trip(lifted)
    assert_right(Judge(program, random_inputs(program.inputs)), lifted)


RESHAPED = """@tensor
def f(x: f32[3, 2], y: f32[1, 2]):
    a: f32[1, 2] = exp(y)
    b: f32[3, 2] = index_map(lambda i0, i1: a[0, i1])
    t: f32[3, 2] = mul(x, b)
    z: f32[2, 3] = index_map(lambda i0, i1: t[(i0 * 3 + i1) // 2, (i0 * 3 + i1) % 2])
    return (t, z)
"""


@slow
@given(tensor_programs(opaque=False))
@example(parse(RESHAPED))
def test_fusion(program: Program) -> None:
    """Whatever a policy decides, even the worst, is the same program."""
    lifted, judge = lift(program), Judge(program, random_inputs(program.inputs))
    for decide in (cheapest, lambda choice: max(choice.options, key=choice.cost.__getitem__), coin):
        fused = fuse(lifted, Log(), Rates(), decide=decide)
        verify(fused, "fuse")
        assert_round_trip(fused)
        assert_right(judge, fused)
        merged = store_as_read(fused, Log())
        verify(merged, "store_as_read")
        assert_round_trip(merged)
        assert_right(judge, merged)
        assert_right(judge, relax(merged, Log()))
    everything = fuse(lifted, Log(), Rates(), materialize=[s.name for s in lifted.steps])
    assert set(everything.steps) == set(lifted.steps)
