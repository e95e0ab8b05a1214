"""Index expressions: integers built from loop variables, sizes and loaded indices, normalised at construction.

`a + b`, `a * b`, `a // b`, `a % b` on expressions give the normal form at once: a sum of integer multiples of products
of atoms, where an atom is a variable, a size, a loaded index, a floor division or a remainder. Equal normal forms are
the same object. Every expression knows its range, and `//` and `%` use it, so views of views of views cost nothing.

Python ints stand for themselves: `IntExpr = int | Expr`. Division and remainder round towards minus infinity.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, reduce
from typing import Any, Union, cast

from terrazzo.errors import UserError
from terrazzo.ir.node import Node, derived, topological
from terrazzo.ir.written import sorted_as, written

IntExpr = Union[int, "Expr"]
Range = tuple[int | None, int | None]
"""Smallest and largest value, inclusive; None where unbounded."""


class Expr(Node):
    """An integer. Use the operators; they normalise."""

    def __add__(self, other: IntExpr) -> IntExpr:
        return _plus(self, other)

    def __sub__(self, other: IntExpr) -> IntExpr:
        return self + other * -1

    def __rsub__(self, other: IntExpr) -> IntExpr:
        return self * -1 + other

    def __neg__(self) -> IntExpr:
        return self * -1

    def __mul__(self, other: IntExpr) -> IntExpr:
        return _times(self, other)

    def __floordiv__(self, other: IntExpr) -> IntExpr:
        return floordiv(self, other)

    def __rfloordiv__(self, other: IntExpr) -> IntExpr:
        return floordiv(other, self)

    def __rmod__(self, other: IntExpr) -> IntExpr:
        return mod(other, self)

    def __mod__(self, other: IntExpr) -> IntExpr:
        return mod(self, other)

    __radd__ = __add__
    __rmul__ = __mul__

    @derived
    def range(self) -> Range:
        """What values this can take, from the ranges of its variables."""
        raise NotImplementedError

    @derived
    def sized(self) -> bool:
        """Whether a symbolic dimension occurs in it."""
        return isinstance(self, Size) or any(isinstance(n, Size) for n in topological([self]))

    @derived
    def order(self) -> tuple[Any, ...]:
        """A total order that does not depend on the process, for the normal form."""
        return (type(self).__name__, *(_order(v) for v in self.values))


class _Below(Expr):
    """Base of what lies in [0, extent)."""

    @derived
    def range(self) -> Range:
        hi = bounds(self.extent)[1]  # type: ignore[attr-defined]
        return 0, None if hi is None else max(hi - 1, 0)


class Variable(_Below):
    """Base of the variables: free in themselves."""

    @derived
    def free(self) -> frozenset[Any]:
        return frozenset((self,))


class Var(Variable, dialect="index", op="var"):
    """A free variable in [0, extent): an axis of a kernel."""

    name: str
    extent: IntExpr


class Bound(Variable, dialect="index", op="bound"):
    """A variable in [0, extent) bound by the enclosing reduction or scan.

    Its label is one more than the largest label bound inside that reduction, which makes terms that differ only in the
    names of their bound variables the same object, and makes capture impossible to write by accident.
    """

    label: int
    extent: IntExpr


class Size(Expr, dialect="index", op="size"):
    """A symbolic dimension: an integer with a name, known only when the program runs."""

    name: str
    lo: int = 0
    hi: int | None = None

    @derived
    def range(self) -> Range:
        return self.lo, self.hi


class Loaded(_Below, dialect="index", op="loaded"):
    """An index that comes from data (a gather). `value` is an integer term; it must lie in [0, extent)."""

    value: Node
    extent: IntExpr


class Sum(Expr, dialect="index", op="sum"):
    """constant + sum of coefficient * product of atoms. Built only by the operators."""

    constant: int
    terms: tuple[tuple[int, tuple[Expr, ...]], ...]

    @classmethod
    def make(cls, constant: int, terms: tuple[tuple[int, tuple[IntExpr, ...]], ...]) -> IntExpr:
        total: IntExpr = constant
        for coefficient, factors in terms:
            product: IntExpr = coefficient
            for f in factors:
                product = product * f
            total = total + product
        return total

    @derived
    def range(self) -> Range:
        lo: int | None = self.constant
        hi: int | None = self.constant
        for coefficient, factors in self.terms:
            a, b = _times_range((coefficient, coefficient), _product_range(factors))
            lo = None if lo is None or a is None else lo + a
            hi = None if hi is None or b is None else hi + b
        return lo, hi

    @derived
    def on_the_way(self) -> Range:
        """What multiplying and adding up its terms can give, whichever come first: a sum of 3 * 10**9 * x and its
        opposite is 0, and on the way there it is not.
        """
        lo: int | None = min(self.constant, 0)
        hi: int | None = max(self.constant, 0)
        for coefficient, factors in self.terms:
            a, b = _times_range((coefficient, coefficient), _product_range(factors))
            lo = None if lo is None or a is None else lo + min(a, 0)
            hi = None if hi is None or b is None else hi + max(b, 0)
        return lo, hi


class FloorDiv(Expr, dialect="index", op="floordiv"):
    """a // b, rounded towards minus infinity, where no rule could remove the division."""

    a: Expr
    b: IntExpr

    @classmethod
    def make(cls, a: IntExpr, b: IntExpr) -> IntExpr:
        return floordiv(a, b)

    @derived
    def range(self) -> Range:
        lo, hi = bounds(self.a)
        blo, bhi = bounds(self.b)
        if blo is None or blo <= 0:
            return None, None
        new_lo = None if lo is None else lo // blo if lo < 0 else (0 if bhi is None else lo // bhi)
        return new_lo, None if hi is None else (hi // blo if hi >= 0 else (-1 if bhi is None else hi // bhi))


class Mod(Expr, dialect="index", op="mod"):
    """a % b, in [0, b), where no rule could remove the remainder."""

    a: Expr
    b: IntExpr

    @classmethod
    def make(cls, a: IntExpr, b: IntExpr) -> IntExpr:
        return mod(a, b)

    @derived
    def range(self) -> Range:
        hi = bounds(self.b)[1]
        top = bounds(self.a)
        if top[0] is not None and top[0] >= 0 and top[1] is not None:
            return 0, top[1] if hi is None else min(top[1], hi - 1)
        return 0, None if hi is None else hi - 1


def bounds(e: IntExpr) -> Range:
    """The range of an expression or an int."""
    return (e, e) if isinstance(e, int) else e.range


def at_least(e: IntExpr, least: int) -> bool:
    """True if e >= least is proved by ranges, symbolic ones included: i <= S - 1 for i in [0, S)."""
    lo = bounds(e)[0]
    if lo is not None and lo >= least:
        return True
    if isinstance(e, int) or not e.sized:
        return False
    lo = bounds(_lowest(e))[0]
    return lo is not None and lo >= least


def _lowest(e: IntExpr) -> IntExpr:
    """A lower bound of `e` in which only sizes are left."""
    total: IntExpr = 0
    for factors, c in terms_of(e).items():
        product: IntExpr = c
        for f in factors:
            product = product * (f if isinstance(f, Size) else _highest(f) if c < 0 else (bounds(f)[0] or 0))
        if any((lo := bounds(f)[0]) is None or lo < 0 for f in factors):
            return e  # a factor may be negative: no claim
        total = total + product
    return total


def _highest(atom: Expr) -> IntExpr:
    """An upper bound of an atom in which only sizes are left."""
    match atom:
        case Var() | Bound() | Loaded():
            return atom.extent - 1
        case Mod():
            return atom.b - 1
        case FloorDiv():
            return floordiv(_lowest(atom.a * -1) * -1, atom.b)
    return atom


def comparison(e: IntExpr) -> tuple[IntExpr, str, IntExpr]:
    """`e >= 0` as a comparison of two sums without negative terms: (left, "==" or "<" or "<=" or ">=", right)."""
    constant = terms_of(e).get((), 0)
    more = _polynomial({factors: c for factors, c in terms_of(e).items() if factors and c > 0})
    less = _polynomial({factors: -c for factors, c in terms_of(e).items() if factors and c < 0})
    only = isinstance(e, Expr) and e.range[1] == 0  # e is never more than 0
    if isinstance(less, int):
        return more, "==" if only else ">=", -constant
    if only:
        return less, "==", more + constant
    return (less, "<", constant + 1) if isinstance(more, int) else (less, "<=", more + constant)


def at_most(e: IntExpr, most: IntExpr) -> bool:
    """True if e <= most is proved by ranges."""
    if isinstance(most, int) and not (isinstance(e, Expr) and e.sized):
        hi = bounds(e)[1]
        return hi is not None and hi <= most
    return at_least(most - e, 0)


@lru_cache(maxsize=1 << 15)
def _plus(a: Expr, b: IntExpr) -> IntExpr:
    """a + b in normal form. The same few sums are asked for again and again, and nobody keeps those on the way."""
    if isinstance(b, int):  # no terms meet
        constant, terms = (a.constant, a.terms) if isinstance(a, Sum) else (0, ((1, (a,)),))
        return _sum(constant + b, terms)
    return _polynomial(terms_of(a), terms_of(b))


@lru_cache(maxsize=1 << 15)
def _times(a: Expr, b: IntExpr) -> IntExpr:
    """a * b in normal form."""
    if isinstance(b, int):
        constant, terms = (a.constant, a.terms) if isinstance(a, Sum) else (0, ((1, (a,)),))
        return _sum(constant * b, tuple((c * b, f) for c, f in terms)) if b else 0
    out: dict[tuple[Expr, ...], int] = {}
    for f, x in terms_of(a).items():
        for g, y in terms_of(b).items():
            key = tuple(sorted(f + g, key=_order))
            out[key] = out.get(key, 0) + x * y
    return _polynomial(out)


@lru_cache(maxsize=1 << 14)
def floordiv(a: IntExpr, b: IntExpr) -> IntExpr:
    """a // b in normal form. Requires b > 0."""
    if isinstance(b, int) and b <= 0:  # ranges and rules below count on it
        raise UserError(f"index expression divides {a} by {b}; a divisor must be positive")
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    if b == 1:
        return a
    divisible, rest = _split(a, b)
    if not (isinstance(divisible, int) and divisible == 0):
        return divisible + floordiv(rest, b)
    lo, hi = bounds(a)
    if lo is not None and lo >= 0 and (at_most(a, b - 1)):
        return 0
    if isinstance(b, int) and lo is not None and hi is not None and lo // b == hi // b:
        return lo // b
    if isinstance(b, int) and b > 1:
        if (inner := _coarsen(a, b)) is not None:
            return inner
        for f, c in terms_of(a).items():  # (x + y // d) // b == (x*d + y) // (d*b); one division less each time
            if c == 1 and len(f) == 1 and isinstance(f[0], FloorDiv) and isinstance(d := f[0].b, int):
                return floordiv((a - f[0]) * d + f[0].a, d * b)
    if isinstance(a, Mod) and isinstance(b, int) and isinstance(a.b, int) and a.b % b == 0:
        return mod(floordiv(a.a, b), a.b // b)  # (x % (b*c)) // b == (x // b) % c
    assert isinstance(a, Expr) or isinstance(b, Expr)
    return FloorDiv(a if isinstance(a, Expr) else Sum(a, ()), b)


@lru_cache(maxsize=1 << 14)
def mod(a: IntExpr, b: IntExpr) -> IntExpr:
    """a % b in normal form. Requires b > 0."""
    if isinstance(b, int) and b <= 0:
        raise UserError(f"index expression takes {a} modulo {b}; a divisor must be positive")
    if isinstance(a, int) and isinstance(b, int):
        return a % b
    if b == 1:
        return 0
    _, rest = _split(a, b)
    if isinstance(rest, int) and isinstance(b, int):
        return rest % b
    lo, hi = bounds(rest)
    if lo is not None and lo >= 0 and at_most(rest, b - 1):
        return rest
    if isinstance(b, int) and lo is not None and hi is not None and lo // b == hi // b:
        return rest - (lo // b) * b
    if isinstance(rest, Mod) and isinstance(b, int) and isinstance(rest.b, int) and rest.b % b == 0:
        return mod(rest.a, b)
    if isinstance(b, int) and isinstance(rest, Sum):  # (c*x + r) % (c*d) == c*(x % d) + r, for 0 <= r < c
        for c in sorted({abs(k) for k, _ in rest.terms if k and b % k == 0 and abs(k) > 1}, reverse=True):
            multiple, remainder = _split(rest, c)
            rlo, rhi = bounds(remainder)
            if rlo is not None and rlo >= 0 and rhi is not None and rhi < c:
                return mod(multiple, b // c) * c + remainder
    return Mod(rest if isinstance(rest, Expr) else Sum(rest, ()), b)


def _order(value: Any) -> Any:
    if isinstance(value, Expr):
        return value.order
    if isinstance(value, Node):
        return ("~", written(value))
    if isinstance(value, tuple):
        return ("(", *(_order(v) for v in value))
    if isinstance(value, str):
        return ("str", sorted_as(value))
    return (type(value).__name__, value if value is not None else 0)


def terms_of(e: IntExpr) -> dict[tuple[Expr, ...], int]:
    """The expression as coefficients of products of atoms; the constant is that of the empty product."""
    if isinstance(e, int):
        return {(): e}
    if isinstance(e, Sum):
        return {(): e.constant, **{factors: c for c, factors in e.terms}}
    return {(e,): 1}


def _polynomial(*parts: Mapping[tuple[Expr, ...], int]) -> IntExpr:
    total: dict[tuple[Expr, ...], int] = {}
    for part in parts:
        for factors, c in part.items():
            total[factors] = total.get(factors, 0) + c
    _recombine(total)
    constant = total.pop((), 0)
    terms = [(c, f) for f, c in total.items() if c]
    if len(terms) > 1:
        terms.sort(key=lambda t: tuple(map(_order, t[1])))
    return _sum(constant, tuple(terms))


def _sum(constant: int, terms: tuple[tuple[int, tuple[Expr, ...]], ...]) -> IntExpr:
    """The sum of a constant and of terms in order, or what it is instead."""
    if not terms:
        return constant
    if constant == 0 and len(terms) == 1 and terms[0][0] == 1 and len(terms[0][1]) == 1:
        return terms[0][1][0]
    return Sum(constant, terms)


def _recombine(total: dict[tuple[Expr, ...], int]) -> None:
    """b * (a // b) + a % b == a: undo a split whose parts met again."""
    again = any(len(factors) == 1 and isinstance(factors[0], Mod) for factors in total)
    while again:
        again = False
        for factors in list(total):
            remainder = factors[0] if len(factors) == 1 else None
            if not isinstance(remainder, Mod) or not isinstance(remainder.b, int):
                continue
            quotient = floordiv(remainder.a, remainder.b)
            if not isinstance(quotient, Expr) or isinstance(quotient, Sum):
                continue
            c = total[factors]
            if c and total.get((quotient,), 0) == c * remainder.b:
                del total[factors], total[(quotient,)]
                for f, k in terms_of(remainder.a).items():
                    total[f] = total.get(f, 0) + c * k
                again = True
                break


def _split(a: IntExpr, b: IntExpr) -> tuple[IntExpr, IntExpr]:
    """(q, r) with a == q * b + r, moving every term that b visibly divides into q."""
    q: dict[tuple[Expr, ...], int] = {}
    r: dict[tuple[Expr, ...], int] = {}
    divisor = terms_of(b)
    single = (
        next(iter((f, c) for f, c in divisor.items() if c), None)
        if sum(c != 0 for c in divisor.values()) == 1
        else None
    )
    for factors, c in terms_of(a).items():
        quotient = _quotient(factors, c, single) if single else None
        if quotient is not None:
            q[quotient[0]] = quotient[1]
        elif isinstance(b, int) and c >= b > 0 and not factors:
            q[()] = c // b
            r[()] = c % b
        elif c:
            r[factors] = c
    return _polynomial(q), _polynomial(r)


def _quotient(
    factors: tuple[Expr, ...], c: int, single: tuple[tuple[Expr, ...], int]
) -> tuple[tuple[Expr, ...], int] | None:
    left = list(factors)
    for f in single[0]:
        if f not in left:
            return None
        left.remove(f)
    return (tuple(left), c // single[1]) if c % single[1] == 0 else None


def _coarsen(a: IntExpr, b: int) -> IntExpr | None:
    """(c*x + r) // (c*d) == x // d, for 0 <= r < c."""
    if not isinstance(a, Sum):
        return None
    for c in sorted({abs(k) for k, _ in a.terms if b % k == 0 and abs(k) > 1}, reverse=True):
        multiple, rest = _split(a, c)
        lo, hi = bounds(rest)
        if lo is not None and lo >= 0 and hi is not None and hi < c:
            return floordiv(multiple, b // c)
    return None


def _product_range(factors: tuple[Expr, ...]) -> Range:
    return reduce(lambda total, f: _times_range(total, f.range), factors, cast(Range, (1, 1)))


def _times_range(a: Range, b: Range) -> Range:
    if a[0] is not None and a[1] is not None and b[0] is not None and b[1] is not None:
        corners = [x * y for x in (a[0], a[1]) for y in (b[0], b[1])]
        return min(corners), max(corners)
    if a[0] is not None and b[0] is not None and a[0] >= 0 and b[0] >= 0:
        return a[0] * b[0], None
    if a == (a[0], a[0]) and a[0] is not None and b[0] is not None and a[0] <= 0 and b[0] >= 0:
        return None, a[0] * b[0]
    return None, None
