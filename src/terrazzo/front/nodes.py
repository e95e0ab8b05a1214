"""Nodes of a traced graph: new ones, and what some are made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Nodes:
    """New nodes of a graph, before one that it has."""

    def __init__(self, graph: Any, place: Any) -> None:
        import torch

        self.graph, self.place = graph, place
        values = (x.meta.get("val") for x in graph.find_nodes(op="placeholder"))
        self.mode = next(x.fake_mode for x in values if isinstance(x, torch._subclasses.FakeTensor))

    def add(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """A node, with what it gives."""
        import torch

        with self.graph.inserting_before(self.place):
            made = self.graph.call_function(target, args, kwargs)
        values = torch.fx.map_arg((args, kwargs), lambda x: x.meta["val"])
        with self.mode:
            made.meta["val"] = target(*values[0], **values[1])
        return made


def behind(nodes: Iterable[Any]) -> dict[Any, None]:
    """Nodes and all that they are made of."""
    found = dict.fromkeys(nodes)
    todo = list(found)
    for node in todo:
        todo += [x for x in node.all_input_nodes if x not in found]
        found |= dict.fromkeys(node.all_input_nodes)
    return found
