"""Indices that come from data: embedding, gather, index_select, advanced indexing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.expr import IntExpr, at_least
from terrazzo.ir.types import i64
from terrazzo.rewrite.rule import Rule, need
from terrazzo.rules.torch_to_tensor.common import aten, normalize, result


def wrapped(index: Any, extent: Any) -> Any:
    """An integer tensor with negative entries counted from the end."""
    index = t.cast(index, i64)
    shape = index.type.shape
    known = t.follows(index, t.coordinates(shape))
    if isinstance(known, int):
        return t.literal(known if known >= 0 else known + extent, i64, shape)
    if known is not None and at_least(known, 0):
        return index
    return t.where(
        t.apply("lt", index, t.literal(0, i64, shape)), t.apply("add", index, t.literal(extent, i64, shape)), index
    )


@aten("embedding.default")
def embedding(node: Aten, weight: Any, index: Any, *args: Any) -> Any:
    """out[.., d] = weight[index[..], d]."""
    shape = result(node).shape
    need(0 not in weight.type.shape, "it is empty")
    here = t.coordinates(shape)
    return t.index_map(weight, shape, [t.loaded(t.cast(index, i64), here[:-1], weight.type.shape[0]), here[-1]])


@aten("index_select.default")
def index_select(node: Aten, x: Any, dim: int, index: Any) -> Any:
    """out[.., k, ..] = x[.., index[k], ..]."""
    shape = result(node).shape
    if not x.type.rank:
        return x
    dim = normalize(dim, x.type.rank)
    here = list[IntExpr](t.coordinates(shape))
    where = [here[dim]] if index.type.rank else []
    here[dim] = t.loaded(t.cast(index, i64), where, x.type.shape[dim])
    return t.index_map(x, shape, here)


@aten("gather.default")
def gather(node: Aten, x: Any, dim: int, index: Any, **kwargs: Any) -> Any:
    """out[i..] = x[.., index[i..], ..]; no index is negative."""
    shape = result(node).shape
    if not x.type.rank or not index.type.rank:
        return t.reshape(x, shape) if x.type.numel == 1 else _first(x, index, shape)
    dim = normalize(dim, x.type.rank)
    here = list[IntExpr](t.coordinates(shape))
    here[dim] = t.loaded(t.cast(index, i64), t.coordinates(shape), x.type.shape[dim])
    return t.index_map(x, shape, here)


def _first(x: Any, index: Any, shape: Any) -> Any:
    """gather with a 0-d index into a vector."""
    return t.index_map(x, shape, [t.loaded(t.cast(index, i64), (), x.type.shape[0])])


@aten("index.Tensor", "_unsafe_index.Tensor")
def index(node: Aten, x: Any, indices: Sequence[Any]) -> Any:
    """Advanced indexing: index tensors are broadcast against each other and stand where the first (or all) of them
    stood.
    """
    need(
        all(i is None or i.type.dtype.is_integer for i in indices),
        "a mask selects a number of elements that depends on the data",
    )
    shape = result(node).shape
    need(0 not in x.type.shape, "it is empty")
    given = [*indices, *([None] * (x.type.rank - len(indices)))]
    used = [d for d, i in enumerate(given) if i is not None]
    rank = max(given[d].type.rank for d in used)
    together = used == list(range(used[0], used[-1] + 1))
    first = used[0] if together else 0
    here = t.coordinates(shape)
    shared = here[first : first + rank]
    rest = iter((*here[:first], *here[first + rank :]))
    out: list[IntExpr] = []
    for d, i in enumerate(given):
        if i is None:
            out.append(next(rest))
            continue
        own = shared[rank - i.type.rank :]
        where = [0 if e == 1 else own[k] for k, e in enumerate(i.type.shape)]
        out.append(t.loaded(wrapped(i, x.type.shape[d]), where, x.type.shape[d]))
    return t.index_map(x, shape, out)


@aten("take.default")
def take(node: Aten, x: Any, index: Any) -> Any:
    """Elements of the flattened tensor."""
    shape = result(node).shape
    need(x.type.numel, "it is empty")
    flat = t.reshape(x, (x.type.numel,))
    return t.index_map(flat, shape, [t.loaded(wrapped(index, x.type.numel), t.coordinates(shape), x.type.numel)])


RULES: tuple[Rule, ...] = (embedding, index_select, gather, index, take)
