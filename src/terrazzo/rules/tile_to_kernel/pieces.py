"""Pieces of memory that a thread's points read in another order than their own: neighbours crosswise, as rotary
embeddings and complex numbers do, backwards, or several points the same element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.ir.address import divides, flatten, mentions
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Var, mod, terms_of
from terrazzo.ir.node import substitute
from terrazzo.rules.access import WIDEST


@dataclass(frozen=True)
class Piece:
    """`count` elements from index `at` of a buffer on, where all `inside` are >= 0: all are read by points of a thread.
    `loads` are those of its points, each with the place of its element for a point, and what must be >= 0 there.
    """

    buffer: l.Buffer
    at: tuple[IntExpr, ...]
    count: int
    inside: tuple[IntExpr, ...]
    loads: tuple[tuple[Any, IntExpr, tuple[IntExpr, ...]], ...]


@dataclass(frozen=True)
class _Read:
    """A load by points: where each that reads at all is from `base` on, and what its index is."""

    load: Any
    found: l.Load
    base: IntExpr
    places: dict[int, int]
    indices: dict[int, tuple[IntExpr, ...]]
    inside: tuple[IntExpr, ...]


def pieces(loads: Sequence[tuple[Any, l.Load]], j: Var, size: int) -> list[Piece]:
    """The pieces that loads of the points j in [0, size) read: in x[j // 2 * 2 + 1] and x[j // 2 * 2] it is
    x[0] to x[size - 1].

    A piece has no gaps, is aligned as one access wants it, and is read under one condition.
    """
    together: dict[Any, list[_Read]] = {}
    for load, found in loads:
        if (read := _read(load, found, j, size)) is not None:
            together.setdefault((found.buffer, read.base, read.inside), []).append(read)
    return [p for (_, base, inside), reads in together.items() if (p := _piece(base, inside, reads, j)) is not None]


def _read(load: Any, found: l.Load, j: Var, size: int) -> _Read | None:
    """A load whose points differ by constants; None for others, and where all read one element."""
    place = flatten(found.index, found.buffer.type.element_strides)
    base: IntExpr | None = None
    places, indices, conditions = {}, {}, set()
    for p in range(size):
        tested = [substitute(e, {j: p}) for e in found.inside]
        if any(isinstance(e, int) and e < 0 for e in tested):
            continue
        conditions.add(tuple(e for e in tested if not isinstance(e, int)))
        at = substitute(place, {j: p})
        constant = terms_of(at).get((), 0)
        base = at - constant if base is None else base
        if at - constant != base:
            return None
        places[p], indices[p] = constant, tuple(substitute(i, {j: p}) for i in found.index)
    if base is None or len(conditions) != 1 or len({*places.values()}) < 2:
        return None
    return _Read(load, found, base, places, indices, conditions.pop())


def _piece(base: IntExpr, inside: tuple[IntExpr, ...], reads: Sequence[_Read], j: Var) -> Piece | None:
    read = {place: x.indices[p] for x in reads for p, place in x.places.items()}
    first, count, buffer = min(read), len(read), reads[0].found.buffer
    whole = max(read) - first + 1 == count and not count & (count - 1)
    if not whole or not divides(min(count, WIDEST // buffer.type.dtype.size), base + first):
        return None
    loads = []
    for x in reads:
        own = flatten(x.found.index, buffer.type.element_strides) - (base + first)
        if isinstance(own, int) or own.free != frozenset((j,)):
            return None
        own = mod(own, count)  # no other place even where a point reads nothing
        loads.append((x.load, own, tuple(e for e in x.found.inside if mentions(e, j))))
    return Piece(buffer, read[first], count, inside, tuple(loads))
