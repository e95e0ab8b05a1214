"""A little of `make fuzz` in every run of the tests; and that it would find something, and says how to find it
again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from terrazzo.interp import kernel as simulator
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.scalar import BY_NAME
from terrazzo.ir.monoid import MONOIDS
from terrazzo.ir.node import topological
from terrazzo.ir.program import Program
from terrazzo.ir.text import parse
from terrazzo.ir.types import DTYPES, Type
from terrazzo.rules.loop.attention import blocks
from tests.fuzz import checks, run, scores
from tests.fuzz.judge import Judge
from tests.fuzz.programs import tensor_programs
from tests.fuzz.schedules import terms
from tests.harness import random_inputs


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("programs", 50),
        ("schedules", 30),
        ("plans", 60),
        ("arrangements", 60),
        ("texts", 300),
        ("aliases", 30),
        ("effects", 100),
        ("scores", 6),
    ],
)
def test_nothing_is_found(kind: str, count: int) -> None:
    outcomes, found = run.fuzz(kind, count, seed=0)
    assert not found, "\n".join(found)
    told = "refused: the plan of" if kind in ("plans", "arrangements") else "read" if kind == "texts" else "right"
    assert outcomes.total() >= count * 0.9
    few = 30 if kind == "texts" else 20  # most edits of a text leave one that nobody reads
    assert sum(n for outcome, n in outcomes.items() if outcome.startswith(told)) >= count // few


def test_a_wrong_range_of_blocks_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = scores.Case(1, 1, 1, 264, 264, 32, 32, "bfloat16", (), "(ids == idk)", "sdpa", "sm_90a", True, False)
    assert scores.check(case) == "right"
    monkeypatch.setitem(blocks.COMPARISONS, "eq", lambda a, b, some: blocks.l.apply("lt", a[0], b[0]))
    with pytest.raises(checks.Found, match="an error of"):
        scores.check(case)


def test_a_seed_means_the_same_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    def examples(seed: int) -> list[str]:
        seen: list[str] = []
        monkeypatch.setitem(run.KINDS, "texts", (run.KINDS["texts"][0], lambda x: seen.append(x) or "read"))
        run.fuzz("texts", 20, seed)
        return seen

    assert examples(1) == examples(1) != examples(2)


def test_nothing_is_drawn_when_the_time_is_over() -> None:
    outcomes, found = run.fuzz("texts", 20, seed=0, until=0)
    assert not outcomes and not found


ROUNDED = """@tensor
def f(x: f32[4, 100], whole: f32[4, 100]):
    e: f32[4, 100] = exp(x)
    s: f32[4] = reduce.sum(e, axes=[1])
    b: f32[4, 100] = index_map(lambda i0, i1: s[i0])
    q: f32[4, 100] = div(e, b)
    w: f32[4] = reduce.sum(whole, axes=[1])
    return (q, w)
"""


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda q, w: (q, w), ""),
        (lambda q, w: (np.nextafter(q, np.float32(1)), w), ""),
        (lambda q, w: (q * np.float32(1 + 2e-5), w), "result 0[0, 0]"),
        (lambda q, w: (np.where(np.arange(100) == 99, q[:, :1], q), w), "result 0[0, 99]"),
        (lambda q, w: (q, w + np.float32(1e-4)), "result 1[0]"),
        (lambda q, w: (q, np.where(np.arange(4) == 2, np.float32(np.nan), w)), "result 1[2]"),
        (lambda q, w: (q, w[:, None]), "result 1 is float32[4, 1], not float32[4]"),
        (lambda q, w: (q, w.astype(np.float64)), "result 1 is float64[4], not float32[4]"),
    ],
)
def test_the_judge(change: Any, wrong: str) -> None:
    program: Any = parse(ROUNDED)
    inputs = random_inputs(program.inputs)
    judge = Judge(program, inputs)
    problem = judge.problem(list(change(*(judge.plain[r] for r in program.results))))
    assert problem.startswith(wrong) if wrong else not problem


def test_a_scan_may_be_added_up_in_parts() -> None:
    """As threads do that share its steps; a part that does not go on from those before it is wrong."""
    program: Any = parse("@tensor\ndef f(x: f32[1, 96]):\n    s: f32[1, 96] = scan.sum(x, axis=1)\n    return (s,)\n")
    rng = np.random.default_rng(3)
    x = rng.standard_normal((1, 96)).astype(np.float32)
    parts = np.add.accumulate(x.reshape(12, 8), axis=1)
    before = np.concatenate([np.zeros(1, np.float32), np.add.accumulate(parts[:-1, -1])])
    judge = Judge(program, {"x": x})
    assert judge.problem([(parts + before[:, None]).reshape(1, 96)]) == ""
    before[5] = 0
    assert judge.problem([(parts + before[:, None]).reshape(1, 96)]).startswith("result 0[0, 40]")


def test_programs_have_everything() -> None:
    """Every primitive and every type is drawn, most functions and monoids, and all ranks."""
    seen: dict[str, set[Any]] = {what: set() for what in ("primitives", "types", "functions", "monoids", "ranks")}

    @settings(
        max_examples=600,
        database=None,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    @given(tensor_programs())
    def look(program: Program) -> None:
        for x in topological(program.results):
            seen["primitives"].add(type(x))
            kind = getattr(x, "type", None)
            if isinstance(kind, Type):
                seen["types"].add(kind.dtype.name)
                seen["ranks"].add(kind.rank)
            if isinstance(x, t.Elementwise):
                seen["functions"].add(x.fn.name)
            if isinstance(x, t.Reduce | t.Scan):
                seen["monoids"].add(x.monoid.name)

    look()
    assert {t.Literal, t.Iota, t.Elementwise, t.IndexMap, t.Read, t.Reduce, t.Scan, t.Get, t.Opaque} <= seen[
        "primitives"
    ]
    assert {d.name for d in DTYPES.values() if d.kind != "complex"} == seen["types"]
    assert seen["ranks"] >= set(range(7))
    assert len(seen["functions"]) > len(BY_NAME) // 3 and len(seen["monoids"]) > len(MONOIDS) // 2


def test_what_is_found_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With a simulator that is wrong about large sums, a small program is printed, and the command that finds it
    again.
    """

    def wrong(*args: Any, **options: Any) -> list[Any]:
        return [
            x + np.ones((), x.dtype) if x.size > 4 and x.dtype == np.float32 else x for x in right(*args, **options)
        ]

    right = simulator.run
    monkeypatch.setattr(simulator, "run", wrong)
    monkeypatch.setattr("sys.argv", ["fuzz", "30", "--seed", "5", "--kind", "programs"])
    assert run.main() == 1
    printed = capsys.readouterr().out
    assert "Again: make fuzz N=30 SEED=5 KIND=programs" in printed
    assert len(printed[printed.index("@tensor") : printed.index("Again")].splitlines()) <= 8, printed


def test_a_schedule_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    (term, *_) = terms("sum of short rows", "sm_80")
    assert checks.schedule(term, term.default) == "right"
    monkeypatch.setattr(simulator, "run", lambda p, i, call: [np.zeros(90, np.float32)])
    with pytest.raises(checks.Found, match="90 of 90 are wrong"):
        checks.schedule(term, term.default)
    with pytest.raises(checks.Found, match="UserError"):
        checks.schedule(term, replace(term.default, kernel='a quote " in a name'))
