"""Binding scans to threads: those of a block take the steps of a row together, or columns and pieces of their steps."""

from __future__ import annotations

import math
from typing import Any

from terrazzo.hw.gpu import Gpu
from terrazzo.ir import nest as n
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import topological
from terrazzo.ir.schedule import Factor, Like, Schedule
from terrazzo.rules.loop_to_tile.walked.collapse import merge_axes
from terrazzo.rules.loop_to_tile.walked.threads import WARP, ceil, grid, size_of, step, vector_at, vector_of, warps_of
from terrazzo.rules.tile import bodies

STEP = 400.0
"""Nanoseconds of a step of a scan, of which one thread takes one after the other, loads and all. On an H200 (22
November 2026): 385 to 500 in columns that lie side by side, 166 to 281 in rows.
"""
TILE = 1500.0
"""Nanoseconds of a tile whose steps a block takes together: a load, and threads that wait for each other three times.
Not measured.
"""
EACH = 8
"""Steps of a thread in a tile of columns; along rows they are as many as one access has, and half of these at least."""
WARPS = 8
"""Warps that share a scan where there are many rows: more of them wait for each other longer."""


def scan(kernel: l.Kernel) -> n.Loop | None:
    """The loop of a kernel's scans, where threads can share it: nothing else in the kernel needs threads to meet."""
    if any(isinstance(x, l.Reduce) for x in topological([s.value for s in kernel.stores])):
        return None
    body = n.nest(kernel)
    while True:
        loops = [s for s in body if isinstance(s, n.Loop)]
        if len(loops) != 1:
            return None
        (found,) = loops
        if found.kind == "scan":
            known = all(isinstance(size_of(a), int) for a in kernel.axes)
            return found if known and not bodies.loops(found.body) else None
        body = found.body


def reduced_before(kernel: l.Kernel) -> list[l.Reduce]:
    """The reductions of a kernel of scans, where these need them and not the other way round: stored first, they leave
    threads free to share the scans.
    """
    found = n.accumulators(kernel).values()
    reduces = [x for x in found if isinstance(x, l.Reduce)]
    scans = [x for x in found if isinstance(x, l.Scan)]
    inside = {x for r in reduces for x in topological(r.args)}
    within = {x for s in scans for x in topological(s.args) if isinstance(x, l.Reduce) and s.axis in x.free}
    if not scans or within or any(isinstance(x, l.Scan) for x in inside):
        return []
    return [r for r in reduces if not any(a is s.at for s in scans for a in r.free)]


def shared(kernel: l.Kernel, gpu: Gpu) -> tuple[l.Kernel, Schedule, str] | None:
    """A kernel of scans with a schedule in which threads share them, and what it is; None where they cannot, or where
    there is one step.
    """
    loop = scan(kernel)
    if loop is None or size_of(axis := loop.axes[0]) < 2 or 0 in map(size_of, kernel.axes):
        return None
    column = column_of(kernel, axis)
    if column is None:
        kernel = merge_axes(kernel, [a for a in kernel.axes if a is not axis])
    rows = [a for a in kernel.axes if a is not axis]
    side = column if column is not None else rows[-1] if rows else None
    vector = vector_of(kernel.stores, axis)
    each = EACH if column is not None else max(vector, EACH // 2)
    each = min(each, 1 << (size_of(axis) - 1).bit_length())
    wanted = ceil(size_of(axis), each)  # threads that could take part
    beside = min(WARP, _power(size_of(side))) if column is not None else max(WARP // _power(wanted), 1)
    lanes = WARP // (beside if side is not None else 1)
    blocks = math.prod(ceil(size_of(a), beside) if a is side else size_of(a) for a in rows)
    most = min(32, _power(ceil(wanted, lanes)))
    warps = min(most, WARPS)
    while warps < most and blocks * warps < 32 * gpu.processors:
        warps *= 2
    inner = (*warps_of(warps), *((Factor("lane", lanes),) if lanes > 1 else ()), *vector_at(each))
    times = ceil(size_of(axis), warps * lanes * each)
    lines = [(a.name, grid(size_of(a))) for a in rows if a is not side]
    if side is not None:
        more = 4 if warps == 1 and blocks >= 16 * gpu.processors else 1
        own = (*warps_of(more), *((Factor("lane", beside),) if beside > 1 else ()))
        lines.append((side.name, (*grid(ceil(size_of(side), more * beside)), *own)))
    lines.append((axis.name, (Factor("time", times), *inner)))
    often = f", {times} times" if times > 1 else ""
    what = f"{warps * lanes} threads take {each} steps each of a scan{often}, and meet"
    return kernel, Schedule(kernel.name, gpu.arch, tuple(lines)), what


def price(kernel: l.Kernel, gpu: Gpu) -> float:
    """What the scans of a kernel take at least, in nanoseconds, beside its memory and its arithmetic."""
    scans = [x for x in topological([s.value for s in kernel.stores]) if isinstance(x, l.Scan)]
    steps = max((x.axis.extent for x in scans if isinstance(x.axis.extent, int)), default=0)
    found = shared(kernel, gpu)
    if found is None:
        return STEP * steps
    factors = [f for _, binding in found[1].axes if not isinstance(binding, Like) for f in binding]
    blocks, times, warps = (math.prod(f.size for f in factors if f.level == x) for x in ("grid", "time", "warp"))
    waves = ceil(blocks * warps, 64 * gpu.processors)
    return TILE * times * waves


def column_of(kernel: l.Kernel, axis: Any) -> Any:
    """The axis beside that of a scan along which memory runs, by most of what is read and written; None where it runs
    along the scan.
    """
    accesses = [x for x in topological(kernel.stores) if isinstance(x, l.Load | l.Store)]
    found = {a: sum(_bytes(x) for x in accesses if a in x.free and abs(step(x, a) or 0) == 1) for a in kernel.axes}
    best = max((a for a in kernel.axes if a is not axis and size_of(a) > 1), key=lambda a: found[a], default=None)
    return best if best is not None and found[best] > found[axis] else None


def _bytes(x: Any) -> int:
    """How much of memory is read or written."""
    points = math.prod(size_of(a) for a in x.free if hasattr(a, "extent"))
    return int(x.buffer.type.dtype.size * min(points, x.buffer.type.numel))


def _power(count: int) -> int:
    """The least power of two that is not less, at most a warp."""
    return min(1 << (count - 1).bit_length(), WARP)
