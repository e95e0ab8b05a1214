"""Where temporaries lie: in an arena, or in the memory of results that are written later."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

import numpy as np

from terrazzo.ir.dialects import kernel
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.regions import LINE, Piece
from terrazzo.run.branches import Place, clocks

T = TypeVar("T")
ALIGN = LINE
MOST = 4000
"""Temporaries of which there may be more than one try at where they lie."""
WORTH = 1 << 20
"""Bytes of temporaries from which on it is worth looking for room in results, and for better places."""
MANY, TRIES, STEPS = 1000, 128, 25000
"""Temporaries up to which better places are looked for; how many orders are tried at most, and how many temporaries are
placed for it in all.
"""
TIGHT = 0.01
"""The part of what is in use at a time that may lie idle: no better places are looked for then."""
Found = tuple[dict[l.Buffer, int], int]
"""Offsets of temporaries, and the total."""


Root = Mapping[l.Buffer, l.Buffer]
"""Buffers that lie in the memory of others, with the one whose place that is."""
ALONE: Root = {}
Pieces = Mapping[l.Buffer, Sequence[Piece]]
"""Buffers of which some parts are in use when others are not."""
WHOLE: Pieces = {}


class Lives:
    """When the buffers of a program are in use: from the first to the last step that mentions them, or what lies in
    the memory of their `root`, by branches; and when their `pieces` are, where steps run one after the other.
    """

    def __init__(
        self,
        program: l.Program | kernel.Program,
        places: Sequence[Place] = (),
        root: Root = ALONE,
        pieces: Pieces = WHOLE,
    ) -> None:
        self.apart = pieces
        places = places or [Place()] * len(program.steps)
        count = 1 + max((p.branch for p in places), default=0)
        self.first: dict[l.Buffer, int] = {}
        self.last: dict[l.Buffer, int] = {}
        self.number: dict[l.Buffer, int] = {}
        ends: list[list[int]] = []  # the last steps of every buffer, by branches
        for k, step in enumerate(program.steps):
            for b in (root.get(b, b) for b in (*step.reads, *step.writes)):
                if b not in self.first:
                    self.first[b], self.number[b] = k, len(ends)
                    ends.append([-1] * count)
                self.last[b] = ends[self.number[b]][places[k].branch] = k
        through = clocks(places)
        begins = [through[k] for k in self.first.values()]
        self.ends, self.begins = (np.array(x, dtype=np.int64).reshape(-1, count) for x in (ends, begins))

    def pieces(self, b: l.Buffer) -> Sequence[Piece]:
        """The pieces of a buffer by when they are in use, with what is behind it up to where something else begins."""
        return self.apart.get(b) or [Piece(0, padded(b.type.span), self.first[b], self.last[b])]

    def later(self, b: l.Buffer, numbers: Sequence[int]) -> list[int]:
        """Which of the buffers with these numbers come when all that uses one is through, by their places."""
        found: list[int] = np.flatnonzero((self.ends[self.number[b]] <= self.begins[numbers]).all(axis=1)).tolist()
        return found

    def beside(self, b: l.Buffer, numbers: Sequence[int]) -> list[int]:
        """Which of the buffers with these numbers may not share memory with one, by their places."""
        own = self.number[b]
        ends, begins = self.ends[numbers], self.begins[numbers]
        apart = (ends <= self.begins[own]).all(axis=1) | (self.ends[own] <= begins).all(axis=1)
        found: list[int] = np.flatnonzero(~apart).tolist()
        return found

    def meeting(self, items: Sequence[l.Buffer]) -> Callable[[int], list[int]]:
        """Which of the items before one, by number, may not share memory with it."""
        them = [self.number[b] for b in items]
        ends, begins = self.ends[them], self.begins[them]

        def found(n: int) -> list[int]:
            apart = (ends[:n] <= begins[n]).all(axis=1) | (ends[n] <= begins[:n]).all(axis=1)
            numbers: list[int] = np.flatnonzero(~apart).tolist()
            return numbers

        return found


def allocate(
    program: l.Program | kernel.Program,
    buffers: Sequence[l.Buffer],
    places: Sequence[Place] = (),
    root: Root = ALONE,
    pieces: Pieces = WHOLE,
) -> Found:
    """Offsets for temporaries such that what is in use at the same time does not overlap; and the total. They are
    placed one after the other where there is room first: as they come, the large ones first, those that live long,
    those that are in use when most is, or in pieces; whichever takes least. They are `repacked` where that is more than
    is in use at a time.
    """
    lives = Lives(program, places, root, pieces)
    order, found = _in_order(buffers, lives, places)
    if found[1] < WORTH or len(order) > MANY or any(p.branch for p in places):
        return found
    least = max(_used(order, lives).values(), default=0)
    return repacked(order, lives.pieces, lives.meeting(order), least) if _loose(found[1], least) else found


def _loose(size: int, least: int) -> bool:
    """Whether more of an arena lies idle than it is worth to look for other places."""
    return size > least * (1 + TIGHT)


def _in_order(buffers: Collection[l.Buffer], lives: Lives, places: Sequence[Place]) -> tuple[list[l.Buffer], Found]:
    """Of some orders of temporaries the one in which they take least, and where they lie then."""
    wanted = set(buffers)
    given = [b for b in lives.first if b in wanted]
    longest = sorted(given, key=lambda b: (lives.first[b] - lives.last[b], -b.type.span))
    large = sorted(given, key=lambda b: -b.type.span)
    cut = [sorted(large, key=lambda b: b not in lives.apart)] if lives.apart else []
    orders = [given, large, longest, _highest_first(large, lives), *cut]
    many = len(given) > MOST or any(p.branch for p in places)  # of what runs side by side, most shares nothing
    tried = ((order, placed(order, lives.pieces, lives.meeting(order))) for order in orders[: 1 if many else None])
    return min(tried, key=lambda x: x[1][1])


def _highest_first(items: Sequence[l.Buffer], lives: Lives) -> list[l.Buffer]:
    """Items in this order, but those first that are in use in the step where most is."""
    used = _used(items, lives)
    peak = max(used, key=used.__getitem__, default=0)
    return sorted(items, key=lambda b: not any(p.first <= peak <= p.last for p in lives.pieces(b)))


def _used(items: Sequence[l.Buffer], lives: Lives) -> dict[int, int]:
    """How many bytes of items are in use from a step on, for those in which that changes."""
    change: dict[int, int] = {}
    for p in (p for b in items for p in lives.pieces(b)):
        change[p.first] = change.get(p.first, 0) + p.end - p.start
        change[p.last + 1] = change.get(p.last + 1, 0) - (p.end - p.start)
    steps = sorted(change)
    return dict(zip(steps, accumulate(change[k] for k in steps), strict=True))


def placed(
    items: Sequence[T], pieces: Callable[[T], Sequence[Piece]], meeting: Callable[[int], Sequence[int]]
) -> tuple[dict[T, int], int]:
    """Where items lie, placed in this order, and the total. `meeting` says which of those placed before the one of a
    number are in use beside it, by their numbers: it shares no memory with the pieces of them that are.
    """
    each = [pieces(b) for b in items]
    offsets: dict[T, int] = {}
    for n, b in enumerate(items):
        barred = ((offsets[items[m]], between) for m in meeting(n) for between in _barred(each[n], each[m]))
        offsets[b] = _first_free((start + low, start + high) for start, (low, high) in barred)
    return offsets, max((offsets[b] + one[-1].end for b, one in zip(items, each, strict=True)), default=0)


def repacked(
    items: Sequence[T], pieces: Callable[[T], Sequence[Piece]], meeting: Callable[[int], Sequence[int]], least: int
) -> tuple[dict[T, int], int]:
    """The same after some were placed sooner, as long as they take more than is in use at a time, the `least` there
    can be. Only those matter on which what ends last stands, one on another: two of them change places in the order,
    or one comes before another, and that is kept where it takes no more.
    """
    each = [pieces(b) for b in items]
    sizes = [x[-1].end for x in each]
    barred: list[dict[int, list[tuple[int, int]]]] = [{} for _ in items]  # who else is in use, and what that bars
    for n in range(len(items)):
        for m in meeting(n):
            if between := list(_barred(each[n], each[m])):
                barred[n][m], barred[m][n] = between, [(-high, -low) for low, high in between]

    def place(order: Sequence[int]) -> tuple[int, dict[int, int]]:
        at: dict[int, int] = {}
        for n in order:
            there = ((m, between) for m, between in barred[n].items() if m in at)
            at[n] = _first_free((at[m] + low, at[m] + high) for m, between in there for low, high in between)
        return max((at[n] + sizes[n] for n in order), default=0), at

    def below(at: Mapping[int, int], end: int, number: Mapping[int, int]) -> tuple[list[int], list[int]]:
        """What ends last, and that with what it stands on."""
        last = [n for n in number if at[n] + sizes[n] == end]
        found = dict.fromkeys(last)
        front = list(last)
        while front:
            n = front.pop()
            mine = ((m, x) for m, x in barred[n].items() if m not in found and number[m] < number[n])
            new = [m for m, between in mine if any(at[m] + high == at[n] for _, high in between)]
            found |= dict.fromkeys(new)
            front += new
        return last, list(found)

    chance = random.Random(0)
    order = list(range(len(items)))
    best = end, at = place(order)
    for _ in range(min(TRIES, STEPS // max(len(items), 1))):
        if not _loose(best[0], least):
            break
        number = {n: k for k, n in enumerate(order)}
        last, stack = below(at, end, number)
        one, other = chance.choice(chance.choice([last, stack])), chance.choice(stack)
        other = other if other != one else chance.choice(order)
        new = list(order)
        if chance.random() < 0.5:
            new[number[one]], new[number[other]] = other, one
        else:
            new.insert(number[other], new.pop(number[one]))
        if (tried := place(new))[0] <= end:
            order, (end, at) = new, tried
            best = min(best, tried, key=lambda x: x[0])
    return {items[n]: offset for n, offset in best[1].items()}, best[0]


def _barred(mine: Sequence[Piece], theirs: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    """How far behind something else something does not begin, since pieces that are in use together would overlap:
    farther than one number and less than the other.
    """
    alone = len(mine) == len(theirs) == 1  # then they are known to be
    for p in mine:
        for q in theirs:
            if alone or p.beside(q):
                yield q.start - p.end, q.end - p.start


def _first_free(barred: Iterable[tuple[int, int]]) -> int:
    """The first place that lies between none of these numbers."""
    found = 0
    for low, high in sorted(barred):
        if low >= found:
            break
        if high > found:
            found = padded(high)
    return found


def padded(size: int) -> int:
    """So many bytes, of which there is at least one, up to where something else may begin."""
    return (max(size, 1) + ALIGN - 1) // ALIGN * ALIGN


def hosts(
    program: l.Program | kernel.Program,
    buffers: Sequence[l.Buffer],
    root: Root = ALONE,
    theirs: Collection[l.Buffer] = (),
    pieces: Pieces = WHOLE,
    calls: Sequence[l.Call] = (),
) -> dict[l.Buffer, tuple[l.Buffer, int]]:
    """Temporaries that lie in the memory of a result, or a piece of one, which is written after their last use, and at
    which offset; none where that does not lower the memory in use at any time. A small result is there sooner than it
    must be rather than a large one. Results that are `theirs` lie in what PyTorch made, and so does what `calls` of it
    mention.
    """
    lives = Lives(program, root=root, pieces=pieces)
    _, (_, alone) = _in_order(buffers, lives, ())
    if alone < WORTH:
        return {}
    called = {root.get(b, b) for s in calls for b in (*s.reads, *s.writes)}
    own = dict.fromkeys(b for b in program.results if b in lives.first)
    rooms = [b for b in own if b not in called and b not in program.inputs and b not in theirs]
    numbers = [lives.number[room] for room in rooms]
    cut = {n for n, room in enumerate(rooms) if room in pieces}
    lying: list[list[tuple[int, int, int]]] = [[] for _ in rooms]  # numbers of buffers, where they begin and end
    found: dict[l.Buffer, tuple[l.Buffer, int]] = {}
    for b in sorted((b for b in buffers if b not in called), key=lambda b: -b.type.span):
        size = b.type.span
        for room in sorted(cut.union(lives.later(b, numbers)), key=lambda n: (rooms[n].type.span, n)):
            there = [(q.start, q.end) for q in lives.pieces(rooms[room]) if q.first <= lives.last[b]]
            others = lives.beside(b, [number for number, _, _ in lying[room]])
            there += [lying[room][m][1:] for m in others]
            offset = _first_free((start - size, end) for start, end in there)
            if offset + size <= rooms[room].type.span:
                found[b] = rooms[room], offset
                lying[room].append((lives.number[b], offset, padded(offset + size)))
                break
    if not found:
        return {}
    _, (_, rest) = _in_order([b for b in buffers if b not in found], lives, ())
    return found if rest < alone else {}
