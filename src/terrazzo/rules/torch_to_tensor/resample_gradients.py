"""Gradients of what reads images between their points: each element sums those of all that may have read it, and
nothing is scattered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.types import DType, Type, f32
from terrazzo.rewrite.rule import Rule
from terrazzo.rules.torch_to_tensor.common import aten, result
from terrazzo.rules.torch_to_tensor.pointwise import c
from terrazzo.rules.torch_to_tensor.resample import Places, cubic, limited, linear, named_rule, places_of, step_of

Weight = Callable[[IntExpr, IntExpr, Sequence[IntExpr], DType], Any]
"""How much an element of the result takes of one of the image, as a tensor of a shape and type."""


@dataclass(frozen=True)
class Readers:
    """Along one dimension: the elements of the result that may read an element of the image, so many from the `first`
    on, or `all` of which read it. A reader and the element have a `weight`; None where all have 1.
    """

    first: Callable[[IntExpr], IntExpr]
    count: int
    all: bool
    weight: Weight | None


def _readers(first: Any, behind: Any, m: int, pace: float, weight: Weight) -> Readers:
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
            weight = r.weight(r.first(own) + number, own, shape, dtype)
            factors.append((t.index_map(weight, space, (i, k)), r.all))
    value = t.cast(t.index_map(grad, space, index, inside), dtype)
    for f, every in factors:
        new = t.apply("mul", value, f)  # where nothing reads, an infinite gradient is none, and no NaN
        value = new if every else t.where(t.apply("ne", f, c(0.0, f)), new, c(0.0, value))
    return t.cast(t.reduce("sum", value, range(out.rank, len(space))), out.dtype)


def _nearest_backward(name: str, middle: float) -> Rule:
    def lower(node: Aten, grad: Any, size: Sequence[int], given: Sequence[int], *scales: float | None) -> Any:
        out, along = result(node), []
        for m, n, scale in zip(size, out.static_shape[2:], scales or (None,) * len(size), strict=True):
            step = step_of(n, m, False, scale)

            def reads(
                reader: IntExpr,
                element: IntExpr,
                shape: Sequence[IntExpr],
                dtype: DType,
                n: int = n,
                step: float = step,
            ) -> Any:
                here, own = (t.cast(t.iota(shape, e), f32) for e in (reader, element))  # as PyTorch has it
                place = t.apply("mul", t.apply("add", here, c(middle, here)), c(step, here))
                last = t.apply("min", t.apply("floor", place), c(n - 1.0, place))
                return t.cast(t.apply("eq", last, own), dtype)

            places = (np.arange(m, dtype=np.float32) + np.float32(middle)) * np.float32(step)
            ends = np.searchsorted(np.minimum(places, np.float32(n - 1)), np.arange(n + 1))
            found = _readers(ends[:-1], ends[1:], m, 1 / step, reads)
            along.append(replace(found, weight=None) if found.all else found)
        return gathered(grad, out, along)

    rule = aten(*(f"{name}{d}d_backward.default" for d in (1, 2, 3)))(lower)
    return Rule(f"{name}_backward", rule.keys, rule.rewrite, "Each element gets the gradients of all that read it.")


def _nearness(places: Places, n: int) -> Weight:
    """How much linear interpolation takes of an element: the nearer it is, the more."""

    def weight(reader: IntExpr, element: IntExpr, shape: Sequence[IntExpr], dtype: DType) -> Any:
        inside = limited(t.iota(shape, places.parts(reader)), (n - 1) * places.unit + 1)
        return linear(places.away(inside, element, shape, dtype))

    return weight


def _cubic_weight(places: Places, n: int) -> Weight:
    """How much cubic interpolation takes of an element; the first and last one stand for those beyond them."""

    def weight(reader: IntExpr, element: IntExpr, shape: Sequence[IntExpr], dtype: DType) -> Any:
        away = places.away(t.iota(shape, places.parts(reader)), element, shape, dtype)
        at, total = t.iota(shape, element), cubic(away)
        for end, side in ((0, 1.0), (n - 1, -1.0)):
            beyond = [cubic(t.apply("add", away, c(side * k, away))) for k in (1, 2)]
            here = t.apply("eq", at, c(end, at))
            total = t.apply("add", total, t.where(here, t.apply("add", *beyond), c(0.0, away)))
        return total

    return weight


def _interpolated_backward(reach: int, weighing: Callable[[Places, int], Weight]) -> Callable[..., Any]:
    """Of an interpolation by elements up to `reach` away; places outside count as those at the end of the image."""

    def lower(
        node: Aten, grad: Any, size: Sequence[int], given: Sequence[int], align: bool, *scales: float | None
    ) -> Any:
        out, along = result(node), []
        for m, n, scale in zip(size, out.static_shape[2:], scales or (None,) * len(size), strict=True):
            places = places_of(n, m, align, scale)
            unit = places.unit
            at = np.clip([places.parts(i) for i in range(m)], 0, (n - 1) * unit)
            i = np.arange(n) * unit
            first, behind = np.searchsorted(at, i - reach * unit, "right"), np.searchsorted(at, i + reach * unit)
            pace = float(1 / places.step) if places.step else 0.0
            along.append(_readers(first, behind, m, pace, weighing(places, n)))
        return gathered(grad, out, along)

    return lower


RULES: tuple[Rule, ...] = (
    _nearest_backward("upsample_nearest", 0.0),
    _nearest_backward("_upsample_nearest_exact", 0.5),
    named_rule(
        "upsample_linear_backward",
        _interpolated_backward(1, _nearness),
        "Each element gets the gradients of all that lie between its neighbours, weighted by how near they are.",
        *(f"upsample_{name}_backward" for name in ("linear1d", "bilinear2d", "trilinear3d")),
    ),
    named_rule(
        "upsample_bicubic2d_backward",
        _interpolated_backward(2, _cubic_weight),
        "Each element gets the gradients of all that lie less than two elements away, weighted as they read it.",
    ),
)
