"""Where the parts of a text stand, for whoever finds later that one of them is wrong."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from terrazzo.errors import Limitation, TerrazzoError, UserError

HEAD = "@"
"""Stands for the line above a program's `def`, which says what IR it is in."""
WIDTH = 240
"""How many characters of a long line are shown."""


@dataclass(frozen=True)
class TextLine:
    """A line of what is printed of a kernel of Kernel IR, or of a plan, by its number there (the head is 0)."""

    of: Any
    number: int


@dataclass
class Places:
    """Where in a text stands what was read from it: nodes, schedules and their words, lines of kernels and plans, and
    what has a name.

    Equal parts are one node: its place is the first. `TextLine` tells statements of Kernel IR apart.
    """

    filename: str = "<text>"
    text: str = ""
    found: dict[Any, ast.AST] = field(default_factory=dict)

    def add(self, what: Any, where: ast.AST) -> None:
        """Note where something stands, unless it was read before."""
        self.found.setdefault(what, where)

    def of(self, about: tuple[Any, ...]) -> ast.AST | None:
        """The place of the first of `about` that has one. What rules made of something is found by the names of what
        it writes, or by its own.
        """
        for what in about:
            written = [b.name for b in getattr(what, "writes", ())]
            for key in (what, *written, getattr(what, "name", None)):
                if key in self.found:
                    return self.found[key]
        return None

    def tell(self, error: TerrazzoError) -> TerrazzoError:
        """The error, whose message now says where it arose, if that is known."""
        where = None if error.placed else self.of(error.about)
        if where is not None:
            error.args = (located_at(where, self.filename, self.text, error.brief or str(error)),)
            error.placed = True
        return error

    @contextmanager
    def told(self) -> Iterator[None]:
        """Has errors from inside say where in the text they arose."""
        try:
            yield
        except (UserError, Limitation) as error:
            self.tell(error)
            raise


def located(filename: str, text: str, line: int, column: int, message: str) -> str:
    """The message with its place, the line and a caret."""
    lines = lines_of(text)
    shown = lines[line - 1] if 0 < line <= len(lines) else ""
    first = max(column - 1 - WIDTH // 2, 0) if len(shown) > WIDTH else 0
    shown = shown[first : first + WIDTH]
    return f"{filename}, line {line}, column {column}: {message}\n    {shown}\n    {' ' * (column - 1 - first)}^"


def located_at(where: ast.AST, filename: str, text: str, message: str) -> str:
    """The message with the place of a part of Python's tree."""
    line, offset = getattr(where, "lineno", 1), getattr(where, "col_offset", 0)
    before = "".join(lines_of(text)[line - 1 : line]).encode()[:offset]  # which Python counts in bytes
    return located(filename, text, line, len(before.decode(errors="ignore")) + 1, message)


def lines_of(text: str) -> list[str]:
    """The lines of a text as Python counts them: other characters that break lines elsewhere do not here."""
    return re.split(r"\r\n|\r|\n", text)
