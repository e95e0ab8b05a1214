"""A graph in segments, where no program holds all of its operations: PyTorch runs those, and the rest is compiled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import getitem
from typing import Any

from terrazzo.errors import Limitation
from terrazzo.front.fx import attribute
from terrazzo.ir.torch_types import type_of

Boxed = Callable[[list[Any]], Sequence[Any]]
"""A function of a list of arguments, which it may empty."""


@dataclass(frozen=True)
class Segment:
    """A function of values of the graph, which it is given in order, and those it makes. Then `done` are needed by
    nobody.
    """

    run: Boxed
    takes: Sequence[Any]
    makes: Sequence[Any]
    done: Sequence[Any]


def in_segments(gm: Any, refused: Collection[Any], compiled: Callable[[Any], Boxed]) -> Boxed | None:
    """The graph, whose operations run in its order: the `refused` ones by PyTorch, each run of others as it is
    `compiled`. None where PyTorch would run all of them.
    """
    import torch

    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    (output,) = gm.graph.find_nodes(op="output")
    constants = {x: attribute(gm, x.target) for x in output.all_input_nodes if x.op == "get_attr"}
    if not (ours := _ours(gm.graph, refused)):
        return None
    runs = [(mine, list(run)) for mine, run in groupby(_in_order(gm.graph), key=ours.__contains__)]
    last = {x: k for k, (_, run) in enumerate(runs) for n in run for x in n.all_input_nodes}
    segments = []
    for k, (mine, run) in enumerate(runs):
        own = set(run)
        takes = dict.fromkeys(x for n in run for x in n.all_input_nodes if x not in own and x.op != "get_attr")
        makes = [n for n in run if last.get(n, -1) > k or n in output.all_input_nodes]
        inner = _extracted(gm, takes, run, makes)
        done = [x for x in takes if last[x] == k and x not in output.all_input_nodes]
        call_it = compiled(inner) if mine else run_by_pytorch(inner)
        segments.append(Segment(call_it, tuple(takes), makes, done))

    def call(args: list[Any]) -> Sequence[Any]:
        values = {**constants, **dict(zip(inputs, args, strict=True))}
        args.clear()
        for segment in segments:
            given = [values[x] for x in segment.takes]
            for x in segment.done:
                del values[x]
            values.update(zip(segment.makes, segment.run(given), strict=True))
        return [values[x] if isinstance(x, torch.fx.Node) else x for x in output.args[0]]

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def run_by_pytorch(gm: Any) -> Boxed:
    """The graph as PyTorch's code for it has it, op by op."""
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]

    gm.recompile()
    boxed: Boxed = make_boxed_func(gm.forward)
    return boxed


def _ours(graph: Any, refused: Collection[Any]) -> set[Any]:
    """The operations that are not `refused`, and are given nothing that no program holds."""
    ours: set[Any] = set()
    for node in graph.nodes:
        held = all(x in ours or x.op == "get_attr" or _is_held(x) for x in node.all_input_nodes)
        if node.op == "call_function" and node not in refused and held:
            ours.add(node)
    return ours


def _is_held(node: Any) -> bool:
    """Whether what a node is worth may be an input of a program."""
    import torch

    value = node.meta.get("val")
    try:
        return isinstance(value, torch.Tensor) and type_of(value) is not None
    except Limitation:
        return False


def _in_order(graph: Any) -> list[Any]:
    """The operations, each with what is picked of its results right behind it, and checks last: what lies on both sides
    of one is compiled together.
    """
    found: dict[Any, None] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            found[node] = None
            found.update(dict.fromkeys(u for u in node.users if u.target is getitem))
    return sorted(found, key=_is_check)


def _is_check(node: Any) -> bool:
    """Whether an operation does nothing but look at its data, as aten._assert_async does of what F.one_hot is given."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and not schema.returns and not schema.is_mutable and node.target.namespace == "aten"


def _extracted(gm: Any, takes: Collection[Any], run: Sequence[Any], makes: Sequence[Any]) -> Any:
    """Some nodes as a graph of their own."""
    import torch

    graph = torch.fx.Graph()
    copies: dict[Any, Any] = {}
    for node in takes:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in run:
        for x in node.all_input_nodes:
            if x not in copies:  # a constant of the graph
                copies[x] = graph.node_copy(x)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[n] for n in makes])
    return torch.fx.GraphModule(gm, graph)
