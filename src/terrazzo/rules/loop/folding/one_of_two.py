"""What is one of two values, by a condition: comparisons of it, and reductions in which one point alone has another
value than the rest.

Who writes to places that come from data asks at every place which source writes there. Of sources that each have a
place of their own along an axis, that is one of them or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from terrazzo.ir.address import coefficient
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr, at_least
from terrazzo.ir.node import substitute
from terrazzo.ir.ranges import decided, range_of
from terrazzo.ir.types import bool_

Place = Callable[[Any], "IntExpr | None"]
"""A term of whole numbers as an index expression."""


def compared(x: l.Apply) -> Any:
    """A comparison of one of two values, each of which decides it: what chooses between them, or its opposite; None for
    others.

    ge(where(c, i64(3), i64(-1)), i64(0)) is c.
    """
    one, other = x.args
    if not (isinstance(one, l.Apply) and one.fn.name == "where"):
        return None
    condition, *values = one.args
    yes, no = (decided(l.apply(x.fn.name, y, other), range_of) for y in values)
    if yes is None or no is None:
        return None
    return l.Literal(yes, bool_) if yes == no else condition if yes else l.apply("not_", condition)


def reduced(x: l.Reduce, place: Place) -> Any:
    """The largest, the smallest or the sum of whole numbers that are the same at all points but for one: that of one
    point, and the same; None for others.

    max over r of where(and_(eq(index(r), index(a)), c), index(r), x) is max(where(c, index(a), x), x).
    """
    if len(x.axes) > 1 or x.monoid.name not in ("max", "min", "sum") or not x.dtype.is_integer:
        return None
    (axis,), (arg,) = l.open_binder(x)
    if not isinstance(arg, l.Apply) or arg.fn.name != "where":
        return None
    condition, value, rest = arg.args
    if not isinstance(rest, l.Literal) or (x.monoid.name == "sum" and rest.value):
        return None
    left = list(all_of(condition))
    there = one_place(axis, left, place)
    if there is None:
        return None
    found: Any = value
    for c in left:
        found = l.apply("where", c, found, rest)
    found = substitute(found, {axis: there})
    return found if x.monoid.name == "sum" else l.apply(x.monoid.name, found, rest)


def all_of(condition: Any) -> Iterator[Any]:
    """What must hold for a condition to hold."""
    if isinstance(condition, l.Apply) and condition.fn.name == "and_" and condition.dtype is bool_:
        for x in condition.args:
            yield from all_of(x)
    else:
        yield condition


def one_place(axis: Any, left: list[Any], place: Place) -> IntExpr | None:
    """The one place along an axis where one of some conditions holds, which is taken out of them; None if none says
    so.
    """
    for c in left:
        if not isinstance(c, l.Apply) or c.fn.name != "eq" or None in (both := [place(x) for x in c.args]):
            continue
        apart: Any = both[0] - both[1]  # type: ignore[operator]
        by = coefficient(apart, axis)
        there = axis - apart * by if by in (1, -1) else axis
        alone = not isinstance(there, Expr) or axis not in there.free
        if alone and at_least(there, 0) and at_least(axis.extent - 1 - there, 0):
            left.remove(c)
            return there  # type: ignore[no-any-return]
    return None
