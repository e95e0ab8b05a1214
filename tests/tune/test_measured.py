"""What was measured is kept, and what becomes of a file that cannot be read or written."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from terrazzo.front.capture import capture
from terrazzo.hw.gpu import gpu
from terrazzo.ir.canonical import canonical
from terrazzo.ir.dialects import loop as l
from terrazzo.options import Options
from terrazzo.pipelines import LOWER, stages
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop_to_tile.candidates import candidates
from terrazzo.run import measured
from terrazzo.run.measured import Measured, Timing

UPPER = tuple(name for name in LOWER if name not in ("schedule", "plan", "derive"))
ROWS = [Timing(0, "a", 3.0), Timing(1, "b", 2.0), Timing(2, "c", None, "it spills")]


def kernel(fn: Any, *shapes: tuple[int, ...]) -> l.Kernel:
    """The only kernel of a function of tensors."""
    program = capture(fn, tuple(torch.zeros(s) for s in shapes), {}).program
    (found,) = stages(program, Options(target="sm_90a"), Log(), UPPER)[-1][1].steps
    assert isinstance(found, l.Kernel)
    return found


def test_the_fastest_is_found_by_another_process(tmp_path: Path) -> None:
    Measured(tmp_path, "H200").keep(kernel(torch.relu, (4, 8)), ROWS)
    again = Measured(tmp_path, "H200")
    assert again.timings(kernel(torch.relu, (4, 8))) == ROWS
    assert again.fastest(kernel(lambda y: torch.relu(y), (4, 8))) == "b"  # whatever things are called
    assert again.fastest(kernel(torch.relu, (4, 9))) == ""
    assert Measured(tmp_path, "A100").fastest(kernel(torch.relu, (4, 8))) == ""


def test_where_all_are_out_none_is_the_fastest(tmp_path: Path) -> None:
    found = Measured(tmp_path, "H200")
    found.keep(kernel(torch.relu, (4, 8)), ROWS[2:])
    assert found.fastest(kernel(torch.relu, (4, 8))) == ""


def test_the_state_names_what_is_known(tmp_path: Path) -> None:
    found = Measured(tmp_path, "H200")
    assert found.state() == Measured(tmp_path / "elsewhere", "H200").state() == ""
    found.keep(kernel(torch.relu, (4, 8)), ROWS)
    first = Measured(tmp_path, "H200").state()
    found.keep(kernel(torch.relu, (4, 8)), ROWS[:1])
    assert first and Measured(tmp_path, "H200").state() not in ("", first)


@pytest.mark.parametrize("content", [b"no database", b"SQLite format 3\0" + bytes(200)])
def test_a_damaged_file_is_put_aside(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "measured.sqlite").write_bytes(content)
    found = Measured(tmp_path, "H200")
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        assert found.fastest(kernel(torch.relu, (4, 8))) == ""
    (aside,) = tmp_path.iterdir()
    assert ".damaged-" in aside.name and aside.read_bytes() == content  # nothing is lost
    found.keep(kernel(torch.relu, (4, 8)), ROWS)
    assert Measured(tmp_path, "H200").fastest(kernel(torch.relu, (4, 8))) == "b"


def test_a_file_without_rows_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "measured.sqlite").write_bytes(b"")
    assert Measured(tmp_path, "H200").fastest(kernel(torch.relu, (4, 8))) == ""


def test_a_table_of_another_shape_is_put_aside(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "measured.sqlite") as db:
        db.execute("CREATE TABLE timings (something TEXT)")
    with pytest.warns(RuntimeWarning, match="measured"):
        assert Measured(tmp_path, "H200").fastest(kernel(torch.relu, (4, 8))) == ""


def test_what_cannot_be_written_counts_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "PATIENCE", 0.05)
    other = sqlite3.connect(tmp_path / "measured.sqlite")
    other.execute("CREATE TABLE something (x TEXT)")
    other.execute("BEGIN EXCLUSIVE")  # another process that writes, and does not end
    found = Measured(tmp_path, "H200")
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        found.keep(kernel(torch.relu, (4, 8)), ROWS)
    assert found.fastest(kernel(torch.relu, (4, 8))) == "b"
    other.close()


def test_processes_that_write_wait_for_each_other(tmp_path: Path) -> None:
    known = kernel(torch.relu, (4, 8))
    Measured(tmp_path, "H200").keep(known, ROWS)
    other = sqlite3.connect(tmp_path / "measured.sqlite", check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")
    threading.Timer(0.3, other.close).start()
    start = time.monotonic()
    Measured(tmp_path, "H200").keep(known, ROWS[:1])
    assert time.monotonic() - start > 0.2
    assert Measured(tmp_path, "H200").fastest(known) == "a"


def test_what_is_shipped_is_of_this_version_and_still_a_candidate(tmp_path: Path) -> None:
    (place,) = Path(measured.__file__).parents[1].glob("hw/measured/NVIDIA H200.json")
    known = json.loads(place.read_text())
    assert known["version"] == measured.VERSION and len(known["kernels"]) >= 5
    given = tuple(torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((16, 3584), (18944, 3584)))
    program = capture(torch.nn.functional.linear, given, {}).program
    (found,) = stages(program, Options(target="sm_90a"), Log(), UPPER)[-1][1].steps
    assert isinstance(found, l.Kernel)
    form = canonical(found).kernel
    fastest = Measured(tmp_path, "NVIDIA H200").fastest(form)
    assert fastest in {c.text for c in candidates(form, gpu("sm_90a"), {})}
    other = l.Kernel("otherstzz", form.axes, form.stores)  # whatever it is called
    assert Measured(tmp_path, "NVIDIA H200").fastest(other) == fastest.replace(form.name, other.name) != fastest
    assert Measured(tmp_path, "NVIDIA T4").fastest(form) == ""
    own = Measured(tmp_path, "NVIDIA H200")
    own.keep(form, [Timing(0, fastest, 3.0), Timing(1, "b", 2.0)])
    assert own.fastest(form) == Measured(tmp_path, "NVIDIA H200").fastest(other) == "b"
    assert [t.schedules for t in own.timings(other)] == [fastest.replace(form.name, other.name), "b"]
