"""Between which numbers values lie, as far as that follows from indices and constants: a place that is limited on its
way to an index needs no test there.

Rounding is monotone, so ends of ranges round as values between them do; since compilers may round a multiply-add once
or twice, ranges of sums and products of floats are two units in the last place wider. What may be NaN has no range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import IntExpr, bounds
from terrazzo.ir.node import Node, per_node, topological
from terrazzo.ir.types import DType

Range = tuple[Any, Any]
"""The least and the greatest value: whole numbers for whole numbers, floats for floats, perhaps infinite."""


@per_node
def range_of(x: Any) -> Range | None:
    """The range of a term of Loop IR; None where nothing is known."""
    return reach(x, range_of)


def span(term: Any, known: Mapping[Node, Range]) -> Range | None:
    """The range of a term, given those of some in it."""
    found: dict[Node, Range | None] = {}
    for x in topological([term], stop=lambda n: n in known or not isinstance(n, l.Apply)):
        found[x] = known[x] if x in known else reach(x, found.get)
    return found[term]


def stays(x: Any, extent: IntExpr, known: Mapping[Node, Range]) -> bool:
    """Whether a whole number lies in [0, extent), whatever data is."""
    least, found = bounds(extent)[0], span(x, known)
    return least is not None and found is not None and found[0] >= 0 and bool(found[1] < least)


def reach(x: Any, of: Callable[[Node], Range | None]) -> Range | None:
    """The range of a term, given those of its operands."""
    match x:
        case l.Index():
            low, high = bounds(x.value)
            return None if low is None or high is None else (low, high)
        case l.Literal():
            return (x.value, x.value) if _counts(x.type) and math.isfinite(x.value) else None
        case l.Apply() if _counts(x.dtype):
            found = _applied(x, [of(a) for a in x.args])
            return found if found is not None or x.dtype.is_float else (x.dtype.lowest, x.dtype.highest)
        case l.Load() if x.dtype.is_integer:
            return x.dtype.lowest, x.dtype.highest
    return None


def decided(x: l.Apply, of: Callable[[Node], Range | None]) -> bool | None:
    """What a comparison gives wherever its operands are in their ranges; None where both may be."""
    if x.fn.name not in _COMPARED or None in (both := [of(a) for a in x.args]):
        return None
    (low, high), (least, most) = both  # type: ignore[misc]
    holds, fails = _COMPARED[x.fn.name](low, high, least, most)
    return True if holds else False if fails else None


_COMPARED: dict[str, Callable[..., tuple[bool, bool]]] = {
    "lt": lambda a, b, c, d: (b < c, a >= d),
    "le": lambda a, b, c, d: (b <= c, a > d),
    "gt": lambda a, b, c, d: (a > d, b <= c),
    "ge": lambda a, b, c, d: (a >= d, b < c),
    "eq": lambda a, b, c, d: (a == b == c == d, b < c or a > d),
    "ne": lambda a, b, c, d: (b < c or a > d, a == b == c == d),
}
"""Whether a comparison of numbers in [a, b] with numbers in [c, d] holds, and whether it fails."""
_ROUNDED = {"floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "round": np.rint}


def _counts(dtype: DType) -> bool:
    """Whether the values of a type have ranges: those of 16 bits do not compute."""
    return dtype.is_integer or dtype.name in ("f32", "f64")


def _applied(x: l.Apply, args: list[Range | None]) -> Range | None:
    name = x.fn.name
    if name == "where":
        return _united(args[1], args[2])
    if name in ("min", "max", "fmin", "fmax"):
        return _limited(x, name[-3:], args[0], args[1])
    if None in args:
        return None
    known: Any = args
    if is_cast(x.fn):
        return _converted(x, *known[0])
    if name in ("add", "sub", "mul", "rounded_mul", "div"):
        return _computed(x, name, *known)
    low, high = known[0]
    if name == "shr" and low >= 0 and known[1][0] >= 0:
        return low >> known[1][1], high >> known[1][0]
    if name in _ROUNDED:
        return float(_ROUNDED[name](low)), float(_ROUNDED[name](high))
    if name not in ("neg", "abs"):
        return None
    ends = (-high, -low) if name == "neg" or high <= 0 else (low, high) if low >= 0 else (low * 0, max(-low, high))
    return ends if x.dtype.is_float else _in_type(x, *ends)


def _united(a: Range | None, b: Range | None) -> Range | None:
    return None if a is None or b is None else (min(a[0], b[0]), max(a[1], b[1]))


def _limited(x: l.Apply, name: str, a: Range | None, b: Range | None) -> Range | None:
    """A minimum or maximum with what is not known is limited on one side, unless that may be NaN and counts then."""
    if (a is None or b is None) and x.dtype.is_float and not x.fn.name.startswith("f"):
        return None
    ends = (-math.inf, math.inf) if x.dtype.is_float else (x.dtype.lowest, x.dtype.highest)
    if a is None and b is None:
        return None
    (low, high), (least, most) = a or ends, b or ends
    return (min(low, least), min(high, most)) if name == "min" else (max(low, least), max(high, most))


def _converted(x: l.Apply, low: Any, high: Any) -> Range | None:
    """In another type: towards zero from floats to whole numbers, to the nearest float otherwise."""
    if x.dtype.is_float:
        kind = x.dtype.numpy.type
        with np.errstate(over="ignore"):
            return float(kind(low)), float(kind(high))
    return _in_type(x, math.trunc(low), math.trunc(high)) if math.isfinite(low) and math.isfinite(high) else None


def _in_type(x: l.Apply, low: int, high: int) -> Range | None:
    """Whole numbers wrap around where they leave their type, so nothing is known of them."""
    return (low, high) if x.dtype.lowest <= low and high <= x.dtype.highest else None


def _computed(x: l.Apply, name: str, a: Range, b: Range) -> Range | None:
    """Sums, differences, products and quotients of ranges."""
    (low, high), (least, most) = a, b
    if not all(map(math.isfinite, (*a, *b))) or (name == "div" and least <= 0 <= most):
        return None
    if name == "add":
        ends = low + least, high + most
    elif name == "sub":
        ends = low - most, high - least
    else:
        found = [p / q if name == "div" else p * q for p in a for q in b]
        ends = min(found), max(found)
    return _wider(*ends, x.dtype.numpy.type) if x.dtype.is_float else _in_type(x, *ends)


def _wider(low: float, high: float, kind: Any) -> Range:
    """A range of floats two units in the last place wider on both sides; what is beyond the type is infinite there."""
    with np.errstate(over="ignore"):
        least, most = kind(low), kind(high)
        for _ in range(2):
            least, most = np.nextafter(least, kind(-math.inf)), np.nextafter(most, kind(math.inf))
    return float(least), float(most)
