"""What rewrites that put kernels into each other ask of the model of a GPU."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from terrazzo.ir.contraction import nested_contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Bound, Var
from terrazzo.ir.node import Node, topological

Price = Callable[[Sequence[l.Kernel]], float]
"""Nanoseconds of kernels, one after the other."""
Refusal = Callable[[l.Kernel], str]
"""Why a kernel is not worth having, or nothing."""
FEW = 16, 64
"""Rows that share their values, and values, up to which it is asked what one kernel and several take: a tile of 16
rows has one score that is wanted then, and a matrix of scores is no longer than what it is made of.
"""


def dearer(made: l.Kernel, apart: Sequence[l.Kernel], price: Price) -> str:
    """Why few scores are not worth `made`, one kernel in the place of those `apart`, or nothing. A convolution with
    nine weights for each position multiplied a tile of 16 rows for each, to have one of them.
    """
    found = (nested_contraction(r) for r in topological([s.value for s in apart[-1].stores]) if isinstance(r, l.Reduce))
    few = False
    for c in filter(None, found):
        x, y = c.factors
        sizes = [_points(own) for own in (x.free - y.free, y.free - x.free)]
        few |= min(sizes) <= FEW[0] and _points(c.reduce.axes) <= FEW[1]
    if not few or (together := price([made])) <= (single := price(apart)):
        return ""
    return f"{together / 1000:.1f} us as one kernel, {single / 1000:.1f} us apart"


def _points(axes: Iterable[Node]) -> int:
    """Of how many points some axes are, which are many where nobody knows."""
    extents: list[Any] = [a.extent for a in axes if isinstance(a, Var | Bound)]
    return math.prod(x if isinstance(x, int) else sys.maxsize for x in extents)
