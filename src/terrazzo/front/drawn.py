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
        if inplace or not training or not 0 < p < 1:
            return torch.nn.functional.dropout(x, p, training, inplace)
        return torch.native_dropout(x, p, True)[0]

    return {torch.nn.functional.dropout: dropout}
