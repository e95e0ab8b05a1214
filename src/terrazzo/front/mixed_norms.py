"""Norms of numbers of 16 bits with weights of 32, as under autocast on a processor: PyTorch keeps their means and
deviations in 32 bits, and what it knows of them without computing them says 16. And running statistics in 16 bits, of
which its kernels compute the next ones in 32: its definition rounds the old ones once more before it adds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

NORMS = ("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional")  # fmt: skip


def widened(table: dict[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """The decompositions of a table, where such norms are those of converted numbers."""
    import torch

    packets = [getattr(torch.ops.aten, name) for name in NORMS]
    ops = [getattr(packet, o) for packet in packets for o in packet.overloads() if "out" not in o]
    kept = [op for op in ops if op in table and {"running_mean", "training"} <= {a.name for a in op._schema.arguments}]
    table = {**table, **{op: _rounded_once(op, table[op]) for op in kept}}
    return {**table, **{op: _widened(op, table.get(op)) for op in ops}}


def _rounded_once(op: Any, decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """A batch norm whose running statistics are computed in 32 bits."""
    import torch

    changes = op._schema.is_mutable

    @wraps(decomposition)
    def traced(x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: Any) -> Any:
        kept = (mean, var)
        if not training or not all(s is not None and s.dtype in (torch.bfloat16, torch.float16) for s in kept):
            return decomposition(x, weight, bias, *kept, training, *rest)
        wide = [s.float() for s in kept]
        results = decomposition(x, weight, bias, *wide, training, *rest)
        if not changes:
            return (*results[:3], *(new.to(s.dtype) for s, new in zip(kept, results[3:], strict=True)))
        for s, new in zip(kept, wide, strict=True):
            s.copy_(new)
        return results

    return traced


def _widened(op: Any, decomposition: Callable[..., Any] | None) -> Callable[..., Any]:
    import torch

    @wraps(decomposition or op)
    def traced(x: Any, *args: Any, **kwargs: Any) -> Any:
        others = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        mixed = any(a.dtype is torch.float32 for a in others) and x.dtype in (torch.bfloat16, torch.float16)
        if not mixed or x.device.type != "cpu":
            return decomposition(x, *args, **kwargs) if decomposition else NotImplemented
        result, *rest = (decomposition or op)(x.float(), *args, **kwargs)
        return (result.to(x.dtype), *rest)

    return traced
