"""Where temporaries lie: in an arena, or in the memory of results that are written later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from terrazzo.ir.dialects import kernel
from terrazzo.ir.dialects import loop as l
from terrazzo.run.branches import Place, clocks

T = TypeVar("T")
ALIGN = 256
MOST = 4000
"""Temporaries of which there may be more than one try at where they lie."""
WORTH = 1 << 20
"""Bytes of temporaries from which on it is worth looking for room in results."""


class Lives:
    """When the buffers of a program are in use: from the first to the last step that mentions them, by branches."""

    def __init__(self, program: l.Program | kernel.Program, places: Sequence[Place] = ()) -> None:
        self.first: dict[l.Buffer, int] = {}
        self.last: dict[l.Buffer, int] = {}
        self.ends: dict[l.Buffer, dict[int, int]] = {}
        self.clocks = clocks(places) if any(p.branch for p in places) else None
        for k, step in enumerate(program.steps):
            for b in (*step.reads, *step.writes):
                self.first.setdefault(b, k)
                self.last[b] = k
                if self.clocks:
                    self.ends.setdefault(b, {})[places[k].branch] = k

    def over(self, b: l.Buffer, k: int) -> bool:
        """Whether all that uses a buffer is through when a step begins."""
        if self.clocks is None or self.last[b] >= k:
            return self.last[b] < k
        clock = self.clocks[k]
        return all(clock[branch] >= end for branch, end in self.ends[b].items())

    def apart(self, a: l.Buffer, b: l.Buffer) -> bool:
        """Whether two buffers may share memory."""
        return self.over(a, self.first[b]) or self.over(b, self.first[a])


def allocate(
    program: l.Program | kernel.Program, buffers: Sequence[l.Buffer], places: Sequence[Place] = ()
) -> tuple[dict[l.Buffer, int], int]:
    """Offsets for temporaries such that buffers that live at the same time do not overlap; and the total. They are
    placed one after the other where there is room first: as they come, the large ones first, or those that live long;
    whichever takes least.
    """
    lives = Lives(program, places)
    given = [b for b in lives.first if b in set(buffers)]
    longest = sorted(given, key=lambda b: (lives.first[b] - lives.last[b], -b.type.span))
    orders = [given, sorted(given, key=lambda b: -b.type.span), longest]
    return min(
        (placed(order, _padded, lives.apart) for order in orders[: 1 if len(given) > MOST else 3]), key=lambda x: x[1]
    )


def placed(items: Sequence[T], size: Callable[[T], int], apart: Callable[[T, T], bool]) -> tuple[dict[T, int], int]:
    """Where items of these sizes lie, of which those that are not `apart` share no memory, placed in this order; and
    the total.
    """
    taken: list[tuple[int, int, T]] = []  # offset, end
    offsets: dict[T, int] = {}
    for b in items:
        place = 0
        for start, end in sorted((start, end) for start, end, x in taken if not apart(x, b)):
            if start - place >= size(b):
                break
            place = max(place, end)
        offsets[b] = place
        taken.append((place, place + size(b), b))
    return offsets, max((end for _, end, _ in taken), default=0)


def _padded(b: l.Buffer) -> int:
    """The bytes a temporary takes: what begins after it is aligned."""
    return padded(b.type.span)


def padded(size: int) -> int:
    """So many bytes, of which there is at least one, up to where something else may begin."""
    return (max(size, 1) + ALIGN - 1) // ALIGN * ALIGN


def hosts(
    program: l.Program | kernel.Program, buffers: Sequence[l.Buffer], places: Sequence[Place] = ()
) -> dict[l.Buffer, tuple[l.Buffer, int]]:
    """Temporaries that lie in the memory of a result, which is written after their last use, and at which offset; none
    where that does not lower the memory in use at any time.
    """
    _, alone = allocate(program, buffers, places)
    if alone < WORTH:
        return {}
    called = {b for s in program.steps if isinstance(s, l.Call) for b in (*s.reads, *s.writes)}
    lives = Lives(program, places)
    first = lives.first
    rooms = [b for b in dict.fromkeys(program.results) if b in first and b not in called and b not in program.inputs]
    found: dict[l.Buffer, tuple[l.Buffer, int]] = {}
    for b in sorted((b for b in buffers if b not in called), key=lambda b: -b.type.span):
        size = _padded(b)
        for room in rooms:
            taken = sorted(
                (offset, offset + x.type.span)
                for x, (place, offset) in found.items()
                if place is room and not lives.apart(x, b)
            )
            offset = 0
            for start, end in taken:
                if start - offset >= size:
                    break
                offset = max(offset, (end + ALIGN - 1) // ALIGN * ALIGN)
            if lives.over(b, first[room]) and offset + size <= room.type.span:
                found[b] = room, offset
                break
    _, rest = allocate(program, [b for b in buffers if b not in found], places)

    def most(arena: int, begin: Mapping[l.Buffer, int]) -> int:
        """The most that results and the arena take in any step."""
        return arena + max(sum(b.type.span for b in rooms if begin[b] <= k) for k in range(len(program.steps)))

    early = {r: min([first[r], *(first[b] for b, (place, _) in found.items() if place is r)]) for r in rooms}
    return found if rooms and most(rest, early) < most(alone, first) else {}
