"""What takes long shows, on a terminal, how far it is."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

AFTER = 2.0
"""Seconds until something is shown."""


class _Bar:
    """What is done at present, shown once `AFTER` seconds have passed."""

    def __init__(self, what: str) -> None:
        self.state: dict[str, Any] = {"description": what, "completed": 0, "total": None}
        self.lock = threading.Lock()
        self.shown: Any = None
        self.task: Any = None
        self.timer = threading.Timer(AFTER, self.show)
        self.timer.daemon = True
        self.timer.start()

    def show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        with self.lock:
            columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
            self.shown = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
            self.task = self.shown.add_task(**self.state)
            self.shown.start()

    def at(self, what: str, done: int, total: int | None) -> None:
        with self.lock:
            self.state = {"description": what, "completed": done, "total": total}
            if self.shown:
                self.shown.update(self.task, **self.state)

    def close(self) -> None:
        self.timer.cancel()
        with self.lock:
            if self.shown:
                self.shown.stop()


_bar: _Bar | None = None


@contextmanager
def working(what: str) -> Iterator[None]:
    """Within this, a terminal shows after two seconds that something long is under way. Where that is the case already,
    the outer one shows `what`.
    """
    global _bar
    if _bar or not sys.stderr.isatty():
        at(what)
        yield
        return
    _bar = _Bar(what)
    try:
        yield
    finally:
        _bar.close()
        _bar = None


def at(what: str, done: int = 0, total: int | None = None) -> None:
    """Something long has come so far: `done` of `total`, where that is known."""
    if bar := _bar:
        bar.at(what, done, total)
