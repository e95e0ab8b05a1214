"""Compile time is measured by phase, cold and warm, each program in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

from typer.testing import CliRunner  # noqa: E402

from terrazzo.bench import compiling, report  # noqa: E402
from terrazzo.cli.app import app  # noqa: E402

SMALL = compiling.Case("functions in a chain", 3, lambda: compiling.chain(3))


def test_every_phase_is_timed_and_a_second_start_finds_the_plan(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(compiling, "_here", lambda: "")
    cold = compiling.one(SMALL, "sm_90a", tmp_path)
    assert set(cold["seconds"]) == set(compiling.PHASES)
    assert (cold["kernels"], cold["sources"]) == (1, 1)
    assert sum(cold["seconds"].values()) <= cold["total"]
    warm = compiling.one(SMALL, "sm_90a", tmp_path)
    assert set(warm["seconds"]) == {"capture", "loading"}


def test_one_product_is_one_kernel_of_warpgroups(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(compiling, "_here", lambda: "")
    case = compiling.cases()[0]
    cold = compiling.one(case, "sm_90a", tmp_path)
    assert case.name.startswith("a product") and (cold["kernels"], cold["sources"]) == (1, 1)


def test_programs_of_each_family_grow() -> None:
    sizes: dict[str, list[int]] = {}
    for case in compiling.cases():
        sizes.setdefault(case.family, []).append(case.size)
    assert all(found == sorted(found) for found in sizes.values())
    assert {400, 512, 200, 20000} <= {found[-1] for found in sizes.values()}
    for make in (compiling.layers, compiling.recurrent, compiling.dense, compiling.chain):
        module, (x,), _ = make(2)
        assert module(x) is not None


def test_what_is_not_through_in_time_is_told(tmp_path: Path) -> None:
    name = compiling.cases()[0].name
    assert compiling.in_a_process(name, "sm_90a", tmp_path, 0.1) == {"failed": "not through in 0.1 seconds"}
    assert "the process ended with 1" in compiling.in_a_process("nothing", "sm_90a", tmp_path)["failed"]


def test_the_command_writes_a_record_and_the_page_shows_it(tmp_path: Path, monkeypatch: Any) -> None:
    lost = compiling.Case("functions in a chain", 9, SMALL.make)
    monkeypatch.setattr(compiling, "cases", lambda: (SMALL, lost))
    monkeypatch.setattr(compiling, "_here", lambda: "")

    def here(name: str, target: str, room: Path, limit: float) -> dict[str, Any]:
        return compiling.one(SMALL, target, room) if name == SMALL.name else {"failed": "not through in 5 seconds"}

    monkeypatch.setattr(compiling, "in_a_process", here)
    path = tmp_path / "compile.json"
    done = CliRunner().invoke(app, ["bench", "compile", "--json", str(path)])
    assert done.exit_code == 0, done.output
    assert "not through in 5 seconds" in done.output
    assert len(report.compile_rows(json.loads(path.read_text()))) == 3
    page = report.page(tmp_path)
    assert "## Compile time" in page
    assert 'title "functions in a chain: seconds in all (bars), to capture (line)"' in page
    assert "| functions in a chain, 3 |" in page


def test_a_record_goes_on_where_it_ends(tmp_path: Path, monkeypatch: Any) -> None:
    made = tuple(compiling.Case("a chain", n, SMALL.make) for n in (1, 2)) + (compiling.Case("a layer", 0, SMALL.make),)
    limits: dict[str, list[float]] = {}

    def took(name: str, target: str, room: Path, limit: float) -> dict[str, Any]:
        limits.setdefault(name, []).append(limit)
        return {"seconds": {}, "total": 1.0, "kernels": 1, "sources": 1}

    monkeypatch.setattr(compiling, "cases", lambda: made)
    monkeypatch.setattr(compiling, "in_a_process", took)
    none = compiling.measure(within=0.0)
    assert none["cases"] == [] and not limits
    first = compiling.measure(["chain, 2", "layer"], within=50.0)
    assert [(c["family"], c["size"]) for c in first["cases"]] == [("a chain", 2), ("a layer", 0)]
    assert all(0 < x <= 50 for given in limits.values() for x in given)
    whole = compiling.measure(before=first)
    assert [c["size"] for c in whole["cases"]] == [1, 2, 0]
    assert {name: len(given) for name, given in limits.items()} == {"a chain, 1": 2, "a chain, 2": 2, "a layer": 2}
    assert len(compiling.measure(["a layer"], before={**whole, "commit": "another"})["cases"]) == 1
    (tmp_path / "damaged").write_text("{")
    assert compiling.recorded(tmp_path / "damaged") is None is compiling.recorded(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("given", "told"), [(["--only", "zebra"], "no program's name contains 'zebra'"), (["--target", "sm_1"], "sm_1")]
)
def test_what_is_not_known_is_told(given: list[str], told: str) -> None:
    done = CliRunner().invoke(app, ["bench", "compile", *given])
    assert done.exit_code != 0
    assert told in str(done.exception) + done.output
