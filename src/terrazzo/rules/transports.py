"""How operands come from global memory to the slots of a ring: a record for each transport, with what a plan may ask of
it and how it is written. To add one is to add its class here.

A slot goes round. Who fills it waits until it is free (`acquire`), begins to bring what a step needs (`start`), and
says that it is there, where nobody else does (`publish`). Who reads it waits for that (`wait`), and says when it is
done with it (`release`). Where all warps do everything, `Everyone` puts these acts between its products; where some
only load, these acquire and start, and the others wait and release.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, Protocol

from terrazzo.ir.concatenated import concatenated
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, at_least
from terrazzo.ir.node import Node, substitute
from terrazzo.ir.plan import Ring
from terrazzo.rules.access import box
from terrazzo.rules.tile.digits import Bindings, zero
from terrazzo.rules.tile_to_kernel.builder import Builder
from terrazzo.rules.tile_to_kernel.copies import Copies, Slab


class Writer(Protocol):
    """What a transport needs of who writes the steps of a tile."""

    builder: Builder
    bindings: Bindings
    copies: Copies

    @property
    def visited(self) -> IntExpr:
        """How many steps there are."""

    def of(self, ring: Ring) -> list[Slab]:
        """The slabs of a ring."""

    def slot(self, ring: Ring, t: IntExpr) -> tuple[IntExpr, IntExpr]:
        """The slot of step t, counted from tile to tile, and how often it was used before."""

    def barriers(self, ring: Ring) -> tuple[k.Barriers, k.Barriers | None]:
        """Of a ring that boxes come to: what says that slots are full, and, to who only loads, that they are empty."""

    def freed(self, ring: Ring) -> Sequence[IntExpr]:
        """Which threads say that a slot is free."""

    def fence(self) -> None:
        """What threads put into shared memory is seen by all who read it."""


class Transport:
    """A ring of one writer, filled in one way. Where the loop of steps is written by `Everyone`, what step t needs is
    started `early` steps before it, by the threads `who`.
    """

    name: ClassVar[str]
    since: ClassVar[int] = 0
    """The first architecture that has it."""
    boxes: ClassVar[bool] = False
    """Whether one thread asks for boxes of tensors, whose bytes count at a barrier: only such come to agents that do
    not load themselves, and to several blocks; and all operands of a product come so, or none.
    """
    beside: ClassVar[bool] = True
    """Whether slots fill while threads do something else, so that there may be any number of them."""
    most: ClassVar[int | None] = None
    """Slots that there is a use for, at most."""

    def __init__(self, writer: Writer, ring: Ring) -> None:
        self.writer, self.ring, self.slabs = writer, ring, writer.of(ring)
        self.builder, self.copies = writer.builder, writer.copies

    @classmethod
    def refuses(cls, term: Node, vector: int) -> str:
        """Why it does not bring so many elements of an operand at once; nothing where it does."""
        return ""

    @property
    def early(self) -> int:
        """How many steps before it is needed a slab is started."""
        return self.ring.ahead

    @property
    def who(self) -> list[IntExpr]:
        """The threads that start it: all."""
        return []

    def slot(self, t: IntExpr) -> IntExpr:
        """The slot of a step: each tile begins with the first."""
        return t % self.ring.slots

    def hold(self, moving: Ring | None) -> None:
        """Bring what is held for a tile before its steps, of which the slabs of ring `moving` are brought next."""
        raise NotImplementedError

    def begin(self) -> None:
        """The first steps are started."""
        raise NotImplementedError

    def acquire(self, t: IntExpr) -> None:
        """Wait until the slot of step t is free."""

    def start(self, t: IntExpr) -> None:
        """Begin to bring what step t needs."""
        raise NotImplementedError

    def started(self) -> None:
        """What has to be said after each start, be there something to start or not."""

    def publish(self, t: IntExpr) -> None:
        """What step t needs is there, says who brought it."""

    def wait(self, t: IntExpr) -> None:
        """Until step t is in its slot."""

    def release(self, t: IntExpr) -> None:
        """The slot of step t may be filled again."""

    def end(self) -> None:
        """After the last step of a tile, whose slots may be filled anew."""


class ThroughRegisters(Transport):
    """Each thread loads its pieces, and stores them when the slot is free: the next slab's loads are on their way while
    this one is used.
    """

    name = "ld"
    beside = False
    most = 2

    def hold(self, moving: Ring | None) -> None:
        for s in self.slabs:
            place = self.registers(s)
            self.fetch(s, place, 0)
            self.put(s, place, 0)
        self.writer.fence()

    @property
    def early(self) -> int:
        return 1

    def begin(self) -> None:
        self.fetched = [self.registers(s) for s in self.slabs]
        self.start(0)
        self.store(0)
        self.writer.fence()

    def start(self, t: IntExpr) -> None:
        for s, place in zip(self.slabs, self.fetched, strict=True):
            self.fetch(s, place, t)

    def acquire(self, t: IntExpr) -> None:
        if self.ring.slots == 1:
            self.builder.add(k.Sync())

    def publish(self, t: IntExpr) -> None:
        self.acquire(t)
        self.builder.where([self.writer.visited - 1 - t], lambda: self.store(self.slot(t)))
        self.writer.fence()

    def end(self) -> None:
        if self.writer.visited == 1 and self.builder.depth:
            self.builder.add(k.Sync())  # before the next tile is put there

    def store(self, slot: IntExpr) -> None:
        """What was fetched goes to a slot."""
        for s, place in zip(self.slabs, self.fetched, strict=True):
            self.put(s, place, slot)

    def registers(self, slab: Slab) -> k.Registers:
        """Registers for this thread's pieces of a slab."""
        shape = (self.copies.count(slab), slab.vector)
        return self.builder.registers(slab.place.name + "_r", slab.place.type.dtype, shape)

    def fetch(self, slab: Slab, place: k.Registers, t: IntExpr) -> None:
        """The slab of step t into registers, zeros outside the tensor."""

        def piece(i: IntExpr, at: tuple[IntExpr, ...]) -> None:
            env = self.copies.coordinates(slab, at, t)
            term = slab.term
            inside = list(self.copies.guards(slab, env))
            write: Callable[[], None]
            if isinstance(term, l.Load):
                load: l.Load = substitute(term, env)
                inside += load.inside
                get: Node = k.Move(place, (i, 0), load.buffer, load.index, slab.vector)
                write = lambda: self.builder.add(get)  # noqa: E731
            else:
                write = lambda: self.builder.add(l.Store(place, (i, 0), self.copies.computed(term, env)))  # noqa: E731
            if inside:
                nothing = l.Literal(zero(place.type.dtype), place.type.dtype)
                self.builder.add(*(l.Store(place, (i, v), nothing) for v in range(slab.vector)))
            self.builder.where(inside, write)

        self.copies.pieces(slab, piece)

    def put(self, slab: Slab, place: k.Registers, slot: IntExpr) -> None:
        """What was fetched of a slab goes to a slot."""

        def piece(i: IntExpr, at: tuple[IntExpr, ...]) -> None:
            self.builder.add(k.Move(slab.place, slab.at(slot, at), place, (i, 0), slab.vector))

        self.copies.pieces(slab, piece)


class Copied(Transport):
    """Each thread asks for its pieces by cp.async, in a group for each step. The slab that a step fills is the one read
    before its barrier.
    """

    name = "cp.async"
    since = 80

    @classmethod
    def refuses(cls, term: Node, vector: int) -> str:
        takes = isinstance(term, l.Load) and vector * term.dtype.size in (4, 8, 16)
        return "" if takes else "cp.async needs a plain load of which 4 bytes at least lie together"

    def hold(self, moving: Ring | None) -> None:
        self.copy(0, 0)
        if moving is None or moving.by != self.name:  # else it comes with the first step
            self.builder.add(k.Commit(), k.WaitGroups(0))
            self.writer.fence()

    def begin(self) -> None:
        first = self.writer.bindings.loop_variable("t", self.ring.ahead)

        def step() -> None:
            self.builder.where([self.writer.visited - 1 - first], lambda: self.copy(first, first))
            self.started()

        self.builder.loops([(first, True)], step)

    def start(self, t: IntExpr) -> None:
        self.copy(t, self.slot(t))

    def started(self) -> None:
        self.builder.add(k.Commit())

    def wait(self, t: IntExpr) -> None:
        self.builder.add(k.WaitGroups(self.ring.ahead - 1))
        self.writer.fence()

    def end(self) -> None:
        self.builder.add(k.WaitGroups(0), k.Sync())

    def copy(self, t: IntExpr, slot: IntExpr) -> None:
        """The slabs of step t on their way to a slot."""
        for s in self.slabs:

            def piece(_: IntExpr, at: tuple[IntExpr, ...], s: Slab = s) -> None:
                env = self.copies.coordinates(s, at, t)
                load: l.Load = substitute(s.term, env)
                inside = (*self.copies.guards(s, env), *load.inside)
                self.builder.add(k.AsyncCopy(s.place, s.at(slot, at), load.buffer, load.index, s.vector, inside))

            self.copies.pieces(s, piece)


class Boxes(Transport):
    """One thread asks TMA for boxes, whose bytes count at the full barrier of their slot. Its empty barrier says when
    it is free, where an agent only loads; else a barrier of the block does.
    """

    name = "tma"
    since = 90
    boxes = True

    def __init__(self, writer: Writer, ring: Ring) -> None:
        super().__init__(writer, ring)
        self.full, self.empty = writer.barriers(ring)

    @property
    def who(self) -> list[IntExpr]:
        return [-self.writer.bindings.warp, -k.LANE]

    def slot(self, t: IntExpr) -> IntExpr:
        """It goes on from tile to tile, as the phases of its barriers do."""
        return self.writer.slot(self.ring, t)[0]

    def hold(self, moving: Ring | None) -> None:
        self.builder.where(self.who, lambda: self.start(0))
        self.filled(0)

    def begin(self) -> None:
        first = self.writer.bindings.loop_variable("t", self.ring.ahead)
        inside = [*self.who, self.writer.visited - 1 - first]
        self.builder.loops([(first, True)], lambda: self.builder.where(inside, lambda: self.start(first)))

    def acquire(self, t: IntExpr) -> None:
        if self.empty is not None:
            slot, turn = self.writer.slot(self.ring, t)
            self.builder.add(k.WaitBarrier(self.empty, slot, (turn + 1) % 2))

    def start(self, t: IntExpr) -> None:
        slot = self.slot(t)
        self.builder.add(k.Expect(self.full, slot, sum(s.bytes for s in self.slabs)))
        for s in self.slabs:
            self.ask(s, t, slot)

    def wait(self, t: IntExpr) -> None:
        self.filled(t)
        if self.empty is None:
            self.builder.add(k.Sync())  # nobody reads the slot any more that is filled next

    def release(self, t: IntExpr) -> None:
        if self.empty is not None:
            slot, empty = self.slot(t), self.empty
            shared = max(s.stream.multicast for s in self.slabs)
            ranks: Sequence[IntExpr | None] = range(shared) if shared > 1 else (None,)
            done = self.writer.freed(self.ring)
            self.builder.where(done, lambda: self.builder.add(*(k.Arrive(empty, slot, rank) for rank in ranks)))

    def end(self) -> None:
        self.builder.add(k.Sync())

    def filled(self, t: IntExpr) -> None:
        """Until all bytes of step t have come."""
        slot, turn = self.writer.slot(self.ring, t)
        self.builder.add(k.WaitBarrier(self.full, slot, turn % 2))

    def ask(self, s: Slab, t: IntExpr, slot: IntExpr) -> None:
        """For the boxes of a slab, in each step of the tensor it is in then."""
        if isinstance(s.term, l.Load):
            return self.ask_for(s, s.term, t, slot)
        for x in concatenated(s.term):
            at = self.copies.coordinates(s, [0] * len(s.parts), t)[x.axis]
            own = [e for e in (at - x.first, x.end - 1 - at) if not at_least(e, 0)]
            self.builder.where(own, partial(self.ask_for, s, x.load, t, slot))

    def ask_for(self, s: Slab, load: l.Load, t: IntExpr, slot: IntExpr) -> None:
        """For boxes of a tensor: one for each panel. Of what goes to several blocks, each asks for a part."""
        sizes = {p.axis: p.size for p in s.parts}
        found = box(load, sizes, s.stream.by_axes, sizes)
        assert not isinstance(found, str)
        env = self.copies.coordinates(s, [0] * len(s.parts), t)
        ranks = s.stream.multicast
        share, first = list(found.sides), found.along.index(s.parts[0].axis)
        share[first] //= ranks
        begin: list[IntExpr] = [0] * len(s.parts)
        begin[0] = self.writer.bindings.rank * share[first] if ranks > 1 else 0
        at = tuple(substitute(e, env) + (begin[0] if n == first else 0) for n, e in enumerate(found.place.index))
        view = found.place.tensor if found.place.tensor != load.buffer.type else None
        width = s.stream.panel or share[-1]
        for panel in range(share[-1] // width):
            begin[-1] = begin[-1] + width if panel else begin[-1]
            there = (*at[:-1], at[-1] + panel * width)
            to = (1 << ranks) - 1 if ranks > 1 else 0
            place, size = s.at(slot, begin), (*share[:-1], width)
            self.builder.add(k.TensorLoad(s.place, place, load.buffer, there, size, self.full, slot, to, view))


PLAIN = ThroughRegisters
"""What brings anything, on any machine."""
TRANSPORTS: dict[str, type[Transport]] = {x.name: x for x in (ThroughRegisters, Copied, Boxes)}
