"""What may be accessed at once: alignment, width and boxes, read off index expressions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from terrazzo.ir.address import coefficient, flatten, mentions
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Var, bounds, terms_of
from terrazzo.ir.node import substitute
from terrazzo.ir.types import Type

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



@dataclass(frozen=True)
class Box:
    """What TMA moves at once: a box of a tensor, which is a buffer or its memory under another shape.

    `index` is where an element lies in the tensor, `sides` how long the box is along each dimension, and `along` which
    axis runs there, of those a box has parts of (None: one element). `by_axes` as in `box`.
    """

    by_axes: bool
    tensor: Type
    index: tuple[IntExpr, ...]
    sides: tuple[int, ...]
    along: tuple[Any, ...]


def box(access: l.Load | l.Store, sizes: Mapping[Any, int], by_axes: bool | None = None) -> Box | str:
    """The box that has so many places of each of some axes, or why TMA moves no such box.

    The tensor is the buffer itself or, `by_axes`, its memory as a tensor that has a dimension for every axis of the
    access and ends where they do: what lies beyond reads as zeros, and nothing is stored there. None is for either, the
    buffer first.
    """
    if by_axes is None:
        own, other = box(access, sizes, False), box(access, sizes, True)
        return own if isinstance(other, str) or not isinstance(own, str) else other
    found = _by_axes(access) if by_axes else (access.buffer.type, access.index)
    if found is None:
        return f"the place of {access.buffer.name}{list(access.index)} in memory is no sum of multiples of axes"
    tensor, index = found
    sides, along = [], []
    for e, extent in zip(index, tensor.static_shape, strict=True):
        mine = [a for a in sizes if mentions(e, a)]
        if len(mine) > 1 or any(coefficient(e, a) != 1 for a in mine):
            return f"TMA takes one axis with a stride of one along each dimension, not {e}"
        for a in mine:  # at most one
            if a.extent % sizes[a] and substitute(e, {a: a.extent}) != extent:
                return f"what lies beyond {a} is not beyond the tensor, and TMA would move it"
        sides.append(sizes[mine[0]] if mine else 1)
        along.append(mine[0] if mine else None)
    return Box(by_axes, tensor, index, tuple(sides), tuple(along))


def _by_axes(access: l.Load | l.Store) -> tuple[Type, tuple[IntExpr, ...]] | None:
    """The memory of an access as a tensor of the axes (or what is computed of them) that it moves along, and the index
    there.
    """
    steps: dict[Any, int] = {}
    rest = 0
    for factors, step in terms_of(flatten(access.index, access.buffer.type.element_strides)).items():
        if len(factors) > 1 or step < 0 or any(not isinstance(bounds(x)[1], int) for x in factors):
            return None
        if factors:
            steps[factors[0]] = step
        else:
            rest = step
    shape, index = [], []
    walked = sorted(steps, key=lambda x: (-steps[x], str(x)))
    for x in walked:  # a constant says where boxes begin along the dimensions it reaches
        begin, rest = divmod(rest, steps[x])
        shape.append(begin + bounds(x)[1] + 1)  # type: ignore[operator]
        index.append(x + begin)
    return Type(access.buffer.type.dtype, tuple(shape), tuple(steps[x] for x in walked)), tuple(index)
