"""Pooling: windows as guarded index maps, then a reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.types import i64
from terrazzo.rewrite.rule import Rule, need
from terrazzo.rules.torch_to_tensor.common import aten, result
from terrazzo.rules.torch_to_tensor.pointwise import c
from terrazzo.rules.torch_to_tensor.view import holds


def _per_dim(value: Any, rank: int, default: int = 1) -> tuple[int, ...]:
    given = tuple(value) if not isinstance(value, int) else (value,)
    return given * rank if len(given) == 1 else given or (default,) * rank


def _windows(x: Any, out: Sequence[Any], kernel: Sequence[int], stride: Any, padding: Any, dilation: Any) -> tuple[Any, Any, list[IntExpr]]:
    """(elements, whether they are inside x, their places) over [.., out positions.., kernel positions..]."""
    spatial = len(kernel)
    lead = len(out) - spatial
    space = (*out, *kernel)
    here = t.coordinates(space)
    place: list[IntExpr] = []
    for d in range(spatial):
        place.append(here[lead + d] * stride[d] + here[len(out) + d] * dilation[d] - padding[d])
    inside = [e for d, p in enumerate(place) for e in (p, x.type.shape[lead + d] - 1 - p)]
    return t.index_map(x, space, (*here[:lead], *place), inside), holds(space, inside), place


@aten("avg_pool1d.default", "avg_pool2d.default", "avg_pool3d.default")
def avg_pool(
    node: Aten, x: Any, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False, count_pad: bool = True, divisor: Any = None
) -> Any:
    """The sum over the window, divided by the number of elements in it (padding included or not) or by `divisor`."""
    out = result(node)
    spatial = int(node.name[len("aten.avg_pool")])
    kernel = _per_dim(kernel, spatial)
    stride = _per_dim(stride, spatial) if stride not in ((), None) else kernel
    padding = _per_dim(padding, spatial)
    need(0 not in out.shape, "it is empty")
    wide = t.cast(x, out.dtype.compute)
    values, _, _ = _windows(wide, out.shape, kernel, stride, padding, (1,) * spatial)
    axes = range(out.rank, out.rank + spatial)
    total = t.reduce("sum", values, axes)
    if divisor is not None:
        count: Any = c(divisor, total)
    else:
        count = _counts(out.shape, x.type.shape, kernel, stride, padding, count_pad, total)
    return t.cast(t.apply("div", total, count), out.dtype)


def _counts(out: Any, shape: Any, kernel: Any, stride: Any, padding: Any, count_pad: bool, like: Any) -> Any:
    """How many elements each window counts: it ends at the (padded) border."""
    spatial, lead = len(kernel), len(out) - len(kernel)
    here = t.coordinates(out)
    product: Any = t.literal(1, i64, out)
    for d in range(spatial):
        begin = here[lead + d] * stride[d] - padding[d]
        low, high = (-padding[d], shape[lead + d] + padding[d]) if count_pad else (0, shape[lead + d])
        first = t.apply("max", t.iota(out, begin), t.literal(low, i64, out))
        last = t.apply("min", t.iota(out, begin + kernel[d]), t.literal(high, i64, out))
        product = t.apply("mul", product, t.apply("sub", last, first))
    return t.cast(product, like.type.dtype)


@aten("max_pool2d_with_indices.default", "max_pool3d_with_indices.default")
def max_pool(node: Aten, x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False) -> Any:
    """The largest element of the window, and its place in the flattened image."""
    out = result(node, 0)
    spatial = int(node.name[len("aten.max_pool")])
    kernel = _per_dim(kernel, spatial)
    stride = _per_dim(stride, spatial) if stride not in ((), None) else kernel
    need(0 not in out.shape, "it is empty")
    wide = t.cast(x, out.dtype.compute)
    values, inside, place = _windows(wide, out.shape, kernel, stride, _per_dim(padding, spatial), _per_dim(dilation, spatial))
    values = t.where(inside, values, c(values.type.dtype.lowest, values))
    flat: IntExpr = 0
    for d, p in enumerate(place):
        flat = flat * x.type.shape[x.type.rank - spatial + d] + p
    axes = range(out.rank, out.rank + spatial)
    index = t.where(inside, t.iota(values.type.shape, flat), t.literal(i64.highest, i64, values.type.shape))
    best, where = t.reduce("argmax", (values, index), axes)
    return t.cast(best, out.dtype), where


@aten("_adaptive_avg_pool2d.default", "_adaptive_avg_pool3d.default", "adaptive_avg_pool1d.default")
def adaptive_avg_pool(node: Aten, x: Any, size: Any) -> Any:
    """The mean over windows [i * n // m, ceil((i + 1) * n / m)): the longest window, guarded."""
    out = result(node)
    spatial = len(size)
    need(0 not in out.shape and 0 not in x.type.shape, "it is empty")
    lead = out.rank - spatial
    extents = x.type.shape[lead:]
    longest = [max(-(-(i + 1) * n // m) - i * n // m for i in range(m)) for n, m in zip(extents, out.shape[lead:], strict=True)]
    space = (*out.shape, *longest)
    here = t.coordinates(space)
    place, inside = [], []
    count: Any = t.literal(1, i64, out.shape)
    for d, (n, m) in enumerate(zip(extents, out.shape[lead:], strict=True)):
        i = here[lead + d]
        begin, end = (i * n) // m, (i * n + n + m - 1) // m
        place.append(begin + here[out.rank + d])
        inside.append(end - 1 - place[-1])
        j = t.coordinates(out.shape)[lead + d]
        count = t.apply("mul", count, t.iota(out.shape, (j * n + n + m - 1) // m - (j * n) // m))
    inside += [n - 1 - p for n, p in zip(extents, place, strict=True)]
    wide = t.cast(x, out.dtype.compute)
    total = t.reduce("sum", t.index_map(wide, space, (*here[:lead], *place), inside), range(out.rank, out.rank + spatial))
    return t.cast(t.apply("div", total, t.cast(count, total.type.dtype)), out.dtype)


RULES: tuple[Rule, ...] = (avg_pool, max_pool, adaptive_avg_pool)
