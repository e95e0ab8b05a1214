"""What is accessed at once: one condition for all elements of a vector."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.kernels.programs import lowered

from terrazzo.interp import kernel as simulator
from terrazzo.ir.address import evaluate
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.expr import Var
from terrazzo.rules.access import together

J, N = Var("j", 8), Var("n", 9)


@pytest.mark.parametrize("e", [N * 8 + J - 32, N * 8 - J - 25, 31 - N * 8 - J, N - 3, 32 - N * 8 + J])
def test_a_condition_holds_for_a_whole_vector_or_for_nothing(e: object) -> None:
    assert together(e, J, 8)
    for n in range(9):
        held = {evaluate(e, {J: j, N: n}) >= 0 for j in range(8)}
        assert held == {evaluate(e, {J: 0, N: n}) >= 0}


@pytest.mark.parametrize("e", [N * 8 + J - 33, N * 8 - J, N * 8 + J * 2, N * 4 + J, 30 - N * 8 - J])
def test_other_conditions_are_asked_for_each_element(e: object) -> None:
    assert not together(e, J, 8)


def test_halves_of_a_row_come_in_vectors() -> None:
    """Both halves: that before the middle, and that behind it."""

    def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        one, other = x.chunk(2, -1)
        return x * cos + torch.cat((-other, one), -1) * sin

    args = tuple(torch.randn(s, 64).to(torch.bfloat16) for s in (16384, 1, 1))
    done = lowered(turned, args, "sm_90a")
    (kernel,) = done.kernels
    moves = [s for s in k.walk(kernel.body) if isinstance(s, k.Move) and s.source in kernel.reads]
    assert len(moves) == 5 and {s.count for s in moves} == {moves[0].count} and moves[0].count > 1
    (ours,) = simulator.run(done.program, done.inputs)
    right = turned(*(a.double() for a in args)).numpy()
    assert np.abs(ours.astype(np.float64) - right).max() <= 2**-6 * np.abs(right).max()
