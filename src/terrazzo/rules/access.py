"""What may be accessed at once: alignment and width, read off index expressions."""

from __future__ import annotations

from typing import Any

from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Var, terms_of
from terrazzo.ir.node import substitute

WIDEST = 16
"""Bytes one access of a thread moves at most."""


def divides(d: int, e: IntExpr) -> bool:
    """Whether d divides an expression, visibly."""
    return all(c % d == 0 for c in terms_of(e).values())


def wide(load: l.Load, j: Any, size: int) -> bool:
    """Whether the loads for all j in [0, size) lie one behind the other, aligned, under one condition."""
    offset = flatten(load.index, load.buffer.type.element_strides)
    least = min(size, WIDEST // load.dtype.size)
    whole = all(together(e, j, size) for e in load.inside)
    return coefficient(offset, j) == 1 and divides(least, substitute(offset, {j: 0})) and whole


def together(e: IntExpr, j: Var, size: int) -> bool:
    """Whether e >= 0 for all j in [0, size) or for none: e = -j + multiples of size + (size - 1), or free of j."""
    c = coefficient(e, j)
    return c == 0 or (c == -1 and divides(size, e + j - (size - 1)))
