"""Axes in pieces: where an index turns around or begins again, or leaves its tensor, one loop ends and another begins.

A roll, a reflected or a constant border, a repetition and tensors one behind the other are copies between a few places,
and everything that is asked or divided on the way is known on each piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from terrazzo.ir.address import evaluate, flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, FloorDiv, IntExpr, Loaded, Mod, Var, at_most
from terrazzo.ir.node import Node, topological, transform
from terrazzo.rules.loop.folding.fold import folding, place
from terrazzo.targets.cpu.runs import zero

MOST = 16
"""Pieces of an axis at most."""
LONGEST = 1 << 20
"""Indices of an axis at most: what changes along it is found by looking at each."""
SHORTEST = 8
"""Indices of an axis at least."""
WORTH = 64
"""Points of a piece of an outer axis, at least: each is a nest of its own."""
PAIR = 4
"""Points of a last axis, at most, that are stored one by one."""
SHORT = 16
"""Indices of a piece, in the mean, at least where an index begins again: dividing costs less than a loop for each few.
"""


@dataclass(frozen=True)
class Change:
    """An index expression, what changes with it, and how many indices a piece has in the mean, at least."""

    of: IntExpr
    into: Callable[[Any], Any]
    least: int = 1


def apart(kernel: l.Kernel) -> list[l.Kernel]:
    """A kernel that goes point by point as several, one behind the other, where conditions on an axis that is not its
    last choose between what is read. Where they choose along a short last one, such as both parts of a complex number,
    each of its points is a store of its own.
    """
    if any(isinstance(x, l.Reduce | l.Scan) for x in topological(kernel.stores)):
        return [kernel]
    outer, last = kernel.axes[:-1], kernel.axes[-1] if kernel.axes else None
    if last and (few := _short_digit(kernel.stores, last)):
        parts = Var(l.fresh_name(), last.extent // few), Var(l.fresh_name(), few)
        divided = known(kernel.stores, last, parts[0] * few + parts[1], ())
        return apart(l.Kernel(kernel.name, (*outer, *parts), divided, kernel.source))
    if outer and last and isinstance(last.extent, int) and last.extent <= PAIR and _chosen_along(kernel.stores, last):
        stores = [s for k in range(last.extent) for s in known(kernel.stores, last, k, ())]
        return apart(l.Kernel(kernel.name, outer, tuple(stores), kernel.source))
    for n, axis in enumerate(kernel.axes[:-1]):
        inner = math.prod(a.extent if isinstance(a.extent, int) else 1 for a in kernel.axes[n + 1 :])
        if inner >= WORTH and (found := in_pieces(kernel.stores, axis, (), conditions)):
            made = [
                l.Kernel(kernel.name, tuple(piece if a is axis else a for a in kernel.axes), stores, kernel.source)
                for piece, stores in found
            ]
            return [x for k in made for x in apart(k)]
    return [kernel]


def _short_digit(stores: Sequence[l.Store], axis: Any) -> int:
    """The extent of a short last digit of an axis, if conditions on it choose; or 0: both parts of complex numbers, as
    a row of twice as many.
    """
    asked = [change.of for x in topological(stores) for change in conditions(x)]
    digits = {y.b for y in topological([e for e in asked if isinstance(e, Expr)]) if isinstance(y, Mod) and y.a is axis}
    few = digits.pop() if len(digits) == 1 else 0
    short = isinstance(few, int) and isinstance(axis.extent, int) and few <= PAIR
    return few if short and few and axis.extent > few and axis.extent % few == 0 else 0  # type: ignore[return-value]


def _chosen_along(stores: Sequence[l.Store], axis: Any) -> bool:
    """Whether conditions on an axis choose, and all is stored along it."""
    asked = [change.of for x in topological(stores) for change in conditions(x)]
    along = all(any(isinstance(e, Expr) and axis in e.free for e in s.index) for s in stores)
    return along and any(isinstance(e, Expr) and axis in e.free for e in asked)


def in_pieces(
    stores: Sequence[l.Store],
    axis: Any,
    named: Container[Node],
    of: Callable[[Node], Iterator[Change]],
) -> list[tuple[Var, tuple[l.Store, ...]]]:
    """The pieces of an axis, each with the stores along it, in order; nothing where there is one piece, or there are
    too many. `of` gives what changes between pieces; what is `named` stays as it is.
    """
    if not isinstance(axis.extent, int) or not SHORTEST <= axis.extent <= LONGEST:
        return []
    rest, done = [(axis, tuple(stores))], []
    while rest:
        piece, along = rest.pop(0)
        ends = [0, *_cuts(along, piece, named, of), piece.extent]
        if len(ends) == 2:
            done.append((piece, along))
            continue
        cut = []
        for low, high in pairwise(ends):
            new = Var(l.fresh_name(), high - low)
            cut.append((new, known(along, piece, new + low, named)))
        rest = [*cut, *rest]
        if len(done) + len(rest) > MOST:
            return []
    return done if len(done) > 1 else []


def _cuts(stores: Sequence[l.Store], axis: Any, named: Any, of: Any) -> list[int]:
    """The values of an axis at which something changes that depends on it alone; of what changes too often, none."""
    found: set[int] = set()
    for x in topological(stores, stop=named.__contains__):
        for change in of(x):
            if isinstance(change.of, Expr) and change.of.free == {axis} and not _from_data(change.of):
                values = change.into(evaluate(change.of, {axis: np.arange(axis.extent)}))
                ends = (np.flatnonzero(np.diff(values)) + 1).tolist()
                few = len(ends) < MOST and (len(ends) + 1) * change.least <= axis.extent
                found |= set(ends) if few else set()
    return sorted(found) if len(found) < MOST else []


def _from_data(e: Expr) -> bool:
    """Whether it is known only when the program runs, at whatever index."""
    return any(isinstance(y, Loaded) for y in topological([e]))


def conditions(x: Node) -> Iterator[Change]:
    """What a node asks of places."""
    if isinstance(x, l.Load):
        yield from (Change(e, lambda value: value >= 0) for e in x.inside)
    if isinstance(x, l.Apply) and x.fn.name in ASKED and len(x.args) == 2:
        both = [place(a) for a in x.args]
        if None not in both:
            yield Change(both[0] - both[1], ASKED[x.fn.name])  # type: ignore[operator]


def changes(x: Node) -> Iterator[Change]:
    """The same, and where it turns or begins again."""
    yield from conditions(x)
    for part in topological(_places(x)):
        if isinstance(part, FloorDiv | Mod) and isinstance(part.b, int):
            yield Change(part.a, _quotient(part.b), SHORT)
    if isinstance(x, l.Apply) and x.fn.name == "abs" and (e := place(x.args[0])) is not None:
        yield Change(e, lambda value: value >= 0)


def _quotient(by: int) -> Callable[[Any], Any]:
    return lambda value: value // by


def _places(x: Node) -> list[Expr]:
    """The places that a node computes: of an element of a tensor, how far it is from the first."""
    found: list[IntExpr] = [x.value] if isinstance(x, l.Index) else []
    if isinstance(x, l.Load | l.Store):
        found.append(flatten(x.index, x.buffer.type.element_strides))
    return [e for e in found if isinstance(e, Expr)]


ASKED: dict[str, Callable[[Any], Any]] = {
    "lt": lambda d: d >= 0, "ge": lambda d: d >= 0, "le": lambda d: d > 0, "gt": lambda d: d > 0,
    "eq": np.sign, "ne": np.sign, "min": lambda d: d >= 0, "max": lambda d: d >= 0,
}  # fmt: skip
"""What of the difference of two places tells a function of them."""


def known(stores: Sequence[l.Store], axis: Any, at: IntExpr, named: Any) -> tuple[l.Store, ...]:
    """Stores at a part of an axis, with what is known there."""

    def visit(x: Any) -> Any:
        if isinstance(x, l.Load) and any(at_most(e, -1) for e in x.inside):
            return l.Literal(zero(x), x.dtype)
        return folding(x)

    memo: dict[Node, Any] = {axis: at}
    for x in topological(stores, stop=named.__contains__):
        if x in named:
            memo[x] = x
    return tuple(transform(s, visit, memo) for s in stores)
