"""What is stored only to be read soon is made and read in windows of an axis, one after the other.

Parts of a float32 take 6 bytes beside its own 4 (ADR 009), and those of what a large product reads may be most of what
is in use at a time. Where the kernels that make them, and all that read them, go along one axis, each of them becomes
several launches that do a window of it, and what is between is as large as one window. The windows of what others made
are views of it, and results are stored where the whole result is (`ir/regions.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from terrazzo.ir.address import mentions
from terrazzo.ir.contraction import nested_contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr, Var, bounds
from terrazzo.ir.node import substitute
from terrazzo.ir.regions import ALIGNED, WHOLE, WINDOW, regions
from terrazzo.ir.types import Type, ordered_strides
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.definitions import unused
from terrazzo.rules.loop.lifetimes import in_use

PASS = "remake"
RULE = "in_windows"
RATE = 4.0
"""How many times the part of memory must be saved that it takes of the time."""
LOSS = 0.02
"""The part of the time of a program that is given for memory at most."""
WORTH = 64 << 20
"""Bytes in use from which on it is asked: below, what is faster is taken."""
SAVED = 0.02
"""The part of what is in use from which on it is worth having, or twice as many windows are."""
MOST = 32
"""Windows of an axis at most."""
ROWS = 64
"""Of what a window of a long axis is a multiple: the rows of a tile."""
ROUNDS = 64
"""How often it is looked where most memory is in use."""
LARGEST = 4
"""Of how many of the largest buffers in use there the readers are tried."""

Steps = Sequence[l.Kernel | l.Call]
Price = Callable[[Steps], float]
ALONG = Var("$along", 1)
Place = tuple[tuple[int, ...], tuple[IntExpr, ...]]
"""The dimensions of a buffer that know the axis, and what they are there."""


@dataclass
class _Group:
    """Kernels that go along one axis: what axes of theirs are, by that; and where buffers know it: those of which all
    readers are among them, which are as large as a window, and those of which others have to have the whole.
    """

    extent: int
    axes: dict[l.Kernel, dict[Any, IntExpr]] = field(default_factory=dict)
    inner: dict[l.Buffer, Place] = field(default_factory=dict)
    outer: dict[l.Buffer, int] = field(default_factory=dict)


def in_windows(program: l.Program, log: Log, price: Price, worth: int = WORTH) -> l.Program:
    """`program` with steps that run in windows where most memory is in use, as long as the part of memory that this
    saves is several times the part of the time that it takes.

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
    highest = least = max(in_use(program.steps, program.results), default=0)
    now, whole, spent, taken = program, 0.0, 0.0, 0
    found: list[tuple[_Done, int, float]] = []
    for _ in range(ROUNDS):
        used = in_use(now.steps, now.results)
        if (most := max(used, default=0)) < worth:
            break
        best: tuple[float, float, _Done] | None = None
        ways = [x for group in _groups(now, used.index(most)) for x in _counted(now, group, used.index(most))]
        for done in sorted(ways, key=lambda x: x.least):
            whole = whole or max(price(program.steps), 1.0)
            if _gain(done, most, 0.0) <= (best[0] if best else 0.0):
                break
            more = max(price(done.come) - price(done.gone), 0.0)
            gain = _gain(done, most, more / whole)
            if spent + more <= LOSS * whole and gain > (best[0] if best else 0.0):
                best = gain, more, done
        if best is None:
            break
        _, more, done = best
        now, spent = done.program, spent + more
        found.append((done, most, more))
        less = max(in_use(now.steps, now.results))
        if less < least and (highest - less) / highest > RATE * spent / whole:
            least, taken = less, len(found)
    for done, most, more in found[:taken]:
        why = f"{done.count} windows: {most / 1e6:.1f} MB are in use, and {done.least / 1e6:.1f} MB here then"
        for s in done.group.axes:
            log.add(Event(PASS, RULE, s.name, True, f"{why}, for {more / 1000:.1f} us more"))
        log.applied(PASS, RULE, done.gone[-1].name, done.gone, done.come)
    return found[taken - 1][0].program if taken else program


def _gain(done: _Done, most: int, more: float) -> float:
    """The part of memory that is saved where most is in use, less what so large a part of the time is worth."""
    return (most - done.least) / most - RATE * more


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

    def joins(self, maker: Any) -> bool:
        """Whether a step is made in windows too, where all that read it are: products are not."""
        if not isinstance(maker, l.Kernel) or maker.scans or not self.kept.isdisjoint(maker.writes):
            return False
        read = all(isinstance(r, l.Kernel) for b in maker.writes for r in self.readers.get(b, ()))
        return read and not any(isinstance(x, l.Reduce) and nested_contraction(x) for x in maker.terms)


def _groups(program: l.Program, peak: int) -> Iterator[_Group]:
    """Kernels that make or read some of the largest of what is alive at a step, along each axis of theirs."""
    uses = _Uses(program)
    at = {b: n for n, s in enumerate(program.steps) for b in s.writes}
    alive = [
        b
        for b, n in at.items()
        if n <= peak and b in uses.readers and uses.place[uses.readers[b][-1]] >= peak and uses.joins(uses.maker[b])
    ]
    seen: set[frozenset[l.Kernel]] = set()
    made = {uses.maker[b]: b for b in sorted(alive, key=lambda b: b.type.span)}  # the largest of each
    for b in sorted(made.values(), key=lambda b: -b.type.span)[:LARGEST]:
        for reader in uses.readers[b]:
            loads = [x for x in reader.terms if isinstance(x, l.Load) and x.buffer is b]  # type: ignore[union-attr]
            for axis in (a for a in reader.axes if any(a in x.free for x in loads)):  # type: ignore[union-attr]
                group = _closed(uses, reader, axis) if isinstance(axis.extent, int) else None  # type: ignore[arg-type]
                if group is not None and b in group.inner and (same := frozenset(group.axes)) not in seen:
                    seen.add(same)
                    yield group


def _closed(uses: _Uses, reader: l.Kernel, axis: Var) -> _Group | None:
    """The kernels that run in windows together where one that reads something does, along an axis of it."""
    along = Var(ALONG.name, axis.extent)
    group = _Group(axis.extent)  # type: ignore[arg-type]
    group.axes[reader] = {axis: along}
    read: dict[l.Buffer, set[Place]] = {}
    front = [reader]
    while front:
        kernel = front.pop()
        own = group.axes[kernel]
        if kernel.scans or any(isinstance(x, l.Index) and not x.free.isdisjoint(own) for x in kernel.terms):
            return None
        for x in kernel.terms:
            if not isinstance(x, l.Load):
                continue
            if any(isinstance(e, Expr) and not e.free.isdisjoint(own) for e in x.inside):
                return None
            if (place := _place(x.index, own, along)) is None:
                return None
            read.setdefault(x.buffer, set()).add(place)
            maker = uses.maker.get(x.buffer)
            if not place[0] or maker in group.axes or not uses.joins(maker):
                continue
            stores = [s for s in maker.stores if s.buffer is x.buffer]  # type: ignore[union-attr]
            theirs = _axes(stores[0].index, place, x.buffer, along, maker.axes)  # type: ignore[union-attr]
            if len(stores) > 1 or theirs is None:
                continue
            joined = {maker: theirs}
            for b in maker.writes:  # type: ignore[union-attr]
                for other in uses.readers.get(b, ()):
                    if other in group.axes or other in joined:
                        continue
                    loads = [y for y in other.terms if isinstance(y, l.Load) and y.buffer is b]  # type: ignore[union-attr]
                    theirs = _axes(loads[0].index, place, b, along, other.axes)  # type: ignore[union-attr]
                    if theirs is None:
                        break
                    joined[other] = theirs
                else:
                    continue
                break
            else:
                group.axes |= joined  # type: ignore[arg-type]
                front += joined  # type: ignore[arg-type]
    return group if _stores(uses, group, read, along) else None


def _place(index: Sequence[IntExpr], own: Mapping[Any, IntExpr], along: Var) -> Place | None:
    """Where an index knows the axis, by what axes are of that; None if other axes are with it there."""
    known = [(d, substitute(e, own)) for d, e in enumerate(index) if isinstance(e, Expr)]
    found = [(d, e) for d, e in known if isinstance(e, Expr) and mentions(e, along)]
    if any(e.free != {along} for _, e in found):
        return None
    return tuple(d for d, _ in found), tuple(e for _, e in found)


def _axes(
    index: Sequence[IntExpr], place: Place, b: l.Buffer, along: Var, own: Sequence[Var]
) -> dict[Any, IntExpr] | None:
    """What axes of a kernel are that loads or stores at an index, so that it does so at a place; None if that cannot be
    said, or is less than all of it.
    """
    dims, exprs = place
    at = [index[d] for d in dims]
    extents = [b.type.shape[d] for d in dims]
    if math.prod(extents) != along.extent:
        return None
    if all(isinstance(e, Var) and e in own and e.extent == n for e, n in zip(at, extents, strict=True)):
        return dict(zip(at, exprs, strict=True)) if len({*at}) == len(at) else None
    for v in own:
        if v.extent == along.extent and [substitute(e, {along: v}) for e in exprs] == at:
            return {v: along}
    return None


def _stores(uses: _Uses, group: _Group, read: Mapping[l.Buffer, set[Place]], along: Var) -> bool:
    """Note what a group stores; whether all of it may be stored in windows."""
    for kernel, own in group.axes.items():
        for s in kernel.stores:
            place = _place(s.index, own, along)
            if place is None or not place[0] or s.buffer in group.inner or s.buffer in group.outer:
                return False
            readers = uses.readers.get(s.buffer, ())
            if readers and s.buffer not in uses.kept and all(r in group.axes for r in readers):
                if read[s.buffer] != {place}:
                    return False
                group.inner[s.buffer] = place
            elif place[1] == (along,) and s.buffer not in read:
                group.outer[s.buffer] = place[0][0]
            else:
                return False
    first, last = (f(uses.place[k] for k in group.axes) for f in (min, max))
    made = {b for k in group.axes for b in k.writes}
    between = (s for s, n in uses.place.items() if first < n < last and s not in group.axes)
    return all(made.isdisjoint(s.reads) for s in between)


@dataclass(frozen=True)
class _Done:
    """A program of which a group runs in windows: the steps that are gone and those that are there instead, and the
    most bytes that are in use during these.
    """

    program: l.Program
    group: _Group
    count: int
    gone: Steps
    come: Steps
    least: int


def _counted(program: l.Program, group: _Group, peak: int) -> Iterator[_Done]:
    """The program with a group in more and more windows, as long as that saves memory where most is in use."""
    least, count = max(in_use(program.steps, program.results)), 2
    saved, at = SAVED * least, program.steps[peak]
    while count <= MOST:
        size = -(-group.extent // count)
        size = -(-size // ROWS) * ROWS if size >= ROWS else size
        if size < group.extent and (size >= ROWS or group.extent % count == 0):
            if (done := _Windows(program, group, size).program()) is None:
                return
            old, new = set(program.steps), set(done.steps)
            gone, come = ([s for s in x.steps if s not in y] for x, y in ((program, new), (done, old)))
            if not _called(done) <= _called(program):  # a piece in pieces is none that is written where the whole is
                return
            there = {*come, at}
            used = in_use(done.steps, done.results)
            now = max(n for s, n in zip(done.steps, used, strict=True) if s in there)
            if least - now < saved:
                return
            least = now
            yield _Done(done, group, -(-group.extent // size), gone, come, now)
        count *= 2


def _called(program: l.Program) -> set[l.Call]:
    """The calls that PyTorch runs."""
    return {s for s in program.steps if isinstance(s, l.Call)} - regions(program.steps, program.results).calls


class _Windows:
    """A program on its way, of which a group of kernels runs in windows of a size."""

    def __init__(self, program: l.Program, group: _Group, size: int) -> None:
        self.whole, self.group, self.size = program, group, size
        self.names = {b.name for b in (*program.inputs, *(b for s in program.steps for b in s.writes))}
        self.kernels = {s.name for s in program.steps}
        self.steps: list[l.Kernel | l.Call] = []
        self.made: dict[Any, l.Buffer] = {}

    def program(self) -> l.Program | None:
        """The program; None where memory is not as it would have to be."""
        steps = self.whole.steps
        mine = [s for s in steps if s in self.group.axes]
        pieces: dict[l.Buffer, list[l.Buffer]] = {b: [] for b in self.group.outer}
        for start in range(0, self.group.extent, self.size):
            self.made = {}
            for s in mine:
                new = self.window(s, start, min(self.size, self.group.extent - start))
                if new is None:
                    return None
                self.steps.append(new)
            for b, found in pieces.items():
                found.append(self.made[b])
        for b, d in self.group.outer.items():
            if int(b.type.element_strides[d]) * self.size * b.type.dtype.size % ALIGNED:  # type: ignore[arg-type]
                return None
            self.steps.append(l.Call(WHOLE, (tuple(pieces[b]), d), (), (b,), 0, self.whole_source(b)))
        last = max(n for n, s in enumerate(steps) if s in self.group.axes)
        before, after = ([s for s in x if s not in self.group.axes] for x in (steps[:last], steps[last + 1 :]))
        return l.Program(self.whole.name, self.whole.inputs, (*before, *self.steps, *after), self.whole.results)

    def whole_source(self, b: l.Buffer) -> str:
        """The line of the user's program that a buffer is of."""
        return next(s.source for s in self.whole.steps if b in s.writes)

    def window(self, kernel: l.Kernel, start: int, size: int) -> l.Kernel | None:
        """A kernel in one window."""
        own = self.group.axes[kernel]
        axis = next(a for a in kernel.axes if a in own)
        mine = Var(axis.name, size)
        along = next(iter(next(e for e in own.values() if isinstance(e, Expr)).free))
        at = {a: substitute(e, {along: mine + start}) for a, e in own.items()}
        new: dict[Any, Any] = {}
        for x in kernel.terms:
            if isinstance(x, l.Load) and not x.free.isdisjoint(own):
                if (there := self.place(x.buffer, x.index, at, mine, kernel.source)) is None:
                    return None
                new[x] = l.Load(there[0], there[1], x.inside)
        stores = []
        for s in kernel.stores:
            if (there := self.place(s.buffer, s.index, at, mine, kernel.source)) is None:
                return None
            stores.append(l.Store(there[0], there[1], substitute(s.value, new | at)))
        axes = tuple(dict.fromkeys(mine if a in own else a for a in kernel.axes))
        return l.Kernel(_fresh(kernel.name, self.kernels), axes, tuple(stores), kernel.source)

    def place(
        self, b: l.Buffer, index: tuple[IntExpr, ...], own: Mapping[Any, IntExpr], mine: Var, source: str
    ) -> tuple[l.Buffer, tuple[IntExpr, ...]] | None:
        """The window of a buffer that an index goes through with an axis, and the index there."""
        shape, starts, there = list(b.type.static_shape), [0] * b.type.rank, list(index)
        for d, e in enumerate(index):
            if not isinstance(e, Expr) or e.free.isdisjoint(own):
                continue
            at = substitute(e, own)
            start = substitute(at, {mine: 0}) if isinstance(at, Expr) else at
            there[d] = at - start
            high = bounds(there[d])[1]
            if not isinstance(start, int) or high is None:
                return None
            starts[d], shape[d] = start, high + 1
        if b in self.group.inner:
            key: Any = b
            kind = _shrunk(b.type, shape)
        else:
            key = b if b in self.group.outer else (b, tuple(starts), tuple(shape))
            kind = Type(b.type.dtype, tuple(shape), b.type.element_strides)
            kind = plain if kind.element_strides == (plain := Type(kind.dtype, kind.shape)).element_strides else kind
        if key not in self.made:
            self.made[key] = made = l.Buffer(_fresh(b.name, self.names), kind)
            if b not in self.group.inner and b not in self.group.outer:
                strides = tuple(int(s) for s in b.type.element_strides)  # type: ignore[arg-type]
                offset = sum(n * s for n, s in zip(starts, strides, strict=True))
                if offset * b.type.dtype.size % ALIGNED:
                    return None
                self.steps.append(l.Call(WINDOW, (l.View(b, tuple(shape), strides, offset),), (), (made,), 0, source))
        return self.made[key], tuple(there)


def _fresh(name: str, names: set[str]) -> str:
    """A name that nothing has."""
    found = unused(f"{name}_w", names)
    names.add(found)
    return found


def _shrunk(kind: Type, shape: Sequence[int]) -> Type:
    """The type of a window that lies by itself: its dimensions come in the same order."""
    if kind.strides is None:
        return Type(kind.dtype, tuple(shape))
    order = sorted(range(kind.rank), key=lambda d: -int(kind.strides[d] or 1 << 62))  # type: ignore[arg-type, index]
    return Type(kind.dtype, tuple(shape), ordered_strides(shape, order, 16 // kind.dtype.size))
