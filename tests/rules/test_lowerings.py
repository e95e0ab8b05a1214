"""Every lowering of an ATen op has an example, makes of it what is written there, and means what PyTorch computes."""

from __future__ import annotations

import pytest
from tests.harness import assert_round_trip, random_inputs
from tests.rules.lowerings import TOPICS, examples, lowered

from terrazzo.check.judge import difference
from terrazzo.interp import tensor as interpreter
from terrazzo.interp import torch as aten
from terrazzo.ir.text import show
from terrazzo.ir.verify import verify

EXAMPLES = examples()


@pytest.mark.parametrize("name", TOPICS)
def test_lowering(name: str) -> None:
    assert name in EXAMPLES, f"{name} has no example: `python -m tests.rules.lowerings` finds one"
    before, after = EXAMPLES[name]
    program, found, rules = lowered(before)
    assert name in rules, f"{name} does not fire in its example"
    assert show(found) == after, "`python -m tests.rules.lowerings` writes examples anew"
    verify(found, name)
    assert_round_trip(program)
    assert_round_trip(found)
    for seed in range(3):
        inputs = random_inputs(program.inputs, seed)
        tensors = {n: aten.from_numpy(x) for n, x in inputs.items()}
        truth = [[aten.to_numpy(x) for x in aten.run(program, tensors, precise=precise)] for precise in (False, True)]
        ours = [interpreter.run(found, inputs, precise=precise, call=aten.call_numpy) for precise in (False, True)]
        for r, old, exact, new, again in zip(found.results, *truth, *ours, strict=True):
            assert difference(r.type.dtype, old, new, exact, again) == "", name


def test_no_example_is_left_over() -> None:
    assert EXAMPLES.keys() <= TOPICS.keys()
