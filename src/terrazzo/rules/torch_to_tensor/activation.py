"""Functions of one element: exponentials, trigonometry, rounding, activations."""

from __future__ import annotations

import math
from typing import Any

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.rewrite.rule import Rule
from terrazzo.rules.torch_to_tensor.common import aten, pointwise, result
from terrazzo.rules.torch_to_tensor.pointwise import Build, c, clamp_to


def _unary(name: str, fn: str | Build) -> Rule:
    """A function of one element, computed in the result's type (integers are promoted to float by PyTorch's own
    answer).
    """
    rule = aten(f"{name}.default")(lambda node, x: pointwise(node, result(node).dtype.compute, x, fn=fn))
    return Rule(name, rule.keys, rule.rewrite, f"{name}(x), element by element.")


def _times(factor: float) -> Build:
    return lambda x: t.apply("mul", x, c(factor, x))


def sigmoid_of(x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    return t.apply("div", c(1.0, x), t.apply("add", c(1.0, x), t.apply("exp", t.apply("neg", x))))


def softplus_of(x: Any) -> Any:
    """log(1 + exp(x)), without overflow."""
    zero = c(0.0, x)
    return t.apply("add", t.apply("max", x, zero), t.apply("log1p", t.apply("exp", t.apply("neg", t.apply("abs", x)))))


def _sinc(x: Any) -> Any:
    p = t.apply("mul", x, c(math.pi, x))
    return t.where(t.apply("eq", x, c(0.0, x)), c(1.0, x), t.apply("div", t.apply("sin", p), p))


def _entr(x: Any) -> Any:
    zero = c(0.0, x)
    inside = t.where(t.apply("eq", x, zero), zero, t.apply("neg", t.apply("mul", x, t.apply("log", x))))
    return t.where(t.apply("isnan", x), x, t.where(t.apply("lt", x, zero), c(-math.inf, x), inside))


def _logit(x: Any) -> Any:
    return t.apply("log", t.apply("div", x, t.apply("sub", c(1.0, x), x)))


def _frac(x: Any) -> Any:
    return t.apply("sub", x, t.apply("trunc", x))


def _mish(x: Any) -> Any:
    return t.apply("mul", x, t.apply("tanh", softplus_of(x)))


def _relu6(x: Any) -> Any:
    return t.apply("min", t.apply("max", x, c(0.0, x)), c(6.0, x))


def _ndtr(x: Any) -> Any:
    return t.apply("mul", t.apply("erfc", t.apply("mul", x, c(-math.sqrt(0.5), x))), c(0.5, x))


def _log_sigmoid(x: Any) -> Any:
    return t.apply("neg", softplus_of(t.apply("neg", x)))


FLOAT_FUNCTIONS = tuple(
    _unary(name, fn)
    for name, fn in {
        **{n: n for n in (
            "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan",
            "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "lgamma",
        )},
        "sigmoid": sigmoid_of, "silu": lambda x: t.apply("mul", x, sigmoid_of(x)),
        "reciprocal": lambda x: t.apply("div", c(1.0, x), x),
        "sinc": _sinc, "special_entr": _entr, "frac": _frac, "mish": _mish, "special_ndtr": _ndtr, "relu6": _relu6,
        "deg2rad": _times(math.pi / 180), "rad2deg": _times(180 / math.pi), "log_sigmoid": _log_sigmoid,
        "hardsigmoid": lambda x: t.apply("div", _relu6(t.apply("add", x, c(3.0, x))), c(6.0, x)),
        "hardswish": lambda x: t.apply("div", t.apply("mul", x, _relu6(t.apply("add", x, c(3.0, x)))), c(6.0, x)),
    }.items()
)  # fmt: skip


def _rounding(name: str) -> Rule:
    """Rounding leaves integers as they are."""

    def lower(node: Aten, x: Any) -> Any:
        dtype = result(node).dtype
        return pointwise(node, dtype.compute, x, fn=name if dtype.is_float else lambda a: a)

    rule = aten(f"{name}.default")(lower)
    return Rule(name, rule.keys, rule.rewrite, f"{name}(x); an integer stays.")


ROUNDINGS = tuple(map(_rounding, ("floor", "ceil", "trunc", "round")))


@aten("round.decimals")
def round_decimals(node: Aten, x: Any, decimals: int = 0) -> Any:
    """round(x * 10^d) / 10^d, half to even."""
    scale = 10.0 ** abs(decimals)
    into, back = ("mul", "div") if decimals >= 0 else ("div", "mul")
    return pointwise(
        node,
        result(node).dtype.compute,
        x,
        fn=lambda a: t.apply(back, t.apply("round", t.apply(into, a, c(scale, a))), c(scale, a)),
    )


@aten("relu.default")
def relu(node: Aten, x: Any) -> Any:
    """max(x, 0)."""
    return pointwise(node, result(node).dtype.compute, x, 0, fn="max")


@aten("gelu.default")
def gelu(node: Aten, x: Any, approximate: str = "none") -> Any:
    """x times the normal distribution function of x, or its tanh approximation."""

    def build(a: Any) -> Any:
        if approximate == "tanh":
            half = t.apply("mul", a, c(0.5, a))
            cube = t.apply("mul", t.apply("mul", a, a), a)
            inner = t.apply(
                "mul", c(math.sqrt(2 / math.pi), a), t.apply("add", a, t.apply("mul", c(0.044715, a), cube))
            )
            return t.apply("mul", half, t.apply("add", c(1.0, a), t.apply("tanh", inner)))
        return t.apply("mul", a, t.apply("ndtr", a))

    return pointwise(node, result(node).dtype.compute, x, fn=build)


@aten("leaky_relu.default")
def leaky_relu(node: Aten, x: Any, slope: float = 0.01) -> Any:
    """x where x > 0, else slope * x."""
    return pointwise(
        node,
        result(node).dtype.compute,
        x,
        fn=lambda a: t.where(t.apply("gt", a, c(0.0, a)), a, t.apply("mul", a, c(slope, a))),
    )


@aten("elu.default")
def elu(node: Aten, x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    """scale * (x where x > 0, else alpha * (exp(input_scale * x) - 1))."""

    def build(a: Any) -> Any:
        below = t.apply("mul", t.apply("expm1", t.apply("mul", a, c(input_scale, a))), c(alpha * scale, a))
        return t.where(t.apply("gt", a, c(0.0, a)), t.apply("mul", a, c(scale, a)), below)

    return pointwise(node, result(node).dtype.compute, x, fn=build)


@aten("hardtanh.default")
def hardtanh(node: Aten, x: Any, low: float = -1.0, high: float = 1.0) -> Any:
    """x limited to [low, high]."""
    return clamp_to(node, x, low, high)


@aten("softplus.default")
def softplus(node: Aten, x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """log(1 + exp(beta * x)) / beta, and x itself beyond the threshold."""

    def build(a: Any) -> Any:
        scaled = t.apply("mul", a, c(beta, a))
        soft = t.apply("div", t.apply("log1p", t.apply("exp", scaled)), c(beta, a))
        return t.where(t.apply("gt", scaled, c(threshold, a)), a, soft)

    return pointwise(node, result(node).dtype.compute, x, fn=build)


@aten("threshold.default")
def threshold(node: Aten, x: Any, limit: Any, value: Any) -> Any:
    """value where x <= limit, else x."""
    return pointwise(
        node, result(node).dtype.compute, x, fn=lambda a: t.where(t.apply("le", a, c(limit, a)), c(value, a), a)
    )


@aten("threshold_backward.default")
def threshold_backward(node: Aten, grad: Any, x: Any, limit: Any) -> Any:
    """0 where x <= limit, else grad."""
    return pointwise(
        node, result(node).dtype.compute, grad, x, fn=lambda g, a: t.where(t.apply("le", a, c(limit, a)), c(0, g), g)
    )


@aten("logit.default")
def logit(node: Aten, x: Any, eps: float | None = None) -> Any:
    """log(x / (1 - x)), with x limited to [eps, 1 - eps] first."""

    def build(a: Any) -> Any:
        if eps is not None:
            a = t.apply("min", t.apply("max", a, c(eps, a)), c(1 - eps, a))
        return _logit(a)

    return pointwise(node, result(node).dtype.compute, x, fn=build)


RULES: tuple[Rule, ...] = (
    *FLOAT_FUNCTIONS, *ROUNDINGS, round_decimals, relu, gelu, leaky_relu, elu, hardtanh, softplus, threshold,
    threshold_backward, logit,
)  # fmt: skip
