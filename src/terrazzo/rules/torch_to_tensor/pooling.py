"""Pooling: windows as guarded index maps, then a reduction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.types import Type, i32, i64
from terrazzo.rewrite.rule import Rule
from terrazzo.rules.torch_to_tensor.common import aten, result
from terrazzo.rules.torch_to_tensor.convolution import spread
from terrazzo.rules.torch_to_tensor.pointwise import c
from terrazzo.rules.torch_to_tensor.view import holds


def _per_dim(value: Any, rank: int) -> tuple[int, ...]:
    given = (value,) if isinstance(value, int) else tuple(value)
    return given * rank if len(given) == 1 else given


def _spatial(node: Aten) -> int:
    """How many dimensions are pooled: the digit in the op's name."""
    return int(next(letter for letter in node.name if letter.isdigit()))


class _Windows:
    """What output positions read: the space [.., output positions.., positions in the window..], and the place in x of
    each.
    """

    def __init__(
        self, x: Type, out: Sequence[Any], longest: Sequence[int], place: list[IntExpr], inside: list[IntExpr]
    ) -> None:
        self.lead = len(out) - len(longest)
        self.space = (*out, *longest)
        self.axes = range(len(out), len(self.space))
        self.extents: tuple[Any, ...] = x.shape[self.lead :]
        self.place, self.inside = place, inside

    def of(self, x: Any, outside: Any) -> Any:
        """The elements of x, and `outside` beyond its border."""
        here = t.coordinates(self.space)
        found = t.index_map(x, self.space, (*here[: self.lead], *self.place), self.inside)
        return found if outside == 0 else t.where(holds(self.space, self.inside), found, c(outside, found))

    def flat(self) -> Any:
        """The place of each element in its flattened image; beyond the border, a place that loses every tie. It has
        no more bits than there are places: vectors of 64 are half as long as those of the elements.
        """
        flat: IntExpr = 0
        for p, extent in zip(self.place, self.extents, strict=True):
            flat = flat * extent + p
        small = all(isinstance(n, int) for n in self.extents) and math.prod(self.extents) < i32.highest
        kind = i32 if small else i64
        found = t.cast(t.iota(self.space, flat), kind)
        return t.where(holds(self.space, self.inside), found, t.literal(kind.highest, kind, self.space))


def _fixed(x: Type, out: Sequence[Any], kernel: Any, stride: Any, padding: Any, dilation: Any) -> _Windows:
    """The window of output i starts at i * stride - padding."""
    spatial = len(kernel)
    lead, here = len(out) - spatial, t.coordinates((*out, *kernel))
    place = [here[lead + d] * stride[d] + here[len(out) + d] * dilation[d] - padding[d] for d in range(spatial)]
    return _Windows(x, out, kernel, place, [e for d, p in enumerate(place) for e in (p, x.shape[lead + d] - 1 - p)])


def _adaptive_bounds(i: Any, n: int, m: int) -> tuple[Any, Any]:
    """The window of output i of m on n elements: [i * n // m, ceil((i + 1) * n / m))."""
    return (i * n) // m, (i * n + n + m - 1) // m


def _adaptive(x: Type, out: tuple[Any, ...], spatial: int) -> _Windows:
    """Windows of varying size: the longest one, guarded."""
    lead = len(out) - spatial
    pairs: list[tuple[Any, Any]] = list(zip(x.shape[lead:], out[lead:], strict=True))
    longest = [max(end - begin for begin, end in (_adaptive_bounds(i, n, m) for i in range(m))) for n, m in pairs]
    here = t.coordinates((*out, *longest))
    place, inside = [], []
    for d, (n, m) in enumerate(pairs):
        begin, end = _adaptive_bounds(here[lead + d], n, m)
        place.append(begin + here[len(out) + d])
        inside.append(end - 1 - place[-1])
    return _Windows(x, out, longest, place, inside)


def _product(factors: Sequence[Any]) -> Any:
    value = factors[0]
    for f in factors[1:]:
        value = t.apply("mul", value, f)
    return value


def _divided(total: Any, count: Any, out: Type) -> Any:
    """total / count, rounded to the result; integers towards zero, as in eager."""
    count = t.cast(count, total.type.dtype)
    return t.cast(t.apply("div" if total.type.dtype.is_float else "truncdiv", total, count), out.dtype)


@aten("avg_pool1d.default", "avg_pool2d.default", "avg_pool3d.default")
def avg_pool(
    node: Aten,
    x: Any,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_pad: bool = True,
    divisor: Any = None,
) -> Any:
    """The sum over the window, divided by the number of elements in it (padding included or not) or by `divisor`."""
    out, spatial = result(node), _spatial(node)
    kernel, padding = _per_dim(kernel, spatial), _per_dim(padding, spatial)
    stride = _per_dim(stride, spatial) if stride not in ((), None) else kernel
    windows = _fixed(x.type, out.shape, kernel, stride, padding, (1,) * spatial)
    total = t.reduce("sum", windows.of(t.cast(x, out.dtype.compute), 0), windows.axes)
    count = (
        c(divisor, total) if divisor is not None else _counts(windows, out.shape, kernel, stride, padding, count_pad)
    )
    return _divided(total, count, out)


def _counts(windows: _Windows, out: Any, kernel: Any, stride: Any, padding: Any, count_pad: bool) -> Any:
    """How many elements each window counts: it ends at the (padded) border."""
    sides = []
    for d, i in enumerate(t.coordinates(out)[windows.lead :]):
        begin, border = i * stride[d] - padding[d], padding[d] if count_pad else 0
        first = t.apply("max", t.iota(out, begin), t.literal(-border, i64, out))
        last = t.apply("min", t.iota(out, begin + kernel[d]), t.literal(windows.extents[d] + border, i64, out))
        sides.append(t.apply("sub", last, first))
    return _product(sides)


@aten("_adaptive_avg_pool2d.default", "_adaptive_avg_pool3d.default", "adaptive_avg_pool1d.default")
def adaptive_avg_pool(node: Aten, x: Any, size: Any) -> Any:
    """The mean over windows [i * n // m, ceil((i + 1) * n / m))."""
    out = result(node)
    windows = _adaptive(x.type, out.shape, len(size))
    total = t.reduce("sum", windows.of(t.cast(x, out.dtype.compute), 0), windows.axes)
    return _divided(total, _adaptive_counts(out.shape, list(zip(windows.extents, size, strict=True))), out)


def _adaptive_counts(shape: Sequence[Any], pairs: Sequence[tuple[Any, Any]]) -> Any:
    """How many elements each window has: m of them on n, for such pairs, of the last dimensions."""
    here = t.coordinates(shape)[len(shape) - len(pairs) :]
    bounds = [_adaptive_bounds(i, n, m) for i, (n, m) in zip(here, pairs, strict=True)]
    return _product([t.iota(shape, end - begin) for begin, end in bounds])


def _largest(x: Any, windows: _Windows) -> tuple[Any, Any]:
    """The largest element and its place; the place of the last NaN where there is one, as in eager."""
    values, place = windows.of(t.cast(x, x.type.dtype.compute), x.type.dtype.lowest), windows.flat()
    if values.type.dtype.is_float:
        place = t.where(t.apply("isnan", values), t.apply("not_", place), place)  # -1 - place: later is less
    _, where = t.reduce("argmax", (values, place), windows.axes)
    where = t.where(t.apply("lt", where, c(0, where)), t.apply("not_", where), where)
    where = t.cast(where, i64)
    return t.cast(t.reduce("max", values, windows.axes), x.type.dtype), where  # who wants no index pays for none


@aten("max_pool2d_with_indices.default", "max_pool3d_with_indices.default")
def max_pool(
    node: Aten, x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Any:
    """The largest element of the window, and its place in the flattened image."""
    out, spatial = result(node, 0).shape, _spatial(node)
    kernel, padding, dilation = (_per_dim(v, spatial) for v in (kernel, padding, dilation))
    stride = _per_dim(stride, spatial) if stride not in ((), None) else kernel
    return _largest(x, _fixed(x.type, out, kernel, stride, padding, dilation))


@aten("adaptive_max_pool2d.default", "adaptive_max_pool3d.default")
def adaptive_max_pool(node: Aten, x: Any, size: Any) -> Any:
    """The largest element of the windows of adaptive_avg_pool, and its place in the flattened image."""
    out = result(node, 0).shape
    return _largest(x, _adaptive(x.type, out, len(size)))


@aten("max_pool2d_with_indices_backward.default", "max_pool3d_with_indices_backward.default")
def max_pool_backward(
    node: Aten, grad: Any, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool, indices: Any
) -> Any:
    """Each place gets the gradients of the windows it was the largest of: those whose index points at it."""
    out, spatial = result(node), _spatial(node)
    kernel, padding, dilation = (_per_dim(v, spatial) for v in (kernel, padding, dilation))
    stride = _per_dim(stride, spatial) if stride not in ((), None) else kernel
    lead, space = out.rank - spatial, (*out.shape, *kernel)
    here = t.coordinates(space)
    place, inside = spread(
        here[lead : out.rank], here[out.rank :], grad.type.shape[lead:], kernel, stride, padding, dilation
    )
    flat: IntExpr = 0
    for d in range(lead, out.rank):
        flat = flat * out.shape[d] + here[d]
    at = (*here[:lead], *place)
    chosen = t.apply("eq", t.index_map(indices, space, at, inside), t.iota(space, flat))
    given = t.index_map(t.cast(grad, out.dtype.compute), space, at, inside)
    total = t.reduce("sum", t.where(chosen, given, c(0, given)), range(out.rank, len(space)))
    return t.cast(total, out.dtype)


def _spread(share: Any, out: Type, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Any:
    """The sum of the shares of all windows that a place is in: of one, where windows lie side by side."""
    lead = out.rank - len(kernel)
    if tuple(kernel) == tuple(stride) and not any(padding):
        here = t.coordinates(out.shape)
        place = [i // k for i, k in zip(here[lead:], kernel, strict=True)]
        ends = zip(place, share.type.shape[lead:], kernel, out.shape[lead:], strict=True)
        inside = [m - 1 - i for i, m, k, n in ends if m * k < n]
        return t.cast(t.index_map(share, out.shape, (*here[:lead], *place), inside), out.dtype)
    space = (*out.shape, *kernel)
    here = t.coordinates(space)
    extents, alone = share.type.shape[lead:], (1,) * len(kernel)
    place, inside = spread(here[lead : out.rank], here[out.rank :], extents, kernel, stride, padding, alone)
    found = t.index_map(share, space, (*here[:lead], *place), inside)
    return t.cast(t.reduce("sum", found, range(out.rank, len(space))), out.dtype)


@aten("avg_pool2d_backward.default", "avg_pool3d_backward.default")
def avg_pool_backward(
    node: Aten,
    grad: Any,
    x: Any,
    kernel: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_pad: bool,
    divisor: Any,
) -> Any:
    """Each place gets its share of the gradients of the windows it is in."""
    out, spatial = result(node), _spatial(node)
    kernel, padding = _per_dim(kernel, spatial), _per_dim(padding, spatial)
    stride = _per_dim(stride, spatial) if stride not in ((), None) else kernel
    windows = _fixed(x.type, grad.type.shape, kernel, stride, padding, (1,) * spatial)
    given = t.cast(grad, out.dtype.compute)
    counts = _counts(windows, grad.type.shape, kernel, stride, padding, count_pad)
    count = c(divisor, given) if divisor is not None else t.cast(counts, given.type.dtype)
    return _spread(t.apply("div", given, count), out, kernel, stride, padding)


@aten("_adaptive_avg_pool2d_backward.default", "_adaptive_avg_pool3d_backward.default")
def adaptive_avg_pool_backward(node: Aten, grad: Any, x: Any) -> Any:
    """The same of windows of varying size, of which a place is in two or more where they overlap."""
    out, spatial = result(node), _spatial(node)
    given, lead = t.cast(grad, out.dtype.compute), out.rank - spatial
    pairs = list(zip(out.static_shape[lead:], grad.type.static_shape[lead:], strict=True))
    if all(n % m == 0 for n, m in pairs):
        kernel = [n // m for n, m in pairs]
        share = t.apply("div", given, c(float(math.prod(kernel)), given))
        return _spread(share, out, kernel, kernel, (0,) * spatial)
    share = t.apply("div", given, t.cast(_adaptive_counts(grad.type.shape, pairs), given.type.dtype))
    most = [max(last - first + 1 for first, last in (_windows_around(i, n, m) for i in range(n))) for n, m in pairs]
    space = (*out.shape, *most)
    here = t.coordinates(space)
    place, inside = [], []
    for d, (n, m) in enumerate(pairs):
        first, last = _windows_around(here[lead + d], n, m)
        place.append(first + here[out.rank + d])
        inside.append(last - place[-1])
    found = t.index_map(share, space, (*here[:lead], *place), inside)
    return t.cast(t.reduce("sum", found, range(out.rank, len(space))), out.dtype)


def _windows_around(i: Any, n: int, m: int) -> tuple[Any, Any]:
    """The first and the last of the windows of `_adaptive_bounds` that place i is in."""
    return i * m // n, (i * m + m - 1) // n


RULES: tuple[Rule, ...] = (
    avg_pool,
    adaptive_avg_pool,
    max_pool,
    adaptive_max_pool,
    max_pool_backward,
    avg_pool_backward,
    adaptive_avg_pool_backward,
)
