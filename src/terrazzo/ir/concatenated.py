"""Operands that are one tensor after the other along an axis, as concatenation makes them: each step of a product that
goes along this axis needs one of the tensors only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import Node, per_node
from terrazzo.ir.types import i64


@dataclass(frozen=True)
class Piece:
    """What an operand is from point `first` of `axis` on, and before `end`."""

    axis: Any
    first: int
    end: int
    load: l.Load


@per_node
def concatenated(term: Node) -> tuple[Piece, ...]:
    """The pieces of a term that is several loads one after the other, each from where another ends; none where it is
    anything else. It is written `where(r < 4096, x[..., r], y[..., r - 4096])`, and for more of them either may be such
    a term itself.
    """
    if not isinstance(term, l.Apply) or term.fn.name != "where" or (found := _border(term.args[0])) is None:
        return ()
    axis, border = found
    sides = [concatenated(x) or _whole(x, axis) for x in term.args[1:]]
    if not all(sides) or any(x.axis is not axis for side in sides for x in side):
        return ()
    before = [Piece(axis, x.first, min(x.end, border), x.load) for x in sides[0]]
    behind = [Piece(axis, max(x.first, border), x.end, x.load) for x in sides[1]]
    return tuple(x for x in (*before, *behind) if x.first < x.end)


def _border(test: Any) -> tuple[Any, int] | None:
    """An axis, and where on it something ends; None where a condition says anything else."""
    match test:
        case l.Apply(fn=fn, args=(l.Index(value=axis), l.Literal(value=int() as end))) if fn.name == "lt":
            return (axis, end) if isinstance(getattr(axis, "extent", None), int) else None
    return None


def _whole(x: Any, axis: Any) -> tuple[Piece, ...]:
    return (Piece(axis, 0, axis.extent, x),) if isinstance(x, l.Load) else ()


def loaded(term: Node) -> list[l.Load]:
    """The loads that a term is, one after the other; none where it is anything else."""
    return [term] if isinstance(term, l.Load) else [x.load for x in concatenated(term)]


def after_one_another(loads: list[l.Load], axis: Any, borders: list[int]) -> Node:
    """The term that is one load after the other: each begins at one of the `borders` of an axis, the first at 0."""
    rest: Node = loads[-1]
    for load, end in zip(loads[-2::-1], borders[:0:-1], strict=True):
        rest = l.apply("where", l.apply("lt", l.Index(axis), l.Literal(end, i64)), load, rest)
    return rest
