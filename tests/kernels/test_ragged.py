"""Rows that begin and end anywhere: whole vectors from where memory is aligned on, and the rest element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import Lowered, lowered
from tests.kernels.test_schedules import pinned, statements

from terrazzo.errors import UserError
from terrazzo.hw.gpu import gpu
from terrazzo.interp import loop
from terrazzo.ir.address import divides
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.expr import Var, mod
from terrazzo.ir.parse_plan import parse_plan
from terrazzo.ir.text import parse
from terrazzo.rules.loop_to_tile.reductions import reductions
from terrazzo.rules.tile.verify import verify


def x(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(shape).to(dtype)


def widths(found: Lowered) -> set[int]:
    return {s.count for s in statements(found, k.Move)}


def right(found: Lowered) -> None:
    """The simulator finds nothing wrong, and the kernels give what the loops do."""
    for a, b in zip(found.simulated(), loop.run(found.lowering.at("loop"), found.inputs), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= 2.0**-7 * np.abs(b).max()


@pytest.mark.parametrize("length", (4097, 4103, 12345))
@pytest.mark.parametrize(
    "fn",
    (
        lambda x: torch.softmax(x, -1), lambda x: x.sum(-1),
        lambda x: F.layer_norm(x, x.shape[-1:]), lambda x: x.argmax(-1),
    ),
    ids=("softmax", "sum", "layer_norm", "argmax"),
)  # fmt: skip
def test_rows_are_loaded_in_vectors(fn: Callable[..., Any], length: int) -> None:
    found = lowered(fn, (x(3, length),), "sm_90a")
    assert widths(found) == {8}
    right(found)


def test_vectors_are_words_where_a_weight_begins_elsewhere() -> None:
    """In loads of single elements lanes are as far apart as vectors are long: 16 bytes would be four lines."""
    found = lowered(lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), (x(3, 4097), x(4097), x(4097)), "sm_90a")
    assert widths(found) == {2}
    right(found)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_points_of_any_number_are_stored_in_vectors(dtype: torch.dtype) -> None:
    count = 1_100_003
    found = lowered(lambda x, y: x * y + 1, (x(count, dtype=dtype), x(count, dtype=dtype)), "sm_90a")
    assert widths(found) == {4}
    right(found)


def test_what_begins_elsewhere_is_loaded_element_by_element() -> None:
    found = lowered(lambda x: x[1:] - x[:-1], (x(1_100_003),), "sm_90a")
    moves = {(s.target.name, s.source.name[:1]) for s in statements(found, k.Move)}
    assert ("sub", "o") in moves and len(moves) == 2
    right(found)


def test_short_rows_are_taken_as_they_are() -> None:
    assert not statements(lowered(lambda x: torch.softmax(x, -1), (x(3, 513),), "sm_90a"), k.Move)


SUM = """\
with schedule("sum_1", target="sm_90a"):
    a0 = grid(3)
    with site("acc0"):
        r0 = reg(3) * warp(2) * lane(32) * reg(8, aligned=True)
"""


def test_a_user_may_say_so() -> None:
    found = pinned(lambda x: x.sum(-1), (x(3, 1057),), SUM)
    assert "align(vectors=(r0(8),))" in str(found.lowering.at("tile").plans[0][1])
    assert widths(found) == {8}


def test_sums_of_few_elements_beside_such_vectors_are_summed_once() -> None:
    """Both axes are called r0, and only the long one has vectors: of the short one a lane takes an element."""
    fn = lambda a, b, c, d: (a * b).sum(-1) + (c * d).sum(-1)  # noqa: E731
    text = SUM.replace("sum_1", "add").replace("acc0", "acc1")
    text += '    with site("acc0"):\n        r0 = reg(1) * warp(2) * lane(32)\n'
    pinned(fn, (x(3), x(3, 3), x(1057), x(3, 1057)), text)


def test_it_is_said_of_vectors() -> None:
    text = SUM.replace("reg(3) *", "reg(3, aligned=True) *").replace("reg(8, aligned=True)", "reg(8)")
    with pytest.raises(UserError, match="aligned=True is said of what a thread takes at once, the last reg"):
        pinned(lambda x: x.sum(-1), (x(3, 1057),), text)


def test_it_is_said_of_axes_without_loops_inside() -> None:
    text = 'with schedule("sum_1", target="sm_90a"):\n    a0 = grid(2) * lane(32) * reg(2, aligned=True)\n'
    with pytest.raises(UserError, match="a0: aligned=True is said of an axis that has no loops inside"):
        pinned(lambda x: x.sum(-1), (x(99, 65),), text)


def test_plans_are_held_to_it() -> None:
    tiled = pinned(lambda x: x.sum(-1), (x(3, 1057),), SUM).lowering.at("tile")
    ((number, plan),), ((_, schedule),) = tiled.plans, tiled.schedules
    for old, new, why in (
        ("r0(8)", "r0(4)", r"by the schedule these are r0\(8\)"),
        ("    align(vectors=(r0(8),))\n", "", "a line `align` is missing"),
    ):
        edited = parse_plan((str(plan) + "\n").replace(old, new))
        with pytest.raises(UserError, match=why):
            verify(tiled.loop.steps[number], schedule, edited, gpu("sm_90a"))


def test_remainders_are_seen_to_be_left() -> None:
    a, v, w = Var("a", 512), Var("v", 99), Var("w", 4)
    assert divides(8, a * 50257 + v * 8 + mod(a * 7, 8)) and not divides(8, a * 50257 + v * 8 - mod(a * 7, 8))
    assert divides(4, (a * 4 + w) * 51 + mod((a * 4 + w) * 1, 4))
    assert not divides(8, mod(a, 4) + a * 7)


SOFTMAX = """
@loop
def f(x: bf16[ROWS, LENGTH]):
    with kernel('y', y=bf16[ROWS, LENGTH]):
        for a0 in free(ROWS):
            for r0 in reduce(LENGTH):
                in0 = x[a0, r0]
                v0 = f32(in0)
                acc0 <- max(v0)
            for r1 in reduce(LENGTH):
                in1 = x[a0, r1]
                v1 = f32(in1)
                v2 = sub(v1, acc0)
                v3 = exp(v2)
                acc1 <- sum(v3)
            for a1 in free(LENGTH):
                in2 = x[a0, a1]
                v4 = f32(in2)
                v5 = sub(v4, acc0)
                v6 = exp(v5)
                v7 = div(v6, acc1)
                v8 = bf16(v7)
                y[a0, a1] = v8
    return (y,)
"""


@pytest.mark.parametrize(
    ("rows", "length", "row"),
    [
        (4096, 50257, "time(7) * reg(2) * warp(16) * lane(32) * reg(8, aligned=True)"),  # measured: 328 us and 398
        (512, 50257, "time(7) * reg(2) * warp(16) * lane(32) * reg(8, aligned=True)"),  # 60 us, and 70 (H100)
        (128, 50257, "reg(7) * warp(32) * lane(32) * reg(8, aligned=True)"),
        (4096, 25001, "reg(7) * warp(16) * lane(32) * reg(8, aligned=True)"),
        (4096, 50264, "reg(7) * warp(32) * lane(32) * reg(8)"),
    ],
)
def test_many_rows_that_fill_the_registers_are_read_again(rows: int, length: int, row: str) -> None:
    text = SOFTMAX.replace("ROWS", str(rows)).replace("LENGTH", str(length))
    (kernel,) = parse(text).steps
    found = str(reductions.reduction(kernel, gpu("sm_90a")))
    assert f"r0 = {row}\n" in found and ("x = reg()" in found) == ("time" not in row)


def test_rows_are_read_again_in_loops_of_vectors() -> None:
    row = "time(2) * reg(2) * warp(2) * lane(32) * reg(8, aligned=True)"
    text = f"""with schedule("_softmax", target="sm_90a"):
    a0 = grid(3)
    with site("acc0"):
        r0 = {row}
    with site("acc1"):
        r1 = {row}
    with site("_softmax"):
        a1 = like("acc0.r0")
"""
    right(pinned(lambda x: torch.softmax(x, -1), (x(3, 1999),), text))
