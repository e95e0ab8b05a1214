"""What may be accessed at once: alignment, width and boxes, read off index expressions."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import FloorDiv, IntExpr, Mod, Var, terms_of
from terrazzo.ir.node import substitute, topological
from terrazzo.ir.types import Type, contiguous_strides

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


@lru_cache(maxsize=4096)
def boxed(kind: Type, index: tuple[IntExpr, ...]) -> tuple[Type, tuple[IntExpr, ...]]:
    """The same place in the same memory, as TMA takes it: dimensions of one element are left out, the contiguous one
    comes last, and those in which the digits of one axis stand are one.
    """
    every = list(zip(kind.static_shape, kind.element_strides, index, strict=True))
    found = [x for x in every if x[0] != 1 or x[2] != 0] or every
    if found[-1][1] != 1 and (last := next((x for x in reversed(found) if x[1] == 1), None)) is not None:
        found.remove(last)
        found.append(last)
    merged: list[tuple[int, IntExpr, IntExpr]] = []
    while found:
        count = next((n for n in range(1, len(found) + 1) if (one := _merged(found[:n])) and _plain(one[2])), 1)
        merged.append(_merged(found[:count]) or found[0])
        del found[:count]
    if [*merged] == every:
        return kind, index
    shape, strides, there = zip(*merged, strict=True)
    dense = strides == contiguous_strides(shape)
    return Type(kind.dtype, shape, None if dense else strides), there


def _merged(dims: list[tuple[int, IntExpr, IntExpr]]) -> tuple[int, IntExpr, IntExpr] | None:
    """Neighbouring dimensions (extent, stride, index) as one; None where there are gaps between them."""
    (extent, stride, index), *rest = dims
    for more, step, inner in rest:
        if stride != step * more:
            return None
        extent, stride, index = extent * more, step, index * more + inner
    return extent, stride, index


def _plain(e: IntExpr) -> bool:
    """Whether an index is a sum of axes, and not made of their digits."""
    return isinstance(e, int) or not any(isinstance(x, FloorDiv | Mod) for x in topological([e]))
