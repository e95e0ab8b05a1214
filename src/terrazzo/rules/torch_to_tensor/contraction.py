"""Matrix products: index maps onto the common iteration space, a product, a sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.types import DType, Type, bool_, i64
from terrazzo.rewrite.rule import Rule
from terrazzo.rules.torch_to_tensor.common import aten, operand, result
from terrazzo.rules.torch_to_tensor.pointwise import c
from terrazzo.rules.torch_to_tensor.reduction import norm_of


def _compute(dtype: DType) -> DType:
    return i64 if dtype is bool_ else dtype.compute


def product(
    x: Any, y: Any, space: Sequence[Any], xi: Sequence[IntExpr], yi: Sequence[IntExpr], over: int, dtype: DType
) -> Any:
    """sum over the last `over` dimensions of `space` of x[xi] * y[yi], accumulated in the compute type of `dtype`."""
    wide = _compute(dtype)
    left, right = (t.index_map(t.cast(v, wide), space, i) for v, i in ((x, xi), (y, yi)))
    return t.reduce("sum", t.apply("mul", left, right), range(len(space) - over, len(space)))


def matmul(x: Any, y: Any, dtype: DType) -> Any:
    """[b.., m, k] @ [b.., k, n], with equal batch dimensions, not yet rounded to `dtype`."""
    *batch, m, k = x.type.shape
    n = y.type.shape[-1]
    space = (*batch, m, n, k)
    *b, i, j, r = t.coordinates(space)
    return product(x, y, space, (*b, i, r), (*b, r, j), 1, dtype)


@aten("mm.default", "bmm.default", "int_mm.default", same=True)
def mm(node: Aten, x: Any, y: Any) -> Any:
    """x @ y."""
    return t.cast(matmul(x, y, result(node).dtype), result(node).dtype)


@aten("mv.default", same=True)
def mv(node: Aten, x: Any, y: Any) -> Any:
    """x @ y for a vector y."""
    return t.cast(_mv(x, y, result(node).dtype), result(node).dtype)


def _mv(x: Any, y: Any, dtype: DType) -> Any:
    i, r = t.coordinates(x.type.shape)
    return product(x, y, x.type.shape, (i, r), (r,), 1, dtype)


@aten("dot.default", "vdot.default", same=True)
def dot(node: Aten, x: Any, y: Any) -> Any:
    """sum x * y."""
    (r,) = t.coordinates(x.type.shape)
    return t.cast(product(x, y, x.type.shape, (r,), (r,), 1, result(node).dtype), result(node).dtype)


def _scaled(out: Type, base: Any, value: Any, beta: Any, alpha: Any) -> Any:
    """beta * base + alpha * value, rounded once; beta = 0 ignores even NaN in base."""
    if alpha != 1:
        value = t.apply("mul", value, c(alpha, value))
    if beta != 0:
        added = operand(base, _compute(out.dtype), out.shape)
        value = t.apply("add", value, added if beta == 1 else t.apply("mul", added, c(beta, added)))
    return t.cast(value, out.dtype)


@aten("addmm.default", "baddbmm.default", same=True)
def addmm(node: Aten, base: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """beta * base + alpha * (x @ y)."""
    return _scaled(result(node), base, matmul(x, y, result(node).dtype), beta, alpha)


@aten("addmv.default", same=True)
def addmv(node: Aten, base: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """beta * base + alpha * (x @ y) for a vector y."""
    return _scaled(result(node), base, _mv(x, y, result(node).dtype), beta, alpha)


@aten("addbmm.default", same=True)
def addbmm(node: Aten, base: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """beta * base + alpha * the sum over the batch of x @ y."""
    b, m, k = x.type.shape
    n = y.type.shape[-1]
    space = (m, n, b, k)
    i, j, q, r = t.coordinates(space)
    dtype = result(node).dtype
    return _scaled(result(node), base, product(x, y, space, (q, i, r), (q, r, j), 2, dtype), beta, alpha)


@aten("addr.default")
def addr(node: Aten, base: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """beta * base + alpha * the outer product of x and y."""
    out = result(node)
    i, j = t.coordinates(out.shape)
    wide = _compute(out.dtype)
    outer = t.apply("mul", t.index_map(t.cast(x, wide), out.shape, (i,)), t.index_map(t.cast(y, wide), out.shape, (j,)))
    return _scaled(out, base, outer, beta, alpha)


@aten("_trilinear.default")
def trilinear(
    node: Aten,
    a: Any,
    b: Any,
    w: Any,
    expand_a: Any,
    expand_b: Any,
    expand_w: Any,
    over: Sequence[int],
    unroll: int = 1,
) -> Any:
    """The sum over the dimensions `over` of a * b * w, each with dimensions of extent 1 put in at its `expand`. Those
    that one of them has no part in are summed first, in a product of the other two: in the way that leaves least.
    """
    out = result(node)
    wide, rank = _compute(out.dtype), a.type.rank + len(expand_a)
    factors = []
    for x, expand in ((a, expand_a), (w, expand_w), (b, expand_b)):
        extents = iter(x.type.shape)
        factors.append(t.reshape(t.cast(x, wide), [1 if d in expand else next(extents) for d in range(rank)]))
    ways: list[tuple[int, int, Any, Any, list[int], Any]] = []
    for last, expand in zip(factors, (expand_a, expand_w, expand_b), strict=True):
        first = [d for d in over if d in expand]
        if first and len(first) < len(over):
            x, y = _together(*(f for f in factors if f is not last))
            left = math.prod(n for d, n in enumerate(x.type.static_shape) if d not in first)
            ways.append((left, len(ways), x, y, first, last))
    if ways:
        *_, x, y, first, last = min(ways)
        x, y = _together(t.reduce("sum", t.apply("mul", x, y), first, keepdim=True), last)
        value = t.apply("mul", x, y)
    else:
        x, y, z = _together(*factors)
        value = t.apply("mul", t.apply("mul", x, y), z)
    return t.cast(t.reduce("sum", value, over), out.dtype)


def _together(*factors: Any) -> list[Any]:
    """Values of one rank in the shape that they have together."""
    shapes = list(zip(*(f.type.shape for f in factors), strict=True))
    return [t.broadcast(f, [max(n) if all(n) else 0 for n in shapes]) for f in factors]


@aten("_cdist_forward.default")
def cdist(node: Aten, x: Any, y: Any, p: float, mode: int | None) -> Any:
    """out[.., i, j] = the p-norm of x[.., i] - y[.., j]. A NaN is no number of differences either (p = 0)."""
    out = result(node)
    *batch, m, n = out.shape
    space = (*batch, m, n, x.type.shape[-1])
    if space[-1] == 0:
        return t.literal(0, out.dtype, out.shape)
    apart = _differences(x, y, space)
    value = norm_of(apart, p, [len(space) - 1])
    if p == 0:
        nan = t.reduce("any", t.apply("isnan", apart), [len(space) - 1])
        value = t.where(nan, c(math.nan, value), value)
    return t.cast(value, out.dtype)


def _differences(x: Any, y: Any, space: Sequence[Any]) -> Any:
    """[.., i, j, k]: x[.., i, k] - y[.., j, k]."""
    left = t.broadcast(t.reshape(x, (*x.type.shape[:-1], 1, space[-1])), space)
    right = t.broadcast(t.reshape(y, (*y.type.shape[:-2], 1, *y.type.shape[-2:])), space)
    return t.apply("sub", left, right)


@aten("_cdist_backward.default")
def cdist_gradient(node: Aten, grad: Any, x: Any, y: Any, p: float, dist: Any) -> Any:
    """The gradient by x of the p-norms `dist` of x[.., i] - y[.., j]: no slope at 0, nor (p < 1) where a part is 0. The
    formulas are PyTorch's (aten/src/ATen/native/cuda/DistanceKernel.cu), whose kernel writes all the terms of the sums.
    """
    out = result(node)
    *batch, m, n = dist.type.shape
    space = (*batch, m, n, x.type.shape[-1])
    if p == 0 or 0 in space:
        return t.literal(0, out.dtype, out.shape)
    apart = _differences(x, y, space)
    given, norm = (t.broadcast(t.reshape(v, (*v.type.shape, 1)), space) for v in (grad, dist))
    zero, size = c(0.0, apart), t.apply("abs", apart)
    flat = t.apply("eq", norm, zero)
    if math.isinf(p):
        term = t.apply("mul", given, t.apply("sign", apart))
        flat = t.apply("ne", size, norm)
    elif p == 1:
        term = t.apply("mul", given, t.apply("sign", apart))
    elif p == 2:
        term = t.apply("div", t.apply("mul", given, apart), norm)
    else:
        slope = t.apply("mul", apart, t.apply("pow", size, c(p - 2, size)))
        if p < 2:
            slope = t.apply("mul", t.apply("sign", apart), t.apply("pow", size, c(p - 1, size)))
        term = t.apply("div", t.apply("mul", slope, given), t.apply("pow", norm, c(p - 1, norm)))
        if p < 1:
            term = t.where(t.apply("eq", apart, zero), zero, term)
    return t.cast(t.reduce("sum", t.where(flat, zero, term), [len(space) - 2]), out.dtype)


@aten("dist.default")
def dist(node: Aten, x: Any, y: Any, p: float = 2) -> Any:
    """The p-norm of x - y."""
    import torch

    out = result(node)
    shape = tuple(torch.broadcast_shapes(x.type.shape, y.type.shape))
    left, right = (operand(v, out.dtype.compute, shape) for v in (x, y))
    return t.cast(norm_of(t.apply("sub", left, right), p, range(len(shape))), out.dtype)


RULES: tuple[Rule, ...] = (mm, mv, dot, addmm, addmv, addbmm, addr, trilinear, cdist, cdist_gradient, dist)
