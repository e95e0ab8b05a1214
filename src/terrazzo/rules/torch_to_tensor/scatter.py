"""Writing to places that come from data: scatter, index_put and their kin, turned round into a choice at every place.

A place of the result looks for the sources that write to it. Which of them hits is a comparison of indices; then the
last one wins, or a reduction combines them all. That is many comparisons: a rule declines where PyTorch's loop over the
sources is cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from terrazzo.ir.address import flatten, unflatten
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.types import Type, bool_, i64
from terrazzo.rewrite.rule import Rule, need
from terrazzo.rules.torch_to_tensor.common import aten, normalize, operand, result
from terrazzo.rules.torch_to_tensor.indexing import wrapped
from terrazzo.rules.torch_to_tensor.pointwise import c
from terrazzo.rules.torch_to_tensor.view import holds

FEW = 16
"""So many comparisons for each element of the result cost less than a call of PyTorch."""
SMALL = 1 << 16
"""And so many in all."""
PRICED = 1 << 25
"""So many where a GPU's price of them is compared with that of PyTorch's kernels, and a processor counts them."""

REDUCTIONS = {
    "sum": ("sum", "add"), "add": ("sum", "add"), "mean": ("sum", "add"),
    "prod": ("prod", "mul"), "multiply": ("prod", "mul"),
    "amax": ("max", "max"), "amin": ("min", "min"),
}  # fmt: skip
"""PyTorch's names, as our monoid and the scalar function that combines two."""

SCATTER_ADD = "aten.scatter_add.default"
PUTS = ("aten.index_put.default", "aten._unsafe_index_put.default", "aten._index_put_impl.default")
WRITES = ("scatter", "scatter of rows", "scatter with", "index add", "index put", "embedding gradient")
"""What libraries have for ops that write where data says."""
UNSORTED = 3072
"""Up to how many rows PyTorch's gradient of an embedding sorts none on a GPU (its embedding_dense_backward_cuda)."""
ON_A_PROCESSOR = 1 << 15, 2
"""Comparisons, in all and for an element, that take as long on a processor as a call of PyTorch."""


def compares_many(op: Aten) -> bool:
    """Whether a scatter, index_add or index_put of Torch IR, or the gradient of an embedding, compares so many indices
    that a processor is through with PyTorch's loop over the sources sooner.
    """
    x, shape = op.args[0].type, op.args[0].type.static_shape
    if "index_put" in op.name:
        used = [d for d, i in enumerate(op.args[1]) if i is not None]
        if not all(op.args[1][d].type.dtype.is_integer for d in used):  # a mask, which is a choice at each place
            return False
        count = math.prod(broadcast_shape([op.args[1][d].type.shape for d in used]))
        places = math.prod(shape if True in op.args[3:4] else [shape[d] for d in used])
    elif "embedding" in op.name:
        count, shape = op.args[1].type.numel, (op.args[2], *x.shape[op.args[1].type.rank :])
        places = math.prod(shape)
    else:
        index, dim = op.args[2].type.static_shape or (1,), op.args[1]
        count = index[normalize(dim, len(index))] if x.rank else 1
        places = shape[normalize(dim, x.rank)] if x.rank and "index_copy" in op.name else math.prod(shape)
    return bool(places * count > max(ON_A_PROCESSOR[0], ON_A_PROCESSOR[1] * math.prod(shape)))


def _affordable(comparisons: int, elements: int, most: int = SMALL) -> None:
    need(comparisons <= max(most, FEW * elements), f"it takes {comparisons} comparisons to write {elements} elements")


def _points(index: Any, place: IntExpr, extent: Any) -> Any:
    """Whether an index is `place`. It is checked, as one that is read by: no source vanishes unsaid."""
    space = index.type.shape
    value = t.iota(space, t.loaded(index, t.coordinates(space), extent))
    return t.apply("eq", value, t.iota(space, place))


def _last(hit: Any) -> Any:
    """The last position along the last axis that hits, or -1."""
    shape = hit.type.shape
    position = t.iota(shape, t.coordinates(shape)[-1])
    return t.reduce("max", t.where(hit, position, c(-1, position)), [hit.type.rank - 1])


def _safe(winner: Any) -> Any:
    """A winner as an index; 0 where there is none."""
    return t.apply("max", winner, c(0, winner))


def _won(x: Any, winner: Any, source: Any) -> Any:
    """The source where there is a winner, else x."""
    return t.where(t.apply("ge", winner, c(0, winner)), t.cast(source, x.type.dtype), x)


def combined(x: Any, sources: Any, hit: Any, reduction: str, include: bool) -> Any:
    """At every place, the combination of the sources of the last axis that hit it, with x or, where any hits, instead
    of it.
    """
    wide, axis = x.type.dtype.compute, [hit.type.rank - 1]
    base, given = t.cast(x, wide), t.cast(sources, wide)
    m, fn = REDUCTIONS[reduction]
    if wide is bool_:
        m, fn = ("all", "and_") if m in ("prod", "min") else ("any", "or_")
    neutral = {"sum": 0, "prod": 1, "max": wide.lowest, "min": wide.highest, "any": False, "all": True}[m]
    total = t.reduce(m, t.where(hit, given, c(neutral, given)), axis)
    total = t.apply(fn, base, total) if include else total
    count = t.reduce("sum", t.cast(hit, i64), axis)
    if reduction == "mean":
        among = t.apply("max", count, c(1, count)) if not include else t.apply("add", count, c(1, count))
        total = t.apply("div" if wide.is_float else "floordiv", total, t.cast(among, wide))
    value = total if include else t.where(t.apply("gt", count, c(0, count)), total, base)
    return t.cast(value, x.type.dtype)


def scattered(x: Any, dim: int, index: Any, source: Any, reduction: str = "", include: bool = True) -> Any:
    """x with source[.., k, ..] at [.., index[.., k, ..], ..]: the last of them, or their combination. `source` may be a
    number.
    """
    if not x.type.rank:
        x, index, source = (
            v if isinstance(v, (int, float)) else t.reshape(v, (v.type.numel,)) for v in (x, index, source)
        )
        return t.reshape(scattered(x, 0, index, source, reduction, include), ())
    index = t.cast(t.reshape(index, index.type.shape or (1,)), i64)
    if isinstance(source, (int, float)) or not source.type.rank:
        source = operand(source, x.type.dtype, index.type.shape)
    shape, dim = x.type.shape, normalize(dim, x.type.rank)
    count = index.type.shape[dim]
    if 0 in index.type.shape:
        return x
    _affordable(math.prod(shape) * count, math.prod(shape))
    space = (*shape, count)
    here = t.coordinates(space)
    place = [here[-1] if d == dim else e for d, e in enumerate(here[:-1])]
    inside = [n - 1 - e for d, (e, n) in enumerate(zip(place, index.type.shape, strict=True)) if d != dim]
    hit = _points(t.index_map(index, space, place, inside), here[dim], shape[dim])
    hit = t.apply("and_", hit, holds(space, [e for e in inside if not isinstance(e, int)]))
    if reduction:
        return combined(x, t.index_map(source, space, place, inside), hit, reduction, include)
    winner = _last(hit)
    at = list[IntExpr](t.coordinates(shape))
    inside = [n - 1 - e for d, (e, n) in enumerate(zip(at, source.type.shape, strict=True)) if d != dim]
    at[dim] = t.loaded(_safe(winner), t.coordinates(shape), count)
    return _won(x, winner, t.index_map(source, shape, at, inside))


@aten("scatter.src", "scatter.value")
def scatter(node: Aten, x: Any, dim: int, index: Any, source: Any) -> Any:
    """x with source[.., k, ..] at [.., index[.., k, ..], ..]; the last of several wins."""
    return scattered(x, dim, index, source)


@aten("scatter.reduce", "scatter.value_reduce")
def scatter_with(node: Aten, x: Any, dim: int, index: Any, source: Any, *, reduce: str) -> Any:
    """x with source[.., k, ..] added or multiplied to [.., index[.., k, ..], ..]."""
    return scattered(x, dim, index, source, reduce)


@aten("scatter_add.default")
def scatter_add(node: Aten, x: Any, dim: int, index: Any, source: Any) -> Any:
    """x with source[.., k, ..] added at [.., index[.., k, ..], ..]."""
    return scattered(x, dim, index, source, "sum")


@aten("scatter_reduce.two")
def scatter_reduce(
    node: Aten, x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    """The sources at each place combined, with or without what is there."""
    return scattered(x, dim, index, source, reduce, include_self)


@aten("index_reduce.default")
def index_reduce(
    node: Aten, x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    """The slices source[.., k, ..] combined at [.., index[k], ..], with or without what is there."""
    need(source.type.dtype is x.type.dtype, "PyTorch refuses a source of another type")
    if not x.type.rank or not source.type.rank:
        return scattered(x, 0, index, source, reduce, include_self)
    d = normalize(dim, x.type.rank)
    shape = source.type.shape
    wide = t.index_map(t.cast(index, i64), shape, [t.coordinates(shape)[d]] if index.type.rank else [])
    return scattered(x, dim, wide, source, reduce, include_self)


def _hits(
    indices: Sequence[Any], extents: Sequence[int], space: Sequence[Any], place: Sequence[IntExpr], from_end: bool
) -> Any:
    """Over `space`, whose last axis numbers the entries of the indices: whether entry k points at `place`. Negative
    ones count `from_end`, or are out of range.
    """
    shared = broadcast_shape([i.type.shape for i in indices])
    count = math.prod(shared)
    hit: Any = None
    for i, n, e in zip(indices, extents, place, strict=True):
        flat = t.reshape(t.broadcast(wrapped(i, n) if from_end else t.cast(i, i64), shared), (count,))
        same = _points(t.index_map(flat, space, [t.coordinates(space)[-1]]), e, n)
        hit = same if hit is None else t.apply("and_", hit, same)
    return hit


def broadcast_shape(shapes: Sequence[tuple[Any, ...]]) -> tuple[int, ...]:
    """The shape of tensors that are broadcast together."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(s)) + s for s in shapes]
    return tuple(next((e for e in extents if e != 1), 1) for extents in zip(*padded, strict=True))


def put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool, from_end: bool = True, most: int = SMALL) -> Any:
    """x with x[indices] set to `values`, the last of several winning, or with `values` added. `most` comparisons are
    worth adding.
    """
    shape = x.type.shape
    used = [d for d, i in enumerate(indices) if i is not None]
    given, extents = [indices[d] for d in used], [shape[d] for d in used]
    shared = broadcast_shape([i.type.shape for i in given])
    count = math.prod(shared)
    if not count or 0 in shape:
        return x
    free = [d for d in range(len(shape)) if d not in used]
    first = (
        used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    )  # where the entries' dimensions stand in the values
    source = t.broadcast(values, [*(shape[d] for d in free[:first]), *shared, *(shape[d] for d in free[first:])])

    def entry(k: IntExpr, at: Sequence[IntExpr]) -> list[IntExpr]:
        rest = [at[d] for d in free]
        return [*rest[:first], *unflatten(k, shared), *rest[first:]]

    if accumulate:
        _affordable(math.prod(shape) * count, math.prod(shape), most)
        space = (*shape, count)
        here = t.coordinates(space)
        hit = _hits(given, extents, space, [here[d] for d in used], from_end)
        return combined(x, t.index_map(source, space, entry(here[-1], here)), hit, "sum", True)
    _affordable(math.prod(extents) * count, math.prod(shape))
    space = (*extents, count)
    winner = _last(_hits(given, extents, space, t.coordinates(space)[:-1], from_end))
    at = t.coordinates(shape)
    k = t.loaded(_safe(winner), [at[d] for d in used], count)
    return _won(x, t.index_map(winner, shape, [at[d] for d in used]), t.index_map(source, shape, entry(k, at)))


@aten("index_put.default", "_unsafe_index_put.default", "_index_put_impl.default")
def index_put(node: Aten, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False, *args: Any) -> Any:
    """x with x[indices] set to the values, or with the values added. A mask may be set to one value."""
    need(values.type.dtype is x.type.dtype, "PyTorch refuses values of another type")
    masks = [i for i in indices if i is not None and not i.type.dtype.is_integer]
    if not masks:
        return put(x, indices, values, accumulate, most=PRICED)
    need(len(masks) == sum(i is not None for i in indices) == 1 and masks[0].type.dtype is bool_, "several masks")
    need(values.type.numel == 1, "a mask selects a number of places that depends on the data")
    shape, first = x.type.shape, next(d for d, i in enumerate(indices) if i is not None)
    chosen = t.index_map(masks[0], shape, t.coordinates(shape)[first : first + masks[0].type.rank])
    value = operand(t.reshape(values, ()), x.type.dtype.compute, shape)
    if accumulate:
        value = t.apply("or_" if x.type.dtype is bool_ else "add", t.cast(x, x.type.dtype.compute), value)
    return t.where(chosen, t.cast(value, x.type.dtype), x)


@aten("embedding_dense_backward.default")
def embedding_dense_backward(node: Aten, grad: Any, index: Any, rows: int, padding: int, by_count: bool) -> Any:
    """Every row's sum of the gradients of where it was read; none for the row of padding. PyTorch's op for a large
    table sums the gradients of a row in several blocks at once, as its index_put does not.
    """
    need(not by_count, "gradients are divided by how often their row was read")
    dtype = grad.type.dtype
    if padding >= 0:
        shape, rank = grad.type.shape, index.type.rank
        kept = t.index_map(t.apply("ne", index, c(padding, index)), shape, t.coordinates(shape)[:rank])
        grad = t.where(kept, grad, c(0, grad))
    width = grad.type.shape[index.type.rank :]
    return put(t.literal(0 if dtype.is_integer else 0.0, dtype, (rows, *width)), [index], grad, True, most=PRICED)


@aten("index_add.default")
def index_add(node: Aten, x: Any, dim: int, index: Any, source: Any, *, alpha: float = 1) -> Any:
    """x with the slices source[.., k, ..] added at [.., index[k], ..]. PyTorch's op adds many at once, and need not
    sort them first, as its index_put does.
    """
    dtype = x.type.dtype
    need(source.type.dtype is dtype, "PyTorch refuses a source of another type")
    if alpha != 1:
        scale = operand(alpha, dtype.compute, source.type.shape)
        source = t.cast(t.apply("mul", t.cast(source, dtype.compute), scale), dtype)
    index = t.reshape(index, index.type.shape or (1,))
    if not x.type.rank:
        return t.reshape(put(t.reshape(x, (1,)), [index], t.reshape(source, (1,)), True, False), ())
    return put(x, [*(None,) * normalize(dim, x.type.rank), index], source, True, False, PRICED)


@aten("index_copy.default")
def index_copy(node: Aten, x: Any, dim: int, index: Any, source: Any) -> Any:
    """x with the slices source[.., k, ..] at [.., index[k], ..]; the last of several wins. PyTorch's own definition, by
    index_put, would count negative indices from the end, which index_copy refuses.
    """
    need(source.type.dtype is x.type.dtype, "PyTorch refuses a source of another type")
    index = t.reshape(index, index.type.shape or (1,))
    if not x.type.rank:
        return t.reshape(put(t.reshape(x, (1,)), [index], t.reshape(source, (1,)), False, False), ())
    return put(x, [*(None,) * normalize(dim, x.type.rank), index], source, False, False)


@aten("put.default")
def put_(node: Aten, x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    """The flattened x with the sources at the indices."""
    need(source.type.dtype is x.type.dtype, "PyTorch refuses a source of another type")
    flat = put(t.reshape(x, (x.type.numel,)), [index], t.reshape(source, index.type.shape), accumulate)
    return t.reshape(flat, x.type.shape)


@aten("masked_scatter.default")
def masked_scatter(node: Aten, x: Any, mask: Any, source: Any) -> Any:
    """The elements of the source, in order, where the mask is set: its running count is their index."""
    out: Type = result(node)
    count = source.type.numel
    need(count, "it is empty")
    chosen = t.broadcast(mask, out.shape)
    flat = t.cast(t.reshape(chosen, (out.numel,)), i64)
    index = t.reshape(_safe(t.apply("sub", t.scan("sum", flat, 0), c(1, flat))), out.shape)
    taken = t.index_map(t.reshape(source, (count,)), out.shape, [t.loaded(index, t.coordinates(out.shape), count)])
    return t.where(chosen, taken, t.broadcast(x, out.shape))


@aten("max_unpool2d.default", "max_unpool3d.default")
def max_unpool(node: Aten, x: Any, index: Any, size: Sequence[int], *args: Any) -> Any:
    """Every element at the place of its image that its index says, and zeros elsewhere."""
    out = result(node)
    need(0 not in x.type.shape and 0 not in out.shape, "it is empty")
    spatial = len(size)
    images = math.prod(out.shape[:-spatial])
    zeros = t.literal(0 if out.dtype.is_integer else 0.0, out.dtype, (images, out.numel // images))
    flat = (images, x.type.numel // images)
    return t.reshape(scattered(zeros, 1, t.reshape(index, flat), t.reshape(x, flat)), out.shape)


@aten("diagonal_scatter.default")
def diagonal_scatter(node: Aten, x: Any, source: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """x with a diagonal replaced."""
    shape = x.type.shape
    d1, d2 = normalize(dim1, len(shape)), normalize(dim2, len(shape))
    here = t.coordinates(shape)
    i = here[d1] - max(-offset, 0)
    away = here[d2] - max(offset, 0) - i
    inside = [i, source.type.shape[-1] - 1 - i]
    index = [*(e for d, e in enumerate(here) if d not in (d1, d2)), i]
    chosen = holds(shape, [e for e in (*inside, away, away * -1) if not isinstance(e, int) or e < 0])
    return t.where(chosen, t.index_map(t.cast(source, x.type.dtype), shape, index, inside), x)


@aten("as_strided_scatter.default")
def as_strided_scatter(
    node: Aten, x: Any, source: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Any:
    """x with the elements at offset + i * stride replaced; x must be contiguous."""
    need(x.type.strides is None, "its operand is not contiguous")
    total, count = x.type.numel, math.prod(size)
    if not count:
        return x
    steps = sorted((d for d, n in enumerate(size) if n > 1), key=lambda d: -stride[d])
    reach = [sum(stride[e] * (size[e] - 1) for e in steps[n + 1 :]) for n in range(len(steps))]
    if all(stride[d] > inner for d, inner in zip(steps, reach, strict=True)):  # a place is written once: which i is it?
        rest = t.coordinates((total,))[0] - (offset or 0)
        index: list[IntExpr] = [0] * len(size)
        inside: list[IntExpr] = [rest]
        for d in steps:
            index[d], rest = rest // stride[d], rest % stride[d]
            inside.append(size[d] - 1 - index[d])
        inside.append(rest * -1)
        flat = t.index_map(source, (total,), index, inside)
        replaced = t.where(holds((total,), inside), flat, t.reshape(x, (total,)))
        return t.reshape(replaced, x.type.shape)
    _affordable(total * count, total)
    space = (total, count)
    q, k = t.coordinates(space)
    place = flatten(unflatten(k, tuple(size)), tuple(stride)) + (offset or 0)
    winner = _last(t.apply("eq", t.iota(space, q), t.iota(space, place)))
    found = t.loaded(_safe(winner), t.coordinates((total,)), count)
    flat = t.index_map(t.reshape(source, (count,)), (total,), [found])
    return t.reshape(_won(t.reshape(x, (total,)), winner, flat), x.type.shape)


RULES: tuple[Rule, ...] = (
    scatter, scatter_with, scatter_add, scatter_reduce, index_reduce, index_put, embedding_dense_backward, index_add,
    index_copy, put_, masked_scatter, max_unpool, diagonal_scatter, as_strided_scatter,
)  # fmt: skip
