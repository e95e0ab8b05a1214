"""What a warp asks the cache for at once: the lines that its lanes' elements lie in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from terrazzo.collector import remembered
from terrazzo.ir.address import coefficient, evaluate, flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Loaded, Var
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.ir.types import DType
from terrazzo.rules.access import wide

WARP = 32
LINE = 128
"""Bytes of a line of the cache."""
SCATTERED = 8
"""Lines that a warp asks for where places are computed of numbers that were loaded, such as those of an image that is
moved: those of neighbours are near each other. An estimate.
"""
APART = 0.618
"""How far from each other the places are that neighbours say, of all that there are: so many of any neighbours are as
far from each other as they can be.
"""


@remembered
def offset_of(x: Any) -> IntExpr:
    """Where an access lies in its buffer."""
    return flatten(x.index, x.buffer.type.element_strides)


@remembered
def stride_of(x: Any, axis: Any) -> IntExpr | None:
    """How far from each other in its buffer the elements along an axis lie; None where that differs."""
    return coefficient(offset_of(x), axis)


@remembered
def at_once(x: Any, axis: Any, size: int) -> bool:
    """Whether an access is one of all points of a thread, which begin at a multiple of their number."""
    part, point = Var("$part", max(axis.extent // size, 1)), Var("$point", size)
    found = l.Load(x.buffer, x.index, getattr(x, "inside", ()))
    return wide(substitute(found, {axis: part * size + point}), point, size)


@remembered
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
            if any(map(_moved, topological([e.value]))) and _computed(e.value, env) is None:
                return SCATTERED
            env[e] = said(e, env)
    offset = evaluate(offset_of(x), env)
    size = x.buffer.type.dtype.size
    begins = np.broadcast_to(offset, (WARP,)) * size
    return len({*(begins // LINE).tolist(), *((begins + size * width - 1) // LINE).tolist()})


def _moved(term: Any) -> bool:
    """Whether a term is a number of an image that is moved, of which places are computed."""
    return isinstance(term, l.Term) and isinstance(term.dtype, DType) and term.dtype.is_float


def said(e: Loaded, env: Mapping[Any, Any]) -> Any:
    """The place that data says: what is computed of places and numbers, or one of those that there are for each of the
    elements that say it, far from those of its neighbours.
    """
    found: Any = _computed(e.value, env)
    if found is not None:
        return found
    found, size = 0, e.extent if isinstance(e.extent, int) and e.extent > 0 else LINE * WARP
    for x in topological([e.value]):
        if isinstance(x, l.Load):  # which may be in a sum of its own
            found = found + evaluate(offset_of(x), {**dict.fromkeys(x.free, 0), **env})
    return found * round(APART * size) % size


def _computed(term: Any, env: Mapping[Any, Any]) -> Any | None:
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
