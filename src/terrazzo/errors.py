"""The three ways Terrazzo can fail. Everything it raises on purpose is one of these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class TerrazzoError(Exception):
    """Base of the three; catch this to catch whatever Terrazzo raises on purpose.

    `about` is what it arose from, from the inside out, so that whoever read that from a text can say where it stands
    (`ir.places`). `placed` is True once the message says so; `brief` is the message to say it with, where it is not
    the whole.
    """

    about: tuple[Any, ...] = ()
    placed: bool = False
    brief: str = ""


class UserError(TerrazzoError):
    """The request is wrong: a shape, a dtype, a name, a file. The message says what to change."""


class IndexOutOfRange(UserError, IndexError):
    """An index that came from data lies outside its dimension. PyTorch raises an IndexError too."""


class DivisionByZero(UserError, ZeroDivisionError, RuntimeError):
    """A whole number was divided by zero. PyTorch raises a RuntimeError on a CPU, Python a ZeroDivisionError."""


class CallFailed(UserError, RuntimeError):
    """PyTorch does not run an operator on this data. It raises a RuntimeError itself."""


class Limitation(TerrazzoError):
    """The request is fine and Terrazzo cannot do it (yet). The message says what runs instead, if anything."""


class CompilerBug(TerrazzoError):
    """A promise between two parts of the compiler was broken. The message names the pass and how to reproduce it.

    `program` is what the failing step was given, until the message says how to see that again.
    """

    program: Any = None


@contextmanager
def about(*things: Any) -> Iterator[None]:
    """Has errors from inside say what they arose from, for the message to get its place."""
    try:
        yield
    except Exception as error:
        note(error, *things)
        raise


def note(error: Exception, *things: Any) -> None:
    """Have an error say what else, further out, it arose from."""
    error.about = (*getattr(error, "about", ()), *things)  # type: ignore[attr-defined]


def again(error: TerrazzoError) -> TerrazzoError:
    """A kept error to be raised once more: what it is raised through is not added to the kept one."""
    found = type(error)(*error.args)
    found.about, found.brief = error.about, error.brief
    return found
