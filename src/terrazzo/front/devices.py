"""One device for a graph: what the CPU makes or is given only for a GPU to have it is made there, or copied at once.

Models make masks and tables where they happen to be, and move them then: `torch.zeros(n).to(x.device)`, a plain
attribute that nobody moved.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from operator import getitem
from typing import Any

from terrazzo.errors import Limitation
from terrazzo.front.drawn import draws
from terrazzo.front.fx import Unheld, attribute


def device_of(graph: Any) -> str:
    """The one device of a graph's tensors, scalars on the CPU aside, and what is on the CPU to be copied. Where others
    are on the CPU, a Limitation names what computes or reads these: a program cannot hold it. Other devices are one,
    too.
    """
    values = {n: value for n in graph.graph.nodes if (value := _value(graph, n)) is not None}
    here = {n for n, value in values.items() if value.dim() and value.device.type == "cpu"}
    found = {str(v.device) for n, v in values.items() if n not in here and v.device.type != "cpu"}
    if len(found) > 1:
        raise Limitation(f"a graph on several devices ({', '.join(sorted(found))})")
    if not found:
        return "cpu"
    apart = here - {n for n in here if _only_copied(graph, n)}
    calls = [n for n in graph.graph.nodes if n.op == "call_function" and n.target is not getitem]
    reads = [n for n in calls if not apart.isdisjoint((n, *n.all_input_nodes))]
    if reads:
        raise Unheld({n: f"{n.target}: on the CPU, while the graph is on {next(iter(found))}" for n in reads})
    return found.pop()


def is_copied(placeholder: Any, device: str) -> bool:
    """Whether a graph on a device is given more than a number on another one."""
    import torch

    return bool(placeholder.meta["val"].dim()) and placeholder.meta["val"].device.type != torch.device(device).type


def gather_on_one(graph: Any) -> None:
    """Let the GPU compute, in place of the CPU, what nothing but the GPU reads. What the graph is given on the CPU is
    copied first, and so is what the CPU has to make of that, as random numbers.
    """
    import torch
    from torch._guards import detect_fake_mode

    found = {value.device: value for n in graph.graph.nodes if (value := _value(graph, n)) is not None}
    gpus = [device for device in found if device.type != "cpu"]
    if len(found) != 2 or len(gpus) != 1:
        return
    device, moved = gpus[0], dict[Any, Any]()
    for node in reversed(graph.graph.nodes):
        value = _value(graph, node)
        if value is not None and value.device != device and _may_move(node, moved, device):
            moved[node] = value
    if not any(value.dim() for value in moved.values()):
        return
    for node in [*graph.graph.nodes]:
        value = _value(graph, node)
        if value is None or value.device == device:
            continue
        with detect_fake_mode(list(found.values())) or nullcontext():
            there = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        if node in moved and node.op == "call_function":
            if "device" in node.kwargs:
                node.update_kwarg("device", device)
            node.meta["val"] = there
        elif users := [u for u in node.users if u in moved or (node in moved and not _copies(u, device))]:
            with graph.graph.inserting_after(node):
                copy = graph.graph.call_function(torch.ops.aten._to_copy.default, (node,), {"device": device})
            copy.meta["val"] = there
            for user in users:
                user.replace_input_with(node, copy)
    graph.recompile()


def _value(graph: Any, node: Any) -> Any:
    """The tensor that a node stands for; None where it is none."""
    import torch

    value = attribute(graph, node.target) if node.op == "get_attr" else node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def _copies(node: Any, device: Any = None) -> bool:
    """Whether a node copies what it is given to a device: this one, or any other than where it is."""
    import torch

    if node.target is not torch.ops.aten._to_copy.default or node.kwargs.get("device") is None:
        return False
    return bool(node.meta["val"].device == device if device else node.meta["val"].device.type != "cpu")


def _only_copied(graph: Any, node: Any) -> bool:
    """Whether a graph is given something on the CPU for its copy on another device alone."""
    given = node.op in ("placeholder", "get_attr") and (value := _value(graph, node)) is not None
    return given and value.device.type == "cpu" and bool(node.users) and all(map(_copies, node.users))


def _may_move(node: Any, moved: Collection[Any], device: Any) -> bool:
    """Whether the value of a node, which is on the CPU, may as well be on the GPU: nothing else reads it, and it is the
    same there.
    """
    if node.op == "call_function" and (node.target is getitem or draws(node) or node.is_impure()):
        return False
    return bool(node.users) and all(u in moved or _copies(u, device) or _looked_up(u, node) for u in node.users)


def _looked_up(user: Any, node: Any) -> bool:
    """Whether a node says at which places of a tensor on the GPU another one reads or writes."""
    import torch

    places = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default)
    return user.target in places and user.args[0] is not node and node in user.args[1]
