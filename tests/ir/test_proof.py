"""What is proved of indices is true, and what kernels need is proved."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.ir import proof
from terrazzo.ir.address import evaluate
from terrazzo.ir.expr import IntExpr, Var
from terrazzo.ir.proof import holds

A, B = Var("a", 4096), Var("b", 7)
LARGE = Var("c", 1 << 40)
R, S = Var("r", 3), Var("s", 3)  # a window, in rows of 14 pixels
X, Y = Var("x", 40), Var("y", 5)


def pixels(tokens: int, parts: tuple[IntExpr, IntExpr]) -> list[tuple[IntExpr, list[IntExpr]]]:
    """Parts of the first and last token that a window reads around one of 14 x 14 pixels, which follow one token."""
    token = Var("d", tokens)
    y, x = R + (token - 1) // 14, S + (token - 1) % 14
    guards = [y - 1, 14 - y, x - 1, 14 - x, token - 1]
    return [(parts[0] + token, guards), (parts[1] - token, guards)]


def images(parts: tuple[IntExpr, IntExpr]) -> list[tuple[IntExpr, list[IntExpr]]]:
    """Parts of the first and last pixel that a window reads of images of 7 x 7, of 16 channels that come last."""
    y, x = R + (LARGE // 112) % 7, S + (LARGE // 16) % 7
    guards = [y - 1, 7 - y, x - 1, 7 - x]
    return [(parts[0] + (LARGE // 16) % 49, guards), (parts[1] - (LARGE // 16) % 49, guards)]


def tree(least: int, most: int) -> list[tuple[IntExpr, list[IntExpr]]]:
    """The first and last place of a scan that is taken in pairs, and pairs of these: steps of 512, and their halves."""
    step, odd, half = (LARGE // 24576) % 512, (LARGE // 24576) % 2, (LARGE // 49152) % 256
    pair = (half + odd - 1) % 2
    later = ((odd * 2 + step - 2) // 4 + pair - 1) % 2
    place = (pair * 4 + odd * 2 + step - 6) // 8 + later
    guards = [-1 * later, pair - 1, half + odd - 1, -1 * odd]
    return [(place - least, guards), (most - place, guards)]


TAPS, HIGH, WIDE = Var("taps", 152), Var("high", 112), Var("wide", 112)
STEM = [f for v in ((TAPS // 7) % 7 + HIGH * 2, TAPS % 7 + WIDE * 2) for f in (v - 3, 226 - v)]


@pytest.mark.parametrize(
    ("e", "guards"),
    [
        (383 - (A + B * 904) // 197 * 12 - LARGE % 12, [6303 - A - B * 904]),  # 6303 // 197 * 12 + 11 is 383
        ((LARGE // 262144) % 24 - 16, [(LARGE // 16384) % 384 - 256]),  # a digit of a digit
        ((LARGE // 262144) % 48 - 16, [(LARGE // 16384) % 384 - 256]),  # one that has it and the next
        (LARGE // 200704 - 1, [(LARGE // 200704) % 8 - 1]),  # a frame before, in a clip of eight
        (LARGE // 384 - 14, [(LARGE // 5376) % 14 - 1]),  # pixels of the row above, in rows of 14
        (LARGE - 5376, [(LARGE // 5376) % 14 - 1]),
        (LARGE // 8 - 4, [LARGE - 32]),
        ((LARGE - 100) // 8 + 12, [LARGE - 5]),
        ((A * 6 + B - 6) // 24576 + LARGE, [B - 6]),  # a numerator that is less than 0 without its guard
        ((LARGE // 6272) * 64 + (LARGE // 49) % 64 - 64, [LARGE // 6272 - 1]),  # a quotient that its guard names
        (((LARGE // 330) * 100 + LARGE % 100) // 48 - 100, [LARGE // 330 - 48]),  # and within a quotient
        *pixels(197, (R * 14 + S - 15, 211 - R * 14 - S)),
        *pixels(1 << 20, (R * 14 + S - 15, 211 - R * 14 - S)),
        *images((R * 7 + S - 8, 56 - R * 7 - S)),
        *tree(0, 63),
        (X // 4 - Y + (X % 4) * 5, [X - 4 * Y]),  # few points: all are tried
        (2 - TAPS // 49, [146 - TAPS, *STEM]),  # the channel of a tap of 3 x 7 x 7, of which there are 152 with padding
    ],
)
def test_what_kernels_need_is_proved(e: IntExpr, guards: list[IntExpr]) -> None:
    assert holds(e, guards) and not holds(e)


@pytest.mark.parametrize(
    ("e", "guards"),
    [
        (382 - (A + B * 904) // 197 * 12 - LARGE % 12, [6303 - A - B * 904]),
        ((LARGE // 262144) % 24 - 17, [(LARGE // 16384) % 384 - 256]),
        ((LARGE // 262144) % 48 - 17, [(LARGE // 16384) % 384 - 256]),
        ((LARGE // 262144) % 36 - 16, [(LARGE // 16384) % 384 - 256]),  # not of that digit alone
        (LARGE // 200704 - 2, [(LARGE // 200704) % 8 - 1]),
        (LARGE // 384 - 15, [(LARGE // 5376) % 14 - 1]),
        (LARGE - 5377, [(LARGE // 5376) % 14 - 1]),
        (LARGE // 8 - 4, [LARGE - 31]),
        ((A * 6 + B - 6) // 24570 + LARGE, [B - 5]),
        ((LARGE // 6272) * 64 + (LARGE // 49) % 64 - 65, [LARGE // 6272 - 1]),
        *pixels(197, (R * 14 + S - 17, 209 - R * 14 - S)),
        *pixels(1 << 20, (R * 14 + S - 17, 209 - R * 14 - S)),
        *images((R * 7 + S - 9, 55 - R * 7 - S)),
        *tree(1, 62),
    ],
)
def test_what_is_not_so_is_not(e: IntExpr, guards: list[IntExpr]) -> None:
    assert not holds(e, guards)


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


def test_an_expression_is_proved_to_be_sound_once(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[object] = []
    inner = proof.topological
    monkeypatch.setattr(proof, "topological", lambda roots: walked.append(roots) or inner(roots))
    a = Var("once", 977)
    for _ in range(3):
        assert proof.ill((a * 3 + 1, 5, a * 3 + 1)) == ""
    assert len(walked) == 1


def test_what_an_index_mentions_is_found_once_for_each_of_its_parts() -> None:
    """A path that is followed back reads each step at what the one after it said: both are in the index twice."""
    from terrazzo.ir.address import mentions

    e: Any = A
    for _ in range(200):
        e = (e + 1) // 2 + (e + 1) % 2
    assert mentions(e, A) and not mentions(e, B)


def test_guards_together_lower_the_range_of_a_quotient() -> None:
    """Windows of 3 x 3 in rows of 288: by ranges the quotient is 6 at most, by both guards 5."""
    c, up, left = Var("c", 192), Var("up", 4), Var("left", 4)
    q = (c * 9 + up * 3 + left) // 288
    assert holds(5 - q, [2 - up, 2 - left])
    assert not holds(5 - q, [2 - up])
    assert not holds(4 - q, [2 - up, 2 - left])


def test_a_guard_over_pieces_bounds_a_quotient_in_each_of_them() -> None:
    """Pieces of 1144 of 12544 numbers, eight to a row of which there are 1568, each for 12 heads."""
    r, head, s = Var("r", 1144), Var("h", 12), Var("s", 11)
    place = r // 8 * 12 + head + s * 1716
    inside = [12543 - r - s * 1144]
    assert holds(18815 - place, inside) and not holds(18815 - place)
    assert not holds(18814 - place, inside)
    odd = r // 8 * 12 + head + s * 1715
    assert not holds(18804 - odd, [12543 - r - s * 1143])


def test_a_guard_on_a_quotient_bounds_finer_ones() -> None:
    """Heads of 8 in images of 16, of which three are stacked: the first of these has rows 0 to 127."""
    stacked, token = Var("stacked", 384), Var("token", 3137)
    row, first = stacked // 8 * 3137 + token, [-1 * (stacked // 128)]
    assert holds(50191 - row, first) and not holds(50191 - row)
    assert not holds(50190 - row, first)
