"""Schedules for windows: reductions of a few steps whose places move with the points of a result, as those of stencils,
depthwise convolutions, pooling and interpolation do.

A thread takes several points together (`jam=True`): what their windows share is loaded once. Which points, along which
axis the lanes lie, and which steps are unrolled is priced by counting what a thread executes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import combinations
from typing import Any

from terrazzo.hw.gpu import Gpu
from terrazzo.ir import nest as n
from terrazzo.ir.contraction import contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import Expr, Loaded
from terrazzo.ir.node import Node, topological
from terrazzo.ir.schedule import Factor, Schedule, Site
from terrazzo.rules.access import WIDEST
from terrazzo.rules.loop_to_tile.products.packed import copied_along
from terrazzo.rules.loop_to_tile.walked.cache_lines import at_once, lines_of, stride_of
from terrazzo.rules.loop_to_tile.walked.collapse import collapse
from terrazzo.rules.loop_to_tile.walked.crossed import copying
from terrazzo.rules.loop_to_tile.walked.threads import POWERS, SECTOR, WARP, divided, waste
from terrazzo.rules.loop_to_tile.walked.window_forms import (
    POINTS,
    SHORT,
    Form,
    afresh,
    directions,
    few_channels,
    form_of,
    moved_bytes,
    places,
)
from terrazzo.rules.tile.draft import axis_name

WARPS = 4
"""Of a block."""
FEW_LOOPS = 5
"""Loops over steps of which each may be serial or written out, whichever the others are."""
CODE = 640
"""Multiply-adds of a thread that are written out, at most."""
REGISTERS = 120
"""What sums and windows may take of a thread's registers: with addresses and what follows, four blocks of four warps
still fit on a processor.
"""
SEGMENT = 64
"""Bytes that lanes read side by side, at least, where that is possible."""
GUARD = 3
"""Instructions beside a load that test whether its place is inside, and have 0 if not."""
MASKED = 8
"""Instructions beside a load that some points of a thread make and others, beyond the end of an axis, do not: each is
in a branch of its own, and what its place is made of is computed there.
"""
MULTIPLIED = 1.5
"""How much longer than counted windows take that are products of few channels: 1.2 for 3x3 filters on 32 x 3 x 224 x
224 (51 us; 117 in tiles of CUDA cores), 1.75 for 7x7 (341; 462), 1.8 for 3x7x7 (523; 702, H100).
"""
OVERHEAD = 30
"""Instructions of a thread that find its points."""
ISSUES = 4
"""Instructions that a processor issues in a cycle, in which its cache gives one line."""
STORED = 50.0
"""Sectors of which the cache takes a part in a nanosecond. Rows of 257 elements of bfloat16, of which every lane stored
its own, took 850 us for 41 million, means along 512 days of 321 series 422 us for 21 million (H100, November 2026).
"""
BUSY = 12
"""Warps on a processor that hide how long memory and arithmetic take."""


@dataclass(frozen=True)
class Window:
    """A schedule, and what it takes by the model in nanoseconds. `copies` come first, and `kernel` reads them."""

    kernel: l.Kernel
    schedule: Schedule
    time: float
    told: str
    copies: tuple[l.Kernel, ...] = ()

    def __str__(self) -> str:
        return f"{self.told}: {self.time / 1e3:.1f} us by the model"


@lru_cache(maxsize=1024)
def window(kernel: l.Kernel, gpu: Gpu) -> Window | None:
    """The best way to compute windows; None for a kernel that has none."""
    if (form := form_of(kernel)) is None:
        return None
    found = list(_ways(form, gpu))
    if (points := form_of(collapse(kernel))) is not None and points.kernel is not kernel:
        found += _ways(points, gpu)  # lanes fill up with what follows a short row
    for axis in form.lanes:
        *copies, other = copied_along(kernel, axis, 1) if form.crossed else copied_along(kernel, axis)
        if copies and (new := form_of(other)) is not None:
            before = sum(copying(x, gpu) for x in copies)
            found += [_Way(new, w.lane, w.vector, w.points, w.serial, w.gpu, before, tuple(copies))
                      for w in _ways(new, gpu) if w.lane.name == axis.name]  # fmt: skip
    best = min(found, key=lambda w: (w.time, w.busy), default=None)
    if best is None or best.time > _by_rows(form, gpu):
        return None
    return replace(best.window(), time=best.time * (MULTIPLIED if few_channels(kernel) else 1))


ROW = 60
"""Instructions of a warp that finds its row, and lanes that combine what they have."""
APART = 10
"""Instructions of a step of a row beside its load: where it lies is found by dividing."""


def _by_rows(form: Form, gpu: Gpu) -> float:
    """Nanoseconds of long windows as rows, each of a warp whose lanes lie along the steps: threads that have one each
    may lie across memory, or be few. Infinity for products, and where a window is short.
    """
    reduces = [r for s in form.loops for r in s.carried if isinstance(r, l.Reduce)]
    if any(contraction(r) is not None for r in reduces):
        return math.inf
    issued = lines = 0.0
    for s in form.loops:
        steps = math.prod(int(a.extent) for a in s.axes)
        if steps <= SHORT:
            return math.inf
        times = -(-steps // WARP)
        for x in s.body:
            if isinstance(x, n.Let) and isinstance(x.term, l.Load):
                lanes = tuple((a, min(int(a.extent), WARP), 1) for a in s.axes)
                issued += times * (GUARD + APART)
                lines += times * lines_of(x.term, lanes, 1)
            elif isinstance(x, n.Let) and isinstance(x.term, l.Apply):
                issued += times * x.term.fn.cost
        issued += ROW * len(s.carried)
    rows = math.prod(int(a.extent) for a in form.axes)
    waits = max(1.0, gpu.processors * BUSY / rows)
    busy = rows * max(issued, ISSUES * lines) / (gpu.fma / 2 / WARP) * waits
    return max(busy, moved_bytes(form) / gpu.memory) + gpu.launch


@dataclass(frozen=True)
class _Way:
    """One way to bind the axes of a form."""

    form: Form
    lane: Any
    vector: int
    points: tuple[tuple[Any, int], ...]
    serial: frozenset[Any]
    gpu: Gpu
    before: float = 0.0
    copies: tuple[l.Kernel, ...] = field(default=())

    @cached_property
    def sizes(self) -> dict[Any, int]:
        """Points of a thread along each axis, and unrolled steps."""
        steps = {a: a.extent for s in self.form.loops for a in s.axes if a not in self.serial}
        return {**dict(self.points), **({self.lane: self.vector} if self.vector > 1 else {}), **steps}

    @property
    def each(self) -> int:
        """Points of a thread."""
        return self.vector * math.prod(p for _, p in self.points)

    # -- threads -------------------------------------------------------------------------------------------------------

    @cached_property
    def threads(self) -> dict[Any, tuple[int, int]]:
        """Lanes and warps along every axis. Lanes lie along memory first, as far as few of them have no point."""
        parts = {a: -(-a.extent // self.sizes.get(a, 1)) for a in self.form.axes}
        near = [abs(s) for x in self.form.accesses if isinstance(s := stride_of(x, self.lane), int) and s]
        size = min(x.buffer.type.dtype.size for x in self.form.accesses) * self.vector * min(near, default=1)
        order = dict.fromkeys([self.lane, *(a for a, _ in self.points), *reversed(self.form.axes)])
        lanes = dict.fromkeys(order, 1)
        lanes[self.lane] = min(
            POWERS, key=lambda k: waste(parts[self.lane], k) * (1 + max(0, SEGMENT - k * size) / (2 * SEGMENT))
        )
        rest = divided(WARP // lanes[self.lane], [a for a in order if a is not self.lane], parts, lanes)
        if rest > 1:
            a = min(order, key=lambda a: waste(parts[a], lanes[a] * rest) / waste(parts[a], lanes[a]))
            lanes[a] *= rest
        both = dict(lanes)
        divided(WARPS, order, parts, both)
        return {a: (lanes[a], both[a] // lanes[a]) for a in self.form.axes}

    @cached_property
    def lanes(self) -> tuple[tuple[Any, int, int], ...]:
        """Axes that lanes lie along, innermost last: how many, and how many points each has there."""
        return tuple((a, k, self.sizes.get(a, 1)) for a, (k, _) in self.threads.items() if k > 1)

    @cached_property
    def count(self) -> int:
        """Threads of all blocks, those without points included."""
        total = 1
        for a in self.form.axes:
            lanes, warps = self.threads[a]
            total *= -(-a.extent // (self.sizes.get(a, 1) * lanes * warps)) * lanes * warps
        return total

    # -- what a thread does --------------------------------------------------------------------------------------------

    @cached_property
    def registers(self) -> int:
        """Of sums and windows."""
        found = self.each * sum(len(s.carried) for s in self.form.loops)
        most = 0
        for s in self.form.loops:
            loads = [x.term for x in s.body if isinstance(x, n.Let) and isinstance(x.term, l.Load)]
            each = [(self.times(x), max(1, 4 // x.dtype.size) if self.width(x) > 1 else 1) for x in loads]
            most = max(most, sum(-(-times // packed) for times, packed in each))
        return found + most

    @property
    def written(self) -> int:
        """Steps that are written out."""
        steps = (math.prod(int(a.extent) for a in s.axes if a not in self.serial) for s in self.form.loops)
        return self.each * max(steps)

    def times(self, term: Node) -> int:
        """How many values a term has in a thread, for one step of the serial loops."""
        return places(directions(term), tuple((a, size) for a, size in self.sizes.items() if a in term.free))

    def width(self, x: Any) -> int:
        """How many values a thread loads or stores at once: those along the lanes' axis, or what it reads in steps that
        are written out, as a pixel's channels.
        """
        if self.vector > 1 and at_once(x, self.lane, self.vector):
            return self.vector
        if not isinstance(x, l.Load):
            return 1
        moved = {v: found for v, found in directions(x) if v in self.sizes and found}
        for a, (number, _) in moved.items():
            size = self.sizes[a]
            alone = sum(other == number for other, _ in moved.values()) == 1
            if a not in self.form.axes and alone and size & size - 1 == 0 and at_once(x, a, size):
                return min(size, WIDEST // int(x.dtype.size))
        return 1

    @cached_property
    def work(self) -> tuple[float, float]:
        """Instructions of a thread, and lines that its warp asks the cache for."""
        issued, lines = float(OVERHEAD), 0.0
        for s, t, count in self.form.executed:
            some, asked = self.one(t, math.prod(a.extent for a in s.axes if a in self.serial) if s is not None else 1)
            issued, lines = issued + count * some, lines + count * asked
        for s in self.form.loops:
            issued += 8 * math.prod(a.extent for a in s.axes if a in self.serial)
            steps = self.each * math.prod(a.extent for a in s.axes)
            sums = (x.into.monoid.width for x in s.body if isinstance(x, n.Accumulate))
            issued += sum(steps * (1 if width == 1 else 4) for width in sums)
        return issued, lines

    def one(self, t: Any, serial: int) -> tuple[float, float]:
        """Of a term, in so many steps."""
        if isinstance(t, l.Load | l.Store):
            all_ = self.each if isinstance(t, l.Store) else self.times(t)
            width = self.width(t)
            guard = GUARD + (width // 2 if width > 1 else 0) if getattr(t, "inside", ()) else 1
            guard += MASKED if any(a in t.free and a.extent % size for a, size in self.points) else 0
            times = serial * all_ / width
            return times * (1 + guard), times * lines_of(t, self.lanes, width)
        if isinstance(t, l.Apply):
            return serial * self.times(t) * (1 if is_cast(t.fn) else t.fn.cost), 0.0
        return 0.0, 0.0

    @cached_property
    def busy(self) -> float:
        """Nanoseconds for which instructions are issued, or lines fetched from caches."""
        issued, lines = self.work
        warps = self.count / WARP
        rate = self.gpu.fma / 2 / WARP  # warps' instructions in a nanosecond
        waits = max(1.0, self.gpu.processors * BUSY / warps)  # there are too few warps to hide them
        return warps * max(issued, ISSUES * lines) / rate * waits * self.crowd

    @cached_property
    def stored(self) -> float:
        """Nanoseconds in which the cache takes what lanes store to sectors that no others of their warp store to."""
        lines = 0.0
        for s in self.form.kernel.stores:
            times, asked = self.each / self.width(s), lines_of(s, self.lanes, self.width(s))
            lines += times * asked if WARP * self.width(s) * s.buffer.type.dtype.size < SECTOR * asked else 0.0
        return self.count / WARP * lines / STORED

    @cached_property
    def crowd(self) -> float:
        """How many times as large as a processor's cache is what a block gathers from, if that is larger: planes in
        which data says where they are read (but not rows of which it says which are), one of which fits. With 32 KB
        each (grid_sample of 8 x 32 x 128 x 128 in bfloat16, H200, November 2026) blocks of 1 to 4 planes took 28.2 to
        29.2 us, of 8 up to 29.7, of 16 up to 34.2, and of 32 up to 50.6.
        """
        found = 1.0
        for x in self.form.accesses:
            index = {d: e for d, e in enumerate(x.index) if isinstance(e, Expr)}
            said = {d for d, e in index.items() if any(isinstance(y, Loaded) for y in topological([e]))}
            plane = math.prod(x.buffer.type.static_shape[d] for d in said) * x.buffer.type.dtype.size
            if len(x.index) - 1 in said and plane <= self.gpu.shared:
                of = {a for d, e in index.items() if d not in said for a in e.free}
                each = (self.sizes.get(a, 1) * math.prod(self.threads[a]) for a in self.form.axes if a in of)
                found = max(found, math.prod(each) * plane / self.gpu.shared)
        return found

    @property
    def time(self) -> float:
        """Nanoseconds of the kernel, and of what comes before it."""
        moved = max(self.busy, self.stored, moved_bytes(self.form) / self.gpu.memory)
        return moved + self.gpu.launch + self.before

    # -- the schedule --------------------------------------------------------------------------------------------------

    def window(self) -> Window:
        """The schedule."""
        lines = []
        for a in self.form.axes:
            lanes, warps = self.threads[a]
            size = self.sizes.get(a, 1)
            own = [Factor(level, k) for level, k in (("warp", warps), ("lane", lanes)) if k > 1]
            own += [Factor("reg", size, (("jam", True),))] if size > 1 else []
            lines.append((a.name, (Factor("grid", -(-a.extent // (lanes * warps * size))), *own)))
        if self.each == 1:  # the last axis has one point then, for the steps are taken so all the same
            name, own_ = lines[-1]
            lines[-1] = name, (*own_, Factor("reg", 1, (("jam", True),)))
        names = {r: name for name, r in n.accumulators(self.form.kernel).items()}
        sites = tuple(
            Site(
                tuple(names[r] for r in s.carried),
                tuple((axis_name(a), self.steps(a)) for a in s.axes),
            )
            for s in self.form.loops
        )
        told = " x ".join(f"{p} ({axis_name(a)})" for a, p in (*self.points, (self.lane, self.vector)) if p > 1)
        schedule = Schedule(self.form.kernel.name, self.gpu.arch, tuple(lines), (), (), sites)
        why = f"a thread computes {told} points of a window" if told else "a thread computes the window of a point"
        return Window(self.form.kernel, schedule, self.time, why, self.copies)

    def steps(self, axis: Any) -> tuple[Factor, ...]:
        """How a thread takes the steps along an axis; of sums over pairs some at a time, which are added up apart."""
        if axis not in self.serial:
            return (Factor("reg", axis.extent),)
        some = afresh(axis.extent) if self.form.summed else 1
        return tuple(Factor("time", k) for k in (axis.extent // some, some) if k > 1 or some == 1)


def _ways(form: Form, gpu: Gpu) -> Iterator[_Way]:
    """Those whose sums and windows fit into registers."""
    steps = sorted((a for s in form.loops for a in s.axes), key=lambda a: -a.extent)
    if len(steps) <= FEW_LOOPS:
        subsets = [frozenset(x) for k in range(len(steps) + 1) for x in combinations(steps, k)]
    else:  # the longest are serial first
        subsets = [frozenset(steps[:k]) for k in range(len(steps) + 1)]
    if form.summed:
        subsets = [x for x in subsets if all(a in x or a.extent <= SHORT for a in steps)]
    smallest = min(x.buffer.type.dtype.size for x in form.accesses)
    for lane in form.lanes:
        for vector in (1, 2, 4, 8):
            if lane.extent % vector or vector * smallest > WIDEST:
                continue
            others: list[tuple[tuple[Any, int], ...]] = [()]
            others += [((a, p),) for a in form.axes for p in POINTS if a is not lane and p <= a.extent]
            for points in others:
                every = (_Way(form, lane, vector, points, serial, gpu) for serial in subsets)
                yield from (w for w in every if w.written <= CODE and w.registers <= REGISTERS)
