"""What a training graph keeps of its forward pass it keeps once, whatever views and copies of it the backward reads.

PyTorch's default keeps each of these. Of an image that is multiplied at 81 displacements that is 81 views. They share
its memory, but kernels read at addresses of which they know that they are multiples of 16 bytes, so an input that
begins elsewhere is copied, and 54 such copies were in memory at a time. Of the image itself a kernel reads 81 places.
Weights of attention of which nothing is dropped, with a probability of 0, are multiplied as a copy: they were stored
as both. And of two names for one tensor, as rows and as images say, nobody knows that its memory is free only when both
were read.
"""

from __future__ import annotations

import operator
from typing import Any

from terrazzo.front.nodes import Nodes, behind
from terrazzo.run.tensors import ALIGNED


def keep_once(graph: Any, results: int) -> set[Any]:
    """Have the backward pass of a joint graph read what it reads copies of, or views that are all of it, or of which
    one begins at no multiple of 16 bytes, and make these itself, but for the `results` of the forward pass; the nodes
    that are new. Not where one part of a tensor is all that is read: that is kept by itself, and no view.
    """
    outputs = {x for x in graph.output_node().args[0][:results] if x is not None}
    forward = {*behind(outputs), *(x for x in graph.nodes if x.meta.get("partitioner_tag") == "is_forward")}
    read: dict[Any, dict[Any, list[Any]]] = {}  # tensors, with what is read of them later, and by whom
    for node in graph.nodes:
        later = [x for x in node.users if x not in forward]
        if node in forward and node not in outputs and later and (whole := _whole(node)) is not node:
            read.setdefault(whole, {})[node] = later
    order = {node: k for k, node in enumerate(graph.nodes)}
    made: set[Any] = set()
    for whole, parts in read.items():
        kept = whole.op == "placeholder" or whole in outputs or any(x not in forward for x in whole.users)
        if not (kept or len(parts) > 1) or all(_may_be_kept(x, whole) for x in parts):
            continue
        before = Nodes(graph, min((x for later in parts.values() for x in later), key=order.__getitem__))
        again = {whole: whole}
        for part, later in parts.items():
            part.replace_all_uses_with(_again(before, part, again), lambda user, later=later: user in later)
        made |= {*again.values()} - {whole}
    return made


def _whole(node: Any) -> Any:
    """The tensor that a node is a view or a copy of, or of one of these; the node, where it is none."""
    while _is_view(node) or _is_copy(node):
        node = node.args[0]
    return node


def _is_view(node: Any) -> bool:
    """Whether a node only looks at the memory of the first thing it is given, as one of several parts does, too."""
    if node.op != "call_function":
        return False
    return _is_view(node.args[0]) if node.target is operator.getitem else getattr(node.target, "is_view", False)


def _is_copy(node: Any) -> bool:
    """Whether a node is what it is given, once more, and lies as that does."""
    import torch

    if node.target is not torch.ops.aten.clone.default:
        return False
    value, source = node.meta["val"], node.args[0].meta["val"]
    return tuple(value.stride()) == tuple(source.stride())


def _has_copy(node: Any) -> bool:
    """Whether there is a copy between a node and what it is a part of."""
    return _is_copy(node) or (_is_view(node) and _has_copy(node.args[0]))


def _may_be_kept(part: Any, whole: Any) -> bool:
    """Whether nothing is against it that a part is kept beside others of the whole: it is no copy, not all of what the
    forward pass made, and begins at a multiple of what kernels read, where the whole does.
    """
    seen, base = part.meta["val"], whole.meta["val"]
    if _has_copy(part) or (whole.op != "placeholder" and seen.numel() >= base.numel()):
        return False
    between = seen.storage_offset() * seen.itemsize - base.storage_offset() * base.itemsize
    return not isinstance(between, int) or between % ALIGNED == 0


def _again(nodes: Nodes, part: Any, again: dict[Any, Any]) -> Any:
    """A part, once more, with what is between it and the whole, as far as that is not there `again`. No copy is."""
    if part not in again:
        source = _again(nodes, part.args[0], again)
        again[part] = source if _is_copy(part) else nodes.add(part.target, source, *part.args[1:], **part.kwargs)
    return again[part]
