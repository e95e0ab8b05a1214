"""The three ways Terrazzo can fail. Everything it raises on purpose is one of these."""

from __future__ import annotations

from typing import Any


class TerrazzoError(Exception):
    """Base of the three; catch this to catch whatever Terrazzo raises on purpose."""


class UserError(TerrazzoError):
    """The request is wrong: a shape, a dtype, a name, a file. The message says what to change."""


class IndexOutOfRange(UserError, IndexError):
    """An index that came from data lies outside its dimension. PyTorch raises an IndexError too."""


class DivisionByZero(UserError, ZeroDivisionError, RuntimeError):
    """A whole number was divided by zero. PyTorch raises a RuntimeError on a CPU, Python a ZeroDivisionError."""


class Limitation(TerrazzoError):
    """The request is fine and Terrazzo cannot do it (yet). The message says what runs instead, if anything."""


class CompilerBug(TerrazzoError):
    """A promise between two parts of the compiler was broken. The message names the pass and how to reproduce it.

    `program` is what the failing step was given, until the message says how to see that again.
    """

    program: Any = None
