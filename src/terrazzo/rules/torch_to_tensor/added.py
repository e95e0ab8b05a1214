"""Values that are added where data says, as PyTorch's index_add has it on a GPU.

Its index_put sorts the places first, in some twenty launches, for which a host takes longer than the GPU (a step of
GATv2, five of them: 4.0 ms as called, of 1.5 on the GPU), and then adds row by row. Its index_add is
one launch, of atomic additions, whose order changes from call to call as in eager mode's own index_add; it sorts, too,
where `torch.use_deterministic_algorithms` asks for that.
"""

from __future__ import annotations

import math
from typing import Any

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.types import Type, f32, i32, i64
from terrazzo.rules.torch_to_tensor.indexing import wrapped
from terrazzo.rules.torch_to_tensor.pointwise import c
from terrazzo.rules.torch_to_tensor.scatter import PUTS, broadcast_shape

EXACTLY = (f32, i64, i32)
"""Types in which a sum is as close one by one as all at once: index_put adds 16 bits in float32."""


def added_one_by_one(op: Aten) -> Any:
    """What an index_put of lowered arguments gives, by index_add; None where it does not add, or not in rows that are
    picked along dimensions beside each other, in one of these types.

    The rows along several dimensions are numbered through, and then moved, which is for no more of them than are added.
    Each index is checked, and counts from the end where it is negative, which index_add does not know.
    """
    if op.name not in PUTS or op.args[3:4] != (True,):
        return None
    x, indices, values = op.args[:3]
    used = [d for d, i in enumerate(indices) if i is not None]
    first, last = used[0], used[-1] + 1
    given, shape = [indices[d] for d in used], x.type.static_shape
    beside = len(given) == last - first and all(i.type.dtype in (i64, i32) for i in given)
    shared = broadcast_shape([i.type.shape for i in given])
    count, extent = math.prod(shared), math.prod(shape[first:last])
    if not beside or not count or 0 in shape or (len(given) > 1 and extent > count):
        return None
    if not x.type.dtype is values.type.dtype in EXACTLY:
        return None
    place: Any = None
    for index, size in zip(given, shape[first:last], strict=True):
        flat = t.reshape(t.broadcast(wrapped(index, size), shared), (count,))
        checked = t.iota((count,), t.loaded(flat, t.coordinates((count,)), size))
        place = checked if place is None else t.apply("add", t.apply("mul", place, c(size, place)), checked)
    rows = _shaped(x, (*shape[:first], extent, *shape[last:]))
    source = t.broadcast(values, (*shape[:first], *shared, *shape[last:]))
    source = _shaped(source, (*shape[:first], count, *shape[last:]))
    kind = Type(x.type.dtype, rows.type.shape)
    return _shaped(t.Opaque("aten.index_add.default", (rows, first, place, source), (), kind, op.order), shape)


def _shaped(x: Any, shape: tuple[int, ...]) -> Any:
    """A tensor with this shape: itself, where it has that."""
    return x if x.type.shape == shape else t.reshape(x, shape)
