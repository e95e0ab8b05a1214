"""How many steps data leaves of a sum: those of the keys that a cache has by now, or of what is no padding."""

from __future__ import annotations

from typing import Any

from terrazzo.ir.address import coefficient, mentions
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import FloorDiv, IntExpr, Loaded
from terrazzo.ir.node import Node
from terrazzo.ir.types import i64


def length(score: Node, nothing: float, axis: Any, rows: Any) -> Node | None:
    """The number of values of `axis` from 0 on that may be anything but `nothing`, where a mask compares places with a
    number that lies in memory, the same for all rows; between 0 and all of them. None where there is no such mask.
    """
    found: list[Any] = [n for p in _predicates(score, nothing) if (n := _before(p, axis, rows)) is not None]
    if not found:
        return None
    least = found[0]
    for n in found[1:]:
        least = l.apply("min", least, n)
    none, most = (l.Literal(n, i64) for n in (0, axis.extent))
    return l.apply("min", l.apply("max", least, none), most)


def steps_of(length: Node, extent: int, step: int) -> IntExpr:
    """How many steps so many values of an axis of that extent are."""
    many: IntExpr = (Loaded(length, extent + 1) + (step - 1)) // step
    return many


def _predicates(x: Any, nothing: float) -> list[Any]:
    """What holds wherever a score is anything."""
    if not isinstance(x, l.Apply):
        return []
    if x.fn.name == "where" and _is(x.args[2], nothing):
        return [*_all(x.args[0]), *_predicates(x.args[1], nothing)]
    if x.fn.name == "add":
        return [p for a in x.args for p in _predicates(a, nothing)]
    return []


def _all(x: Any) -> list[Any]:
    return [p for a in x.args for p in _all(a)] if isinstance(x, l.Apply) and x.fn.name == "and_" else [x]


def _before(p: Any, axis: Any, rows: Any) -> Node | None:
    """The value that `axis` stays below where a predicate holds; None where that is another kind of predicate."""
    if not isinstance(p, l.Apply) or p.fn.name not in ("lt", "le", "gt", "ge"):
        return None
    small, large = p.args if p.fn.name in ("lt", "le") else p.args[::-1]
    if not isinstance(small, l.Index) or coefficient(small.value, axis) != 1 or isinstance(large, l.Index | l.Literal):
        return None
    kind: Any = large.dtype  # type: ignore[attr-defined]
    rest: IntExpr = small.value - axis
    if kind.is_float or {axis, rows} & large.free or mentions(rest, rows) or isinstance(rest, FloorDiv):
        return None
    wide: Any = large if kind is i64 else l.apply("i64", large)
    bound: Any = l.apply("sub", wide, l.Index(rest)) if rest != 0 else wide
    return bound if p.fn.name in ("lt", "gt") else l.apply("add", bound, l.Literal(1, i64))


def _is(x: Any, value: float) -> bool:
    return isinstance(x, l.Literal) and not isinstance(x.value, bool) and x.value == value
