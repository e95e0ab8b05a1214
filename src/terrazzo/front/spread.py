"""What a forward pass spreads out of little, as all pairs of a row's numbers, is computed again in the backward pass.

PyTorch's default keeps it, so that it is stored: of the margins between all pairs of 128 scores, that is 128 times what
the scores take. A kernel that only adds them up would never store them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

LARGER = 8
"""How many times the bytes of what it is made of something has at least that is computed again."""
LEAST = 1 << 20
"""Bytes below which nothing is."""
SHAPED = ("alias", "arange", "expand", "full", "permute", "scalar_tensor", "squeeze", "unsqueeze", "view")
CHEAP = (
    *("_to_copy", "abs", "add", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "clamp", "clamp_min"),
    *("clamp_max", "div", "eq", "ge", "gt", "le", "logical_and", "logical_not", "logical_or", "lt", "maximum"),
    *("minimum", "mul", "ne", "neg", "relu", "sign", "sub", "where"),
)
"""Operations of ATen that say where something is, and those on single numbers that take no longer than to load these.
What is dear, as a power is, is kept.
"""


def spread_out(graph: Any, results: int, nothing: Collection[Any]) -> set[Any]:
    """The nodes of a joint graph that the backward pass had better compute again, of those that the `results` of the
    forward pass need, with what these are made of on the way from what is small, or of `nothing`. None where a graph
    writes to memory. A mask of nothing but places is kept: it has a byte for each.
    """
    import torch

    calls = [x for x in graph.nodes if x.op == "call_function"]
    ops = [x.target for x in calls if isinstance(x.target, torch._ops.OpOverload)]
    if any(op._schema.is_mutable for op in ops) or any(x.is_impure(impure_random=False) for x in calls):
        return set()
    outputs = [x for x in graph.output_node().args[0][:results] if x is not None]
    forward = dict.fromkeys(outputs)
    for node in (todo := list(outputs)):
        todo += [x for x in node.all_input_nodes if x not in forward]
        forward |= dict.fromkeys(node.all_input_nodes)
    found: set[Any] = set()
    late: set[Any] = set()  # what gradients have a part in
    for node in graph.nodes:
        if "tangents" in node.name if node.op == "placeholder" else not late.isdisjoint(node.all_input_nodes):
            late.add(node)
        elif (
            node not in outputs
            and node not in nothing
            and not (node in forward and all(x in forward for x in node.users))
        ):
            found |= _made_of_little(node)
    for node in (todo := list(found)):
        todo += [x for x in node.all_input_nodes if x in nothing and x not in found]
        found |= {x for x in node.all_input_nodes if x in nothing}
    return found


def _made_of_little(node: Any) -> set[Any]:
    """A node and what is nearly as large on the way to it, where all of that is cheap and made of little; else none."""
    if (size := _bytes(node)) < LEAST:
        return set()
    on_the_way, small = {node}, set()
    for x in (todo := [node]):
        if not _cheap(x):
            return set()
        for y in x.all_input_nodes:
            if _bytes(y) * LARGER > size:
                todo += [y] if y not in on_the_way else []
                on_the_way.add(y)
            else:
                small.add(y)
    return on_the_way if sum(map(_bytes, small)) * LARGER <= size else set()


def _cheap(node: Any) -> bool:
    return node.op == "call_function" and str(node.target).split(".")[:2] in [["aten", x] for x in (*SHAPED, *CHEAP)]


def _bytes(node: Any) -> int:
    """Of a tensor's numbers; 0 of what is none, or of a size that is not known."""
    import torch

    value = node.meta.get("val")
    count = value.numel() if isinstance(value, torch.Tensor) else 0
    return count * value.dtype.itemsize if isinstance(count, int) and count else 0
