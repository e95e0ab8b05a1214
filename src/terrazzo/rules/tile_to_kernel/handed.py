"""What one product sums on its way to another that takes it as a factor, in other registers or other lanes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from terrazzo.hw.instruction import Fragment as Layouts
from terrazzo.hw.movmatrix import TURN
from terrazzo.hw.products import matrix
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Var
from terrazzo.ir.node import Node
from terrazzo.ir.plan import Convert, Plan, Product
from terrazzo.rules.tile.digits import THREADS, Bindings, value
from terrazzo.rules.tile.draft import Draft
from terrazzo.rules.tile.handed import COPIES, made
from terrazzo.rules.tile.rings import axis_called
from terrazzo.rules.tile_to_kernel.builder import Builder
from terrazzo.rules.tile_to_kernel.multiply import Fragment
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
    ) -> None:
        self.draft, self.plan, self.builder, self.bindings = draft, plan, builder, bindings
        self.part, self.fragments = part, fragments

    def over(self, p: Product, values: dict[Node, k.Registers]) -> dict[Node, k.Registers]:
        """The factor of a product, made where sums lay, where the product takes it from."""
        line = next((x for x in self.plan.all(Convert) if x.to == f"{p.sites[0]}.{p.made}"), None)
        if line is None or line.by not in (COPIES, TURN.name):
            return values
        sums = self.fragments[self.draft.products[line.value].reduce]
        terms = dict.fromkeys(x for name in p.sites for x in made(self.draft.products[name]))
        return values | {x: self.moved(p, line, values[x], sums) for x in terms}

    def moved(self, p: Product, line: Convert, source: k.Registers, sums: Fragment) -> k.Registers:
        """Fragments of one term: for every part of its rows, and every step of an instruction, matrix by matrix."""
        instruction, site = matrix(p.on), self.draft.site(p.sites[0])
        assert instruction is not None
        fragment: Layouts = getattr(instruction, p.made)
        rows, (*_, steps) = axis_called(self.draft, p.rows), self.draft.products[p.sites[0]].reduce.axes
        down = [d for d in self.part(rows, site).digits if d.level == "reg"]
        across = [d for d in self.part.inner(steps, site) if d.level not in THREADS]
        count = instruction.shape[2]
        shape = [*(d.size for d in down), math.prod(d.size for d in across), fragment.elements]
        place = self.builder.registers("w", source.type.dtype, shape)
        at, bits = {rows: value(down), steps: value(across)}, list[Var]()
        for n, (coordinate, step) in enumerate(fragment.steps):
            if n:  # the first are neighbours, which a register has
                bit = self.bindings.loop_variable("e", 2)
                axis = steps if coordinate == "k" else rows
                at[axis], bits = at[axis] + bit * step, [*bits, bit]
        number = sum((bit * (2 << n) for n, bit in enumerate(bits)), start=0)
        to = (*(d.value for d in down), value(across) // count, number)
        begins = sums.at(at)
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
