"""Several products in a step that overlap, so that tensor cores have something to do while factors are made: the first
sums become a factor while the second ones are on their way, and the last products go on while the next step's first one
does. All factors are made before one is multiplied, for ptxas lets no product in registers begin beside another one
that was begun before these had their values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Var
from terrazzo.ir.node import Node
from terrazzo.ir.plan import Product, Ring
from terrazzo.rules.tile_to_kernel.builder import Builder
from terrazzo.rules.tile_to_kernel.factors import Factors


class Writer(Protocol):
    """What writes the products of a step, and waits for them and for slots."""

    @property
    def visited(self) -> IntExpr:
        """How many steps there are."""

    def step_variable(self) -> Var:
        """The number of a step."""

    def outermost(self, p: Product) -> bool:
        """Whether a product's sums are those of the tile."""

    def declare(self, p: Product) -> None:
        """Accumulators."""

    def sums(self, p: Product) -> Sequence[l.Reduce]:
        """What a product's accumulators are the sums of."""

    def product(
        self, p: Product, t: IntExpr, values: dict[Node, k.Registers], slots: dict[str, IntExpr] | None, scale: float
    ) -> None:
        """A product of step t, on its way."""

    def settle(self, p: Product, left: int) -> None:
        """Until all but the last `left` products are done."""

    def follow(self, t: IntExpr) -> None:
        """Wait until the team before has the first sums of step t."""

    def lead(self, t: IntExpr) -> None:
        """The team behind may begin step t."""

    def moving(self, p: Product) -> list[Ring]:
        """The rings of a product whose slots change with the steps."""

    def wait(self, ring: Ring, t: IntExpr) -> None:
        """Until step t is in its slot."""

    def free(self, ring: Ring, t: IntExpr) -> None:
        """The slot of step t may be filled again."""

    def read(self, ring: Ring) -> bool:
        """Whether threads read what comes to a ring, rather than products alone."""


class Staggered:
    """Writes the steps of a tile for one team. `first` are the products of what is in memory, `last` those of what is
    made of these.
    """

    def __init__(self, writer: Writer, products: Sequence[Product], factors: Factors, builder: Builder) -> None:
        self.writer, self.factors, self.builder = writer, factors, builder
        self.first = [p for p in products if not writer.outermost(p)]
        self.last = [p for p in products if writer.outermost(p)]
        self.values: dict[str, dict[Node, k.Registers]] = {}
        self.open: list[Product] = []
        self.waited: set[str] = set()
        self.late: dict[str, Ring] = {}

    def write(self) -> None:
        """All steps."""
        for p in self.first:
            self.writer.declare(p)
        self.values = {p.sites[0]: self.factors.declare(p) for p in self.last}
        t = self.writer.step_variable()
        self.builder.loops([(t, False)], lambda: self.step(t))
        self.writer.settle(self.last[-1], 0)
        self.free(self.last, self.writer.visited - 1)

    def step(self, t: Var) -> None:
        """One step, in which the last products of the step before are still open, if there was one."""
        self.open, self.waited, self.late = [*self.last], set(), {}
        one, *more = self.first
        self.writer.follow(t)
        self.begin(one, t)
        self.factors.fetch(self.last[0], t)
        self.until(self.last[-1])
        self.builder.where([t - 1], lambda: self.free(self.last, t - 1))
        for p in more:
            self.begin(p, t)
        for p in self.last:
            if p is not self.last[0]:
                self.factors.fetch(p, t)
            self.make(p, t)
        for p in self.last:
            self.factors.round(p)
        for p in self.last:
            self.begin(p, t)
        for ring in self.late.values():
            self.writer.free(ring, t)

    def make(self, p: Product, t: Var) -> None:
        """The factor of a product, once what it is made of is there."""
        needed = self.factors.point_by_point(p).sums
        if self.first[0] in self.open and self.factors.has_first(p):
            self.done(self.first[:1], t)
            self.factors.weigh_first(p, t)
        self.done([q for q in self.first if q in self.open and not {*self.writer.sums(q)}.isdisjoint(needed)], t)
        self.factors.weigh(p, t)

    def done(self, products: Sequence[Product], t: Var) -> None:
        """Wait for products, and free the slots that no other one of the step takes; `late` are those of which threads
        read what factors are made of, which all threads of a warp have done when it begins the last products.
        """
        if not products:
            return
        self.until(products[-1])
        held = {r.name for q in (*self.last, *self.open) for r in self.writer.moving(q)}
        rings = {r.name: r for q in products for r in self.writer.moving(q) if r.name not in held}
        for ring in rings.values():
            if self.writer.read(ring):
                self.late[ring.name] = ring
            else:
                self.writer.free(ring, t)
        if not any(q in self.open for q in self.first):
            self.writer.lead(t)

    def begin(self, p: Product, t: Var) -> None:
        """A product is on its way."""
        for ring in self.writer.moving(p):
            if ring.name not in self.waited:
                self.writer.wait(ring, t)
                self.waited.add(ring.name)
        self.writer.product(p, t, self.values.get(p.sites[0], {}), None, 1.0)
        self.open.append(p)

    def until(self, p: Product) -> None:
        """Wait for a product, and so for all that were begun before it."""
        left = len(self.open) - 1 - self.open.index(p)
        self.writer.settle(p, left)
        self.open = self.open[len(self.open) - left :]

    def free(self, products: Sequence[Product], t: IntExpr) -> None:
        """The slots of products that are done."""
        rings: Mapping[str, Any] = {r.name: r for p in products for r in self.writer.moving(p)}
        for ring in rings.values():
            self.writer.free(ring, t)
