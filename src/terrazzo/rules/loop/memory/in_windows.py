"""What is stored only to be read soon is made and read in windows of an axis, one after the other.

Parts of a float32 take 6 bytes beside its own 4 (ADR 009), and those of what a large product reads may be most of what
is in use at a time. Where the kernels that make them, and all that read them, go along one axis, each of them becomes
several launches that do a window of it, and what is between is as large as one window. The windows of what others made
are views of it, and results are stored where the whole result is (`ir/regions.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

from terrazzo.ir.canonical import nameless
from terrazzo.ir.contraction import nested_contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import Var
from terrazzo.ir.node import topological
from terrazzo.ir.regions import regions
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.memory.lifetimes import in_use
from terrazzo.rules.loop.memory.windows import (
    Group,
    Reading,
    Windows,
    along_axis,
    in_ranges,
    loads_of,
    windowed,
    windows_read,
)

PASS = "remake"
RULE = "in_windows"
RATE = 4.0
"""How many times the part of memory must be saved that it takes of the time."""
LOSS = 0.05
"""The part of the time of a program that is given for memory at most."""
WORTH = 32 << 20
"""Bytes in use from which on it is asked: below, what is faster is taken."""
SAVED = 0.02
"""The part of what is in use from which on it is worth having, or twice as many windows are."""
COUNTS = 2, 3, 4, 6, 8, 16, 32
"""How many windows an axis has, at most: the blocks of some fill a GPU a few times, those of others leave much idle."""
PATIENCE = 2
"""Of how many in a row that take too much time no more are tried."""
ROWS = 64, 1024
"""Of what a window of a long axis is a multiple: the rows of a tile, or of so many that they fill a GPU."""
DEEP = 3
"""How many times something is cut: windows are cut again where all that can be is in windows."""
ROUNDS = 64
"""How often it is looked where most memory is in use."""
LARGEST = 4
"""Of how many of the largest buffers in use there the readers are tried."""

Steps = Sequence[l.Kernel | l.Call]
Price = Callable[[Steps], float]


def stored_again(maker: l.Kernel) -> bool:
    """Whether a kernel stores what is in memory already, and eager mode would not: elsewhere, or as parts of numbers,
    one of which is what another leaves. What both store may lie there whole, for a product in windows is often slower
    than the model says: 2048 x 4096 x 14336 behind a ReLU took 349 us in two, and 299 to 307 in one (H200).
    """
    narrow = [s for s in maker.stores if s.buffer.type.dtype.size == 2]
    left = any(s is not t and s.value in topological([t.value]) for s, t in product(narrow, narrow))
    return left or all(is_cast(x.fn) for x in maker.terms if isinstance(x, l.Apply))


def in_windows(
    program: l.Program,
    log: Log,
    price: Price,
    wanted: Callable[[l.Kernel], bool] = stored_again,
    worth: int = WORTH,
    pass_name: str = PASS,
) -> l.Program:
    """`program` with steps that run in windows where most memory is in use, as long as the part of memory that this
    saves is several times the part of the time that it takes; first what is `wanted`, and who goes along with it.

    @loop
    def f(x: f32[128, 64]):
        with kernel('h', h=f32[128, 64]):
            for a0 in free(128):
                for a1 in free(64):
                    in0 = x[a0, a1]
                    v0 = exp(in0)
                    h[a0, a1] = v0
        with kernel('y', y=f32[128]):
            for a0 in free(128):
                for r0 in reduce(64):
                    in0 = h[a0, r0]
                    acc0 <- sum(in0)
                y[a0] = acc0
        return (y,)
    =>
    @loop
    def f(x: f32[128, 64]):
        x_w, = call('aten.alias.default', view(x, [64, 64], [64, 1], 0), _types=(f32[64, 64],))
        with kernel('h_w', h_w=f32[64, 64]):
            for a0 in free(64):
                for a1 in free(64):
                    in0 = x_w[a0, a1]
                    v0 = exp(in0)
                    h_w[a0, a1] = v0
        with kernel('y_w', y_w=f32[64]):
            for a0 in free(64):
                for r0 in reduce(64):
                    in0 = h_w[a0, r0]
                    acc0 <- sum(in0)
                y_w[a0] = acc0
        x_w_2, = call('aten.alias.default', view(x, [64, 64], [64, 1], 4096), _types=(f32[64, 64],))
        with kernel('h_w_2', h_w_2=f32[64, 64]):
            for a0 in free(64):
                for a1 in free(64):
                    in0 = x_w_2[a0, a1]
                    v0 = exp(in0)
                    h_w_2[a0, a1] = v0
        with kernel('y_w_2', y_w_2=f32[64]):
            for a0 in free(64):
                for r0 in reduce(64):
                    in0 = h_w_2[a0, r0]
                    acc0 <- sum(in0)
                y_w_2[a0] = acc0
        y, = call('aten.cat.default', [y_w, y_w_2], 0, _types=(f32[128],))
        return (y,)
    """
    highest = least = max(in_use(program.steps, program.results, inputs=program.inputs), default=0)
    now, whole, spent, taken, begun, deep = program, 0.0, 0.0, 0, 0, 1
    found: list[tuple[_Done, int, float]] = []
    sizes: dict[Any, int] = {}
    for _ in range(ROUNDS):
        used = in_use(now.steps, now.results, inputs=now.inputs)
        if (most := max(used, default=0)) < worth:
            break
        forms: dict[l.Kernel, list[int]] = {}
        for s, n in zip(now.steps, used, strict=True):
            if isinstance(s, l.Kernel):
                forms.setdefault(nameless(s), []).append(n)
        best: tuple[float, float, _Done] | None = None
        floor = max((x.least for x, *_ in found[begun:]), default=0)
        for group in _groups(now, used.index(most), wanted):
            form, *others = map(nameless, group.readers)
            size = sizes.get((form, *others), 0)  # other layers take as long for no more windows
            ways = [x for x in _counted(now, group, used.index(most)) if x.size >= size]
            if not ways or _gain(ways[-1], most, floor, 0.0) <= (best[0] if best else 0.0):
                continue
            whole = whole or max(price(program.steps), 1.0)
            slow = 0
            for done in ways:
                alike = max(sum(n > done.least for n in forms[form]), 1)
                more = max(price(done.come) - price(done.gone), 0.0)
                slow = slow + 1 if spent + alike * more > LOSS * whole else 0
                if slow == PATIENCE:
                    break
                if not slow and (gain := _gain(done, most, floor, alike * more / whole)) > (best[0] if best else 0.0):
                    best = gain, more, done
        if best is None and (deep == DEEP or begun == len(found)):
            break
        if best is None:
            begun, deep = len(found), deep + 1
            continue
        _, more, done = best
        now, spent = done.program, spent + more
        sizes[tuple(map(nameless, done.group.readers))] = done.size
        found.append((done, most, more))
        less = max(in_use(now.steps, now.results, inputs=now.inputs))
        if less < least and (highest - less) / highest > RATE * spent / whole:
            least, taken = less, len(found)
    for done, most, more in found[:taken]:
        why = f"{done.count} windows: {most / 1e6:.1f} MB are in use, and {done.least / 1e6:.1f} MB here then"
        for s in done.group.kernels:
            log.add(Event(pass_name, RULE, s.name, True, f"{why}, for {more / 1000:.1f} us more"))
        log.applied(pass_name, RULE, done.gone[-1].name, done.gone, done.come)
    return found[taken - 1][0].program if taken else program


def _gain(done: _Done, most: int, floor: int, more: float) -> float:
    """The part of memory that is saved where most is in use, down to what is in use elsewhere all the same, less what
    so large a part of the time is worth.
    """
    return (most - max(done.least, floor)) / most - RATE * more


class _Uses:
    """Who makes what in a program, and who reads it."""

    def __init__(self, program: l.Program) -> None:
        self.kept = {*program.inputs, *program.results}
        self.place = {s: n for n, s in enumerate(program.steps)}
        self.maker = {b: s for s in program.steps for b in s.writes}
        self.readers: dict[l.Buffer, list[l.Kernel | l.Call]] = {}
        for s in program.steps:
            for b in s.reads:
                self.readers.setdefault(b, []).append(s)
        self.joining: dict[tuple[Any, Set[Any]], bool] = {}
        self.windows: dict[tuple[l.Kernel, frozenset[Any]], list[tuple[l.Kernel, frozenset[Any]]]] = {}

    def along(self, b: l.Buffer) -> list[tuple[l.Kernel | l.Call, l.Buffer]]:
        """Who reads a buffer, and who reads what those make, if that may be there in windows, too; each with what it
        reads.
        """
        mine = self.readers[b]
        behind = [x for r in mine if self.joins(r) for x in r.writes if x in self.readers]
        return [(r, x) for x in (b, *behind) for r in self.readers[x]]

    def windowed(self, kernel: l.Kernel, axes: frozenset[Any]) -> list[tuple[l.Kernel, frozenset[Any]]]:
        """Who makes what a kernel reads, and of which of their axes it reads windows that go along some of its own."""
        if (kernel, axes) not in self.windows:
            pairs = ((x, self.maker.get(x.buffer)) for x in loads_of(kernel))
            made = ((m, windowed(x, axes, m)) for x, m in pairs if isinstance(m, l.Kernel))
            self.windows[kernel, axes] = list(dict.fromkeys(made))
        return self.windows[kernel, axes]

    def joins(self, maker: Any, axes: Set[Any] = frozenset()) -> bool:
        """Whether what a step makes can be there in windows of some of its axes: it is no result, and if it is a
        product, these are axes of its batch, so that no window reads what another one does.
        """
        if (maker, axes) not in self.joining:  # groups have many steps in common, and are asked about again and again
            self.joining[maker, axes] = self._joins(maker, axes)
        return self.joining[maker, axes]

    def _joins(self, maker: Any, axes: Set[Any]) -> bool:
        if not isinstance(maker, l.Kernel) or not self.kept.isdisjoint(maker.writes) or not in_ranges(maker, axes):
            return False
        read = all(isinstance(r, l.Kernel) for b in maker.writes for r in self.readers.get(b, ()))
        products = [c for x in maker.terms if isinstance(x, l.Reduce) and (c := nested_contraction(x))]
        return read and (not products or any(all(axes <= f.free for f in c.factors) for c in products))


def _groups(program: l.Program, peak: int, wanted: Callable[[l.Kernel], bool]) -> Iterator[Group]:
    """Kernels that make or read some of the largest of what is wanted and in use at a step, along all their axes."""
    uses = _Uses(program)
    at = {b: n for n, s in enumerate(program.steps) for b in s.writes if n <= peak and uses.joins(s)}
    alive = [b for b in at if b in uses.readers and uses.place[uses.readers[b][-1]] >= peak]
    made = {uses.maker[b]: b for b in sorted(alive, key=lambda b: b.type.span)}  # the largest of each
    large = sorted(made.values(), key=lambda b: -b.type.span)
    again = [b for b in large if wanted(uses.maker[b])]  # type: ignore[arg-type]
    seen: set[tuple[frozenset[l.Kernel], frozenset[l.Kernel]]] = set()
    closed = cache(partial(_closed, uses))  # much is read by who reads other things that are large, too
    for b in (*again[:LARGEST], *[b for b in large if b not in again][:LARGEST]):
        for reader, read in uses.along(b):
            axes = {a for x in _loads(reader, read) for a in x.free}
            for axis in (a for a in reader.axes if a in axes and isinstance(a.extent, int)):  # type: ignore[union-attr]
                group = closed(reader, axis)
                same = group and (frozenset(group.readers), frozenset(group.makers))
                if not group or not same or uses.maker[b] not in group.makers or same in seen:
                    continue
                seen.add(same)
                if b in again or _swells(group):
                    yield group


def _swells(group: Group) -> bool:
    """Whether what a group makes and reads takes more memory than all it is made of and all that is made of it, as
    scores of attention do, which eager mode need not store either.
    """
    within = {b for k in group.makers for b in k.writes}
    without = {b for k in group.kernels for b in (*k.reads, *k.writes)} - within
    return sum(b.type.span for b in within) > sum(b.type.span for b in without)


def _loads(step: l.Kernel | l.Call, b: l.Buffer) -> list[l.Load]:
    """Where a step loads from a buffer."""
    return [x for x in loads_of(step) if x.buffer is b] if isinstance(step, l.Kernel) else []


def _closed(uses: _Uses, reader: l.Kernel, axis: Var) -> Group | None:
    """The kernels that run in windows together where one that reads something does, along an axis of it: with others
    that read what is made for it, or if these would be a step between, with what is made for it alone.
    """
    return _grown(uses, reader, axis, alone=False) or _grown(uses, reader, axis, alone=True)


def _grown(uses: _Uses, reader: l.Kernel, axis: Var, alone: bool) -> Group | None:
    """The same; if it is to be `alone`, whatever others read is there whole."""
    readers, refused = {reader: axis}, set[l.Kernel]()
    read, written = {*reader.reads}, {*reader.writes}
    while True:
        makers = _makers(uses, readers, refused)
        others = {r: m for m in makers for b in m.writes for r in uses.readers.get(b, ())}
        others = {r: m for r, m in others.items() if r not in readers and r not in makers}
        if not others:
            break
        reading = Reading(readers, makers)
        for other, maker in others.items():  # they go along if they read the same windows
            along = None if alone else _alike(maker, reading, other)
            if along is None:
                refused.add(maker)
            else:
                readers[other] = along  # type: ignore[index]
                read.update(other.reads)
                written.update(other.writes)
                if not read.isdisjoint(written):  # one would be a step between, whoever makes what they read
                    return None
    mine = [uses.place[k] for k in (*readers, *makers)]
    inside = any(r in readers or r in makers for b in written for r in uses.readers.get(b, ()))
    written.update(b for k in makers for b in k.writes)
    between = (s for s, n in uses.place.items() if min(mine) < n < max(mine) and s not in readers and s not in makers)
    if inside or not all(written.isdisjoint(s.reads) for s in between):
        return None
    return Group(readers, makers) if all(map(along_axis, readers, readers.values())) else None


def _makers(uses: _Uses, readers: Mapping[l.Kernel, Var], refused: Set[l.Kernel]) -> dict[l.Kernel, None]:
    """The kernels that make what readers read windows of, and what those read, as far as that may be there in windows
    only: where what one makes is not read whole. They come in the order of their steps.
    """
    never = set(refused)
    while True:
        along: dict[l.Kernel, frozenset[Any]] = {k: frozenset([a]) for k, a in readers.items()}
        front, whole = list(readers), set[l.Kernel]()
        while front:
            k = front.pop()
            for maker, axes in uses.windowed(k, along[k]):
                if maker in never or maker in readers:
                    continue
                if not axes:
                    whole.add(maker)
                elif not axes <= (known := along.get(maker, frozenset())):
                    along[maker] = known | axes
                    front.append(maker)
        makers = along.keys() - readers.keys()
        if bad := {k for k in makers if k in whole or not uses.joins(k, along[k])}:
            never |= bad
        else:
            return dict.fromkeys(sorted(makers, key=uses.place.__getitem__))


def _alike(maker: l.Kernel, reading: Reading, other: l.Kernel | l.Call) -> Var | None:
    """The axis along which another kernel reads the windows that readers read of what one makes, or else those that
    makers need for these.
    """
    if not isinstance(other, l.Kernel):
        return None
    for axis in (a for a in other.axes if isinstance(a.extent, int)):
        extents: list[Any] = [axis.extent, *reading.extents]
        least = min(extents)
        if least < 1 or any(n % least for n in extents):
            continue
        count = 2 if least % 2 == 0 else least
        theirs = windows_read(other, axis, maker, count)
        if theirs and theirs <= (reading.themselves(maker, count) or reading.through_others(maker, count)):
            return axis
    return None


@dataclass(frozen=True)
class _Done:
    """A program of which a group runs in windows of a size: the steps that are gone and those that are there instead,
    and the most bytes that are in use during these.
    """

    program: l.Program
    group: Group
    size: int
    gone: Steps
    come: Steps
    least: int

    @property
    def count(self) -> int:
        """How many windows there are."""
        return -(-self.group.extent // self.size)


def _sizes(extent: int) -> list[int]:
    """The sizes that windows of an axis may have, the largest first: equal parts, which may be whole images, or such as
    are multiples of rows.
    """
    found = {extent // count for count in COUNTS if extent % count == 0}
    for size in (-(-extent // count) for count in COUNTS):
        found |= {-(-size // n) * n for n in ROWS if size >= n}
    return sorted((n for n in found if n < extent), reverse=True)


def _counted(program: l.Program, group: Group, peak: int) -> Iterator[_Done]:
    """The program with a group in more and more windows, as long as that saves memory where most is in use: two may
    save less than results take that are there from the first one on.
    """
    most = least = max(in_use(program.steps, program.results, inputs=program.inputs))
    for size in _sizes(group.extent):
        done = Windows(program, group, size).program()
        if done is None or not _called(done) <= _called(program):  # a piece in pieces lies in none
            continue
        old, new = set(program.steps), set(done.steps)
        gone, come = ([s for s in x.steps if s not in y] for x, y in ((program, new), (done, old)))
        there = {program.steps[peak], *(s for s in come if isinstance(s, l.Kernel))}  # calls only name memory
        used = in_use(done.steps, done.results, inputs=done.inputs)
        now = max(n for s, n in zip(done.steps, used, strict=True) if s in there)
        if least - now >= SAVED * most:
            least = now
            yield _Done(done, group, size, gone, come, now)
        elif least < most:
            return


def _called(program: l.Program) -> set[l.Call]:
    """The calls that PyTorch runs."""
    return {s for s in program.steps if isinstance(s, l.Call)} - regions(program.steps, program.results).calls
