"""What the commands print: plain where it is piped, coloured on a terminal. Progress goes to stderr, on a terminal
only.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from typing import Any

from rich.console import Console

THEME = "ansi_dark"


@cache
def _console(stderr: bool) -> Console:
    return Console(stderr=stderr, highlight=False, soft_wrap=True)


def say(text: str = "", style: str | None = None) -> None:
    """A line (or several) of output; nothing in it is markup and no line is wrapped."""
    if _coloured() and style:
        _console(False).print(text, style=style, markup=False)
    else:
        sys.stdout.write(text + "\n")


def code(text: str, language: str = "python") -> None:
    """Program text, highlighted on a terminal."""
    if _coloured():
        from rich.syntax import Syntax

        highlighted = Syntax(text.rstrip("\n"), language, theme=THEME, background_color="default").highlight(
            text.rstrip("\n")
        )
        highlighted.rstrip()
        _console(False).print(highlighted)
    else:
        sys.stdout.write(text.rstrip("\n") + "\n")


def as_json(value: Any) -> None:
    """A value for a script to read."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def complain(label: str, text: str) -> None:
    """An error or a warning, on stderr."""
    sys.stdout.flush()
    if sys.stderr.isatty():
        _console(True).print(f"{label}: ", style="bold red", end="", markup=False)
        _console(True).print(text, markup=False)
    else:
        sys.stderr.write(f"{label}: {text}\n")


@contextmanager
def told_warnings() -> Iterator[None]:
    """Tells warnings in a line each, on stderr; those about ops that PyTorch runs are left out, as commands list
    them.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")  # what libraries say to their developers
        for category in (RuntimeWarning, UserWarning):
            warnings.simplefilter("always", category)
        yield
    for text in dict.fromkeys(str(w.message) for w in caught):
        if not text.endswith("PyTorch runs it"):
            complain("warning", text.removeprefix("terrazzo: "))


def unknown(kind: str, name: str, known: Sequence[str]) -> str:
    """What to say where there is no `kind` called `name`."""
    close = get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"there is no {kind} {name!r}{hint} The known ones are {', '.join(known)}."


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """The rows with their cells aligned; the columns numbered in `right` at their right edge."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))] if rows else []
    lines = []
    for row in rows:
        cells = [
            cell.rjust(w) if k in right else cell.ljust(w) for k, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _coloured() -> bool:
    # The console decides: it knows terminals, NO_COLOR, FORCE_COLOR and TERM=dumb.
    return sys.stdout.isatty() and _console(False).color_system is not None and not _console(False).no_color


def size(count: float) -> str:
    """A number of bytes for people: 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def count(number: int) -> str:
    """A number for people: 268.4 million."""
    for unit, name in ((10**9, " billion"), (10**6, " million"), (10**3, " thousand")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return str(number)


def duration(nanoseconds: float) -> str:
    """A time for people: 12.3 us."""
    value, unit = nanoseconds / 1000, "us"
    for larger in ("ms", "s"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.1f} {unit}"
