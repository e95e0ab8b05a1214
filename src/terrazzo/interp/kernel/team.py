"""Warps that go step by step together: the statements they execute.

The lanes of a warp never run apart. What threads hold and reach is in `threads`, what is asynchronous in `copies`, the
instructions of whole warps in `products`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from terrazzo.errors import CompilerBug
from terrazzo.interp.kernel import copies, products
from terrazzo.interp.kernel.barriers import Wait
from terrazzo.interp.kernel.threads import Threads
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import Node
from terrazzo.ir.show_kernel import lines


class Team(Threads):
    """Some warps of some blocks, which execute the statements of a kernel."""

    def statements(self, body: Sequence[Node], line: int) -> Iterator[Wait]:
        """Execute statements, of which the first is on this line of the kernel's text; yields where it has to wait."""
        for s in body:
            self.line, self.doing, self.loaded = line, s, {}
            match s:
                case k.For():
                    yield from self.loop(s, line + 1)
                case k.If() | k.Role():
                    outer = self.active
                    self.active = outer & (self.holds(s.inside) if isinstance(s, k.If) else self.plays(s))
                    if self.active.any():
                        yield from self.statements(s.body, line + 1)
                    self.active = outer
                case k.Sync() | k.ClusterSync():
                    yield from self.meet(s)
                case k.WaitBarrier():
                    yield from copies.wait_barrier(self, s)
                case _:
                    self.statement(s)
            if self.machine.costs is not None and not isinstance(s, k.For | k.If | k.Role):
                self.machine.costs.issue(s, self.active)
            line += lines(s)

    def loop(self, s: k.For, line: int) -> Iterator[Wait]:
        """Steps, as many as each thread has."""
        outer, steps = self.active, self.number_of(s.axis.extent)
        most = steps if isinstance(steps, int) else int(self.chosen(s.axis.extent).max(initial=0))
        for i in range(most):
            self.active = outer if isinstance(steps, int) else outer & (i < steps)
            self.env[s.axis] = i
            yield from self.statements(s.body, line)
        self.active = outer

    def carry(self, s: k.DeclareInteger | k.SetInteger) -> None:
        """An integer of the threads that are here becomes what an expression is."""
        value = np.asarray(self.number_of(s.value), np.int64)
        extent: Any = s.variable.extent
        if (bad := ((value < 0) | (value >= extent)) & self.active).any():
            where = np.argwhere(bad)[0]
            number = np.broadcast_to(value, self.shape)[tuple(where)]
            self.fail(s, f"makes {s.variable.name} {number}, which is outside [0, {extent})", where)
        before = self.env.get(s.variable)
        self.env[s.variable] = value if before is None or self.active.all() else np.where(self.active, value, before)

    def statement(self, s: Node) -> None:
        match s:
            case k.DeclareInteger() | k.SetInteger():
                self.carry(s)
            case k.Let():
                self.values[s.value] = self.term(s.term)
            case k.Declare():
                count = int(np.prod(s.place.type.static_shape, dtype=np.int64))
                fill = s.init.value if s.init else 0
                self.registers[s.place] = np.full((*self.shape, count), fill, s.place.type.dtype.numpy)
                self.known[s.place] = np.full((*self.shape, count), s.init is not None)
                self.fragments.touch(s.place, self.active)
            case l.Store():
                self.put(s.buffer, self.at(s.buffer, s.index, 1, s), self.term(s.value)[..., None], s)
            case k.Atomic():
                x = self.access(at := self.at(s.buffer, s.index, 1, s), self.active)
                if self.machine.costs is not None:
                    size = s.buffer.type.dtype.size
                    self.machine.costs.memory(s, at[..., 0] * size, self.active, size, write=True)
                self.combine(
                    s.buffer, x, np.broadcast_to(self.term(s.value)[..., None], x.mask.shape)[x.mask], s.function, s
                )
            case k.Move():
                data = self.get(s.source, self.at(s.source, s.at, s.count, s), s, s.count)
                self.put(s.target, self.at(s.target, s.to, s.count, s), data, s)
            case _ if meaning := _MEANING.get(type(s)):
                meaning(self, s)
            case _:
                raise CompilerBug(f"{self.kernel.name}: no meaning for {type(s).__name__}")

    def meet(self, s: k.Sync | k.ClusterSync) -> Iterator[Wait]:
        """Warps that are here whole arrive; none or all of them are, at a barrier of all."""
        whole: Any = self.active.all(axis=2)
        some: Any = self.active.any(axis=2)
        everybody = isinstance(s, k.ClusterSync) or not s.warps
        uneven = some.any(axis=1) != some.all(axis=1) if everybody else np.zeros(1, bool)
        if (whole != some).any() or uneven.any():
            self.fail(s, "only some threads of a block reach a barrier")
        at = self.machine.cluster_meeting() if isinstance(s, k.ClusterSync) else self.machine.meeting(s.number, s.warps)
        blocks = self.block[some.any(axis=1), 0, 0]
        before, line = at.rounds[blocks].copy(), self.line
        for i, j in np.argwhere(some):
            if why := at.arrive(int(self.block[i, 0, 0]), int(self.warp[0, j, 0]), line if everybody else 0):
                self.fail(s, why)

        def ready() -> bool:
            return bool((at.rounds[blocks] > before).all())

        if not ready():
            yield Wait(line, ready, at.why)

    def plays(self, role: k.Role) -> Any:
        """The threads of a role: all or none of a team."""
        return np.broadcast_to((self.warp >= role.first) & (self.warp < role.first + role.count), self.shape)


_MEANING: dict[type, Callable[[Team, Any], None]] = {**copies.MEANING, **products.MEANING}
