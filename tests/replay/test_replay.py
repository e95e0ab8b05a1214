"""`make replay` shows what changed between two checkouts, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.replay import compare, run
from tests.replay.worker import digest, plain

CUDA = """\
// x.py:1
template <class T> TZ T twice(T x) { return x + x; }
extern "C" __global__ void __launch_bounds__(32, 1) k_mm_3(const f32* __restrict__ arg0_p, f32* __restrict__ mm_3_p) {
  const int block = blockIdx.x;
  f32* const mm_3_s = reinterpret_cast<f32*>(shared + 0);
  alignas(16) f32 other0_1[2];
  const f32 v0 = arg0_p[block];
  mm_3_p[block] = twice(v0) + mm_3_s[0] + other0_1[1];
}
"""


def test_names_tell_nothing() -> None:
    other = CUDA.replace("mm_3", "addmm").replace("arg0", "x").replace("x.py:1", "y.py:7")
    text = plain("k_mm_3", CUDA)
    assert text == plain("k_addmm", other)
    assert "k(const f32* __restrict__ p0, f32* __restrict__ p1)" in text and "p1[block] = twice(v0) + s0[0]" in text
    assert digest(text) == digest(text.replace("other0_1", "other0_7").replace("v0", "v5"))
    for old, new in (("+ s0", "- s0"), ("p0[block]", "p1[block]"), ("other0_1[1]", "other0_1[0]"), ("(32,", "(64,")):
        assert old in text and digest(text) != digest(text.replace(old, new))


def kernel(key: str, cuda: str = "", **facts: Any) -> dict[str, Any]:
    return {"key": key, "cuda": cuda, "schedule": f"schedule of {key}", "kernel": "", "facts": {"blocks": 1, **facts}}


def dump(kernels: list[dict[str, Any]], prelude: str = "", **cases: Any) -> dict[str, Any]:
    def case(found: Any) -> dict[str, Any]:
        return {"kernels": [], "failed": found} if isinstance(found, dict) else {"kernels": found, "failed": None}

    found = {name: case(what) for name, what in cases.items()}
    return {"prelude": prelude, "kernels": {k["key"]: k for k in kernels}, "cases": found}


WRONG = {"type": "CompilerBug", "message": "no CUDA for If"}


def test_pairs_that_are_alike_are_one() -> None:
    a, b, c = kernel("a", "x\ny"), kernel("b", "x\nz", blocks=2), kernel("c")
    before = dump([a, c], one=[["mm", "a"]], two=[["mm_1", "a"], ["sum", "c"]], three=[["mm", "a"]], four=[["t", "c"]])
    after = dump([b, c], one=[["mm", "b"]], two=[["mm_1", "b"], ["sum", "c"]], three=[["mm", "b"], ["e", "c"]], four=[])
    found = compare.compare(before, after)
    assert [(p.kind, p.places) for p in found.pairs] == [
        ("changed", ["one -> mm", "two -> mm_1", "three -> mm"]),
        ("same", ["two -> sum"]),
        ("appeared", ["three -> e"]),
        ("vanished", ["four -> t"]),
    ]
    assert found.touched == ["one", "two", "three", "four"] and not found.broken
    said = "\n".join(compare.report(found))
    assert said.startswith("4 different kernels: 1 same, 1 changed, 1 appeared, 1 vanished\n")
    assert "=== changed: one -> mm; two -> mm_1; and 1 more ===" in said
    assert "blocks: 1 before, 2 now" in said and "    -y\n    +z" in said


def test_a_kernel_that_is_only_called_otherwise_is_the_same() -> None:
    a, b, c = kernel("a"), kernel("b"), kernel("c")
    before = dump([a, b], one=[["x", "a"], ["y", "b"], ["z", "a"]])
    found = compare.compare(before, dump([a, b, c], one=[["v", "b"], ["y", "a"], ["w", "c"]]))
    assert [(p.kind, p.places) for p in found.pairs] == [
        ("same", ["one -> y"]),
        ("same", ["one -> v"]),
        ("changed", ["one -> w"]),  # z became w: nothing else is left on either side
    ]


def test_of_many_changes_a_few_are_shown() -> None:
    before = dump([kernel(f"a{n}") for n in range(30)], **{f"c{n}": [["k", f"a{n}"]] for n in range(30)})
    after = dump([kernel(f"b{n}") for n in range(30)], **{f"c{n}": [["k", f"b{n}"]] for n in range(30)})
    found = compare.compare(before, after)
    few, every = (list(compare.report(found, everything)) for everything in (False, True))
    assert sum("===" in line for line in few) == 20 and "\n... 10 more changed (-v)" in few
    assert sum("===" in line for line in every) == 30


def test_failures_are_told_and_equal_ones_counted() -> None:
    before = dump([], old=WRONG, both=WRONG, new=[], gone=[])
    after = dump([], old=[], both=WRONG, new=WRONG, come=[])
    found = compare.compare(before, after)
    assert found.broken == ["new"]
    assert list(compare.report(found)) == [
        "0 different kernels: 0 same, 0 changed, 0 appeared, 0 vanished",
        "1 cases are only there before: gone",
        "1 cases are only there after: come",
        "old: CompilerBug: no CUDA for If before, compiles now",
        "new: compiles before, CompilerBug: no CUDA for If now",
        "1 cases fail as they did before",
    ]


def test_long_diffs_are_cut_unless_all_is_asked_for() -> None:
    old, new = (kernel(side, "\n".join(f"{side} {n}" for n in range(40))) for side in "ab")
    found = compare.compare(dump([old], c=[["k", "a"]]), dump([new], "other", c=[["k", "b"]]))
    short, whole = (list(compare.report(found, everything)) for everything in (False, True))
    assert "The prelude of all CUDA sources changed." in short
    assert any(line.endswith("lines more (-v)") for line in short) and "    +b 39" not in short
    assert "    +b 39" in whole and "    -schedule of a" in whole


def test_another_price_alone_is_no_change() -> None:
    sides = [dump([kernel("a", expected=t)], c=[["k", "a"]]) for t in (1.0, 2.0)]
    found = compare.compare(*sides)
    assert found.count("same") == 1 and "1 of those that are the same have another price" in compare.report(found)


def test_what_is_slower_is_listed_with_means_of_each_suite() -> None:
    times = {
        "gpu gemm: a": {"before": 10.0, "after": 20.0, "ratios": [2.5, 2.0, 1.9]},
        "gpu gemm: b": {"before": 10.0, "after": 5.0, "ratios": [0.5]},
        "gpu block: c": {"before": 10.0, "after": 10.2, "ratios": [1.04, 1.02, 1.01]},
        "gpu block: d": {"failed": "after: UserError: no"},
    }
    said = list(compare.timing(times))
    assert said[0] == "3 cases timed, 1 of them more than 3% slower"
    slower = "   2.000x        10.0 us ->       20.0 us  gpu gemm: a (1.900 to 2.500 in 3 openings)"
    assert [line for line in said if " us -> " in line] == [slower]
    assert "  not timed: gpu block: d: after: UserError: no" in said
    assert "  gpu gemm: 1.000x (geometric mean)" in said and "  gpu block: 1.020x (geometric mean)" in said
    assert list(compare.ratios(times)) == ["gpu gemm: a", "gpu block: c", "gpu gemm: b"]


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A checkout like this one, which has no `make replay` yet."""
    for name in ("src", "tests/kernels"):
        shutil.copytree(run.ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests" / "__init__.py").touch()
    return tmp_path


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def replayed(other: Path, capsys: pytest.CaptureFixture[str], only: str, *more: str) -> tuple[int, str, dict[str, Any]]:
    arguments = [*more, "--targets", "sm_80", "--time", "none", "--json", str(other / "record.json"), "--only", only]
    status = run.main([str(other), *arguments])
    return status, capsys.readouterr().out, json.loads((other / "record.json").read_text())


def test_a_checkout_against_another(other: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(other / "src/terrazzo/ir/dialects/kernel/waits.py", '"__syncthreads();"', '"__syncthreads( );"')
    status, said, record = replayed(other, capsys, "tests: s", "--jobs", "2")
    assert status == 0 and record["counts"]["changed"] >= 1 and record["counts"]["same"] >= 1
    assert "-  __syncthreads( );" in said and "+  __syncthreads();" in said
    assert all(place.startswith("tests: s") for k in record["kernels"] for place in k["places"])
    assert not record["failures"] and not any(record["only"].values())


def test_what_one_side_alone_came_to_in_time_is_not_compared() -> None:
    before, after = dump([kernel("a")], one=[["k", "a"]], two=[["k", "a"]]), dump([kernel("b")], two=[["k", "b"]])
    assert run.reached(before, after) == "The time was over: 1 cases are compared, of 2 or more."
    found = compare.compare(before, after)
    assert not any(found.only.values()) and [p.places for p in found.pairs] == [["two -> k"]]


def test_nothing_is_lowered_when_the_time_is_over(other: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said, record = replayed(other, capsys, "tests: gelu", "--minutes", "0")
    assert status == 0 and "The time was over: 0 cases are compared" in said and not record["kernels"]


def test_what_fails_now_is_the_status(
    other: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(other / "src/terrazzo/targets/cuda/emit.py", "case k.Let():", "case k.Let() if 1 // 0:")
    status, said, _ = replayed(other, capsys, "tests: gelu")
    assert status == 0 and "tests: gelu (sm_80): ZeroDivisionError: integer division or modulo by zero before" in said
    here = run.ROOT
    monkeypatch.setattr(run, "ROOT", other)
    assert run.main([str(here), "--targets", "sm_80", "--time", "none", "--only", "tests: gelu"]) == 1
    assert "compiles before, ZeroDivisionError" in capsys.readouterr().out


ANSWERS = """\
import json, os, sys
after = os.getcwd().endswith("after")
for n, line in enumerate(sys.stdin):
    case = line.strip().removeprefix("open ") if line.startswith("open") else case
    failed = line.strip() == "open gpu gemm: b" and after
    us = 100 if n == 2 else 7 if after and case == "gpu gemm: a" else 5
    answer = {"failed": {"type": "UserError", "message": "no"}} if failed else {"us": us}
    print(json.dumps(answer), flush=True)
"""


@pytest.mark.parametrize("jobs", (1, 2))
def test_both_sides_are_timed_in_turns(jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With processes that only pretend: no GPU is needed for what is between them."""
    (tmp_path / "worker.py").write_text(ANSWERS)
    folders = [tmp_path / "before", tmp_path / "after"]
    for folder in folders:
        folder.mkdir()
    monkeypatch.setattr(run, "WORKER", tmp_path / "worker.py")
    assert run.times(folders, ["gpu gemm: a", "gpu gemm: b", "gpu gemm: c"], jobs) == {
        "gpu gemm: a": {"before": 5, "after": 7, "ratios": [1.4] * 5},  # medians: one of the rounds took 100
        "gpu gemm: b": {"failed": "after: UserError: no"},
        "gpu gemm: c": {"before": 5, "after": 5, "ratios": [1.0]},  # what does not seem slower is opened once
    }


@pytest.mark.gpu
def test_a_checkout_is_as_fast_as_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """Built in several processes first, then timed: nothing fails, and no time is made up."""
    status = run.main([str(run.ROOT), "--only", "gpu pointwise: gelu 32 x 2048", "--time", "all", "--jobs", "2", "-v"])
    said = capsys.readouterr().out
    assert status in (0, 1) and "not timed" not in said and " us -> " in said


def test_only_benchmarks_that_changed_are_timed() -> None:
    a, b = kernel("a"), kernel("b")
    names = ("gpu gemm: x, f32 (sm_80)", "gpu gemm: x, f32 (sm_90a)", "tests: x (sm_90a)", "gpu gemm: y, f32 (sm_90a)")
    before = dump([a], **{name: [["mm", "a"]] for name in names})
    after = dump([a, b], **{name: [["mm", "a" if "y" in name else "b"]] for name in names})
    found = compare.compare(before, after)
    assert run.timed_cases(found, "sm_90a", False, after) == ["gpu gemm: x, f32"]
    assert run.timed_cases(found, "sm_90a", True, after) == ["gpu gemm: x, f32", "gpu gemm: y, f32"]


def test_a_base_that_is_not_there() -> None:
    with pytest.raises(SystemExit, match="BASE=no-such-commit is neither a commit nor a folder with src/terrazzo"):
        run.main(["no-such-commit"])
