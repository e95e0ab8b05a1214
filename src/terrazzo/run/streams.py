"""Streams beside the current one, while a graph is captured: the graph has branches then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terrazzo.run.branches import Place


class Streams:
    """A stream for every branch of a plan: the current one for the first; the others begin after what that has been
    given before, and it goes on when they are through.
    """

    def __init__(self, machine: Any, places: Sequence[Place]) -> None:
        self.machine, self.places = machine, places
        self.awaited = {n for p in places for n in p.after}
        self.sides = {b: machine.fork() for b in sorted({p.branch for p in places}) if b}
        self.firsts = {b: n for n, b in reversed([*enumerate(p.branch for p in places)])}
        self.events: dict[int, Any] = {}

    def begin(self) -> None:
        """From here on steps go to their streams."""
        self.of = {0: self.machine.stream(), **self.sides}
        for side in self.sides.values():
            side.wait_stream(self.of[0])

    def before(self, n: int) -> int:
        """The stream that step `n` is to go to, which waits for what the step needs."""
        stream = self.of[self.places[n].branch]
        for d in self.places[n].after:
            stream.wait_event(self.events[d])
        return int(stream.cuda_stream)

    def alone(self, n: int) -> bool:
        """Whether step `n` waits for nothing but the one before it on its stream."""
        return not self.places[n].after and n not in self.firsts.values()

    def after(self, n: int) -> None:
        """Step `n` was given to its stream."""
        if n in self.awaited:
            self.events[n] = self.of[self.places[n].branch].record_event()

    def end(self) -> None:
        """All is on the current stream again."""
        for side in self.sides.values():
            self.of[0].wait_stream(side)
        self.events.clear()
