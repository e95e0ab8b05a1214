"""What the backward pass reads at shifted places of one tensor it looks at by itself: it is given that tensor.

PyTorch's default keeps each view: of an image that is multiplied at 81 displacements, 81 of them. They share its
memory. But kernels read at addresses of which they know that they are multiples of 16 bytes, so an input that begins
elsewhere is copied, and 54 such copies were in memory at a time. Of the image itself a kernel reads 81 places.
"""

from __future__ import annotations

import operator
from typing import Any

from terrazzo.front.nodes import Nodes, behind
from terrazzo.run.tensors import ALIGNED


def look_again(graph: Any, results: int) -> set[Any]:
    """Have the backward pass of a joint graph look by itself at what it reads views of, where one of these begins at no
    multiple of 16 bytes, but for the `results` of the forward pass; the nodes that are new. Not where one part of a
    tensor is all that is read: that is kept by itself, and no view.
    """
    outputs = {x for x in graph.output_node().args[0][:results] if x is not None}
    forward = behind(outputs)
    seen: dict[Any, dict[Any, list[Any]]] = {}  # tensors, with their views, with who reads these later
    for node in graph.nodes:
        later = [x for x in node.users if x not in forward and x.meta.get("partitioner_tag") != "is_forward"]
        if node in forward and node not in outputs and later and (whole := _whole(node)) is not node:
            seen.setdefault(whole, {})[node] = later
    order = {node: k for k, node in enumerate(graph.nodes)}
    made: set[Any] = set()
    for whole, views in seen.items():
        kept = whole.op == "placeholder" or whole in outputs or any(x not in forward for x in whole.users)
        if all(_aligned(x, whole) for x in views) or not (kept or len(views) > 1):
            continue
        before = Nodes(graph, min((x for later in views.values() for x in later), key=order.__getitem__))
        again = {whole: whole}
        for view, later in views.items():
            view.replace_all_uses_with(_copied(before, view, again), lambda user, later=later: user in later)
        made |= {*again.values()} - {whole}
    return made


def _whole(node: Any) -> Any:
    """The tensor that a node is a view of, or of a view of; the node, where it is none."""
    while _is_view(node):
        node = node.args[0]
    return node


def _is_view(node: Any) -> bool:
    """Whether a node only looks at the memory of the first thing it is given, as one of several parts does, too."""
    if node.op != "call_function":
        return False
    return _is_view(node.args[0]) if node.target is operator.getitem else getattr(node.target, "is_view", False)


def _aligned(view: Any, whole: Any) -> bool:
    """Whether a view begins at a multiple of what kernels read, where the whole does."""
    seen, base = view.meta["val"], whole.meta["val"]
    between = seen.storage_offset() * seen.itemsize - base.storage_offset() * base.itemsize
    return not isinstance(between, int) or between % ALIGNED == 0


def _copied(nodes: Nodes, view: Any, again: dict[Any, Any]) -> Any:
    """A view, once more, with the views that it is of, as far as they are not there `again`."""
    if view not in again:
        source = _copied(nodes, view.args[0], again)
        again[view] = nodes.add(view.target, source, *view.args[1:], **view.kwargs)
    return again[view]
