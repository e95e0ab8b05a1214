"""Barriers: those where warps meet, and `mbarrier`s with the boxes that arrive at them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from terrazzo.interp.kernel.clocks import Clocks
from terrazzo.interp.kernel.memory import Place


@dataclass(frozen=True)
class Wait:
    """Why a team stands still: at a line, until `ready`. `why` says what is missing, and `fault` what is wrong where
    nothing is.
    """

    line: int
    ready: Callable[[], bool]
    why: Callable[[], str]
    fault: Callable[[], str] = lambda: ""


class Meeting:
    """`sync()`: some number of warps of a block, or all of a cluster, wait until that many are here."""

    def __init__(self, clocks: Clocks, warps: int, together: int = 1) -> None:
        self.clocks, self.needed, self.together = clocks, warps * together, together
        self.here: list[list[tuple[int, int, int]]] = [[] for _ in range(clocks.blocks // together)]
        self.last: list[list[tuple[int, int]]] = [[] for _ in self.here]
        """Who met the last time, as agents, and when."""
        self.rounds = np.zeros(clocks.blocks, np.int64)

    def arrive(self, b: int, w: int, site: int) -> str:
        """A warp is here; what is wrong with that, if anything."""
        here = self.here[b // self.together]
        if here and here[0][2] != site:
            return "only some threads of a block reach a barrier, others wait at another"
        if not self.clocks.knows(b, w, self.last[b // self.together]):
            return "reaches a barrier where others may still be about to meet"
        here.append((b, w, site))
        if len(here) == self.needed:
            self.last[b // self.together] = [self.clocks.event(x, y) for x, y, _ in here]
            blocks, warps, _ = (np.array(x) for x in zip(*here, strict=True))
            told = self.clocks.nothing()
            for at in np.unique(blocks):
                self.clocks.release(told, blocks, warps, np.full(blocks.size, at))
            self.clocks.acquire(told, blocks, warps)
            self.rounds[np.unique(blocks)] += 1
            here.clear()
        return ""

    def why(self) -> str:
        """What those who are here wait for."""
        return "; ".join(f"{len(here)} of {self.needed} warps are there" for here in self.here[:1])


@dataclass
class Box:
    """A box on its way to shared memory of one block: where, what, when in the time of the barrier's agent, and the
    line that sent it.
    """

    place: Place
    at: Any
    data: Any
    time: int
    site: int


@dataclass
class Phase:
    """What has come to a barrier of one block since its last phase ended."""

    arrivals: list[tuple[int, int]] = field(default_factory=list)
    announced: int = 0
    boxes: list[Box] = field(default_factory=list)

    @property
    def arrived(self) -> int:
        """How many have arrived: agents, and when."""
        return len(self.arrivals)

    @property
    def coming(self) -> int:
        """Bytes of its boxes."""
        return sum(x.data.nbytes for x in self.boxes)


class Ring:
    """The `mbarrier`s of one name, of every block; the agent of number n is barrier `first + n`.

    Boxes come as late as they may: when the phase ends that they count for.
    """

    def __init__(self, name: str, count: int, arrivals: int, clocks: Clocks, first: int) -> None:
        self.name, self.arrivals, self.clocks, self.first = name, arrivals, clocks, first
        self.phase = np.zeros((clocks.blocks, count), np.int64)
        self.state = {(b, n): Phase() for b in range(clocks.blocks) for n in range(count)}
        self.gathered = [clocks.nothing() for _ in range(count)]
        self.released = [clocks.nothing() for _ in range(count)]
        self.time = np.zeros((clocks.blocks, count), np.int32)
        self.ends: dict[tuple[int, int], list[int]] = {key: [] for key in self.state}
        """When each phase ended, in the time of the barrier's agent."""
        self.waited = np.full((clocks.blocks, count), -1, np.int64)
        """The last phase that somebody has waited for."""
        self.sent = np.zeros((clocks.blocks, count), np.int32)
        """When the last box set out."""
        self.maker: dict[int, tuple[int, int]] = {}
        self.last: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """What ended the phase before: arrivals, and boxes that came. Who uses the next must know of them, or it may be
        this one still."""

    def make(self, b: int, w: int) -> str:
        """A warp brings the barriers of its block into being; what is wrong with that, if anything."""
        if b in self.maker:
            return f"makes {self.name} once more"
        self.maker[b] = self.clocks.event(b, w)
        return ""

    def unusable(self, b: int, by: tuple[int, int]) -> str:
        """Why a warp (block, warp) may not use the barriers of block `b`, if it may not."""
        if b not in self.maker:
            return f"at {self.name}, which nobody made"
        if not self.clocks.knows(*by, [self.maker[b]]):
            return f"at {self.name} as one thread makes it, with no barrier of the block between"
        return ""

    def arrive(self, b: int, n: int, by: tuple[int, int], announced: int = 0) -> str:
        """A thread of a warp (block, warp) arrives, and announces bytes; what is wrong with that, if anything."""
        self.settle(b, n)
        state = self.state[b, n]
        if why := self.early(b, n, by):
            return why
        if why := self.miscounted(b, n):
            return f"while a phase of {self.name}[{n}] cannot end: {why}"
        agent, time = self.clocks.event(*by)
        state.arrivals.append((agent, time))
        state.announced += announced
        self.clocks.visit(b, by)
        self.tell(b, n, by)
        if state.arrived > self.arrivals:
            return f"more than {self.arrivals} arrive at {self.name}[{n}] in one phase: {self.short(b, n)}"
        if state.arrived == self.arrivals and self.waited[b, n] < self.phase[b, n] - 1:
            return f"ends a phase of {self.name}[{n}] before anybody waited for the one before"
        return ""

    def early(self, b: int, n: int, by: tuple[int, int]) -> str:
        """Why a warp (block, warp) may be too early for the phase that it arrives or sends a box in, if it may."""
        known = self.clocks.knows(*by, self.last.get((b, n), []))
        return "" if known else f"at {self.name}[{n}], whose phase before may not have ended"

    def send(self, b: int, n: int, by: tuple[int, int], place: Place, at: Any, data: Any, site: int) -> str:
        """A box sets out that will arrive here, sent by a warp (block, warp); what is wrong with that, if anything."""
        self.settle(b, n)
        if why := self.early(b, n, by):
            return why
        self.tell(b, n, by)  # it comes after what its sender knew
        self.time[b, n] += 1
        self.sent[b, n] = self.time[b, n]
        self.state[b, n].boxes.append(Box(place, at, data, int(self.time[b, n]), site))
        return ""

    def tell(self, b: int, n: int, by: tuple[int, int]) -> None:
        """A warp (block, warp) releases what it knows; to another block, not what was read and written plainly."""
        self.clocks.release(self.gathered[n], np.array([by[0]]), np.array([by[1]]), np.array([b]), by[0] == b)

    def settle(self, b: int, n: int) -> None:
        """End the phase if all have arrived and all bytes can come."""
        state = self.state[b, n]
        if state.arrived != self.arrivals or state.announced != state.coming:
            return
        agent = int(self.clocks.barrier(b, self.first + n))
        for x in state.boxes:
            where = np.full(x.at.size, b)
            x.place.land(where, x.at)
            x.place.write(where, x.at, np.full(x.at.size, agent), x.time, x.data, x.site)
        self.time[b, n] += 1
        self.ends[b, n].append(int(self.time[b, n]))
        gathered, released = self.gathered[n], self.released[n]
        for theirs, mine in zip(released.parts, gathered.parts, strict=True):
            mine[b, agent] = self.time[b, n]
            theirs[b] = mine[b]
        self.last[b, n] = [*state.arrivals, *([(agent, int(self.time[b, n]))] if state.boxes else [])]
        self.state[b, n] = Phase()
        self.phase[b, n] += 1

    def passed(self, b: int, n: int, parity: int) -> bool:
        """Whether the phase of this parity has ended."""
        self.settle(b, n)
        return bool(self.phase[b, n] % 2 != parity)

    def lapped(self, b: int, n: int, w: int, parity: int) -> bool:
        """Whether the phase that a warp waits for ended, and so did the next: it will wait for one that it does not
        mean.
        """
        meant = bisect_right(self.ends[b, n], self.clocks.known[b, w, self.clocks.barrier(b, self.first + n)])
        return bool(self.phase[b, n] > meant + (meant % 2 != parity) + 1)

    def miscounted(self, b: int, n: int) -> str:
        """What is wrong with a phase that all have arrived for: the bytes that came are not those expected."""
        state = self.state[b, n]
        if state.arrived != self.arrivals or state.announced == state.coming:
            return ""
        return f"{state.announced} bytes are expected at {self.name}[{n}], and {state.coming} came"

    def short(self, b: int, n: int) -> str:
        """What a phase lacks."""
        return f"{self.state[b, n].arrived} of {self.arrivals} have arrived at {self.name}[{n}]"
