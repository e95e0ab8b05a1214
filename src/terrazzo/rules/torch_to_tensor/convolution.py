"""Convolutions and their gradients: sums of products of images under windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.types import DType
from terrazzo.rewrite.rule import Rule
from terrazzo.rules.torch_to_tensor.common import aten, result


@aten("convolution.default", same=True)
def convolution(
    node: Aten,
    x: Any,
    w: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    """The sum over channels and kernel positions of x at the shifted place times w, in 1 to 3 dimensions, with every
    option.
    """
    out = result(node)
    dtype, spatial = out.dtype, w.type.rank - 2
    stride, padding, dilation = (_each(p, spatial) for p in (stride, padding, dilation))
    batched = x.type.rank == w.type.rank
    if not batched:
        x = t.reshape(x, (1, *x.type.shape))
    shape = out.shape if batched else (1, *out.shape)
    value = (_transposed if transposed else _convolved)(x, w, shape, stride, padding, dilation, groups, dtype)
    if bias is not None:
        here = t.coordinates(shape)
        value = t.apply("add", value, t.index_map(t.cast(bias, dtype.compute), shape, [here[1]]))
    value = t.cast(value, dtype)
    return value if batched else t.reshape(value, out.shape)


def _each(option: Sequence[int], spatial: int) -> tuple[int, ...]:
    """An option for every dimension, where there may be one for all."""
    return tuple(option) * spatial if len(option) == 1 else tuple(option)


def _with(values: Sequence[Any], d: int, value: Any) -> tuple[Any, ...]:
    """`values` with another one for a dimension."""
    return (*values[:d], value, *values[d + 1 :])


def _under(
    o: Any, k: Any, extents: Any, stride: Any, padding: Any, dilation: Any
) -> tuple[list[IntExpr], list[IntExpr]]:
    """The places i = o * stride + k * dilation - padding in each dimension, and what must be >= 0 for them to exist."""
    place = [o[d] * stride[d] + k[d] * dilation[d] - padding[d] for d in range(len(stride))]
    return place, [e for p, extent in zip(place, extents, strict=True) for e in (p, extent - 1 - p)]


def _convolved(x: Any, w: Any, shape: Any, stride: Any, padding: Any, dilation: Any, groups: int, dtype: DType) -> Any:
    cin = w.type.shape[1]
    space = (*shape, cin, *w.type.shape[2:])
    here = t.coordinates(space)
    spatial = len(stride)
    n, oc, o = here[0], here[1], here[2 : 2 + spatial]
    ic, k = here[2 + spatial], here[3 + spatial :]
    place, inside = _under(o, k, x.type.shape[2:], stride, padding, dilation)
    group = oc // (shape[1] // groups)
    left = t.index_map(t.cast(x, dtype.compute), space, (n, group * cin + ic, *place), inside)
    right = t.index_map(t.cast(w, dtype.compute), space, (oc, ic, *k))
    return t.reduce("sum", t.apply("mul", left, right), range(len(shape), len(space)))


def spread(
    o: Any, k: Any, extents: Any, kernel: Any, stride: Any, padding: Any, dilation: Any
) -> tuple[list[IntExpr], list[IntExpr]]:
    """The places i with o = i * stride + k * dilation - padding in each dimension, and what must be >= 0 for one to
    exist.
    """
    place: list[IntExpr] = []
    inside: list[IntExpr] = []
    for d, extent in enumerate(extents):
        reached = o[d] + padding[d] - k[d] * dilation[d]
        lift = ((kernel[d] - 1) * dilation[d] // stride[d] + 1) * stride[d]  # keeps // and % on natural numbers
        i = (reached + lift) // stride[d] - lift // stride[d]
        place.append(i)
        inside += [i, extent - 1 - i, (reached + lift) % stride[d] * -1]
    return place, inside


def _transposed(x: Any, w: Any, shape: Any, stride: Any, padding: Any, dilation: Any, groups: int, dtype: DType) -> Any:
    """out[o] = the sum over i, k with o = i * stride + k * dilation - padding. Where a dimension has one tap, sums are
    those of each i, and points between these are 0.
    """
    for d, taps in enumerate(w.type.shape[2:]):
        if taps == 1 and stride[d] > 1:
            extent = x.type.shape[2 + d]
            options = _with(stride, d, 1), _with(padding, d, 0), dilation, groups, dtype
            sums = _transposed(x, w, _with(shape, 2 + d, extent), *options)
            here = t.coordinates(shape)
            place, inside = spread(here[2 + d :], [0], [extent], [1], stride[d:], padding[d:], [1])
            return t.index_map(sums, shape, _with(here, 2 + d, *place), inside)
    per_group = w.type.shape[0] // groups
    space = (*shape, per_group, *w.type.shape[2:])
    here = t.coordinates(space)
    spatial = len(stride)
    n, oc, o = here[0], here[1], here[2 : 2 + spatial]
    ic, k = here[2 + spatial], here[3 + spatial :]
    place, inside = spread(o, k, x.type.shape[2:], w.type.shape[2:], stride, padding, dilation)
    group = oc // w.type.shape[1]
    left = t.index_map(t.cast(x, dtype.compute), space, (n, group * per_group + ic, *place), inside)
    right = t.index_map(t.cast(w, dtype.compute), space, (group * per_group + ic, oc % w.type.shape[1], *k))
    return t.reduce("sum", t.apply("mul", left, right), range(len(shape), len(space)))


@aten("convolution_backward.default", same=True)
def convolution_backward(
    node: Aten,
    grad: Any,
    x: Any,
    w: Any,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Any, Any, Any]:
    """The gradients of a convolution's image, weights and bias, those that `output_mask` asks for. The image's is the
    convolution the other way, with the same weights: transposed where that one is not.
    """
    spatial = w.type.rank - 2
    stride, padding, dilation = (_each(p, spatial) for p in (stride, padding, dilation))

    def image() -> Any:
        back, dtype = _convolved if transposed else _transposed, result(node, 0).dtype
        return t.cast(back(grad, w, x.type.shape, stride, padding, dilation, groups, dtype), dtype)

    def weights() -> Any:
        points, under = (x, grad) if transposed else (grad, x)
        out = result(node, 1)
        return t.cast(_weights(points, under, out.shape, stride, padding, dilation, groups, out.dtype), out.dtype)

    def bias() -> Any:
        dtype = result(node, 2).dtype
        return t.cast(t.reduce("sum", t.cast(grad, dtype.compute), [0, *range(2, 2 + spatial)]), dtype)

    wanted = zip((image, weights, bias), output_mask, strict=True)
    return tuple(make() if asked else None for make, asked in wanted)  # type: ignore[return-value]


def _weights(
    points: Any, image: Any, shape: Any, stride: Any, padding: Any, dilation: Any, groups: int, dtype: DType
) -> Any:
    """For a channel of the points, one of the image and a tap: the sum over the batch and all points of the point times
    what the image has under that tap.
    """
    per_group = shape[1]
    space = (*shape, points.type.shape[0], *points.type.shape[2:])
    here = t.coordinates(space)
    spatial = len(stride)
    of, ic, k = here[0], here[1], here[2 : 2 + spatial]
    n, o = here[2 + spatial], here[3 + spatial :]
    place, inside = _under(o, k, image.type.shape[2:], stride, padding, dilation)
    group = of // (shape[0] // groups)
    left = t.index_map(t.cast(points, dtype.compute), space, (n, of, *o))
    right = t.index_map(t.cast(image, dtype.compute), space, (n, group * per_group + ic, *place), inside)
    return t.reduce("sum", t.apply("mul", left, right), range(len(shape), len(space)))


RULES: tuple[Rule, ...] = (convolution, convolution_backward)
