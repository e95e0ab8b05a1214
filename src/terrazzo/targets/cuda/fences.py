"""Fences: what threads use plainly, TMA and wgmma may use only behind one. Followed in the order of the text, loops
again where that may tell more.
"""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.loop import Buffer
from terrazzo.ir.node import Node, per_node
from terrazzo.ir.show_kernel import statement
from terrazzo.ir.verify_kernel import places


def problems(kernel: k.Kernel) -> list[str]:
    """What is used asynchronously with no fence since it was used plainly, a line for each."""
    if not any(isinstance(s, k.MultiplyAsync | k.TensorStore) for s in k.walk(kernel.body)):
        return []
    path = _Path()
    path.follow(kernel.body)
    return list(dict.fromkeys(path.found))


class _Path:
    """`plain` are the places in shared memory written since the last proxy fence, `late` those that a cp.async writes,
    which is plain
    once it was waited for; `touched` the registers used since the last wgmma fence."""

    def __init__(self) -> None:
        self.plain: set[Buffer] = set()
        self.late: set[Buffer] = set()
        self.touched: set[Buffer] = set()
        self.found: list[str] = []

    def follow(self, body: Sequence[Node]) -> None:
        for s in body:
            match s:
                case k.For():
                    before = self.used()
                    self.follow(s.body)
                    if self.used() != before:  # else a second step is like the first
                        self.follow(s.body)
                case k.If() | k.Role():
                    self.follow(s.body)
                case k.Fence(kind="proxy"):
                    self.plain.clear()
                case k.Fence():
                    self.touched.clear()
                case k.WaitGroups(kind="cp.async"):
                    self.plain |= self.late
                    self.late.clear()
                case k.MultiplyAsync():
                    self.need(s, "wgmma", self.touched & {s.d, s.a})
                    self.need(s, "proxy", self.plain & {s.a, s.b})
                case k.TensorStore():
                    self.need(s, "proxy", self.plain & {s.source})
                case k.TensorLoad():
                    self.need(s, "proxy", self.plain & {s.target})
                case _:
                    self.use(s)

    def used(self) -> tuple[set[Buffer], ...]:
        """What was used, as it is now."""
        return {*self.plain}, {*self.late}, {*self.touched}

    def need(self, s: Node, kind: str, used: set[Buffer]) -> None:
        self.found += [
            f"`{statement(s)[0]}` uses {place.name} with no {kind} fence since it was used plainly" for place in used
        ]

    def use(self, s: Node) -> None:
        """A plain statement, or a cp.async."""
        touched, plain, late = _uses(s)
        self.touched |= touched
        self.plain |= plain
        self.late |= late


@per_node
def _uses(s: Node) -> tuple[frozenset[Buffer], frozenset[Buffer], frozenset[Buffer]]:
    """The registers that a plain statement touches, the places in shared memory that it writes, and those where a
    cp.async does.
    """
    named = [place for place, _ in places(s)] + ([s.place] if isinstance(s, k.Declare) else [])
    touched = frozenset(place for place in named if isinstance(place, k.Registers))
    if isinstance(s, k.AsyncCopy):
        return touched, frozenset(), frozenset([s.target])
    written = [s.buffer] if isinstance(s, l.Store) and isinstance(s.buffer, k.Shared) else k.written(s)
    return touched, frozenset(place for place in written if isinstance(place, k.Shared)), frozenset()
