"""What a graph of AOTAutograd writes to its inputs, in the end: `aten.copy_` of their new values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from terrazzo.errors import Limitation


@dataclass(frozen=True)
class Write:
    """An input of a graph, its new value, and the node that writes that, which is the input itself for who returns
    it.
    """

    old: Any
    new: Any
    node: Any


def writes(gm: Any) -> list[Write]:
    """What a graph writes to its inputs, in order. Limitation where it does more than that."""
    import torch

    (output,) = gm.graph.find_nodes(op="output")
    found = []
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        old, new, *rest = node.args
        plain = not rest and not node.kwargs and {*node.users} <= {output}
        if not plain or old.op != "placeholder" or not _alike(old.meta["val"], new.meta["val"]):
            raise Limitation("it writes to its inputs on the way")
        found.append(Write(old, new, node))
    if len({w.old for w in found}) < len(found):
        raise Limitation("it writes to an input twice")
    return found


def _alike(old: Any, new: Any) -> bool:
    return bool((old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device))
