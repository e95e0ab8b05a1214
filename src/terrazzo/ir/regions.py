"""Buffers that are regions of the memory of others: what some calls say, of which nothing is executed.

A window on a buffer is `aten.alias` of a view of it, and pieces that were written one by one are a whole by `aten.cat`.
Both mean what PyTorch says. Where only kernels use windows and pieces, no byte has to move: a window is where its
elements are, and pieces are written where the whole is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from terrazzo.ir.dialects import loop as l

WINDOW, WHOLE = "aten.alias.default", "aten.cat.default"
ALIGNED = 16
"""Bytes at multiples of which a region begins: as many as vectors have, and TMA wants."""


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


NONE = Regions()


def regions(steps: Sequence[Any], results: Sequence[l.Buffer]) -> Regions:
    """What is a region of something else among what steps (of any IR) write."""
    named = [s for s in steps if isinstance(s, l.Call) and s.name in (WINDOW, WHOLE)]
    if not named:
        return NONE
    written = {b for s in steps if not isinstance(s, l.Call) for b in s.writes}
    told = {b for s in steps if isinstance(s, l.Call) and s not in named for b in s.reads}
    readers: dict[l.Buffer, int] = {}
    for b in (b for s in named for b in s.reads):
        readers[b] = readers.get(b, 0) + 1
    told.update(results)
    found: dict[l.Buffer, tuple[l.Buffer, int]] = {}
    calls = set()
    for s in named:
        window = s.name == WINDOW
        lying = _window(s) if window else _pieces(s)
        if window:
            fits = not any(b in told or b in readers for b in lying)
        else:
            fits = all(b in written and b not in told and readers[b] == 1 for b in lying)
        if not lying or not fits:
            continue
        for b, (whole, start) in lying.items():
            outer, more = found.get(whole, (whole, 0))
            found[b] = outer, more + start
        calls.add(s)
    return Regions(found, frozenset(calls))


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
    if whole is None or len(s.args) != 2 or not isinstance(pieces := s.args[0], tuple) or whole.type.span == 0:
        return {}
    d, kind = s.args[1], whole.type
    if not all(isinstance(b, l.Buffer) and b.type.dtype is kind.dtype for b in pieces) or len({*pieces}) < len(pieces):
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
