"""What is accessed at once: one condition for all elements of a vector."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.programs import lowered

from terrazzo.interp import kernel as simulator
from terrazzo.ir.address import evaluate
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Loaded, Var
from terrazzo.ir.types import DTYPES, Type
from terrazzo.rules.access import together
from terrazzo.rules.loop_to_tile.walked import threads

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


def test_a_step_in_memory_is_found_once_however_deep_data_says_where_rows_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """The place of a state that a chain of tables leads back to mentions all of them: only terms with the axis that is
    asked about are taken apart, and nobody who asks again waits. A page of 16 begins where its table says.
    """
    row, column, key = Var("row", 64), Var("column", 24), Var("key", 1024)
    table = l.Buffer("table", Type(DTYPES["i64"], (64, 24)))
    state: Any = l.Index(row)
    for _ in range(6):
        state = l.Load(table, (row, Loaded(state, 24)))
    wide = l.Buffer("wide", Type(DTYPES["bf16"], (64, 24)))
    deep = l.Load(wide, (Loaded(state, 64), column))
    taken: list[Any] = []
    plain = threads.substitute
    monkeypatch.setattr(threads, "substitute", lambda x, mapping: taken.append(x) or plain(x, mapping))
    assert threads.step(deep, column) == 1 and not taken
    assert threads.step(deep, row) is None and taken
    taken.clear()
    assert threads.step(deep, row) is None and not taken
    pages = l.Buffer("pages", Type(DTYPES["i64"], (64,)))
    pool = l.Buffer("pool", Type(DTYPES["bf16"], (2560, 16, 64)))
    paged = l.Load(pool, (Loaded(l.Load(pages, (key // 16,)), 2560), key % 16, column))
    assert [threads.step(paged, a) for a in (key, column, row)] == [64, 1, 0]
    turned = l.Load(wide, (63 - row, column))
    assert [threads.step(turned, a) for a in (row, column)] == [-24, 1]
    assert threads.step(l.Load(wide, ((row * column) % 64, column)), column) == 1
