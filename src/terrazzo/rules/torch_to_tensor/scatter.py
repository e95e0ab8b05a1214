"""Writing to places that come from data: scatter, index_put and their kin, turned round into a choice at every place.

A place of the result looks for the sources that write to it. Which of them hits is a comparison of indices; the last one wins, or
a reduction combines them all. That is many comparisons, so a rule declines where PyTorch's loop over the sources is cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.types import bool_, i64
from terrazzo.rewrite.rule import need
from terrazzo.rules.torch_to_tensor.common import normalize, operand
from terrazzo.rules.torch_to_tensor.pointwise import c
from terrazzo.rules.torch_to_tensor.view import holds

FEW = 16
"""So many comparisons for each element of the result cost less than a call of PyTorch."""
SMALL = 1 << 16
"""And so many in all."""


def _affordable(comparisons: int, elements: int) -> None:
    need(comparisons <= max(SMALL, FEW * elements), f"it takes {comparisons} comparisons to write {elements} elements")


def combined(x: Any, sources: Any, hit: Any, reduction: str, include: bool) -> Any:
    """x with, at every place, the sources of the last axis that hit it: "last" wins, or they are combined with x or instead of it."""
    dtype, axis = x.type.dtype, hit.type.rank - 1
    wide = dtype.compute
    base, given = t.cast(x, wide), t.cast(sources, wide)
    count = t.reduce("sum", t.cast(hit, i64), [axis])
    name, combine = _MONOID[reduction]
    if wide is bool_:
        name, combine = ("all", "and_") if reduction in ("prod", "amin") else ("any", "or_")
    neutral = {"sum": 0, "prod": 1, "max": wide.lowest, "min": wide.highest, "any": False, "all": True}[name]
    total = t.reduce(name, t.where(hit, given, c(neutral, given)), [axis])
    if include:
        total = t.apply(combine, total, base)
    if reduction == "mean":
        count = t.apply("add", count, c(1, count)) if include else count
        positive = t.cast(t.apply("max", count, c(1, count)), wide)
        total = t.apply("div" if wide.is_float else "floordiv", total, positive)
    value = total if include else t.where(t.apply("gt", count, c(0, count)), total, base)
    return t.cast(value, dtype)


_MONOID = {"sum": ("sum", "add"), "prod": ("prod", "mul"), "mean": ("sum", "add"), "amax": ("max", "max"), "amin": ("min", "min")}


def _last(hit: Any) -> Any:
    """The last position along the last axis that hits, or -1."""
    shape = hit.type.shape
    position = t.iota(shape, t.coordinates(shape)[-1])
    return t.reduce("max", t.where(hit, position, c(-1, position)), [hit.type.rank - 1])


def _chosen(x: Any, winner: Any, source: Any, index: Callable[[IntExpr], Sequence[IntExpr]], count: int) -> Any:
    """source[index(winner)] where there is a winner, else x."""
    here = t.coordinates(x.type.shape)
    safe = t.apply("max", winner, c(0, winner))
    taken = t.index_map(t.cast(source, x.type.dtype), x.type.shape, index(t.loaded(safe, here, count)))
    return t.where(t.apply("ge", winner, c(0, winner)), taken, x)


def _scatter(x: Any, dim: int, index: Any, source: Any, reduction: str, include: bool = True) -> Any:
    """x with x[.., index[k], ..] replaced by, or combined with, source[.., k, ..]; a 0-d tensor counts as a vector of one."""
    if not x.type.rank:
        flat = [t.reshape(v, (1,) * max(v.type.rank, 1)) if isinstance(v, t.Node) else v for v in (x, index, source)]
        return t.reshape(_scatter(flat[0], 0, flat[1], flat[2], reduction, include), ())
    shape, dim = x.type.shape, normalize(dim, x.type.rank)
    if 0 in index.type.shape:
        return x
    index = t.reshape(index, index.type.shape or (1,))
    count = index.type.shape[dim]
    _affordable(math.prod(shape) * count, math.prod(shape))
    space = (*shape, count)
    here = t.coordinates(space)
    place = [here[-1] if d == dim else e for d, e in enumerate(here[:-1])]
    inside = [n - 1 - e for d, (e, n) in enumerate(zip(place, index.type.shape, strict=True)) if d != dim]
    target = t.index_map(t.cast(index, i64), space, place, inside)
    hit = t.apply("and_", t.apply("eq", target, t.iota(space, here[dim])), holds(space, inside))
    if reduction == "last":
        at = t.coordinates(shape)
        full = operand(source, x.type.dtype, ()) if not isinstance(source, t.Node) or not source.type.rank else source
        return _chosen(x, _last(hit), full, lambda k: [k if d == dim else e for d, e in enumerate(at)][: full.type.rank], count)
    given = t.index_map(source, space, place, inside) if isinstance(source, t.Node) else operand(source, x.type.dtype, space)
    return combined(x, given, hit, reduction, include)
