"""Arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.rewrite.rule import Rule, need
from terrazzo.rules.torch_to_tensor.common import aten, operand, pointwise, result

Build = Callable[..., Any]


def c(value: float, like: Any) -> Any:
    """The constant `value`, of the type and shape of `like`."""
    return t.literal(value, like.type.dtype, like.type.shape)


@aten("add.Tensor", "add.Scalar")
def add(node: Aten, x: Any, y: Any, alpha: Any = 1) -> Any:
    """x + alpha * y in the promoted type; bools add as "or"."""
    dtype = result(node).dtype
    if dtype.kind == "bool":
        return pointwise(node, dtype, x, y, fn="or_") if alpha else pointwise(node, dtype, x, fn=lambda a: a)
    if alpha == 1:
        return pointwise(node, dtype.compute, x, y, fn="add")
    return pointwise(node, dtype.compute, x, y, alpha, fn=lambda a, b, k: t.apply("add", a, t.apply("mul", b, k)))


@aten("sub.Tensor", "sub.Scalar")
def sub(node: Aten, x: Any, y: Any, alpha: Any = 1) -> Any:
    """x - alpha * y in the promoted type."""
    compute = result(node).dtype.compute
    if alpha == 1:
        return pointwise(node, compute, x, y, fn="sub")
    return pointwise(node, compute, x, y, alpha, fn=lambda a, b, k: t.apply("sub", a, t.apply("mul", b, k)))


@aten("rsub.Tensor", "rsub.Scalar")
def rsub(node: Aten, x: Any, y: Any, alpha: Any = 1) -> Any:
    """y - alpha * x in the promoted type."""
    return pointwise(
        node,
        result(node).dtype.compute,
        x,
        y,
        alpha,
        fn=lambda a, b, k: t.apply("sub", b, a if alpha == 1 else t.apply("mul", a, k)),
    )


@aten("mul.Tensor", "mul.Scalar")
def mul(node: Aten, x: Any, y: Any) -> Any:
    """x * y in the promoted type; bools multiply as "and"."""
    dtype = result(node).dtype
    return pointwise(node, dtype.compute, x, y, fn="and_" if dtype.kind == "bool" else "mul")


@aten("div.Tensor", "div.Scalar", "true_divide.Tensor")
def div(node: Aten, x: Any, y: Any) -> Any:
    """x / y as floats."""
    return pointwise(node, result(node).dtype.compute, x, y, fn="div")


@aten("div.Tensor_mode", "div.Scalar_mode")
def div_mode(node: Aten, x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    """x / y, rounded towards zero ("trunc") or down ("floor")."""
    compute = result(node).dtype.compute
    if rounding_mode is None:
        return pointwise(node, compute, x, y, fn="div")
    if compute.is_integer:
        return pointwise(node, compute, x, y, fn="truncdiv" if rounding_mode == "trunc" else "floordiv")
    if rounding_mode == "trunc":
        return pointwise(node, compute, x, y, fn=lambda a, b: t.apply("trunc", t.apply("div", a, b)))
    return pointwise(node, compute, x, y, fn=floor_divide_floats)


def floor_divide_floats(a: Any, b: Any) -> Any:
    """floor(a / b) as PyTorch rounds it: by the remainder, so that it agrees with %; plain division by zero."""
    rest = t.apply("fmod", a, b)
    quotient = t.apply("div", t.apply("sub", a, rest), b)
    zero, one = c(0.0, a), c(1.0, a)
    differs = t.apply(
        "and_", t.apply("ne", rest, zero), t.apply("xor", t.apply("lt", b, zero), t.apply("lt", rest, zero))
    )
    quotient = t.where(differs, t.apply("sub", quotient, one), quotient)
    floor = t.apply("floor", quotient)
    up = t.apply("gt", t.apply("sub", quotient, floor), c(0.5, a))
    rounded = t.where(up, t.apply("add", floor, one), floor)
    rounded = t.where(t.apply("eq", quotient, zero), t.apply("copysign", zero, t.apply("div", a, b)), rounded)
    return t.where(t.apply("eq", b, zero), t.apply("div", a, b), rounded)


@aten("floor_divide.default", "floor_divide.Scalar")
def floor_divide(node: Aten, x: Any, y: Any) -> Any:
    """floor(x / y)."""
    compute = result(node).dtype.compute
    return pointwise(node, compute, x, y, fn="floordiv" if compute.is_integer else floor_divide_floats)


@aten("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def remainder(node: Aten, x: Any, y: Any) -> Any:
    """x - y * floor(x / y): the sign of the divisor; a zero has that of x."""

    def build(a: Any, b: Any) -> Any:
        rest, zero = t.apply("fmod", a, b), c(0.0, a)
        other = t.apply("xor", t.apply("lt", b, zero), t.apply("lt", rest, zero))
        return t.where(t.apply("and_", t.apply("ne", rest, zero), other), t.apply("add", rest, b), rest)

    compute = result(node).dtype.compute
    return pointwise(node, compute, x, y, fn=build if compute.is_float else "mod")


@aten("fmod.Tensor", "fmod.Scalar")
def fmod(node: Aten, x: Any, y: Any) -> Any:
    """x - y * trunc(x / y): the sign of the dividend."""
    return pointwise(node, result(node).dtype.compute, x, y, fn="fmod")


@aten("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar")
def pow_(node: Aten, x: Any, y: Any) -> Any:
    """x ** y. Small integer powers are products, as in eager; integers stay integers."""
    compute = result(node).dtype.compute
    if compute.is_integer:
        need(not isinstance(y, int) or y >= 0, "PyTorch refuses negative powers of integers, where they are numbers")
        return pointwise(node, compute, x, y, fn="ipow")
    if isinstance(y, (int, float)):
        simple: dict[float, Build] = {
            0.5: lambda a: t.apply("sqrt", a),
            -0.5: lambda a: t.apply("rsqrt", a),
            1: lambda a: a,
            2: lambda a: t.apply("mul", a, a),
            3: lambda a: t.apply("mul", t.apply("mul", a, a), a),
            -1: lambda a: t.apply("div", c(1.0, a), a),
            -2: lambda a: t.apply("div", c(1.0, a), t.apply("mul", a, a)),
        }
        if y in simple:
            return pointwise(node, compute, x, fn=simple[y])
    return pointwise(node, compute, x, y, fn="pow")


@aten("neg.default")
def neg(node: Aten, x: Any) -> Any:
    """-x; integers wrap."""
    return pointwise(node, result(node).dtype.compute, x, fn="neg")


@aten("abs.default")
def abs_(node: Aten, x: Any) -> Any:
    """|x|."""
    dtype = result(node).dtype
    return pointwise(node, dtype.compute, x, fn="abs" if dtype.kind in ("float", "int") else lambda a: a)


@aten("sign.default", "sgn.default")
def sign(node: Aten, x: Any) -> Any:
    """-1, 0 or 1 by the sign of x; NaN has the sign 0, as in eager."""
    dtype = result(node).dtype
    if dtype.kind == "bool":
        return pointwise(node, dtype, x, fn=lambda a: a)

    def build(a: Any) -> Any:
        zero, one = c(0, a), c(1, a)
        down = t.where(t.apply("lt", a, zero), c(-1, a), zero) if a.type.dtype.kind != "uint" else zero
        return t.where(t.apply("gt", a, zero), one, down)

    return pointwise(node, dtype.compute, x, fn=build)


@aten("clamp.default", "clamp.Tensor", "clamp_min.default", "clamp_min.Tensor")
def clamp(node: Aten, x: Any, min: Any = None, max: Any = None) -> Any:
    """min(max(x, low), high); NaN stays NaN."""
    return clamp_to(node, x, min, max)


@aten("clamp_max.default", "clamp_max.Tensor")
def clamp_max(node: Aten, x: Any, max: Any) -> Any:
    """min(x, high)."""
    return clamp_to(node, x, None, max)


def clamp_to(node: Aten, x: Any, low: Any, high: Any) -> Any:
    """x limited from below and above; either limit may be absent."""
    out = result(node)
    value = operand(x, out.dtype.compute, out.shape)
    for fn, limit in (("max", low), ("min", high)):
        if limit is not None:
            value = t.apply(fn, value, operand(limit, out.dtype.compute, out.shape))
    return t.cast(value, out.dtype)


def _binary(names: tuple[str, ...], fn: str | Build, doc: str, same: bool = False) -> Rule:
    rule = aten(*names, same=same)(lambda node, x, y: pointwise(node, result(node).dtype.compute, x, y, fn=fn))
    return Rule(names[0].split(".")[0], rule.keys, rule.rewrite, doc)


def _xlogy(inner: str) -> Build:
    def build(a: Any, b: Any) -> Any:
        zero = c(0.0, a)
        plain = t.where(t.apply("eq", a, zero), zero, t.apply("mul", a, t.apply(inner, b)))
        return t.where(t.apply("isnan", b), b, plain)

    return build


def _logaddexp(exp: str, log: Build) -> Build:
    def build(a: Any, b: Any) -> Any:
        top, low = t.apply("max", a, b), t.apply("min", a, b)
        soft = t.apply("add", top, log(t.apply(exp, t.apply("sub", low, top))))
        both = t.apply("and_", t.apply("eq", a, b), t.apply("eq", t.apply("abs", a), c(math.inf, a)))
        return t.where(both, a, soft)

    return build


def _heaviside(a: Any, b: Any) -> Any:
    zero, one = c(0, a), c(1, a)
    return t.where(t.apply("eq", a, zero), b, t.where(t.apply("lt", a, zero), zero, one))


BINARIES = (
    _binary(("maximum.default",), "max", "max(x, y); NaN wins."),
    _binary(("minimum.default",), "min", "min(x, y); NaN wins."),
    _binary(
        ("fmax.default",),
        lambda a, b: t.apply("fmax" if a.type.dtype.is_float else "max", a, b),
        "max(x, y); a number wins.",
    ),
    _binary(
        ("fmin.default",),
        lambda a, b: t.apply("fmin" if a.type.dtype.is_float else "min", a, b),
        "min(x, y); a number wins.",
    ),
    _binary(("atan2.default",), "atan2", "The angle of the point (y, x)."),
    _binary(("hypot.default",), "hypot", "sqrt(x² + y²)."),
    _binary(("copysign.Tensor", "copysign.Scalar"), "copysign", "|x| with the sign of y."),
    _binary(("xlogy.Tensor", "xlogy.Scalar_Self", "xlogy.Scalar_Other"), _xlogy("log"), "x * log(y); 0 where x is 0."),
    _binary(
        ("special_xlog1py.default", "special_xlog1py.other_scalar", "special_xlog1py.self_scalar"),
        _xlogy("log1p"),
        "x * log1p(y).",
    ),
    _binary(("logaddexp.default",), _logaddexp("exp", lambda x: t.apply("log1p", x)), "log(exp x + exp y)."),
    _binary(
        ("logaddexp2.default",),
        _logaddexp("exp2", lambda x: t.apply("mul", t.apply("log1p", x), c(1 / math.log(2), x))),
        "log2(2^x + 2^y).",
    ),
    _binary(("heaviside.default",), _heaviside, "0 below 0, 1 above, y at 0.", same=True),
    *(
        _binary(
            tuple(f"bitwise_{name}.{o}" for o in overloads) + (f"__{short}__.Tensor", f"__{short}__.Scalar"), fn, doc
        )
        for name, short, fn, doc, overloads in (
            ("and", "and", "and_", "x & y.", ("Tensor", "Scalar", "Scalar_Tensor")),
            ("or", "or", "or_", "x | y.", ("Tensor", "Scalar", "Scalar_Tensor")),
            ("xor", "xor", "xor", "x ^ y.", ("Tensor", "Scalar", "Scalar_Tensor")),
            ("left_shift", "lshift", "shl", "x << y.", ("Tensor", "Tensor_Scalar", "Scalar_Tensor")),
            ("right_shift", "rshift", "shr", "x >> y.", ("Tensor", "Tensor_Scalar", "Scalar_Tensor")),
        )
    ),
)


@aten("gcd.default")
def gcd(node: Aten, x: Any, y: Any) -> Any:
    """The greatest common divisor."""
    return pointwise(node, result(node).dtype, x, y, fn="gcd")


@aten("lcm.default")
def lcm(node: Aten, x: Any, y: Any) -> Any:
    """|x / gcd(x, y) * y|; 0 where both are 0."""

    def build(a: Any, b: Any) -> Any:
        g = t.apply("gcd", a, b)
        product = t.apply("mul", t.apply("truncdiv", a, t.where(t.apply("eq", g, c(0, g)), c(1, g), g)), b)
        return product if product.type.dtype.kind == "uint" else t.apply("abs", product)

    return pointwise(node, result(node).dtype, x, y, fn=build)


@aten("nextafter.default")
def nextafter(node: Aten, x: Any, y: Any) -> Any:
    """The next number after x towards y; 16-bit types have their own neighbours and stay opaque."""
    need(result(node).dtype.compute is result(node).dtype, "neighbours of 16-bit floats are not those of f32")
    return pointwise(node, result(node).dtype, x, y, fn="nextafter")


@aten("lerp.Scalar", "lerp.Tensor", same=True)
def lerp(node: Aten, x: Any, y: Any, weight: Any) -> Any:
    """x + w * (y - x), written from the nearer end as eager does."""

    def build(a: Any, b: Any, w: Any) -> Any:
        d = t.apply("sub", b, a)
        near = t.apply("add", a, t.apply("mul", w, d))
        far = t.apply("sub", b, t.apply("mul", d, t.apply("sub", c(1.0, w), w)))
        return t.where(t.apply("lt", t.apply("abs", w), c(0.5, w)), near, far)

    return pointwise(node, result(node).dtype.compute, x, y, weight, fn=build)


@aten("addcmul.default")
def addcmul(node: Aten, x: Any, a: Any, b: Any, value: Any = 1) -> Any:
    """x + value * a * b."""
    return pointwise(
        node,
        result(node).dtype.compute,
        x, a, b, value,
        fn=lambda x, a, b, v: t.apply("add", x, t.apply("mul", t.apply("mul", v, a), b)),
    )  # fmt: skip


@aten("addcdiv.default")
def addcdiv(node: Aten, x: Any, a: Any, b: Any, value: Any = 1) -> Any:
    """x + value * a / b."""
    return pointwise(
        node,
        result(node).dtype.compute,
        x, a, b, value,
        fn=lambda x, a, b, v: t.apply("add", x, t.apply("mul", v, t.apply("div", a, b))),
    )  # fmt: skip


@aten("nan_to_num.default")
def nan_to_num(node: Aten, x: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    """NaN and the infinities replaced by numbers (0 and the largest by default)."""
    dtype = result(node).dtype
    if not dtype.is_float:
        return x
    import ml_dtypes

    largest = float(ml_dtypes.finfo(dtype.numpy).max)  # type: ignore[no-untyped-call]
    a = t.cast(x, dtype.compute)
    out = t.where(t.apply("isnan", a), c(0.0 if nan is None else nan, a), a)
    out = t.where(t.apply("eq", a, c(math.inf, a)), c(largest if posinf is None else posinf, a), out)
    out = t.where(t.apply("eq", a, c(-math.inf, a)), c(-largest if neginf is None else neginf, a), out)
    return t.cast(out, dtype)


RULES: tuple[Rule, ...] = (
    add, sub, rsub, mul, div, div_mode, floor_divide, remainder, fmod, pow_, neg, abs_, sign, clamp, clamp_max,
    *BINARIES, gcd, lcm, nextafter, lerp, addcmul, addcdiv, nan_to_num,
)  # fmt: skip
