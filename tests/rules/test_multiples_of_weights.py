"""What is a multiple of a softmax's weights, in long programs."""

from __future__ import annotations

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Var
from terrazzo.ir.types import Type, f32
from terrazzo.rules.loop.attention.rounding import Rounding


def test_multiples_are_found_over_thousands_of_kernels() -> None:
    """Each reads the one before it twice: a walk from the last one would be too deep, and visit 2 ** 3000 terms."""
    axis = Var("a0", 4)
    weights, other = (l.Buffer(name, Type(f32, (4,))) for name in ("weights", "other"))
    last: dict[l.Buffer, l.Buffer] = {weights: weights, other: other}
    steps = []
    for k in range(3000):
        for first in (weights, other):
            load = l.Load(last[first], (axis,))
            made = l.Buffer(f"{first.name}_{k}", Type(f32, (4,)))
            steps.append(l.Kernel(made.name, (axis,), (l.Store(made, (axis,), l.apply("add", load, load)),)))
            last[first] = made
    work = Rounding(l.Program("forward", (weights, other), tuple(steps), tuple(last.values())), "gradients")
    work.weights = {weights}
    found = work.multiples()
    assert last[weights] in found and last[other] not in found and len(found) == 3001
