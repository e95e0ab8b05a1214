"""Proofs that an index stays in its tensor: that an expression is >= 0 wherever others are (the guards of an access).

Ranges come first; then guards, and what they say of quotients, are subtracted in any multiples that make terms vanish;
then, where they are few, all points are tried. What none of these shows is not proved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from terrazzo.ir.address import evaluate, mentions
from terrazzo.ir.expr import (
    Bound,
    Expr,
    FloorDiv,
    IntExpr,
    Loaded,
    Mod,
    Size,
    Var,
    at_least,
    bounds,
    floordiv,
    mod,
    terms_of,
)
from terrazzo.ir.node import per_node, substitute, topological

POINTS = 1 << 20
"""Points that are tried for one proof, at most."""
GUARDS = 4
"""Guards that are combined in one proof, at most."""
LOWERED = 3
"""By how much guards are tried to lower the range of a quotient."""
WIDEST = 1 << 62
"""No part of an index may be larger than this, so that 64 bits hold every sum on the way."""


def holds(e: IntExpr, given: Sequence[IntExpr] = ()) -> bool:
    """True if e >= 0 is proved for all points at which every expression of `given` is >= 0."""
    if at_least(e, 0) or any(not isinstance(g, Expr) and g < 0 for g in given):
        return True
    ways = dict.fromkeys(_digits(e, given, finer) for finer in (False, True))
    if any(_follows(*way) for way in ways) or ((parts := _parted(e, given)) is not None and _follows(*parts)):
        return True
    guards = [g for g in given if isinstance(g, Expr)]
    return bool(guards) and _tried(e, guards)


def _follows(e: IntExpr, given: Sequence[IntExpr]) -> bool:
    """The same for digits that are variables. A quotient in `e` meets guards as they are, which name it: 9 * (a // 4)
    is at least 9 where a // 4 >= 1.
    """
    whole = [g for g in (_tight(_undivided(g)) for g in given) if isinstance(g, Expr)]
    named = [g for g in map(_tight, given) if isinstance(g, Expr) and g not in whole]
    more = [*whole, *named, *_quotients(e, [*dict.fromkeys((*given, *whole))]), *_lowered(e, whole)]
    return bool(whole) and (_combined(_tight(_undivided(e)), more, GUARDS) or _tried(e, whole))


def _parted(e: IntExpr, given: Sequence[IntExpr]) -> tuple[IntExpr, Sequence[IntExpr]] | None:
    """`e` and guards with a variable for the quotient and one for the remainder of a number of which guards have both,
    and its axis made of them: 14 * q + m + 1 for the a of which q is (a - 1) // 14 and m is (a - 1) % 14.
    """
    for m in _parts(given):
        if not isinstance(m, Mod) or not isinstance(m.b, int):
            continue
        q = floordiv(m.a, m.b)
        low, high = bounds(q)
        axes = [(f[0], c) for f, c in terms_of(m.a).items() if len(f) == 1 and abs(c) == 1]
        for v, c in [(v, c) for v, c in axes if isinstance(v, Var | Bound) and isinstance(v.extent, int)]:
            rest = m.a - c * v
            if not isinstance(q, FloorDiv) or low is None or high is None or mentions(rest, v):
                continue
            quotient, remainder = Var("$quotient", high - low + 1) + low, Var("$remainder", m.b)
            axis = (quotient * m.b + remainder - rest) * c
            new: dict[Any, IntExpr] = {q: quotient, m: remainder, v: axis}
            return _replaced(e, new), [*(_replaced(g, new) for g in given), axis, v.extent - 1 - axis]
    return None


def _digits(e: IntExpr, given: Sequence[IntExpr], finer: bool) -> tuple[IntExpr, tuple[IntExpr, ...]]:
    """`e` and guards with a variable for every digit v // place % size of the guards, but for those that others make
    up. Digits of `e` are made of them where they are part of one, or begin with one: v // 8 % 3 is y // 4 for the y
    that is v // 2 % 12, and v // 2 % 60 is y + 12 * (v // 24 % 5); v // 2 is y + 12 * more; and, where `finer` parts
    are wanted, v is (y + 12 * more) * 2 + rest. Guards say less of these than of v itself.
    """
    new: dict[Any, IntExpr] = {}
    known: list[tuple[Var, Any, int]] = []
    digits = [(found[2], y, found) for y in _parts(given) if (found := _digit(y)) is not None]
    for size, y, found in sorted(digits, key=lambda d: d[0]):
        v, place, _ = found
        made = _of_digits(*found, known)
        if made is None or any(x is v for x in _parts([made])):
            known.append((Var(f"${len(known)}", size), v, place))
            made = known[-1][0]
        new[y] = made
    for x in _parts([e]) if known else ():
        found = None if x in new else _digit(x)
        if found is not None and (made := _of_digits(*found, known)) is not None:
            new[x] = made
    for y, v, below in known:
        low, high = bounds(whole := floordiv(v, below))
        if isinstance(whole, FloorDiv) and low == 0 and high is not None:
            new[whole] = y + y.extent * Var(f"{y.name}/", high // y.extent + 1)
            for x in _parts([e]) if finer else ():
                step, rest = divmod(below, _place(x, v) or below)
                if x not in new and step > 1 and not rest:
                    new[x] = new[whole] * step + Var(f"{y.name}%{step}", step)
    return (_replaced(e, new), tuple(_replaced(g, new) for g in given)) if new else (e, tuple(given))


def _of_digits(v: Any, place: int, size: int, known: Sequence[tuple[Var, Any, int]]) -> IntExpr | None:
    """The digit v // place % size, made of digits that have variables; None where it neither is part of one nor begins
    with one.
    """
    for y, whose, below in known:
        step, rest = divmod(place, below)
        if whose is v and not rest and y.extent % (size * step) == 0:
            return mod(floordiv(y, step), size)
    for y, whose, below in known:
        if whose is v and below == place and isinstance(y.extent, int) and size % y.extent == 0:
            above = place * y.extent, size // y.extent
            higher = _of_digits(v, *above, known)
            return y + y.extent * (mod(floordiv(v, above[0]), above[1]) if higher is None else higher)
    return None


def _parts(exprs: Sequence[IntExpr]) -> list[Any]:
    """What expressions are made of. A number that data says is one thing, whatever it is computed from."""
    return topological([e for e in exprs if isinstance(e, Expr)], stop=lambda x: isinstance(x, Loaded))


def _replaced(e: IntExpr, new: Mapping[Any, IntExpr]) -> IntExpr:
    """An expression with others for parts of it."""
    data = {x: x for x in _parts([e]) if isinstance(x, Loaded)}
    found: IntExpr = substitute(e, {**new, **data})
    return found


def _digit(x: Any) -> tuple[Any, int, int] | None:
    """v, place and size, where an expression is v // place % size."""
    if not isinstance(x, Mod) or not isinstance(x.b, int):
        return None
    if isinstance(x.a, FloorDiv) and isinstance(x.a.b, int):
        return x.a.a, x.a.b, x.b
    return x.a, 1, x.b


def _place(x: Any, v: Any) -> int:
    """The number that v is divided by in an expression that is v // number or v; 0 where it is neither."""
    if x is v:
        return 1
    return x.b if isinstance(x, FloorDiv) and x.a is v and isinstance(x.b, int) else 0


def _quotients(e: IntExpr, given: Sequence[IntExpr]) -> list[IntExpr]:
    """What is >= 0 because of what guards say of the numerators in `e`: a // 8 <= 3 where a + b <= 31, and a // 8 <= 3
    - 2 * b where a + 16 * b <= 31. Guards that are quotients themselves bound finer ones as what they say undivided.
    """
    found: list[IntExpr] = []
    for q in topological([e]) if isinstance(e, Expr) else ():
        if isinstance(q, FloorDiv) and isinstance(q.b, int):
            most = [-x for x in _numbers(q.a * -1, given)]
            least = _numbers(q.a, given)
            found += [min(most) // q.b - q] if most else []
            found += [q - max(least) // q.b] if least else []
            for rest in (-1 * less for g in given for less in _less(q.a * -1, g, 1)):
                steps = [c for factors, c in terms_of(rest).items() if factors]
                found += [floordiv(rest, q.b) - q] if steps and all(c % q.b == 0 for c in steps) else []
    return found


def _lowered(e: IntExpr, whole: Sequence[Expr]) -> list[IntExpr]:
    """What is >= 0 because guards together say that quotients in `e` are smaller than their ranges: (9 * a + 3 * b + c)
    // 288 is at most 5 where a is, at most, 191 and b and c are 2.
    """
    found: list[IntExpr] = []
    for q in topological([e]) if isinstance(e, Expr) else ():
        if isinstance(q, FloorDiv) and isinstance(q.b, int) and (high := bounds(q)[1]) is not None:
            most = high
            while most > high - LOWERED and _combined(_tight(_undivided(most * q.b - 1 - q.a)), whole, GUARDS):
                most -= 1
            found += [most - q] if most < high else []
    return found


def _numbers(e: IntExpr, given: Sequence[IntExpr]) -> list[int]:
    """What `e` is at least, by each of the guards: what is left of it without one is not less than by its range."""
    return [low for g in given for less in _less(e, g, 1) if (low := bounds(less)[0]) is not None]


def leaves(index: Sequence[IntExpr], shape: Sequence[IntExpr], inside: Sequence[IntExpr] = ()) -> int | None:
    """The first dimension of a tensor that an index may leave where the guards hold; None if it is proved to stay."""
    for d, (e, extent) in enumerate(zip(index, shape, strict=True)):
        if not holds(e, inside) or not holds(extent - 1 - e, inside):
            return d
    return None


def ill(exprs: Sequence[IntExpr]) -> str:
    """What is wrong with expressions in themselves: a divisor that may be 0, a number that 64 bits may not hold."""
    if any(not isinstance(e, Expr) and abs(e) > WIDEST for e in exprs):
        return "it has a number beyond 64 bits"
    return next(filter(None, (_ill(e) for e in exprs if isinstance(e, Expr))), "")


@per_node
def _ill(whole: Expr) -> str:
    """The same for one that is no number: most occur in many places."""
    for e in topological([whole]):
        if isinstance(e, FloorDiv | Mod) and not at_least(e.b, 1) and not _sizes_only(e.b):
            return f"the divisor of {e} may be 0"
        if isinstance(e, Loaded) and not at_least(e.extent, 0):
            return f"the extent of {e} may be negative"
        if isinstance(e, Expr) and _largest(e) > WIDEST:
            return f"{e} may be beyond 64 bits"
    return ""


def _largest(e: Expr) -> int:
    """The largest number that is met in computing an expression; 0 where only a symbolic size says."""
    total = 0
    for factors, c in terms_of(e).items():
        product = abs(c)
        for f in factors:
            low, high = bounds(f)
            product *= 0 if low is None or high is None else max(abs(low), abs(high), 1)
        total += product
    return max(total, *(abs(x) for x in bounds(e) if x is not None), 0, 0)


def _sizes_only(e: IntExpr) -> bool:
    """True for a product of symbolic sizes, whose values are known to be right when a program runs."""
    return all(c > 0 and all(isinstance(f, Size) for f in factors) for factors, c in terms_of(e).items() if c)


def _undivided(e: IntExpr) -> IntExpr:
    """An expression that is >= 0 exactly where `e` is, with fewer divisions: a // b <= r where a <= r * b + b - 1."""
    for factors, c in terms_of(e).items():
        atom = factors[0] if len(factors) == 1 and abs(c) == 1 else None
        if isinstance(atom, FloorDiv) and isinstance(atom.b, int):
            rest = e - c * atom
            return _undivided(atom.a + rest * atom.b if c > 0 else rest * atom.b + (atom.b - 1) - atom.a)
    return e


def _tight(e: IntExpr) -> IntExpr:
    """An expression that is >= 0 exactly where `e` is, with smaller numbers: 7 - 2 * i where 3 - i."""
    terms = terms_of(e)
    common = math.gcd(*(c for factors, c in terms.items() if factors))
    if common < 2:
        return e
    rest = terms.get((), 0)
    return floordiv(e - rest, common) + rest // common


def _combined(e: IntExpr, given: Sequence[IntExpr], depth: int) -> bool:
    """True if e >= 0 follows from ranges once multiples of the guards, which are >= 0, are subtracted from it."""
    if at_least(e, 0):
        return True
    return depth > 0 and any(_combined(less, given, depth - 1) for g in given for less in _less(e, g))


def _less(e: IntExpr, g: IntExpr, most: int = WIDEST) -> Iterator[IntExpr]:
    """`e`, or a multiple of it (`most` times), less a multiple of `g`, for each way to make a term of both vanish."""
    mine, others = terms_of(e), terms_of(g)
    for factors, c in others.items():
        k = mine.get(factors, 0)
        if factors and k * c > 0:
            common = math.gcd(k, c)
            if abs(c) > common * most:
                continue
            yield e * (abs(c) // common) - g * (abs(k) // common)


def _tried(e: IntExpr, given: Sequence[IntExpr]) -> bool:
    """True if e >= 0 at all points at which the guards hold, and these are few."""
    nodes = topological([x for x in (e, *given) if isinstance(x, Expr)])
    free = [x for x in nodes if isinstance(x, Var | Bound)]
    sizes = [x.extent for x in free if isinstance(x.extent, int)]
    if any(isinstance(x, Loaded | Size) for x in nodes) or len(sizes) != len(free) or math.prod(sizes) > POINTS:
        return False
    env: dict[Expr, Any] = {
        v: np.arange(n).reshape([-1 if k == d else 1 for k in range(len(free))])
        for d, (v, n) in enumerate(zip(free, sizes, strict=True))
    }
    where = np.ones([1] * len(free), bool)
    for g in given:
        where = where & (np.asarray(evaluate(g, env)) >= 0)
    return bool((~where | (np.asarray(evaluate(e, env)) >= 0)).all())
