"""All programs, measured: each in a process of its own, several compiled at once, timed one at a time."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from terrazzo.bench.measure import save
from terrazzo.bench.programs import programs
from terrazzo.progress import at

LIMIT = 300
"""Seconds after which a process is ended."""
Measured = Callable[[str, str, str, Path], dict[str, Any]]


def measure(
    path: Path, meta: dict[str, Any], libraries: str, only: str, dtypes: Sequence[str], workers: int, one: Measured
) -> dict[str, Any]:
    """The record at `path` with the programs that it lacks, of those whose name contains `only`; written after each."""
    cases = recorded(path)
    wanted = [
        (p.name, dtype)
        for p in programs().values()
        if only in p.name
        for dtype in dtypes
        if dtype.replace("tf32", "f32") in p.dtypes
    ]
    missing = [key for key in wanted if key not in cases]
    record = {"suite": "programs", "meta": {**meta, "libraries": libraries, "workers": workers}}

    def whole() -> dict[str, Any]:
        return {**record, "cases": [cases[key] for key in sorted(cases)]}

    with tempfile.TemporaryDirectory() as room, ThreadPoolExecutor(max(workers, 1)) as pool:
        tasks = {pool.submit(one, *key, libraries, Path(room)): key for key in missing}
        try:
            for number, task in enumerate(as_completed(tasks)):
                name, dtype = tasks[task]
                family, commit = programs()[name].family, meta.get("commit", "")
                cases[name, dtype] = {"case": name, "family": family, "dtype": dtype, "commit": commit, **task.result()}
                save(whole(), path)
                at(f"measured {name}, {dtype}", number + 1, len(missing))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return whole()


def recorded(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The cases of an earlier record, by name and type; none where there is no such file."""
    if not path.exists():
        return {}
    return {(c["case"], c["dtype"]): c for c in json.loads(path.read_text())["cases"]}


def in_a_process(name: str, dtype: str, libraries: str, room: Path) -> dict[str, Any]:
    """What a process of its own finds; if it does not get so far, what became of it."""
    command = [sys.executable, "-m", "terrazzo.bench.programs.one", name, dtype, libraries, str(room.absolute())]
    sources = Path(__file__).parents[3]  # these, whatever is installed
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd=sources)
    except subprocess.TimeoutExpired:
        return {"failed": f"not through in {LIMIT} seconds"}
    found = room / f"{name}.{dtype}.json"
    if not found.exists():
        return {"failed": f"the process ended with {ended.returncode}: {ended.stderr.strip()[-1000:]}"}
    result: dict[str, Any] = json.loads(found.read_text())
    return result
