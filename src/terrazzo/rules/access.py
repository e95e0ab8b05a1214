"""What may be accessed at once: alignment, width and boxes, read off index expressions."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from terrazzo.ir.address import coefficient, divides, flatten, mentions
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import FloorDiv, IntExpr, Mod, Var, bounds, floordiv, mod, terms_of
from terrazzo.ir.node import per_node, substitute, topological
from terrazzo.ir.types import Type, contiguous_strides

WIDEST = 16
"""Bytes one access of a thread moves at most."""


def wide(load: l.Load, j: Any, size: int) -> bool:
    """Whether the loads for all j in [0, size) lie one behind the other, aligned, under one condition."""
    offset = flatten(load.index, load.buffer.type.element_strides)
    least = min(size, WIDEST // load.dtype.size)
    whole = all(together(e, j, size) for e in load.inside)
    return coefficient(offset, j) == 1 and divides(least, substitute(offset, {j: 0})) and whole


def before(accesses: Sequence[l.Load | l.Store], axis: Any, size: int) -> IntExpr:
    """Elements at the beginning of a row along an axis that come before a multiple of `size` elements, in most of what
    is moved along it.
    """
    moved: dict[IntExpr, int] = {}
    for x in accesses:
        at = flatten(x.index, x.buffer.type.element_strides)
        if coefficient(at, axis) == 1:
            terms = terms_of(substitute(at, {axis: 0})).items()
            rest = mod(sum((math.prod(factors, start=-c % size) for factors, c in terms), start=0), size)
            moved[rest] = moved.get(rest, 0) + x.buffer.type.dtype.size
    return max(moved, key=lambda rest: moved[rest], default=0)


def together(e: IntExpr, j: Var, size: int) -> bool:
    """Whether e >= 0 for all j in [0, size) or for none, so that j = 0 says which: e = -j + multiples of size + (size -
    1), j + multiples of size, or free of j.
    """
    c = coefficient(e, j)
    return c == 0 or (c == -1 and divides(size, e + j - (size - 1))) or (c == 1 and divides(size, e - j))


MOST_DIMENSIONS = 5
"""As many as a tensor has for TMA."""


@dataclass(frozen=True)
class Boxed:
    """A place in memory as TMA takes it: in which tensor, at which index. It is inside where all `bounds` are >= 0."""

    tensor: Type
    index: tuple[IntExpr, ...]
    bounds: tuple[IntExpr, ...]


@lru_cache(maxsize=4096)
def boxed(kind: Type, index: tuple[IntExpr, ...], sides: frozenset[Any]) -> Boxed:
    """The same place in the same memory, under another shape where that is needed: dimensions of one element are left
    out, the contiguous one comes last, and those in which the digits of one axis stand are one. One along which a side
    of boxes goes, of these axes, and that others walk in steps of c is two: every c-th element, and which of them.
    """
    dims = [_Dimension(*x) for x in zip(kind.static_shape, kind.element_strides, index, strict=True)]
    found = [x for x in dims if x.extent != 1 or x.index != 0] or dims
    if found[-1].stride != 1 and (last := next((x for x in reversed(found) if x.stride == 1), None)) is not None:
        found.remove(last)
        found.append(last)
    merged: list[_Dimension] = []
    while found:
        count = next((n for n in range(1, len(found) + 1) if (one := _merged(found[:n])) and _plain(one.index)), 1)
        merged.append(_merged(found[:count]) or found[0])
        del found[:count]
    split = [(x, _every(x, sides)) for x in merged]
    parts = [y for _, own in split for y in own]
    bounds = {y: (x.index, x.extent - 1 - x.index) for x, own in split for y in own if not y.fixed}
    for n in reversed(range(len(parts) - 1)):  # what no axis walks joins what follows it, where there are too many
        if len(parts) > MOST_DIMENSIONS and parts[n].fixed and (one := _merged(parts[n : n + 2])):
            bounds.pop(parts[n + 1], None)  # beyond its end the next one begins
            parts[n : n + 2] = [one]
    inside = tuple(e for x, own in bounds.items() for e in dict.fromkeys((*own, x.index, x.extent - 1 - x.index)))
    if parts == dims:
        return Boxed(kind, index, inside)
    shape, strides = tuple(x.extent for x in parts), tuple(x.stride for x in parts)
    dense = strides == contiguous_strides(shape)
    return Boxed(Type(kind.dtype, shape, None if dense else strides), tuple(x.index for x in parts), inside)


@dataclass(frozen=True)
class _Dimension:
    extent: int
    stride: IntExpr
    index: IntExpr
    fixed: bool = False


def _merged(dims: Sequence[_Dimension]) -> _Dimension | None:
    """Neighbouring dimensions as one; None where there are gaps between them."""
    found = dims[0]
    for x in dims[1:]:
        if found.stride != x.stride * x.extent:
            return None
        found = _Dimension(found.extent * x.extent, x.stride, found.index * x.extent + x.index)
    return found


def _every(x: _Dimension, sides: frozenset[Any]) -> list[_Dimension]:
    """A dimension that axes walk in steps of c as every c-th element, and which of them that is: what lies beyond the
    end of a side is beyond that, and reads as zeros. The dimension where no side of a box goes along it.
    """
    terms = terms_of(x.index).items()
    c = min((abs(c) for factors, c in terms if any(f in sides for f in factors)), default=1)
    if c < 2 or not any(mentions(x.index, a) for a in sides) or x.extent % c:
        return [x]
    far = _Dimension(x.extent // c, x.stride * c, floordiv(x.index, c))
    return [far, _Dimension(c, x.stride, mod(x.index, c), True)]


def _plain(e: IntExpr) -> bool:
    """Whether an index is a sum of axes, and not made of their digits."""
    return isinstance(e, int) or not any(isinstance(x, FloorDiv | Mod) for x in topological([e]))


@dataclass(frozen=True)
class Box:
    """What TMA moves at once: a box of a tensor, which is a buffer or its memory under another shape.

    `place` is where an element lies in the tensor, `sides` how long the box is along each dimension, and `along` which
    axis runs there, of those a box has parts of (None: one element). `by_axes` as in `box`.
    """

    by_axes: bool
    place: Boxed
    sides: tuple[int, ...]
    along: tuple[Any, ...]


def box(
    access: l.Load | l.Store,
    sizes: Mapping[Any, int],
    by_axes: bool | None = None,
    free: Collection[Any] = (),
    beyond: Collection[Any] = (),
) -> Box | str:
    """The box that has so many places of each of some axes, or why TMA moves no such box.

    The tensor is the buffer, as `boxed` has it, or, `by_axes`, its memory as a tensor that has a dimension for every
    axis of the access and ends where they do: what lies beyond reads as zeros, and nothing is stored there. None is for
    either, the buffer first. Where an axis walks a part of a dimension, as of a slice, the tensor ends with that.
    Boxes go beyond the end of an axis that is no multiple of theirs, and of those that are walked `beyond` it, as where
    the blocks of a cluster share its steps; of `free` axes, what lies there may be moved.
    """
    if by_axes is None:
        if not isinstance(own := box(access, sizes, False, free, beyond), str):
            return own
        return own if isinstance(other := box(access, sizes, True, free, beyond), str) else other
    place = _by_axes(access) if by_axes else boxed(access.buffer.type, access.index, frozenset(sizes))
    if place is None:
        return f"the place of {access.buffer.name}{list(access.index)} in memory is no sum of multiples of axes"
    if isinstance(access, l.Load):
        place = _ending(place, access.inside)
    sides, along, shape = [], [], list(place.tensor.static_shape)
    for d, (e, extent) in enumerate(zip(place.index, place.tensor.static_shape, strict=True)):
        mine = [a for a in sizes if mentions(e, a)]
        if len(mine) > 1 or any(coefficient(e, a) != 1 for a in mine):
            return f"TMA takes one axis with a stride of one along each dimension, not {e}"
        for a in mine:  # at most one
            end = substitute(e, {a: a.extent})
            if isinstance(end, int) and 0 < end < extent:
                shape[d] = end
            elif end != extent and a not in free and (a in beyond or a.extent % sizes[a]):
                return f"what lies beyond {a} is not beyond the tensor, and TMA would move it"
        sides.append(sizes[mine[0]] if mine else 1)
        along.append(mine[0] if mine else None)
    return Box(by_axes, _as_far_as(place, shape), tuple(sides), tuple(along))


def _as_far_as(place: Boxed, shape: Sequence[int]) -> Boxed:
    """The same place in a tensor that ends sooner."""
    if tuple(shape) == place.tensor.static_shape:
        return place
    return Boxed(Type(place.tensor.dtype, tuple(shape), place.tensor.element_strides), place.index, place.bounds)


def _ending(place: Boxed, inside: Sequence[IntExpr]) -> Boxed:
    """The same where a load has zeros from some index of a dimension on: the tensor ends there."""
    shape, bounds = list(place.tensor.static_shape), list(place.bounds)
    for e in inside:
        for d, index in enumerate(place.index):
            last = e + index
            if isinstance(last, int) and 0 <= last < shape[d] and e not in bounds:
                shape[d] = last + 1
                bounds.append(e)
    there = _as_far_as(place, shape)
    return Boxed(there.tensor, there.index, tuple(bounds))


@per_node
def _by_axes(access: l.Load | l.Store) -> Boxed | None:
    """An access's place in its memory as a tensor of the axes, or what is computed of them, that it moves along."""
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
    return Boxed(Type(access.buffer.type.dtype, tuple(shape), tuple(steps[x] for x in walked)), tuple(index), ())
