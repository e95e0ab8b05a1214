"""Images read between their points: a sum over taps of the elements around a place, weighted by their distance to
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.types import DType, Type, f32, i32, i64
from terrazzo.rewrite.rule import Rule
from terrazzo.rules.torch_to_tensor.common import aten, result
from terrazzo.rules.torch_to_tensor.pointwise import c

Kernel = Callable[[Any], Any]
"""The weight of a tap at a signed distance."""


def linear(d: Any) -> Any:
    """1 - |d|, and 0 from 1 on."""
    return t.apply("max", t.apply("sub", c(1.0, d), t.apply("abs", d)), c(0.0, d))


def _cubic(a: float) -> Kernel:
    """Keys' convolution: piecewise cubic, 1 at 0, 0 at the other integers, 0 from 2 on."""

    def kernel(d: Any) -> Any:
        x = t.apply("abs", d)

        def polynomial(*coefficients: float) -> Any:
            value = c(coefficients[0], x)
            for k in coefficients[1:]:
                value = t.apply("add", t.apply("mul", value, x), c(k, x))
            return value

        near, far = polynomial(a + 2, -(a + 3), 0.0, 1.0), polynomial(a, -5 * a, 8 * a, -4 * a)
        return t.where(t.apply("le", x, c(1.0, x)), near, t.where(t.apply("lt", x, c(2.0, x)), far, c(0.0, x)))

    return kernel


cubic = _cubic(-0.75)
_keys = _cubic(-0.5)  # what PyTorch takes where it antialiases


@dataclass(frozen=True)
class Taps:
    """Along one dimension: which element each tap reads (i64) and its weight. The last dimension of both counts the
    taps.

    `axes` says which dimensions of the result the others are. Where taps may miss the image, places are counted from
    `before` it, in what is `wide` elements then: they read nothing there, and have 0.
    """

    place: Any
    weight: Any
    axes: tuple[int, ...]
    before: int = 0
    wide: int = 0


def weighted(x: Any, out: Type, along: Sequence[Taps]) -> Any:
    """The sum over all taps of x[place] * the product of the weights, for the last dimensions of x."""
    lead = out.rank - len(along)
    space = (*out.shape, *(taps.place.type.shape[-1] for taps in along))
    here = t.coordinates(space)
    index: list[IntExpr] = list(here[:lead])
    factors, inside = [], []
    for d, taps in enumerate(along):
        at, n = (*(here[a] for a in taps.axes), here[out.rank + d]), x.type.shape[lead + d]
        place = t.loaded(taps.place, at, taps.wide or n) - taps.before
        inside += [place, n - 1 - place] if taps.wide else []
        index.append(place)
        factors.append(t.index_map(taps.weight, space, at))
    value = t.cast(t.index_map(x, space, index, inside), out.dtype.compute)
    weight = factors[0]
    for f in factors[1:]:
        weight = t.apply("mul", weight, f)
    total = t.reduce("sum", t.apply("mul", value, weight), range(out.rank, len(space)))
    return t.cast(total, out.dtype)


def _limited(place: Any, extent: int) -> Any:
    return t.apply("min", t.apply("max", place, c(0, place)), c(extent - 1, place))


FAR, BEFORE = 4, 7
"""How far outside of an image a place is moved that is farther away: all taps around it are outside there. And what is
more than that for every tap.
"""


def _near(real: Any, n: int) -> Any:
    """Whole numbers of which those far outside an image of n elements come nearer, so that few bits have them; NaN is
    0.
    """
    near = t.apply("fmin", t.apply("fmax", real, c(-float(FAR), real)), c(float(n + FAR), real))
    return t.where(t.apply("eq", real, real), near, c(0.0, near))


def _around(real: Any, count: int, kernel: Kernel, whole: DType, n: int = 0) -> tuple[Any, Any]:
    """(places, weights) of the `count` elements around each of `real`; the places may be outside. Where nothing is read
    outside of an image of n elements, they are near to it.
    """
    shape = (*real.type.shape, count)
    *here, k = t.coordinates(shape)
    first = t.apply("floor", real)
    first = t.cast(_near(first, n) if n else first, whole)
    step = t.cast(t.iota(shape, k - (count // 2 - 1)), whole)
    place = t.apply("add", t.index_map(first, shape, here), step)
    return place, kernel(t.apply("sub", t.index_map(real, shape, here), t.cast(place, real.type.dtype)))


def _whole(n: int) -> DType:
    """The type that places in an image of n elements, and those around it, are computed in: a GPU takes two
    instructions and more for what 64 bits hold.
    """
    return i32 if n < 1 << 30 else i64


def _scale(n: int, m: int, align: bool, scale: float | None) -> float:
    """How many elements of the input one step of the output is."""
    if align:
        return (n - 1) / (m - 1) if m > 1 else 0.0
    return 1 / scale if scale else n / m


def _real(position: Any, step: float, align: bool) -> Any:
    """Where in the image an element of the result is, when one is `step` elements of the image."""
    if align:
        return t.apply("mul", position, c(step, position))
    middle = t.apply("mul", t.apply("add", position, c(0.5, position)), c(step, position))
    return t.apply("sub", middle, c(0.5, middle))


def _interpolated(count: int, kernel: Kernel, extend: bool) -> Callable[..., Any]:
    """Interpolation by a kernel of `count` taps; places before the first element are moved to it unless `extend`."""

    def lower(node: Aten, x: Any, size: Sequence[int], align: bool, *scales: float | None) -> Any:
        out = result(node)
        dtype, along = out.dtype.compute, []
        for d, (m, scale) in enumerate(zip(size, scales or (None,) * len(size), strict=True)):
            n = x.type.shape[2 + d]
            step = _scale(n, m, align, scale)
            real = _real(t.cast(t.iota((m,), t.coordinates((m,))[0]), dtype), step, align)
            real = real if extend or align else t.apply("max", real, c(0.0, real))
            place, weight = _around(real, count, kernel, _whole(n))
            along.append(Taps(_limited(place, n), weight, (2 + d,)))
        return weighted(x, out, along)

    return lower


def _antialiased(radius: int, kernel: Kernel) -> Callable[..., Any]:
    """Interpolation whose kernel is stretched by the scale when the image shrinks; the weights are divided by their
    sum.
    """

    def lower(node: Aten, x: Any, size: Sequence[int], align: bool, *scales: float | None) -> Any:
        out = result(node)
        dtype, along = out.dtype.compute, []
        for d, (m, scale) in enumerate(zip(size, scales or (None,) * len(size), strict=True)):
            n = x.type.shape[2 + d]
            step = _scale(n, m, align, scale)
            stretch = max(step, 1.0)
            shape = (m, 2 * math.ceil(radius * stretch) + 1)
            i, k = t.coordinates(shape)
            position = t.cast(t.iota(shape, i), dtype)
            centre = t.apply("mul", t.apply("add", position, c(0.5, position)), c(step, position))

            def end(offset: float, low: int, centre: Any = centre, n: int = n) -> Any:
                return _limited(t.cast(t.apply("add", centre, c(offset + 0.5, centre)), _whole(n)), n + low)

            first, last = end(-radius * stretch, 1), end(radius * stretch, 1)
            place = t.apply("add", first, t.cast(t.iota(shape, k), first.type.dtype))
            middle = t.apply("add", t.cast(place, dtype), c(0.5, centre))
            weight = kernel(t.apply("div", t.apply("sub", middle, centre), c(stretch, centre)))
            weight = t.where(t.apply("lt", place, last), weight, c(0.0, weight))
            total = t.broadcast(t.reduce("sum", weight, [1], keepdim=True), shape)
            along.append(Taps(_limited(place, n), t.apply("div", weight, total), (2 + d,)))
        return weighted(x, out, along)

    return lower


def _rule(name: str, lower: Callable[..., Any], doc: str) -> Rule:
    rule = aten(f"{name}.default")(lower)
    return Rule(name, rule.keys, rule.rewrite, doc)


_LINEAR = _interpolated(2, linear, False)
UPSAMPLINGS = (
    _rule("upsample_linear1d", _LINEAR, "Linear interpolation."),
    _rule("upsample_bilinear2d", _LINEAR, "Linear interpolation in two dimensions."),
    _rule("upsample_trilinear3d", _LINEAR, "Linear interpolation in three dimensions."),
    _rule("upsample_bicubic2d", _interpolated(4, cubic, True), "Cubic interpolation in two dimensions."),
    _rule(
        "_upsample_bilinear2d_aa", _antialiased(1, linear), "Linear interpolation, averaged where the image shrinks."
    ),
    _rule("_upsample_bicubic2d_aa", _antialiased(2, _keys), "Cubic interpolation, averaged where the image shrinks."),
)


def _reflected(real: Any, low: float, span: float) -> Any:
    """`real` reflected into [low, low + span]."""
    if span <= 0:
        return c(0.0, real)
    away = t.apply("abs", t.apply("sub", real, c(low, real)))
    rest = t.apply("fmod", away, c(span, away))
    turns = t.apply("floor", t.apply("div", away, c(span, away)))
    even = t.apply("eq", t.apply("fmod", turns, c(2.0, turns)), c(0.0, turns))
    return t.where(even, t.apply("add", rest, c(low, rest)), t.apply("sub", c(span + low, rest), rest))


def _in_image(grid: Any, n: int, align: bool) -> Any:
    """Coordinates of [-1, 1] as places in an image of n elements."""
    moved = t.apply("add", grid, c(1.0, grid))
    if align:
        return t.apply("mul", t.apply("div", moved, c(2.0, moved)), c(n - 1.0, moved))
    return t.apply("div", t.apply("sub", t.apply("mul", moved, c(float(n), moved)), c(1.0, moved)), c(2.0, moved))


def _padded(real: Any, n: int, padding: int, align: bool) -> Any:
    """Places outside the image stay (0), go to the border (1) or are reflected (2)."""
    if padding == 2:
        real = _reflected(real, 0.0, n - 1.0) if align else _reflected(real, -0.5, float(n))
    return real if padding == 0 else _limited(real, n)


@aten("grid_sampler_2d.default", "grid_sampler_3d.default", same=True)
def grid_sampler(node: Aten, x: Any, grid: Any, mode: int, padding: int, align: bool) -> Any:
    """x read at the places the grid says: by linear interpolation (mode 0), at the nearest element (1), cubic (2); 0
    outside.
    """
    out = result(node)
    dtype = out.dtype.compute
    sites = tuple(grid.type.shape[:-1])
    spatial = len(sites) - 1
    along = []
    for d, n in enumerate(x.type.shape[2:]):
        real = _in_image(t.index_map(t.cast(grid, dtype), sites, (*t.coordinates(sites), spatial - 1 - d)), n, align)
        whole, axes = _whole(n), (0, *range(2, 2 + spatial))
        if mode == 0:
            place, weight = _around(_padded(real, n, padding, align), 2, linear, whole, n)
        elif mode == 1:
            nearest = _near(t.apply("round", _padded(real, n, padding, align)), n)
            place = t.reshape(t.cast(nearest, whole), (*sites, 1))
            weight = t.literal(1.0, dtype, place.type.shape)
        else:
            place, weight = _around(real, 4, cubic, whole, 0 if padding else n)
            place = t.cast(_padded(t.cast(place, dtype), n, padding, align), whole)
        if mode == 2 and padding:
            along.append(Taps(_limited(place, n), weight, axes))  # all of them are inside
        else:
            place = t.apply("add", place, c(BEFORE, place))
            along.append(Taps(place, weight, axes, BEFORE, n + 2 * BEFORE))
    return weighted(x, out, along)


@dataclass(frozen=True)
class Readers:
    """Along one dimension: the elements of the result that may read an element of the image, so many from the `first`
    on, or `all` of which read it. The place of a reader and that of the element have a weight; None where all have 1.
    """

    first: Callable[[IntExpr], IntExpr]
    count: int
    all: bool
    weight: Callable[[Any, Any], Any] | None


def _readers(first: Any, behind: Any, m: int, pace: float, weight: Callable[[Any, Any], Any]) -> Readers:
    """As few of m for every element as have those from `first` up to `behind` for each, where one is about `pace` times
    as far as the last.
    """
    each = Fraction(pace).limit_denominator(1 << 20)
    even = np.arange(len(first)) * each.numerator // each.denominator
    read = first < behind
    shift = int((first - even)[read].min())
    count = int((behind - even)[read].max()) - shift
    start = even + shift
    every = bool((np.maximum(start, 0) == first).all() and (np.minimum(start + count, m) == behind).all())
    return Readers(lambda i: i * each.numerator // each.denominator + shift, count, every, weight)


def gathered(grad: Any, out: Type, along: Sequence[Readers]) -> Any:
    """The sum over all readers of grad * the product of the weights, where that is not 0, for the last dimensions."""
    lead, dtype = out.rank - len(along), out.dtype.compute
    space = (*out.shape, *(r.count for r in along))
    here = t.coordinates(space)
    index, inside, factors = list[IntExpr](here[:lead]), list[IntExpr](), []
    for d, r in enumerate(along):
        i, k = here[lead + d], here[out.rank + d]
        place = r.first(i) + k
        index.append(place)
        inside += [place, grad.type.shape[lead + d] - 1 - place]
        if r.weight is not None:
            shape = (out.shape[lead + d], r.count)
            own, number = t.coordinates(shape)
            reader, element = (t.cast(t.iota(shape, e), dtype) for e in (r.first(own) + number, own))
            factors.append((t.index_map(r.weight(reader, element), space, (i, k)), r.all))
    value = t.cast(t.index_map(grad, space, index, inside), dtype)
    for f, every in factors:
        new = t.apply("mul", value, f)  # where nothing reads, an infinite gradient is none, and no NaN
        value = new if every else t.where(t.apply("gt", f, c(0.0, f)), new, c(0.0, value))
    return t.cast(t.reduce("sum", value, range(out.rank, len(space))), out.dtype)


def _nearest_backward(name: str, middle: float) -> Rule:
    def lower(node: Aten, grad: Any, size: Sequence[int], given: Sequence[int], *scales: float | None) -> Any:
        out, along = result(node), []
        for m, n, scale in zip(size, out.static_shape[2:], scales or (None,) * len(size), strict=True):
            step = _scale(n, m, False, scale)

            def reads(reader: Any, element: Any, n: int = n, step: float = step) -> Any:
                here, own = (t.cast(x, f32) for x in (reader, element))  # as PyTorch has it
                place = t.apply("mul", t.apply("add", here, c(middle, here)), c(step, here))
                last = t.apply("min", t.apply("floor", place), c(n - 1.0, place))
                return t.cast(t.apply("eq", last, own), reader.type.dtype)

            places = (np.arange(m, dtype=np.float32) + np.float32(middle)) * np.float32(step)
            ends = np.searchsorted(np.minimum(places, np.float32(n - 1)), np.arange(n + 1))
            found = _readers(ends[:-1], ends[1:], m, 1 / step, reads)
            along.append(replace(found, weight=None) if found.all else found)
        return gathered(grad, out, along)

    rule = aten(*(f"{name}{d}d_backward.default" for d in (1, 2, 3)))(lower)
    return Rule(f"{name}_backward", rule.keys, rule.rewrite, "Each element gets the gradients of all that read it.")


@aten(*(f"upsample_{name}_backward.default" for name in ("linear1d", "bilinear2d", "trilinear3d")))
def upsample_linear_backward(
    node: Aten, grad: Any, size: Sequence[int], given: Sequence[int], align: bool, *scales: float | None
) -> Any:
    """Each element gets the gradients of all that lie between its neighbours, weighted by how near they are."""
    out, along = result(node), []
    for m, n, scale in zip(size, out.static_shape[2:], scales or (None,) * len(size), strict=True):
        step = _scale(n, m, align, scale)

        def near(reader: Any, element: Any, n: int = n, step: float = step) -> Any:
            place = _real(reader, step, align)
            place = t.apply("min", t.apply("max", place, c(0.0, place)), c(n - 1.0, place))
            return linear(t.apply("sub", place, element))

        offset = 0.0 if align else 0.5
        places, i = np.clip((np.arange(m) + offset) * step - offset, 0, n - 1), np.arange(n)
        first, behind = np.searchsorted(places, i - 1, "right"), np.searchsorted(places, i + 1)
        along.append(_readers(first, behind, m, 1 / step if step else 0.0, near))
    return gathered(grad, out, along)


BACKWARD = (
    _nearest_backward("upsample_nearest", 0.0),
    _nearest_backward("_upsample_nearest_exact", 0.5),
    upsample_linear_backward,
)
RULES: tuple[Rule, ...] = (*UPSAMPLINGS, grid_sampler, *BACKWARD)
