"""Schedules for windows: reductions of a few steps whose places move with the points of a result, as those of stencils,
depthwise convolutions, pooling and interpolation do.

A thread takes several points together (`jam=True`): what their windows share is loaded once. Which points, along which
axis the lanes lie, and which steps are unrolled is priced by counting what a thread executes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

from terrazzo.collector import remembered
from terrazzo.hw.gpu import Gpu
from terrazzo.ir import nest as n
from terrazzo.ir.contraction import contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.node import derived
from terrazzo.ir.schedule import Factor, Schedule, Site
from terrazzo.ir.sites import product
from terrazzo.rules.access import WIDEST
from terrazzo.rules.loop_to_tile.products.packed import SMALL, copied_along
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
ACROSS = 2.5
"""How many times as long as their bytes short windows take, at least, before which whole images are copied: one that
lies across the points is read in a sector for each of them. The gradient of a pooling of 32 x 64 x 112 x 112 took 315
us by the model where it was channels last and the image was not, and 127 with a copy.
"""
WORTH = 1.5
"""How many times as long they take, at least, without these copies, which take memory, too."""
BUSY = 12
"""Warps on a processor that hide how long memory and arithmetic take."""

_ACCESSES = (l.Load, l.Store)


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


@remembered
def window(kernel: l.Kernel, gpu: Gpu, under_taps: bool = False) -> Window | None:
    """The best way to compute windows, those of pieces of an image `under_taps`; None for a kernel that has none."""
    if (form := form_of(kernel, under_taps)) is None:
        return None
    found = list(_threads(form, gpu))
    if (points := form_of(collapse(kernel), under_taps)) is not None and points.kernel is not kernel:
        found += _threads(points, gpu)  # lanes fill up with what follows a short row
    found += _after_copies(form, gpu, 1 if form.crossed or under_taps else SMALL)
    best, rows = _best(found), _by_rows(form, gpu)
    if best is not None and rows == math.inf and best.time > ACROSS * form.bytes / gpu.memory + gpu.launch:
        after = _best([*_after_copies(form, gpu, 1)])
        best = after if after is not None and WORTH * after.time < best.time else best
    if best is None or best.time > rows:
        return None
    multiplied = few_channels(kernel) or (under_taps and product(kernel) is not None)
    return replace(best.window(), time=best.time * (MULTIPLIED if multiplied else 1))


def _after_copies(form: Form, gpu: Gpu, small: int) -> Iterator[_Threads]:
    """Those whose lanes lie along what they read, since buffers that lie across it, so many times smaller than the
    largest, are copied before.
    """
    for axis in form.lanes:
        *copies, other = copied_along(form.kernel, axis, small)
        if copies and (new := form_of(other, form.under_taps)) is not None:
            before = sum(copying(x, gpu) for x in copies)
            yield from (replace(x, before=before, copies=tuple(copies))
                        for x in _threads(new, gpu) if x.lane.name == axis.name)  # fmt: skip


def _best(found: Sequence[_Threads]) -> _Way | None:
    """The way that takes the least time, of these one that is the least busy, and of these the first. Those that take
    longer whatever they load are not looked at.
    """
    best, taken = None, (math.inf, math.inf, 0)
    for number, threads in sorted(enumerate(found), key=lambda x: x[1].least):
        if threads.least > taken[0]:
            break
        for way in threads.ways():
            if way.least <= taken[0] and way.registers <= REGISTERS:
                takes = way.time, way.busy, number
                if takes < taken:
                    best, taken = way, takes
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


class _Work(NamedTuple):
    """What a thread does: instructions, and what it loads or stores, how many times, and how many values at once."""

    issued: float = 0.0
    accesses: tuple[tuple[Any, float, int], ...] = ()

    def and_(self, other: _Work, times: int = 1) -> _Work:
        """Both, the other several times."""
        more = tuple([(t, times * each, width) for t, each, width in other.accesses])
        return _Work(self.issued + times * other.issued, self.accesses + more)


@dataclass(frozen=True)
class _Threads:
    """Which points of a form a thread has, and what follows from that whichever steps it writes out."""

    form: Form
    lane: Any
    vector: int
    points: tuple[tuple[Any, int], ...]
    gpu: Gpu
    before: float = 0.0
    copies: tuple[l.Kernel, ...] = ()

    def ways(self) -> Iterator[_Way]:
        """Those in which not too many steps are written out."""
        every = (_Way(self, serial) for serial in self.form.serial)
        yield from (way for way in every if way.written <= CODE)

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

    def busy(self, cycles: float) -> float:
        """Nanoseconds that all warps take, each so many cycles of a scheduler."""
        warps = self.count / WARP
        rate = self.gpu.fma / 2 / WARP  # warps' instructions in a nanosecond
        waits = max(1.0, self.gpu.processors * BUSY / warps)  # there are too few warps to hide them
        return warps * cycles / rate * waits

    def taking(self, busy: float) -> float:
        """Nanoseconds of a kernel that is so long busy, and of what comes before it."""
        return max(busy, self.form.bytes / self.gpu.memory) + self.gpu.launch + self.before

    @derived
    def least(self) -> float:
        """Nanoseconds that a kernel takes at least, whichever steps are written out."""
        return self.taking(self.busy(self.outside.issued))

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

    @derived
    def outside(self) -> _Work:
        """What a thread does beside its loops over steps, and what it adds up in all of these."""
        done = _Work(float(OVERHEAD))
        for s in self.form.loops:
            steps = self.each * math.prod([a.extent for a in s.axes])
            sums = (x.into.monoid.width for x in s.body if isinstance(x, n.Accumulate))
            done = done.and_(_Work(sum(steps * (1 if width == 1 else 4) for width in sums)))
        for t, count in self.form.executed[None]:
            done = done.and_(self.term(t, 1, self.sizes), count)
        return done

    def term(self, t: Any, serial: int, sizes: Mapping[Any, int]) -> _Work:
        """What a thread does for a term in so many steps, with so many points and unrolled steps along axes."""
        if isinstance(t, l.Apply):
            return _Work(serial * self.values(t, sizes)[0] * (1 if is_cast(t.fn) else t.fn.cost))
        if not isinstance(t, _ACCESSES):
            return _Work()
        count, width = (self.each, self.width(t)) if isinstance(t, l.Store) else self.values(t, sizes)
        guard = GUARD + (width // 2 if width > 1 else 0) if getattr(t, "inside", ()) else 1
        guard += MASKED if any(a in t.free and a.extent % size for a, size in self.points) else 0
        times = serial * count / width
        return _Work(times * (1 + guard), ((t, times, width),))

    def values(self, term: Any, sizes: Mapping[Any, int]) -> tuple[int, int]:
        """How many values a term has in a thread, for one step of the serial loops, and how many of them it loads at
        once. That is asked once of all ways that have as many along the axes that the term knows.
        """
        known = tuple([(a, size) for a, size in sizes.items() if a in term.free])
        asked = term, self.lane, self.vector, known
        if (found := self.form.asked.get(asked)) is None:
            width = self.loaded(term, sizes) if isinstance(term, l.Load) else 1
            found = self.form.asked[asked] = places(directions(term), known), width
        return found

    def width(self, x: Any) -> int:
        """How many values a thread loads or stores at once of those along the lanes' axis."""
        return self.vector if self.vector > 1 and at_once(x, self.lane, self.vector) else 1

    def loaded(self, x: l.Load, sizes: Mapping[Any, int]) -> int:
        """How many values a thread loads at once: those along the lanes' axis, or what it reads in steps that are
        written out, as a pixel's channels.
        """
        if (found := self.width(x)) > 1:
            return found
        moved = {v: way for v, way in directions(x) if v in sizes and way}
        for a, (number, _) in moved.items():
            size = sizes[a]
            alone = sum(other == number for other, _ in moved.values()) == 1
            if a not in self.form.axes and alone and size & size - 1 == 0 and at_once(x, a, size):
                return min(size, WIDEST // int(x.dtype.size))
        return 1


@dataclass(frozen=True)
class _Way:
    """One way to bind the axes of a form: points of a thread, and the steps that are not written out."""

    threads: _Threads
    serial: frozenset[Any]

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
        found = sum(
            self.threads.each
            * len(s.carried)
            * max([len(self.parts(a)) for a in s.axes if a in self.serial], default=1)
            for s in self.form.loops
        )
        most = 0
        for loads in self.form.loaded:
            total = 0
            for x in loads:
                times, width = self.threads.values(x, self.sizes)
                total += -(-times // max(1, 4 // x.dtype.size)) if width > 1 else times
            most = max(most, total)
        return found + most

    @property
    def written(self) -> int:
        """Steps that are written out."""
        steps = (math.prod([int(a.extent) for a in s.axes if a not in self.serial]) for s in self.form.loops)
        return self.threads.each * max(steps)

    @derived
    def work(self) -> _Work:
        """What a thread does."""
        done = self.threads.outside
        for s in self.form.loops:
            serial = math.prod([a.extent for a in s.axes if a in self.serial])
            for t, count in self.form.executed[s]:
                done = done.and_(self.threads.term(t, serial, self.sizes), count)
            done = done.and_(_Work(8 * serial))
        return done

    @derived
    def lines(self) -> float:
        """Lines that its warp asks the cache for."""
        return sum(times * lines_of(t, self.threads.lanes, width) for t, times, width in self.work.accesses)

    @derived
    def busy(self) -> float:
        """Nanoseconds for which instructions are issued, or lines fetched from caches."""
        return self.threads.busy(max(self.work.issued, ISSUES * self.lines)) * self.threads.crowd

    @property
    def least(self) -> float:
        """Nanoseconds that it takes at least, which are found sooner: `lines` are left out."""
        return self.threads.taking(self.threads.busy(self.work.issued))

    @derived
    def time(self) -> float:
        """Nanoseconds of the kernel, and of what comes before it."""
        return self.threads.taking(max(self.busy, self.threads.stored))

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
        return Window(self.form.kernel, schedule, self.time, why, self.threads.copies)

    def steps(self, axis: Any) -> tuple[Factor, ...]:
        """How a thread takes the steps along an axis; of sums over pairs some at a time, which are added up apart."""
        if axis not in self.serial:
            return (Factor("reg", axis.extent),)
        return tuple(Factor("time", k) for k in self.parts(axis))

    def parts(self, axis: Any) -> tuple[int, ...]:
        """In which parts a thread takes the steps along an axis one after the other."""
        return afresh(axis.extent) if self.form.summed else (axis.extent,)


def _threads(form: Form, gpu: Gpu) -> Iterator[_Threads]:
    """Those that have some points together."""
    smallest = min(x.buffer.type.dtype.size for x in form.accesses)
    for lane in form.lanes:
        for vector in (1, 2, 4, 8):
            if lane.extent % vector or vector * smallest > WIDEST:
                continue
            others: list[tuple[tuple[Any, int], ...]] = [()]
            others += [((a, p),) for a in form.axes for p in POINTS if a is not lane and p <= a.extent]
            others += _whole([a for a in form.axes if a is not lane]) if form.under_taps else []
            yield from (_Threads(form, lane, vector, points, gpu) for points in others)


def _whole(axes: Sequence[Any]) -> list[tuple[tuple[Any, int], ...]]:
    """All points of short axes, as of taps and few channels: of one, or of two."""
    short = [(a, a.extent) for a in axes if 1 < a.extent <= SHORT]
    return [*((x,) for x in short), *combinations(short, 2)]
