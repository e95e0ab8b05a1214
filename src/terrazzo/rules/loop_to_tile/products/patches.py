"""Patches of an image, stored one beside the other before a product reads them: those that a filter sees overlap, so
they are many times what the image is, and finding a place takes divisions.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from terrazzo.collector import remembered
from terrazzo.hw.gpu import Gpu
from terrazzo.ir.contraction import contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import FloorDiv, Mod, Var
from terrazzo.ir.node import substitute, topological, transform, transformed
from terrazzo.ir.schedule import Factor, Schedule
from terrazzo.ir.sites import product
from terrazzo.rules.access import WIDEST
from terrazzo.rules.loop_to_tile.walked.collapse import as_memory_runs, flat_products
from terrazzo.rules.loop_to_tile.walked.threads import (
    THREADS,
    WARP,
    ceil,
    grid,
    size_of,
    step,
    together,
    vector_at,
    vector_of,
    warps_of,
)

LANES, WARPS = 4, 4
"""Lanes of a warp that store a row together, whole sectors of it; and warps of a block."""
WAVES = 2
"""How many times as many threads there are as the processors have room for, where a thread goes from row to row."""


@remembered
def even_products(kernel: l.Kernel) -> l.Kernel:
    """A product of what is loaded with its sum over one axis, as `flat_products`, in the order in which the image lies
    in memory; it goes on to a multiple of 16 bytes where it ends between two: with zeros, of which nothing is read.
    What stores its operands stores vectors then, and reads neighbours.

    @loop
    def f(x: f32[2, 18, 9], w: f32[5, 2, 9]):
        with kernel('z', z=f32[2, 5]):
            for a0 in free(2):
                for a1 in free(5):
                    for r0, r1 in reduce(2, 9):
                        in0 = x[r0, a0 * 9 + r1, 0]
                        in1 = w[a1, r0, r1]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    z[a0, a1] = acc0
        return (z,)
    =>
    @loop
    def f(x: f32[2, 18, 9], w: f32[5, 2, 9]):
        with kernel('z', z=f32[2, 5]):
            for a0 in free(2):
                for a1 in free(5):
                    for r0 in reduce(20):
                        in0 = x[r0 // 9, (r0 % 9) + a0 * 9, 0] if r0 < 18 else 0
                        in1 = w[a1, r0 // 9, r0 % 9] if r0 < 18 else 0
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    z[a0, a1] = acc0
        return (z,)
    """
    flat = flat_products(as_memory_runs(kernel, products=True))
    p = product(flat)
    if p is None or len(p.axes) != 1 or not all(isinstance(x, l.Load) for x in p.operands):
        return flat
    unit = max(WIDEST // x.dtype.size for x in p.operands if isinstance(x, l.Load))
    even = ceil(size_of(p.axes[0]), unit) * unit
    if even == size_of(p.axes[0]):
        return flat

    def visit(node: Any) -> Any:
        if not isinstance(node, l.Reduce) or contraction(node) is None:
            return node
        (axis,), args = l.open_binder(node)
        more = Var(l.fresh_name(), even)
        return l.Reduce.make(node.monoid, (more,), tuple(_within(x, axis, more) for x in args))

    return l.Kernel(flat.name, flat.axes, transformed(flat.stores, visit), flat.source)


def _within(term: Any, axis: Any, more: Any) -> Any:
    """A term of a longer axis, which loads 0 behind the end of the shorter one."""
    last = size_of(axis) - 1 - more

    def visit(node: Any) -> Any:
        return l.Load.make(node.buffer, node.index, (*node.inside, last)) if node in loads else node

    longer = substitute(term, {axis: more})
    loads = {x for x in topological([longer]) if isinstance(x, l.Load) and more in x.free}
    return transform(longer, visit)


def patches(kernel: l.Kernel, gpu: Gpu) -> tuple[l.Kernel, Schedule] | None:
    """A kernel that stores patches that overlap as rows of whole vectors, in the form in which a thread goes from row
    to row with the same place in each, and its schedule; None for others. What is divided to find a place is divided
    once for all of a thread's rows, and lanes store whole sectors.
    """
    form, load = rows_apart(kernel), kernel.stores[0].value
    if form is kernel or not isinstance(load, l.Load) or not _overlap(load, kernel):
        return None
    *outer, along, across = form.axes
    (store,) = form.stores
    found = l.Load(store.buffer, store.index)
    width = vector_of([found], across) if step(found, across) == 1 else 1
    divides = any(isinstance(x, FloorDiv | Mod) and across in x.free for x in topological([store]))
    if not divides or along not in store.value.free or width * found.dtype.size < WIDEST:
        return None
    chunks = size_of(across) // width
    side = next(n for n in (LANES, 2, 1) if n == 1 or chunks >= n)
    down = WARP // side
    top = outer[-1] if outer and size_of(outer[-1]) >= WARPS else along
    beside = WARPS if top is along else 1
    threads = math.prod(map(size_of, outer)) * ceil(size_of(along), down) * ceil(chunks, side) * WARP
    steps = min(ceil(size_of(along), down * beside), max(1, threads // (WAVES * gpu.processors * THREADS)))
    serial = (Factor("time", steps),) if steps > 1 else ()
    lanes = (Factor("lane", side),) if side > 1 else ()
    lines = [(a.name, grid(size_of(a)) if a is not top else together(a, WARPS)) for a in outer]
    rows = Factor("grid", ceil(size_of(along), steps * beside * down))
    lines.append((along.name, (rows, *serial, *warps_of(beside), Factor("lane", down))))
    lines.append((across.name, (Factor("grid", ceil(chunks, side)), *lanes, *vector_at(width))))
    return form, Schedule(form.name, gpu.arch, tuple(lines))


def _overlap(load: l.Load, kernel: l.Kernel) -> bool:
    """Whether a kernel of one axis loads more than there is."""
    shape = [n for n in load.buffer.type.shape if isinstance(n, int)]
    return len(shape) == load.buffer.type.rank and size_of(kernel.axes[0]) > math.prod(shape)


def rows_apart(kernel: l.Kernel) -> l.Kernel:
    """A kernel of one axis that stores rows, with an axis for every digit of the number of a row, and one for what lies
    in a row.

    @loop
    def f(x: f32[3, 9]):
        with kernel('z', z=f32[12, 4]):
            for a0 in free(48):
                in0 = x[a0 // 16, a0 % 4 // 2 + a0 // 4 % 4 * 2 + a0 % 2]
                z[a0 // 4, a0 % 4] = in0
        return (z,)
    =>
    @loop
    def f(x: f32[3, 9]):
        with kernel('z', z=f32[12, 4]):
            for a0 in free(3):
                for a1 in free(4):
                    for a2 in free(4):
                        in0 = x[a0, (a2 // 2) + (a2 % 2) + a1 * 2]
                        z[a0 * 4 + a1, a2] = in0
        return (z,)
    """
    if len(kernel.axes) != 1 or len(kernel.stores) != 1 or not isinstance(kernel.axes[0].extent, int):
        return kernel
    (axis,), (store,) = kernel.axes, kernel.stores
    sizes, total = store.buffer.type.shape, size_of(axis)
    shape = [n for n in sizes if isinstance(n, int)]
    if len(shape) < 2 or len(shape) < len(sizes) or total != math.prod(shape):
        return kernel
    if store.buffer.type.element_strides[-1] != 1:  # what the axis walks first is no row
        return kernel
    wide = shape[-1]
    divided = {x.b for x in topological([store]) if isinstance(x, FloorDiv | Mod) and x.a is axis}
    steps = sorted({wide, total, *(n for n in divided if isinstance(n, int) and n % wide == 0)})
    if len(steps) < 3 or any(b % a for a, b in pairwise(steps)):
        return kernel
    digits = [*(b // a for a, b in reversed([*pairwise(steps)])), wide]
    axes = [Var(f"a{k}", n) for k, n in enumerate(digits)]
    number: Any = 0
    for a in axes:
        number = number * a.extent + a
    return l.Kernel(kernel.name, tuple(axes), (substitute(store, {axis: number}),), kernel.source)
