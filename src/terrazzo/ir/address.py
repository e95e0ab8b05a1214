"""Questions about index expressions: their value, their coefficients, the place they mean in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from terrazzo.errors import UserError
from terrazzo.ir.expr import Expr, FloorDiv, IntExpr, Mod, Sum, Var, floordiv, terms_of
from terrazzo.ir.node import Node, substitute, topological


def evaluate(e: IntExpr, env: Mapping[Expr, Any]) -> Any:
    """The value of `e`; `env` gives ints or integer arrays for its variables and loaded indices."""
    if isinstance(e, int):
        return e
    if e in env:
        return env[e]
    match e:
        case Sum():
            total: Any = e.constant
            for coefficient, factors in e.terms:
                product: Any = coefficient
                for f in factors:
                    product = product * evaluate(f, env)
                total = total + product
            return total
        case FloorDiv():
            return evaluate(e.a, env) // evaluate(e.b, env)
        case Mod():
            return evaluate(e.a, env) % evaluate(e.b, env)
    raise UserError(f"index expression mentions {e}, which has no value here")


def coefficient(e: IntExpr, atom: Expr) -> IntExpr | None:
    """c where e == c * atom + (something without atom), or None if atom occurs in e in any other way."""
    found: IntExpr = 0
    for factors, c in terms_of(e).items():
        count = sum(f is atom for f in factors)
        others: IntExpr = c
        for f in factors:
            if f is not atom:
                if mentions(f, atom):
                    return None
                others = others * f
        if count > 1:
            return None
        if count == 1:
            found = found + others
    return found


LONGEST_PERIOD = 64
"""Divisors that are tried, at most."""


def quotient(values: Sequence[int], v: Expr) -> IntExpr | None:
    """(a * v + b) // c that has these values for v = 0, 1, ..., with the smallest c; None where there is none."""
    n = len(values)
    for c in range(1, min(n - 1, LONGEST_PERIOD) + 1):
        a = values[c] - values[0]
        if any(values[k + c] - values[k] != a for k in range(n - c)):
            continue
        for b in range(c * values[0], c * (values[0] + 1)):
            if all((a * k + b) // c == x for k, x in enumerate(values[:c])):
                return floordiv(v * a + b, c)
    return None


def divides(d: int, e: IntExpr) -> bool:
    """Whether d divides an expression, visibly: x % (m * d) leaves of x what d does not divide."""
    terms = terms_of(e)
    for factors, c in terms.items():
        if len(factors) == 1 and c % d and isinstance(x := factors[0], Mod) and isinstance(x.b, int):
            return c * x.b % d == 0 and divides(d, e - c * x + c * x.a)
    return all(c % d == 0 for c in terms.values())


def mentions(e: Any, atom: Expr) -> bool:
    """True if `atom` occurs anywhere in `e`."""
    if not isinstance(e, Node) or not atom.free <= e.free:
        return False
    return e is atom or any(x is atom for x in topological([e]))


def digit(e: IntExpr) -> tuple[IntExpr, int, int | None]:
    """v, place and size where `e` is v // place % size; no size where there is no remainder."""
    size: int | None = None
    if isinstance(e, Mod) and isinstance(e.b, int):
        size, e = e.b, e.a
    if isinstance(e, FloorDiv) and isinstance(e.b, int):
        return e.a, e.b, size
    return e, 1, size


def axis_digits(index: tuple[IntExpr, ...]) -> dict[Expr, Var]:
    """The digits of axes in an index, each with a variable of its own, called v/place."""
    found: dict[Expr, Var] = {}
    for e in topological([e for e in index if isinstance(e, Expr)]):
        if not isinstance(e, Mod | FloorDiv):
            continue
        v, place, size = digit(e)
        if isinstance(v, Var) and isinstance(v.extent, int):
            found[e] = Var(f"{v.name}/{place}", size or -(-v.extent // place))
    return found


def upwards(e: IntExpr) -> tuple[IntExpr, frozenset[Expr]]:
    """An index in which each axis that it counts down by is counted up, and these axes: a0 * 8 + a1, and a1, for
    a0 * 8 + 7 - a1, where a1 counts to 8.
    """
    free = e.free if isinstance(e, Expr) else frozenset()
    down = {v: v.extent - 1 - v for v in free if isinstance(c := coefficient(e, v), int) and c < 0}
    return substitute(e, down), frozenset(down)


def flatten(index: tuple[IntExpr, ...], strides: tuple[IntExpr, ...]) -> IntExpr:
    """The offset of `index` in elements."""
    offset: IntExpr = 0
    for i, s in zip(index, strides, strict=True):
        offset = offset + i * s
    return offset


def unflatten(offset: IntExpr, shape: tuple[IntExpr, ...]) -> tuple[IntExpr, ...]:
    """The row-major index of element `offset` of a tensor of `shape`; the inverse of flatten."""
    index: list[IntExpr] = []
    for extent in reversed(shape[1:]):
        index.append(offset % extent)
        offset = offset // extent
    return (*([offset] if shape else []), *reversed(index))
