"""Values that are added where data says, in other ways that PyTorch has for it on a GPU.

Its index_put sorts the places first, in some twenty launches, for which a host takes longer than the GPU (a step of
GATv2, five of them: 4.0 ms as called, of 1.5 on the GPU), and then adds row by row. Its index_add is
one launch, of atomic additions, whose order changes from call to call as in eager mode's own index_add; it sorts, too,
where `torch.use_deterministic_algorithms` asks for that. Its gradient of an embedding sorts many places, and adds in
float32 what is stored in 16 bits, in 100 us at least (H200); of few it sorts none, and rounds after every 32.
Its scatter_add adds element by element, which is as fast as memory where a row lies beside each other, and else slow.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.node import Node
from terrazzo.ir.types import DType, Type, f32, i32, i64
from terrazzo.rules.torch_to_tensor.common import normalize
from terrazzo.rules.torch_to_tensor.indexing import wrapped
from terrazzo.rules.torch_to_tensor.pointwise import c
from terrazzo.rules.torch_to_tensor.scatter import PUTS, SCATTER_ADD, UNSORTED, broadcast_shape
from terrazzo.rules.torch_to_tensor.sums import is_call

EXACTLY = (f32, i64, i32)
"""Types in which a sum is as close one by one as all at once: of 16 bits index_put rounds fewer sums."""
INDEX_ADD, EMBEDDING = "aten.index_add.default", "aten.embedding_dense_backward.default"
ADDS = (*PUTS, INDEX_ADD, SCATTER_ADD)
CAST = "aten._to_copy.default"


@dataclass(frozen=True)
class Given:
    """What is known of an op that adds where data says, beside its arguments: the dimensions along which one index is
    for all (`alike`), whether x is `zeros`, and the type that the sources are stored in and the sums rounded to
    (`stored`), where they are added in a wider one.
    """

    alike: Collection[int] = ()
    zeros: bool = False
    stored: DType | None = None


@dataclass(frozen=True)
class Way:
    """Another call that gives what an op does: its `value`, the `call`, and what else it takes: so many launches of
    kernels, which move so many bytes.
    """

    value: Any
    call: Aten
    launches: int
    moved: int

    @property
    def sorts(self) -> bool:
        """Whether the places are sorted first."""
        return self.call.name == EMBEDDING and self.call.args[1].type.numel > UNSORTED


@dataclass(frozen=True)
class _Rows:
    """Rows that are added: `source`, [*before, count, *after], to those of x that `place` says, [count]. These are
    numbered through along `many` dimensions of x, beside each other once its dimensions are in `order`.
    """

    x: Any
    place: Any
    source: Any
    order: tuple[int, ...]
    before: int
    many: int = 1

    @property
    def there(self) -> tuple[int, ...]:
        """The extents of x, in order."""
        return tuple(self.x.type.shape[d] for d in self.order)

    @property
    def numbered(self) -> tuple[int, ...]:
        """The same, with rows numbered through."""
        first, last = self.before, self.before + self.many
        return (*self.there[:first], math.prod(self.there[first:last]), *self.there[last:])


def ways(op: Aten, given: Given) -> Iterator[Way]:
    """Other calls for an op, of lowered arguments, that adds where data says."""
    rows = _rows(op, given)
    if rows is None or rows.x.type.dtype is not rows.source.type.dtype:
        return
    kind = rows.x.type
    one_by_one = kind.dtype in EXACTLY or op.name not in PUTS
    if one_by_one and op.name in PUTS:  # scatter_add is no slower
        x = _shaped(t.permute(rows.x, rows.order), rows.numbered)
        call = Aten(INDEX_ADD, (x, rows.before, rows.place, rows.source), (), x.type)
        yield _way(rows, call, op, given)
    if kind.dtype.is_float and (one_by_one or rows.place.type.numel > UNSORTED):
        rows = _first(rows)
        count, (extent, *after) = rows.place.type.shape[0], rows.numbered
        source = t.reshape(rows.source, (count, math.prod(after)))
        if given.stored and given.zeros and count > UNSORTED:
            source = _as_stored(source, given.stored)
        made = Type(source.type.dtype, (extent, math.prod(after)))
        call = Aten(EMBEDDING, (source, rows.place, extent, -1, False), (), made)
        yield _way(rows, call, op, given, None if given.zeros else rows.x)


def _way(rows: _Rows, call: Aten, op: Aten, given: Given, x: Any = None) -> Way:
    """A call as what it gives of x, to which that is added here where it is given. A kernel numbers the rows, and
    others turn what does not lie so.
    """
    made: Any = t.Opaque(call.name, call.args, call.kwargs, call.result, op.order)
    made = t.permute(_shaped(made, rows.there), tuple(map(rows.order.index, range(len(rows.order)))))
    kind, launches, moved = rows.x.type, 1, 0
    if x is not None:
        wide = kind.dtype.compute
        made = t.cast(t.apply("add", t.cast(x, wide), t.cast(made, wide)), kind.dtype)
        launches, moved = 2, 3 * kind.numel
    if rows.order != tuple(range(kind.rank)):
        launches, moved = launches + 2, moved + 2 * (rows.source.type.numel + kind.numel)
    return Way(t.cast(made, kind.dtype), call, launches, moved * kind.dtype.size)


def _as_stored(x: Any, dtype: DType) -> Any:
    """What is stored in a type, and is widened here."""
    if isinstance(x, t.IndexMap):
        return t.index_map(_as_stored(x.x, dtype), x.shape, x.index, x.inside)
    own: Any = x.args[0] if isinstance(x, t.Elementwise) else x
    return own if own.type.dtype is dtype else t.cast(x, dtype)


def _first(rows: _Rows) -> _Rows:
    """The same with the dimensions of rows before others."""
    if not rows.before:
        return rows
    first, last = rows.before, rows.before + rows.many
    order = (*rows.order[first:last], *rows.order[:first], *rows.order[last:])
    rank = rows.source.type.rank
    source = t.permute(rows.source, (first, *(d for d in range(rank) if d != first)))
    return _Rows(rows.x, rows.place, source, order, 0, rows.many)


def _rows(op: Aten, given: Given) -> _Rows | None:
    """The rows that an op adds; None where it adds none, or none that are worth numbering."""
    if op.name in PUTS:
        return _put(op, given.zeros) if True in op.args[3:4] else None
    x, dim, index, source = op.args
    if not x.type.rank or not index.type.rank or op.kwargs or 0 in x.type.shape + source.type.shape:
        return None
    dim = normalize(dim, x.type.rank)
    if op.name == INDEX_ADD:
        place = _checked(t.cast(index, i64), x.type.shape[dim])
        return _Rows(x, place, source, tuple(range(x.type.rank)), dim)
    return _scattered(x, dim, index, source, given.alike)


def _put(op: Aten, zeros: bool) -> _Rows | None:
    """Rows along several dimensions are moved where x is no zeros, which is for no more of them than are added. Each
    index counts from the end where it is negative, which other calls do not know.
    """
    x, indices, values = op.args[:3]
    used = [d for d, i in enumerate(indices) if i is not None]
    given, shape = [indices[d] for d in used], x.type.static_shape
    shared = broadcast_shape([i.type.shape for i in given])
    count, extents = math.prod(shared), [shape[d] for d in used]
    beside = used[-1] - used[0] == len(used) - 1
    moves = len(given) > 1 and (not beside or math.prod(extents) > count)
    if not all(i.type.dtype in (i64, i32) for i in given) or not count or 0 in shape or (moves and not zeros):
        return None
    place: Any = None
    for index, size in zip(given, extents, strict=True):
        checked = _checked(t.reshape(t.broadcast(wrapped(index, size), shared), (count,)), size)
        place = checked if place is None else t.apply("add", t.apply("mul", place, c(size, place)), checked)
    free = [d for d in range(len(shape)) if d not in used]
    before = used[0] if beside else 0
    sides = [shape[d] for d in free[:before]], [shape[d] for d in free[before:]]
    source = _shaped(t.broadcast(values, (*sides[0], *shared, *sides[1])), (*sides[0], count, *sides[1]))
    return _Rows(x, place, source, (*free[:before], *used, *free[before:]), before, len(used))


def _scattered(x: Any, dim: int, index: Any, source: Any, alike: Collection[int]) -> _Rows | None:
    """Rows that one index is for: what it is the same along. Those of other dimensions are numbered through."""
    shape, sizes = x.type.static_shape, index.type.static_shape
    after = [d for d in range(len(shape)) if d != dim and d in alike]
    whole = all(n == sizes[d] or d == dim for d, n in enumerate(shape))
    if math.prod(shape[d] for d in after) == 1 or sizes != source.type.shape or not whole:
        return None
    batch = [d for d in range(len(shape)) if d != dim and d not in alike]
    order = (*batch, dim, *after)
    tables, count = tuple(shape[d] for d in batch), sizes[dim]
    total = math.prod(tables) * count
    at: list[Any] = [0] * len(shape)
    for d, i in zip((*batch, dim), t.coordinates((*tables, count)), strict=True):
        at[d] = i
    place = _checked(t.reshape(t.index_map(index, (*tables, count), at), (total,)), shape[dim])
    if tables:
        table = t.iota((total,), t.coordinates((total,))[0] // count * shape[dim])
        place = t.apply("add", table, place)
    rows = _shaped(t.permute(source, order), (total, *(shape[d] for d in after)))
    return _Rows(x, place, rows, order, 0, len(batch) + 1)


def _checked(index: Any, extent: int) -> Any:
    """An index of one dimension that is in range, which is an error where it is not."""
    (count,) = index.type.shape
    return t.iota((count,), t.loaded(index, t.coordinates((count,)), extent))


def _shaped(x: Any, shape: tuple[int, ...]) -> Any:
    """A tensor with this shape: itself, where it has that."""
    return x if x.type.shape == shape else t.reshape(x, shape)


def stored_narrow(nodes: Sequence[Any], results: Collection[Node]) -> dict[Node, DType]:
    """Additions of what is stored in 16 bits and widened, of which everybody takes sums that are rounded to these, with
    the type.
    """
    readers: dict[Node, list[Any]] = {}
    for n in nodes:
        for x in n.children:
            readers.setdefault(x, []).append(n)

    def rounded(x: Any, dtype: DType) -> bool:
        seen = readers.get(x, ())
        views = [y for y in seen if is_call(y, "aten.reshape.default", "aten.view.default")]
        casts = all(is_call(y, CAST) and y.type.dtype is dtype for y in seen if y not in views)
        return bool(seen) and x not in results and casts and all(rounded(y, dtype) for y in views)

    found = {}
    for n in nodes:
        if is_call(n, SCATTER_ADD) and is_call(n.args[3], CAST) and n.type.dtype is f32:
            dtype = n.args[3].args[0].type.dtype
            if dtype.is_float and dtype.size == 2 and rounded(n, dtype):
                found[n] = dtype
    return found
