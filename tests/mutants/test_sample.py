"""A few mutants of every kind, in seconds. `make mutants` takes a thousand."""

from __future__ import annotations

import numpy as np
import pytest

from terrazzo.ir.dialects import kernel as k
from tests.mutants.equivalent import Equivalent
from tests.mutants.kernels import DERIVED, NAMES, PINNED, subject
from tests.mutants.operators import OPERATORS
from tests.mutants.run import GOAL, Verdict, alarms, every, in_parts, judge, report, same, sample, stale
from tests.mutants.sites import sites, working

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


def test_what_is_derived_has_a_schedule_that_is_pinned() -> None:
    """What `equivalent.py` says of a kernel is said of its lines, which another choice would change."""
    assert PINNED.keys() == DERIVED.keys()


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


def test_lines_of_equivalents_that_nothing_needs_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a mutant of the sample needs, one whose mutants are all killed, and one of which too few were judged."""
    monkeypatch.setattr("tests.mutants.run.excused", lambda name: (NEEDED, KILLED, FEW, FEW))
    monkeypatch.setattr("tests.mutants.run.EQUIVALENT", (NEEDED, KILLED, FEW, OF_ANOTHER))
    verdicts = [
        Verdict("softmax", n, "no barrier", change, by, "", 0.1)
        for n, (change, by) in enumerate([("needed", ""), ("killed", "simulator"), ("few", "simulator")])
    ]
    assert stale(verdicts, ["softmax"]) == [KILLED]


NEEDED, KILLED, FEW = (Equivalent(("softmax",), ("no barrier",), x, "") for x in ("needed", "killed", "few"))
OF_ANOTHER = Equivalent(("gelu",), ("no barrier",), "killed", "")


def test_what_does_nothing_is_not_changed() -> None:
    """A value that nobody reads, and what is under a condition that holds for no thread."""
    steps = subject("attention of half").program.steps
    first = next(s for s in steps if isinstance(s, k.Kernel))
    some = working(first)
    idle = [s for s in k.walk(first.body) if s not in some]
    assert {s.value.name for s in idle if isinstance(s, k.Let)} >= {"v6"}
    assert any(isinstance(s, k.Move) for s in idle)
    assert all(site.s in some for site in sites(first))
    assert any(isinstance(s, k.Let) for s in some) and any(isinstance(s, k.Move) for s in some)
    (columns,) = (s for s in subject("softmax of columns").program.steps if isinstance(s, k.Kernel))
    empty = [s for s in k.walk(columns.body) if isinstance(s, k.For) and not s.body]
    assert empty and not {*empty} & working(columns)
