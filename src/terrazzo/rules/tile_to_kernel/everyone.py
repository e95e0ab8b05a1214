"""The steps of a tile where all warps do everything: they fill slots ahead, and a barrier of the block says that one is
full and another empty.
"""

from __future__ import annotations

from collections.abc import Callable

from terrazzo.hw.products import matrix, warps
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.expr import IntExpr, Var
from terrazzo.ir.node import substitute
from terrazzo.ir.plan import Product, Ring
from terrazzo.rules.tile_to_kernel.pipeline import Pipeline


class Everyone(Pipeline):
    """Writes the steps of a tile for warps that load and compute."""

    def compute(self) -> None:
        """Fill slots and multiply, step by step."""
        self.begin()
        for p in self.plan.all(Product):
            if self.outermost(p):
                self.declare(p)
        self.factors.begin()
        moving = next((r for r in self.rings if r.over), None)
        for ring in self.rings:
            if not ring.over:
                self.bring(ring, moving)
        if moving is None:  # the tile is one step
            self.every_product(0, {})
        else:
            {"ld": self.alternate, "cp.async": self.groups, "tma": self.boxes}[moving.by](moving)
        self.factors.finish()
        self.meet(self.plan.all(Product)[-1])

    def bring(self, ring: Ring, moving: Ring | None) -> None:
        """What is held for a tile, before its steps; with the first of these, where both are copied."""
        slabs = self.of(ring)
        if self.builder.depth:
            self.builder.add(k.Sync())  # the tile before may still be read
        if ring.by == "tma":
            full = self.memory.full[ring.name]
            self.builder.where(self.one, lambda: self.copies.boxes(slabs, 0, 0, full))
            self.wait(ring, 0)
        elif ring.by == "cp.async":
            self.copies.copy(slabs, 0, 0)
            if moving is None or moving.by != "cp.async":
                self.builder.add(k.Commit(), k.WaitGroups(0))
                self.publish()
        else:
            for s in slabs:
                place = self.copies.fetched(s)
                self.copies.fetch(s, place, 0)
                self.copies.put(s, place, 0)
            self.publish()

    @property
    def one(self) -> list[IntExpr]:
        """Only the first thread."""
        return [-self.bindings.warp, -k.LANE]

    def groups(self, ring: Ring) -> None:
        """A ring filled by cp.async. The slab that a step fills is the one read before its barrier."""
        slabs, ahead, count, builder = self.of(ring), ring.ahead, self.visited, self.builder
        first = self.bindings.loop_variable("t", ahead)

        def prologue() -> None:
            builder.where([count - 1 - first], lambda: self.copies.copy(slabs, first, first))
            builder.add(k.Commit())

        builder.loops([(first, True)], prologue)
        t = self.bindings.loop_variable("t", count)

        def body() -> None:
            builder.add(k.WaitGroups(ahead - 1))
            self.publish()
            self.ahead(t, ahead, lambda t: self.copies.copy(slabs, t + ahead, (t + ahead) % ring.slots))
            builder.add(k.Commit())
            self.every_product(t, {ring.name: t % ring.slots}, ring.late)

        builder.loops([(t, False)], body)
        self.finish(ring)
        builder.add(k.WaitGroups(0), k.Sync())

    def boxes(self, ring: Ring) -> None:
        """A ring filled by TMA: one thread asks for boxes, all wait for the barrier of the slot they come to."""
        slabs, ahead, count, builder = self.of(ring), ring.ahead, self.visited, self.builder
        full = self.memory.full[ring.name]

        def load(t: IntExpr) -> None:
            self.copies.boxes(slabs, t, self.slot(ring, t)[0], full)

        first = self.bindings.loop_variable("t", ahead)
        builder.loops([(first, True)], lambda: builder.where([*self.one, count - 1 - first], lambda: load(first)))
        t = self.bindings.loop_variable("t", count)

        def body() -> None:
            self.wait(ring, t)
            builder.add(k.Sync())
            self.ahead(t, ahead, lambda t: load(t + ahead), *self.one)
            self.every_product(t, {ring.name: self.slot(ring, t)[0]}, ring.late)

        builder.loops([(t, False)], body)
        self.finish(ring)
        builder.add(k.Sync())

    def alternate(self, ring: Ring) -> None:
        """Two slabs filled through registers: the next one's loads are on their way while this one is used."""
        slabs, builder, count = self.of(ring), self.builder, self.visited
        fetched = [self.copies.fetched(s) for s in slabs]
        slots = ring.slots

        def fetch(t: IntExpr) -> None:
            for s, place in zip(slabs, fetched, strict=True):
                self.copies.fetch(s, place, t)

        def put(slot: IntExpr) -> None:
            for s, place in zip(slabs, fetched, strict=True):
                self.copies.put(s, place, slot)

        fetch(0)
        put(0)
        self.publish()
        if count == 1:
            self.every_product(0, {ring.name: 0})
            return builder.add(*([k.Sync()] if builder.depth else []))  # before the next tile is put there
        t = self.bindings.loop_variable("t", count)

        def body() -> None:
            self.ahead(t, 1, lambda t: fetch(t + 1))
            self.every_product(t, {ring.name: t % slots})
            if slots == 1:
                builder.add(k.Sync())
            builder.where([count - 2 - t], lambda: put((t + 1) % slots))
            self.publish()

        builder.loops([(t, False)], body)

    def ahead(self, t: Var, ahead: int, write: Callable[[Var], None], *inside: IntExpr) -> None:
        """`write` in the steps that are not the last `ahead`; which these are is known where indices are judged."""
        count = self.visited
        early = Var(t.name, max(count - ahead, 0)) if isinstance(count, int) else t
        body = [substitute(s, {early: t}) for s in self.builder.inside(lambda: write(early))]
        self.builder.where([*inside, count - 1 - ahead - t], lambda: self.builder.add(*body))

    def publish(self) -> None:
        """What threads put into shared memory may be used: by a warpgroup's products, which are asynchronous, behind a
        fence.
        """
        if any(warps(matrix(p.on)) > 1 for p in self.plan.all(Product)):
            self.builder.add(k.Fence("proxy"))
        self.builder.add(k.Sync())

    def every_product(self, t: IntExpr, slots: dict[str, IntExpr], late: bool = False) -> None:
        """The products of step t, one after the other."""
        for p in self.plan.all(Product):
            self.products(p, t, self.factors.values(p, t), slots, int(late))
            self.promotion.add()

    def finish(self, ring: Ring) -> None:
        """Wait for products that are still on their way after the last step."""
        if ring.late:
            self.builder.add(k.WaitGroups(0, "wgmma"))
