"""Axes that are only walked become one: what is contiguous stays so, and threads divide it whatever the shape was."""

from __future__ import annotations

import math

from terrazzo.ir.address import unflatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Var
from terrazzo.ir.node import substitute, topological


def collapse(kernel: l.Kernel) -> l.Kernel:
    """`kernel` over one axis, where every store is at every point of its axes and nothing scans."""
    axes = frozenset(kernel.axes)
    extents = [a.extent for a in kernel.axes]
    if len(extents) < 2 or not all(isinstance(e, int) and e > 0 for e in extents) or any(s.free & axes != axes for s in kernel.stores):
        return kernel
    if any(isinstance(x, l.Scan) for x in topological([s.value for s in kernel.stores])):
        return kernel
    flat = Var(kernel.axes[0].name, math.prod(extents))  # type: ignore[arg-type]
    digits = unflatten(flat, tuple(extents))
    stores = tuple(substitute(s, dict(zip(kernel.axes, digits, strict=True))) for s in kernel.stores)
    return l.Kernel(kernel.name, (flat,), stores, kernel.source)
