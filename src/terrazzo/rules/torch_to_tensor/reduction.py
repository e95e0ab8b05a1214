"""Reductions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.types import Type, bool_, i32, i64
from terrazzo.rewrite.rule import Rule, need
from terrazzo.rules.torch_to_tensor.common import aten, dims, normalize, result
from terrazzo.rules.torch_to_tensor.pointwise import c
from terrazzo.rules.torch_to_tensor.view import reshaped

ON_BOOLS = {"sum": "any", "prod": "all"}
"""What PyTorch's sums and products of bools are."""


def reduced(m: str, x: Any, axes: Sequence[int], out: Type) -> Any:
    """The reduction of x (already in the accumulator's type) over `axes`, in the shape and type of the result."""
    m = ON_BOOLS.get(m, m) if x.type.dtype is bool_ else m
    return t.cast(reshaped(t.reduce(m, x, axes), out.shape), out.dtype)


def accumulated(x: Any, out: Type) -> Any:
    """x in the result's type, as PyTorch converts it first (`dtype=`), and then in the type that one accumulates in."""
    return t.cast(t.cast(x, out.dtype), out.dtype.compute)


@aten("sum.default", "sum.dim_IntList")
def sum_(node: Aten, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """The sum, accumulated in f32 for 16-bit floats; integers and bools as i64."""
    out = result(node)
    return reduced("sum", accumulated(x, out), dims(dim, x.type.rank), out)


@aten("mean.default", "mean.dim")
def mean(node: Aten, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """The sum divided by the number of elements."""
    out = result(node)
    axes = dims(dim, x.type.rank)
    total = t.reduce("sum", accumulated(x, out), axes)
    count = math.prod(x.type.shape[a] for a in axes)
    return t.cast(reshaped(t.apply("div", total, c(count, total)), out.shape), out.dtype)


@aten("prod.default", "prod.dim_int")
def prod(node: Aten, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """The product."""
    out = result(node)
    return reduced("prod", accumulated(x, out), dims(dim, x.type.rank), out)


NONE = "there is no element to choose, which PyTorch says"


def _extreme(names: tuple[str, ...], m: str) -> Rule:
    def lower(node: Aten, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        out, axes = result(node), dims(dim, x.type.rank)
        need(0 not in (x.type.shape[a] for a in axes) or 0 in out.shape, NONE)
        return reduced(m, t.cast(x, out.dtype.compute), axes, out)

    rule = aten(*names)(lower)
    return Rule(f"a{m}", rule.keys, rule.rewrite, f"The {m}; NaN wins.")


EXTREMES = (_extreme(("amax.default", "max.default"), "max"), _extreme(("amin.default", "min.default"), "min"))


@aten("aminmax.default")
def aminmax(node: Aten, x: Any, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """The smallest and the largest."""
    axes = dims(dim, x.type.rank)
    wide = t.cast(x, x.type.dtype.compute)
    return reduced("min", wide, axes, result(node, 0)), reduced("max", wide, axes, result(node, 1))


def with_index(name: str, x: Any, axis: int) -> tuple[Any, Any]:
    """The max or min along `axis` and where it stands first. Each is a reduction of its own: who wants one pays for
    one.
    """
    wide = t.cast(x, x.type.dtype.compute)
    numbers = t.cast(x, i64) if x.type.dtype is bool_ else wide  # bools are told apart as integers
    extent = x.type.shape[axis]
    whole = i32 if isinstance(extent, int) and extent < 1 << 31 else i64  # a GPU compares these in one instruction
    places = t.cast(t.iota(x.type.shape, t.coordinates(x.type.shape)[axis]), whole)
    _, index = t.reduce(f"arg{name}", (numbers, places), [axis])
    return t.reduce(name, wide, [axis]), t.cast(index, i64)


def _extreme_with_index(name: str) -> Rule:
    def lower(node: Aten, x: Any, dim: int, keepdim: bool = False) -> Any:
        if not x.type.rank:
            return x, t.literal(0, i64, ())
        out, axis = result(node, 0), normalize(dim, x.type.rank)
        need(x.type.shape[axis] != 0 or 0 in out.shape, NONE)
        value, index = with_index(name, x, axis)
        return t.cast(reshaped(value, out.shape), out.dtype), reshaped(index, out.shape)

    rule = aten(f"{name}.dim")(lower)
    return Rule(f"{name}_dim", rule.keys, rule.rewrite, f"The {name} along a dimension, and its first index.")


def _arg(name: str) -> Rule:
    def lower(node: Aten, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        shape = result(node).shape
        if not x.type.rank:
            return t.literal(0, i64, shape)
        flat = x if dim is not None else t.reshape(x, (x.type.numel,))
        return reshaped(with_index(name.removeprefix("arg"), flat, normalize(dim or 0, flat.type.rank))[1], shape)

    rule = aten(f"{name}.default")(lower)
    return Rule(name, rule.keys, rule.rewrite, "The first index of the best value; NaN is best.")


INDEXED = (_extreme_with_index("max"), _extreme_with_index("min"), _arg("argmax"), _arg("argmin"))


def _logical(name: str) -> Rule:
    def lower(node: Aten, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        out = result(node)
        return reduced(name, t.cast(x, bool_), dims(dim, x.type.rank), out)

    rule = aten(f"{name}.default", f"{name}.dim", f"{name}.dims")(lower)
    return Rule(name, rule.keys, rule.rewrite, f"{name} of the truth of the elements.")


LOGIC = (_logical("any"), _logical("all"))


def moments(x: Any, axes: Sequence[int]) -> tuple[Any, Any]:
    """(mean, sum of squared deviations) over `axes`, in two passes, which is at least as accurate as eager's one."""
    shape = x.type.shape
    count = math.prod(shape[a] for a in axes)
    total = t.reduce("sum", x, axes, keepdim=True)
    mean = t.apply("div", total, c(count, total))
    d = t.apply("sub", x, t.broadcast(mean, shape))
    spread = t.reduce("sum", t.apply("mul", d, d), axes, keepdim=True)
    return mean, spread


def _variance(node: Aten, k: int | None, x: Any, dim: Any, correction: Any, root: bool) -> tuple[Any, Any]:
    out = result(node, k)
    need(out.dtype.is_float, "complex numbers are not compiled")
    axes = dims(dim, x.type.rank)
    mean, spread = moments(t.cast(x, out.dtype.compute), axes)
    count = math.prod(x.type.shape[a] for a in axes)
    free = max(count - (1 if correction is None else correction), 0)
    value = t.apply("div", spread, c(free, spread))
    value = t.apply("sqrt", value) if root else value
    return t.cast(reshaped(value, out.shape), out.dtype), t.cast(reshaped(mean, out.shape), out.dtype)


@aten("var.correction")
def var(node: Aten, x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    """The sum of squared deviations from the mean, divided by n - correction."""
    return _variance(node, None, x, dim, correction, False)[0]


@aten("std.correction")
def std(node: Aten, x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    """The square root of the variance."""
    return _variance(node, None, x, dim, correction, True)[0]


@aten("var_mean.correction")
def var_mean(node: Aten, x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    """The variance and the mean."""
    return _variance(node, 0, x, dim, correction, False)


@aten("std_mean.correction")
def std_mean(node: Aten, x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    """The standard deviation and the mean."""
    return _variance(node, 0, x, dim, correction, True)


@aten("logsumexp.default")
def logsumexp(node: Aten, x: Any, dim: Any, keepdim: bool = False) -> Any:
    """log(sum(exp(x))), shifted by the maximum."""
    out = result(node)
    axes = dims(dim, x.type.rank)
    wide = t.cast(x, out.dtype.compute)
    top = t.reduce("max", wide, axes, keepdim=True)
    finite = t.where(t.apply("eq", t.apply("abs", top), c(math.inf, top)), c(0.0, top), top)
    total = t.reduce("sum", t.apply("exp", t.apply("sub", wide, t.broadcast(finite, x.type.shape))), axes, keepdim=True)
    return t.cast(reshaped(t.apply("add", t.apply("log", total), finite), out.shape), out.dtype)


def norm_of(x: Any, p: float, axes: Sequence[int]) -> Any:
    """(sum |x|^p)^(1/p) over `axes`, and its limits at p = 0, inf and -inf."""
    a = t.apply("abs", x)
    if math.isinf(p):
        return t.reduce("max" if p > 0 else "min", a, axes)
    if p == 0:
        return t.reduce("sum", t.cast(t.apply("ne", a, c(0.0, a)), a.type.dtype), axes)
    if p == 1:
        return t.reduce("sum", a, axes)
    if p == 2:
        return t.apply("sqrt", t.reduce("sum", t.apply("mul", x, x), axes))
    total = t.reduce("sum", t.apply("pow", a, c(p, a)), axes)
    return t.apply("pow", total, c(1 / p, total))


@aten("linalg_vector_norm.default", "norm.ScalarOpt_dim", "norm.Scalar", "norm.ScalarOpt_dim_dtype")
def vector_norm(node: Aten, x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """(sum |x|^p)^(1/p), and its limits at p = 0, inf and -inf."""
    out = result(node)
    value = norm_of(accumulated(x, out), 2.0 if p is None else float(p), dims(dim, x.type.rank))
    return t.cast(reshaped(value, out.shape), out.dtype)


@aten("count_nonzero.dim_IntList", "count_nonzero.default")
def count_nonzero(node: Aten, x: Any, dim: Any = None) -> Any:
    """How many elements are not 0."""
    return reduced("sum", t.cast(t.cast(x, bool_), i64), dims(dim, x.type.rank), result(node))


@aten("nansum.default")
def nansum(node: Aten, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """The sum of what is not NaN."""
    out = result(node)
    wide = accumulated(x, out)
    kept = t.where(t.apply("isnan", wide), c(0.0, wide), wide) if wide.type.dtype.is_float else wide
    return reduced("sum", kept, dims(dim, x.type.rank), out)


RULES: tuple[Rule, ...] = (
    sum_, mean, prod, *EXTREMES, aminmax, *INDEXED, *LOGIC, var, std, var_mean, std_mean, logsumexp, vector_norm,
    count_nonzero, nansum,
)  # fmt: skip
