"""Integers that threads carry, and loops with computed numbers of steps: text, meaning, checks, CUDA."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from terrazzo.errors import CompilerBug, UserError
from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.text import parse, show
from terrazzo.targets.cuda.check import check, report
from terrazzo.targets.cuda.emit import emit
from terrazzo.targets.cuda.predict import predict


def program(*lines: str, warps: int = 2) -> k.Program:
    """Two blocks of some warps that write y, 8 elements for each thread, in `lines`."""
    body = "".join(f"        {line}\n" for line in lines)
    return parse(  # type: ignore[no-any-return]
        f"""@kernel
def forward(x: f32[8]):
    with launch('f', _grid=2, _warps={warps}, _resident=1, _reads=[x], y=f32[2, {warps}, 32, 8]):
        for z in serial(8):
            y[block, warp, lane, z] = f32(0.0)
{body}    return (y,)
"""
    )


def run(*lines: str, seed: int | None = None) -> Any:
    text = show(program(*lines))
    assert show(parse(text)) == text and parse(text) == program(*lines)
    return simulator.run(program(*lines), {"x": np.arange(8, dtype=np.float32)}, seed=seed)[0]


@pytest.mark.parametrize("seed", [None, 0])
def test_steps_may_depend_on_the_block_the_warp_and_the_lane(seed: int | None) -> None:
    steps = "block * 4 + warp * 2 + lane % 2"
    found = run(f"for t in serial({steps}):", "    y[block, warp, lane, t] = x[t]", seed=seed)
    block, warp, lane, t = np.meshgrid(*map(np.arange, (2, 2, 32, 8)), indexing="ij")
    assert np.array_equal(found, np.where(t < block * 4 + warp * 2 + lane % 2, t, 0))


@pytest.mark.parametrize("seed", [None, 0])
def test_an_integer_is_each_threads_own(seed: int | None) -> None:
    found = run(
        "n = integer(block, 8)",
        "for t in serial(3):",
        "    if lane >= 16:",
        "        n = n + 2",
        "    y[block, warp, lane, n] = x[n]",
        seed=seed,
    )
    for block in range(2):
        for lane, last in ((3, block), (20, block + 6)):
            written = {block} if lane == 3 else {block + 2, block + 4, block + 6}
            assert {*np.nonzero(found[block, 1, lane])[0]} == written - {0} and last < 8


def test_steps_are_those_before_the_first() -> None:
    lines = ("n = integer(3, 8)", "for t in serial(n):", "    n = n + 1", "    y[block, warp, lane, n] = x[n]")
    assert np.array_equal(np.nonzero(run(*lines)[0, 0, 0])[0], [4, 5, 6])
    assert "for (int t_ = 0, t_end_ = n_; t_ < t_end_; t_++) {" in emit(program(*lines).steps[0])[1]


def test_an_integer_that_leaves_its_range_is_a_bug() -> None:
    lines = ("n = integer(5, 8)", "for t in serial(4):", "    n = n + 1")
    assert not report(program(*lines).steps[0], gpu("sm_90a")).problems
    with pytest.raises(CompilerBug, match=r"SetInteger makes n 8, which is outside \[0, 8\): line 5 .*`n = n \+ 1`"):
        run(*lines)
    with pytest.raises(CompilerBug, match=r"`n = integer\(block \+ 8, 9\)` is outside \[0, 9\), at block 1"):
        check(program("n = integer(block + 8, 9)"), gpu("sm_90a"))


@pytest.mark.parametrize(
    ("lines", "proved"),
    [
        (["n = integer(0, 8)", "n = (n + 3) % 8", "y[block, warp, lane, n] = x[n]"], True),
        (["n = integer(0, 9)", "if n < 8:", "    y[block, warp, lane, n] = x[n]"], True),
        (["n = integer(0, 9)", "if n < 8:", "    n = (n + 1) % 9", "    y[block, warp, lane, n] = x[n]"], False),
        (["n = integer(0, 9)", "for t in serial(n):", "    y[block, warp, lane, t] = x[t]"], True),
        (["n = integer(0, 10)", "for t in serial(n):", "    y[block, warp, lane, t] = x[t]"], False),
        (["n = integer(0, 9)", "y[block, warp, lane, n] = x[n]"], False),
        (["for t in serial(block * 7 + 1):", "    y[block, warp, lane, t] = x[t]"], True),
    ],
)
def test_what_is_proved_of_integers_holds(lines: list[str], proved: bool) -> None:
    """An integer may be anything in its range, and a condition says nothing once it has changed."""
    found = report(program(*lines).steps[0], gpu("sm_90a"))
    assert found.problems == () and (found.proved == found.accesses) == proved


def test_a_thread_that_goes_wrong_in_a_computed_loop_is_found() -> None:
    with pytest.raises(CompilerBug, match=r"is outside \[0, 8\) in dimension 3 of y, at block 1, t 8"):
        check(program("for t in serial(block * 8 + 1):", "    y[block, warp, lane, t] = f32(1.0)"), gpu("sm_90a"))


def test_a_barrier_in_a_loop_of_some_warps_is_found() -> None:
    with pytest.raises(CompilerBug, match="is reached by only some threads of a block"):
        check(program("for t in serial(warp + 1):", "    sync()"), gpu("sm_90a"))
    with pytest.raises(CompilerBug, match="waits for ever at line 4"):
        run("for t in serial(warp + 1):", "    sync()")
    check(program("for t in serial(block + 1):", "    sync()"), gpu("sm_90a"))
    run("for t in serial(block + 1):", "    sync()")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["for t in unrolled(block + 1):", "    sync()"], "an unrolled loop has a constant number of steps"),
        (["for t in serial(-1):", "    sync()"], "expected a number that is not negative"),
        (["for t in serial(n):", "    sync()"], "n is not defined here"),
        (["n = integer(0, block)"], "expected a constant"),
        (["n = integer(0, 4)", "n = integer(0, 4)"], "n is defined twice"),
        (["n = integer(0, 4)", "n = f32(1.0)"], "expected an index expression"),
        (
            ["n = integer(0, 4)", "a = registers(f32[4], f32(0.0))", "a[n] = f32(1.0)"],
            "number of a thread or an integer",
        ),
        (["if block == 0:", "    n = integer(0, 4)", "y[block, warp, lane, n] = f32(1.0)"], "n is not defined here"),
    ],
)  # fmt: skip
def test_what_cannot_be(lines: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        program(*lines)


def test_costs_of_computed_loops_are_those_of_the_simulator() -> None:
    from terrazzo.interp.costs import Costs

    mine = program("for t in serial(block * 3 + 2):", "    y[block, warp, lane, t] = x[t]")
    counted = Costs()
    simulator.run(mine, {"x": np.zeros(8, np.float32)}, costs=counted)
    found = predict(mine.steps[0])
    assert not found.unknown and found.costs.accesses == counted.accesses and found.costs.issues == counted.issues
    carried = program("n = integer(0, 8)", "for t in serial(n):", "    y[block, warp, lane, t] = x[t]")
    assert predict(carried.steps[0]).unknown
