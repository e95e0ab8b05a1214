"""What is proved of indices is true, and what kernels need is proved."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.ir.address import evaluate
from terrazzo.ir.expr import IntExpr, Var
from terrazzo.ir.proof import holds

A, B = Var("a", 4096), Var("b", 7)
LARGE = Var("c", 1 << 40)


@pytest.mark.parametrize(
    ("e", "guards"),
    [
        (383 - (A + B * 904) // 197 * 12 - LARGE % 12, [6303 - A - B * 904]),  # 6303 // 197 * 12 + 11 is 383
        ((LARGE // 262144) % 24 - 16, [(LARGE // 16384) % 384 - 256]),  # a digit of a digit
        (LARGE // 8 - 4, [LARGE - 32]),
        ((LARGE - 100) // 8 + 12, [LARGE - 5]),
    ],
)
def test_what_kernels_need_is_proved(e: IntExpr, guards: list[IntExpr]) -> None:
    assert holds(e, guards) and not holds(e)


@pytest.mark.parametrize(
    ("e", "guards"),
    [
        (382 - (A + B * 904) // 197 * 12 - LARGE % 12, [6303 - A - B * 904]),
        ((LARGE // 262144) % 24 - 17, [(LARGE // 16384) % 384 - 256]),
        ((LARGE // 262144) % 48 - 16, [(LARGE // 16384) % 384 - 256]),  # not of that digit alone
        (LARGE // 8 - 4, [LARGE - 31]),
    ],
)
def test_what_is_not_so_is_not(e: IntExpr, guards: list[IntExpr]) -> None:
    assert not holds(e, guards)


X, Y = Var("x", 40), Var("y", 5)
NUMBERS = st.integers(1, 9)


@st.composite
def expressions(draw: Any) -> IntExpr:
    """Sums of digits of two axes."""
    total: IntExpr = draw(st.integers(-30, 30))
    for _ in range(draw(st.integers(1, 3))):
        inner = X * draw(NUMBERS) + Y * draw(NUMBERS) if draw(st.booleans()) else X
        digit = inner // draw(NUMBERS)
        digit = digit % draw(NUMBERS) if draw(st.booleans()) else digit
        total = total + digit * draw(st.integers(-4, 4))
    return total


@given(expressions(), st.lists(expressions(), max_size=2))
@settings(max_examples=400, deadline=None)
def test_what_is_proved_is_so(e: IntExpr, guards: list[IntExpr]) -> None:
    if holds(e, guards):
        for x, y in itertools.product(range(40), range(5)):
            env = {X: x, Y: y}
            assert evaluate(e, env) >= 0 or any(evaluate(g, env) < 0 for g in guards)
