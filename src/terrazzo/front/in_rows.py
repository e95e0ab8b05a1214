"""Ops whose results PyTorch lays out by no operand's order of dimensions: in rows, or as channels-last images where it
takes the first operand for such. Its own decompositions, and what it knows of such results without computing them,
keep the first operand's order; so that comes in rows already while a call is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

ALWAYS = ("baddbmm", "upsample_nearest1d", "angle")
ON_A_PROCESSOR = ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
    "_native_batch_norm_legit_functional")  # fmt: skip


def laid(table: dict[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """The decompositions of a table, which for these ops are given a first operand that lies as their result will."""
    import torch

    found = dict(table)
    for name in (*ALWAYS, *ON_A_PROCESSOR):
        packet = getattr(torch.ops.aten, name)
        for op in (getattr(packet, o) for o in packet.overloads()):
            if op in found or name == "angle":
                found[op] = _given_rows(op, found.get(op), name in ON_A_PROCESSOR)
    return found


def _given_rows(op: Any, decomposition: Callable[..., Any] | None, on_a_processor: bool) -> Callable[..., Any]:
    """A decomposition of `op` that is given rows; where there is none, `op` itself is."""
    from torch._prims_common import suggest_memory_format

    @wraps(decomposition or op)
    def traced(x: Any, *args: Any, **kwargs: Any) -> Any:
        given = x
        if x.device.type == "cpu" or not on_a_processor:
            given = x.contiguous(memory_format=suggest_memory_format(x))
        if decomposition is not None:
            return decomposition(given, *args, **kwargs)
        return NotImplemented if given is x or not x.is_complex() else op(given, *args, **kwargs)

    return traced
