"""The worker's process: what hangs, dies or answers nothing is out, and the rest is measured all the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from terrazzo.errors import UserError
from terrazzo.options import Options
from terrazzo.tune import process
from terrazzo.tune.process import Worker

# A worker whose programs are words: what to do.
FAKE = """
import json, os, sys, time
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    assert job["target"] == "sm_90a" and job["device"] == "cuda:0"
    for word in job["programs"]:
        if word == "hang":
            time.sleep(60)
        if word == "die":
            print("an illegal address", file=sys.stderr)
            os._exit(7)
        print(json.dumps("it is wrong" if word == "wrong" else ""), flush=True)
    if "late" in job["programs"]:
        os._exit(8)
    print(json.dumps([None if w == "wrong" else float(len(w)) for w in job["programs"]]), flush=True)
"""


def worker(code: str = FAKE) -> Worker:
    return Worker("cuda:0", Options(target="sm_90a"), (sys.executable, "-c", code))


def test_times_are_those_of_the_programs() -> None:
    with worker() as found:
        assert found.measure(["ab", "wrong", "abc"], 0.0) == [("", 2.0), ("it is wrong", None), ("", 3.0)]
        first = found.process
        assert found.measure(["abcd"], 0.0) == [("", 4.0)] and found.process is first  # one process does all jobs
    assert first is not None and first.poll() is not None and found.process is None


def test_what_ends_the_process_is_out_and_the_others_are_measured() -> None:
    with worker() as found:
        why = "its process ended with 7: an illegal address"
        assert found.measure(["a", "die", "ab", "die"], 0.0) == [("", 1.0), (why, None), ("", 2.0), (why, None)]


def test_what_hangs_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ANSWERS", 0.5)
    with worker() as found:
        assert found.measure(["hang", "a"], 0.0) == [("it gave no answer in 0.5 s", None), ("", 1.0)]


def test_where_timing_ends_the_process_all_are_out() -> None:
    with worker() as found:
        why = "its process ended with 8: it said nothing"
        assert found.measure(["late", "a"], 0.0) == [(why, None), (why, None)]


def test_a_process_that_cannot_start_is_an_error() -> None:
    with worker("raise SystemExit('no GPU here')") as found, pytest.raises(UserError, match=r"cannot start.*no GPU"):
        found.measure(["a"], 0.0)


def test_the_real_worker_needs_a_gpu(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    options = Options(target="sm_90a", cache_dir=tmp_path)
    with Worker("cuda:0", options) as found, pytest.raises(UserError, match="cannot start"):
        found.measure(["a"], 0.0)
