"""The suite of operators: its record goes on, comes in parts, and tells what was lost."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from terrazzo.bench import report  # noqa: E402
from terrazzo.bench.operators import measure as m  # noqa: E402
from terrazzo.bench.operators import report as r  # noqa: E402
from terrazzo.bench.operators.cases import BY_HAND, Job, cases, jobs  # noqa: E402
from terrazzo.bench.operators.fills import Case  # noqa: E402

META = {
    "commit": "abc",
    "gpu": "NVIDIA H200",
    "driver": "",
    "nvrtc": "13.0",
    "date": "2026-11-22",
    "versions": {"torch": "2.11"},
}


def run(case: Case, lock: str, libraries: str) -> dict[str, Any]:
    """In place of a GPU: gradients are slow, one case ends its process, and one finds a bug."""
    if case.op == "to_half":
        os._exit(7)
    if case.op == "to_bool":
        raise ValueError("no such thing")
    ratio = 0.5 if "backward" in case.form else 2.0
    us = {"terrazzo": 10.0, "eager": 10.0 * ratio}
    return {"verdict": "ok", "reason": "", "us": us, "ratio": ratio, "bytes": 1 << 20, "kernels": 1, "calls": []}


def test_a_job_has_both_types_and_gradients() -> None:
    (job, *_) = jobs("cosine_similarity")
    assert [(c.dtype, c.form) for c in cases(job)] == [
        (dtype, form) for dtype in ("float32", "bfloat16") for form in ("by hand", "by hand, backward")
    ]


def test_jobs_are_told_apart_by_their_names() -> None:
    found = jobs("")
    assert len(set(found)) == len(found)
    assert found[0].round < 0 < found[-1].round


def test_a_record_is_complete_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes; one is lost in a case, which the record says, and goes on behind it."""
    todo = [Job(name, BY_HAND) for name in ("to_half", "to_float", "to_bool", "cosine_similarity")]
    monkeypatch.setattr(m, "jobs", lambda only: todo)

    def measured(part: tuple[int, int] = (1, 1), within: float = 100.0) -> dict[str, Any]:
        return m.measure(tmp_path, META, "auto", "", 2, within, part, run)

    assert measured(within=0.0)["cases"] == []
    whole = {m.key_of(case): case for job in todo for case in _rows(job)}
    first = measured((1, 2))["cases"]
    assert 0 < len(first) < len(whole)
    assert (tmp_path / "operators-auto.1-of-2.part").exists()
    written = {m.key_of(c): c for c in first}
    record = measured()
    assert {m.key_of(c) for c in record["cases"]} == whole.keys()
    assert all(c == written.get(m.key_of(c), c) for c in record["cases"])
    assert not list(tmp_path.glob("*.part"))
    assert json.loads((tmp_path / "operators-auto.json").read_text()) == record
    told = {c["case"]: r.fails(c) for c in record["cases"] if r.fails(c)}
    assert told == {"to_half": "crash: the process ended with 7", "to_bool": "crash: ValueError: no such thing"}


def _rows(job: Any) -> list[dict[str, str]]:
    return [{"case": c.op, "dtype": c.dtype, "form": c.form, "told": c.told} for c in cases(job)]


def test_tables_have_sums_and_what_is_weak(tmp_path: Path) -> None:
    row = {"dtype": "float32", "form": "even", "told": "[3]", "us": {"terrazzo": 20.0, "eager": 10.0}, "bytes": 40000}
    fast = {**row, "case": "add", "verdict": "ok", "ratio": 4.0, "kernels": 1, "calls": []}
    slow = {**row, "case": "roll", "verdict": "ok", "ratio": 0.25, "kernels": 2, "calls": ["aten.roll.default"]}
    wrong = {**row, "case": "flip", "verdict": "wrong", "reason": "off | by 1", "form": "odd"}
    view = {**row, "case": "t", "verdict": "view", "reason": ""}
    record = {"suite": "operators", "meta": {**META, "libraries": "auto"}, "cases": [fast, slow, wrong, view]}
    assert r.summary(record)[1:] == [
        ("even", "float32", "3", "0", "2", "1.00x", "1", "1"),
        ("odd", "float32", "1", "1", "0", "", "0", "0"),
        ("all", "", "4", "1", "2", "1.00x", "1", "1"),
    ]
    assert [x[0] for x in r.weak(record)] == ["operator", "flip", "roll"]
    (tmp_path / "operators-auto.json").write_text(json.dumps(record))
    page = report.page(tmp_path)
    assert "## GPU: single operators, libraries allowed" in page
    assert "| roll | float32 | even | [3] | 10.0 us | 20.0 us | 0.25x | 2 GB/s | 2 | aten.roll.default |" in page
    assert "| flip | float32 | odd | [3] |  |  | **wrong: off / by 1** |  |  |  |" in page
