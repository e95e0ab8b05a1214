"""A few mutants of every kind, in seconds. `make mutants` takes a thousand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.mutants.kernels import NAMES
from tests.mutants.operators import OPERATORS
from tests.mutants.run import GOAL, Verdict, alarms, every, in_parts, judge, report, same, sample

QUICK = (
    "sum of rows",
    "softmax",
    "linear through registers",
    "registers by hand",
    "split by hand",
    "ping_pong by hand",
)


@pytest.mark.parametrize("name", QUICK)
def test_an_original_is_right_in_every_order(name: str) -> None:
    assert alarms(name, range(2)) == (2, [])


def test_mutants_are_killed() -> None:
    chosen = sample(QUICK, 60, 0)
    verdicts = [v for x in chosen[-60:] if (v := judge(*x))]
    survived = [v for v in verdicts if v.by not in ("verifier", "check", "simulator", "result") and not v.excuse]
    assert len(survived) <= (1 - GOAL) * len(verdicts), survived


def test_what_the_time_is_over_for_is_left_out() -> None:
    assert judge("softmax", 0, until=0) is None
    assert alarms("softmax", range(2), until=0) == (0, [])


def test_parts_are_of_one_kernel_and_in_any_order() -> None:
    chosen = sample(QUICK, 200, 0)
    parted = in_parts(chosen, 0)
    assert sorted(parted) == sorted(chosen)
    assert [name for name, _ in parted[:40]] != [name for name, _ in sorted(chosen)[:40]]


def test_there_are_many_of_many_kinds() -> None:
    assert len(NAMES) >= 20 and len(OPERATORS) >= 15
    found = {m.kernel for name in QUICK for _, m in every(name)}
    assert len(found) >= 500
    assert len(found) == sum(len(every(name)) for name in QUICK)


def test_a_survivor_fails_and_so_does_a_false_alarm(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.mutants.run.EQUIVALENT", ())
    dead, alive = (
        Verdict("softmax", n, "no barrier", "line 3 `sync()`", by, "", 0.1) for n, by in enumerate(("simulator", ""))
    )
    assert report([dead], [], "") == 0
    assert report([dead, alive], [], "") == 1
    assert report([dead], ["softmax, seed 1: a race"], "") == 1
    assert "survived: softmax: no barrier: line 3" in capsys.readouterr().out


def test_what_is_beyond_rounding() -> None:
    x = np.array([1.0, -3.0, np.inf, np.nan], np.float32)
    assert same(x, x) and same(x * np.float32(1 + 2**-23), x)
    assert not same(x * np.float32(1 + 2**-12), x)
    assert not same(x[::-1], x) and not same(np.arange(3), np.arange(3) + 1)
