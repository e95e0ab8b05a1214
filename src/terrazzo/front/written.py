"""What a graph of AOTAutograd writes to its inputs, in the end: `aten.copy_` of their new values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terrazzo.errors import Limitation

Write = tuple[Any, Any]
"""An input of a graph and its new value."""


def taken_out(gm: Any) -> list[Write]:
    """The inputs that a graph writes to with their new values, in order; the graph no longer does. Limitation where it
    does more than that.
    """
    import torch

    found = list(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default))
    for node in found:
        old, new, *rest = node.args
        if rest or node.kwargs or node.users or old.op != "placeholder" or not _alike(old.meta["val"], new.meta["val"]):
            raise Limitation("it writes to its inputs on the way")
    if len({node.args[0] for node in found}) < len(found):
        raise Limitation("it writes to an input twice")
    writes = [node.args for node in found]
    for node in found:
        gm.graph.erase_node(node)
    return writes


def put_back(gm: Any, writes: Sequence[Write]) -> None:
    """Have the graph write to its inputs again."""
    import torch

    (output,) = gm.graph.find_nodes(op="output")
    with gm.graph.inserting_before(output):
        for old, new in writes:
            copy = gm.graph.call_function(torch.ops.aten.copy_.default, (old, new))
            copy.meta["val"] = old.meta["val"]


def _alike(old: Any, new: Any) -> bool:
    return bool((old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device))
