"""Ops whose operands must be of one type, which PyTorch's decompositions do not ask: where they are of several, the op
is left whole, and PyTorch, which runs what no rule lowers, refuses it in its own words.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

ALL = ("mv", "baddbmm", "lerp", "heaviside", "linalg_cross", "binary_cross_entropy")
"""Ops all of whose operands are of one type."""
NORMS = ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
    "_native_batch_norm_legit_functional", "cudnn_batch_norm")  # fmt: skip
"""Ops whose operands are as the first, or in float32 beside 16 bits."""


def asked(table: dict[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """The decompositions of a table, which for these ops ask first."""
    import torch

    def one(*types: Any) -> bool:
        return len(set(types)) < 2

    def norm(first: Any, *rest: Any) -> bool:
        return {*rest} <= {first} or (first in (torch.bfloat16, torch.float16) and {*rest} == {torch.float32})

    found = dict(table)
    for names, right in ((ALL, one), (NORMS, norm)):
        for op in (
            getattr(getattr(torch.ops.aten, n), o) for n in names for o in getattr(torch.ops.aten, n).overloads()
        ):
            if op in found:
                found[op] = _asking(found[op], right)
    return found


def _asking(decomposition: Callable[..., Any], right: Callable[..., bool]) -> Callable[..., Any]:
    """A decomposition that is not for tensors of all types."""
    import torch

    @wraps(decomposition)
    def taken_apart(*args: Any, **kwargs: Any) -> Any:
        types = [x.dtype for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        return decomposition(*args, **kwargs) if right(*types) else NotImplemented

    return taken_apart


def refused_on_gpus(op: Any, operands: Any) -> bool:
    """Whether an op is a norm whose weights are in float32 beside 16 bits: PyTorch computes these on CPUs only."""
    import torch

    names = torch.ops.aten.native_layer_norm.default, torch.ops.aten.native_group_norm.default
    tensors = [x for x in operands if isinstance(x, torch.Tensor)]
    return op in names and any(x.device.type == "cuda" and x.dtype is not tensors[0].dtype for x in tensors)
