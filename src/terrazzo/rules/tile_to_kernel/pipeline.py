"""The steps of a tile: slots of rings are filled and freed, products wait for the one and cause the other.

One skeleton for every arrangement. A ring has slots; step number n of a team (which goes on from tile to tile) is in
slot n % slots, for the (n // slots)-th time. Where an agent only loads, a slot's two barriers say when it is full and
when it is empty. Where all warps do everything, they fill a slot ahead, and a barrier of the block says both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from terrazzo.hw.products import matrix
from terrazzo.hw.wgmma import WarpgroupInstruction
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Var
from terrazzo.ir.node import Node
from terrazzo.ir.plan import Convert, Frame, Plan, Product, Ring, Stream
from terrazzo.ir.types import u32
from terrazzo.rules.tile.digits import Bindings, zero
from terrazzo.rules.tile.draft import Draft, axis_name
from terrazzo.rules.tile.products import CONVERTED
from terrazzo.rules.tile.promoted import groups, halves, scales
from terrazzo.rules.tile.rings import axis_called, brought, outermost, rounds, staggered, steps, twin_axes
from terrazzo.rules.tile.spans import span, spanned
from terrazzo.rules.tile.vectors import vectors
from terrazzo.rules.tile_to_kernel.builder import Builder
from terrazzo.rules.tile_to_kernel.converted import Converted
from terrazzo.rules.tile_to_kernel.copies import Copies, Slab, Steps
from terrazzo.rules.tile_to_kernel.factors import Factors
from terrazzo.rules.tile_to_kernel.handed import Handed
from terrazzo.rules.tile_to_kernel.meet import meet
from terrazzo.rules.tile_to_kernel.memory import Memory, freed_by_teams, lagging, operands
from terrazzo.rules.tile_to_kernel.multiply import Fragment, Group, Multiply
from terrazzo.rules.tile_to_kernel.parts import Parts
from terrazzo.rules.tile_to_kernel.promote import Promotion
from terrazzo.rules.tile_to_kernel.scope import Scope
from terrazzo.rules.tile_to_kernel.staggered import Staggered
from terrazzo.rules.tile_to_kernel.visiting import Visiting
from terrazzo.rules.transports import TRANSPORTS, Transport


class Pipeline:
    """Writes the steps of a tile for one team: loads, products, or both. `scope` has the axes around the tile."""

    def __init__(
        self, draft: Draft, plan: Plan, builder: Builder, bindings: Bindings, scope: Scope, memory: Memory
    ) -> None:
        self.draft, self.plan, self.builder, self.bindings = draft, plan, builder, bindings
        self.scope, self.memory = scope, memory
        around = {a: bindings.loop_variable("u", f.size) for a, f in rounds(draft)}
        scope.env.update(around)
        times = tuple((a, f.size) for a, f in steps(draft) if a not in around)
        depth: dict[Any, int] = {}
        base: dict[Any, IntExpr] = {}
        for c_name, c in draft.products.items():
            site = draft.site(c_name)
            own = [a for a in c.reduce.axes if a not in around]
            depth.update({a: draft.length(a, site) for a in own if a not in depth})
            base.update({a: bindings.base(axis_name(a), site) for a in own if a not in base})
        self.steps = Steps(times, depth, base, begin=bindings.begin)
        self.visiting = Visiting(draft, plan, builder, bindings, scope, self.steps, tuple(around.values()))
        self.copies = Copies(builder, bindings, self.steps, scope)
        self.part = Parts(draft, bindings, self.steps)
        self.multiply = Multiply(builder, bindings)
        self.rings = plan.all(Ring)
        self.transports: dict[str, Transport] = {}
        self.fragments: dict[l.Reduce, Fragment] = {}
        self.promotion = Promotion(builder, bindings)
        self.passed = False  # the turn, to the next team
        self.turns: k.Registers | None = None  # what a warpgroup's first factor comes to, where it is in registers
        self.slabs: dict[Node, Slab] = {}
        self.factors = Factors(draft, plan, bindings, self.copies, self.fragments, self.part, self.beside)
        self.converted = Converted(draft, plan, bindings, self.copies, self.slabs, self.slot)
        self.handed = Handed(draft, plan, builder, bindings, self.part, self.fragments, memory.places, self.slot)
        terms, beside = operands(draft, plan), vectors(draft, plan)
        for p in plan.all(Product):
            site = draft.site(p.sites[0])
            mine_too = [x for x, q in beside.items() if q is p]
            for s in plan.all(Stream):
                for text in (s.operand, *s.also):
                    term = terms[text]
                    if s.ring not in p.rings or term not in (*brought(draft, p), *mine_too):
                        continue
                    whole = span(draft, term)
                    own = [w.name for w in s.axes]
                    names = own if text == s.operand else twin_axes(own, terms[s.operand], term)
                    axes = (axis_called(draft, x, p.sites) for x in names)
                    mine = ((self.part(a, site), w) for a, w in zip(axes, s.axes, strict=True))
                    parts = tuple(replace(x, size=w.args[0], halo=whole.halo(x.axis)) for x, w in mine)
                    begin = self.behind(s)
                    self.slabs[term] = Slab(s, plan.named(s.ring), term, memory.places[s.name], parts, whole, begin)

    def behind(self, s: Stream) -> tuple[int, ...]:
        """Where a slab begins in its place: behind those before it, along an instruction's columns."""
        if not s.behind:
            return ()
        before = [x.name for x in self.plan.all(Stream) if s.behind in (x.name, x.behind)].index(s.name)
        columns = {p.n for p in self.plan.all(Product)}
        return tuple(before * w.args[0] if w.name in columns else 0 for w in s.axes)

    # -- who does what -------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """What an agent does that only loads: one thread asks for boxes as soon as slots are free."""
        moving = [r for r in self.rings if r.over]
        self.visiting.begin()
        for ring in (r for r in self.rings if not r.over):
            self.fill(ring, 0)
        t = self.step_variable()

        def body() -> None:
            for ring in moving:
                self.fill(ring, t)

        self.visiting.go_around(lambda: self.builder.loops([(t, False)], body))

    def fill(self, ring: Ring, t: IntExpr) -> None:
        """Wait for a free slot, and start what step t needs on its way there."""
        self.transport(ring).acquire(t)
        self.transport(ring).start(t)

    def compute(self) -> None:
        """What an agent does that only computes: wait for full slots, multiply, free them; in turn, where teams do."""
        self.take_turn()
        self.visiting.begin()
        for p in self.plan.all(Product):
            if self.outermost(p):
                self.declare(p)
            self.converted.begin(p)
        self.factors.begin()
        held = [r for r in self.rings if not r.over]
        for ring in held:
            self.wait(ring, 0)
        self.visiting.go_around(partial(self.multiplied, {r.name for r in held}))
        for ring in held:
            self.free(ring, 0)
        self.pass_turn()
        self.factors.finish()
        self.meet(self.plan.all(Product)[-1])

    def multiplied(self, held: set[str]) -> None:
        """All steps, as they are arranged; some rings are `held`, and were waited for."""
        if any(p.early for p in self.plan.all(Product)):
            self.overlapped()
        elif staggered(self.draft, self.plan.all(Product)):
            Staggered(self, self.plan.all(Product), self.factors, self.builder).write()
        else:
            self.in_order(held)

    def in_order(self, held: set[str]) -> None:
        """Step by step, one product after the other."""
        t = self.step_variable()
        late = [r for r in self.rings if r.late]
        for p in self.plan.all(Product):
            if self.outermost(p):
                totals, last = [self.fragments[r] for r in self.sums(p)], self.visited - 1
                whole = None if self.visiting.rounds else t - last
                self.promotion.prepare(self.draft, self.plan, p, totals, self.steps.count, whole)

        def body() -> None:
            self.promotion.go_to(t)
            waited = set(held)
            todo = list(self.plan.all(Product))
            read: list[Ring] = []  # by threads that make the factors of products to come
            while todo:
                p = todo.pop(0)
                values = self.values(p, t)  # while slabs are still on their way, as what is fetched beside them
                self.converted.fetch(p, t)
                for name in p.rings:
                    if name not in waited:
                        self.wait(self.plan.named(name), t)
                        waited.add(name)
                if p.a == CONVERTED:
                    self.follow(t)
                    values = self.converted.values(p, t)
                    self.lead(t)
                for ring in read if not todo else ():
                    self.free(ring, t)
                if first := not self.outermost(p) or (p.a != CONVERTED and len(self.plan.all(Product)) == 1):
                    self.follow(t)
                self.products(p, t, values, left=1 if late else 0)
                if first:
                    self.lead(t)
                for name in p.rings:
                    ring = self.plan.named(name)
                    if ring.over and not any(name in q.rings for q in todo):
                        if todo and self.read(ring):
                            read.append(ring)
                        elif ring.late:
                            self.builder.where([t - 1], lambda ring=ring: self.free(ring, t - 1))  # type: ignore[misc]
                        else:
                            self.free(ring, t)
                self.promotion.add(ends=True)

        self.builder.loops([(t, False)], body)
        self.promotion.finish()
        if late:
            if not self.visiting.rounds:
                self.pass_turn()  # what the next team begins comes behind what is open
            self.builder.add(k.WaitGroups(0, "wgmma"))
        for ring in late:
            self.builder.where([self.visited - 1], partial(self.free, ring, self.visited - 1))

    def overlapped(self) -> None:
        """The scores of the next step are begun before this step's weights are multiplied, which goes on while the next
        weights are found. Two groups of products are open then: the older one, the scores, is waited for first.

        The second product's next slab is waited for before its last group is: ptxas moves arithmetic past the wait for
        a group, and none past the loop that a wait for a slab is, so the weights are found while products are open.
        """
        first, second = self.plan.all(Product)
        self.declare(first)
        weights = self.factors.declare(second)

        def begin(t: IntExpr) -> None:
            self.fetch(first, t)
            self.product(first, t, {}, None, 1.0)

        def weigh(t: IntExpr, left: int) -> None:
            self.factors.fetch(second, t)
            self.settle(first, left)
            self.done(first, t, read=False)
            self.factors.weigh(second, t, begun=left > 0)
            self.done(first, t, read=True)
            self.fetch(second, t)

        begin(0)
        weigh(0, 0)
        self.factors.round(second)
        t = self.bindings.loop_variable("t", self.visited - 1)

        def body() -> None:
            begin(t + 1)
            self.product(second, t, weights, None, 1.0)
            weigh(t + 1, 1)
            self.end(second, t, 0)
            self.factors.move(second)
            self.factors.round(second)

        if t.extent != 0:
            self.builder.loops([(t, False)], body)
        self.product(second, self.visited - 1, weights, None, 1.0)
        self.end(second, self.visited - 1, 0)

    def fetch(self, p: Product, t: IntExpr) -> None:
        """Wait until the slabs of a product's step t are there."""
        for ring in self.moving(p):
            self.wait(ring, t)

    def end(self, p: Product, t: IntExpr, left: int) -> None:
        """Wait until a product's step t is done, `left` groups may be open, and free its slots."""
        self.settle(p, left)
        for read in (False, True):
            self.done(p, t, read)

    def done(self, p: Product, t: IntExpr, read: bool) -> None:
        """Free the slots of a product's step t, those that threads `read` too or the others."""
        for ring in self.moving(p):
            if self.read(ring) == read:
                self.free(ring, t)

    def moving(self, p: Product) -> list[Ring]:
        """The rings of a product whose slots change with the steps."""
        return [ring for name in p.rings if (ring := self.plan.named(name)).over]

    def take_turn(self) -> None:
        """Wait until the team before has begun all it multiplies. The first team begins."""
        self.passed = False
        wave, team = self.bindings.wave, self.bindings.team
        if self.memory.turn is not None and wave is not None:
            self.builder.add(k.WaitBarrier(self.memory.turn, team, (wave + (team == 0)) % 2))

    def pass_turn(self) -> None:
        """The next team may multiply, if it was not told so before."""
        if (turn := self.memory.turn) is not None and not self.passed:
            self.passed = True
            then = (self.bindings.team + 1) % self.bindings.agent.teams
            self.builder.where(self.bindings.leader, lambda: self.builder.add(k.Arrive(turn, then)))

    def follow(self, t: IntExpr) -> None:
        """Wait until the team before, if there is one, has what its factors of step t are made of, or these."""
        if self.memory.lag is not None and self.bindings.team:
            slot, turn = self.slot(ring := lagging(self.plan), t)
            place = (self.bindings.team - 1) * ring.slots + slot
            self.builder.add(k.WaitBarrier(self.memory.lag, place, turn % 2))

    def lead(self, t: IntExpr) -> None:
        """The team behind, if there is one, may begin step t."""
        if (lag := self.memory.lag) is not None and self.bindings.team < self.bindings.agent.teams - 1:
            slot, _ = self.slot(ring := lagging(self.plan), t)
            place = self.bindings.team * ring.slots + slot
            self.builder.where(self.bindings.leader, lambda: self.builder.add(k.Arrive(lag, place)))

    def step_variable(self) -> Var:
        """The number of a step."""
        return self.bindings.loop_variable("t", self.visited)

    @property
    def visited(self) -> IntExpr:
        """How many steps there are: all, or those that a mask leaves anything of."""
        return self.visiting.count

    # -- slots ---------------------------------------------------------------------------------------------------------

    def of(self, ring: Ring) -> list[Slab]:
        """The slabs of a ring, each once, whatever operands it is."""
        found: dict[Stream, Slab] = {}
        for s in self.slabs.values():
            if s.ring is ring:
                found.setdefault(s.stream, s)
        return [*found.values()]

    def slot(self, ring: Ring, t: IntExpr) -> tuple[IntExpr, IntExpr]:
        """The slot that step t of this tile is in, and how often it was used before."""
        n = t if ring.over else 0
        if ring.over and self.bindings.steps is not None:
            n = self.bindings.steps + n
        elif self.bindings.wave is not None:
            n = self.bindings.turn * (self.steps.count if ring.over else 1) + n
        return n % ring.slots, n // ring.slots

    def beside(self, x: Node, t: IntExpr) -> tuple[Slab, IntExpr] | None:
        """The slab of what came with those of step t for threads to read, and in which slot it is."""
        found = self.slabs.get(x)
        return (found, self.slot(found.ring, t)[0]) if found is not None else None

    def wait(self, ring: Ring, t: IntExpr) -> None:
        """Until step t is in its slot."""
        self.transport(ring).wait(t)

    def free(self, ring: Ring, t: IntExpr) -> None:
        """The slot of step t may be filled again."""
        self.transport(ring).release(t)

    def transport(self, ring: Ring) -> Transport:
        """What fills a ring."""
        if ring.name not in self.transports:
            self.transports[ring.name] = TRANSPORTS[ring.by](self, ring)
        return self.transports[ring.name]

    def barriers(self, ring: Ring) -> tuple[k.Barriers, k.Barriers | None]:
        """Of a ring that boxes come to: what says that slots are full, and, to who only loads, that they are empty."""
        return self.memory.full[ring.name], self.memory.empty.get(ring.name)

    def freed(self, ring: Ring) -> Sequence[IntExpr]:
        """Which threads say that a slot is free: one of each that waits by itself."""
        return self.bindings.leader if freed_by_teams(self.plan, ring) else [-k.LANE]

    def read(self, ring: Ring) -> bool:
        """Whether threads read what comes to a ring, rather than products alone."""
        return not freed_by_teams(self.plan, ring)

    def fence(self) -> None:
        """Who only loads does so in boxes, which nobody has to fence."""

    # -- products ------------------------------------------------------------------------------------------------------

    def values(self, p: Product, t: IntExpr) -> dict[Node, k.Registers]:
        """What a product takes that is made of what step t has multiplied before, where it takes it from."""
        return self.handed.over(p, self.factors.values(p, t), t)

    def outermost(self, p: Product) -> bool:
        """Whether a product's sums are those of the tile, and not of a step."""
        return outermost(self.draft, p)

    def sums(self, p: Product) -> list[l.Reduce]:
        """What a product's accumulators are the sums of."""
        return [self.draft.products[name].reduce for name in p.sites]

    def declare(self, p: Product) -> None:
        """Accumulators at zero."""
        site, instruction = self.draft.site(p.sites[0]), matrix(p.on)
        abreast = self.draft.abreast(site)
        mine = [axis_called(self.draft, x) for x in (p.m, p.n)]
        axes = [a for a in self.draft.tiled if a in self.draft.products[p.sites[0]].reduce.free]
        axes += [a for a in mine if a not in axes]
        parts = tuple(self.part(a, site) for a in axes)
        for number, name in enumerate(p.sites):
            reduce = self.draft.products[name].reduce
            if abreast > 1 and number:
                one = self.fragments[self.draft.products[p.sites[0]].reduce]
                each = instruction.d.elements // abreast  # type: ignore[union-attr]
                self.fragments[reduce] = replace(one, first=number * each)
                continue
            shape = [d.size for part in parts for d in part.digits if d.level == "reg"]
            extra = [instruction.d.elements] if instruction else []
            dtype = reduce.dtype
            own = isinstance(instruction, WarpgroupInstruction)  # which begins with its first product
            framed = any(f.product == name for f in self.plan.all(Frame))  # which is multiplied before it, or after
            framed = framed and not any(x.early for x in self.plan.all(Product))
            init = l.Literal(zero(dtype), dtype) if framed or p.promote or not own or self.visiting.idle else None
            place = self.builder.registers("acc", dtype, [*shape, *extra], init)
            part = instruction.narrow(abreast) if own and abreast > 1 else instruction  # type: ignore[union-attr]
            self.fragments[reduce] = Fragment(place, parts, part)
        if isinstance(instruction, WarpgroupInstruction) and p.a == "ldmatrix":
            down = [d.size for d in self.part(mine[0], site).digits if d.level == "reg"]
            inner = [d for a in self.draft.products[p.sites[0]].reduce.axes for d in self.part.inner(a, site)]
            halves = 1 if math.prod(d.size for d in inner if d.level == "reg") % 2 else 2
            self.turns = self.builder.registers("turn", u32, [halves, *down, instruction.a.registers])

    def products(
        self,
        p: Product,
        t: IntExpr,
        values: dict[Node, k.Registers],
        slots: dict[str, IntExpr] | None = None,
        left: int = 0,
    ) -> None:
        """The products of step t, until all but `left` groups of them are done. Those that are scaled alike are added
        up before the others begin; the sums of the last ones are still to be promoted.

        Every promotion rounds, and every instruction cuts its sums off towards zero. Where someone wants all digits of
        float32 (six products of bfloat16, or three of float16), the small products are too small for that to matter:
        they are promoted together. The sums of the large ones are promoted after two instructions, so that results are
        not smaller than they should be; those of the small ones would make them so, had they these added. Where a group
        may be left open, it is on its way while the sums of the one before it are added up.
        """
        if not self.outermost(p) and not p.early:
            self.declare(p)
        if self.promotion.groups:
            for scale, piece in (every := groups(self.draft, p)):
                self.product(p, t, values, slots, scale, piece)
                self.promotion.leave()
            for n in reversed(range(len(every))):
                self.settle(p, n)
                if n:  # whoever has waited for a step's products adds up the last ones
                    self.promotion.add()
            return
        *small, last = scales(self.draft, p) if p.promote else (1.0,)
        pieces = halves(self.draft, p)
        for scale in small:
            self.product(p, t, values, slots, scale)
            self.settle(p, 0)
        if small:
            self.promotion.add()
        for n in range(pieces):
            if n:
                self.settle(p, 0)
                self.promotion.add()
            self.product(p, t, values, slots, last, (n, pieces))
        self.settle(p, left)

    def product(
        self,
        p: Product,
        t: IntExpr,
        values: dict[Node, k.Registers],
        slots: dict[str, IntExpr] | None,
        scale: float,
        piece: tuple[int, int] = (0, 1),
    ) -> None:
        """The products of step t that are scaled so, on their instruction; or a piece of the step, of so many."""
        sites = tuple(self.draft.products[x] for x in p.sites)
        scales = sites[0].scales
        sites = tuple(c.scaled(scale) for c in sites) if p.promote else sites
        site = self.draft.site(p.sites[0])
        inner = {a: self.part.inner(a, site, *piece) for a in sites[0].reduce.axes}
        rings = (*self.rings, *(s.ring for s in self.handed.slabs.values()))
        given = {r.name: (slots or {}).get(r.name, self.slot(r, t)[0]) for r in rings}
        m, n = (axis_called(self.draft, x) for x in (p.m, p.n))
        totals = tuple(self.fragments[c.reduce] for c in sites)
        going = bool(p.promote and self.promotion.open)  # sums of products that are scaled otherwise
        if going:
            fragments = self.promotion.go_on(totals, scale)
        else:
            fragments = self.promotion.begin(totals, scale, scale == scales[0]) if p.promote else totals
        every = self.slabs | self.handed.slabs
        slabs = {x: s for x, s in every.items() if any(x in c.operands for c in sites)}
        step = sum(self.visiting.rounds, start=t) if self.outermost(p) and not p.promote else int(going)
        depth = next((a for a in inner if self.draft.length(a, site) > 1), sites[0].reduce.axes[-1])
        where: dict[Any, IntExpr] = {a: self.bindings.loop_variable("s", a.extent) for a in spanned(self.draft)}
        converts = tuple(x for x in self.plan.all(Convert) if x.to.rpartition(".")[0] == p.sites[0])
        group = Group(
            sites, fragments, matrix(p.on), inner, m, n, depth, slabs, given, values, step, where, self.turns, converts
        )
        loops = [(v, False) for v in where.values() if isinstance(v, Var)]
        self.builder.loops(loops, lambda: self.multiply.write(group))

    def meet(self, p: Product) -> None:
        """Partial sums of threads that share the steps' k become whole ones, those in a frame once that is the same."""
        site, (first, *_) = self.draft.site(p.sites[0]), p.sites
        every = (d for a in self.draft.products[first].reduce.axes for d in self.part.inner(a, site))
        digits = [d for d in every if d.level != "reg"]
        for name in p.sites if digits else ():
            sums = self.fragments[self.draft.products[name].reduce]
            self.factors.meet(sums, digits)
            meet(self.builder, self.bindings, sums.place, digits)

    def settle(self, p: Product, left: int) -> None:
        """Until a warpgroup's products are done, but for the last `left` groups of them."""
        if isinstance(matrix(p.on), WarpgroupInstruction):
            self.builder.add(k.WaitGroups(left, "wgmma"))
