"""The meaning of Kernel IR, on numpy: all threads of some blocks step by step together.

Every value is an array over [block, warp, lane]. Asynchronous copies arrive as late as they may, when they are waited for. Shared
memory remembers who wrote and read what since the last barrier: a read of what another warp wrote, or of what nobody wrote, is a
CompilerBug that names the statement. So are accesses out of bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from terrazzo.errors import CompilerBug, UserError
from terrazzo.hw import ldmatrix, mma_sync, tma
from terrazzo.hw.transfer import CP_ASYNC, SHUFFLE
from terrazzo.interp.loop import run_call
from terrazzo.interp.memory import BarrierState, SharedState, flat_memory, view
from terrazzo.interp.tensor import Call
from terrazzo.ir.address import evaluate, flatten
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr, Loaded
from terrazzo.ir.layout import HARDWARE
from terrazzo.ir.node import Node, topological

TOGETHER = 1 << 14
"""How many threads are simulated together."""


def run(program: k.Program, inputs: Mapping[str, Any], *, call: Call | None = None) -> list[Any]:
    """The results of `program`."""
    memory: dict[l.Buffer, Any] = {b: np.asarray(inputs[b.name]).astype(b.type.dtype.numpy) for b in program.inputs}
    for step in program.steps:
        if isinstance(step, k.Kernel):
            run_kernel(step, memory)
        else:
            run_call(step, memory, False, call)
    return [memory[b] for b in program.results]


def run_kernel(kernel: k.Kernel, memory: dict[l.Buffer, Any]) -> None:
    """Run all blocks of a kernel on `memory`, arrays in the shape of their buffers; adds those it writes."""
    flat = {b: flat_memory(b, memory[b]) for b in kernel.params if b not in kernel.writes}
    for b in kernel.writes:
        flat[b] = flat_memory(b, memory.get(b))
    step = max(TOGETHER // kernel.threads, 1)
    for first in range(0, kernel.grid, step):
        blocks = _Blocks(kernel, flat, first, min(step, kernel.grid - first))
        blocks.statements(kernel.body)
        blocks.end()
    for b in kernel.writes:
        memory[b] = view(b, flat[b]).copy()


@dataclass
class _Blocks:
    """Some blocks of a kernel, at one point of their common execution."""

    kernel: k.Kernel
    memory: Mapping[l.Buffer, Any]
    first: int
    count: int
    env: dict[Any, Any] = field(default_factory=dict)
    values: dict[Node, Any] = field(default_factory=dict)
    registers: dict[k.Registers, Any] = field(default_factory=dict)
    known: dict[k.Registers, Any] = field(default_factory=dict)
    groups: list[list[tuple[k.Shared, Any, Any, Any]]] = field(default_factory=list)
    now: list[tuple[k.Shared, Any, Any, Any]] = field(default_factory=list)
    barriers: dict[k.Barriers, BarrierState] = field(default_factory=dict)
    epoch: int = 1

    def __post_init__(self) -> None:
        self.shape = (self.count, self.kernel.warps, k.WARP)
        self.active = np.ones(self.shape, bool)
        self.block = np.arange(self.count)[:, None, None]
        self.warp = np.broadcast_to(np.arange(self.kernel.warps)[None, :, None], self.shape)
        numbers = {"block": self.block + self.first, "warp": self.warp, "lane": np.arange(k.WARP)[None, None, :]}
        for e in topological(self.kernel.body):
            if getattr(e, "name", None) in numbers and isinstance(e, Expr):
                self.env[e] = numbers[e.name]  # type: ignore[attr-defined]
        self.shared: dict[k.Shared, SharedState] = {}
        for s in self.kernel.shared:
            size = (self.count, k.shared_bytes(s) // s.type.dtype.size)
            nobody = np.full(size, -1, np.int32)
            data = np.zeros(size, s.type.dtype.numpy)
            never = np.zeros(size, np.int32)
            self.shared[s] = SharedState(data, never, nobody, never.copy(), nobody.copy(), np.zeros(size, bool), nobody.copy())

    # -- statements ---------------------------------------------------------------------------------------------------

    def statements(self, body: Sequence[Node]) -> None:
        for s in body:
            self.statement(s)

    def end(self) -> None:
        """Nothing may come to shared memory once it belongs to another block."""
        late = [place for place, state in self.shared.items() if state.flying.any()]
        late += [place for state in self.barriers.values() for boxes in state.flying.values() for place, _, _ in boxes]
        if late:
            raise CompilerBug(f"{self.kernel.name}: ends while copies are on their way to {late[0].name}")

    def statement(self, s: Node) -> None:
        match s:
            case k.Let():
                self.values[s.value] = self.term(s.term)
            case k.Declare():
                count = int(np.prod(s.place.type.static_shape, dtype=np.int64))
                fill = s.init.value if s.init else 0
                self.registers[s.place] = np.full((*self.shape, count), fill, s.place.type.dtype.numpy)
                self.known[s.place] = np.full((*self.shape, count), s.init is not None)
            case l.Store():
                self.put(s.buffer, self.at(s.buffer, s.index, 1, s), self.term(s.value)[..., None], s)
            case k.Move():
                data = self.get(s.source, self.at(s.source, s.at, s.count, s), s)
                self.put(s.target, self.at(s.target, s.to, s.count, s), data, s)
            case k.AsyncCopy():
                self.copy(s)
            case k.Commit():
                self.groups.append(self.now)
                self.now = []
            case k.WaitGroups():
                while len(self.groups) > s.open:
                    for place, at, data, active in self.groups.pop(0):
                        self.shared[place].flying[np.broadcast_to(self.block[..., None], at.shape), at] = False
                        self.write(place, at, data, active, s)
            case k.Sync():
                if not (self.active.all(axis=(1, 2)) | ~self.active.any(axis=(1, 2))).all():
                    raise CompilerBug(f"{self.kernel.name}: only some threads of a block reach a barrier")
                self.epoch += 1
            case k.InitBarriers():
                self.barriers[s.barriers] = BarrierState(self.epoch, np.zeros((self.count, s.barriers.type.static_shape[0]), np.int64))
            case k.Expect():
                self.expect(s)
            case k.TensorLoad():
                self.tensor_load(s)
            case k.WaitBarrier():
                self.wait_barrier(s)
            case k.LoadMatrix():
                self.load_matrix(s)
            case k.Multiply():
                self.multiply(s)
            case k.For():
                assert isinstance(s.axis.extent, int)
                for i in range(s.axis.extent):
                    self.env[s.axis] = i
                    self.statements(s.body)
            case k.If():
                outer = self.active
                self.active = outer & self.holds(s.inside)
                if self.active.any():
                    self.statements(s.body)
                self.active = outer
            case _:
                raise CompilerBug(f"{self.kernel.name}: no meaning for {type(s).__name__}")

    def holds(self, inside: Sequence[IntExpr]) -> Any:
        found = np.ones(self.shape, bool)
        for e in inside:
            found = found & (self.number(e) >= 0)
        return found

    def copy(self, s: k.AsyncCopy) -> None:
        inside = self.holds(s.inside)
        outer = self.active
        self.active = outer & inside
        data = self.get(s.source, self.at(s.source, s.at, s.count, s), s)
        self.active = outer
        data = CP_ASYNC.run(data, inside)
        at = self.at(s.target, s.to, s.count, s)
        active = np.broadcast_to(outer[..., None], at.shape)
        b, a, w = (np.broadcast_to(x, at.shape)[active] for x in (self.block[..., None], at, self.warp[..., None]))
        self.refuse_readers(s.target, b, a, w, s)
        state = self.shared[s.target]
        if state.flying[b, a].any():
            raise CompilerBug(f"{self.kernel.name}: AsyncCopy writes {s.target.name}, where a copy is on its way")
        state.flying[b, a], state.flyer[b, a] = True, w
        self.now.append((s.target, at, data, outer))

    def expect(self, s: k.Expect) -> None:
        block, slot = self.one_thread(s, s.slot)
        state = self.made(s)
        for b, n in zip(block, slot, strict=True):
            state.expected[b, n] = state.expected.get((b, n), 0) + s.bytes

    def tensor_load(self, s: k.TensorLoad) -> None:
        """Boxes set out now and arrive when their barrier is waited for; where they go, no warp may still be reading."""
        block, slot = self.one_thread(s, s.slot)
        at = [self.chosen(e) for e in s.at]
        description = tma.tensor_map(s.source.type, s.box, s.target.swizzle)
        to = self.chosen(flatten(s.to, s.target.type.element_strides))
        for i, (b, n) in enumerate(zip(block, slot, strict=True)):
            data = description.load(view(s.source, self.memory[s.source]), [int(a[i]) for a in at])
            plain = data[HARDWARE[s.target.swizzle](np.arange(data.size))].view(s.target.type.dtype.numpy)
            place = int(to[i]) + np.arange(plain.size)
            self.refuse_readers(s.target, np.full(plain.size, b), place, np.full(plain.size, -3), s)
            self.made(s).flying.setdefault((b, n), []).append((s.target, place, plain))

    def wait_barrier(self, s: k.WaitBarrier) -> None:
        state = self.made(s)
        if state.born == self.epoch:
            raise CompilerBug(
                f"{self.kernel.name}: waits for {s.barriers.name} as one thread makes it, with no barrier of the block between"
            )
        slots, phases = (np.broadcast_to(self.number(e), self.shape) for e in (s.slot, s.phase))
        for b in range(self.count):
            if not self.active[b].any():
                continue
            n, phase = int(slots[b][self.active[b]][0]), int(phases[b][self.active[b]][0])
            arrived = 0
            for place, at, data in state.flying.pop((b, n), []):
                arrived += data.nbytes
                block = np.full(at.size, b)
                self.refuse_readers(place, block, at, np.full(at.size, -3), s)
                shared = self.shared[place]
                shared.data[b, at] = data
                shared.written[b, at], shared.writer[b, at] = 0, -3  # all who waited for the barrier may read it
            if (b, n) in state.expected:
                if state.expected.pop((b, n)) != arrived:
                    raise CompilerBug(f"{self.kernel.name}: {arrived} bytes come to {s.barriers.name}[{n}], and others were announced")
                state.done[b, n] += 1
            if state.done[b, n] % 2 == phase:
                raise CompilerBug(f"{self.kernel.name}: waits for ever at {s.barriers.name}[{n}], phase {phase}")

    def made(self, s: k.Expect | k.TensorLoad | k.WaitBarrier) -> BarrierState:
        """The barriers a statement names."""
        if s.barriers not in self.barriers:
            raise CompilerBug(f"{self.kernel.name}: {type(s).__name__} at {s.barriers.name}, which nobody made")
        return self.barriers[s.barriers]

    def one_thread(self, s: Any, slot: IntExpr) -> tuple[list[int], list[int]]:
        """The blocks in which a statement is executed, by one thread each, and the slot it names there."""
        if (self.active.sum(axis=(1, 2)) > 1).any():
            raise CompilerBug(f"{self.kernel.name}: several threads of a block execute {type(s).__name__}")
        blocks = np.nonzero(self.active.any(axis=(1, 2)))[0]
        return [int(b) for b in blocks], [int(n) for n in self.chosen(slot)]

    def chosen(self, e: IntExpr) -> Any:
        """The value of an expression for every active thread."""
        return np.broadcast_to(self.number(e), self.shape)[self.active]

    def refuse_readers(self, place: k.Shared, b: Any, a: Any, w: Any, s: Node) -> None:
        """CompilerBug where another warp has read, since the last barrier, what is to be written."""
        state = self.shared[place]
        if ((state.read[b, a] == self.epoch) & (state.reader[b, a] != w)).any():
            raise CompilerBug(
                f"{self.kernel.name}: {type(s).__name__} writes {place.name} while another warp reads it, with no barrier between"
            )

    def load_matrix(self, s: k.LoadMatrix) -> None:
        record = ldmatrix.move(s.instruction)
        rows = self.at(s.source, s.at, 1, s)[..., 0]
        reg, lane = np.meshgrid(np.arange(1 << record.layout.bits("reg")), np.arange(k.WARP))
        where = record.layout.coordinates(reg=reg, lane=lane)
        at = rows[..., where.get("j", 0) * 8 + where["r"]] + where["c"]
        data = np.ascontiguousarray(self.get(s.source, at, s))
        self.put(s.target, self.at(s.target, s.to, record.count, s), data.view(np.uint32), s)

    def multiply(self, s: k.Multiply) -> None:
        record = mma_sync.product(s.instruction)
        operands = []
        for place, at, fragment in ((s.a, s.a_at, record.a), (s.b, s.b_at, record.b), (s.d, s.d_at, record.d)):
            count = fragment.registers if place is not s.d else fragment.elements
            data = np.ascontiguousarray(self.get(place, self.at(place, at, count, s), s))
            operands.append(data.view(fragment.dtype.numpy))
        self.put(s.d, self.at(s.d, s.d_at, record.d.elements, s), record.run(*operands), s)

    # -- memory -------------------------------------------------------------------------------------------------------

    def at(self, place: l.Buffer, index: Sequence[IntExpr], count: int, s: Node) -> Any:
        """Offsets of `count` elements for every thread; those of active threads must lie inside."""
        offset = np.broadcast_to(self.number(flatten(tuple(index), place.type.element_strides)), self.shape)
        found = offset[..., None] + np.arange(count)
        if isinstance(s, k.AsyncCopy) and place is s.source:
            active = self.active & self.holds(s.inside)
        else:
            active = self.active
        for e, extent in zip(index, place.type.static_shape, strict=True):
            value = np.broadcast_to(self.number(e), self.shape)
            if ((value < 0) | (value >= extent))[active].any():
                raise CompilerBug(f"{self.kernel.name}: {type(s).__name__} at {place.name}[{e}] is outside [0, {extent})")
        size = self.size(place)
        if (found[active] >= size).any():
            raise CompilerBug(f"{self.kernel.name}: {type(s).__name__} goes {count} elements on, beyond the end of {place.name}")
        wide = min(count * place.type.dtype.size, 16)
        if isinstance(s, k.Move | k.AsyncCopy) and (offset[active] * place.type.dtype.size % wide).any():
            raise CompilerBug(f"{self.kernel.name}: {type(s).__name__} of {count} elements at {place.name} is not aligned to {wide} bytes")
        return np.clip(found, 0, max(size - 1, 0))

    def size(self, place: l.Buffer) -> int:
        return max(k.shared_bytes(place) // place.type.dtype.size, 1)

    def get(self, place: l.Buffer, at: Any, s: Node) -> Any:
        if isinstance(place, k.Registers):
            if not np.take_along_axis(self.known[place], at, axis=-1)[self.active].all():
                raise CompilerBug(f"{self.kernel.name}: {type(s).__name__} reads registers of {place.name} that nobody wrote")
            return np.take_along_axis(self.registers[place], at, axis=-1)
        if isinstance(place, k.Shared):
            state = self.shared[place]
            block = np.broadcast_to(self.block[..., None], at.shape)
            warp = np.broadcast_to(self.warp[..., None], at.shape)
            active = np.broadcast_to(self.active[..., None], at.shape)
            b, a, w = block[active], at[active], warp[active]
            if state.flying[b, a].any():
                raise CompilerBug(f"{self.kernel.name}: {type(s).__name__} reads {place.name}, where a copy is on its way")
            if (state.writer[b, a] == -1).any():
                raise CompilerBug(f"{self.kernel.name}: {type(s).__name__} reads elements of {place.name} that nobody wrote")
            if ((state.written[b, a] == self.epoch) & (state.writer[b, a] != w)).any():
                raise CompilerBug(
                    f"{self.kernel.name}: {type(s).__name__} reads {place.name} as another warp wrote it, with no barrier between"
                )
            others = (state.read[b, a] == self.epoch) & (state.reader[b, a] != w)
            state.read[b, a], state.reader[b, a] = self.epoch, w
            others |= state.reader[b, a] != w  # of several warps in this statement the last is remembered
            state.reader[b[others], a[others]] = -2
            return state.data[block, at]
        return self.memory[place][at]

    def put(self, place: l.Buffer, at: Any, data: Any, s: Node) -> None:
        if isinstance(place, k.Registers):
            old = np.take_along_axis(self.registers[place], at, axis=-1)
            new = np.where(self.active[..., None], data, old)
            np.put_along_axis(self.registers[place], at, new.astype(old.dtype), axis=-1)
            known = np.take_along_axis(self.known[place], at, axis=-1) | self.active[..., None]
            np.put_along_axis(self.known[place], at, known, axis=-1)
        elif isinstance(place, k.Shared):
            self.write(place, at, data, self.active, s)
        elif place not in self.kernel.writes:
            raise CompilerBug(f"{self.kernel.name}: {type(s).__name__} writes {place.name}, which the kernel only reads")
        else:
            active = np.broadcast_to(self.active[..., None], at.shape)
            values, where = np.broadcast_to(data, at.shape)[active], at[active]
            self.memory[place][where] = values
            if not np.array_equal(self.memory[place][where], values, equal_nan=values.dtype.kind == "f"):
                raise CompilerBug(f"{self.kernel.name}: {type(s).__name__}: threads write different values to one element of {place.name}")

    def write(self, place: k.Shared, at: Any, data: Any, who: Any, s: Node) -> None:
        state = self.shared[place]
        active = np.broadcast_to(who[..., None], at.shape)
        b, a, w = (np.broadcast_to(x, at.shape)[active] for x in (self.block[..., None], at, self.warp[..., None]))
        self.refuse_readers(place, b, a, w, s)
        if ((state.written[b, a] == self.epoch) & (state.writer[b, a] != w) & (state.writer[b, a] != -1)).any():
            raise CompilerBug(
                f"{self.kernel.name}: {type(s).__name__} writes {place.name} where another warp wrote, with no barrier between"
            )
        if (state.flying[b, a] & (state.flyer[b, a] != w)).any():
            raise CompilerBug(f"{self.kernel.name}: {type(s).__name__} writes {place.name}, where a copy is on its way")
        values = np.broadcast_to(data, at.shape)[active]
        state.data[b, a] = values
        state.written[b, a], state.writer[b, a] = self.epoch, w
        if (state.writer[b, a] != w).any():
            raise CompilerBug(f"{self.kernel.name}: {type(s).__name__}: several warps write one element of {place.name}")

    # -- terms --------------------------------------------------------------------------------------------------------

    def number(self, e: IntExpr) -> Any:
        if isinstance(e, int):
            return e
        env = self.env
        if gathered := [x for x in topological([e]) if isinstance(x, Loaded)]:
            env = dict(env)
            for x in gathered:
                at = self.term(x.value).astype(np.int64)
                extent = self.number(x.extent)
                if ((at < 0) | (at >= extent))[self.active].any():
                    raise UserError(f"{self.kernel.name}: an index is out of range for its dimension of {extent}")
                env[x] = np.clip(at, 0, max(extent - 1, 0))
        return evaluate(e, env)

    def term(self, x: Node) -> Any:
        """The value of a term for every thread."""
        match x:
            case l.Literal():
                return np.full(self.shape, x.value, x.type.numpy)
            case l.Index():
                return np.broadcast_to(np.asarray(self.number(x.value), np.int64), self.shape)
            case k.Value():
                return self.values[x]
            case k.Shuffle():
                if (self.active & ~self.active[..., np.arange(k.WARP) ^ x.mask]).any():
                    raise CompilerBug(f"{self.kernel.name}: a shuffle reads from lanes that do not take part")
                return SHUFFLE.run(self.term(x.x), x.mask)
            case l.Load():
                return self.load(x)
            case l.Apply():
                found = x.fn.numpy(*(self.term(a) for a in x.args))
                return np.broadcast_to(np.asarray(found, x.dtype.numpy), self.shape)
        raise CompilerBug(f"{self.kernel.name}: no value for {type(x).__name__}")

    def load(self, x: l.Load) -> Any:
        outer = self.active
        inside = self.holds(x.inside)
        self.active = outer & inside
        data = self.get(x.buffer, self.at(x.buffer, x.index, 1, x), x)[..., 0]
        self.active = outer
        return np.where(inside, data, np.zeros((), data.dtype)) if x.inside else data
