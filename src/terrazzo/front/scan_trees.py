"""Associative scans in Dynamo's graphs: each one call of `associative.scanned`.

With `combine_mode="pointwise"` a graph has PyTorch's operator. With "generic", which is all there is on a processor, it
has what PyTorch's function does: a tree of pairs, of twice as many levels as the length has bits, each a `vmap` of the
function that combines. The tree is found by running that function of PyTorch on nodes of the graph, where every
operation it asks for must be there.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

from terrazzo.front.associative import scanned


def gather_scans(gm: Any) -> None:
    """Write the associative scans of Dynamo's graph as calls of `scanned`."""
    import torch

    op: Any = getattr(torch.ops.higher_order, "associative_scan", None)
    found = gm.graph.find_nodes(op="call_function", target=op)
    for node in found:
        node.target = scanned
    blocks = _blocks(gm.graph)
    trees = [tree for tree in iter(lambda: _tree(blocks), None) if tree.results is not None]
    for tree in trees:
        tree.replace(gm)
    if found or trees:
        gm.recompile()


def scanned_by_one(combine: Any, xs: Sequence[Any]) -> list[Any]:
    """`scanned` with a function that combines two elements."""
    import torch

    return scanned(torch.vmap(combine), xs, (), combine)


@dataclass(frozen=True)
class _Block:
    """A `vmap` of a function: its nodes, operands and results."""

    nodes: list[Any]
    operands: list[Any]
    results: list[Any]

    @property
    def body(self) -> list[Any]:
        """The nodes of the function itself."""
        return [n for n in self.nodes if _name(n) not in MAPPING]

    @property
    def closed(self) -> bool:
        """Whether the function is given all it uses, and elements of the first dimension."""
        inside = {*self.nodes}
        enters = [n for n in self.nodes if _name(n) == ENTER]
        leaves = [n for n in self.nodes if _name(n) == LEAVE]
        first = all(n.args[1] == 0 for n in enters) and all(n.args[3] == 0 for n in leaves)
        return first and all(x in inside for n in (*self.body, *leaves) for x in n.all_input_nodes)


BEGIN, END, ENTER, LEAVE = "_vmap_increment_nesting", "_vmap_decrement_nesting", "_add_batch_dim", "_remove_batch_dim"
MAPPING = (BEGIN, END, ENTER, LEAVE)
"""What Dynamo has for a `vmap`: where it begins and ends, and how operands and results come in and out."""


def _name(node: Any) -> str:
    return str(getattr(node.target, "__name__", node.target)) if node.op == "call_function" else ""


def _blocks(graph: Any) -> list[_Block]:
    """The `vmap`s of a graph that have and are in no other, in its order."""
    found: list[_Block] = []
    nodes: list[Any] = []
    depth, plain = 0, True
    for node in graph.nodes:
        name = _name(node)
        plain = (plain or depth == 0) and (depth == 0 or name != BEGIN)
        depth += name == BEGIN
        nodes = [*nodes, node] if depth else []
        depth -= name == END
        if name == END and depth == 0 and plain:
            operands = [n.args[0] for n in nodes if _name(n) == ENTER]
            found.append(_Block(nodes, operands, [n for n in nodes if _name(n) == LEAVE]))
    return found


def _called(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """A call, whether Dynamo has some of its arguments by name or not."""
    return str(getattr(getattr(func, "overloadpacket", func), "__name__", "")), [*args, *kwargs.values()]


class _Missing(Exception):
    """The graph does not have an operation."""


@dataclass(frozen=True)
class _Value:
    """A node of the graph, as far as PyTorch's function looks at it."""

    node: Any
    tree: _Tree

    @property
    def shape(self) -> Any:
        return self.node.meta["example_value"].shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.utils import _pytree as pytree

        given, named = pytree.tree_map_only(_Value, lambda x: x.node, (tuple(args), kwargs or {}))
        (one, *_) = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, _Value))
        return _Value(one.tree.operation(one.node, func, given, named), one.tree)


class _Tree:
    """A scan of `leaves`, whose first pairs are combined in the first of some blocks; where that has `results`."""

    def __init__(self, blocks: list[_Block]) -> None:
        self.blocks, self.first, self.taken = blocks, blocks[0], dict[Any, None]()
        self.leaves: list[Any] = []
        self.results: list[Any] | None = None

    def find(self) -> None:
        """Find the results, and take the tree's blocks away; or only the first one, where there is no tree."""
        module: Any = importlib.import_module("torch._higher_order_ops.associative_scan")
        before = list(self.blocks)
        count = len(self.first.results)
        try:
            if not count or len(self.first.operands) != 2 * count or {*map(_name, self.first.operands)} != {"slice"}:
                raise _Missing
            self.leaves = [x.args[0] for x in self.first.operands[:count]]
            leaves = [_Value(x, self) for x in self.leaves]
            self.results = [x.node for x in module.generic_associative_scan(self.combine, leaves)]
        except _Missing:
            self.blocks[:] = before[1:]

    def combine(self, *operands: _Value) -> list[_Value]:
        """The next block, if it is the same function of these."""
        block = self.blocks.pop(0) if self.blocks else None
        if block is None or block.operands != [x.node for x in operands] or not block.closed:
            raise _Missing
        if [(n.target, len(n.args)) for n in block.body] != [(n.target, len(n.args)) for n in self.first.body]:
            raise _Missing
        self.taken.update(dict.fromkeys(block.nodes))
        return [_Value(x, self) for x in block.results]

    def operation(self, operand: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """The node for a call, of which `operand` is one."""
        for node in operand.users:
            if node not in self.taken and _called(node.target, node.args, node.kwargs) == _called(func, args, kwargs):
                self.taken[node] = None
                return node
        raise _Missing

    def replace(self, gm: Any) -> None:
        """Have the graph call a scan for the tree."""
        import torch

        assert self.results is not None
        name = f"combines_{self.first.nodes[0].name}"
        setattr(gm, name, torch.fx.GraphModule(gm, self.combined(gm)))
        with gm.graph.inserting_before(self.first.nodes[0]):
            call = gm.graph.call_function(scanned_by_one, (gm.graph.get_attr(name), self.leaves))
            new = [gm.graph.call_function(getitem, (call, k)) for k in range(len(self.leaves))]
        for old, result in zip(self.results, new, strict=True):
            result.meta.update(old.meta)
            old.replace_all_uses_with(result)
        for node in sorted(self.taken, reverse=True):
            gm.graph.erase_node(node)

    def combined(self, gm: Any) -> Any:
        """The function that combines, as a graph."""
        import torch

        graph = torch.fx.Graph()
        copies = {n: graph.placeholder(n.name) for n in self.first.nodes if _name(n) == ENTER}
        for node in self.first.body:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[n.args[0]] for n in self.first.results))
        return graph


def _tree(blocks: list[_Block]) -> _Tree | None:
    """What comes of the first of the blocks that are left."""
    if not blocks:
        return None
    tree = _Tree(blocks)
    tree.find()
    return tree
