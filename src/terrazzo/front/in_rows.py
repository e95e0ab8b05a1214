"""Ops whose results lie in memory otherwise than PyTorch's own decompositions have it, and what it knows of results
without computing them: mended while a call is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

TAKEN_APART = ("baddbmm", "upsample_nearest1d")
ON_A_PROCESSOR = ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
    "_native_batch_norm_legit_functional")  # fmt: skip
WHOLE = ("angle.default", "pow.Scalar")
"""Ops whose results lie by no operand's order of dimensions: in rows, or as channels-last images where PyTorch takes
the first operand for such. What is known of them keeps the first operand's order; so that comes in rows already.
"""
AS_IMAGES = ("channel_shuffle.default", "max_unpool2d.default")
"""Ops whose results lie, on a processor, as the channels-last images do that they are given: known to be in rows."""
AS_FIRST = ("floor_divide.default", "div.Tensor_mode", "copysign.Tensor", "xlogy.Tensor")
"""Ops of two tensors whose results lie rather as the first does than as the second: known the other way round."""


def laid(table: dict[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """The decompositions of a table, whose results lie as those of the ops do."""
    import torch

    def named(name: str) -> Any:
        packet, _, overload = name.partition(".")
        return getattr(getattr(torch.ops.aten, packet), overload)

    packets = [getattr(torch.ops.aten, name) for name in (*TAKEN_APART, *ON_A_PROCESSOR)]
    rows = [op for packet in packets for op in map(partial(getattr, packet), packet.overloads()) if op in table]
    found = dict(table)
    found.update({op: _given_rows(op, table[op]) for op in rows})
    found.update({op: _given_rows(op, None) for op in map(named, WHOLE)})
    found.update({op: _placed(op, table.get(op), _as_images) for op in map(named, AS_IMAGES)})
    found.update({op: _placed(op, table.get(op), _as_first) for op in map(named, AS_FIRST)})
    roll = torch.ops.aten.roll.default
    found[roll] = _placed(roll, table[roll], lambda x, by, dims=(): _as_images(x) if dims else None)
    return found


def _given_rows(op: Any, decomposition: Callable[..., Any] | None) -> Callable[..., Any]:
    """A decomposition of `op` whose first tensor comes in rows; where there is none, `op` itself is."""
    import torch
    from torch._prims_common import suggest_memory_format

    name = op._schema.name.partition("::")[2]

    @wraps(decomposition or op)
    def traced(*args: Any, **kwargs: Any) -> Any:
        at, x = next((k, a) for k, a in enumerate(args) if isinstance(a, torch.Tensor))
        given = x
        if x.device.type == "cpu" or name not in ON_A_PROCESSOR:
            given = x.contiguous(memory_format=torch.contiguous_format if name == "pow" else suggest_memory_format(x))
        args = (*args[:at], given, *args[at + 1 :])
        if decomposition is not None:
            return decomposition(*args, **kwargs)
        known = given is x or (name == "angle" and not x.is_complex())
        return NotImplemented if known else op(*args, **kwargs)

    return traced


def _placed(op: Any, decomposition: Callable[..., Any] | None, wanted: Callable[..., Any]) -> Callable[..., Any]:
    """A decomposition of `op`, or `op` itself where there is none, whose result lies as is `wanted` of it."""
    busy: list[Any] = []

    @wraps(decomposition or op)
    def traced(*args: Any, **kwargs: Any) -> Any:
        strides = None if busy else wanted(*args)  # when busy, this is the op itself, asked below
        if strides is None:
            return NotImplemented if decomposition is None else decomposition(*args, **kwargs)
        busy.append(op)
        try:
            result = (decomposition or op)(*args, **kwargs)
        finally:
            busy.pop()
        return result if result is NotImplemented else moved(result, strides(result.shape))

    return traced


def moved(x: Any, strides: Sequence[int]) -> Any:
    """A tensor that lies with these strides, which are those of an order of its dimensions."""
    if all(size <= 1 or mine == wanted for size, mine, wanted in zip(x.shape, x.stride(), strides, strict=True)):
        return x
    order = sorted(range(x.dim()), key=lambda d: -strides[d])
    return x.permute(order).contiguous().permute([order.index(d) for d in range(x.dim())])


def _as_images(x: Any, *args: Any) -> Any:
    """The strides of an image that is channels last as `x` is; None where that is not."""
    import torch
    from torch._prims_common import make_channels_last_strides_for, suggest_memory_format

    last = x.device.type == "cpu" and suggest_memory_format(x) is torch.channels_last
    return make_channels_last_strides_for if last else None


def _as_first(x: Any, y: Any, *args: Any) -> Any:
    """The strides of what is computed of every element of two tensors; None where both lie in rows."""
    import torch
    from torch._prims_common import compute_elementwise_output_strides

    several = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
    if not several or (x.is_contiguous() and y.is_contiguous()):
        return None
    return lambda shape: compute_elementwise_output_strides(*torch.broadcast_tensors(x, y))
