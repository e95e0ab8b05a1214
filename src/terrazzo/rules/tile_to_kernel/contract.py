"""Contractions of a tile: slabs of the operands in shared memory, fragments of them in registers, products into
accumulators.

One derivation for every instruction: on CUDA cores a fragment is a piece of the register tile and the product is a
multiply-add per element; a matrix instruction brings the layout of its fragments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from terrazzo.errors import Limitation, UserError
from terrazzo.hw.instruction import MatrixInstruction
from terrazzo.hw.ldmatrix import loader
from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.contraction import Contraction, contraction, operand
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Var
from terrazzo.ir.layout import Layout
from terrazzo.ir.node import Node, substitute
from terrazzo.ir.schedule import Factor, Site
from terrazzo.ir.types import Type, u32, u64
from terrazzo.rules.tile_to_kernel.digits import WIDEST, Digit, axis_name, divides, value, zero
from terrazzo.rules.tile_to_kernel.slabs import Slab, Slabs, Steps, Tiled

if TYPE_CHECKING:
    from terrazzo.rules.tile_to_kernel.scope import Scope
    from terrazzo.rules.tile_to_kernel.walk import Walker


@dataclass(frozen=True)
class Fragment:
    """Where a reduction's accumulators lie: indexed by the register digits of `tiles`, then by the instruction's
    registers.
    """

    place: k.Registers
    tiles: tuple[Tiled, ...]
    instruction: MatrixInstruction | None

    @property
    def axes(self) -> tuple[Any, ...]:
        return tuple(t.axis for t in self.tiles)

    def index(self, digits: dict[Any, list[Digit]]) -> tuple[IntExpr, ...]:
        """The place of the element that digits of the axes name, which divide them as the accumulators are divided."""
        for t in self.tiles:
            if [d.role for d in digits[t.axis] if d.level != "grid"] != [d.role for d in t.digits]:
                raise Limitation(
                    f"{axis_name(t.axis)} is divided otherwise than its accumulators are: like(...) divides both alike"
                )
        own = tuple(d.value for a in self.axes for d in digits[a] if d.level == "reg")
        if self.instruction is None:
            return own
        number: IntExpr = 0
        for a in self.axes:
            for d in digits[a]:
                if d.level == "frag":
                    number = number + d.value * (1 << d.place)
        return (*own, number)


class Contractor:
    """Writes the products of a tile, before what follows them. `reduces` are contractions over the same axes."""

    def __init__(
        self, walker: Walker, site: Site, reduces: Sequence[l.Reduce], tiles: Sequence[Any], scope: Scope
    ) -> None:
        self.w, self.bindings, self.site, self.scope = walker, walker.bindings, site, scope
        found = [contraction(r) for r in reduces]
        assert all(found)
        self.sites: list[Contraction] = [c for c in found if c]
        self.axes = reduces[0].axes
        self.tiles = {a: self.tiled(a) for a in tiles}
        times = [(a, f) for a in self.axes for f in self.factors(a) if f.level == "time"]
        rings = [v for _, f in times for name, v in f.options if name == "ring"]
        depth = {a: math.prod(f.size for f in self.inner(a)) for a in self.axes}
        self.steps = Steps(
            tuple((a, f.size) for a, f in times), depth, next((v for v in rings if isinstance(v, int)), 1)
        )
        self.slabs = Slabs(walker, site, self.tiles, self.steps, scope)
        self.instruction = self.bindings.instruction(site, axis_name(next(iter(tiles))))

    # -- what the schedule says ---------------------------------------------------------------------------------------

    def factors(self, axis: Any) -> tuple[Factor, ...]:
        return self.bindings.factors(axis_name(axis), self.site, axis.extent)

    def inner(self, axis: Any) -> list[Factor]:
        """The factors of a reduce axis inside a step."""
        found = [f for f in self.factors(axis) if f.level not in ("time", "grid", "block")]
        if any(f.level not in ("reg", "inst.k") for f in found):
            raise Limitation(
                f"{axis_name(axis)} = {' * '.join(map(str, found))}: only registers and inst.k divide a step of a contraction yet"
            )
        return found

    def tiled(self, axis: Any) -> Tiled:
        digits = self.bindings.digits(axis_name(axis), self.site, axis.extent)
        if any(d.level == "time" for d in digits):
            raise Limitation(
                f"{axis_name(axis)}: only the grid walks the tiles of a contraction yet, and there is no time inside one"
            )
        inside = tuple(d for d in digits if d.level != "grid")
        base = value([d for d in digits if d.level == "grid"])
        return Tiled(axis, base, math.prod(d.size for d in inside), inside)

    # -- statements ---------------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Accumulators, the pipeline over the steps, and the names of the results."""
        terms = list(dict.fromkeys(operand(f) for c in self.sites for f in c.factors))
        slabs = {t: self.slabs.slab(t) for t in terms}
        self.w.shared += [s.place for s in slabs.values()]
        for c in self.sites:
            shape = [d.size for t in self.tiles.values() for d in t.digits if d.level == "reg"]
            extra = [self.instruction.d.elements] if self.instruction else []
            dtype = c.reduce.dtype
            place = self.w.registers("acc", dtype, [*shape, *extra], l.Literal(zero(dtype), dtype))
            self.w.fragments[c.reduce] = Fragment(place, tuple(self.tiles.values()), self.instruction)
        kinds = {s.by for s in slabs.values()}
        if "tma" in kinds and self.w.depth:
            raise Limitation(
                f"{self.w.kernel.name}: a ring of boxes inside a loop: its phases do not go on from one tile to the next yet"
            )
        if kinds == {"tma"} and self.steps.ring > 1:
            self.ring_of_boxes(list(slabs.values()), lambda slot: self.step(slabs, slot))
        elif "tma" in kinds:
            raise Limitation(
                f"{self.w.kernel.name}: TMA brings in all operands of a contraction or none, in a ring of two at least"
            )
        elif kinds == {"cp.async"} and self.steps.ring > 1:
            self.pipeline(list(slabs.values()), lambda slot: self.step(slabs, slot))
        else:
            self.alternate(list(slabs.values()), lambda slot: self.step(slabs, slot))

    def pipeline(self, slabs: Sequence[Slab], step: Callable[[IntExpr], None]) -> None:
        """A ring filled by cp.async, `ring - 1` steps ahead. The slab that a step fills is the one read before its
        barrier.
        """
        ahead = self.steps.ring - 1
        first = self.bindings.loop_variable("t", ahead)

        def prologue() -> None:
            self.w.where([self.steps.count - 1 - first], lambda: self.slabs.copy(slabs, first, first))
            self.w.out.append(k.Commit())

        self.w.loops([(first, True)], prologue)
        t = self.bindings.loop_variable("t", self.steps.count)

        def body() -> None:
            self.w.out += [k.WaitGroups(ahead - 1), k.Sync()]
            self.w.where(
                [self.steps.count - 1 - ahead - t],
                lambda: self.slabs.copy(slabs, t + ahead, (t + ahead) % self.steps.ring),
            )
            self.w.out.append(k.Commit())
            step(t % self.steps.ring)

        self.w.loops([(t, False)], body)
        self.w.out += [k.WaitGroups(0), k.Sync()]

    def ring_of_boxes(self, slabs: Sequence[Slab], step: Callable[[IntExpr], None]) -> None:
        """A ring filled by TMA, `ring - 1` steps ahead: one thread asks for boxes, all wait for the barrier of the slot
        they come to.
        """
        ring, ahead, count = self.steps.ring, self.steps.ring - 1, self.steps.count
        full = k.Barriers(self.w.fresh("full"), Type(u64, (ring,)), 0, 1)
        self.w.shared.append(full)
        one = [-self.bindings.warp, -k.LANE]
        self.w.where(one, lambda: self.w.add(k.InitBarriers(full)))
        self.w.add(k.Sync())
        total = sum(math.prod(t.size for t in s.axes) * s.place.type.dtype.size for s in slabs)

        def load(t: IntExpr, slot: IntExpr) -> None:
            self.w.add(k.Expect(full, slot, total))
            for s in slabs:
                self.slabs.tensor_load(s, t, slot, full)

        first = self.bindings.loop_variable("t", ahead)
        self.w.loops([(first, True)], lambda: self.w.where([*one, count - 1 - first], lambda: load(first, first)))
        t = self.bindings.loop_variable("t", count)

        def body() -> None:
            self.w.add(k.WaitBarrier(full, t % ring, t // ring % 2), k.Sync())
            self.w.where([*one, count - 1 - ahead - t], lambda: load(t + ahead, (t + ahead) % ring))
            step(t % ring)

        self.w.loops([(t, False)], body)
        self.w.add(k.Sync())

    def alternate(self, slabs: Sequence[Slab], step: Callable[[IntExpr], None]) -> None:
        """Two slabs filled through registers: the next one's loads are on their way while this one is used."""
        fetched = [self.slabs.fetch_registers(s) for s in slabs]
        slots = min(2, self.steps.ring)

        def fetch(t: IntExpr) -> None:
            for s, place in zip(slabs, fetched, strict=True):
                self.slabs.fetch(s, place, t)

        def put(slot: IntExpr) -> None:
            for s, place in zip(slabs, fetched, strict=True):
                self.slabs.put(s, place, slot)

        fetch(0)
        put(0)
        self.w.out.append(k.Sync())
        if self.steps.count == 1:
            step(0)
            return self.w.add(*([k.Sync()] if self.w.depth else []))  # before the next tile is put there
        t = self.bindings.loop_variable("t", self.steps.count)

        def body() -> None:
            self.w.where([self.steps.count - 2 - t], lambda: fetch(t + 1))
            step(t % slots)
            if slots == 1:
                self.w.out.append(k.Sync())
            self.w.where([self.steps.count - 2 - t], lambda: put((t + 1) % slots))
            self.w.out.append(k.Sync())

        self.w.loops([(t, False)], body)

    # -- products -----------------------------------------------------------------------------------------------------

    def step(self, slabs: dict[Node, Slab], slot: IntExpr) -> None:
        """The products of one step, from the slabs in a slot."""
        regs = [(a, f) for a in self.axes for f in self.inner(a) if f.level == "reg"]
        if self.instruction is not None:
            return self.multiply(self.instruction, slabs, slot, [f.size for _, f in regs])
        whole = [Digit("reg", f.size, self.bindings.loop_variable("k", f.size), 1) for _, f in regs]
        strides: dict[Any, int] = {}
        for n in reversed(range(len(regs))):
            a, f = regs[n]
            whole[n] = Digit("reg", f.size, whole[n].value, strides.get(a, 1))
            strides[a] = strides.get(a, 1) * f.size
        along = any(
            slab.axes[-1].axis in self.steps.depth for slab in slabs.values()
        )  # then a fragment has several steps of k, side by side
        outer, last = (whole[:-1], whole[-1:]) if along else (whole, [])
        depth = {
            a: sum((d.value * d.stride for (x, _), d in zip(regs, whole, strict=True) if x is a), start=0)
            for a in self.axes
        }
        self.w.loops([(d.variable, True) for d in outer], lambda: self.outer_product(slabs, slot, depth, last))

    def outer_product(
        self, slabs: dict[Node, Slab], slot: IntExpr, depth: dict[Any, IntExpr], last: list[Digit]
    ) -> None:
        """Fragments of both operands into registers, and every product of theirs."""
        held: dict[Node, Node] = {}
        for term, slab in slabs.items():
            digits = {t.axis: [d for d in t.digits if d.level == "reg"] for t in slab.axes}
            at = (slot, *(value(t.digits) if t.axis in self.tiles else depth[t.axis] for t in slab.axes))
            own = [d for ds in digits.values() for d in ds] + (
                [d for d in last if any(t.axis in self.steps.depth for t in slab.axes)]
            )
            held[term] = self.fragment(slab, at, own)
        loops = last + [d for t in self.tiles.values() for d in t.digits if d.level == "reg"]
        digits_of = {a: list(t.digits) for a, t in self.tiles.items()}

        def product() -> None:
            for c in self.sites:
                fragment = self.w.fragments[c.reduce]
                at = fragment.index(digits_of)
                both = l.apply("mul", *(substitute(f, held) for f in c.factors))
                self.w.out.append(l.Store(fragment.place, at, l.apply("add", l.Load(fragment.place, at), both)))

        self.w.loops([(d.variable, True) for d in loops], product)

    def fragment(self, slab: Slab, at: tuple[IntExpr, ...], digits: list[Digit]) -> l.Load:
        """A piece of a slab in registers, indexed by digits, read in wide accesses where one of them runs along the
        slab.
        """
        offset = flatten(at, slab.place.type.element_strides)
        j = next((d for d in digits if coefficient(offset, d.value) == 1), None)  # type: ignore[arg-type]
        width = 1
        if j is not None:
            start = substitute(offset, {j.value: 0})
            width = next(
                v
                for v in (16, 8, 4, 2, 1)
                if v * slab.place.type.dtype.size <= WIDEST and j.size % v == 0 and (v == 1 or divides(v, start))
            )
        order = [d for d in digits if d is not j] + ([j] if j else [])
        place = self.w.registers(
            slab.place.name.rstrip("0123456789") + "f", slab.place.type.dtype, [d.size for d in order]
        )
        index = tuple(d.value for d in order)
        if j is None or width == 1:
            self.w.loops(
                [(d.variable, True) for d in order],
                lambda: self.w.out.append(l.Store(place, index, l.Load(slab.place, at))),
            )
            return l.Load(place, index)
        v = self.bindings.loop_variable("v", j.size // width)
        there = tuple(substitute(x, {j.value: v * width}) for x in at)
        move = k.Move(place, (*index[:-1], v * width), slab.place, there, width)
        self.w.loops([*((d.variable, True) for d in order[:-1]), (v, True)], lambda: self.w.out.append(move))
        return l.Load(place, index)

    def multiply(self, instruction: MatrixInstruction, slabs: dict[Node, Slab], slot: IntExpr, regs: list[int]) -> None:
        """Fragments by ldmatrix, products by a matrix instruction."""
        m, n = (self.bound_to(x) for x in ("m", "n"))
        if len(self.axes) != 1:
            raise Limitation("a contraction over several axes is on no matrix instruction yet")
        for c in self.sites:
            a, b = (operand(f) for f in (c.factors if m in c.factors[0].free else c.factors[::-1]))
            for x, takes in ((a, instruction.a.dtype), (b, instruction.b.dtype), (c.reduce, instruction.d.dtype)):
                if x.dtype is not takes:  # type: ignore[attr-defined]
                    name = slabs[x].place.name.rpartition("_s")[0] if x in slabs else self.site.names[0]
                    raise UserError(f"{self.w.kernel.name}: {instruction.name} takes {takes}, and {name} is {x.dtype}")  # type: ignore[attr-defined]
        kk = self.bindings.loop_variable("k", math.prod(regs))

        def body() -> None:
            loaded: dict[Node, tuple[k.Registers, tuple[Var, ...]]] = {}
            for c in self.sites:
                a, b = c.factors if m in c.factors[0].free else c.factors[::-1]
                for factor, axis, layout, name in (
                    (a, m, instruction.a.layout, "m"),
                    (b, n, instruction.b.layout, "n"),
                ):
                    if operand(factor) not in loaded:
                        loaded[operand(factor)] = self.load_fragments(
                            slabs[operand(factor)], slot, axis, kk * instruction.shape[2], layout, name
                        )
            for c in self.sites:
                a, b = c.factors if m in c.factors[0].free else c.factors[::-1]
                (left, i), (right, j) = loaded[operand(a)], loaded[operand(b)]
                place = self.w.fragments[c.reduce].place
                order = (*i, *j) if next(iter(self.tiles)) is m else (*j, *i)
                loops = [(v, True) for v in (*j, *i)]
                product = k.Multiply(instruction.name, place, (*order, 0), left, (*i, 0), right, (*j, 0))
                self.w.loops(loops, partial(self.w.add, product))

        self.w.loops([(kk, True)], body)

    def bound_to(self, name: str) -> Any:
        for a in self.tiles:
            if any(f.level == f"inst.{name}" for f in self.factors(a)):
                return a
        raise Limitation(f"no axis of {self.site.names[0]} is bound to inst.{name}")

    def load_fragments(
        self, slab: Slab, slot: IntExpr, axis: Any, depth: IntExpr, layout: Layout, name: str
    ) -> tuple[k.Registers, tuple[Var, ...]]:
        """All fragments of an operand along its axis, two at a time where an instruction loads two."""
        digits = [d for d in self.tiles[axis].digits if d.level in ("warp", "reg")]
        regs = [d for d in digits if d.level == "reg"]
        size = 1 << dict(layout.extents)[name]
        along = name if slab.axes[-1].axis is axis else "k"
        pair = 1
        double = Layout.parse(str(layout).replace("; lane", f" {name}{size}; lane"))
        if regs and regs[-1].stride == size and regs[-1].size % 2 == 0 and loader(double, 90, along):
            layout, pair = double, 2
        found = loader(layout, 90, along)
        if found is None:
            raise Limitation(f"{slab.place.name}: no load brings it into the fragments of {self.site.instruction}")
        if left := [
            x
            for x in slab.place.type.element_strides[:-1]
            if not isinstance(x, int) or x * slab.place.type.dtype.size % WIDEST
        ]:
            raise UserError(
                f"{slab.place.name}: its rows lie {left[0]} elements apart, and ldmatrix reads pieces of {WIDEST} bytes"
            )
        move, rows = found
        count = move.count // pair
        place = self.w.registers(slab.place.name.rstrip("0123456789") + "f", u32, [*(d.size for d in regs), count])
        row = {c: _spread(_component(rows, layout, c)) for c, _ in layout.extents}
        variables = [d.variable for d in regs]
        if pair == 2:
            half = self.bindings.loop_variable("p", regs[-1].size // 2)
            pairs: list[IntExpr] = [*variables[:-1], half * 2]
            loops = [*variables[:-1], half]
        else:
            pairs, loops = list(variables), list(variables)
        outer = value([d for d in digits if d.level == "warp"])
        for d, x in zip(regs, pairs, strict=True):
            outer = outer + x * d.stride
        at = {axis: outer + row[name], self.axes[0]: depth + row["k"]}
        where = (slot, *(at[t.axis] for t in slab.axes))
        load = k.LoadMatrix(move.name, place, (*pairs, 0), slab.place, where)
        self.w.loops([(v, True) for v in loops], lambda: self.w.out.append(load))
        return place, tuple(variables)


def _component(rows: Sequence[int], layout: Layout, coordinate: str) -> list[int]:
    """What each bit of the lane adds to one coordinate."""
    shift = 0
    for name, bits in layout.extents:
        if name == coordinate:
            return [row >> shift & (1 << bits) - 1 for row in rows]
        shift += bits
    return []


def _spread(images: Sequence[int]) -> IntExpr:
    """The sum over the lane's bits of what each adds, neighbours that stay neighbours together."""
    total: IntExpr = 0
    bit = 0
    while bit < len(images):
        end = bit + 1
        while images[bit] and end < len(images) and images[end] == images[bit] << end - bit:
            end += 1
        total = total + k.LANE // (1 << bit) % (1 << end - bit) * images[bit]
        bit = end
    return total
