"""Schedules for windows: reductions of a few steps whose places move with the points of a result, as those of stencils,
depthwise convolutions, pooling and interpolation do.

A thread takes several points together (`jam=True`): what their windows share is loaded once. Which points, along which
axis the lanes lie, and which steps are unrolled is priced by counting what a thread executes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, combinations
from typing import Any

from terrazzo.hw.gpu import Gpu
from terrazzo.ir import nest as n
from terrazzo.ir.contraction import contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.node import derived
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

_ACCESSES, _EXECUTED = (l.Load, l.Store), (l.Load, l.Store, l.Apply)


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
    found = [_ways(form, gpu)]
    if (points := form_of(collapse(kernel))) is not None and points.kernel is not kernel:
        found.append(_ways(points, gpu))  # lanes fill up with what follows a short row
    for axis in form.lanes:
        *copies, other = copied_along(kernel, axis, 1) if form.crossed else copied_along(kernel, axis)
        if copies and (new := form_of(other)) is not None:
            lanes = tuple(a for a in new.lanes if a.name == axis.name)
            found.append(_ways(new, gpu, lanes, sum(copying(x, gpu) for x in copies), tuple(copies)))
    best = _best(chain.from_iterable(found))
    if best is None or best.time > _by_rows(form, gpu):
        return None
    return replace(best.window(), time=best.time * (MULTIPLIED if few_channels(kernel) else 1))


def _best(ways: Iterable[_Way]) -> _Way | None:
    """The first of those that take the least time, and of these the least busy."""
    best, least = None, (math.inf, math.inf)
    for way in ways:
        if way.least <= least[0] and (takes := (way.time, way.busy)) < least:
            best, least = way, takes
    return best


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
    return max(busy, form.bytes / gpu.memory) + gpu.launch


@dataclass(frozen=True)
class _Threads:
    """Which points of a form a thread has, and what follows from that whichever steps it writes out."""

    form: Form
    lane: Any
    vector: int
    points: tuple[tuple[Any, int], ...]
    gpu: Gpu

    @derived
    def sizes(self) -> dict[Any, int]:
        """Points of a thread along each axis."""
        return {**dict(self.points), **({self.lane: self.vector} if self.vector > 1 else {})}

    @derived
    def each(self) -> int:
        """Points of a thread."""
        return self.vector * math.prod(p for _, p in self.points)

    @derived
    def bound(self) -> dict[Any, tuple[int, int]]:
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

    @derived
    def lanes(self) -> tuple[tuple[Any, int, int], ...]:
        """Axes that lanes lie along, innermost last: how many, and how many points each has there."""
        return tuple((a, k, self.sizes.get(a, 1)) for a, (k, _) in self.bound.items() if k > 1)

    @derived
    def count(self) -> int:
        """Threads of all blocks, those without points included."""
        total = 1
        for a in self.form.axes:
            lanes, warps = self.bound[a]
            total *= -(-a.extent // (self.sizes.get(a, 1) * lanes * warps)) * lanes * warps
        return total

    @derived
    def stored(self) -> float:
        """Nanoseconds in which the cache takes what lanes store to sectors that no others of their warp store to."""
        lines = 0.0
        for s in self.form.kernel.stores:
            width = self.width(s)
            times, asked = self.each / width, lines_of(s, self.lanes, width)
            lines += times * asked if WARP * width * s.buffer.type.dtype.size < SECTOR * asked else 0.0
        return self.count / WARP * lines / STORED

    @derived
    def crowd(self) -> float:
        """How many times as large as a processor's cache is what a block gathers from, if that is larger: planes in
        which data says where they are read (but not rows of which it says which are), one of which fits. With 32 KB
        each (grid_sample of 8 x 32 x 128 x 128 in bfloat16, H200, November 2026) blocks of 1 to 4 planes took 28.2 to
        29.2 us, of 8 up to 29.7, of 16 up to 34.2, and of 32 up to 50.6.
        """
        found = 1.0
        for axes, plane in self.form.gathered:
            if plane <= self.gpu.shared:
                each = (self.sizes.get(a, 1) * math.prod(self.bound[a]) for a in self.form.axes if a in axes)
                found = max(found, math.prod(each) * plane / self.gpu.shared)
        return found

    def width(self, x: Any) -> int:
        """How many values a thread loads or stores at once of those along the lanes' axis."""
        return self.vector if self.vector > 1 and at_once(x, self.lane, self.vector) else 1


@dataclass(frozen=True)
class _Way:
    """One way to bind the axes of a form: points of a thread, and the steps that are not written out."""

    threads: _Threads
    serial: frozenset[Any]
    before: float = 0.0
    copies: tuple[l.Kernel, ...] = field(default=())

    @derived
    def form(self) -> Form:
        return self.threads.form

    @derived
    def sizes(self) -> dict[Any, int]:
        """Points of a thread along each axis, and unrolled steps."""
        steps = {a: a.extent for s in self.form.loops for a in s.axes if a not in self.serial}
        return {**self.threads.sizes, **steps}

    # -- what a thread does --------------------------------------------------------------------------------------------

    @derived
    def registers(self) -> int:
        """Of sums and windows."""
        found = self.threads.each * sum(len(s.carried) for s in self.form.loops)
        most = 0
        for s in self.form.loops:
            total = 0
            for x in s.body:
                if isinstance(x, n.Let) and isinstance(x.term, l.Load):
                    times, width = self.values(x.term)
                    total += -(-times // max(1, 4 // x.term.dtype.size)) if width > 1 else times
            most = max(most, total)
        return found + most

    @property
    def written(self) -> int:
        """Steps that are written out."""
        steps = (math.prod(int(a.extent) for a in s.axes if a not in self.serial) for s in self.form.loops)
        return self.threads.each * max(steps)

    def values(self, term: Any) -> tuple[int, int]:
        """How many values a term has in a thread, for one step of the serial loops, and how many of them it loads at
        once. That is asked once of all ways that have as many points and steps along the axes that the term knows.
        """
        known = tuple([(a, size) for a, size in self.sizes.items() if a in term.free])
        asked = term, self.threads.lane, self.threads.vector, known
        if (found := self.form.asked.get(asked)) is None:
            found = self.form.asked[asked] = places(directions(term), known), self.width(term)
        return found

    def width(self, x: Any) -> int:
        """How many values a thread loads or stores at once: those along the lanes' axis, or what it reads in steps that
        are written out, as a pixel's channels.
        """
        if not isinstance(x, _ACCESSES):
            return 1
        if (found := self.threads.width(x)) > 1 or isinstance(x, l.Store):
            return found
        moved = {v: found for v, found in directions(x) if v in self.sizes and found}
        for a, (number, _) in moved.items():
            size = self.sizes[a]
            alone = sum(other == number for other, _ in moved.values()) == 1
            if a not in self.form.axes and alone and size & size - 1 == 0 and at_once(x, a, size):
                return min(size, WIDEST // int(x.dtype.size))
        return 1

    @derived
    def executed(self) -> list[tuple[Any, float, int]]:
        """Terms of a thread: how many times it loads, stores or computes each of a kind, and how many kinds are alike.
        What it loads or stores it does in so wide ones.
        """
        found = []
        for s, t, count in self.form.executed:
            serial = math.prod([a.extent for a in s.axes if a in self.serial]) if s is not None else 1
            if isinstance(t, _EXECUTED):
                times, width = self.values(t) if not isinstance(t, l.Store) else (self.threads.each, self.width(t))
                found.append((t, serial * times / width, count, width))
        return found

    @derived
    def issued(self) -> float:
        """Instructions of a thread."""
        issued, sizes = float(OVERHEAD), self.threads.points
        for t, times, count, width in self.executed:
            if isinstance(t, l.Apply):
                some = times * (1 if is_cast(t.fn) else t.fn.cost)
            else:
                guard = GUARD + (width // 2 if width > 1 else 0) if getattr(t, "inside", ()) else 1
                guard += MASKED if any(a in t.free and a.extent % size for a, size in sizes) else 0
                some = times * (1 + guard)
            issued += count * some
        for s in self.form.loops:
            issued += 8 * math.prod(a.extent for a in s.axes if a in self.serial)
            steps = self.threads.each * math.prod(a.extent for a in s.axes)
            sums = (x.into.monoid.width for x in s.body if isinstance(x, n.Accumulate))
            issued += sum(steps * (1 if width == 1 else 4) for width in sums)
        return issued

    @derived
    def lines(self) -> float:
        """Lines that its warp asks the cache for."""
        lines, lanes = 0.0, self.threads.lanes
        for t, times, count, width in self.executed:
            if not isinstance(t, l.Apply):
                lines += count * (times * lines_of(t, lanes, width))
        return lines

    @derived
    def busy(self) -> float:
        """Nanoseconds for which instructions are issued, or lines fetched from caches."""
        return self._busy(max(self.issued, ISSUES * self.lines)) * self.threads.crowd

    def _busy(self, cycles: float) -> float:
        """Nanoseconds that all warps take, each so many cycles of a scheduler."""
        warps = self.threads.count / WARP
        rate = self.threads.gpu.fma / 2 / WARP  # warps' instructions in a nanosecond
        waits = max(1.0, self.threads.gpu.processors * BUSY / warps)  # there are too few warps to hide them
        return warps * cycles / rate * waits

    @property
    def least(self) -> float:
        """Nanoseconds that it takes at least, which are found sooner: `lines` are left out."""
        return self._taking(self._busy(self.issued))

    @derived
    def time(self) -> float:
        """Nanoseconds of the kernel, and of what comes before it."""
        return self._taking(max(self.busy, self.threads.stored))

    def _taking(self, busy: float) -> float:
        return max(busy, self.form.bytes / self.threads.gpu.memory) + self.threads.gpu.launch + self.before

    # -- the schedule --------------------------------------------------------------------------------------------------

    def window(self) -> Window:
        """The schedule."""
        lines = []
        for a in self.form.axes:
            lanes, warps = self.threads.bound[a]
            size = self.threads.sizes.get(a, 1)
            own = [Factor(level, k) for level, k in (("warp", warps), ("lane", lanes)) if k > 1]
            own += [Factor("reg", size, (("jam", True),))] if size > 1 else []
            lines.append((a.name, (Factor("grid", -(-a.extent // (lanes * warps * size))), *own)))
        if self.threads.each == 1:  # the last axis has one point then, for the steps are taken so all the same
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
        together = (*self.threads.points, (self.threads.lane, self.threads.vector))
        told = " x ".join(f"{p} ({axis_name(a)})" for a, p in together if p > 1)
        schedule = Schedule(self.form.kernel.name, self.threads.gpu.arch, tuple(lines), (), (), sites)
        why = f"a thread computes {told} points of a window" if told else "a thread computes the window of a point"
        return Window(self.form.kernel, schedule, self.time, why, self.copies)

    def steps(self, axis: Any) -> tuple[Factor, ...]:
        """How a thread takes the steps along an axis; of sums over pairs some at a time, which are added up apart."""
        if axis not in self.serial:
            return (Factor("reg", axis.extent),)
        some = afresh(axis.extent) if self.form.summed else 1
        return tuple(Factor("time", k) for k in (axis.extent // some, some) if k > 1 or some == 1)


def _ways(
    form: Form, gpu: Gpu, lanes: tuple[Any, ...] | None = None, before: float = 0.0, copies: tuple[l.Kernel, ...] = ()
) -> Iterator[_Way]:
    """Those whose sums and windows fit into registers, with lanes along all axes that have any, or these."""
    steps = sorted((a for s in form.loops for a in s.axes), key=lambda a: -a.extent)
    if len(steps) <= FEW_LOOPS:
        subsets = [frozenset(x) for k in range(len(steps) + 1) for x in combinations(steps, k)]
    else:  # the longest are serial first
        subsets = [frozenset(steps[:k]) for k in range(len(steps) + 1)]
    if form.summed:
        subsets = [x for x in subsets if all(a in x or a.extent <= SHORT for a in steps)]
    smallest = min(x.buffer.type.dtype.size for x in form.accesses)
    for lane in form.lanes if lanes is None else lanes:
        for vector in (1, 2, 4, 8):
            if lane.extent % vector or vector * smallest > WIDEST:
                continue
            others: list[tuple[tuple[Any, int], ...]] = [()]
            others += [((a, p),) for a in form.axes for p in POINTS if a is not lane and p <= a.extent]
            for points in others:
                threads = _Threads(form, lane, vector, points, gpu)
                every = (_Way(threads, serial, before, copies) for serial in subsets)
                yield from (w for w in every if w.written <= CODE and w.registers <= REGISTERS)
