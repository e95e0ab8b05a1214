"""What a warp asks the cache for at once: the lines that its lanes' elements lie in."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from terrazzo.ir.address import coefficient, evaluate, flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Loaded, Var
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.rules.access import wide

WARP = 32
LINE = 128
"""Bytes of a line of the cache."""
SCATTERED = 8
"""Lines that a warp asks for where places are computed of what was loaded. An estimate."""


@lru_cache(maxsize=1024)
def offset_of(x: Any) -> IntExpr:
    """Where an access lies in its buffer."""
    return flatten(x.index, x.buffer.type.element_strides)


@lru_cache(maxsize=4096)
def stride_of(x: Any, axis: Any) -> IntExpr | None:
    """How far from each other in its buffer the elements along an axis lie; None where that differs."""
    return coefficient(offset_of(x), axis)


@lru_cache(maxsize=4096)
def at_once(x: Any, axis: Any, size: int) -> bool:
    """Whether an access is one of all points of a thread, which begin at a multiple of their number."""
    part, point = Var("$part", max(axis.extent // size, 1)), Var("$point", size)
    found = l.Load(x.buffer, x.index, getattr(x, "inside", ()))
    return wide(substitute(found, {axis: part * size + point}), point, size)


@lru_cache(maxsize=4096)
def lines_of(x: Any, lanes: tuple[tuple[Any, int, int], ...], width: int) -> int:
    """Lines of the cache that a warp asks for at once, for so many elements each."""
    lane = np.arange(WARP)
    env: dict[Any, Any] = dict.fromkeys(x.free, 0)
    inner = 1
    for a, count, points in reversed(lanes):
        env[a] = lane // inner % count * points
        inner *= count
    env |= dict.fromkeys((a for e in x.index if isinstance(e, Node) for a in e.free if a not in env), 0)
    for e in topological([e for e in x.index if isinstance(e, Node)]):
        if isinstance(e, Loaded):
            if (value := _computed(e.value, env)) is None:
                return SCATTERED
            env[e] = value
    offset = evaluate(offset_of(x), env)
    size = x.buffer.type.dtype.size
    begins = np.broadcast_to(offset, (WARP,)) * size
    return len({*(begins // LINE).tolist(), *((begins + size * width - 1) // LINE).tolist()})


def _computed(term: Any, env: dict[Any, Any]) -> Any | None:
    """The value of a term made of places and numbers, as interpolation has them; None where data says."""
    match term:
        case l.Index():
            return np.asarray(evaluate(term.value, env), np.int64)
        case l.Literal():
            return np.asarray(term.value, term.dtype.numpy)
        case l.Apply():
            values = [_computed(x, env) for x in term.args]
            return None if any(v is None for v in values) else term.fn.numpy(*values)
    return None
