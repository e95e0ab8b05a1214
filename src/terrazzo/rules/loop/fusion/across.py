"""Short reductions across memory: over the channels of an image, say, of which every point has its own sum."""

from __future__ import annotations

import math
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import substitute, topological
from terrazzo.ir.sites import sites

SHORT = 256
"""Elements of a row that the threads of a block keep in registers, so that what comes after reads none again."""
MANY = 1 << 14
"""Rows that fill a machine where a thread has one or more of them, or shares one with a few others."""


def rows_first(kernel: l.Kernel) -> l.Kernel | None:
    """`kernel` with the axes that its reductions do not know as the last ones, where they are others now, rows are
    short and many, and none is a product: each row is reduced once, before its elements are computed.

    Kernels of softmax over the channels of (16, 21, 512, 512) run over images, rows, columns, then channels.
    """
    reduces = [r for r in kernel.carried if isinstance(r, l.Reduce)]
    if not reduces or kernel.scans:
        return None
    known = {frozenset(r.free) & frozenset(kernel.axes) for r in reduces}
    if len(known) != 1:
        return None
    (rows,) = known
    inner = [a for a in kernel.axes if a not in rows]
    axes = (*(a for a in kernel.axes if a in rows), *inner)
    extents = [a.extent for a in axes] + [a.extent for r in reduces for a in r.axes]
    if axes == kernel.axes or not rows or not all(isinstance(e, int) for e in extents):
        return None
    if sites(kernel).contractions or not _read_again(kernel, reduces, inner):
        return None
    lengths = [math.prod(a.extent for a in inner), *(math.prod(a.extent for a in r.axes) for r in reduces)]
    if max(lengths) > SHORT or math.prod(a.extent for a in rows) < MANY:
        return None
    return l.Kernel(kernel.name, axes, kernel.stores, kernel.source)


def _read_again(kernel: l.Kernel, reduces: list[l.Reduce], inner: list[Any]) -> bool:
    """Whether something is computed of the elements that are reduced, at the same places of a row."""
    loads = {x for x in topological(kernel.stores) if isinstance(x, l.Load)}
    return any(substitute(x, {r.axes[0]: a}) in loads for r in reduces if len(r.axes) == 1 for a in inner
               for x in topological(r.args) if isinstance(x, l.Load) and r.axes[0] in x.free)  # fmt: skip
