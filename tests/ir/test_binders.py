"""Reductions rewritten within others: nothing is captured, and labels are those of terms built from scratch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import terrazzo
from terrazzo.interp import loop as interpreter
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Var
from terrazzo.ir.node import substitute, transformed
from terrazzo.ir.text import parse, show

NESTED = """
@loop
def f(x: f32[2, 2, 4], y: f32[4]):
    with kernel('z', z=f32[1]):
        for a0 in free(1):
            for r2, r3 in reduce(2, 2):
                for r1 in reduce(4):
                    in0 = x[r2, r3, r1]
                    for r0 in reduce(4):
                        in1 = y[r0]
                        in2 = x[r2, r3, r0]
                        v0 = mul(in1, in2)
                        v1 = sub(v0, in0)
                        acc2 <- max(v1)
                    v2 = mul(acc2, in0)
                    acc1 <- sum(v2)
                acc0 <- max(acc1)
            z[a0] = acc0
    return (z,)
"""


def halves(node: Any) -> Any:
    """A reduction over 4 as one over two axes of 2, whose extents are those of the axes around it."""
    if type(node) is not l.Reduce or [a.extent for a in node.axes] != [4]:
        return node
    (axis,), args = l.open_binder(node)
    high, low = Var(l.fresh_name(), 2), Var(l.fresh_name(), 2)
    return l.Reduce.make(node.monoid, (high, low), tuple(substitute(x, {axis: high * 2 + low}) for x in args))


def test_what_grows_captures_nothing() -> None:
    program = parse(NESTED)
    (kernel,) = program.steps
    new = l.Kernel(kernel.name, kernel.axes, transformed(kernel.stores, halves), kernel.source)
    grown = l.Program(program.name, program.inputs, (new,), program.results)
    assert show(grown).count("in reduce(2, 2)") == 3
    assert parse(show(grown)) == grown  # a term built from scratch has these labels
    rng = np.random.default_rng(0)
    inputs = {b.name: rng.standard_normal(b.type.shape).astype(np.float32) for b in program.inputs}
    old, found = (interpreter.run(p, inputs)[0] for p in (program, grown))
    np.testing.assert_allclose(found, old, rtol=1e-6)


@pytest.mark.parametrize("states", [2, 4])
def test_counts_of_transitions(states: int) -> None:
    """The sums of a hidden Markov model's learning: a softmax over pairs of states, summed over sequences and steps."""

    def counts(before: torch.Tensor, moves: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
        pairs = before[..., None] + moves + behind[:, :, None]
        return pairs.flatten(2).softmax(-1).sum((0, 1))

    torch.manual_seed(0)
    shapes = ((states, 4, states), (states, states), (states, 4, states))
    args = [torch.randn(s) for s in shapes]
    found = terrazzo.compile(counts, *args, options={"target": "cpu", "strict": True})(*args)
    torch.testing.assert_close(found, counts(*args))
