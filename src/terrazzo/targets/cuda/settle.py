"""Which accumulators of wgmma each wait settles: those of groups it waits for, and of none that may be open.

CUDA's compiler does not know that a wait changes registers. It is told for those that the text may use from there on,
and may not be told for others, since it would wait for them. All paths of the text are followed together: what may be
in the last group, in the one before, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.node import Node

Places = frozenset[k.Registers]
NONE: Places = frozenset()


@dataclass(frozen=True)
class _Open:
    """What may be in flight: what was begun and not committed, and groups, the last one first."""

    begun: Places = NONE
    groups: tuple[Places, ...] = ()

    def join(self, other: _Open) -> _Open:
        count = max(len(self.groups), len(other.groups))
        mine, theirs = (x.groups + (NONE,) * (count - len(x.groups)) for x in (self, other))
        return _Open(self.begun | other.begun, tuple(a | b for a, b in zip(mine, theirs, strict=True)))


def settled(kernel: k.Kernel) -> Iterator[tuple[k.Registers, ...]]:
    """For every wait for groups of wgmma, in the order of the text, the accumulators that it settles."""
    waits = [s for s in k.walk(kernel.body) if isinstance(s, k.WaitGroups) and s.kind == "wgmma"]
    path = _Paths(1 + max((s.open for s in waits), default=0))
    path.follow(kernel.body, _Open())
    yield from path.found


class _Paths:
    def __init__(self, most: int) -> None:
        self.most = most
        """How many groups are told apart; older ones are one."""
        self.found: list[tuple[k.Registers, ...]] = []

    def follow(self, body: Sequence[Node], at: _Open) -> _Open:
        """What may be in flight after some statements; `found` has a line for each wait in them."""
        for s in body:
            match s:
                case k.For():
                    first = len(self.found)
                    while (after := at.join(self.follow(s.body, at))) != at:
                        at = after
                        del self.found[first:]
                case k.If() | k.Role():
                    at = at.join(self.follow(s.body, at))
                case k.MultiplyAsync():
                    at = _Open(at.begun | {s.d}, at.groups)
                case k.Commit(kind="wgmma"):
                    groups = (at.begun, *at.groups)
                    older = groups[self.most - 1 :]
                    at = _Open(NONE, (*groups[: self.most - 1], frozenset().union(*older)) if older else groups)
                case k.WaitGroups(kind="wgmma"):
                    still = at.begun.union(*at.groups[: s.open])
                    over = frozenset[k.Registers]().union(*at.groups[s.open :]) - still
                    self.found.append(tuple(sorted(over, key=lambda place: place.name)))
                    at = _Open(at.begun, at.groups[: s.open])
        return at
