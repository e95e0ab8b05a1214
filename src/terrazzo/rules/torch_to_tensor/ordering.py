"""Elements by their order: sort, topk, kthvalue, median. How many elements come before one is counted.

Before an element come those that are smaller, and equal ones that stand before it, so these keep their order. NaN is
larger than all numbers, as in PyTorch. Counting compares every element of a row with all others, which a GPU does
sooner than it sorts as long as rows are short; and it is a kernel like any other, into which others are fused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.types import Type, bool_, i32, i64
from terrazzo.rewrite.rule import Rule, need
from terrazzo.rules.torch_to_tensor.common import aten, normalize, result
from terrazzo.rules.torch_to_tensor.families import inverts
from terrazzo.rules.torch_to_tensor.view import reshaped

LONGEST = 1024
"""Elements of a row up to which they are compared with each other."""


@aten("sort.default", "sort.stable")
def sort(node: Aten, x: Any, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Any:
    """The elements along a dimension in order, and where they stand. An order that PyTorch gave by sorting has each
    place once, and is sorted by its inverse, which is written where the order says: ranks, in argsort(argsort(x)), and
    the way of tokens back from their experts.
    """
    axis = normalize(dim, x.type.rank)
    return _inverse(x, axis) if inverts(node, x) else _first(x, axis, result(node, 0).shape, descending)


def _inverse(order: Any, axis: int) -> Any:
    """The places along a dimension, and where an order has them."""
    shape = order.type.shape
    places, zeros = t.iota(shape, t.coordinates(shape)[axis]), t.literal(0, i64, shape)
    return places, t.Opaque("aten.scatter.src", (zeros, axis, order, places), (), Type(i64, shape))


@aten("topk.default")
def topk(node: Aten, x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """The first k elements along a dimension in order, and where they stand."""
    return _first(x, normalize(dim, x.type.rank), result(node, 0).shape, largest)


def _first(x: Any, axis: int, shape: Sequence[Any], descending: bool) -> Any:
    """As many of the elements in order as `shape` has, and where they stand."""
    if not x.type.rank:
        return x, t.literal(0, i64, ())
    keys = _keys(x)
    before = _before(t.apply("not_", keys) if descending else keys, axis)
    return _standing(x, axis, before, t.cast(t.iota(shape, t.coordinates(shape)[axis]), i32))


@aten("kthvalue.default")
def kthvalue(node: Aten, x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """The k-th smallest element along a dimension, and where it stands."""
    return _one(node, x, dim, lambda nans, extent: t.literal(k - 1, i32, nans.type.shape))


@aten("median.dim")
def median(node: Aten, x: Any, dim: int, keepdim: bool = False) -> Any:
    """The lower median along a dimension, or a NaN where there is one; and where it stands."""

    def number(nans: Any, extent: int) -> Any:
        shape = nans.type.shape
        none = t.apply("eq", nans, t.literal(0, i32, shape))
        first = t.apply("sub", t.literal(extent, i32, shape), nans)
        return t.where(none, t.literal((extent - 1) // 2, i32, shape), first)

    return _one(node, x, dim, number)


@aten("nanmedian.dim")
def nanmedian(node: Aten, x: Any, dim: int, keepdim: bool = False) -> Any:
    """The lower median along a dimension of what is no NaN, where there is such; and where it stands."""

    def number(nans: Any, extent: int) -> Any:
        shape = nans.type.shape
        last = t.apply("sub", t.literal(extent - 1, i32, shape), nans)
        return t.apply("shr", t.apply("max", last, t.literal(0, i32, shape)), t.literal(1, i32, shape))

    return _one(node, x, dim, number)


def _one(node: Aten, x: Any, dim: int, number: Callable[[Any, int], Any]) -> Any:
    """The element of each row before which there are so many as `number` says, given how many are NaN and how many
    there are in all; and where it stands.
    """
    if not x.type.rank:
        return x, t.literal(0, i64, ())
    axis, keys = normalize(dim, x.type.rank), _keys(x)
    nans: Any = t.literal(False, bool_, x.type.shape)
    if x.type.dtype.is_float:
        nans = t.apply("isnan", t.cast(x, x.type.dtype.compute))
    count = t.reduce("sum", t.cast(nans, i32), [axis], keepdim=True)
    before = _before(keys, axis)
    found = _standing(x, axis, before, number(count, x.type.shape[axis]))
    return tuple(reshaped(y, result(node, k).shape) for k, y in enumerate(found))


def _keys(x: Any) -> Any:
    """Whole numbers in the order of the elements."""
    kind = x.type.dtype
    if kind.is_float:
        return t.apply("order", t.cast(x, kind.compute))
    need(kind.name != "u64", "it has more numbers than i64")
    return t.cast(x, i32 if kind.size < 4 or kind is i32 else i64)


def _before(keys: Any, axis: int) -> Any:
    """How many elements of its row come before each."""
    extent, rank = keys.type.shape[axis], keys.type.rank
    need(isinstance(extent, int) and extent <= LONGEST, f"it has more than {LONGEST} elements along the dimension")
    pairs = (*keys.type.shape, extent)
    *here, other = t.coordinates(pairs)
    mine, its = t.index_map(keys, pairs, here), t.index_map(keys, pairs, [*here[:axis], other, *here[axis + 1 :]])
    stands_before = t.apply("lt", t.iota(pairs, other), t.iota(pairs, here[axis]))
    comes_before = t.apply("or_", t.apply("lt", its, mine), t.apply("and_", t.apply("eq", its, mine), stands_before))
    return t.reduce("sum", t.cast(comes_before, i32), [rank])


def _standing(x: Any, axis: int, before: Any, numbers: Any) -> Any:
    """The elements along the axis before which there are so many as `numbers` says, and where they stand."""
    extent, shape = x.type.shape[axis], numbers.type.shape
    pairs = (*shape, extent)
    *here, place = t.coordinates(pairs)
    there = t.index_map(before, pairs, [*here[:axis], place, *here[axis + 1 :]])
    found = t.apply("eq", there, t.index_map(numbers, pairs, here))
    place_or_none = t.where(found, t.cast(t.iota(pairs, place), i32), t.literal(0, i32, pairs))
    places = t.cast(t.reduce("sum", place_or_none, [len(shape)]), i64)
    at = list[Any](t.coordinates(shape))
    at[axis] = t.loaded(places, t.coordinates(shape), extent)
    return t.index_map(x, shape, at), places


RULES: tuple[Rule, ...] = (sort, topk, kthvalue, median, nanmedian)
