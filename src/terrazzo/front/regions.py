"""Regions that a program has compiled once for all their calls (`torch.compiler.nested_compile_region`)."""

from __future__ import annotations

from typing import Any

from terrazzo.front.fx import attribute


def inline_regions(gm: Any) -> None:
    """Write the regions of Dynamo's graph out where they are called. Equal layers are found by what they compute
    (`ir.instances`), and kernels are fused across the bounds of a region.
    """
    import torch

    region = torch.ops.higher_order.invoke_subgraph
    while calls := gm.graph.find_nodes(op="call_function", target=region):
        for call in calls:
            _inline(gm, call)
        gm.recompile()


def _inline(gm: Any, call: Any) -> None:
    """Nodes of a region in place of its call; what it holds becomes the graph's."""
    called, _, *args = call.args
    inner = getattr(gm, called.target)
    copies = dict(zip(inner.graph.find_nodes(op="placeholder"), args, strict=True))
    for node in inner.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        with gm.graph.inserting_before(call):
            copies[node] = gm.graph.node_copy(node, copies.__getitem__)
        if node.op == "get_attr":
            copies[node].target = f"{called.target}_{node.target}".replace(".", "_")
            setattr(gm, copies[node].target, attribute(inner, node.target))
    (output,) = inner.graph.find_nodes(op="output")
    for user in list(call.users):
        result = output.args[0][user.args[1]]
        user.replace_all_uses_with(copies[result])
        gm.graph.erase_node(user)
    gm.graph.erase_node(call)
    if not called.users:
        gm.graph.erase_node(called)
