"""Rows that are few and long: blocks share each of them where the blocks of whole rows would take longer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from terrazzo.front.capture import capture
from terrazzo.interp import kernel as simulator
from terrazzo.interp.torch import to_numpy
from terrazzo.ir.dialects import kernel as k
from terrazzo.options import Options
from terrazzo.pipelines import stages
from terrazzo.rewrite.rule import Log


def rejected(p: torch.Tensor, q: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What speculative sampling draws from where a token is rejected: three reductions of a row, one after the other,
    of numbers that no thread keeps.
    """
    left = (p.softmax(-1) - q.softmax(-1)).relu()
    left = left / left.sum(-1, keepdim=True).clamp_min(1e-9)
    return (left.log() + noise).argmax(-1), left


def lowered(*args: torch.Tensor) -> k.Program:
    program = capture(rejected, args, {}).program
    found: Any = stages(program, Options(target="sm_90a", libraries="never"), Log())[-1][1]
    return found  # type: ignore[no-any-return]


def test_what_rows_are_read_for_again_counts() -> None:
    """32 blocks of whole rows took some 300 us (H200): threads keep no numbers of a row, so each walk reads them again
    and computes two exponentials and three quotients of each.
    """
    program = lowered(*(torch.empty(32, 32000, device="meta") for _ in range(3)))
    (stored,) = (x for x in program.steps if isinstance(x, k.Kernel) and program.results[1] in x.writes)
    assert stored.grid >= 132


def test_pieces_of_rows_that_wait_for_each_other_are_right() -> None:
    torch.manual_seed(0)
    args = [torch.randn(3, 32000) * 2 for _ in range(3)]
    program = lowered(*args)
    assert len(program.steps) > 4
    given = {b.name: to_numpy(a) for b, a in zip(program.inputs, args, strict=True)}
    drawn, left = simulator.run(program, given)
    exact = rejected(*(a.double() for a in args))
    np.testing.assert_array_equal(np.asarray(drawn), exact[0].numpy())
    np.testing.assert_allclose(np.asarray(left), exact[1].numpy(), rtol=1e-4, atol=1e-9)
