"""Windows of a dimension (`Tensor.unfold`), as views that writes come back from.

PyTorch makes writes to views functional by each view's inverse. That of `unfold` is its gradient, which has zeros where
no window reaches: what lies between windows, or behind the last one, would be lost. Where windows share nothing, they
are other views too, whose inverses keep what they do not reach. (Of windows that do share elements PyTorch refuses to
make writes functional.)
"""

from __future__ import annotations

from typing import Any


def windows(x: Any, dimension: int, size: int, step: int) -> Any:
    """x.unfold(dimension, size, step)."""
    from torch._C._functorch import is_functorch_wrapped_tensor as wrapped

    d = dimension + x.dim() if dimension < 0 else dimension
    if not 0 <= d < x.dim() or not 0 < size <= min(step, x.shape[d]):  # they overlap, or PyTorch has an error
        return x.unfold(dimension, size, step)
    count = (x.shape[d] - size) // step + 1
    if count * step <= x.shape[d]:
        return x.narrow(d, 0, count * step).unflatten(d, (count, step)).narrow(d + 1, 0, size).movedim(d + 1, -1)
    if wrapped(x):  # within a transform of torch.func, which does not say how x lies
        return x.unfold(dimension, size, step)
    shape, strides = list(x.shape), list(x.stride())
    shape[d], strides[d] = count, step * x.stride(d)
    return x.as_strided([*shape, size], [*strides, x.stride(d)])


def unfold_by_views(gm: Any) -> None:
    """Have a graph of Dynamo's take `windows`."""
    import torch

    found = [
        *gm.graph.find_nodes(op="call_method", target="unfold"),
        *gm.graph.find_nodes(op="call_function", target=torch.Tensor.unfold),
    ]
    for node in found:
        node.op, node.target = "call_function", windows
    if found:
        gm.recompile()
