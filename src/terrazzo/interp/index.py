"""Index expressions on numpy arrays, for the interpreters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from terrazzo.errors import IndexOutOfRange
from terrazzo.ir.address import evaluate
from terrazzo.ir.expr import Expr, IntExpr, Loaded
from terrazzo.ir.node import Node, topological

Read = Callable[[Node, Mapping[Expr, Any]], Any]


def values(exprs: Sequence[IntExpr], env: Mapping[Expr, Any], read: Read) -> list[Any]:
    """The values of `exprs`. `env` gives arrays for variables; `read` computes the term behind a loaded index.

    A loaded index outside its extent is an error, as it is in PyTorch.
    """
    here = dict(env)
    roots = [e for e in exprs if isinstance(e, Expr)]
    for node in topological(roots, stop=lambda n: isinstance(n, Loaded)):
        if isinstance(node, Loaded) and node not in here:
            found = np.asarray(read(node.value, env)).astype(np.int64)
            extent = evaluate(node.extent, here)
            if found.size and (found.min() < 0 or found.max() >= extent):
                bad = found.min() if found.min() < 0 else found.max()
                raise IndexOutOfRange(f"index {bad} is out of range for a dimension of size {extent}")
            here[node] = found
    return [evaluate(e, here) for e in exprs]


def grid(variables: Sequence[Expr], extents: Sequence[int]) -> dict[Expr, Any]:
    """One array per variable, shaped so that they broadcast against each other."""
    rank = len(extents)
    return {
        v: np.arange(n).reshape([-1 if d == k else 1 for k in range(rank)])
        for d, (v, n) in enumerate(zip(variables, extents, strict=True))
    }
