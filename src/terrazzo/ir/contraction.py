"""Contractions, recognised from the loops: sums of products in which each factor misses a variable of the other.

Matrix products, batched ones, matrix times vector and convolutions are all of this form; which torch op they came from
is never asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from terrazzo.ir.dialects.loop import Apply, Reduce, Scan
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.node import Node, topological


@dataclass(frozen=True)
class Contraction:
    """sum over `reduce.axes` of factors[0] * factors[1]."""

    reduce: Reduce
    factors: tuple[Node, Node]


def contraction(reduce: Reduce) -> Contraction | None:
    """The reduction as a contraction, or None: a sum of products, where some variable occurs in one factor only."""
    if reduce.monoid.name != "sum" or not isinstance(reduce.args[0], Apply) or reduce.args[0].fn.name != "mul":
        return None
    a, b = reduce.args[0].args
    axes = frozenset(reduce.axes)
    if not (a.free & axes and b.free & axes) or a.free - axes == b.free - axes:
        return None
    if any(isinstance(n, (Reduce, Scan)) for n in topological([a, b])):
        return None
    return Contraction(reduce, (a, b))


def operand(factor: Node) -> Node:
    """A factor without the conversions that only widen it: what lies in memory."""
    while isinstance(factor, Apply) and is_cast(factor.fn) and _size(factor.args[0]) < _size(factor):
        factor = factor.args[0]
    return factor


def _size(x: Any) -> int:
    return int(x.dtype.size)
