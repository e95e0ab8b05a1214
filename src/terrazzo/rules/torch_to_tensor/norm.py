"""Softmax and the normalisations, as compositions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.types import Type, f32
from terrazzo.rewrite.rule import Rule, need
from terrazzo.rules.torch_to_tensor.common import aten, normalize, operand, result
from terrazzo.rules.torch_to_tensor.pointwise import c
from terrazzo.rules.torch_to_tensor.reduction import moments
from terrazzo.rules.torch_to_tensor.view import reshaped


def _exponents(x: Any, dim: int, out: Type) -> tuple[Any, Any, Any]:
    """(x - max, exp(x - max), its sum along `dim`), with the shape of the first; a 0-d tensor has one dimension."""
    wide = t.reshape(t.cast(x, out.dtype.compute), x.type.shape or (1,))
    axis, shape = normalize(dim, wide.type.rank), wide.type.shape
    shifted = t.apply("sub", wide, t.broadcast(t.reduce("max", wide, [axis], keepdim=True), shape))
    e = t.apply("exp", shifted)
    return shifted, e, t.broadcast(t.reduce("sum", e, [axis], keepdim=True), shape)


@aten("_softmax.default", "softmax.int")
def softmax(node: Aten, x: Any, dim: int, half_to_float: Any = False) -> Any:
    """exp(x - max) / sum(exp(x - max))."""
    out = result(node)
    _, e, total = _exponents(x, dim, out)
    return t.cast(t.reshape(t.apply("div", e, total), out.shape), out.dtype)


@aten("_safe_softmax.default")
def safe_softmax(node: Aten, x: Any, dim: int, dtype: Any = None) -> Any:
    """softmax, and 0 where all of a row is -inf."""
    out = result(node)
    _, e, total = _exponents(x, dim, out)
    value = t.reshape(t.apply("div", e, total), out.shape)
    lowest = t.apply("eq", t.cast(x, value.type.dtype), c(-math.inf, value))
    hidden = t.reduce("all", lowest, [normalize(dim, out.rank)] if out.rank else (), keepdim=True)
    return t.cast(t.where(t.broadcast(hidden, out.shape), c(0.0, value), value), out.dtype)


@aten("_log_softmax.default", "log_softmax.int")
def log_softmax(node: Aten, x: Any, dim: int, half_to_float: Any = False) -> Any:
    """x - max - log(sum(exp(x - max)))."""
    out = result(node)
    shifted, _, total = _exponents(x, dim, out)
    return t.cast(t.reshape(t.apply("sub", shifted, t.apply("log", total)), out.shape), out.dtype)


def _statistics(x: Any, axes: Sequence[int], eps: float) -> tuple[Any, Any]:
    """(mean, rstd), with their axes kept."""
    mean, spread = moments(x, axes)
    count = math.prod(x.type.shape[a] for a in axes)
    return mean, t.apply("rsqrt", t.apply("add", t.apply("div", spread, c(count, spread)), c(eps, spread)))


def _normalised(x: Any, mean: Any, rstd: Any, view: Any) -> Any:
    """(x - mean) * rstd; `view` lays both out in the shape of x."""
    return t.apply("mul", t.apply("sub", x, view(mean)), view(rstd))


def _affine(value: Any, weight: Any, bias: Any, view: Any) -> Any:
    """value * weight + bias, either of which may be absent; `view` lays them out along the right dimensions."""
    if weight is not None:
        value = t.apply("mul", value, view(t.cast(weight, value.type.dtype)))
    if bias is not None:
        value = t.apply("add", value, view(t.cast(bias, value.type.dtype)))
    return value


def _of_one_type(x: Any, *parameters: Any) -> None:
    """PyTorch's norms have parameters of the type of x, or all in float32 beside 16 bits."""
    found = {p.type.dtype for p in parameters if p is not None}
    wide = {f32} if x.type.dtype.is_float and x.type.dtype.compute is not x.type.dtype else set()
    need(found <= {x.type.dtype} or found == wide, "PyTorch refuses parameters of another type")


@aten("native_layer_norm.default")
def layer_norm(node: Aten, x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimensions; also mean and 1 / sqrt(var + eps)."""
    _of_one_type(x, weight, bias)
    axes = range(x.type.rank - len(shape), x.type.rank)
    wide = t.cast(x, x.type.dtype.compute)
    mean, rstd = _statistics(wide, axes, eps)
    value = _normalised(wide, mean, rstd, lambda s: t.broadcast(s, x.type.shape))
    value = _affine(value, weight, bias, lambda w: t.broadcast(w, x.type.shape))
    stats = [t.cast(reshaped(s, result(node, k).shape), result(node, k).dtype) for k, s in ((1, mean), (2, rstd))]
    return t.cast(value, x.type.dtype), *stats


@aten("native_group_norm.default")
def group_norm(
    node: Aten, x: Any, weight: Any, bias: Any, n: int, channels: int, size: int, groups: int, eps: float
) -> Any:
    """Each group of channels of each sample normalised; also mean and 1 / sqrt(var + eps).

    Points keep their own axes, and look up the two numbers of their group: x is read as it lies in memory.
    """
    _of_one_type(x, weight, bias)
    wide, each = t.cast(x, x.type.dtype.compute), channels // groups
    mean, rstd = _statistics(t.reshape(wide, (n, groups, each * size)), [2], eps)
    sample, channel, *_ = t.coordinates(x.type.shape)
    value = _normalised(wide, mean, rstd, lambda s: t.index_map(s, x.type.shape, [sample, channel // each, 0]))
    value = _affine(value, weight, bias, lambda w: along(w, x.type.shape, 1))
    stats = [t.cast(reshaped(s, result(node, k).shape), result(node, k).dtype) for k, s in ((1, mean), (2, rstd))]
    return t.cast(value, x.type.dtype), *stats


def along(v: Any, shape: Sequence[Any], dim: int) -> Any:
    """A vector laid out along one dimension."""
    return t.index_map(v, shape, [t.coordinates(shape)[dim]])


@aten("_native_batch_norm_legit_no_training.default")
def batch_norm(
    node: Aten, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float
) -> Any:
    """(x - running mean) / sqrt(running var + eps) * weight + bias, by channel."""
    _of_one_type(x, weight, bias, mean, variance)
    wide = t.cast(x, x.type.dtype.compute)
    shape = x.type.shape
    m, v = (t.cast(s, wide.type.dtype) for s in (mean, variance))
    rstd = t.apply("div", c(1.0, v), t.apply("sqrt", t.apply("add", v, c(eps, v))))
    value = t.apply("mul", t.apply("sub", wide, along(m, shape, 1)), along(rstd, shape, 1))
    value = _affine(value, weight, bias, lambda w: along(w, shape, 1))
    empty = [t.literal(0, result(node, k).dtype, result(node, k).shape) for k in (1, 2)]
    return t.cast(value, x.type.dtype), *empty


@aten("_fused_rms_norm.default")
def rms_norm(node: Aten, x: Any, shape: Sequence[int], weight: Any, eps: float | None) -> Any:
    """x / sqrt(mean(x²) + eps) * weight; also 1 / sqrt(mean(x²) + eps)."""
    import ml_dtypes

    wide = t.cast(x, x.type.dtype.compute)
    axes = range(x.type.rank - len(shape), x.type.rank)
    total = t.reduce("sum", t.apply("mul", wide, wide), axes, keepdim=True)
    count = math.prod(x.type.shape[a] for a in axes)
    least = ml_dtypes.finfo(x.type.dtype.compute.numpy).eps  # type: ignore[no-untyped-call]
    small = float(least) if eps is None else eps
    rstd = t.apply("rsqrt", t.apply("add", t.apply("div", total, c(count, total)), c(small, total)))
    value = t.apply("mul", wide, t.broadcast(rstd, x.type.shape))
    value = _affine(value, weight, None, lambda w: t.broadcast(w, x.type.shape))
    return t.cast(value, x.type.dtype), t.cast(reshaped(rstd, result(node, 1).shape), result(node, 1).dtype)


@aten("_softmax_backward_data.default")
def softmax_backward(node: Aten, grad: Any, y: Any, dim: int, dtype: Any) -> Any:
    """y * (grad - sum(grad * y))."""
    wide = y.type.dtype.compute
    g, y = operand(grad, wide, y.type.shape), t.cast(y, wide)
    product = t.apply("mul", g, y)
    total = t.reduce("sum", product, [normalize(dim, y.type.rank)], keepdim=True) if y.type.rank else product
    return t.cast(t.apply("sub", product, t.apply("mul", y, t.broadcast(total, y.type.shape))), result(node).dtype)


@aten("_log_softmax_backward_data.default")
def log_softmax_backward(node: Aten, grad: Any, y: Any, dim: int, dtype: Any) -> Any:
    """grad - exp(y) * sum(grad)."""
    wide = y.type.dtype.compute
    g, y = operand(grad, wide, y.type.shape), t.cast(y, wide)
    total = t.reduce("sum", g, [normalize(dim, y.type.rank)], keepdim=True) if y.type.rank else g
    return t.cast(
        t.apply("sub", g, t.apply("mul", t.apply("exp", y), t.broadcast(total, y.type.shape))), result(node).dtype
    )


RULES: tuple[Rule, ...] = (
    softmax, safe_softmax, log_softmax, layer_norm, group_norm, batch_norm, rms_norm,
    softmax_backward, log_softmax_backward,
)  # fmt: skip
