"""What several loops have in common in the places they name: a window over a row is read once, however many of its
points lie under it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from terrazzo.ir.address import coefficient, mentions
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr, bounds, terms_of
from terrazzo.ir.node import topological


@dataclass(frozen=True)
class Move:
    """A direction in which loops move places. Variable v of `loops` moves them by c of its `steps`; a step adds so
    much to every index.
    """

    loops: tuple[tuple[Any, int, int], ...]
    steps: tuple[int, ...]

    @property
    def extent(self) -> int:
        """How many places there are in this direction, those that no loop meets included."""
        return 1 + sum(abs(c) * (size - 1) for _, size, c in self.loops)

    @property
    def first(self) -> int:
        """The number of steps from the first place to where all variables are 0."""
        return sum(-c * (size - 1) for _, size, c in self.loops if c < 0)

    @property
    def place(self) -> IntExpr:
        """The number of the place that the loops are at."""
        total: IntExpr = self.first
        for v, _, c in self.loops:
            total = total + v * c
        return total


def meeting(loads: Iterable[l.Load], axes: Collection[Any], steps: Collection[Any]) -> tuple[int, int]:
    """How many points there are of axes, and of steps, that meet in a dimension: windows over the points of an image
    have fewer steps, and a sum over its points under the taps of a filter has more; (1, 1) where none meet.
    """
    places = [e for x in loads for e in x.index if isinstance(e, Expr) and e.free & {*axes} and e.free & {*steps}]
    met = {f for e in places for factors in terms_of(e) for f in factors if isinstance(f, Expr)}

    def points(some: Collection[Any]) -> int:
        """Of the axes, or of their digits, as those of pixels that were shuffled among channels."""
        return math.prod(_values(f) for f in met if f.free & {*some})

    return points(axes), points(steps)


MANY = 1 << 20
"""Values of an axis of unknown size."""


def _values(e: Expr) -> int:
    """How many values an axis has, or a digit of one."""
    low, high = bounds(e)
    return high - low + 1 if isinstance(low, int) and isinstance(high, int) else MANY


def moves(indices: Sequence[IntExpr], loops: Sequence[tuple[Any, int]]) -> tuple[Move, ...] | None:
    """The directions in which loops, variables with their sizes, move places; None where one moves them in no even
    steps.
    """
    found: dict[tuple[int, ...], list[tuple[Any, int, int]]] = {}
    for v, size in loops:
        steps = _steps(tuple(indices), v)
        if steps is None:
            return None
        if any(steps):
            c = math.gcd(*steps) * (1 if next(filter(None, steps)) > 0 else -1)
            found.setdefault(tuple(s // c for s in steps), []).append((v, size, c))
    out = []
    for one, along in found.items():
        least = math.gcd(*(c for *_, c in along))
        out.append(Move(tuple((v, size, c // least) for v, size, c in along), tuple(s * least for s in one)))
    return tuple(out)


def slides(r: l.Reduce) -> bool:
    """Whether the places that a reduction reads move with its steps and with points of its result along one dimension,
    and points share some, or lie beside each other along several dimensions, as those of pooling: they are a window.
    A row that lies among others in one dimension, as that of a head, is none.
    """
    return any(any(moved) or len(moved) > 1 for moved in _windows(r))


def overlaps(r: l.Reduce) -> bool:
    """Whether the windows of a reduction have places in common, or may have: not those of a pooling that steps over its
    whole window.
    """
    return any(map(any, _windows(r)))


def _windows(r: l.Reduce) -> Iterator[list[bool]]:
    """For each load of a reduction: whether points share places, of every dimension that steps and points move."""
    for x in topological(r.args):
        if isinstance(x, l.Load):
            moved = (_moved(e, r.axes) for e in x.index if isinstance(e, Expr))
            yield [shared for shared in moved if shared is not None]


def _moved(e: Expr, steps: Sequence[Any]) -> bool | None:
    """Whether neighbouring points share places along a dimension that steps run over, or may; None where points do not
    move these places.
    """
    span, apart = 1, 0
    for factors, c in terms_of(e).items():
        if not any(mentions(f, a) for f in factors for a in steps):
            apart = math.gcd(apart, c) if factors else apart
            continue
        low, high = bounds(factors[0]) if len(factors) == 1 and factors[0].free <= {*steps} else (None, None)
        if low is None or high is None:
            return True if e.free - frozenset(steps) else None
        span += abs(c) * (high - low)  # of an axis, or of a digit of one, as of steps over rows and columns
    return apart < span if apart and span > 1 else None


@lru_cache(maxsize=4096)
def _steps(indices: tuple[IntExpr, ...], v: Any) -> tuple[int, ...] | None:
    """What a variable adds to every index with each of its steps."""
    found = tuple(coefficient(e, v) for e in indices)
    return found if all(isinstance(s, int) for s in found) else None  # type: ignore[return-value]
