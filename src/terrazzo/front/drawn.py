"""Random numbers as in eager mode: PyTorch draws them in the order of memory, so what is drawn for a tensor goes by how
it lies there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def draws(node: Any) -> bool:
    """Whether a node of a graph is an op that draws random numbers."""
    import torch

    return node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def dropouts() -> dict[Any, Callable[..., Any]]:
    """What dropout is in a trace: the op that AOTAutograd has for it. The other one that PyTorch takes it apart into
    draws row by row, however what it is given lies.
    """
    import torch

    def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not 0 <= p <= 1 or (training and (inplace or p in (0, 1))):
            return torch.nn.functional.dropout(x, p, training, inplace)
        return torch.native_dropout(x, p, True)[0] if training else x

    return {torch.nn.functional.dropout: dropout}


def drop_nothing(gm: Any) -> None:
    """Have a graph of Dynamo's go on with the tensor itself where nothing is dropped of it, as eager mode does: who
    writes to the result writes to it. AOTAutograd would copy it. With a probability of 0 eager mode copies it, too, and
    draws what says that all stays.
    """
    import torch
    from torch.nn.functional import alpha_dropout, dropout, dropout2d, dropout3d, feature_alpha_dropout

    for op in (dropout, dropout2d, dropout3d, alpha_dropout, feature_alpha_dropout):
        for node in gm.graph.find_nodes(op="call_function", target=op):
            given = dict(zip(("input", "p", "training"), node.args, strict=False)) | dict(node.kwargs)
            if given.get("training", True) is False and 0 <= given.get("p", 0.5) <= 1:
                node.replace_all_uses_with(given["input"])
                gm.graph.erase_node(node)
            elif given.get("p", 0.5) == 0 and not given.get("inplace", False):
                node.target, node.args, node.kwargs = torch.clone, (given["input"],), {}
    gm.recompile()
