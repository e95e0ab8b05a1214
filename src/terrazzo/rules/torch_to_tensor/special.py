"""Special functions that have short definitions. They are computed in float64, which leaves eager's accuracy behind,
but for those with polynomials that float32 is enough for: a GPU takes float64 at a thirty-second of the rate and less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
from numpy.polynomial import chebyshev

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.types import f64, i32, i64
from terrazzo.rewrite.rule import Rule, need
from terrazzo.rules.torch_to_tensor.common import aten, operand, pointwise, promoted, result
from terrazzo.rules.torch_to_tensor.pointwise import c

Build = Callable[..., Any]


def _in_double(name: str, fn: Build, doc: str) -> Rule:
    rule = aten(f"{name}.default")(lambda node, x: pointwise(node, f64, x, fn=fn))
    return Rule(name, rule.keys, rule.rewrite, doc)


def _by_width(name: str, single: Build, double: Build, doc: str) -> Rule:
    """In float32 what is no more exact in the end, and in float64 what is."""

    def lower(node: Aten, x: Any) -> Any:
        wide = result(node).dtype.compute
        return pointwise(node, wide, x, fn=double if wide is f64 else single)

    rule = aten(f"{name}.default")(lower)
    return Rule(name, rule.keys, rule.rewrite, doc)


def _k(fn: str, a: Any, value: float) -> Any:
    """fn(a, constant)."""
    return t.apply(fn, a, c(value, a))


def _polynomial(x: Any, coefficients: Sequence[float]) -> Any:
    """The sum of coefficients[k] * x^k, by Horner's rule."""
    value = c(coefficients[-1], x)
    for k in reversed(coefficients[:-1]):
        value = _k("add", t.apply("mul", value, x), k)
    return value


def _bernoulli(n: int) -> list[Fraction]:
    """B_0 .. B_n."""
    out = [Fraction(1)]
    for m in range(1, n + 1):
        out.append(-sum((math.comb(m + 1, k) * b for k, b in enumerate(out)), Fraction(0)) / (m + 1))
    return out


BERNOULLI = _bernoulli(20)
STEPS = 10
"""The sums of the polygamma functions are taken term by term up to here, and by Euler and Maclaurin beyond."""


def _polygamma_positive(n: int, x: Any) -> Any:
    """The n-th derivative of digamma for x > 0: the sum of -(-1)^n n! / (x + k)^(n + 1), for n = 0 less its divergent
    part.

    https://dlmf.nist.gov/5.15, with the tail by https://dlmf.nist.gov/5.11 and its derivatives.
    """
    sign, factorial = (-1) ** (n + 1), math.factorial(n)
    w = _k("add", x, STEPS)
    r = t.apply("div", c(1.0, w), w)
    head = [_power(t.apply("div", c(1.0, x), _k("add", x, k)), n + 1) for k in range(STEPS)]
    total = head[0]
    for term in head[1:]:
        total = t.apply("add", total, term)
    total = _k("mul", total, sign * factorial)
    even = [0.0] * 9
    for k in range(1, 9):
        even[k] = sign * float(BERNOULLI[2 * k]) * math.factorial(2 * k + n - 1) / math.factorial(2 * k)
    tail = t.apply("mul", _polynomial(t.apply("mul", r, r), even), _power(r, n))
    tail = t.apply("add", tail, _k("mul", _power(r, n + 1), sign * factorial / 2))
    lead = t.apply("log", w) if n == 0 else _k("mul", _power(r, n), sign * math.factorial(n - 1))
    return t.apply("add", t.apply("add", lead, tail), total)


def _power(x: Any, n: int) -> Any:
    value = x if n else c(1.0, x)
    for _ in range(n - 1):
        value = t.apply("mul", value, x)
    return value


def _cotangent_derivative(n: int) -> list[float]:
    """The n-th derivative of cot(pi x) / pi as a polynomial in cot(pi x)."""
    p = [0.0, 1 / math.pi]
    for _ in range(n):
        d = [k * a for k, a in enumerate(p)][1:]
        p = [-math.pi * (a + b) for a, b in zip([*d, 0.0, 0.0], [0.0, 0.0, *d], strict=True)]
    return p


def polygamma_of(n: int, x: Any) -> Any:
    """The n-th derivative of digamma; x <= 0 by reflection. At the poles: eager's infinities, and NaN for digamma below
    0.
    """
    zero = c(0.0, x)
    left = t.apply("le", x, zero)
    right = _polygamma_positive(n, t.where(left, t.apply("sub", c(1.0, x), x), x))
    phase = t.apply("sub", x, t.apply("round", x))
    cot = t.apply("div", c(1.0, x), t.apply("tan", _k("mul", phase, math.pi)))
    mirrored = t.apply(
        "sub", _k("mul", right, (-1) ** n), _k("mul", _polynomial(cot, _cotangent_derivative(n)), math.pi**2)
    )
    value = t.where(left, mirrored, right)
    pole = t.apply("and_", left, t.apply("eq", x, t.apply("floor", x)))
    if n:
        return t.where(pole, c((-1) ** (n + 1) * math.inf, x), value)
    at_zero = t.apply("copysign", c(math.inf, x), t.apply("neg", x))
    return t.where(pole, t.where(t.apply("eq", x, zero), at_zero, c(math.nan, x)), value)


@aten("polygamma.default")
def polygamma(node: Aten, n: int, x: Any) -> Any:
    """The n-th derivative of digamma."""
    need(n <= 8, "its terms overflow")
    return pointwise(node, f64, x, fn=lambda a: polygamma_of(n, a))


def _halley(y: Any, u: Any, half_curvature: Any) -> Any:
    """One step of Halley's method: y - u / (1 + u * half_curvature), u = f / f'."""
    return t.apply("sub", y, t.apply("div", u, _k("add", t.apply("mul", u, half_curvature), 1.0)))


def _erfinv(x: Any) -> Any:
    """Winitzki's approximation, then three steps of Halley's method on erf."""
    a = 0.147
    log = t.apply("log1p", t.apply("neg", t.apply("mul", x, x)))
    s = _k("add", _k("mul", log, 0.5), 2 / (math.pi * a))
    root = t.apply("sqrt", t.apply("sub", t.apply("mul", s, s), _k("mul", log, 1 / a)))
    y = t.apply("copysign", t.apply("sqrt", t.apply("sub", root, s)), x)
    for _ in range(3):
        slope = _k("mul", t.apply("exp", t.apply("neg", t.apply("mul", y, y))), 2 / math.sqrt(math.pi))
        y = _halley(y, t.apply("div", t.apply("sub", t.apply("erf", y), x), slope), y)
    return t.where(t.apply("eq", t.apply("abs", x), c(1.0, x)), t.apply("copysign", c(math.inf, x), x), y)


ERFINV_NEAR = (
    1.50140935, 0.246640289, -0.00417732004, -0.0012527485, 0.000218257724, -4.95969179e-06, -3.42341427e-06,
    4.65417411e-07, 1.59843061e-08, -8.7390107e-09, 4.67193251e-10,
)  # fmt: skip
ERFINV_FAR = (
    3.00149264, 1.00429657, 0.00640627148, -0.0046928159, 0.00326727564, -0.0022092043, 0.00122355821, -0.000347732979,
    -0.000137019445, 0.000111522353,
)  # fmt: skip
"""erfinv(x) / x where w = -log(1 - x²) is below 5, as a polynomial of w - 2.5; and beyond, of sqrt(w) - 3.168, up to
the last number of float32 below 1. They meet the function at Chebyshev's points, and are 3 units of the last place off
at most.
"""


def _erfinv_single(x: Any) -> Any:
    """x times a polynomial of log(1 - x²), or of its root. What the logarithm is off near 1 is little beside 2.5."""
    one = c(1.0, x)
    w = _k("mul", t.apply("approx_log2", t.apply("mul", t.apply("sub", one, x), t.apply("add", one, x))), -math.log(2))
    near = _polynomial(_k("sub", w, 2.5), ERFINV_NEAR)
    far = _polynomial(_k("sub", t.apply("approx_sqrt", w), 3.168), ERFINV_FAR)
    return t.apply("mul", x, t.where(t.apply("lt", w, c(5.0, w)), near, far))


def _ndtri(p: Any) -> Any:
    """Abramowitz and Stegun 26.2.23, then three steps of Halley's method on the smaller tail."""
    tail = t.apply("min", p, t.apply("sub", c(1.0, p), p))
    w = t.apply("sqrt", _k("mul", t.apply("log", tail), -2.0))
    ratio = t.apply(
        "div", _polynomial(w, (2.515517, 0.802853, 0.010328)), _polynomial(w, (1.0, 1.432788, 0.189269, 0.001308))
    )
    y = t.apply("sub", ratio, w)
    for _ in range(3):
        off = t.apply("sub", _k("mul", t.apply("erfc", _k("mul", y, -math.sqrt(0.5))), 0.5), tail)
        density = _k("mul", t.apply("exp", _k("mul", t.apply("mul", y, y), -0.5)), 1 / math.sqrt(2 * math.pi))
        y = _halley(y, t.apply("div", off, density), _k("mul", y, 0.5))
    y = t.where(t.apply("gt", p, c(0.5, p)), t.apply("neg", y), y)
    y = t.where(t.apply("eq", p, c(0.0, p)), c(-math.inf, p), y)
    return t.where(t.apply("eq", p, c(1.0, p)), c(math.inf, p), y)


def _erfcx(x: Any) -> Any:
    """exp(x²) erfc(x); its asymptotic series from 12 on, https://dlmf.nist.gov/7.12."""
    r = t.apply("div", c(1.0, x), x)
    terms = [1 / math.sqrt(math.pi)]
    for k in range(1, 9):
        terms.append(terms[-1] * -(2 * k - 1) / 2)
    far = t.apply("mul", r, _polynomial(t.apply("mul", r, r), terms))
    near = t.apply("mul", t.apply("exp", t.apply("mul", x, x)), t.apply("erfc", x))
    return t.where(t.apply("gt", x, c(12.0, x)), far, near)


NODES = 24
"""Points of Chebyshev's quadrature for the modified Bessel functions; enough up to FAR, where their asymptotic series
takes over."""
FAR = 30.0


def _bessel_terms(order: int) -> list[float]:
    """sqrt(x) exp(-x) I_n(x) as an asymptotic series of 1 / x, https://dlmf.nist.gov/10.40."""
    terms = [1 / math.sqrt(2 * math.pi)]
    for k in range(1, 14):
        terms.append(terms[-1] * ((2 * k - 1) ** 2 - 4 * order) / (8 * k))
    return terms


def _bessel_i(order: int, scaled: bool) -> Build:
    """I_n(x), the mean of cos(theta)^n exp(x cos(theta)) for n = 0 and 1; exp(-|x|) times it if scaled.

    https://dlmf.nist.gov/10.32
    """

    def build(x: Any) -> Any:
        a = t.apply("abs", x)
        near: Any = None
        for k in range(NODES):
            cos = math.cos(math.pi * (k + 0.5) / NODES)
            term = _k("mul", t.apply("exp", _k("mul", a, cos - 1)), cos**order / NODES)
            near = term if near is None else t.apply("add", near, term)
        r = t.apply("div", c(1.0, a), a)
        far = t.apply("mul", t.apply("sqrt", r), _polynomial(r, _bessel_terms(order)))
        value = t.where(t.apply("lt", a, c(FAR, a)), near, far)
        if not scaled:
            value = t.apply("mul", value, t.apply("exp", a))
        value = t.apply("mul", value, t.apply("sign", x)) if order else value
        return t.where(t.apply("isnan", x), x, value)

    return build


NEAR = 8.0
"""Up to here the Bessel functions are polynomials of x in float32, and of 1 / x beyond."""


@cache
def _bessel_polynomials(order: int) -> tuple[list[float], list[float]]:
    """exp(-x) I_n(x), for n = 1 over x, on [0, NEAR], and sqrt(x) exp(-x) I_n(x) for 1 / x in [0, 1 / NEAR], both as
    polynomials on [-1, 1], which meet them at Chebyshev's points.
    """
    cos = np.cos(np.pi * (np.arange(NODES) + 0.5) / NODES)
    terms = _bessel_terms(order)

    def near(at: Any) -> Any:
        x = (at + 1) * (NEAR / 2)
        return sum(k**order * np.exp(x * (k - 1)) for k in cos) / NODES / x**order

    def far(at: Any) -> Any:
        r = (at + 1) / (2 * NEAR)
        x = 1 / r
        whole = sum(k**order * np.exp(np.minimum(x, FAR) * (k - 1)) for k in cos) / NODES
        return np.where(x < FAR, whole * np.sqrt(x), np.polynomial.polynomial.polyval(r, terms))

    found = [chebyshev.cheb2poly(chebyshev.chebinterpolate(f, n)).tolist() for f, n in ((near, 16), (far, 8))]
    return found[0], found[1]


def _bessel_i_single(order: int, scaled: bool) -> Build:
    """The same in float32, by polynomials; exp(x) in two factors, so that it does not overflow before they do."""

    def build(x: Any) -> Any:
        near, far = _bessel_polynomials(order)
        a = t.apply("abs", x)
        r = t.apply("div", c(1.0, a), a)
        close = _polynomial(_k("sub", _k("mul", a, 2 / NEAR), 1.0), near)
        close = t.apply("mul", close, a) if order else close
        away = t.apply("mul", _polynomial(_k("sub", _k("mul", r, 2 * NEAR), 1.0), far), t.apply("sqrt", r))
        value = t.where(t.apply("le", a, c(NEAR, a)), close, away)
        if not scaled:
            most = _k("min", a, 80.0)
            for part in (most, t.apply("sub", a, most)):
                value = t.apply("mul", value, t.apply("exp", part))
        value = t.apply("mul", value, t.apply("sign", x)) if order else value
        return t.where(t.apply("isnan", x), x, value)

    return build


FUNCTIONS = (
    _in_double("digamma", lambda x: polygamma_of(0, x), "The derivative of log gamma."),
    _by_width("erfinv", _erfinv_single, _erfinv, "The inverse of erf."),
    _in_double("special_ndtri", _ndtri, "The inverse of the normal distribution function."),
    _in_double("special_erfcx", _erfcx, "exp(x²) erfc(x)."),
    *(
        _by_width(
            name,
            _bessel_i_single(order, scaled),
            _bessel_i(order, scaled),
            f"The modified Bessel function I{order}{', times exp(-|x|)' if scaled else ''}.",
        )
        for name, order, scaled in (
            ("i0", 0, False), ("special_i0e", 0, True), ("special_i1", 1, False), ("special_i1e", 1, True),
            ("special_modified_bessel_i0", 0, False), ("special_modified_bessel_i1", 1, False),
        )
    ),
)  # fmt: skip


@aten("ldexp.Tensor")
def ldexp(node: Aten, x: Any, exponent: Any) -> Any:
    """x * 2^exponent; a float with an integer exponent is rounded once, in two steps so that no power overflows."""
    out = result(node)
    if exponent.type.dtype.is_float or not x.type.dtype.is_float:
        dtype = promoted(2.0, exponent) if exponent.type.rank else out.dtype
        wide = t.cast(exponent, dtype.compute)
        return pointwise(node, out.dtype.compute, x, t.cast(t.apply("pow", c(2.0, wide), wide), dtype), fn="mul")
    e = operand(t.cast(exponent, i32), i64, out.shape)
    e = _k("max", _k("min", e, 2046), -2046)
    half = _k("shr", e, 1)
    first, second = (t.apply("exp2", t.cast(k, f64)) for k in (half, t.apply("sub", e, half)))
    return t.cast(t.apply("mul", t.apply("mul", operand(x, f64, out.shape), first), second), out.dtype)


@aten("angle.default")
def angle(node: Aten, x: Any) -> Any:
    """pi for negative numbers, else 0; NaN stays."""

    def build(a: Any) -> Any:
        return t.where(t.apply("isnan", a), a, t.where(t.apply("lt", a, c(0.0, a)), c(math.pi, a), c(0.0, a)))

    return pointwise(node, result(node).dtype.compute, x, fn=build)


def searched(values: Any, rows: Any, row: Sequence[Any], right: bool) -> Any:
    """How many of the sorted numbers rows[*row, :] come before each value: a binary search, step by step as eager does
    it.
    """
    shape, count = values.type.shape, rows.type.shape[-1]
    whole = i32 if count < 1 << 30 else i64
    low: Any = t.literal(0, whole, shape)
    high: Any = t.literal(count, whole, shape)
    least = count  # of what lies between both
    for _ in range(count.bit_length()):
        middle = t.apply("shr", t.apply("add", low, high), c(1, low))
        safe = t.apply("min", middle, c(count - 1, middle))
        found = t.index_map(rows, shape, [*row, t.loaded(safe, t.coordinates(shape), count)])
        after = t.apply("gt" if right else "ge", found, values)
        if least > 0:
            low, high = t.where(after, low, t.apply("add", middle, c(1, middle))), t.where(after, middle, high)
        else:  # it may be found already
            open_ = t.apply("lt", low, high)
            low = t.where(t.apply("and_", open_, t.apply("not_", after)), t.apply("add", middle, c(1, middle)), low)
            high = t.where(t.apply("and_", open_, after), middle, high)
        least = (least + 1) // 2 - 1
    return low


@aten("searchsorted.Tensor", "searchsorted.Scalar")
def searchsorted(
    node: Aten,
    rows: Any,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """Where each value would be inserted into its sorted row."""
    out = result(node)
    count = rows.type.shape[-1]
    need(count, "it is empty")
    if sorter is not None:
        here = t.coordinates(rows.type.shape)
        rows = t.index_map(rows, rows.type.shape, [*here[:-1], t.loaded(t.cast(sorter, i64), here, count)])
    compute = promoted(rows, values).compute
    row = t.coordinates(out.shape)[:-1] if rows.type.rank > 1 else ()
    return t.cast(
        searched(operand(values, compute, out.shape), t.cast(rows, compute), row, right or side == "right"), out.dtype
    )


@aten("bucketize.Tensor", "bucketize.Scalar")
def bucketize(node: Aten, values: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    """Between which of the sorted boundaries each value lies."""
    out = result(node)
    need(boundaries.type.numel, "it is empty")
    compute = promoted(boundaries, values).compute
    return t.cast(searched(operand(values, compute, out.shape), t.cast(boundaries, compute), (), right), out.dtype)


RULES: tuple[Rule, ...] = (*FUNCTIONS, polygamma, ldexp, angle, searchsorted, bucketize)
