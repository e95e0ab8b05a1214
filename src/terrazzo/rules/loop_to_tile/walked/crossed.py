"""Schedules of kernels that read along one dimension of memory and write along another: lanes lie along what is read,
and every thread stores several neighbours at once. Otherwise every lane would read a sector for each of its elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from terrazzo.collector import remembered
from terrazzo.hw.gpu import Gpu
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import topological
from terrazzo.ir.schedule import Factor, Schedule
from terrazzo.rules.access import WIDEST
from terrazzo.rules.loop.fusion.inline import unproved
from terrazzo.rules.loop_to_tile.products.patches import patches
from terrazzo.rules.loop_to_tile.walked.collapse import collapse, digits_apart, merge_axes
from terrazzo.rules.loop_to_tile.walked.threads import (
    BLOCKS,
    SECTOR,
    WARP,
    ceil,
    grid,
    lanes_of,
    ordered,
    pointwise,
    ragged_vector,
    size_of,
    step,
    vector_at,
    vector_of,
    warps_of,
    waste,
)
from terrazzo.rules.loop_to_tile.walked.touched import touched

LEAST = 8
"""Bytes that a thread stores at once, at least, where that is along few points."""
LINE, WARPS = 128, 8
"""Bytes that warps of a block store side by side, at most. And all of them."""
RECTANGLE = WARP // 2
"""Points along what is read from which on a warp may have a rectangle of it and of what is stored."""
FEW, LIGHT = 64, 16
"""Neighbours that a thread reads and stores far apart where what is stored makes no vectors, fewer than that; and
operations on each of them, at most, where there are as many as a rectangle has. 16 images of 393 x 393 became planes
of 17 channels in 54 us for 118 with rectangles in bfloat16, and in 95 for 236 in float32; of 32 in 117 for 141, and 209
for 318; of 48 in 206 for 208, and 365 for 453; of 64, in two parts, in 450 for 572, and 781 for 1108 (27 images; H200,
in runs one after the other, in which eager mode took the same).
"""
REST = 1.34
"""How many times as many threads there may be as have something to do."""


def points(kernel: l.Kernel, gpu: Gpu) -> tuple[l.Kernel, Schedule, str, str]:
    """A kernel without reductions in the form in which threads compute its points, its schedule, why, and the rewrite
    that led there.
    """
    walked = patches(kernel, gpu)
    found = crossed(kernel, gpu)
    if found is not None and (walked is None or touched(*walked, gpu) > touched(*found[:2], gpu)):
        return (*found, "digits_apart")
    if walked is not None:
        return (*walked, "a thread goes from patch to patch with one place in each", "rows_apart")
    one = collapse(kernel)
    if (rows := _uneven_rows(kernel)) is not None:
        return rows, pointwise(rows, gpu), "a thread is in one row, which begins anywhere", "digits_apart"
    return one, pointwise(one, gpu), "every thread computes points of its own", "collapse"


@remembered
def copying(kernel: l.Kernel, gpu: Gpu) -> float:
    """Nanoseconds of a kernel that stores what another one reads, in memory that lies otherwise."""
    form, schedule, *_ = points(kernel, gpu)
    return touched(form, schedule, gpu)


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


def crossed(kernel: l.Kernel, gpu: Gpu) -> tuple[l.Kernel, Schedule, str] | None:
    """A kernel whose loads run along another axis than its stores, its schedule and why; None for others. An axis of
    which only a quotient is read, as of an image whose pixels are repeated, is taken whole where its digits are too
    short.
    """
    forms = [x for x in dict.fromkeys((digits_apart(kernel), kernel)) if _at_all_points(x)]
    forms = [x for x in forms if x is kernel or not unproved([x])]  # guards of digits may say less
    for way, why in WAYS.items():
        if (found := next((y for x in forms if (y := way(x, gpu)) is not None), None)) is not None:
            return (*found, why)
    return None


def _at_all_points(kernel: l.Kernel) -> bool:
    """Whether it stores at every point of several axes, in any order."""
    every = frozenset(kernel.axes)
    known = all(isinstance(a.extent, int) and a.extent >= 1 for a in every)
    return known and not ordered(kernel) and len(every) >= 2 and all(s.free >= every for s in kernel.stores)


def _accesses(kernel: l.Kernel) -> tuple[list[l.Load], list[l.Load], Any]:
    """What is stored and what is loaded, and the axis along which all is stored, if there is one."""
    stores = [l.Load(s.buffer, s.index) for s in kernel.stores]
    loads = [x for x in topological([s.value for s in kernel.stores]) if isinstance(x, l.Load)]
    return (
        stores,
        loads,
        next((a for a in kernel.axes if all(step(s, a) == 1 for s in stores) and size_of(a) > 1), None),
    )


def _interleaved(apart: l.Kernel, gpu: Gpu) -> tuple[l.Kernel, Schedule] | None:
    """A kernel that reads a few neighbours that it stores far apart, as of pixels that become channels, or of channels
    that become planes: a thread loads them all, as one vector if they are one, and lanes lie along what is stored.
    """
    stores, loads, across = _accesses(apart)
    if across is None or waste(size_of(across), WARP) > REST:
        return None
    long = [a for a in apart.axes if a is not across and size_of(a) > 1]
    few = next((a for a in long if _takes_turns(loads, a, across)), None)
    if few is None or (part := _part(size_of(few), vector_of(stores, across))) == 1:
        return None
    if part >= RECTANGLE and not _many_and_light(apart, part, gpu):
        return None
    others = [a for a in apart.axes if a not in (across, few)]
    warps = next(w for w in (WARPS, 4, 2, 1) if w == 1 or size_of(across) >= w * WARP)
    lines = _blocks(others, warps, gpu)
    own = (Factor("grid", ceil(size_of(across), warps * WARP)), *warps_of(warps), Factor("lane", WARP))
    every = grid(size_of(few) // part) if part < size_of(few) else ()
    lines += [(across.name, own), (few.name, (*every, Factor("reg", part, (("jam", True),))))]
    form = l.Kernel(apart.name, (*others, across, few), apart.stores, apart.source)
    return form, Schedule(form.name, gpu.arch, tuple(lines))


def _part(size: int, vector: int) -> int:
    """How many of so many neighbours a thread loads: all where they are fewer than a rectangle has, or where what is
    stored makes no vectors, and then a part of them where they are many; 1 where it is none.
    """
    if size < RECTANGLE or (size < FEW and vector == 1):
        return size
    return next((n for n in (32, 16) if vector == 1 and size % n == 0), 1)


def _many_and_light(apart: l.Kernel, part: int, gpu: Gpu) -> bool:
    """Whether there are threads enough where each has so many points, and little to compute at each."""
    warps = math.prod(map(size_of, apart.axes)) // part // WARP
    operations = sum(isinstance(x, l.Apply) for x in topological([s.value for s in apart.stores]))
    return operations <= LIGHT and warps >= WARPS * gpu.processors


def _takes_turns(loads: Sequence[l.Load], few: Any, across: Any) -> bool:
    """Whether memory runs along a few points of one axis and then along the other, wherever both are known."""
    both = [x for x in loads if {few, across} <= x.free]
    turns = all(step(x, few) == 1 and step(x, across) == size_of(few) for x in both)
    return bool(both) and turns


def _blocks(others: Sequence[Any], warps: int, gpu: Gpu, lanes: int = 1) -> list[tuple[str, tuple[Factor, ...]]]:
    """Axes of which a block has a point, or each of so many lanes one of the longest. Where blocks of few warps would
    be very many, its warps have a point each of that, too: blocks of a warp come and go, and 262,144 of them took 159
    us on an H200.
    """
    spare = WARPS // warps
    beside = max(reversed(others), key=size_of, default=None)
    if spare < 2 or math.prod(map(size_of, others)) <= BLOCKS * gpu.processors or size_of(beside) < spare * lanes:
        spare = 1
    both = (*warps_of(spare), *lanes_of(lanes))
    return [(a.name, (Factor("grid", ceil(size_of(a), spare * lanes)), *both) if a is beside else grid(size_of(a)))
            for a in others]  # fmt: skip


def _crossed(apart: l.Kernel, gpu: Gpu) -> tuple[l.Kernel, Schedule] | None:
    """A kernel that reads along one axis and stores along another: a warp has a rectangle of both, whose sides are
    sectors at least, and a thread stores a vector, or some elements one after the other where there are no vectors.
    """
    stores, loads, across = _accesses(apart)
    if across is None or (along := _along(loads, across, apart.axes)) is None:
        return None
    width, size = min(vector_of([s], across) for s in stores), min(s.dtype.size for s in stores)
    run = _run(loads, along, [a for a in apart.axes if a is not across])
    merged = merge_axes(apart, run)
    axis = next(a for a in merged.axes if a not in apart.axes or a is along)
    if size_of(axis) < RECTANGLE or (width * size < LEAST and not _long(stores, across, along)):
        return None
    form = l.Kernel(merged.name, (*(a for a in merged.axes if a is not across), across), merged.stores, merged.source)
    others = [a for a in form.axes if a not in (axis, across)]
    vectors = ceil(size_of(across), width)
    wide = _most(vectors, 1, ceil(SECTOR, width * size))
    long = _most(size_of(axis), 1, WARP // wide) if others else WARP // wide
    steps = _most(size_of(axis), long, WIDEST // (width * size))
    side = _most(vectors, wide, ceil(LINE, wide * width * size))
    down = _most(size_of(axis), long * steps, WARPS // side)
    lines = _blocks(others, side * down, gpu, WARP // (wide * long))
    own = Factor("grid", ceil(size_of(axis), down * steps * long))
    lines.append((axis.name, (own, *warps_of(down), *vector_at(steps), *lanes_of(long))))
    own = Factor("grid", ceil(size_of(across), side * wide * width))
    lines.append((across.name, (own, *warps_of(side), *lanes_of(wide), *vector_at(width))))
    return form, Schedule(form.name, gpu.arch, tuple(lines))


def _long(stores: Sequence[l.Load], across: Any, along: Any) -> bool:
    """Whether rows that are no vectors are worth a rectangle: they are a sector at least, and where they lie behind
    each other in memory, as one that lanes lie along, so long that a processor's cache has no line of every column.
    Rows of 65 float32 behind each other took 128 us by lanes along them, and 174 in rectangles (H100).
    """
    length = size_of(across)
    behind = all(step(s, along) == length for s in stores)
    return length * min(s.dtype.size for s in stores) >= SECTOR and not (behind and length <= LINE)


def _most(parts: int, each: int, limit: int) -> int:
    """Among how many, a power of two up to a limit, that have so many each, parts are divided with next to no rest."""
    return next(k for k in (32, 16, 8, 4, 2, 1) if k == 1 or (k <= limit and waste(parts, each * k) <= REST))


def _along(loads: Sequence[l.Load], across: Any, axes: Sequence[Any]) -> Any:
    """The axis along which most is read, where that is no small part of what is read along the stores' axis."""
    far = [x for x in loads if across in x.free and step(x, across) != 1]
    read = {a: sum(_bytes(x) for x in (loads if a is across else far) if a in x.free and step(x, a) == 1) for a in axes}
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


WAYS = {
    _interleaved: "lanes lie along what is written, and a thread loads neighbours that are stored far apart",
    _crossed: "lanes lie along what is read and what is written, with a sector of both at least",
}
"""In the order in which they are tried, with what they do."""
