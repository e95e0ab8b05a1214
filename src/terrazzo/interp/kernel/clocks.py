"""Happens-before between the warps of a block or a cluster, by vector clocks.

Every warp has a time of its own, and knows up to which time it has seen everybody's work. What an agent did at its time
t comes before what a warp does now if the warp knows the agent up to t. Agents are the warps; for each warp, what it
makes read asynchronously, one for each kind; and the barriers, whose boxes write. What was read and written plainly is
ordered only where somebody released it, `visible`: who arrives at a barrier of another block tells that he was there,
and not that. The asynchronous proxy needs a fence besides: `fenced` is what is visible and lies behind one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

ASYNCHRONOUS = ("wgmma", "bulk")
"""Kinds of work that reads shared memory later, on behalf of a warp."""


@dataclass
class Knowledge:
    """What somebody knows of each block's agents, [block, agent] times; `visible` is the part whose accesses are
    ordered too, and `fenced` that which asynchronous operations may rely on.
    """

    known: Any
    visible: Any
    fenced: Any

    @property
    def parts(self) -> tuple[Any, Any, Any]:
        """All of it."""
        return self.known, self.visible, self.fenced


class Clocks:
    """The clocks of the warps of some blocks, known[block, warp, agent]; agents are those of the block's whole
    cluster.
    """

    def __init__(self, blocks: int, warps: int, barriers: int, cluster: int = 1) -> None:
        self.blocks, self.warps, self.barriers, self.cluster = blocks, warps, barriers, cluster
        self.readers = warps * cluster * (1 + len(ASYNCHRONOUS))
        """How many agents read: the warps first, then what they make read."""
        agents = self.readers + barriers * cluster
        self.known = np.zeros((blocks, warps, agents), np.int32)
        self.visible, self.fenced = np.zeros_like(self.known), np.zeros_like(self.known)
        self.sent = np.zeros((blocks, warps, len(ASYNCHRONOUS)), np.int32)
        self.visits: dict[tuple[int, int], int] = {}
        """When an agent last used the memory of a block that is another's."""
        b, w = np.meshgrid(np.arange(blocks), np.arange(warps), indexing="ij")
        self.known[b, w, self.agent(b, w)] = self.visible[b, w, self.agent(b, w)] = 1

    def agent(self, b: Any, w: Any) -> Any:
        """The agent that warp `w` of block `b` is."""
        return b % self.cluster * self.warps + w

    def reader(self, b: Any, w: Any, kind: str) -> Any:
        """The agent that reads for a warp asynchronously."""
        return (ASYNCHRONOUS.index(kind) + 1) * self.warps * self.cluster + self.agent(b, w)

    def barrier(self, b: Any, n: Any) -> Any:
        """The agent that barrier `n` of block `b` is."""
        return self.readers + b % self.cluster * self.barriers + n

    def name(self, agent: int) -> str:
        """Who an agent is."""
        if agent >= self.readers:
            return "TMA"
        kind, warp = divmod(agent, self.warps * self.cluster)
        who = f"warp {warp % self.warps}" + (
            f" of block {warp // self.warps} of the cluster" if self.cluster > 1 else ""
        )
        return f"{ASYNCHRONOUS[kind - 1]} of {who}" if kind else who

    def nothing(self) -> Knowledge:
        """The knowledge of one who knows nothing yet."""
        size = (self.blocks, self.known.shape[-1])
        return Knowledge(*(np.zeros(size, np.int32) for _ in range(3)))

    def now(self, b: Any, w: Any) -> Any:
        """The times of warps `w` of blocks `b`."""
        return self.known[b, w, self.agent(b, w)]

    def event(self, b: int, w: int) -> tuple[int, int]:
        """What a warp does now: the agent that it is, and its time."""
        agent = int(self.agent(b, w))
        return agent, int(self.known[b, w, agent])

    def knows(self, b: int, w: int, events: list[tuple[int, int]]) -> bool:
        """Whether a warp knows that these were done."""
        return all(self.known[b, w, agent] >= time for agent, time in events)

    def release(self, to: Knowledge, b: Any, w: Any, at: Any, plain: Any = True) -> None:
        """Warps `w` of blocks `b` tell blocks `at` what they know and did; what they do from now on is not part of it.

        Where it is not `plain`, what warps read and wrote themselves is not visible there.
        """
        warps = np.arange(self.known.shape[-1]) < self.warps * self.cluster
        hidden = warps & ~np.asarray(plain)[..., None]
        np.maximum.at(to.known, at, self.known[b, w])
        np.maximum.at(to.visible, at, np.where(hidden, 0, self.visible[b, w]))
        np.maximum.at(to.fenced, at, np.where(hidden, 0, self.fenced[b, w]))
        self._tick(b, w)

    def acquire(self, given: Knowledge, b: Any, w: Any) -> None:
        """Warps learn what was released to their block."""
        for seen, told in zip((self.known, self.visible, self.fenced), given.parts, strict=True):
            seen[b, w] = np.maximum(seen[b, w], told[b])

    def fence(self, b: Any, w: Any) -> None:
        """What these warps know is ordered before asynchronous operations from here on."""
        self.fenced[b, w] = self.visible[b, w]
        self._tick(b, w)

    def _tick(self, b: Any, w: Any) -> None:
        """The times of warps go on."""
        agent = self.agent(b, w)
        self.known[b, w, agent] += 1
        self.visible[b, w, agent] = self.known[b, w, agent]

    def visit(self, b: int, by: tuple[int, int]) -> None:
        """A warp (block, warp) uses memory of block `b`, which must not have ended then."""
        if b != by[0]:
            self.visits[b, int(self.agent(*by))] = int(self.now(*by))

    def send(self, b: Any, w: Any, kind: str) -> Any:
        """The time of what these warps now make read asynchronously."""
        self.sent[b, w, ASYNCHRONOUS.index(kind)] += 1
        return self.sent[b, w, ASYNCHRONOUS.index(kind)]

    def learn(self, b: Any, w: Any, agent: Any, time: Any) -> None:
        """These warps know that an agent has done what it did up to a time."""
        for seen in (self.known, self.visible, self.fenced):
            seen[b, w, agent] = np.maximum(seen[b, w, agent], time)
