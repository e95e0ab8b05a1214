"""Results of one kernel that lie along different axes: those that lie otherwise than most are stored as most do, and
turned by a kernel of their own, where that is faster. A thread that computes points along one axis writes the others
one by one, into sectors that a warp does not fill.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set

from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Var
from terrazzo.ir.node import topological
from terrazzo.ir.types import Type
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.definitions import unused
from terrazzo.rules.loop.layout.lookups import stored_first

PASS, RULE = "online", "laid_apart"
LEAST = 1 << 20
"""Results that are worth another kernel, at least."""
FEW = 16
"""Terms of a sum, below which tensor cores have no part in it: they store their results through shared memory."""


def laid_apart(
    program: l.Program, log: Log, price: Callable[[Sequence[l.Kernel]], float], least: int = LEAST
) -> l.Program:
    """`program` with kernels that reduce a few terms for each of `least` points or more, and store along one axis only,
    where that is faster by the model.

    @loop
    def f(x: f32[3, 6], w: f32[5, 2]):
        with kernel('z', y=f32[3, 5, 5], z=f32[3, 5, 5] @ (25, 1, 5)):
            for a0 in free(3):
                for a1 in free(5):
                    for a2 in free(5):
                        for r0 in reduce(2):
                            in0 = x[a0, r0 + a2]
                            in1 = w[a1, r0]
                            v0 = mul(in0, in1)
                            acc0 <- sum(v0)
                        v1 = sin(acc0)
                        y[a0, a1, a2] = acc0
                        z[a0, a1, a2] = v1
        return (y, z)
    =>
    @loop
    def f(x: f32[3, 6], w: f32[5, 2]):
        with kernel('z_along', y=f32[3, 5, 5], z_along=f32[3, 5, 5]):
            for a0 in free(3):
                for a1 in free(5):
                    for a2 in free(5):
                        for r0 in reduce(2):
                            in0 = x[a0, r0 + a2]
                            in1 = w[a1, r0]
                            v0 = mul(in0, in1)
                            acc0 <- sum(v0)
                        v1 = sin(acc0)
                        y[a0, a1, a2] = acc0
                        z_along[a0, a1, a2] = v1
        with kernel('z', z=f32[3, 5, 5] @ (25, 1, 5)):
            for a0 in free(3):
                for a2 in free(5):
                    for a1 in free(5):
                        in0 = z_along[a0, a1, a2]
                        z[a0, a1, a2] = in0
        return (y, z)
    """

    def find(s: l.Kernel, names: Set[str], _: object) -> tuple[l.Kernel, ...] | None:
        return _along_one_axis(s, names, least)

    def prices(s: l.Kernel, found: Sequence[l.Kernel]) -> tuple[float, float]:
        return price([s]), price(found)

    return stored_first(program, log, (PASS, RULE, "as they lie"), find, prices)


def _along_one_axis(kernel: l.Kernel, names: Set[str], least: int) -> tuple[l.Kernel, ...] | None:
    """A kernel that stores as most of its results lie, and those that copy the others to where they lie; None where all
    lie alike.
    """
    sums = [x for x in topological([s.value for s in kernel.stores]) if isinstance(x, l.Reduce)]
    extents = [n for a in kernel.axes if isinstance(n := a.extent, int)]
    if len(kernel.stores) < 2 or not sums or kernel.over or kernel.scans:
        return None
    if len(extents) < len(kernel.axes) or math.prod(extents) < least:
        return None
    if any(not isinstance(n := math.prod(a.extent for a in x.axes), int) or n >= FEW for x in sums):
        return None
    orders = {s: _order(kernel, s) for s in kernel.stores}
    size: dict[Var, int] = {}
    for s, order in orders.items():
        if not order:
            return None
        size[order[-1]] = size.get(order[-1], 0) + s.buffer.type.dtype.size
    if len(size) < 2:
        return None
    most = max(size, key=lambda a: size[a])
    axes = next(order for order in orders.values() if order[-1] is most)
    kind = tuple(a.extent for a in axes)
    stores, copies = [], []
    for s, order in orders.items():
        if order[-1] is most:
            stores.append(s)
            continue
        place = l.Buffer(unused(f"{s.buffer.name}_along", {*names}), Type(s.buffer.type.dtype, kind))
        stores.append(l.Store(place, axes, s.value))
        copy = l.Store(s.buffer, s.index, l.Load.make(place, axes))
        copies.append(l.Kernel(s.buffer.name, order, (copy,), kernel.source))
    name = kernel.name if kernel.name not in {k.name for k in copies} else f"{kernel.name}_along"
    return l.Kernel(name, kernel.axes, tuple(stores), kernel.source), *copies


def _order(kernel: l.Kernel, store: l.Store) -> tuple[Var, ...]:
    """The axes of a kernel from that along which a result lies farthest apart to that along which it lies side by side;
    none where an axis is not one step in memory.
    """
    place = flatten(store.index, store.buffer.type.element_strides)
    steps: dict[Var, int] = {}
    for a in kernel.axes:
        step = coefficient(place, a)
        if not isinstance(step, int) or step <= 0:
            return ()
        steps[a] = step
    order = tuple(sorted(steps, key=lambda a: -steps[a]))
    return order if order and steps[order[-1]] == 1 else ()
