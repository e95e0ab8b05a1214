"""What is taken only where a place is a multiple of a number is read as if it always were one.

Every other row of a grid is written so: by slices with a step, whose rows are found by a division. Who reads the row of
the same number instead reads what it reads anyway for the others, and each element at its own place only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from terrazzo.ir.address import coefficient
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, FloorDiv, IntExpr, Mod, at_least
from terrazzo.ir.node import topological, transform


def where_taken(x: Any, condition: Any, holding: Callable[[Any], Collection[IntExpr]]) -> Any:
    """A term that is taken where a condition holds, its loads simpler by what is known there: (i // 2) * 2 is i where
    i % 2 is 0, and guards that say what the condition does are none. All of them are in range elsewhere, too: a load is
    made whatever the condition is. `holding` tells what is >= 0 where a comparison holds.
    """
    told = together(condition)
    known = [e for y in told if (e := _remainder(y)) is not None]
    if not known or any(isinstance(y, l.Reduce | l.Scan) for y in topological([x])):
        return x
    positive = {e for y in told for e in holding(y)}

    def simpler(y: Any) -> Any:
        if not isinstance(y, l.Load):
            return y
        index = tuple(_whole(e, known) for e in y.index)
        inside = tuple(e for e in y.inside if e not in positive)
        within = zip(index, y.buffer.type.shape, strict=True)
        if not all(at_least(e, 0) and at_least(n - 1 - e, 0) for e, n in within):
            return y
        return l.Load(y.buffer, index, inside)

    return transform(x, simpler)


def together(condition: Any) -> list[Any]:
    """The conditions that hold where one does."""
    if isinstance(condition, l.Apply) and condition.fn.name == "and_":
        return [y for a in condition.args for y in together(a)]
    return [condition]


def _remainder(x: Any) -> Mod | None:
    """The remainder that is 0 where a condition holds, if that is all it says."""
    if not isinstance(x, l.Apply) or x.fn.name != "eq":
        return None
    for one, other in (x.args, x.args[::-1]):
        zero = isinstance(other, l.Literal) and other.value == 0
        if zero and isinstance(one, l.Index) and isinstance(one.value, Mod) and isinstance(one.value.b, int):
            return one.value
    return None


def _whole(e: IntExpr, known: list[Mod]) -> IntExpr:
    """An index where these remainders are 0."""
    for m in known:
        for q in topological([e]) if isinstance(e, Expr) else []:
            if not isinstance(q, FloorDiv) or q.a is not m.a or q.b != m.b or not isinstance(q.b, int):
                continue
            c = coefficient(e, q)
            if isinstance(c, int) and c % q.b == 0:
                e = e - c * q + (c // q.b) * m.a
    return e
