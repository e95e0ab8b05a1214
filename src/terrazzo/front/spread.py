"""What a forward pass spreads out of little, as all pairs of a row's numbers, is computed again in the backward pass.

PyTorch's default keeps it, so that it is stored: of the margins between all pairs of 128 scores, that is 128 times what
the scores take. A kernel that only adds them up would never store them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from terrazzo.front.nodes import behind

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
_CHEAP = {f"aten.{x}" for x in (*SHAPED, *CHEAP)}


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
    forward = behind(outputs)
    found: set[Any] = set()
    late: set[Any] = set()  # what gradients have a part in
    little = _Little()
    for node in graph.nodes:
        if "tangents" in node.name if node.op == "placeholder" else not late.isdisjoint(node.all_input_nodes):
            late.add(node)
        elif (
            node not in outputs
            and node not in nothing
            and not (node in forward and all(x in forward for x in node.users))
        ):
            found |= little.on_the_way_to(node)
    for node in (todo := list(found)):
        todo += [x for x in node.all_input_nodes if x in nothing and x not in found]
        found |= {x for x in node.all_input_nodes if x in nothing}
    return found


class _Little:
    """Finds what is made of little, once for all that are of a size: of a long chain of large tensors each is reached
    from all behind it.
    """

    def __init__(self) -> None:
        self.sizes: dict[Any, int] = {}
        self.small: dict[tuple[Any, int], frozenset[Any] | None] = {}
        self.told: set[tuple[Any, int]] = set()

    def on_the_way_to(self, node: Any) -> set[Any]:
        """A node and what is nearly as large on the way to it, but for what was told before, where all of that is cheap
        and made of little; else none.
        """
        size = self.bytes(node)
        if size < LEAST or self.made_of(node, size) is None:
            return set()
        found, todo = set(), [node]
        while todo:
            x = todo.pop()
            if (x, size) not in self.told:
                self.told.add((x, size))
                found.add(x)
                todo += self.large(x, size)
        return found

    def made_of(self, node: Any, size: int) -> frozenset[Any] | None:
        """What is small, for so many bytes, of what a node is made of; None where that is no little, or dear."""
        known, todo = self.small, [node]
        while todo:
            x = todo[-1]
            large = self.large(x, size) if (cheap := _cheap(x)) else []
            if not cheap or any(known.get((y, size), ()) is None for y in large):
                known[todo.pop(), size] = None
                continue
            if new := next((y for y in large if (y, size) not in known), None):
                todo.append(new)
                continue
            own = frozenset(y for y in x.all_input_nodes if y not in large)
            parts = [own, *(known[y, size] or own for y in large)]
            most = max(parts, key=len)  # often it has all: nothing is copied then
            whole = most if all(map(most.issuperset, parts)) else most.union(*parts)
            known[todo.pop(), size] = whole if sum(map(self.bytes, whole)) * LARGER <= size else None
        return known[node, size]

    def large(self, node: Any, size: int) -> list[Any]:
        """What a node reads that is nearly so large."""
        return [y for y in node.all_input_nodes if self.bytes(y) * LARGER > size]

    def bytes(self, node: Any) -> int:
        if node not in self.sizes:
            self.sizes[node] = _bytes(node)
        return self.sizes[node]


def _cheap(node: Any) -> bool:
    return node.op == "call_function" and ".".join(str(node.target).split(".")[:2]) in _CHEAP


def _bytes(node: Any) -> int:
    """Of a tensor's numbers; 0 of what is none, or of a size that is not known."""
    import torch

    value = node.meta.get("val")
    count = value.numel() if isinstance(value, torch.Tensor) else 0
    return count * value.dtype.itemsize if isinstance(count, int) and count else 0
