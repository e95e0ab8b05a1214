"""Where temporaries lie: in an arena, or in the memory of results that are written later."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import numpy as np

from terrazzo.ir.dialects import kernel
from terrazzo.ir.dialects import loop as l
from terrazzo.run.branches import Place, clocks

T = TypeVar("T")
ALIGN = 256
MOST = 4000
"""Temporaries of which there may be more than one try at where they lie."""
WORTH = 1 << 20
"""Bytes of temporaries from which on it is worth looking for room in results."""


Root = Mapping[l.Buffer, l.Buffer]
"""Buffers that lie in the memory of others, with the one whose place that is."""
ALONE: Root = {}


class Lives:
    """When the buffers of a program are in use: from the first to the last step that mentions them, or what lies in
    the memory of their `root`, by branches.
    """

    def __init__(self, program: l.Program | kernel.Program, places: Sequence[Place] = (), root: Root = ALONE) -> None:
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
) -> tuple[dict[l.Buffer, int], int]:
    """Offsets for temporaries such that buffers that live at the same time do not overlap; and the total. They are
    placed one after the other where there is room first: as they come, the large ones first, or those that live long;
    whichever takes least.
    """
    lives = Lives(program, places, root)
    wanted = set(buffers)
    given = [b for b in lives.first if b in wanted]
    longest = sorted(given, key=lambda b: (lives.first[b] - lives.last[b], -b.type.span))
    orders = [given, sorted(given, key=lambda b: -b.type.span), longest]
    many = len(given) > MOST or any(p.branch for p in places)  # of what runs side by side, most shares nothing
    tried = (placed(order, _padded, lives.meeting(order)) for order in orders[: 1 if many else 3])
    return min(tried, key=lambda x: x[1])


def placed(
    items: Sequence[T], size: Callable[[T], int], meeting: Callable[[int], Sequence[int]]
) -> tuple[dict[T, int], int]:
    """Where items of these sizes lie, placed in this order, and the total. `meeting` says which of those placed before
    the one of a number it may not share memory with, by their numbers.
    """
    taken: list[tuple[int, int]] = []  # offset, end
    for n, b in enumerate(items):
        place = 0
        for start, end in sorted(taken[m] for m in meeting(n)):
            if start - place >= size(b):
                break
            place = max(place, end)
        taken.append((place, place + size(b)))
    offsets = {b: place for b, (place, _) in zip(items, taken, strict=True)}
    return offsets, max((end for _, end in taken), default=0)


def _padded(b: l.Buffer) -> int:
    """The bytes a temporary takes: what begins after it is aligned."""
    return padded(b.type.span)


def padded(size: int) -> int:
    """So many bytes, of which there is at least one, up to where something else may begin."""
    return (max(size, 1) + ALIGN - 1) // ALIGN * ALIGN


def hosts(
    program: l.Program | kernel.Program,
    buffers: Sequence[l.Buffer],
    root: Root = ALONE,
    theirs: Collection[l.Buffer] = (),
) -> dict[l.Buffer, tuple[l.Buffer, int]]:
    """Temporaries that lie in the memory of a result, which is written after their last use, and at which offset; none
    where that does not lower the memory in use at any time. Results that are `theirs` lie in what PyTorch made.
    """
    _, alone = allocate(program, buffers, root=root)
    if alone < WORTH:
        return {}
    called = {root.get(b, b) for s in program.steps if isinstance(s, l.Call) for b in (*s.reads, *s.writes)}
    lives = Lives(program, root=root)
    own = dict.fromkeys(b for b in program.results if b in lives.first)
    rooms = [b for b in own if b not in called and b not in program.inputs and b not in theirs]
    numbers = [lives.number[room] for room in rooms]
    lying: list[list[tuple[int, int, int]]] = [[] for _ in rooms]  # numbers of buffers, where they begin and end
    found: dict[l.Buffer, tuple[l.Buffer, int]] = {}
    for b in sorted((b for b in buffers if b not in called), key=lambda b: -b.type.span):
        size = _padded(b)
        for room in lives.later(b, numbers):
            if b.type.span > rooms[room].type.span:
                continue
            others = lives.beside(b, [number for number, _, _ in lying[room]])
            offset = 0
            for _, start, end in sorted((lying[room][m] for m in others), key=lambda x: x[1:]):
                if start - offset >= size:
                    break
                offset = max(offset, (end + ALIGN - 1) // ALIGN * ALIGN)
            if offset + b.type.span <= rooms[room].type.span:
                found[b] = rooms[room], offset
                lying[room].append((lives.number[b], offset, offset + b.type.span))
                break
    if not found:
        return {}
    _, rest = allocate(program, [b for b in buffers if b not in found], root=root)
    return found if rest < alone else {}
