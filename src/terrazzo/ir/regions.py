"""Buffers that are regions of the memory of others: what some calls say, of which nothing is executed.

A window on a buffer is `aten.alias` of a view of it, and pieces that were written one by one are a whole by `aten.cat`.
Both mean what PyTorch says. Where only kernels use windows and pieces, no byte has to move: a window is where its
elements are, and pieces are written where the whole is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from terrazzo.ir.dialects import loop as l

WINDOW, WHOLE = "aten.alias.default", "aten.cat.default"
ALIGNED = 16
"""Bytes at multiples of which a region begins: as many as vectors have, and TMA wants."""
LINE = 256
"""Bytes at multiples of which pieces of memory begin: two kernels share no line of it."""

T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """The bytes of a tensor from `start` to `end`, which steps use from the `first` to the `last`."""

    start: int
    end: int
    first: int
    last: int

    def beside(self, other: Piece) -> bool:
        """Whether there is a step in which both are in use."""
        return self.first <= other.last and other.first <= self.last

    def at(self, offset: int) -> Piece:
        """The piece of a tensor that begins there."""
        return Piece(self.start + offset, self.end + offset, self.first, self.last)


def lived(uses: Sequence[tuple[int, T, int, int]]) -> dict[T, list[Piece]]:
    """The pieces of tensors by when they are in use, of steps in order, what each uses, and from which byte to which.
    A tensor is cut where lines of memory are used by other steps.
    """
    ranges = [(n, x, start // LINE * LINE, -(-end // LINE) * LINE) for n, x, start, end in uses if start < end]
    cuts: dict[T, set[int]] = {}
    for _, x, start, end in ranges:
        cuts.setdefault(x, set()).update((start, end))
    ends = {x: sorted(at) for x, at in cuts.items()}
    first: dict[T, dict[int, int]] = {x: {} for x in ends}
    last: dict[T, dict[int, int]] = {x: {} for x in ends}
    for n, x, start, end in ranges:
        for k in range(bisect_left(ends[x], start), bisect_left(ends[x], end)):
            first[x].setdefault(k, n)
            last[x][k] = n
    found: dict[T, list[Piece]] = {x: [] for x in ends}
    for x, at in ends.items():
        for k, (start, end) in enumerate(pairwise(at)):
            if k not in first[x]:
                continue
            piece = Piece(start, end, first[x][k], last[x][k])
            if found[x] and (one := found[x][-1]).end == start and (one.first, one.last) == (piece.first, piece.last):
                found[x][-1] = Piece(one.start, end, one.first, one.last)
            else:
                found[x].append(piece)
    return found


@dataclass(frozen=True)
class Regions:
    """Of every region the buffer that it is one of, which is none itself, and the byte at which it begins; and the
    calls that say so.
    """

    of: dict[l.Buffer, tuple[l.Buffer, int]] = field(default_factory=dict)
    calls: frozenset[l.Call] = frozenset()

    @property
    def wholes(self) -> dict[l.Buffer, l.Buffer]:
        """The buffers that regions are of."""
        return {b: whole for b, (whole, _) in self.of.items()}

    @property
    def touched(self) -> frozenset[l.Buffer]:
        """Regions, and what they are of."""
        return frozenset(self.of).union(whole for whole, _ in self.of.values())

    def pieces(self, steps: Sequence[Any]) -> dict[l.Buffer, list[Piece]]:
        """When the pieces of what has regions are in use, by steps that are no calls which only name memory."""
        wholes = {whole for whole, _ in self.of.values()}
        places = ((n, b, *self.of.get(b, (b, 0))) for n, s in enumerate(steps) for b in (*s.reads, *s.writes))
        return lived([(n, whole, start, start + b.type.span) for n, b, whole, start in places if whole in wholes])


NONE = Regions()


def regions(steps: Sequence[Any], results: Sequence[l.Buffer]) -> Regions:
    """What is a region of something else among what steps (of any IR) write."""
    named = dict.fromkeys(s for s in steps if isinstance(s, l.Call) and s.name in (WINDOW, WHOLE))
    if not named:
        return NONE
    written = {b for s in steps if not isinstance(s, l.Call) for b in s.writes}
    told = {b for s in steps if isinstance(s, l.Call) and s not in named for b in s.reads}.union(results)
    readers: dict[l.Buffer, list[l.Call]] = {}
    for s in named:
        for b in s.reads:
            readers.setdefault(b, []).append(s)
    lying = {s: found for s in named if (found := _window(s) if s.name == WINDOW else _pieces(s))}
    while True:  # who is no region after all makes none of others
        made = {b for s in lying if s.name == WHOLE for b in s.writes}
        odd = []
        for s, found in lying.items():
            theirs = [r for b in found for r in readers.get(b, ())]
            if s.name == WINDOW:
                fits = all(r in lying and r.name == WINDOW for r in theirs)
            else:
                fits = all(b in written or b in made for b in found) and len(theirs) == len(found)
            if not fits or not told.isdisjoint(found):
                odd.append(s)
        if not odd:
            break
        lying = {s: found for s, found in lying.items() if s not in odd}
    places = {b: at for found in lying.values() for b, at in found.items()}
    return Regions({b: _placed(b, places) for b in places}, frozenset(lying))


def _placed(b: l.Buffer, found: Mapping[l.Buffer, tuple[l.Buffer, int]]) -> tuple[l.Buffer, int]:
    """The buffer that a region is one of, and where it begins there, of regions that may be ones of regions."""
    whole, start = found[b]
    while whole in found:
        whole, more = found[whole]
        start += more
    return whole, start


def _window(s: l.Call) -> dict[l.Buffer, tuple[l.Buffer, int]]:
    """What a call gives, with where it is, if it is a window as its type has it."""
    (made,) = s.results
    if made is None or len(s.args) != 1 or not isinstance(view := s.args[0], l.View):
        return {}
    start = view.offset * view.type.dtype.size
    same = _lies(made, view.strides) and made.type.shape == view.shape
    return {made: (view.buffer, start)} if same and start % ALIGNED == 0 else {}


def _pieces(s: l.Call) -> dict[l.Buffer, tuple[l.Buffer, int]]:
    """What a call makes a whole of, with where it is in that, if all of it may lie there."""
    (whole,) = s.results
    if whole is None or s.kwargs or not isinstance(pieces := s.args[0], tuple) or whole.type.span == 0:
        return {}
    (d,), kind = s.args[1:] or (0,), whole.type
    alike = all(isinstance(b, l.Buffer) and (b.type.dtype, b.type.rank) == (kind.dtype, kind.rank) for b in pieces)
    if not alike or len({*pieces}) < len(pieces):
        return {}
    step = int(kind.element_strides[d]) * kind.dtype.size
    starts = [n * step for n in accumulate((b.type.static_shape[d] for b in pieces), initial=0)]
    aligned = not any(start % ALIGNED for start in starts[:-1])
    return (
        dict(zip(pieces, ((whole, n) for n in starts), strict=False))
        if aligned and all(_lies(b, kind.element_strides) for b in pieces)
        else {}
    )


def _lies(b: l.Buffer, strides: tuple[Any, ...]) -> bool:
    """Whether a buffer has these strides, as far as they matter."""
    places = zip(b.type.static_shape, b.type.element_strides, strides, strict=True)
    return all(n == 1 or mine == other for n, mine, other in places)
