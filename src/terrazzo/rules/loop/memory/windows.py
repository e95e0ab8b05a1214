"""Kernels in windows of an axis: some go along it, others make what a window of those reads."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from terrazzo.collector import remembered
from terrazzo.ir.address import coefficient
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr, Var, bounds
from terrazzo.ir.node import per_node, substitute
from terrazzo.ir.regions import ALIGNED, LINE, WHOLE, WINDOW
from terrazzo.ir.types import Type, ordered_strides
from terrazzo.rules.loop.definitions import unused

Range = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a window begins in each dimension, and how large it is."""
Places = frozenset[tuple[Any, IntExpr]]
"""What axes are in a window."""


@dataclass(frozen=True)
class Group:
    """Kernels that run in windows of their axes, which are equally long, or some of them so many times as long, as the
    axis of all heads is where others have images around it; and those that make what a window of these reads, which is
    read by nobody else.
    """

    readers: Mapping[l.Kernel, Var]
    makers: Collection[l.Kernel]

    @property
    def kernels(self) -> tuple[l.Kernel, ...]:
        """All of them."""
        return (*self.readers, *self.makers)

    @property
    def extent(self) -> int:
        """How long the shortest of the axes is: sizes of windows are those there."""
        return min(a.extent for a in self.readers.values())  # type: ignore[type-var, return-value]


def in_ranges(kernel: l.Kernel, along: Set[Any]) -> bool:
    """Whether ranges along some axes of what a kernel stores can be computed by themselves, by a kernel that is the
    same for all: the place of each of its stores is made of them, and of others of its axes.
    """
    if kernel.scans or not _free_of(kernel, along):
        return False
    for s in kernel.stores:
        places = [_digits(e, n) for e, n in zip(s.index, s.buffer.type.shape, strict=True)]
        axes = [a for p in places for a in p or ()]
        if None in places or len({*axes}) < len(axes) or not along <= {*axes}:
            return False
    return True


@lru_cache(maxsize=1 << 16)
def _digits(e: IntExpr, size: IntExpr) -> tuple[Var, ...] | None:
    """The axes, outermost first, that an index is made of and which together go through all of so many places in order;
    None where there are none such.
    """
    axes = {a: coefficient(e, a) for a in (e.free if isinstance(e, Expr) else ()) if isinstance(a, Var)}
    order = sorted(axes, key=lambda a: -c if isinstance(c := axes[a], int) else 0)
    whole: IntExpr = 0
    step: Any = 1
    for a in reversed(order):
        whole, step = whole + a * step, step * a.extent
    return tuple(order) if e == whole and step == size else None


def _axes_in(e: IntExpr, start: int, size: int) -> dict[Any, IntExpr] | None:
    """What axes are where an index made of them goes through a range; None where that is no range of one of them."""
    found: dict[Any, IntExpr] = {}
    order: Any = _digits(e, bounds(e)[1] + 1 if isinstance(e, Expr) else 1)  # type: ignore[operator]
    for k, a in enumerate(order or ()):
        inner = math.prod(x.extent for x in order[k + 1 :])
        if start % inner == 0 and size % inner == 0:
            return found if size == a.extent * inner else found | {a: _part(a, size // inner, start // inner)}
        if start // inner != (start + size - 1) // inner:
            return None
        found[a], start = start // inner, start % inner
    return found


def _part(axis: Var, size: int, start: int) -> IntExpr:
    """So many places of an axis, from one on; a place alone is a number, beside which others may be digits."""
    return Var(axis.name, size) + start if size > 1 else start


@lru_cache(maxsize=1 << 16)
def windowed(x: l.Load, axes: Set[Any], maker: l.Kernel) -> frozenset[Any]:
    """The axes of what a kernel stores of which a load reads windows that go along some axes of its own: of several
    that one index is made of, the outermost.
    """
    index = next(s.index for s in maker.stores if s.buffer is x.buffer)
    pairs = zip(x.index, index, x.buffer.type.shape, strict=True)
    known = (_digits(f, n) or () for e, f, n in pairs if isinstance(e, Expr) and not e.free.isdisjoint(axes))
    return frozenset(a for places in known for a in [x for x in places if x.extent != 1][:1])


def along_axis(kernel: l.Kernel, axis: Var) -> bool:
    """Whether a kernel can run in windows of an axis, all of which are the same kernel."""
    stored = all(any(isinstance(e, Expr) and axis in e.free for e in s.index) for s in kernel.stores)
    return not kernel.scans and stored and _free_of(kernel, {axis})


def _free_of(kernel: l.Kernel, axes: Set[Any]) -> bool:
    """Whether no number is made of axes themselves, nor a guard: these would be others in every window."""
    for x in kernel.terms:
        if isinstance(x, l.Index) and not axes.isdisjoint(x.free):
            return False
        if isinstance(x, l.Load) and any(isinstance(e, Expr) and not axes.isdisjoint(e.free) for e in x.inside):
            return False
    return True


def _read(kernel: l.Kernel, at: Mapping[Any, IntExpr], wanted: Collection[l.Buffer]) -> dict[l.Load, Range] | None:
    """Where loads of what is wanted go through windows, with what axes are there; one window for those that overlap.
    None if that cannot be said.
    """
    found: dict[l.Load, Range] = {}
    for b, mine in _read_of_each(kernel, frozenset(at.items())):
        if b in wanted:
            if mine is None:
                return None
            found |= mine
    return {x: found[x] for x in loads_of(kernel) if x in found}


@remembered
def _read_of_each(kernel: l.Kernel, places: Places) -> tuple[tuple[l.Buffer, dict[l.Load, Range] | None], ...]:
    """The same of each buffer that is read in windows."""
    at = dict(places)
    parts: dict[l.Buffer, dict[l.Load, Range | None]] = {}
    for x in loads_of(kernel):
        if not x.free.isdisjoint(at):
            parts.setdefault(x.buffer, {})[x] = ranged(x.index, at, x.buffer.type)
    return tuple((b, _overlapping(mine)) for b, mine in parts.items())


@per_node
def loads_of(kernel: l.Kernel) -> tuple[l.Load, ...]:
    """All that a kernel loads."""
    return tuple(x for x in kernel.terms if isinstance(x, l.Load))


def _overlapping(parts: Mapping[l.Load, Range | None]) -> dict[l.Load, Range] | None:
    """Parts of a buffer, those that overlap as one; None where one of them is none."""
    known: dict[Range, Range] = {}
    for part in parts.values():
        if part is None:
            return None
        if part in known:
            continue
        whole = part
        for other in {*known.values()}:
            whole = _together(whole, other) or whole
        known[part] = whole
        known.update({p: whole for p, other in known.items() if _together(whole, other) == whole})
    return {x: known[part] for x, part in parts.items() if part}


def _together(one: Range, other: Range) -> Range | None:
    """What two ranges are together, if they overlap."""
    ends = [[a + n for a, n in zip(*x, strict=True)] for x in (one, other)]
    if any(min(e) <= max(a) for a, e in zip(zip(one[0], other[0], strict=True), zip(*ends, strict=True), strict=True)):
        return None
    low = tuple(map(min, one[0], other[0]))
    return low, tuple(max(e) - a for a, e in zip(low, zip(*ends, strict=True), strict=True))


class Reading:
    """What windows of some kernels read of what others make: where the axes of those go in the first and in the last
    of so many equal windows. More kernels may come to `readers`; what was found of the others stays.
    """

    def __init__(self, readers: Mapping[l.Kernel, Var], makers: Collection[l.Kernel]) -> None:
        self.readers = readers
        self.made = {b: k for k in makers for b in k.writes}
        self.known, self.lengths = 0, set[Any]()
        self.reading: dict[l.Kernel, list[tuple[l.Kernel, Var]]] = {}
        self.read: dict[tuple[l.Kernel, int], tuple[int, set[Any]]] = {}
        self.needed: dict[int, tuple[int, dict[l.Kernel, set[tuple[int, Places | None]]]]] = {}

    def _come(self) -> None:
        """Note what those read, and along which axes, who came since this was asked."""
        if self.known == len(self.readers):
            return
        for k, axis in islice(self.readers.items(), self.known, None):
            self.lengths.add(axis.extent)
            for maker in dict.fromkeys(self.made[b] for b in k.reads if b in self.made):
                self.reading.setdefault(maker, []).append((k, axis))
        self.known = len(self.readers)

    @property
    def extents(self) -> set[Any]:
        """How long their axes are."""
        self._come()
        return self.lengths

    def themselves(self, maker: l.Kernel, count: int) -> Set[Any]:
        """What they read themselves of what one makes."""
        self._come()
        known, found = self.read.get((maker, count), (0, set()))
        mine = self.reading.get(maker, [])
        for k, axis in mine[known:]:
            found |= windows_read(k, axis, maker, count)
        self.read[maker, count] = len(mine), found
        return found

    def through_others(self, maker: l.Kernel, count: int) -> Set[Any]:
        """What they and others read, which make what the windows of these read."""
        known, found = self.needed.get(count, (0, {}))
        if known < len(self.readers):
            _windows_needed(islice(self.readers.items(), known, None), self.made, count, found)
            self.needed[count] = len(self.readers), found
        return found.get(maker, frozenset())


@remembered
def windows_read(kernel: l.Kernel, axis: Var, maker: l.Kernel, count: int) -> frozenset[Any]:
    """What the first and the last of so many equal windows read of what another kernel makes: where its axes go."""
    found: dict[l.Kernel, set[tuple[int, Places | None]]] = {}
    _windows_needed([(kernel, axis)], dict.fromkeys(maker.writes, maker), count, found)
    return frozenset(found.get(maker, ()))


def _windows_needed(
    readers: Iterable[tuple[l.Kernel, Var]],
    made: Mapping[l.Buffer, l.Kernel],
    count: int,
    found: dict[l.Kernel, set[tuple[int, Places | None]]],
) -> None:
    """The same for each of those that `made` what readers read, or what others of them read for that: more is found."""
    for kernel, axis in readers:
        size: Any = axis.extent // count
        for number in (0, count - 1):
            front = [(kernel, frozenset([(axis, _part(axis, size, number * size))]))]
            while front:
                read = [(b, parts) for b, parts in _read_of_each(*front.pop()) if b in made]
                for b, parts in read if all(parts is not None for _, parts in read) else ():
                    mine = found.setdefault(made[b], set())
                    for part in {*parts.values()}:  # type: ignore[union-attr]
                        place = _places_at(made[b], b, part)
                        if (number, place) not in mine:
                            mine.add((number, place))
                            if place:
                                front.append((made[b], place))


@remembered
def _places_at(maker: l.Kernel, b: l.Buffer, part: Range) -> Places | None:
    """What `_axes_at` says, found once."""
    there = _axes_at(maker, b, part)
    return None if there is None else frozenset(there.items())


def _axes_at(maker: l.Kernel, b: l.Buffer, part: Range) -> dict[Any, IntExpr] | None:
    """Where the axes of a kernel are when it stores a part of a buffer; None if that cannot be said."""
    index = next(s.index for s in maker.stores if s.buffer is b)
    each = [_axes_in(*x) for x in zip(index, *part, strict=True)]
    return None if None in each else {a: e for x in each for a, e in (x or {}).items()}


def ranged(index: Sequence[IntExpr], at: Mapping[Any, IntExpr], kind: Type) -> Range | None:
    """Which part of a buffer an index goes through, with what axes are there; None if that cannot be said. What is
    beyond the buffer is read under a guard alone, so nothing there is of the part.
    """
    starts, shape = [], []
    for e, n in zip(index, kind.static_shape, strict=True):
        if not isinstance(e, Expr) or e.free.isdisjoint(at):
            starts.append(0)
            shape.append(n)
            continue
        there = substitute(e, at)
        low = substitute(there, dict.fromkeys(there.free, 0)) if isinstance(there, Expr) else there
        least, most = bounds(there - low) if isinstance(low, int) else (None, None)
        if not isinstance(low, int) or least is None or least < 0 or most is None:
            return None
        start, end = max(low, 0), min(low + most + 1, n)
        if start >= end:
            return None
        starts.append(start)
        shape.append(end - start)
    return tuple(starts), tuple(shape)


class Windows:
    """A program on its way, of which a group of kernels runs in windows of a size."""

    def __init__(self, program: l.Program, group: Group, size: int) -> None:
        self.whole, self.group, self.size = program, group, size
        self.names = {b.name for b in (*program.inputs, *(b for s in program.steps for b in s.writes))}
        self.kernels = {s.name for s in program.steps}
        self.maker = {b: k for k in group.makers for b in k.writes}
        self.old = {b for s in program.steps if isinstance(s, l.Kernel) for b in s.over.values()}
        self.steps: list[l.Kernel | l.Call] = []
        self.begun = 0
        self.made: dict[Any, l.Buffer] = {}

    def program(self) -> l.Program | None:
        """The program; None where memory is not as it would have to be."""
        mine = [s for s in self.whole.steps if isinstance(s, l.Kernel) and s in self.group.readers]
        pieces: dict[l.Store, list[tuple[l.Buffer, Range]]] = {s: [] for k in mine for s in k.stores}
        for start in range(0, self.group.extent, self.size):
            self.made, self.begun = {}, len(self.steps)
            for kernel in mine:
                axis = self.group.readers[kernel]
                times: Any = axis.extent // self.group.extent
                size = times * min(self.size, self.group.extent - start)
                at = {axis: _part(axis, size, times * start)}
                stored = {s: x for s in kernel.stores if (x := self.piece(s, at)) is not None}
                if len(stored) < len(kernel.stores) or not self.put(kernel, at, stored):
                    return None
                for s, x in stored.items():
                    pieces[s].append(x)
        for s, found in pieces.items():
            shape = s.buffer.type.static_shape
            (d, *others) = [d for d, n in enumerate(shape) if any(part[1][d] != n for _, part in found)] or [0]
            ends = [at[d] + n[d] for _, (at, n) in found]
            if others or [at[d] for _, (at, n) in found] != [0, *ends[:-1]] or ends[-1] != shape[d]:
                return None
            source = next(x.source for x in mine if s in x.stores)
            self.steps.append(l.Call(WHOLE, (tuple(b for b, _ in found), d), (), (s.buffer,), 0, source))
        steps, gone = self.whole.steps, set(self.group.kernels)
        last = max(n for n, s in enumerate(steps) if s in gone)
        before, after = ([s for s in x if s not in gone] for x in (steps[:last], steps[last + 1 :]))
        return l.Program(self.whole.name, self.whole.inputs, (*before, *self.steps, *after), self.whole.results)

    def piece(self, s: l.Store, at: Mapping[Any, IntExpr]) -> tuple[l.Buffer, Range] | None:
        """What a window of a store writes, and where that is in the whole."""
        if (part := ranged(s.index, at, s.buffer.type)) is None:
            return None
        kind = Type(s.buffer.type.dtype, part[1], s.buffer.type.element_strides)
        if _begins(kind, part[0]) % LINE:
            return None
        return l.Buffer(_fresh(s.buffer.name, self.names), _plain(kind)), part

    def put(
        self, kernel: l.Kernel, at: Mapping[Any, IntExpr], stored: Mapping[l.Store, tuple[l.Buffer, Range]]
    ) -> bool:
        """Have a kernel with axes that are `at` something else, after what it reads; it stores so. False if it cannot
        be.
        """
        new: dict[Any, Any] = dict(at)
        if (read := _read(kernel, at, kernel.reads)) is None:
            return False
        if any(isinstance(x, l.Load) and x.buffer in self.maker and x not in read for x in kernel.terms):
            return False  # what is there in windows only would be read whole
        for x, part in read.items():
            if (b := self.window(x.buffer, part, kernel.source)) is None:
                return False
            new[x] = l.Load(b, _moved(x.index, at, part), x.inside)
        stores = [l.Store(b, _moved(s.index, at, part), substitute(s.value, new)) for s, (b, part) in stored.items()]
        own = {a: next(iter(e.free)) for a, e in at.items() if isinstance(e, Expr)}
        axes = tuple(own.get(a, a) for a in kernel.axes if a in own or a not in at)
        self.add(l.Kernel(_fresh(kernel.name, self.kernels), axes, tuple(stores), kernel.source))
        return True

    def add(self, new: l.Kernel) -> None:
        """One more kernel in this window; or an earlier one does what it does too, where neither sums anything."""
        for n, s in enumerate(self.steps[self.begun :], self.begun):
            if not isinstance(s, l.Kernel) or s.carried or new.carried or not _apart(s, new):
                continue
            if {b for x in self.steps[n + 1 :] for b in x.reads}.isdisjoint(s.writes):
                del self.steps[n]  # it comes after the windows that both read
                self.kernels.discard(new.name)
                axes = dict(zip(new.axes, s.axes, strict=True))
                stores = (*s.stores, *(substitute(x, axes) for x in new.stores))
                new = l.Kernel(s.name, s.axes, stores, s.source)
                break
        self.steps.append(new)

    def window(self, b: l.Buffer, part: Range, source: str) -> l.Buffer | None:
        """A part of a buffer: made for this window, or a view of what others made; the buffer where it is all of it."""
        if (b, part) in self.made:
            return self.made[b, part]
        starts, shape = part
        if (maker := self.maker.get(b)) is not None:
            at = _axes_at(maker, b, part)
            parts = {s: ranged(s.index, at, s.buffer.type) for s in maker.stores} if at is not None else {}
            if (
                at is None
                or parts[next(s for s in maker.stores if s.buffer is b)] != part
                or not _free_of(maker, {*at})
            ):
                return None
            stored: dict[l.Store, tuple[l.Buffer, Range]] = {}
            for s, there in parts.items():
                if there is None:
                    return None
                stored[s] = l.Buffer(_fresh(s.buffer.name, self.names), _shrunk(s.buffer.type, there[1])), there
            if not self.put(maker, at, stored):
                return None
            self.made |= {(s.buffer, there): new for s, (new, there) in stored.items()}
        elif shape == b.type.shape:
            self.made[b, part] = b
        else:
            strides = tuple(int(s) for s in b.type.element_strides)  # type: ignore[arg-type]
            offset = sum(n * s for n, s in zip(starts, strides, strict=True))
            if b in self.old:  # what lies over an input comes after all who read that, by its name
                return None
            if offset * b.type.dtype.size % (ALIGNED if b in self.whole.inputs else LINE):
                return None  # nobody writes to lines of other inputs
            made = l.Buffer(_fresh(b.name, self.names), _plain(Type(b.type.dtype, shape, strides)))
            self.steps.append(l.Call(WINDOW, (l.View(b, shape, strides, offset),), (), (made,), 0, source))
            self.made[b, part] = made
        return self.made[b, part]


def _begins(kind: Type, starts: Sequence[int]) -> int:
    """The byte at which a part of what is strided so begins."""
    strides: list[int] = [int(s) for s in kind.element_strides]  # type: ignore[arg-type]
    return kind.dtype.size * sum(n * s for n, s in zip(starts, strides, strict=True))


def _moved(index: Sequence[IntExpr], at: Mapping[Any, IntExpr], part: Range) -> tuple[IntExpr, ...]:
    """An index in the part of a buffer that it goes through."""
    there = (substitute(e, at) if isinstance(e, Expr) else e for e in index)
    return tuple(e - start for e, start in zip(there, part[0], strict=True))


def _apart(one: l.Kernel, other: l.Kernel) -> bool:
    """Whether two kernels have the same loops, and neither needs the other."""
    alike = [a.extent for a in one.axes] == [a.extent for a in other.axes]
    return alike and {*one.writes}.isdisjoint(other.reads) and {*other.writes}.isdisjoint(one.reads)


def _fresh(name: str, names: set[str]) -> str:
    """A name that nothing has."""
    found = unused(f"{name}_w", names)
    names.add(found)
    return found


def _plain(kind: Type) -> Type:
    """The type without strides that say nothing."""
    plain = Type(kind.dtype, kind.shape)
    return plain if plain.element_strides == kind.element_strides else kind


def _shrunk(kind: Type, shape: Sequence[int]) -> Type:
    """The type of a window that lies by itself: its dimensions come in the same order."""
    if kind.strides is None:
        return Type(kind.dtype, tuple(shape))
    order = sorted(range(kind.rank), key=lambda d: -int(kind.strides[d] or 1 << 62))  # type: ignore[arg-type, index]
    return Type(kind.dtype, tuple(shape), ordered_strides(shape, order, 16 // kind.dtype.size))
