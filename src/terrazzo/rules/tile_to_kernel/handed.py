"""What one product sums on its way to another that takes it as a factor: to other registers, other lanes, or through
shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from terrazzo.hw import ldmatrix
from terrazzo.hw.instruction import Fragment as Layouts
from terrazzo.hw.movmatrix import TURN
from terrazzo.hw.products import matrix, warps
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Var
from terrazzo.ir.layout import Layout
from terrazzo.ir.node import Node
from terrazzo.ir.plan import STORED, Convert, Plan, Product, Ring, Stage
from terrazzo.ir.schedule import Word
from terrazzo.rules.tile.digits import THREADS, Bindings, value
from terrazzo.rules.tile.draft import Draft, axis_name
from terrazzo.rules.tile.handed import COPIES, made, summed
from terrazzo.rules.tile.rings import axis_called, steps
from terrazzo.rules.tile.spans import span
from terrazzo.rules.tile_to_kernel.builder import Builder
from terrazzo.rules.tile_to_kernel.converted import Slots
from terrazzo.rules.tile_to_kernel.copies import Part, Slab
from terrazzo.rules.tile_to_kernel.multiply import Fragment, component, spread
from terrazzo.rules.tile_to_kernel.parts import Parts


class Handed:
    """Writes what brings values that lie as sums do to the fragments of the product that takes them."""

    def __init__(
        self,
        draft: Draft,
        plan: Plan,
        builder: Builder,
        bindings: Bindings,
        part: Parts,
        fragments: Mapping[l.Reduce, Fragment],
        places: Mapping[str, k.Shared],
        slot: Slots,
    ) -> None:
        self.draft, self.plan, self.builder, self.bindings = draft, plan, builder, bindings
        self.part, self.fragments, self.slot = part, fragments, slot
        self.slabs: dict[Node, Slab] = {}
        times = tuple(Word(axis_name(a), (f.size,)) for a, f in steps(draft))
        for p in plan.all(Product):
            for line in staged(plan, draft, p):
                self.slabs |= {x: self.slab(p, line, x, places, times) for x in made(draft.products[p.sites[0]])}

    def slab(
        self, p: Product, line: Stage, term: Node, places: Mapping[str, k.Shared], times: tuple[Word, ...]
    ) -> Slab:
        """Where a factor lies in shared memory: in a ring of slots that are filled and read in the same step."""
        site, stream = self.draft.site(p.sites[0]), line.stream
        agent = self.bindings.agent.name
        ring = Ring(line.name, times, line.slots, 0, "", agent, agent)
        parts = tuple(self.part(axis_called(self.draft, w.name), site) for w in line.axes)
        return Slab(stream, ring, term, places[line.name], parts, span(self.draft, term))

    def over(self, p: Product, values: dict[Node, k.Registers], t: IntExpr) -> dict[Node, k.Registers]:
        """The factor of a product, made in step t where sums lay, where the product takes it from; nothing where that
        is shared memory.
        """
        converts = self.plan.all(Convert)
        for stage in staged(self.plan, self.draft, p):
            put = next(x for x in converts if x.to == stage.name)
            for x in made(self.draft.products[p.sites[0]]):
                self.store(p, put, self.slabs[x], values.pop(x), t)
            return values
        line = next((x for x in converts if x.to == f"{p.sites[0]}.{p.made}"), None)
        if line is None or line.by not in (COPIES, TURN.name):
            return values
        terms = dict.fromkeys(x for name in p.sites for x in made(self.draft.products[name]))
        return values | {x: self.moved(p, line, values[x]) for x in terms}

    def sums(self, line: Convert) -> Fragment:
        """Where a factor was made that a line brings elsewhere."""
        return self.fragments[self.draft.products[line.value].reduce]

    # -- in registers --------------------------------------------------------------------------------------------------

    def moved(self, p: Product, line: Convert, source: k.Registers) -> k.Registers:
        """Fragments of one term: for every part of its rows, and every step of an instruction, matrix by matrix."""
        instruction, site = matrix(p.on), self.draft.site(p.sites[0])
        assert instruction is not None
        fragment: Layouts = getattr(instruction, p.made)
        rows, (*_, deep) = axis_called(self.draft, p.rows), self.draft.products[p.sites[0]].reduce.axes
        down = [d for d in self.part(rows, site).digits if d.level == "reg"]
        across = [d for d in self.part.inner(deep, site) if d.level not in THREADS]
        count = instruction.shape[2]
        shape = [*(d.size for d in down), math.prod(d.size for d in across), fragment.elements]
        place = self.builder.registers("w", source.type.dtype, shape)
        at, bits = {rows: value(down), deep: value(across)}, list[Var]()
        for n, (coordinate, step) in enumerate(fragment.steps):
            if n:  # the first are neighbours, which a register has
                bit = self.bindings.loop_variable("e", 2)
                axis = deep if coordinate == "k" else rows
                at[axis], bits = at[axis] + bit * step, [*bits, bit]
        number = sum((bit * (2 << n) for n, bit in enumerate(bits)), start=0)
        to = (*(d.value for d in down), value(across) // count, number)
        begins = self.sums(line).at(at)
        if line.by == COPIES:
            write = partial(self.copy, place, to, source, begins)
        else:
            write = partial(self.builder.add, k.TurnMatrix(place, to, source, begins))
        self.builder.loops([*((d.variable, True) for d in (*down, *across)), *((b, True) for b in bits)], write)
        return place

    def copy(self, place: k.Registers, to: tuple[IntExpr, ...], source: k.Registers, at: tuple[IntExpr, ...]) -> None:
        """Two neighbours, one after the other."""
        for n in range(2):
            there, here = (*to[:-1], to[-1] + n), (*at[:-1], at[-1] + n)
            self.builder.add(l.Store(place, there, l.Load(source, here)))

    # -- through shared memory -----------------------------------------------------------------------------------------

    def store(self, p: Product, line: Convert, slab: Slab, source: k.Registers, t: IntExpr) -> None:
        """A team's part of a factor comes to its slot, and is there for all of the team. Who still reads the slot is
        waited for, if there is no other, and no barrier since: where all threads load, they met for this step.
        """
        if slab.ring.slots == 1 and not self.bindings.alone:
            self.builder.add(self.bindings.sync)
        self.put(line, slab, source, self.slot(slab.ring, t)[0])
        if warps(matrix(p.on)) > 1:
            self.builder.add(k.Fence("proxy"))
        self.builder.add(self.bindings.sync)

    def put(self, line: Convert, slab: Slab, source: k.Registers, slot: IntExpr) -> None:
        """What this thread has, or this warp's matrices, some registers at a time."""
        sums, move = self.sums(line), None if line.by == "st" else ldmatrix.move(line.by)
        layout = Layout.parse(line.layout)
        each, count = 1 << layout.bits("reg"), source.type.static_shape[-1]
        q = self.bindings.loop_variable("q", count // each)
        at = {p.axis: place(p, q * each, lanes=move is None) for p in sums.parts}
        if move is not None:
            lanes = move.rows(layout, "n")
            first = next(x for x in self.plan.all(Product) if line.value in x.sites)
            assert lanes is not None
            for name, coordinate in ((first.m, "m"), (first.n, "n")):
                axis = axis_called(self.draft, name)
                at[axis] = at[axis] + spread(component(lanes, layout, coordinate))
        to, here = slab.at(slot, [at[p.axis] for p in slab.parts]), sums.element(q * each)
        s: Node = k.Move(slab.place, to, source, here, each)
        if move is not None:
            s = k.StoreMatrix(move.name, slab.place, to, source, here)
        regs = [d.variable for p in sums.parts for d in p.digits if d.level == "reg"]
        self.builder.loops([(v, True) for v in (*regs, q)], lambda: self.builder.add(s))


def staged(plan: Plan, draft: Draft, p: Product) -> list[Stage]:
    """Where a product's factor lies in shared memory that is made of sums."""
    inside = [*summed(draft, p.sites[0])] if STORED in (p.a, p.b) else []
    return [x for x in plan.all(Stage) if x.of in inside]


def place(part: Part, number: IntExpr, lanes: bool) -> IntExpr:
    """Where register `number` of this thread, or of the first lane, lies along an axis."""
    found: IntExpr = 0
    for d in part.digits:
        if d.level == "frag":
            found = found + number // (1 << d.place) % d.size * d.stride
        elif lanes or d.level != "lane":
            found = found + d.value * d.stride
    return found
