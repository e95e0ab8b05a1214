"""Kernels that might be one, by their axes: these are as long, memory runs along them alike, and tiles of what both
multiply would be small ones.
"""

from __future__ import annotations

import math
from typing import Any

from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.contraction import Contraction, contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import substituted, topological
from terrazzo.ir.sites import sites
from terrazzo.ir.types import contiguous_strides
from terrazzo.rules.moves import meeting


def by_axes(first: l.Kernel, second: l.Kernel) -> tuple[l.Kernel, l.Kernel]:
    """The kernel with more axes, and the other."""
    return (first, second) if len(first.axes) > len(second.axes) else (second, first)


def alike(first: l.Kernel, second: l.Kernel) -> bool:
    """Whether one kernel's axes begin as the other's are; where neither has any, whether they reduce as much."""
    long, short = by_axes(first, second)
    if not long.axes:
        return _reduced(first) == _reduced(second) != set()
    return bool(short.axes) and [a.extent for a in long.axes[: len(short.axes)]] == [a.extent for a in short.axes]


def along(reader: l.Kernel, kernel: l.Kernel) -> l.Kernel | None:
    """`kernel` over the axes of its reader, which reads each element it stores once, in the order of memory but as that
    of another shape: what a linear layer stores as rows, say, which are tokens of several texts. None where it is no
    such reader; y[a0 * 3 + a1, a2] is one of y[6, 4], over axes of 2, 3 and 4.
    """
    loads = [x for x in topological(reader.stores) if isinstance(x, l.Load) and x.buffer in kernel.writes]
    at = {x.index for x in loads}
    if len(at) != 1 or any(x.inside for x in loads) or any(s.index != kernel.axes for s in kernel.stores):
        return None
    shapes = [tuple(a.extent for a in k.axes) for k in (reader, kernel)]
    if not all(isinstance(n, int) for shape in shapes for n in shape) or math.prod(shapes[0]) != math.prod(shapes[1]):
        return None
    (index,) = at
    place = flatten(index, contiguous_strides(shapes[1]))
    if [coefficient(place, a) for a in reader.axes] != list(contiguous_strides(shapes[0])):
        return None
    moved = dict(zip(kernel.axes, index, strict=True))
    return l.Kernel(kernel.name, reader.axes, substituted(kernel.stores, moved), kernel.source)


def _reduced(kernel: l.Kernel) -> set[tuple[Any, ...]]:
    """The extents that a kernel reduces over."""
    return {tuple(a.extent for a in r.axes) for r in sites(kernel).carried.values() if isinstance(r, l.Reduce)}


def crossed(first: l.Kernel, second: l.Kernel) -> bool:
    """Whether memory runs along the axes that kernels have in common in what one reads, and across them in what the
    other reads: who takes rows for the one takes columns for the other.
    """
    count = len(by_axes(first, second)[1].axes)
    ways = [_ways(x, set(x.axes[:count])) for x in (first, second)]
    return {True} in ways and {False} in ways


def _ways(kernel: l.Kernel, shared: set[Any]) -> set[bool]:
    """Whether memory runs along shared axes, for each large access that goes along one of them and another axis."""
    found = set()
    for x in topological(kernel.stores):
        if isinstance(x, l.Load | l.Store) and x.free & shared and x.free - shared and _large(x):
            at = flatten(x.index, x.buffer.type.element_strides)
            found |= {a in shared for a in x.free if coefficient(at, a) == 1}
    return found


def multiplied_under_windows(kernel: l.Kernel) -> int:
    """How many sums of products a kernel has of which a factor lies under a window that moves with the results, each
    factor with rows or columns of its own. A step brings in one window, so tiles have one such sum.
    """
    found = (contraction(r) for r in kernel.carried if isinstance(r, l.Reduce))
    return sum(c is not None and _under_window(c, {*kernel.axes}) for c in found)


def _under_window(c: Contraction, axes: set[Any]) -> bool:
    first, second = (x.free & axes for x in c.factors)
    if first <= second or second <= first:
        return False
    return meeting((x for x in c.operands if isinstance(x, l.Load)), axes, c.reduce.axes) != (1, 1)


LARGE = 1 << 20
"""Elements beyond which it matters along which axis memory runs: less is in the cache of a processor."""


def _large(x: Any) -> bool:
    """Whether an access goes to many places."""
    return math.prod(a.extent for a in x.free if isinstance(a.extent, int)) >= LARGE
