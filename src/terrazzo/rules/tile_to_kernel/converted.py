"""First factors that threads make in registers, point by point, of a slab that TMA brought (ADR 016)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from terrazzo.hw.products import matrix
from terrazzo.hw.wgmma import WarpgroupInstruction
from terrazzo.ir.contraction import operand
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.layout import Layout
from terrazzo.ir.node import Node
from terrazzo.ir.plan import Convert, Plan, Product, Ring
from terrazzo.ir.schedule import WARPS_IN_A_GROUP
from terrazzo.ir.sites import loads
from terrazzo.rules.tile.digits import Bindings, value
from terrazzo.rules.tile.draft import Draft
from terrazzo.rules.tile.products import CONVERTED
from terrazzo.rules.tile.rings import axis_called
from terrazzo.rules.tile_to_kernel.copies import Copies, Slab
from terrazzo.rules.tile_to_kernel.multiply import component, spread

Slots = Callable[[Ring, IntExpr], tuple[IntExpr, IntExpr]]
"""The slot of a step, and how often it was used before."""


class Converted:
    """Writes what a team makes of its slabs in each step."""

    def __init__(
        self, draft: Draft, plan: Plan, bindings: Bindings, copies: Copies, slabs: dict[Node, Slab], slots: Slots
    ) -> None:
        self.draft, self.plan, self.bindings, self.slabs, self.slots = draft, plan, bindings, slabs, slots
        self.copies, self.builder = copies, copies.builder

    def terms(self, p: Product) -> dict[l.Load, list[Any]]:
        """What is multiplied, each once, by the load that it is made of."""
        m, found = axis_called(self.draft, p.m), dict[l.Load, list[Any]]()
        factors = (f for name in p.sites for pair in self.draft.products[name].terms for f in pair)
        for x in dict.fromkeys(operand(f) for f in factors if m in f.free):
            (raw,) = loads(x)
            found.setdefault(raw, []).append(x)
        return found

    def values(self, p: Product, t: IntExpr) -> dict[Node, k.Registers]:
        """The fragments of step t, whose slabs are there: registers for every term; nothing where no factor is made."""
        if p.a != CONVERTED:
            return {}
        found: dict[Node, k.Registers] = {}
        for raw, terms in self.terms(p).items():
            found |= self.made(p, t, raw, terms)
        return found

    def made(self, p: Product, t: IntExpr, raw: l.Load, terms: Sequence[Any]) -> dict[Node, k.Registers]:
        """What is made of one slab: two neighbours after the other, of each all terms."""
        slab, instruction = self.slabs[raw], matrix(p.on)
        assert isinstance(instruction, WarpgroupInstruction)
        rows = next(x for x in slab.parts if x.axis is axis_called(self.draft, p.m))
        (deep,) = [x for x in slab.parts if x is not rows]
        each, count = instruction.a.elements, deep.size // instruction.shape[2]
        down = [d for d in rows.digits if d.level == "reg"]
        shape = (*(d.size for d in down), count * each)
        found: dict[Node, k.Registers] = {x: self.builder.registers("made", x.dtype, shape) for x in terms}
        line = next(x for x in self.plan.all(Convert) if x.value == slab.stream.name)
        layout = Layout.parse(line.layout)
        step, pair, j = (self.bindings.loop_variable(x, n) for x, n in (("k", count), ("e", each // 2), ("j", 2)))
        at = {
            rows.axis: value([d for d in rows.digits if d.level in ("warpgroup", "reg")])
            + self.place(layout, "m", pair),
            deep.axis: step * instruction.shape[2] + self.place(layout, "k", pair),
        }

        def two() -> None:
            held = self.read(slab, self.slots(slab.ring, t)[0], at, deep.axis)

            def one() -> None:
                env: dict[Any, Any] = {raw: l.Load(held, (j,))}
                for x, place in found.items():
                    index = (*(d.variable for d in down), step * each + pair * 2 + j)
                    self.builder.add(l.Store(place, index, self.copies.computed(x, env)))

            self.builder.loops([(j, True)], one)

        self.builder.loops([(v, True) for v in (*(d.variable for d in down), step, pair)], two)
        return found

    def place(self, layout: Layout, coordinate: str, pair: IntExpr) -> IntExpr:
        """Where this thread's neighbours lie along a coordinate: the first bit of a register's number is k's."""
        warp = self.bindings.warp % WARPS_IN_A_GROUP
        numbers = {"reg": pair * 2, "lane": k.LANE, "warp": warp}
        images = {part: list(layout.part(part)) for part in numbers}
        images["reg"][0] = 0
        return sum(
            (spread(component(images[part], layout, coordinate), number) for part, number in numbers.items()), start=0
        )

    def read(self, slab: Slab, slot: IntExpr, at: dict[Any, IntExpr], deep: Any) -> k.Registers:
        """Two neighbours along k, at once where memory runs so."""
        held = self.builder.registers("raw", slab.place.type.dtype, (2,))

        def place(more: int) -> tuple[IntExpr, ...]:
            return slab.at(slot, [at[p.axis] + (more if p.axis is deep else 0) for p in slab.parts])

        if slab.parts[-1].axis is deep:
            self.builder.add(k.Move(held, (0,), slab.place, place(0), 2))
        else:
            self.builder.add(*(k.Move(held, (n,), slab.place, place(n), 1) for n in range(2)))
        return held
