"""Threads that go step by step together: their numbers, registers and values, and how they reach memory.

Every value is an array over [block, warp, lane]; `active` are the threads that execute a statement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from terrazzo.errors import CompilerBug, IndexOutOfRange
from terrazzo.hw.transfer import SHUFFLE, VOTE
from terrazzo.interp.kernel import copies, products
from terrazzo.interp.kernel.memory import Access, Conflict, Output
from terrazzo.ir.address import evaluate
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr, Loaded
from terrazzo.ir.layout import HARDWARE
from terrazzo.ir.node import Node, topological

if TYPE_CHECKING:
    from terrazzo.interp.kernel.machine import Machine


REMEMBERED = 1 << 22
"""How many numbers threads may remember of index expressions."""


class Threads:
    """Those of some warps of some blocks of a machine, both numbered as there."""

    def __init__(self, machine: Machine, blocks: Any, warps: Any) -> None:
        self.machine, self.kernel = machine, machine.kernel
        self.shape = (len(blocks), len(warps), k.WARP)
        self.block = blocks[:, None, None]
        self.warp = warps[None, :, None]
        self.active = np.ones(self.shape, bool)
        self.line = 0
        self.doing: Node = self.kernel
        self.loaded: dict[Node, Any] = {}
        numbers = {
            "block": machine.ids[blocks][:, None, None],
            "warp": self.warp,
            "lane": np.arange(k.WARP)[None, None, :],
        }
        self.env: dict[Any, Any] = {e: numbers[e.name] for e in machine.variables}
        self.values: dict[Node, Any] = {}
        self.registers: dict[k.Registers, Any] = {}
        self.known: dict[k.Registers, Any] = {}
        self.groups = copies.Groups(self.shape)
        self.fragments = products.InFlight(self.shape, self.kernel.body)
        self.threads = frozenset(machine.variables)
        self.remembered: dict[Any, Any] = {}

    # -- what is wrong ------------------------------------------------------------------------------------------------

    def fail(self, s: Node, what: str, where: Any = None, other: str = "") -> NoReturn:
        """CompilerBug, with the statement and its line; `where` is (block, warp, lane[, element]) of the team, the
        first that fails.
        """
        who = ""
        if where is not None:
            block, warp = self.machine.ids[self.block[where[0], 0, 0]], self.warp[0, where[1], 0]
            who = f", block {block}, warp {warp}, lane {where[2]}"
        text = self.machine.text(self.line)
        raise CompilerBug(
            f"{self.kernel.name}: {type(s).__name__} {what}: line {self.line} of the kernel, `{text}`{who}{other}"
        )

    def refuse(self, found: Conflict | None, x: Access, s: Node) -> None:
        """CompilerBug for an access that conflicts with another, with both of them."""
        if found is not None:
            by = [f"by {found.agent}"] if found.agent else []
            site = [f"line {found.site} `{self.machine.text(found.site)}`"] if found.site >= 0 else []
            other = f"; the other access is {', '.join(by + site)}" if by + site else ""
            self.fail(s, f"{found.what} (element {x.a[found.which]})", x.by or np.argwhere(x.mask)[found.which], other)

    def one_thread(self, s: Any) -> list[tuple[int, int, tuple[int, int, int]]]:
        """Who executes a statement that one thread of a warp may: (block, warp) of the machine, and where that is in
        our arrays.
        """
        if (self.active.sum(axis=2) > 1).any():
            self.fail(s, "is executed by several threads of a warp")
        return [(int(self.block[i, 0, 0]), int(self.warp[0, j, 0]), (i, j, n)) for i, j, n in np.argwhere(self.active)]

    # -- memory -------------------------------------------------------------------------------------------------------

    def at(self, place: l.Buffer, index: Sequence[IntExpr], count: int, s: Node, active: Any = None) -> Any:
        """Offsets of `count` elements for every thread, an int in registers; those of active threads must lie
        inside.
        """
        active = self.active if active is None else active
        wide = min(count * place.type.dtype.size, 16) if isinstance(s, k.Move | k.AsyncCopy) else 1
        found, wrong = self.once((place, index, count, wide), index, lambda: self.offsets(place, index, count, wide))
        for what, where in wrong:
            if (bad := np.broadcast_to(where, self.shape) & active).any():
                self.fail(s, what, np.argwhere(bad)[0])
        return self.constant(found, place, s) if isinstance(place, k.Registers) else found

    def offsets(
        self, place: l.Buffer, index: Sequence[IntExpr], count: int, wide: int
    ) -> tuple[Any, list[tuple[str, Any]]]:
        """The offsets that `at` gives, and for each thing that may be wrong with them, with which threads it is."""
        offset: Any = 0
        wrong = []
        for e, extent, stride in zip(index, place.type.static_shape, place.type.element_strides, strict=True):
            value = self.number_of(e)
            if np.any(outside := (value < 0) | (value >= extent)):
                wrong.append((f"at {place.name}[{e}] is outside [0, {extent})", outside))
            offset = offset + value * stride
        size = self.size(place)
        if np.any(beyond := offset + count > size):
            wrong.append((f"goes {count} elements on, beyond the end of {place.name}", beyond))
        if wide > 1 and np.any(odd := offset * place.type.dtype.size % wide != 0):
            wrong.append((f"of {count} elements at {place.name} is not aligned to {wide} bytes", odd))
        if isinstance(place, k.Registers):
            return offset, wrong
        found = np.broadcast_to(offset, self.shape)[..., None] + np.arange(count)
        return np.clip(found, 0, max(size - 1, 0)), wrong

    def once(self, key: Any, index: Sequence[IntExpr], found: Callable[[], Any]) -> Any:
        """What follows from index expressions: found once for all steps in which their variables have the same
        values.
        """
        exprs = [e for e in index if isinstance(e, Expr)]
        if any(map(_loaded, exprs)):
            return found()
        key = (key, *(_plain(self.env[v]) for e in exprs for v in e.free - self.threads))
        if key not in self.remembered:
            if len(self.remembered) > REMEMBERED // self.active.size // 4:
                self.remembered.clear()
            self.remembered[key] = found()
        return self.remembered[key]

    def constant(self, offset: Any, place: k.Registers, s: Node) -> int:
        """An index into registers, which must not differ between threads."""
        if isinstance(offset, int):
            return offset
        values = np.unique(np.broadcast_to(offset, self.shape)[self.active])
        if values.size != 1:
            self.fail(s, f"indexes the registers {place.name} by a number that threads differ in")
        return int(values[0])

    def size(self, place: l.Buffer) -> int:
        return max(k.shared_bytes(place) // place.type.dtype.size, 1)

    def access(self, at: Any, active: Any) -> Access:
        """The elements of active threads."""
        mask = np.broadcast_to(active[..., None], at.shape)
        block, warp = np.broadcast_to(self.block[..., None], at.shape), np.broadcast_to(self.warp[..., None], at.shape)
        return Access(block[mask], at[mask], warp[mask], mask)

    def whole(self, b: int, a: Any, w: int, by: tuple[int, int, int]) -> Access:
        """Elements `a` of block `b` that one thread of warp `w` uses: `by`, as our arrays count it."""
        return Access(np.full(a.size, b), a, np.full(a.size, w), by=by)

    def bytes(self, place: k.Shared, at: Any) -> Any:
        """Addresses in shared memory of elements of a place."""
        return self.kernel.offsets[place] + HARDWARE[place.swizzle](at * place.type.dtype.size)

    def get(self, place: l.Buffer, at: Any, s: Node, count: int = 1, active: Any = None) -> Any:
        """Elements [block, warp, lane, element] that threads read: at offsets, or `count` of them from one on in
        registers.
        """
        active = self.active if active is None else active
        if isinstance(place, k.Registers):
            if not (known := self.known[place][..., at : at + count].all(axis=-1) | ~active).all():
                self.fail(s, f"reads registers of {place.name} that nobody wrote", np.argwhere(~known)[0])
            self.fragments.refuse(self, place, at, count, s)
            self.fragments.touch(place, active)
            return self.registers[place][..., at : at + count]
        x = self.access(at, active)
        costs = self.machine.costs
        if isinstance(place, k.Shared):
            self.refuse((memory := self.machine.places[place]).check_read(x.b, x.a, x.w), x, s)
            clocks = self.machine.clocks
            memory.note_read(x.b, x.a, clocks.agent(x.b, x.w), clocks.now(x.b, x.w), self.line)
            if costs is not None and not isinstance(s, k.LoadMatrix):
                costs.shared(self.doing, self.bytes(place, at[..., 0]), active, place.type.dtype.size * at.shape[-1])
            return memory.data[np.broadcast_to(self.block[..., None], at.shape), at]
        if costs is not None and not isinstance(s, k.AsyncCopy):
            costs.memory(self.doing, at[..., 0] * place.type.dtype.size, active, place.type.dtype.size * at.shape[-1])
        if (output := self.machine.outputs.get(place)) is not None:
            self.refuse(output.read(self.machine.clocks, self.machine.ids[x.b], x.b, x.a, x.w), x, s)
            return output.data[at]
        return self.machine.memory[place][at]

    def put(self, place: l.Buffer, at: Any, data: Any, s: Node) -> None:
        """Active threads write [block, warp, lane, element]."""
        if isinstance(place, k.Registers):
            count = data.shape[-1]
            self.fragments.refuse(self, place, at, count, s)
            self.fragments.touch(place, self.active)
            held = self.registers[place][..., at : at + count]
            np.copyto(held, data.astype(held.dtype, copy=False), where=self.active[..., None])
            self.known[place][..., at : at + count] |= self.active[..., None]
            return
        x = self.access(at, self.active)
        values = np.broadcast_to(data, at.shape)[x.mask]
        costs = self.machine.costs
        if isinstance(place, k.Shared):
            if costs is not None and not isinstance(s, k.StoreMatrix):
                costs.shared(
                    self.doing,
                    self.bytes(place, at[..., 0]),
                    self.active,
                    place.type.dtype.size * at.shape[-1],
                    write=True,
                )
            self.write(place, x, values, s)
        else:
            if costs is not None:
                costs.memory(
                    self.doing,
                    at[..., 0] * place.type.dtype.size,
                    self.active,
                    place.type.dtype.size * at.shape[-1],
                    write=True,
                )
            self.write_output(place, x, values, s)

    def write(self, place: k.Shared, x: Access, values: Any, s: Node, landing: bool = False) -> None:
        """Write to shared memory; `landing` where a copy of the warps' own arrives."""
        memory, clocks = self.machine.places[place], self.machine.clocks
        self.refuse(memory.check_write(x.b, x.a, x.w, landing), x, s)
        if landing:
            memory.land(x.b, x.a)
        self.refuse(memory.write(x.b, x.a, clocks.agent(x.b, x.w), clocks.now(x.b, x.w), values, self.line), x, s)

    def write_output(self, place: l.Buffer, x: Access, values: Any, s: Node, box: bool = False) -> None:
        """Write to global memory."""
        found = self.output(place, s).write(
            self.machine.clocks, self.machine.ids[x.b], x.b, x.a, x.w, values, self.line, box
        )
        self.refuse(found, x, s)

    def combine(self, place: l.Buffer, x: Access, values: Any, function: str, s: Node, box: bool = False) -> None:
        """Add to global memory (or take the minimum, the maximum)."""
        found = self.output(place, s).combine(
            self.machine.clocks, self.machine.ids[x.b], x.b, x.a, x.w, values, function, self.line, box
        )
        self.refuse(found, x, s)

    def output(self, place: l.Buffer, s: Node) -> Output:
        """A buffer that the kernel writes."""
        if (found := self.machine.outputs.get(place)) is None:
            self.fail(s, f"writes {place.name}, which the kernel only reads")
        return found

    def remote(self, x: k.Remote) -> Any:
        """An element of shared memory of another block of the cluster."""
        at = self.at(x.buffer, x.index, 1, x)
        here, clocks, place = self.access(at, self.active), self.machine.clocks, self.machine.places[x.buffer]
        ranks = np.broadcast_to(self.number_of(x.rank), self.shape)
        if (bad := ((ranks < 0) | (ranks >= self.kernel.cluster)) & self.active).any():
            self.fail(x, f"names a block outside its cluster of {self.kernel.cluster}", np.argwhere(bad)[0])
        peers = np.clip(self.block - self.block % self.kernel.cluster + ranks, 0, clocks.blocks - 1)
        there = Access(np.broadcast_to(peers[..., None], at.shape)[here.mask], here.a, here.w, here.mask)
        self.refuse(place.check_read(there.b, there.a, there.w, by=here.b), there, x)
        place.note_read(there.b, there.a, clocks.agent(here.b, here.w), clocks.now(here.b, here.w), self.line)
        if self.machine.costs is not None:
            self.machine.costs.shared(self.doing, self.bytes(x.buffer, at[..., 0]), self.active, x.dtype.size)
        for b, by, w in {*zip(there.b.tolist(), here.b.tolist(), here.w.tolist(), strict=True)}:
            clocks.visit(b, (by, w))
        return place.data[peers[..., None], at][..., 0]

    # -- terms --------------------------------------------------------------------------------------------------------

    def number_of(self, e: IntExpr) -> Any:
        """The value of an index expression: an int, or an array that broadcasts to [block, warp, lane]."""
        return e if isinstance(e, int) else self.once(e, (e,), lambda: self.evaluated(e))

    def evaluated(self, e: Expr) -> Any:
        env = self.env
        if gathered := _loaded(e):
            env = dict(env)
            for x in gathered:
                at = self.term(x.value).astype(np.int64)
                extent = self.number_of(x.extent)
                if ((at < 0) | (at >= extent))[self.active].any():
                    raise IndexOutOfRange(f"{self.kernel.name}: an index is out of range for its dimension of {extent}")
                env[x] = np.clip(at, 0, max(extent - 1, 0))
        return evaluate(e, env)

    def start(self, place: l.Buffer, index: Sequence[IntExpr]) -> Any:
        """For every thread, the offset of an index into a place; where it lies is not asked."""
        numbers = zip(index, place.type.element_strides, strict=True)
        return np.broadcast_to(sum((self.number_of(e) * step for e, step in numbers), start=0), self.shape)

    def chosen(self, e: IntExpr) -> Any:
        """The value of an index expression for every active thread."""
        return np.broadcast_to(self.number_of(e), self.shape)[self.active]

    def holds(self, inside: Sequence[IntExpr]) -> Any:
        """The threads for which expressions are not negative."""
        found = np.ones(self.shape, bool)
        for e in inside:
            found = found & (self.number_of(e) >= 0)
        return found

    def term(self, x: Node) -> Any:
        """The value of a term for every thread."""
        match x:
            case l.Literal():
                return np.full(self.shape, x.value, x.type.numpy)
            case l.Index():
                return np.broadcast_to(np.asarray(self.number_of(x.value), np.int64), self.shape)
            case k.Value():
                return self.values[x]
            case k.Shuffle():
                if (self.active & ~self.active[..., np.arange(k.WARP) ^ x.mask]).any():
                    self.fail(x, "is a shuffle that reads from lanes that do not take part")
                return SHUFFLE.run(self.term(x.x), x.mask)
            case k.Vote():
                if (self.active.any(axis=2) & ~self.active.all(axis=2)).any():
                    self.fail(x, "is a vote of some lanes of a warp only")
                return VOTE.run(self.term(x.x), x.kind)
            case k.Remote():
                return self.remote(x)
            case l.Load():
                if x not in self.loaded:  # equal loads in a statement are one
                    active = self.active & self.holds(x.inside) if x.inside else self.active
                    data = self.get(x.buffer, self.at(x.buffer, x.index, 1, x, active), x, active=active)[..., 0]
                    self.loaded[x] = np.where(active, data, np.zeros((), data.dtype)) if x.inside else data
                return self.loaded[x]
            case l.Apply():
                found = x.fn.numpy(*(self.term(a) for a in x.args))
                return np.broadcast_to(np.asarray(found, x.dtype.numpy), self.shape)
        raise CompilerBug(f"{self.kernel.name}: no value for {type(x).__name__}")


def _plain(value: Any) -> Any:
    """The value of a variable, to look something up by."""
    return value if isinstance(value, int) else (value.shape, value.tobytes())


@lru_cache(maxsize=1 << 14)
def _loaded(e: Expr) -> list[Loaded]:
    return [x for x in topological([e]) if isinstance(x, Loaded)]
