"""Steps side by side: kernels too small for a whole GPU, which need nothing of one another, run at the same time.

A branch is a queue: a stream while a graph is captured, a path of nodes in a graph of our own. Its steps run in order,
and wait for the steps of other branches that they need. The layers and directions of a recurrent net, the gradients by
its weights, and what small layers have side by side are such branches. Which step goes where is found by a list
schedule in which every kernel takes as long as any other, and waiting for another branch takes a part of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Any

from terrazzo.ir.dialects import kernel
from terrazzo.ir.dialects import loop as l

LITTLE = 2 << 20
"""Bytes that a step writes up to which it takes hardly longer than its launch, however many blocks it has."""
MOST = 4
"""Branches at most. A GPU has more queues, but so many small kernels fill it."""
CROSSING = 0.5
"""What waiting for another branch takes, in kernels: not measured."""
WORTH = 0.8
"""A run of steps is cut into branches where that takes this part of its time or less."""
ROOM = 16 << 20
"""Bytes that temporaries may take more, since steps side by side share no memory."""

ALONE: Mapping[l.Buffer, l.Buffer] = {}


@dataclass(frozen=True)
class Place:
    """Where a step runs: its branch, and the steps of other branches that it waits for."""

    branch: int = 0
    after: tuple[int, ...] = ()


Clock = tuple[int, ...]
"""For every branch the last of its steps that is through when a step begins; -1 where none is known to be."""


def clocks(places: Sequence[Place]) -> list[Clock]:
    """For every step what is through when it begins."""
    count = 1 + max((p.branch for p in places), default=0)
    ends: list[Clock] = [(-1,) * count] * count  # what is through when the last step of a branch is
    through: list[Clock] = []
    found: list[Clock] = []
    for n, place in enumerate(places):
        found.append(_latest([ends[place.branch], *(through[d] for d in place.after)]))
        ends[place.branch] = tuple(n if b == place.branch else t for b, t in enumerate(found[-1]))
        through.append(ends[place.branch])
    return found


def _latest(all_of: Iterable[Clock]) -> Clock:
    return tuple(max(x) for x in zip(*all_of, strict=True))


class Ahead:
    """Asked whether some steps are through when another begins."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.branch = [p.branch for p in places]
        self.clock = clocks(places)

    def __call__(self, steps: Iterable[int], k: int) -> bool:
        """Whether all of `steps` are."""
        return all(self.clock[k][self.branch[s]] >= s for s in steps)


def side_by_side(
    program: l.Program | kernel.Program, small: Callable[[Any], bool], wholes: Mapping[l.Buffer, l.Buffer] = ALONE
) -> tuple[l.Program | kernel.Program, list[Place]]:
    """The program with steps in the order in which they begin, and the place of each. Only runs of steps that are
    `small` are cut into branches: what follows a run waits for all of it, and others that need nothing of it come
    before it. PyTorch's ops stay in the first branch. Who writes a region writes the whole, by `wholes`; and who writes
    what lies over an input that.
    """
    needs = _needs(program.steps, wholes)
    order: list[int] = []
    places: list[Place] = []
    at: dict[int, int] = {}
    open_ends: tuple[int, ...] = ()
    for run in _runs([small(s) for s in program.steps], needs):
        before, last = open_ends, dict[int, int]()
        inside = set(run)
        for n, branch in _branches(run, needs, {n for n in run if isinstance(program.steps[n], l.Call)}):
            begins = before if branch not in last else ()
            after = {*begins, *(at[d] for d in needs[n] & inside)}
            last[branch] = at[n] = len(order)
            order.append(n)
            places.append(Place(branch, tuple(sorted(after))))
        open_ends = tuple(last.values())
    return replace(program, steps=tuple(program.steps[n] for n in order)), _least(places)  # type: ignore[arg-type]


def _least(places: Sequence[Place]) -> list[Place]:
    """The places without waits for what is through anyway: steps of their own branch, and what those waited for."""
    found: list[Place] = []
    count = 1 + max((p.branch for p in places), default=0)
    ends: list[Clock] = [(-1,) * count] * count
    through: list[Clock] = []
    for n, place in enumerate(places):
        now, kept = ends[place.branch], list[int]()
        for d in sorted(place.after, reverse=True):
            if now[places[d].branch] < d:
                kept.append(d)
                now = _latest([now, through[d]])
        ends[place.branch] = tuple(n if b == place.branch else t for b, t in enumerate(now))
        through.append(ends[place.branch])
        found.append(Place(place.branch, tuple(sorted(kept))))
    return found


def _needs(steps: Sequence[Any], wholes: Mapping[l.Buffer, l.Buffer]) -> list[set[int]]:
    """For every step those that it must come after: they write what it reads, or use what it writes."""
    writer: dict[l.Buffer, int] = {}
    users: dict[l.Buffer, list[int]] = {}
    found: list[set[int]] = []
    for k, step in enumerate(steps):
        reads, writes = ([wholes.get(b, b) for b in x] for x in (step.reads, step.writes))
        mine = {writer[b] for b in reads if b in writer}
        mine.update(d for b in writes for d in users.get(b, ()))
        found.append(mine - {k})
        for b in {*reads, *writes}:
            users.setdefault(b, []).append(k)
        writer.update(dict.fromkeys(writes, k))
    return found


def _runs(small: Sequence[bool], needs: Sequence[set[int]]) -> Iterator[Sequence[int]]:
    """Runs of steps that are small, and every other step by itself, before the run that it stands in where it needs
    nothing of that: the layers and directions of a net begin with products that are larger than their steps.
    """
    run: dict[int, None] = {}
    for n, little in enumerate(small):
        if little:
            run[n] = None
            continue
        if run.keys() & needs[n]:
            yield list(run)
            run = {}
        yield [n]
    if run:
        yield list(run)


def _branches(run: Sequence[int], needs: Sequence[set[int]], first: set[int]) -> list[tuple[int, int]]:
    """The steps of a run with their branches, in the order in which they begin; one branch where that is as good. Some
    are to be in the `first` branch.

    Of the steps that could begin first, the one goes first after which most others follow in a row.
    """
    inside = set(run)
    needed = {n: needs[n] & inside for n in run}
    readers: dict[int, list[int]] = {n: [] for n in run}
    for n in run:
        for d in needed[n]:
            readers[d].append(n)
    follow: dict[int, int] = {}
    for n in reversed(run):
        follow[n] = 1 + max((follow[r] for r in readers[n]), default=0)
    waits = {n: len(needed[n]) for n in run}
    ready = [(0.0, -follow[n], n) for n in run if not waits[n]]
    heapify(ready)
    free, branch, end = [0.0] * MOST, dict[int, int](), dict[int, float]()
    found: list[tuple[float, int, int]] = []
    while ready:
        _, _, n = heappop(ready)

        def begins(b: int, mine: Iterable[int] = needed[n]) -> float:
            return max([free[b], *(end[d] + (branch[d] != b) * CROSSING for d in mine)])

        branch[n] = 0 if n in first else min(range(MOST), key=begins)
        start = begins(branch[n])
        free[branch[n]] = end[n] = start + 1
        found.append((start, n, branch[n]))
        for r in readers[n]:
            waits[r] -= 1
            if not waits[r]:
                heappush(ready, (max(end[d] for d in needed[r]), -follow[r], r))
    if max(end.values()) + CROSSING > WORTH * len(run):
        return [(n, 0) for n in run]
    return [(n, b) for _, n, b in sorted(found)]
