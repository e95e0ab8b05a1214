"""What candidates took when they were measured: a SQLite file beside the compiled kernels, one row for each.

The file only says which of the chooser's candidates to take, by the texts of their schedules. So a row that is wrong,
old, or of a candidate that is none any more can make a kernel slow and never wrong: nothing in it is executed.
"""

from __future__ import annotations

import json
import re
import sqlite3
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from terrazzo.ir.canonical import canonical
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.text import show
from terrazzo.run.cache import digest

T = TypeVar("T")

NAME = "tzz"
"""What kernels are called here, and what names of canonical forms end with."""
VERSION = 3
"""Raised when schedules come to mean other kernels, or their kernels to take another time: old rows are not read."""
PATIENCE = 10.0
"""Seconds to wait for another process that writes."""
_TABLE = """CREATE TABLE IF NOT EXISTS timings (
    gpu TEXT NOT NULL, version INTEGER NOT NULL, key TEXT NOT NULL, rank INTEGER NOT NULL, schedules TEXT NOT NULL,
    us REAL, why TEXT NOT NULL, kernel TEXT NOT NULL, PRIMARY KEY (gpu, version, key, schedules))"""


@dataclass(frozen=True)
class Timing:
    """A candidate: its place in the model's order, its schedules, and the microseconds it took, or why it is out."""

    rank: int
    schedules: str
    us: float | None
    why: str = ""


def text(kernel: l.Kernel) -> str:
    """A kernel up to names, its own too, with the types of what it reads."""
    form = canonical(kernel).kernel
    form = l.Kernel(NAME, form.axes, form.stores)
    return show(l.Program("measured", form.reads, (form,), form.writes))


def _nameless(schedules: str, kernel: l.Kernel) -> str:
    """Schedules of a kernel in its canonical form as those of one with a name that says nothing."""
    return schedules.replace(kernel.name, NAME) if kernel.name.endswith(NAME) else schedules


def _named(schedules: str, kernel: l.Kernel) -> str:
    """The reverse."""
    return re.sub(rf"\b{NAME}", kernel.name, schedules) if kernel.name.endswith(NAME) else schedules


@lru_cache(maxsize=8)
def shipped(gpu: str) -> Mapping[str, str]:
    """What was measured on GPUs of this name where this package was made: the schedules of kernels, by their keys."""
    place = resources.files("terrazzo.hw") / "measured" / f"{gpu}.json"
    found: dict[str, Any] = json.loads(place.read_text()) if place.is_file() else {}
    return found["kernels"] if found.get("version") == VERSION else {}


@dataclass
class Measured:
    """What was measured on one kind of GPU, kept in a directory. What cannot be read or written there is lost with one
    warning, and compiling goes on.
    """

    directory: Path
    gpu: str
    own: dict[str, list[Timing]] = field(default_factory=dict)
    """What this process measured; it counts even where it could not be kept."""

    @property
    def path(self) -> Path:
        """The file."""
        return self.directory / "measured.sqlite"

    def timings(self, kernel: l.Kernel) -> list[Timing]:
        """The candidates of a kernel that were measured, in the model's order."""
        key = digest("measured", text(kernel))
        if key in self.own:
            return [replace(t, schedules=_named(t.schedules, kernel)) for t in self.own[key]]
        query = "SELECT rank, schedules, us, why FROM timings WHERE gpu = ? AND version = ? AND key = ? ORDER BY rank"
        rows: list[Any] = self._with(lambda db: db.execute(query, (self.gpu, VERSION, key)).fetchall(), [])
        return [Timing(rank, _named(schedules, kernel), us, why) for rank, schedules, us, why in rows]

    def fastest(self, kernel: l.Kernel) -> str:
        """The schedules of the fastest candidate, here or where this package was made; "" where none was measured."""
        if timings := self.timings(kernel):
            done = [t for t in timings if t.us is not None]
            return min(done, key=lambda t: t.us or 0.0).schedules if done else ""
        known = shipped(self.gpu)
        return _named(known.get(digest("measured", text(kernel)), ""), kernel) if known else ""

    def keep(self, kernel: l.Kernel, timings: Sequence[Timing]) -> None:
        """Replace what is known of a kernel."""
        told = text(kernel)
        key = digest("measured", told)
        self.own[key] = [replace(t, schedules=_nameless(t.schedules, kernel)) for t in timings]
        rows = [(self.gpu, VERSION, key, t.rank, _nameless(t.schedules, kernel), t.us, t.why, told) for t in timings]

        def write(db: sqlite3.Connection) -> None:
            with db:
                db.execute("DELETE FROM timings WHERE gpu = ? AND version = ? AND key = ?", (self.gpu, VERSION, key))
                db.executemany("INSERT INTO timings VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)

        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._with(write, None, make=True)

    def state(self) -> str:
        """Names what is known: another text after every measurement that changes which candidate is the fastest."""
        query = "SELECT key, schedules, MIN(us) FROM timings WHERE gpu = ? AND version = ? GROUP BY key ORDER BY key"
        rows: list[Any] = self._with(lambda db: db.execute(query, (self.gpu, VERSION)).fetchall(), [])
        own = sorted((key, min((t.us or 0.0, t.schedules) for t in found)) for key, found in self.own.items() if found)
        return digest("state", repr(rows), repr(own)) if rows or own else ""

    def _with(self, use: Callable[[sqlite3.Connection], T], otherwise: T, make: bool = False) -> T:
        """What `use` makes of the open file; `otherwise` where there is none, or it cannot be used."""
        if not make and not self.path.exists():
            return otherwise
        try:
            db = sqlite3.connect(self.path, timeout=PATIENCE)
            try:
                if make:
                    db.execute(_TABLE)
                elif not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'timings'").fetchone():
                    return otherwise  # somebody is about to write for the first time
                return use(db)
            finally:
                db.close()
        except (sqlite3.DatabaseError, TypeError) as error:
            if isinstance(error, sqlite3.OperationalError) and "column" not in str(
                error
            ):  # locked, read-only, no space
                _warn(f"what was measured cannot be {'written to' if make else 'read from'} {self.path}: {error}")
                return otherwise
            aside = self.path.with_suffix(f".damaged-{time.time_ns()}")
            with suppress(OSError):
                self.path.rename(aside)
            _warn(f"{self.path} cannot be read ({error}); it is now {aside.name}, and what was measured is forgotten")
        return otherwise


def _warn(message: str) -> None:
    warnings.warn(f"terrazzo: {message}", RuntimeWarning, stacklevel=5)
