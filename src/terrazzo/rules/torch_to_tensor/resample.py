"""Images read between their points: a sum over taps of the elements around a place, weighted by their distance to
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.expr import IntExpr, floordiv
from terrazzo.ir.types import DType, Type, i32, i64
from terrazzo.rewrite.rule import Rule, need
from terrazzo.rules.torch_to_tensor.common import aten, result
from terrazzo.rules.torch_to_tensor.pointwise import c

Kernel = Callable[[Any], Any]
"""The weight of a tap at a signed distance."""


def linear(d: Any) -> Any:
    """1 - |d|, and 0 from 1 on."""
    return t.apply("max", t.apply("sub", c(1.0, d), t.apply("abs", d)), c(0.0, d))


def _cubic(a: float) -> Kernel:
    """Keys' convolution: piecewise cubic, 1 at 0, 0 at the other integers, 0 from 2 on. Its pieces (a + 2) x^3 - (a +
    3) x^2 + 1 and a x^3 - 5 a x^2 + 8 a x - 4 a are products here, of which no large terms cancel near their roots.
    """

    def kernel(d: Any) -> Any:
        x = t.apply("abs", d)
        one, two = c(1.0, x), c(2.0, x)
        rest = t.apply("sub", t.apply("add", one, x), t.apply("mul", t.apply("mul", x, x), c(a + 2, x)))
        near = t.apply("mul", t.apply("sub", one, x), rest)
        left = t.apply("sub", x, two)
        far = t.apply("mul", t.apply("mul", t.apply("mul", left, left), t.apply("sub", x, one)), c(a, x))
        return t.where(t.apply("le", x, one), near, t.where(t.apply("ge", x, two), c(0.0, x), far))  # NaN of NaN

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


def weighted(x: Any, out: Type, along: Sequence[Taps], lead: int | None = None) -> Any:
    """The sum over all taps of x[place] * the product of the weights, for the dimensions from `lead` on, or the last
    ones of x.
    """
    lead = out.rank - len(along) if lead is None else lead
    space = (*out.shape, *(taps.place.type.shape[-1] for taps in along))
    here = t.coordinates(space)
    index: list[IntExpr] = list(here[: out.rank])
    factors, inside = [], []
    for d, taps in enumerate(along):
        at, n = (*(here[a] for a in taps.axes), here[out.rank + d]), x.type.shape[lead + d]
        place = t.loaded(taps.place, at, taps.wide or n) - taps.before
        inside += [place, n - 1 - place] if taps.wide else []
        index[lead + d] = place
        factors.append(t.index_map(taps.weight, space, at))
    value = t.cast(t.index_map(x, space, index, inside), out.dtype.compute)
    weight = factors[0]
    for f in factors[1:]:
        weight = t.apply("mul", weight, f)
    total = t.reduce("sum", t.apply("mul", value, weight), range(out.rank, len(space)))
    return t.cast(total, out.dtype)


def limited(place: Any, extent: int) -> Any:
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
    outside of an image of n elements, they are near to it. An infinite place is far outside, where two elements have no
    weight; the weights of four are NaN there, as on a GPU.
    """
    below = t.apply("floor", real)
    first = t.cast(_near(below, n) if n else below, whole)
    return _taps(first, t.apply("sub", real, t.cast(first, real.type.dtype) if count == 2 else below), count, kernel)


def _taps(first: Any, rest: Any, count: int, kernel: Kernel) -> tuple[Any, Any]:
    """(places, weights) of the `count` elements around a place, which is `rest` behind the `first` one."""
    shape = (*rest.type.shape, count)
    *here, k = t.coordinates(shape)
    step = t.iota(shape, k - (count // 2 - 1))
    place = t.apply("add", t.index_map(first, shape, here), t.cast(step, first.type.dtype))
    return place, kernel(t.apply("sub", t.index_map(rest, shape, here), t.cast(step, rest.type.dtype)))


def _whole(n: int) -> DType:
    """The type that places in an image of n elements, and those around it, are computed in: a GPU takes two
    instructions and more for what 64 bits hold.
    """
    return i32 if n < 1 << 30 else i64


def step_of(n: int, m: int, align: bool, scale: float | None) -> float:
    """How many elements of the input one step of the output is."""
    if align:
        return (n - 1) / (m - 1) if m > 1 else 0.0
    return 1 / scale if scale else n / m


@dataclass(frozen=True)
class Places:
    """Where in an image the elements of a result are: element i at `offset` + i * `step`, found without rounding."""

    step: Fraction
    offset: Fraction

    @property
    def unit(self) -> int:
        """The parts of an element that places are counted in."""
        return math.lcm(self.step.denominator, self.offset.denominator)

    def parts(self, i: IntExpr) -> IntExpr:
        """The place of element i, in such parts."""
        return i * int(self.step * self.unit) + int(self.offset * self.unit)

    def away(self, parts: Any, element: IntExpr, shape: Sequence[IntExpr], dtype: DType) -> Any:
        """How far places in such parts are from elements."""
        found = t.cast(t.apply("sub", parts, t.iota(shape, element * self.unit)), dtype)
        return t.apply("div", found, c(self.unit, found))

    def split(self, i: IntExpr, shape: Sequence[IntExpr], dtype: DType) -> tuple[Any, Any]:
        """Of the places of elements i, as a tensor of a shape: the whole elements before them (i64), and what remains
        of the next one.
        """
        whole = floordiv(self.parts(i), self.unit)
        rest = t.cast(t.iota(shape, self.parts(i) - whole * self.unit), dtype)
        return t.iota(shape, whole), t.apply("div", rest, c(self.unit, rest))


def places_of(n: int, m: int, align: bool, scale: float | None) -> Places:
    """Those of m elements in an image of n. What a scale is meant as is a fraction that is the same number: 1.7 is
    17/10.
    """
    if align:
        return Places(Fraction(n - 1, m - 1) if m > 1 else Fraction(0), Fraction(0))
    step = Fraction(n, m)
    if scale:
        near = Fraction(scale).limit_denominator(1 << 12)
        step = 1 / (near if float(near) == scale else Fraction(float(np.float32(scale))))
    return Places(step, (step - 1) / 2)


WHOLE = "PyTorch interpolates whole numbers by weights that are whole numbers"


def _interpolated(count: int, kernel: Kernel, extend: bool) -> Callable[..., Any]:
    """Interpolation by a kernel of `count` taps; places before the first element are moved to it unless `extend`."""

    def lower(node: Aten, x: Any, size: Sequence[int], align: bool, *scales: float | None) -> Any:
        out = result(node)
        need(out.dtype.is_float, WHOLE)
        dtype, along = out.dtype.compute, []
        for d, (m, scale) in enumerate(zip(size, scales or (None,) * len(size), strict=True)):
            n = x.type.shape[2 + d]
            (i,) = t.coordinates((m,))
            first, rest = places_of(n, m, align, scale).split(i, (m,), dtype)
            first = t.cast(first, _whole(n))
            if not extend:
                rest = t.where(t.apply("lt", first, c(0, first)), c(0.0, rest), rest)
                first = t.apply("max", first, c(0, first))
            place, weight = _taps(first, rest, count, kernel)
            along.append(Taps(limited(place, n), weight, (2 + d,)))
        return weighted(x, out, along)

    return lower


def _antialiased(radius: int, kernel: Kernel) -> Callable[..., Any]:
    """Interpolation whose kernel is stretched by the scale when the image shrinks; the weights are divided by their
    sum. Where it shrinks, the taps are many, and fewer for one dimension after the other: 9 and 9 instead of 81. The
    last one is last, since the others are summed along memory.
    """

    def lower(node: Aten, x: Any, size: Sequence[int], align: bool, *scales: float | None) -> Any:
        out = result(node)
        need(out.dtype.is_float, WHOLE)
        dtype, along = out.dtype.compute, []
        for d, (m, scale) in enumerate(zip(size, scales or (None,) * len(size), strict=True)):
            n = x.type.shape[2 + d]
            step = step_of(n, m, align, scale)
            stretch = max(step, 1.0)
            shape = (2 * math.ceil(radius * stretch) + 1, m)  # weights lie along the image, for vectors of its points
            k, i = t.coordinates(shape)
            position = t.cast(t.iota(shape, i), dtype)
            centre = t.apply("mul", t.apply("add", position, c(0.5, position)), c(step, position))

            def end(offset: float, low: int, centre: Any = centre, n: int = n) -> Any:
                return limited(t.cast(t.apply("add", centre, c(offset + 0.5, centre)), _whole(n)), n + low)

            first, last = end(-radius * stretch, 1), end(radius * stretch, 1)
            place = t.apply("add", first, t.cast(t.iota(shape, k), first.type.dtype))
            middle = t.apply("add", t.cast(place, dtype), c(0.5, centre))
            weight = kernel(t.apply("div", t.apply("sub", middle, centre), c(stretch, centre)))
            weight = t.where(t.apply("lt", place, last), weight, c(0.0, weight))
            total = t.broadcast(t.reduce("sum", weight, [0], keepdim=True), shape)
            places, weights = (t.permute(x, (1, 0)) for x in (limited(place, n), t.apply("div", weight, total)))
            along.append(Taps(places, weights, (2 + d,)))
            lead = 2 + d
            if step > 1 and lead + 1 < out.rank:
                shape = (*x.type.shape[:lead], m, *x.type.shape[lead + 1 :])
                x = weighted(t.cast(x, dtype), Type(dtype, shape), [along.pop()], lead)
        return weighted(x, out, along)

    return lower


def named_rule(name: str, lower: Callable[..., Any], doc: str, *ops: str) -> Rule:
    rule = aten(*(f"{op}.default" for op in ops or (name,)))(lower)
    return Rule(name, rule.keys, rule.rewrite, doc)


_LINEAR = _interpolated(2, linear, False)
UPSAMPLINGS = (
    named_rule("upsample_linear1d", _LINEAR, "Linear interpolation."),
    named_rule("upsample_bilinear2d", _LINEAR, "Linear interpolation in two dimensions."),
    named_rule("upsample_trilinear3d", _LINEAR, "Linear interpolation in three dimensions."),
    named_rule("upsample_bicubic2d", _interpolated(4, cubic, True), "Cubic interpolation in two dimensions."),
    named_rule(
        "_upsample_bilinear2d_aa", _antialiased(1, linear), "Linear interpolation, averaged where the image shrinks."
    ),
    named_rule(
        "_upsample_bicubic2d_aa", _antialiased(2, _keys), "Cubic interpolation, averaged where the image shrinks."
    ),
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
    return real if padding == 0 else limited(real, n)


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
            place, weight = _around(real, 4, cubic, dtype if padding else whole, 0 if padding else n)
            place = t.cast(_padded(place, n, padding, align), whole)
        if mode == 2 and padding:
            along.append(Taps(limited(place, n), weight, axes))  # all of them are inside
        else:
            place = t.apply("add", place, c(BEFORE, place))
            along.append(Taps(place, weight, axes, BEFORE, n + 2 * BEFORE))
    return weighted(x, out, along)


RULES: tuple[Rule, ...] = (*UPSAMPLINGS, grid_sampler)
