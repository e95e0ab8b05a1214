"""How many steps data leaves of a sum: those of the keys that a cache has by now, or of what is no padding; and those
of the blocks that a block of rows sees anything of.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

from terrazzo.ir.address import coefficient, mentions
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import FloorDiv, IntExpr, Loaded
from terrazzo.ir.node import Node
from terrazzo.ir.types import i64


@dataclass(frozen=True)
class Blocks:
    """What data says of blocks of an axis, of so many values: nothing is seen of those before number `first` and from
    number `last` on, and all of those of which `whole` is not 0; elsewhere what the `predicate` says.
    """

    size: int
    first: Node | None = None
    last: Node | None = None
    whole: Node | None = None
    predicate: Node | None = None

    @property
    def loads(self) -> tuple[Any, ...]:
        """What is read of blocks."""
        return tuple(x for x in (self.first, self.last, self.whole) if x is not None)


def without_blocks(x: Any, nothing: float, axis: Any) -> tuple[Any, Blocks | None]:
    """A term without what is said of blocks of an axis, and that."""
    if not isinstance(x, l.Apply) or x.fn.name != "where" or not _is(x.args[2], nothing):
        return x, None
    parts = _all(x.args[0])
    found: Blocks | None = None
    for p in parts:
        found = _block(p, axis, found) or found
    inner, other = without_blocks(x.args[1], nothing, axis)
    rest = [p for p in parts if _block(p, axis, None) is None] if found else parts
    if (found is not None and other is not None) or (found is None and other is None):
        return x, None
    made = reduce(partial(l.apply, "and_"), rest) if rest else None
    return (l.apply("where", made, inner, x.args[2]) if made is not None else inner), found or other


def _block(p: Any, axis: Any, known: Blocks | None) -> Blocks | None:
    """What a predicate says of blocks, beside what is known of them; None where it says something else."""
    if not isinstance(p, l.Apply) or p.fn.name not in ("le", "lt", "or_"):
        return None
    one, other = p.args
    if p.fn.name == "or_":
        inside: Any = one.args[0] if isinstance(one, l.Apply) and one.fn.name == "ne" and _is(one.args[1], 0) else None
        at = [e for e in inside.index if mentions(e, axis)] if isinstance(inside, l.Load) and not inside.inside else []
        size = _size(at[0], axis) if len(at) == 1 else 0
        return replace(known or Blocks(size), whole=inside, predicate=other) if size and _fits(known, size) else None
    index, load = (one, other) if p.fn.name == "lt" else (other, one)
    if not isinstance(index, l.Index) or not isinstance(load, l.Load) or load.inside or axis in load.free:
        return None
    size = _size(index.value, axis)
    if not size or not _fits(known, size):
        return None
    found = known or Blocks(size)
    return replace(found, last=load) if p.fn.name == "lt" else replace(found, first=load)


def _fits(known: Blocks | None, size: int) -> bool:
    return known is None or known.size == size


def _size(e: Any, axis: Any) -> int:
    """The values of an axis that share a quotient; 0 where that is no quotient of it."""
    return e.b if isinstance(e, FloorDiv) and e.a is axis and isinstance(e.b, int) else 0


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
