"""Comparisons, logic, tests of floats, selection."""

from __future__ import annotations

import math
from typing import Any

from terrazzo.ir.dialects import scalar
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.types import bool_
from terrazzo.rewrite.rule import Rule
from terrazzo.rules.torch_to_tensor.common import aten, operand, pointwise, promoted, result
from terrazzo.rules.torch_to_tensor.pointwise import Build, c


def _compare(name: str) -> Rule:
    def lower(node: Aten, x: Any, y: Any) -> Any:
        common, shape = promoted(x, y), result(node).shape
        return t.apply(name, *(t.cast(operand(v, common, shape), common.compute) for v in (x, y)))

    rule = aten(f"{name}.Tensor", f"{name}.Scalar")(lower)
    return Rule(name, rule.keys, rule.rewrite, f"x {name} y, compared in the promoted type.")


COMPARISONS = tuple(map(_compare, scalar.COMPARISONS))


def truth(x: Any, shape: Any) -> Any:
    """x != 0, stretched to `shape`."""
    return operand(x, bool_, shape)


def _logical(name: str, fn: str) -> Rule:
    def lower(node: Aten, *xs: Any) -> Any:
        return t.apply(fn, *(truth(x, result(node).shape) for x in xs))

    rule = aten(f"{name}.default")(lower)
    return Rule(name, rule.keys, rule.rewrite, f"{name} of the truth of the arguments.")


LOGIC = tuple(
    _logical(f"logical_{n}", fn) for n, fn in (("and", "and_"), ("or", "or_"), ("xor", "xor"), ("not", "not_"))
)


@aten("bitwise_not.default")
def bitwise_not(node: Aten, x: Any) -> Any:
    """~x; "not" for bools."""
    return pointwise(node, result(node).dtype, x, fn="not_")


@aten("isnan.default")
def isnan(node: Aten, x: Any) -> Any:
    """x != x; never for integers."""
    return _float_test(node, x, lambda a: t.apply("isnan", a))


@aten("isinf.default")
def isinf(node: Aten, x: Any) -> Any:
    """|x| == inf."""
    return _float_test(node, x, lambda a: t.apply("eq", t.apply("abs", a), c(math.inf, a)))


@aten("isposinf.default")
def isposinf(node: Aten, x: Any) -> Any:
    """x == inf."""
    return _float_test(node, x, lambda a: t.apply("eq", a, c(math.inf, a)))


@aten("isneginf.default")
def isneginf(node: Aten, x: Any) -> Any:
    """x == -inf."""
    return _float_test(node, x, lambda a: t.apply("eq", a, c(-math.inf, a)))


@aten("signbit.default")
def signbit(node: Aten, x: Any) -> Any:
    """True where the sign bit is set."""
    dtype = x.type.dtype
    if dtype.is_float:
        return _float_test(node, x, lambda a: t.apply("signbit", a))
    return t.apply("lt", x, c(0, x)) if dtype.kind == "int" else c_false(node)


def c_false(node: Aten) -> Any:
    """False everywhere."""
    return t.literal(False, bool_, result(node).shape)


def _float_test(node: Aten, x: Any, fn: Build) -> Any:
    if not x.type.dtype.is_float:
        return c_false(node)
    return fn(t.cast(x, x.type.dtype.compute))


@aten("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def where(node: Aten, condition: Any, x: Any, y: Any) -> Any:
    """x where the condition holds, else y."""
    out = result(node)
    return t.where(truth(condition, out.shape), operand(x, out.dtype, out.shape), operand(y, out.dtype, out.shape))


@aten("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(node: Aten, x: Any, mask: Any, value: Any) -> Any:
    """value where the mask is set, else x."""
    out = result(node)
    return t.where(truth(mask, out.shape), operand(value, out.dtype, out.shape), operand(x, out.dtype, out.shape))


RULES: tuple[Rule, ...] = (
    *COMPARISONS, *LOGIC, bitwise_not, isnan, isinf, isposinf, isneginf, signbit, where, masked_fill,
)  # fmt: skip
