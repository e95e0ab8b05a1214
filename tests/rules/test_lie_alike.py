"""Reductions of images that lie in different orders: a tensor that is read along rows and columns is one image."""

from __future__ import annotations

from typing import Any

from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop_to_tile.reductions.mixed import lie_alike

BOTH = """@loop
def f(x: f32[8, 1024, 1024]):
    with kernel('z', z=f32[8, 1024]):
        for a0 in free(8):
            for a1 in free(1024):
                for r0 in reduce(1024):
                    in0 = x[a0, a1, r0]
                    in1 = x[a0, r0, a1]
                    v0 = sub(in0, in1)
                    acc0 <- sum(v0)
                z[a0, a1] = acc0
    return (z,)
"""


def test_rows_and_columns_of_one_tensor_are_not_copied() -> None:
    """Gradients of differences of all pairs: a copy would lie as the tensor does, and be copied again without end."""
    program: Any = parse(BOTH)
    (kernel,) = program.steps
    assert lie_alike(kernel) == (kernel,)
    assert lowering(program, Options(target="sm_90a")).at("kernel").steps


def test_what_lies_otherwise_is() -> None:
    given = "f32[8, 1024, 1024], y: f32[8, 1024, 1024] @ (1048576, 1, 1024))"
    text = BOTH.replace("f32[8, 1024, 1024])", given, 1).replace("x[a0, r0, a1]", "y[a0, a1, r0]")
    program: Any = parse(text)
    copy, rest = lie_alike(program.steps[0])
    assert [b.name for b in copy.reads] == ["x"] and "x" not in [b.name for b in rest.reads]
