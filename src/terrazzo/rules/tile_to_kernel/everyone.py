"""The steps of a tile where all warps do everything: they fill slots ahead, and a barrier of the block says that one is
full and another empty.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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
        self.visiting.begin()
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
            self.visiting.go_around(partial(self.steps_of, moving))
        self.factors.finish()
        self.meet(self.plan.all(Product)[-1])

    def bring(self, ring: Ring, moving: Ring | None) -> None:
        """What is held for a tile, before its steps; with the first of these, where both are copied."""
        if self.builder.depth:
            self.builder.add(k.Sync())  # the tile before may still be read
        self.transport(ring).hold(moving)

    def steps_of(self, ring: Ring) -> None:
        """Step by step: what a later step needs is started before the products of this one."""
        by, count = self.transport(ring), self.visited
        by.begin()
        if count == 1 and not by.beside:
            self.every_product(0, {ring.name: 0})
        else:
            t = self.bindings.loop_variable("t", count)

            def body() -> None:
                by.wait(t)
                self.ahead(t, by.early, lambda t: by.start(t + by.early), *by.who)
                by.started()
                self.every_product(t, {ring.name: by.slot(t)}, ring.late)
                by.publish(t + 1)

            self.builder.loops([(t, False)], body)
        self.finish(ring)
        by.end()

    def ahead(self, t: Var, ahead: int, write: Callable[[Var], None], *inside: IntExpr) -> None:
        """`write` in the steps that are not the last `ahead`; which these are is known where indices are judged."""
        count = self.visited
        early = Var(t.name, max(count - ahead, 0)) if isinstance(count, int) else t
        body = [substitute(s, {early: t}) for s in self.builder.inside(lambda: write(early))]
        self.builder.where([*inside, count - 1 - ahead - t], lambda: self.builder.add(*body))

    def fence(self) -> None:
        """What threads put into shared memory may be used: by a warpgroup's products, which are asynchronous, behind a
        fence.
        """
        if any(warps(matrix(p.on)) > 1 for p in self.plan.all(Product)):
            self.builder.add(k.Fence("proxy"))
        self.builder.add(k.Sync())

    def every_product(self, t: IntExpr, slots: dict[str, IntExpr], late: bool = False) -> None:
        """The products of step t, one after the other."""
        for p in self.plan.all(Product):
            self.products(p, t, self.values(p, t), slots, int(late))
            self.promotion.add()

    def finish(self, ring: Ring) -> None:
        """Wait for products that are still on their way after the last step."""
        if ring.late:
            self.builder.add(k.WaitGroups(0, "wgmma"))
