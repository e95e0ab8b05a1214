"""All cases, measured: several processes compile and check at once, and take turns where times are taken."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from terrazzo.bench.gpu import kept, parts_of, recorded_at
from terrazzo.bench.measure import save
from terrazzo.bench.operators.cases import Job, cases, jobs
from terrazzo.bench.operators.fills import Case
from terrazzo.bench.operators.one import on_gpu, said
from terrazzo.progress import at

LIMIT, STUCK = 30, 240
"""Seconds for one case, waiting for the GPU not counted; and counted."""
Key = tuple[str, str, str, str]
"""What tells cases apart: the operator, its type, the form and the shapes."""
Run = Callable[[Case, str, str], dict[str, Any]]


def measure(
    folder: Path,
    meta: Mapping[str, Any],
    libraries: str,
    only: str,
    workers: int,
    within: float,
    part: tuple[int, int] = (1, 1),
    run: Run = on_gpu,
) -> dict[str, Any]:
    """The record of the suite, in the `folder`, with the cases that it lacks: of jobs whose name contains `only`, the
    k-th of every n for `part` k, n. It is written as cases come. No case begins after `within` seconds, and all is over
    `LIMIT` seconds later.
    """
    suite = f"operators-{libraries}"
    found = {key_of(c): c for record in recorded_at(suite, folder, meta) for c in record["cases"]}
    number, count = part
    todo = jobs(only)[number - 1 :: count]

    def record() -> dict[str, Any]:
        about = {**meta, "libraries": libraries, "workers": workers}
        return {"suite": "operators", "meta": about, "cases": [found[key] for key in sorted(found)]}

    with tempfile.TemporaryDirectory(prefix="terrazzo-operators-") as room:  # locks and caches are no results
        pool = _Pool(todo, Path(room), time.time() + within, libraries, frozenset(found), run)
        for row in pool.rows(workers):
            found[key_of(row)] = row
            at(f"measured {row['case']}", pool.begun, len(todo))
            if time.time() - pool.saved > EVERY:
                save(record(), kept(suite, folder, part))
                pool.saved = time.time()
    save(record(), kept(suite, folder, part))
    for other in parts_of(suite, folder) if count == 1 else ():
        other.unlink()
    return record()


EVERY = 5
"""Seconds after which the record is written again."""


def key_of(row: Mapping[str, Any]) -> Key:
    """The key of a case of a record."""
    return row["case"], row["dtype"], row["form"], row["told"]


@dataclass
class _Pool:
    """Processes that take one job after the other. A process that is lost is replaced, and its case is told."""

    todo: Sequence[Job]
    room: Path
    end: float
    libraries: str
    known: Collection[Key]
    run: Run
    saved: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.context = multiprocessing.get_context("spawn")
        self.next = self.context.Value("l", 0)
        self.read = 0
        self.open: dict[int, dict[str, Any]] = {}
        """The case that a process is at, by its number."""

    @property
    def begun(self) -> int:
        """How many jobs were begun."""
        return min(self.next.value, len(self.todo))

    def rows(self, workers: int) -> Iterator[dict[str, Any]]:
        """What became of cases, as it is known."""
        pool: list[tuple[Any, Any]] = []
        try:
            while time.time() < self.end + LIMIT:
                yield from self._new()
                for process, beat in pool:
                    if time.time() - beat.value > STUCK:
                        process.kill()
                for process, beat in [x for x in pool if not x[0].is_alive()]:
                    process.join()
                    yield from self._new()
                    pool.remove((process, beat))
                    if lost := self.open.pop(process.pid, None):
                        yield {**lost, "verdict": "crash", "reason": f"the process ended with {process.exitcode}"}
                while len(pool) < workers and self.next.value < len(self.todo) and time.time() < self.end:
                    pool.append(self._started())
                if not pool:
                    break
                time.sleep(0.2)
            yield from self._new()
        finally:
            for process, _ in pool:
                process.kill()
                process.join()

    def _started(self) -> tuple[Any, Any]:
        beat = self.context.Value("d", time.time() + LIMIT)
        given = self.todo, self.next, beat, self.room, self.end, self.libraries, self.known, self.run
        process = self.context.Process(target=work, args=given)
        process.start()
        return process, beat

    def _new(self) -> Iterator[dict[str, Any]]:
        """Rows that processes have written since."""
        path = self.room / "rows"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        for line in lines[self.read :]:
            if not line.endswith("\n"):
                break
            self.read += 1
            row = json.loads(line)
            process = row.pop("process")
            if row["verdict"] == "begun":
                self.open[process] = row
            else:
                self.open.pop(process, None)
                yield row


def work(
    todo: Sequence[Job],
    next_: Any,
    beat: Any,
    room: Path,
    end: float,
    libraries: str,
    known: Collection[Key],
    run: Run,
) -> None:
    """A process: one job after the other until there is none, or the GPU is lost to it."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _late)
    while True:
        with next_.get_lock():
            number = next_.value
            next_.value += 1
        if number >= len(todo):
            os._exit(0)
        drawn = cases(todo[number])
        while (case := _drawn(drawn)) is not None:
            row = {"case": case.op, "dtype": case.dtype, "form": case.form, "told": case.told}
            if key_of(row) in known:
                continue
            beat.value = time.time()
            if time.time() > end:
                os._exit(0)
            _write(room, row | {"verdict": "begun"})
            _write(room, row | _tried(case, f"{room}/lock", libraries, run))
            _still_usable()


def _tried(case: Case, lock: str, libraries: str, run: Run) -> dict[str, Any]:
    """A case, or what became of it."""
    signal.alarm(LIMIT)
    try:
        return run(case, lock, libraries)
    except TimeoutError as why:
        return {"verdict": "late", "reason": str(why)}
    except BaseException as why:
        return {"verdict": "crash", "reason": said(why), "trace": traceback.format_exc()[-1500:]}
    finally:
        signal.alarm(0)


def _late(signum: int, frame: Any) -> None:
    raise TimeoutError(f"longer than {LIMIT} s")


def _drawn(found: Iterator[Case]) -> Case | None:
    """The next case, if it is found soon."""
    signal.alarm(LIMIT // 2)
    try:
        return next(found, None)
    except TimeoutError:
        return None
    finally:
        signal.alarm(0)


def _still_usable() -> None:
    """A kernel that reads beside its memory loses the GPU to the process: another one goes on."""
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception:
        os._exit(3)


def _write(room: Path, row: dict[str, Any]) -> None:
    with open(room / "rows", "a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        f.write(json.dumps({**row, "process": os.getpid()}) + "\n")
