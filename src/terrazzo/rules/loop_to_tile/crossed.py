"""Schedules of kernels that read along one dimension of memory and write along another: lanes lie along what is read,
and every thread stores several neighbours at once. Otherwise every lane would read a sector for each of its elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from terrazzo.hw.gpu import Gpu
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import topological
from terrazzo.ir.schedule import Factor, Schedule
from terrazzo.rules.loop_to_tile.collapse import collapse, digits_apart, merge_axes
from terrazzo.rules.loop_to_tile.patches import patches
from terrazzo.rules.loop_to_tile.threads import (
    WARP,
    ceil,
    grid,
    ordered,
    pointwise,
    ragged_vector,
    size_of,
    step,
    vector_at,
    vector_of,
    warps_of,
)

LEAST = 8
"""Bytes that a thread stores at once, at least: fewer leave most of a sector to others."""
ACROSS, WARPS = 4, 8
"""Warps of a block that store side by side, at most: with 16 bytes a lane these are whole sectors. And all of them."""


def points(kernel: l.Kernel, gpu: Gpu) -> tuple[l.Kernel, Schedule, str, str]:
    """A kernel without reductions in the form in which threads compute its points, its schedule, why, and the rewrite
    that led there.
    """
    if (found := patches(kernel, gpu)) is not None:
        return (*found, "a thread goes from patch to patch with one place in each", "rows_apart")
    if (found := crossed(kernel, gpu)) is not None:
        why = "lanes lie along what is read, and a thread stores neighbours along what is written"
        return (*found, why, "digits_apart")
    one = collapse(kernel)
    if (rows := _uneven_rows(kernel)) is not None:
        return rows, pointwise(rows, gpu), "a thread is in one row, which begins anywhere", "digits_apart"
    return one, pointwise(one, gpu), "every thread computes points of its own", "collapse"


LONG = 4096
"""Points of a row from which on blocks have enough to do in one."""


def _uneven_rows(kernel: l.Kernel) -> l.Kernel | None:
    """A kernel that stores long rows which whole vectors do not divide, and looks up something for each: with the axes
    of rows as one. None for others, whose points are divided as if they were one row: there every point finds its row.
    """
    kernel = digits_apart(kernel)
    *outer, last = kernel.axes or (None,)
    if not outer or ordered(kernel) or not all(isinstance(a.extent, int) for a in kernel.axes):
        return None
    if size_of(last) < LONG or any(not s.free >= frozenset(kernel.axes) for s in kernel.stores):
        return None
    stored = [l.Load(s.buffer, s.index) for s in kernel.stores]
    loads = [x for x in topological([s.value for s in kernel.stores]) if isinstance(x, l.Load)]
    if any(step(s, last) != 1 for s in stored) or vector_of(stored, last) > 1 or ragged_vector(kernel.stores, last) < 2:
        return None
    own = [x for x in loads if x.free and last not in x.free]
    return merge_axes(kernel, outer) if own else None


def crossed(kernel: l.Kernel, gpu: Gpu) -> tuple[l.Kernel, Schedule] | None:
    """A kernel whose loads run along another axis than its stores, and its schedule; None for others. An axis of which
    only a quotient is read, as of an image whose pixels are repeated, is taken whole where its digits are too short.
    """
    forms = dict.fromkeys((digits_apart(kernel), kernel))
    return next(filter(None, (_crossed(x, gpu) for x in forms)), None)


def _crossed(apart: l.Kernel, gpu: Gpu) -> tuple[l.Kernel, Schedule] | None:
    """The same for a kernel with these axes."""
    every = frozenset(apart.axes)
    if any(not isinstance(a.extent, int) or a.extent < 1 for a in every) or ordered(apart):
        return None
    if len(every) < 2 or any(not s.free >= every for s in apart.stores):
        return None
    stores = [l.Load(s.buffer, s.index) for s in apart.stores]
    across = next((a for a in apart.axes if all(step(s, a) == 1 for s in stores) and size_of(a) > 1), None)
    loads = [x for x in topological([s.value for s in apart.stores]) if isinstance(x, l.Load)]
    if across is None or (along := _along(loads, across, apart.axes)) is None:
        return None
    width = min(vector_of([s], across) for s in stores)
    if width * min(s.dtype.size for s in stores) < LEAST:
        return None
    run = _run(loads, along, [a for a in apart.axes if a is not across])
    merged = merge_axes(apart, run)
    axis = next(a for a in merged.axes if a not in apart.axes or a is along)
    if size_of(axis) < WARP // 2:
        return None
    form = l.Kernel(merged.name, (*(a for a in merged.axes if a is not across), across), merged.stores, merged.source)
    side = next(w for w in (ACROSS, 2, 1) if w == 1 or size_of(across) % (w * width) == 0)
    down = next(w for w in (WARPS // side, 2, 1) if w == 1 or size_of(axis) >= w * WARP)
    lines = [(a.name, grid(size_of(a))) for a in form.axes if a not in (axis, across)]
    lines.append((axis.name, (Factor("grid", ceil(size_of(axis), down * WARP)), *warps_of(down), Factor("lane", WARP))))
    own = Factor("grid", ceil(size_of(across), side * width))
    lines.append((across.name, (own, *warps_of(side), *vector_at(width))))
    return form, Schedule(form.name, gpu.arch, tuple(lines))


def _along(loads: Sequence[l.Load], across: Any, axes: Sequence[Any]) -> Any:
    """The axis along which most is read, where that is no small part of what is read along the stores' axis."""
    read = {a: sum(_bytes(x) for x in loads if {a, across} <= x.free and step(x, a) == 1) for a in axes}
    best = max((a for a in axes if a is not across), key=lambda a: (read[a], size_of(a)))
    return best if 2 * read[best] >= read[across] and read[best] > 0 else None


def _bytes(x: l.Load) -> int:
    """What a load reads, each point once."""
    found: int = x.dtype.size * math.prod(map(size_of, x.free))
    return found


def _run(loads: Sequence[l.Load], along: Any, axes: Sequence[Any]) -> list[Any]:
    """Axes that memory runs through one after the other in what is read along this one, outermost first."""
    x = max((x for x in loads if along in x.free and step(x, along) == 1), key=_bytes)
    found = [along]
    while (far := math.prod(map(size_of, found))) and (
        more := next((a for a in axes if a not in found and a in x.free and step(x, a) == far), None)
    ) is not None:
        found.insert(0, more)
    return found
