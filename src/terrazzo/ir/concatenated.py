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
    anything else. It is written `where(r < 4096, x[..., r], y[..., r - 4096])`.
    """
    found: list[Piece] = []
    rest: Any = term
    first, axis = 0, None
    while isinstance(rest, l.Apply) and rest.fn.name == "where":
        test, load, rest = rest.args
        border = _border(test)
        if border is None or not isinstance(load, l.Load) or (axis is not None and border[0] is not axis):
            return ()
        axis, end = border
        if not first < end < axis.extent:
            return ()
        found.append(Piece(axis, first, end, load))
        first = end
    if not found or not isinstance(rest, l.Load):
        return ()
    return (*found, Piece(axis, first, axis.extent, rest))


def loaded(term: Node) -> list[l.Load]:
    """The loads that a term is, one after the other; none where it is anything else."""
    return [term] if isinstance(term, l.Load) else [x.load for x in concatenated(term)]


def _border(test: Any) -> tuple[Any, int] | None:
    """An axis, and where on it something ends; None where a condition says anything else."""
    match test:
        case l.Apply(fn=fn, args=(l.Index(value=axis), l.Literal(value=int() as end))) if fn.name == "lt":
            return (axis, end) if isinstance(getattr(axis, "extent", None), int) else None
    return None


def after_one_another(loads: list[l.Load], axis: Any, borders: list[int]) -> Node:
    """The term that is one load after the other: each begins at one of the `borders` of an axis, the first at 0."""
    rest: Node = loads[-1]
    for load, end in zip(loads[-2::-1], borders[:0:-1], strict=True):
        rest = l.apply("where", l.apply("lt", l.Index(axis), l.Literal(end, i64)), load, rest)
    return rest
