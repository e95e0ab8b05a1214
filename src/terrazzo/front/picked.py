"""x[k] for a number k that a tensor without dimensions holds, as the coefficients of a diffusion at its step, or a
cache at its position: Python reads the number, which no graph can. The elements are the same where they are gathered,
but they are no view of x any more, so that is done where nobody can tell.
"""

from __future__ import annotations

import operator
from typing import Any

IN_PLACE = (
    "setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor",
    "ilshift", "irshift",
)  # fmt: skip
"""Functions of Python that write to their first operand."""


def gather_picked(gm: Any) -> None:
    """Have a graph of Dynamo's gather what it picks by such numbers, where neither x, nor what lies in its memory, is
    written to or given back.
    """
    import torch

    found = [n for n in gm.graph.find_nodes(op="call_function", target=operator.getitem) if any(_numbers(n))]
    if not found or any(isinstance(n.target, torch._ops.HigherOrderOperator) for n in gm.graph.nodes):
        return
    shared = {m for n in gm.graph.nodes for x in _exposed(n) if (m := _memory(x)) is not None}
    for node in found:
        x, places = node.args[0], _places(node)
        dims = _dims(x, places)
        if dims is None or _memory(x) is None or _memory(x) in shared:
            continue
        with gm.graph.inserting_before(node):
            for at, (index, dim) in enumerate(zip(places, dims, strict=True)):
                if _number(index):
                    x = gm.graph.call_function(_gathered, (x, dim, index))
                    places[at] = 0
        node.args = (x, tuple(places))
    gm.recompile()


def _gathered(x: Any, dim: int, number: Any) -> Any:
    import torch

    return x.index_select(dim, torch.where(number < 0, number + x.shape[dim], number).reshape(1))


def _places(node: Any) -> list[Any]:
    index = node.args[1]
    return list(index) if isinstance(index, tuple) else [index]


def _numbers(node: Any) -> list[bool]:
    return [_number(i) for i in _places(node)]


def _number(index: Any) -> bool:
    import torch

    value = _value(index)
    return isinstance(value, torch.Tensor) and value.ndim == 0 and value.dtype in (torch.int64, torch.int32)


def _value(x: Any) -> Any:
    import torch

    return x.meta.get("example_value") if isinstance(x, torch.fx.Node) else None


def _memory(x: Any) -> int | None:
    """What a node's tensor lies in, or, within a transform of torch.func, the tensor that this wraps."""
    import torch
    from torch._C import _functorch as wrapped

    value = _value(x)
    while isinstance(value, torch.Tensor) and wrapped.is_functorch_wrapped_tensor(value):
        value = wrapped.get_unwrapped(value)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _dims(x: Any, places: list[Any]) -> list[int] | None:
    """Which dimension of x each part of an index is for; None where a part is for several, or not known here."""
    plain = [None if p is None or p is Ellipsis else p for p in places]
    known = all(p is None or isinstance(p, int | slice) or _number(p) for p in plain)
    if not known or any(isinstance(p, bool) for p in plain) or sum(p is Ellipsis for p in places) > 1:
        return None
    rest = _value(x).ndim - sum(p is not None for p in plain)
    found, dim = [], 0
    for p in places:
        found.append(dim)
        dim += rest if p is Ellipsis else int(p is not None)
    return found


def _exposed(node: Any) -> list[Any]:
    """What a node gives back, or may write to."""
    if node.op == "output":
        return list(node.all_input_nodes)
    name = str(getattr(node.target, "__name__", node.target))
    writes = (name.endswith("_") and not name.endswith("__")) or name in IN_PLACE or "out" in node.kwargs
    return list(node.all_input_nodes) if writes or node.op == "call_module" else []
