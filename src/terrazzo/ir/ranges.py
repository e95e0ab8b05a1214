"""What whole numbers a term may be: a place that is limited on its way to an index needs no test there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import IntExpr, bounds
from terrazzo.ir.node import Node, topological

Span = tuple[int, int]
"""The least and the largest value."""


def span(term: Any, known: Mapping[Node, Span]) -> Span:
    """What a term of whole numbers may be, given what terms in it may be. What leaves its type wraps around, so it may
    be anything then.
    """
    found = dict(known)
    for x in topological([term], stop=lambda n: n in found or not isinstance(n, l.Apply)):
        if x not in found and isinstance(x, l.Term) and x.dtype.is_integer:
            found[x] = _of(x, found)
    return found[term]


def _of(x: Any, found: Mapping[Node, Span]) -> Span:
    """The same, where what is known of its arguments is found."""
    whole = int(x.dtype.lowest), int(x.dtype.highest)
    match x:
        case l.Literal():
            return int(x.value), int(x.value)
        case l.Index():
            low, high = bounds(x.value)
            return (low, high) if low is not None and high is not None else whole
        case l.Apply() if all(a in found for a in _numbers(x)):
            low, high = _applied(x, [found[a] for a in _numbers(x)], whole)
            return (low, high) if whole[0] <= low <= high <= whole[1] else whole
    return whole


def stays(x: Any, extent: IntExpr, known: Mapping[Node, Span]) -> bool:
    """Whether a term of whole numbers lies in [0, extent), whatever data is."""
    (low, high), least = span(x, known), bounds(extent)[0]
    return least is not None and 0 <= low and high < least


def _numbers(x: l.Apply) -> tuple[Any, ...]:
    """The arguments that a result is made of: not the condition it is chosen by."""
    return x.args[1:] if x.fn.name == "where" else x.args


def _applied(x: l.Apply, given: list[Span], whole: Span) -> Span:
    if is_cast(x.fn):
        return given[0]
    match x.fn.name, given:
        case "add", [(a, b), (c, d)]:
            return a + c, b + d
        case "sub", [(a, b), (c, d)]:
            return a - d, b - c
        case "shr", [(a, b), (c, d)] if 0 <= a and 0 <= c:
            return a >> d, b >> c
        case "min" | "max", [(a, b), (c, d)]:
            choose = min if x.fn.name == "min" else max
            return choose(a, c), choose(b, d)
        case "where", [(a, b), (c, d)]:
            return min(a, c), max(b, d)
    return whole
