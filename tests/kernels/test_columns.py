"""Reductions along memory's outer axes: neighbouring columns side by side in a thread's registers, loaded at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.test_schedules import pinned, statements

from terrazzo.ir.dialects import kernel as k


def x(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(shape).to(dtype)


def wide(found: Any) -> set[tuple[str, int]]:
    """The vectors that move, by the place they are read or written at first."""
    return {
        (b.name, s.count) for s in statements(found, k.Move) for b in (s.target, s.source) if b.name in ("x", "var")
    }


VAR = """\
with schedule("var", target="sm_90a"):
    a0 = grid({blocks}) * lane({lanes}) * reg({width})
    with site("acc0"):
        r0 = time({steps}) * reg(4) * warp(8) * lane({rest})
    with site("acc1"):
        r1 = time({steps}) * reg(4) * warp(8) * lane({rest})
"""


@pytest.mark.parametrize("rows, columns, lanes, steps", [(128, 256, 16, 2), (100, 256, 16, 2), (33, 520, 32, 2)])
def test_columns_stand_side_by_side_in_registers(rows: int, columns: int, lanes: int, steps: int) -> None:
    text = VAR.format(blocks=-(-columns // (8 * lanes)), lanes=lanes, width=8, steps=steps, rest=32 // lanes)
    found = pinned(lambda x: x.var(0), (x(rows, columns),), text)
    assert wide(found) == {("x", 8), ("var", 8)}


def test_only_the_last_steps_test_where_rows_end() -> None:
    text = VAR.format(blocks=2, lanes=16, width=8, steps=2, rest=2)
    found = pinned(lambda x: x.var(0), (x(100, 256),), text)
    (kernel,) = found.kernels
    first = next(s for s in k.walk(kernel.body) if isinstance(s, k.For) and not s.unrolled)
    assert not any(isinstance(s, k.If) for s in k.walk(first.body))


def test_columns_in_float32_are_four_at_once() -> None:
    text = VAR.format(blocks=2, lanes=16, width=4, steps=2, rest=2)
    found = pinned(lambda x: x.var(0), (x(100, 128, dtype=torch.float32),), text)
    assert wide(found) == {("x", 4), ("var", 4)}


def test_what_is_stored_of_a_column_is_loaded_side_by_side() -> None:
    """Normalised columns, stored as rows: what is loaded is wide, and every column goes on with its own sum."""
    text = """\
with schedule("div", target="sm_90a"):
    a0 = grid(2) * lane(16) * reg(4)
    with site("acc0"):
        r0 = time(3) * warp(8) * lane(2)
    with site("div"):
        a1 = time(3) * warp(8) * lane(2)
"""
    found = pinned(lambda x: x.t() / x.sum(0)[:, None], (x(40, 128, dtype=torch.float32),), text)
    assert wide(found) == {("x", 4)}
