"""Tables: what knows some axes and not those around them is computed once, not again for each point of these.

The zeros that a recurrent net begins with, times its weights, are a sum for each column and not one for each row and
column; places and weights of an interpolation are those of a row's points, the same for all rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import Node, substituted, topological
from terrazzo.ir.types import Type
from terrazzo.targets.cpu.rows import WORTH_KEEPING

LARGEST = 1 << 18
"""Bytes of tables of one kernel: they live on the stack, and in the second-level cache."""
AGAIN = 4
"""Points of axes around it, at least, for each of which a term would be computed again."""


def tabled(kernel: l.Kernel) -> tuple[list[l.Kernel], l.Kernel, dict[Node, Node]]:
    """Kernels that write tables, the kernel that reads them, and its loads of tables with the terms they stand for.

    @loop
    def f(x: f32[8], w: f32[6, 9]):
        with kernel('z', z=f32[8, 6]):
            for a0 in free(8):
                in0 = x[a0]
                for a1 in free(6):
                    for r0 in reduce(9):
                        in1 = w[a1, r0]
                        acc0 <- sum(in1)
                    v0 = mul(in0, acc0)
                    z[a0, a1] = v0
        return (z,)
    =>
    @loop
    def f(x: f32[8], w: f32[6, 9]):
        with kernel('table', z_table_0=f32[6]):
            for a1 in free(6):
                for r0 in reduce(9):
                    in0 = w[a1, r0]
                    acc0 <- sum(in0)
                z_table_0[a1] = acc0
        with kernel('z', z=f32[8, 6]):
            for a0 in free(8):
                in0 = x[a0]
                for a1 in free(6):
                    in1 = z_table_0[a1]
                    v0 = mul(in0, in1)
                    z[a0, a1] = v0
        return (z,)
    """
    if kernel.scans or len(kernel.axes) < 2:
        return [], kernel, {}
    tables: dict[tuple[Any, ...], list[tuple[l.Buffer, Any]]] = {}
    loads: dict[Node, Node] = {}
    left = LARGEST
    for x in _worth_it(kernel):
        axes = tuple(a for a in kernel.axes if a in x.free)
        shape = tuple(int(a.extent) for a in axes)  # type: ignore[arg-type]
        if (size := math.prod(shape) * x.dtype.size) > left:
            continue
        left -= size
        buffer = l.Buffer(f"{kernel.writes[0].name}_table_{len(loads)}", Type(x.dtype, shape))
        tables.setdefault(axes, []).append((buffer, x))
        loads[x] = l.Load(buffer, axes)
    made = [
        l.Kernel("table", axes, tuple(l.Store(b, axes, x) for b, x in some), kernel.source)
        for axes, some in tables.items()
    ]
    stores = substituted(kernel.stores, loads)
    return made, l.Kernel(kernel.name, kernel.axes, stores, kernel.source), {load: x for x, load in loads.items()}


def _worth_it(kernel: l.Kernel) -> Iterator[Any]:
    """The terms that are worth a table, whole ones before their parts, and parts only where others need them too."""
    needed = set[Node](kernel.stores)
    for x in reversed(topological(kernel.stores)):
        if x not in needed:
            continue
        if isinstance(x, l.Apply | l.Reduce | l.Get) and _again(x, kernel) and _costs(x, kernel):
            yield x
        else:
            needed.update(x.children)


def _costs(x: Any, kernel: l.Kernel) -> bool:
    """Whether a term takes longer than reading it, and may be computed before anything is stored."""
    below = topological([x])
    if any(isinstance(y, l.Load) and y.buffer in kernel.writes for y in below):
        return False
    cost = sum(y.fn.cost for y in below if isinstance(y, l.Apply))
    return any(isinstance(y, l.Reduce) for y in below) or (x.free == {kernel.axes[-1]} and cost >= WORTH_KEEPING)


def _again(x: Any, kernel: l.Kernel) -> bool:
    """Whether a term of one value knows axes of the kernel, and misses ones around them."""
    if isinstance(x.dtype, tuple) or not x.free or not x.free <= frozenset(kernel.axes):
        return False
    last = max(n for n, a in enumerate(kernel.axes) if a in x.free)
    extents = [a.extent if isinstance(a.extent, int) else 0 for a in kernel.axes]
    missed = (e for a, e in zip(kernel.axes[:last], extents, strict=False) if a not in x.free)
    return all(extents) and math.prod(missed) >= AGAIN
