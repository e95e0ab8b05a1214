"""The order of copies and waits along the path of one thread: what it copied is waited for before it is read or overwritten.

Followed are the first lanes of the first and last warp of block 0, through the slots of the rings, which are all that matters of an
address here. Long loops are shortened by whole rounds of their rings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from terrazzo.errors import CompilerBug
from terrazzo.ir.address import evaluate
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.expr import Expr, IntExpr, Loaded, Var
from terrazzo.ir.node import Node, topological
from terrazzo.ir.show_kernel import statement
from terrazzo.targets.cuda.accesses import Around, accesses

COPIES = (k.AsyncCopy, k.TensorLoad)
EVENTS = (*COPIES, k.Commit, k.WaitGroups, k.Expect, k.WaitBarrier)


def problems(kernel: k.Kernel) -> list[str]:
    """What is wrong, a line for each finding; one is enough for a thread."""
    if not any(isinstance(s, EVENTS) for s in k.walk(kernel.body)):
        return []
    found = []
    for warp in sorted({0, kernel.warps - 1}):
        try:
            _Thread(kernel, warp).run()
        except _Wrong as why:
            found.append(str(why))
    return list(dict.fromkeys(found))


class _Wrong(Exception):
    """What a thread does and may not."""


Slot = tuple[k.Shared, int]


@dataclass
class _Thread:
    """The first lane of a warp of block 0: its groups of copies, and the boxes it sent and bytes it announced, by barrier."""

    kernel: k.Kernel
    warp: int
    env: dict[str, int] = field(default_factory=dict)
    begun: list[Slot | None] = field(default_factory=list)
    groups: list[list[Slot | None]] = field(default_factory=list)
    boxes: dict[Slot, list[tuple[Slot | None, int]]] = field(default_factory=dict)
    announced: dict[Slot, int] = field(default_factory=dict)
    phases: dict[Slot, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.env = {k.BLOCK: 0, "warp": self.warp, "lane": 0}
        self.rings = _rings(self.kernel)
        extents = [s.type.static_shape[0] for s in self.kernel.shared if s in self.rings or isinstance(s, k.Barriers)]
        self.round = 2 * math.lcm(1, *extents)
        self.uses = cache(lambda s: [a for a in accesses(s, Around()) if a.place in self.rings])
        self.relevant = cache(lambda body: tuple(s for s in body if self.matters(s)))
        self.steps = cache(self.iterations)

    def run(self) -> None:
        """Follow the thread; _Wrong where it does what it may not."""
        self.body(self.kernel.body)
        if self.begun or any(self.groups):
            raise _Wrong("ends while copies of cp.async are on their way that no wait_groups waits for")
        for (barriers, n), bytes_ in self.announced.items():
            self.balance((barriers, n), bytes_, "the end of the kernel")

    def body(self, body: tuple[Node, ...]) -> None:
        for s in self.relevant(body):
            if isinstance(s, k.If):
                if self.holds(s.inside):
                    self.body(s.body)
            elif isinstance(s, k.For):
                for i in self.steps(s):
                    self.env[s.axis.name] = i
                    self.body(s.body)
            else:
                self.statement(s)

    def matters(self, s: Node) -> bool:
        if isinstance(s, k.For | k.If):
            return bool(self.relevant(s.body))
        return isinstance(s, EVENTS) or bool(self.uses(s))

    def iterations(self, loop: k.For) -> Sequence[int]:
        """The iterations to follow: one where all are alike, else the first and the last rounds of the rings."""
        count: Any = loop.axis.extent
        inner = list(k.walk(self.relevant(loop.body)))
        state = any(isinstance(s, EVENTS) and not isinstance(s, k.AsyncCopy) for s in inner)
        slots = [e for s in inner for e in (s.inside if isinstance(s, k.If) else [a.index[0] for a in self.uses(s)])]
        if not state and loop.axis not in _variables(slots):
            return range(min(count, 1))
        skipped = max(count // self.round - 2, 0) * self.round
        return [*range(self.round), *range(self.round + skipped, count)] if skipped else range(count)

    def statement(self, s: Node) -> None:
        for a in self.uses(s):
            if self.holds(a.inside) and not (isinstance(s, k.AsyncCopy) and a.write):
                self.free(s, self.slot(a.place, a.index), "writes" if a.write else "reads")
        match s:
            case k.AsyncCopy():
                if (to := self.slot(s.target, s.to)) is not None and any(to in group for group in self.groups):
                    raise _Wrong(self.told(s, f"writes {to[0].name}[{to[1]}], where a copy is on its way"))
                self.begun.append(to)
            case k.Commit():
                self.groups.append(self.begun)
                self.begun = []
            case k.WaitGroups():
                self.groups = self.groups[max(len(self.groups) - s.open, 0) :]
            case k.Expect():
                key = self.barrier(s)
                self.announced[key] = self.announced.get(key, 0) + s.bytes
            case k.TensorLoad():
                self.free(s, to := self.slot(s.target, s.to), "writes")
                size = math.prod(s.box) * s.target.type.dtype.size
                self.boxes.setdefault(self.barrier(s), []).append((to, size))
            case k.WaitBarrier():
                self.wait(s)

    def wait(self, s: k.WaitBarrier) -> None:
        key, phase = self.barrier(s), self.number(s.phase)
        if self.phases.get(key) == phase:
            raise _Wrong(self.told(s, f"waits twice for phase {phase} of {key[0].name}[{key[1]}], with no other between"))
        if phase is not None:
            self.phases[key] = phase
        if key in self.announced or key in self.boxes:
            self.balance(key, self.announced.pop(key, 0), f"`{statement(s)[0]}`")
            self.boxes.pop(key, None)

    def balance(self, key: Slot, announced: int, where: str) -> None:
        """The bytes of the boxes sent are those announced."""
        come = sum(size for _, size in self.boxes.get(key, []))
        if come != announced:
            raise _Wrong(f"announces {announced} bytes at {key[0].name}[{key[1]}], and {come} come, at {where}")

    def free(self, s: Node, slot: Slot | None, what: str) -> None:
        """_Wrong where a copy of this thread's is on its way to a slot."""
        flying = [*self.begun, *(x for group in self.groups for x in group), *(x for sent in self.boxes.values() for x, _ in sent)]
        if slot is not None and slot in flying:
            raise _Wrong(self.told(s, f"{what} {slot[0].name}[{slot[1]}], where a copy is on its way that this thread did not wait for"))

    def told(self, s: Node, what: str) -> str:
        steps = ", ".join(f"{name} {value}" for name, value in self.env.items() if name not in (k.BLOCK, "lane"))
        return f"`{statement(s)[0]}` {what} ({steps})"

    def slot(self, place: Any, index: tuple[IntExpr, ...]) -> Slot | None:
        n = self.number(index[0]) if place in self.rings else None
        return None if n is None else (place, n)

    def barrier(self, s: Any) -> Slot:
        n = self.number(s.slot)
        if n is None:
            raise CompilerBug(f"{self.kernel.name}: `{statement(s)[0]}` has a slot that depends on data")
        return s.barriers, n

    def holds(self, inside: Sequence[IntExpr]) -> bool:
        return all(n is None or n >= 0 for n in map(self.number, inside))

    def number(self, e: IntExpr) -> int | None:
        """The value of an expression for this thread; None where it depends on data."""
        if isinstance(e, int):
            return e
        known: dict[Expr, Any] = {}
        for x in topological([e]):
            if isinstance(x, Loaded):
                return None
            if isinstance(x, Var):
                known[x] = self.env[x.name]
        return int(evaluate(e, known))


def _rings(kernel: k.Kernel) -> set[Any]:
    """The places that copies write whose first index is the same for all threads wherever they are used: a slot."""
    written = {s.target for s in k.walk(kernel.body) if isinstance(s, COPIES)}
    used = [(s.target, s.to) for s in k.walk(kernel.body) if isinstance(s, k.TensorLoad)]
    used += [(a.place, a.index) for s in k.walk(kernel.body) for a in accesses(s, Around())]  # type: ignore[misc]
    apart = {place for place, index in used if len(index) < 2 or set(k.THREADS) & {v.name for v in _variables(index[:1])}}
    return written - apart


def _variables(exprs: Sequence[IntExpr]) -> list[Var]:
    return [x for x in topological([e for e in exprs if isinstance(e, Expr)]) if isinstance(x, Var)]
