"""The scalar functions every level shares: one row per function, valid from Tensor IR to the emitted code.

A row says: how many arguments, what type comes out, what it means (numpy), how C and CUDA spell it, and what it costs.

In a spelling, {0} {1} {2} are the arguments, {f} is the suffix of the float type (`expf` / `exp`) and {t} the C type of
the first argument. C and CUDA share one math library interface, so one spelling serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from terrazzo.errors import UserError
from terrazzo.ir.node import distinct
from terrazzo.ir.types import DTYPES, DType, bf16, bool_, f32, f64, i32, i64

Rule = Callable[[Sequence[DType]], "DType | None"]


@distinct
@dataclass(frozen=True, eq=False)
class Scalar:
    """One scalar function. `cost` is in units of one floating-point addition, vectorised."""

    name: str
    arity: int
    result: Rule
    numpy: Callable[..., Any]
    c: str
    cost: float = 1.0

    def __repr__(self) -> str:
        return self.name

    def infer(self, args: Sequence[DType]) -> DType:
        """The element type of the result; UserError where the arguments do not fit."""
        out = self.result(args) if len(args) == self.arity else None
        if out is None:
            raise UserError(f"{self.name} does not take ({', '.join(t.name for t in args)})")
        return out


def _same(*kinds: str) -> Rule:
    """All arguments of one type, of one of these kinds, which is also the result's. 16-bit floats do not compute."""
    return lambda a: a[0] if all(t is a[0] for t in a) and a[0].kind in kinds and a[0].compute is a[0] else None


def _test(*kinds: str) -> Rule:
    """Arguments of one type; a bool comes out."""
    return lambda a: bool_ if all(t is a[0] for t in a) and a[0].kind in kinds else None


def _select(a: Sequence[DType]) -> DType | None:
    return a[1] if a[0] is bool_ and a[1] is a[2] else None


_FLOAT, _INT, _NUMBER, _ANY = ("float",), ("int", "uint"), ("float", "int", "uint"), ("float", "int", "uint", "bool")


def _quiet(f: Callable[..., Any]) -> Callable[..., Any]:
    """Division by zero, overflow and NaN are values here, not events."""

    def g(*args: Any) -> Any:
        with np.errstate(all="ignore"):
            return f(*args)

    return g


def _torch(name: str) -> Callable[..., Any]:
    """A special function numpy lacks, as PyTorch computes it."""

    def f(*args: Any) -> Any:
        import torch

        given = [torch.from_numpy(np.array(a)) for a in args]
        return getattr(torch.special, name)(*given).numpy()

    return f


def _logistic(x: Any) -> Any:
    one = x.dtype.type(1)
    return one / (one + np.exp2(x))


def _truncdiv(a: Any, b: Any) -> Any:
    q = np.floor_divide(a, b)
    return np.where((q < 0) & (q * b != a), q + 1, q).astype(np.result_type(a))


def _integer_power(a: Any, b: Any) -> Any:
    a, b = np.broadcast_arrays(a, b)
    out, square, n = np.ones_like(a), a.copy(), np.maximum(b, 0)
    while n.any():
        out = np.where(n & 1, out * square, out)
        square, n = square * square, n >> 1
    unit = (a == 1) | (a == -1)  # a negative power of an integer is 0 but for 1 and -1
    return np.where(b < 0, np.where(unit, np.where(b % 2 == 0, np.ones_like(a), a), np.zeros_like(a)), out)


def _upper(x: Any) -> Any:
    """The upper half of numbers in float32, as numbers in bfloat16."""
    return (np.asarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(bf16.numpy)


def _order(x: Any) -> Any:
    """Whole numbers as large as floats are, and their order: both zeros are one number, and NaN is the largest."""
    whole = np.dtype(f"i{x.dtype.itemsize}")
    most = np.iinfo(whole).max
    bits = np.asarray(x + 0).view(whole)
    return np.where(np.isnan(x), most, bits ^ ((bits >> (8 * x.dtype.itemsize - 1)) & most)).astype(whole)


def _table(*rows: Scalar) -> dict[str, Scalar]:
    return {r.name: Scalar(r.name, r.arity, r.result, _quiet(r.numpy), r.c, r.cost) for r in rows}


SCALARS = _table(
    # arithmetic
    Scalar("add", 2, _same(*_NUMBER), np.add, "({0} + {1})"),
    Scalar("sub", 2, _same(*_NUMBER), np.subtract, "({0} - {1})"),
    Scalar("mul", 2, _same(*_NUMBER), np.multiply, "({0} * {1})"),
    Scalar("tf32_mul", 2, lambda a: f32 if set(a) == {f32} else None, np.multiply, "({0} * {1})"),  # or as TF32 has it
    Scalar("rounded_mul", 2, _same(*_FLOAT), np.multiply, "tz_rounded_mul({0}, {1})"),  # before anything is added to it
    Scalar("div", 2, _same(*_FLOAT), np.divide, "({0} / {1})", 4),
    Scalar("approx_div", 2, _same(*_FLOAT), np.divide, "tz_approx_div({0}, {1})", 2),  # to two units in the last place
    Scalar("floordiv", 2, _same(*_INT), np.floor_divide, "tz_floordiv({0}, {1})", 20),
    Scalar("truncdiv", 2, _same(*_INT), _truncdiv, "tz_truncdiv({0}, {1})", 20),
    Scalar("fmod", 2, _same(*_NUMBER), np.fmod, "tz_fmod({0}, {1})", 20),  # sign of the dividend, as in C
    Scalar("mod", 2, _same(*_NUMBER), np.remainder, "tz_mod({0}, {1})", 20),  # sign of the divisor, as in Python
    Scalar("neg", 1, _same(*_NUMBER), np.negative, "(-{0})"),
    Scalar("abs", 1, _same(*_NUMBER), np.abs, "tz_abs({0})"),
    Scalar("sign", 1, _same(*_NUMBER), np.sign, "tz_sign({0})", 2),
    Scalar("gcd", 2, _same(*_INT), np.gcd, "tz_gcd({0}, {1})", 200),
    Scalar("ipow", 2, _same(*_INT), _integer_power, "tz_ipow({0}, {1})", 40),
    # minimum and maximum propagate NaN, as PyTorch's do; fmin and fmax prefer the number
    Scalar("min", 2, _same(*_ANY), np.minimum, "tz_min({0}, {1})"),
    Scalar("max", 2, _same(*_ANY), np.maximum, "tz_max({0}, {1})"),
    Scalar("fmin", 2, _same(*_FLOAT), np.fmin, "tz_fmin({0}, {1})"),
    Scalar("fmax", 2, _same(*_FLOAT), np.fmax, "tz_fmax({0}, {1})"),
    # rounding; round goes to even at ties
    Scalar("floor", 1, _same(*_FLOAT), np.floor, "floor{f}({0})"),
    Scalar("ceil", 1, _same(*_FLOAT), np.ceil, "ceil{f}({0})"),
    Scalar("trunc", 1, _same(*_FLOAT), np.trunc, "trunc{f}({0})"),
    Scalar("round", 1, _same(*_FLOAT), np.rint, "nearbyint{f}({0})"),
    # powers, exponentials, logarithms
    Scalar("sqrt", 1, _same(*_FLOAT), np.sqrt, "sqrt{f}({0})", 4),
    Scalar("rsqrt", 1, _same(*_FLOAT), lambda x: (1 / np.sqrt(x)).astype(np.result_type(x)), "tz_rsqrt({0})", 8),
    Scalar("pow", 2, _same(*_FLOAT), np.power, "pow{f}({0}, {1})", 30),
    Scalar("exp", 1, _same(*_FLOAT), np.exp, "tz_exp({0})", 10),
    Scalar("exp2", 1, _same(*_FLOAT), np.exp2, "exp2{f}({0})", 10),
    Scalar("approx_logistic", 1, _same(*_FLOAT), _logistic, "tz_approx_logistic({0})", 4),  # 1 / (1 + 2^x), to 2^-22
    Scalar("approx_exp2", 1, _same(*_FLOAT), np.exp2, "tz_approx_exp2({0})", 2),  # to two units in the last place
    # 2^-22 off at most, which is far from exact where x is near 1
    Scalar("approx_log2", 1, _same(*_FLOAT), np.log2, "tz_approx_log2({0})", 2),
    Scalar("approx_sqrt", 1, _same(*_FLOAT), np.sqrt, "tz_approx_sqrt({0})", 2),  # to a unit in the last place
    Scalar("expm1", 1, _same(*_FLOAT), np.expm1, "expm1{f}({0})", 14),
    Scalar("log", 1, _same(*_FLOAT), np.log, "log{f}({0})", 10),
    Scalar("log2", 1, _same(*_FLOAT), np.log2, "log2{f}({0})", 10),
    Scalar("log10", 1, _same(*_FLOAT), np.log10, "log10{f}({0})", 10),
    Scalar("log1p", 1, _same(*_FLOAT), np.log1p, "log1p{f}({0})", 14),
    # trigonometric and hyperbolic functions
    Scalar("sin", 1, _same(*_FLOAT), np.sin, "tz_sin({0})", 12),
    Scalar("cos", 1, _same(*_FLOAT), np.cos, "tz_cos({0})", 12),
    Scalar("tan", 1, _same(*_FLOAT), np.tan, "tan{f}({0})", 16),
    Scalar("asin", 1, _same(*_FLOAT), np.arcsin, "asin{f}({0})", 16),
    Scalar("acos", 1, _same(*_FLOAT), np.arccos, "acos{f}({0})", 16),
    Scalar("atan", 1, _same(*_FLOAT), np.arctan, "atan{f}({0})", 16),
    Scalar("atan2", 2, _same(*_FLOAT), np.arctan2, "atan2{f}({0}, {1})", 24),
    Scalar("sinh", 1, _same(*_FLOAT), np.sinh, "sinh{f}({0})", 16),
    Scalar("cosh", 1, _same(*_FLOAT), np.cosh, "cosh{f}({0})", 16),
    Scalar("tanh", 1, _same(*_FLOAT), np.tanh, "tanh{f}({0})", 14),
    Scalar("asinh", 1, _same(*_FLOAT), np.arcsinh, "asinh{f}({0})", 20),
    Scalar("acosh", 1, _same(*_FLOAT), np.arccosh, "acosh{f}({0})", 20),
    Scalar("atanh", 1, _same(*_FLOAT), np.arctanh, "atanh{f}({0})", 20),
    # special functions
    Scalar("erf", 1, _same(*_FLOAT), _torch("erf"), "erf{f}({0})", 14),
    Scalar("erfc", 1, _same(*_FLOAT), _torch("erfc"), "erfc{f}({0})", 20),
    Scalar("ndtr", 1, _same(*_FLOAT), _torch("ndtr"), "tz_ndtr({0})", 12),  # to an absolute error; its tail is erfc's
    Scalar("approx_ndtr", 1, _same(*_FLOAT), _torch("ndtr"), "tz_approx_ndtr({0})", 8),  # to 2^-17 from -6 on
    Scalar("lgamma", 1, _same(*_FLOAT), _torch("gammaln"), "lgamma{f}({0})", 60),
    Scalar("hypot", 2, _same(*_FLOAT), np.hypot, "hypot{f}({0}, {1})", 10),
    Scalar("copysign", 2, _same(*_FLOAT), np.copysign, "copysign{f}({0}, {1})"),
    Scalar("nextafter", 2, _same(*_FLOAT), np.nextafter, "nextafter{f}({0}, {1})", 10),
    # comparisons and tests
    Scalar("eq", 2, _test(*_ANY), np.equal, "({0} == {1})"),
    Scalar("ne", 2, _test(*_ANY), np.not_equal, "({0} != {1})"),
    Scalar("lt", 2, _test(*_ANY), np.less, "({0} < {1})"),
    Scalar("le", 2, _test(*_ANY), np.less_equal, "({0} <= {1})"),
    Scalar("gt", 2, _test(*_ANY), np.greater, "({0} > {1})"),
    Scalar("ge", 2, _test(*_ANY), np.greater_equal, "({0} >= {1})"),
    Scalar("isnan", 1, _test(*_FLOAT), np.isnan, "({0} != {0})"),
    Scalar("order", 1, lambda a: {f32: i32, f64: i64}.get(a[0]), _order, "tz_order({0})", 6),
    Scalar("signbit", 1, _test(*_FLOAT), np.signbit, "tz_signbit({0})"),
    # logic on bools, bits on integers
    Scalar("and_", 2, _same("bool", *_INT), np.bitwise_and, "({t})({0} & {1})"),
    Scalar("or_", 2, _same("bool", *_INT), np.bitwise_or, "({t})({0} | {1})"),
    Scalar("xor", 2, _same("bool", *_INT), np.bitwise_xor, "({t})({0} ^ {1})"),
    Scalar("not_", 1, _same("bool", *_INT), np.invert, "tz_not({0})"),
    Scalar("shl", 2, _same(*_INT), np.left_shift, "tz_shl({0}, {1})"),
    Scalar("shr", 2, _same(*_INT), np.right_shift, "tz_shr({0}, {1})"),
    # the bfloat16 next towards zero; of a NaN, that or an infinity
    Scalar("cut_bf16", 1, lambda a: bf16 if a[0] is f32 else None, _upper, "tz_cut_bf16({0})"),
    Scalar("where", 3, _select, np.where, "({0} ? {1} : {2})"),
)


def _cast(to: DType) -> Scalar:
    def numpy(x: Any) -> Any:
        with np.errstate(all="ignore"):
            return np.asarray(x).astype(to.numpy)

    return Scalar(to.name, 1, lambda a: to, numpy, f"tz_cast<{to.name}>({{0}})", 1)


COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
"""The functions that compare two."""

DIVISIONS = frozenset({"floordiv", "truncdiv", "mod", "fmod"})
"""Of whole numbers by zero these give 0, or any number, where PyTorch raises on a CPU: so does what runs there."""

CASTS = {t: _cast(t) for t in DTYPES.values() if t.kind != "complex"}
"""The conversion to each type, called by the type's name, as PyTorch converts (to float: nearest even; to bool:
!= 0)."""

BY_NAME: dict[str, Scalar] = {**SCALARS, **{c.name: c for c in CASTS.values()}}


def scalar(name: str) -> Scalar:
    """The scalar function called `name`."""
    if name not in BY_NAME:
        raise UserError(f"unknown scalar function {name!r}")
    return BY_NAME[name]


def is_cast(fn: Scalar) -> bool:
    """True for the conversions."""
    return fn.name in DTYPES
