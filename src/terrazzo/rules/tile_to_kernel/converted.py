"""First factors that threads make in registers, point by point, of a slab that TMA brought and of scales perhaps, which
they load beside it (ADR 016).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.hw.products import matrix
from terrazzo.hw.wgmma import WarpgroupInstruction
from terrazzo.ir.address import mentions
from terrazzo.ir.contraction import operand
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Loaded, Var, at_least
from terrazzo.ir.layout import Layout
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.ir.plan import Convert, Plan, Product, Ring
from terrazzo.ir.schedule import WARPS_IN_A_GROUP
from terrazzo.ir.sites import loads, made_of
from terrazzo.ir.types import f32, i64
from terrazzo.rules.loop.fusion.inline import guarded
from terrazzo.rules.loop.precision.number_parts import LARGE, counted, ordinary, parts
from terrazzo.rules.tile.digits import Bindings, value
from terrazzo.rules.tile.draft import Draft
from terrazzo.rules.tile.products import CONVERTED
from terrazzo.rules.tile.rings import axis_called
from terrazzo.rules.tile_to_kernel.copies import Copies, Part, Slab
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
        self.beside: dict[l.Load, _Beside] = {}

    def terms(self, p: Product) -> dict[l.Load, list[Any]]:
        """What is multiplied, each once, by the load that it is made of."""
        m, found = axis_called(self.draft, p.m), dict[l.Load, list[Any]]()
        factors = (f for name in p.sites for pair in self.draft.products[name].terms for f in pair)
        for x in dict.fromkeys(operand(f) for f in factors if m in f.free):
            raw = made_of(x)
            assert raw is not None
            found.setdefault(raw, []).append(x)
        return found

    def begin(self, p: Product) -> None:
        """What factors are made of besides slabs comes to registers, once for a tile where no step changes it."""
        self.fetch(p, 0, moving=False)

    def fetch(self, p: Product, t: IntExpr, moving: bool = True) -> None:
        """The same that changes from step to step, while slabs are on their way."""
        for raw, terms in self.terms(p).items() if p.a == CONVERTED else ():
            for x in dict.fromkeys(y for term in terms for y in loads(term) if y is not raw):
                if moving == any(a in x.free for a in self.copies.steps.depth):
                    self.beside[x] = self.fetched(p, raw, x, t)

    def fetched(self, p: Product, raw: l.Load, x: l.Load, t: IntExpr) -> _Beside:
        """Registers with all that a thread needs of a load for the slab of step t: one for each of its places that
        differ in it.
        """
        work, slab = self.work(p, raw, {}), self.slabs[raw]
        step, j = (self.bindings.loop_variable(name, n) for name, n in (("k", work.count), ("j", 2)))
        bits = [self.bindings.loop_variable("e", 2) for _ in range(work.bits)]
        at = work.at(step, sum((b * (1 << n) for n, b in enumerate(bits)), start=0))
        at[work.deep.axis] = at[work.deep.axis] + j
        env = self.copies.coordinates(slab, [at[part.axis] for part in slab.parts], t)
        edges = (part.axis.extent - 1 - env[part.axis] for part in slab.parts if part.axis in x.free)
        found = guarded(substitute(x, env), tuple(e for e in edges if not at_least(e, 0)))
        variables = (*work.down, step, *bits, j)
        used = tuple(n for n, v in enumerate(variables) if any(mentions(e, v) for e in (*found.index, *found.inside)))
        own = tuple(variables[n] for n in used)
        shape: Any = tuple(v.extent for v in own)
        place = self.builder.registers("beside", x.dtype, shape)
        self.builder.loops([(v, True) for v in own], lambda: self.builder.add(l.Store(place, own, found)))
        return _Beside(place, used)

    def work(self, p: Product, raw: l.Load, places: dict[Node, k.Registers]) -> _Work:
        """How a slab is divided among threads and steps of an instruction."""
        slab, instruction = self.slabs[raw], matrix(p.on)
        assert isinstance(instruction, WarpgroupInstruction)
        rows = next(x for x in slab.parts if x.axis is axis_called(self.draft, p.m))
        (deep,) = [x for x in slab.parts if x is not rows]
        each, count = instruction.a.elements, deep.size // instruction.shape[2]
        down = tuple(d.variable for d in rows.digits if d.level == "reg")
        line = next(x for x in self.plan.all(Convert) if x.value == slab.stream.name)
        return _Work(self, slab, raw, places, down, each, count, rows, deep, Layout.parse(line.layout))

    def values(self, p: Product, t: IntExpr) -> dict[Node, k.Registers]:
        """The fragments of step t, whose slabs are there: registers for every term."""
        found: dict[Node, k.Registers] = {}
        for raw, terms in self.terms(p).items():
            found |= self.made(p, t, raw, terms)
        return found

    def made(self, p: Product, t: IntExpr, raw: l.Load, terms: Sequence[Any]) -> dict[Node, k.Registers]:
        """What is made of one slab: two neighbours after the other, of each all terms."""
        found: dict[Node, k.Registers] = {}
        work, slab = self.work(p, raw, found), self.slabs[raw]
        shape: Any = (*(v.extent for v in work.down), work.count * work.each)
        found |= {x: self.builder.registers("made", x.dtype, shape) for x in terms}
        slot = self.slots(slab.ring, t)[0]
        line = next(x for x in self.plan.all(Convert) if x.value == slab.stream.name)
        if line.by == "parts":
            self.guessed(work, slot, t, terms)
        else:
            work.write(slot, t, {x: x for x in terms})
        return found

    def guessed(self, work: _Work, slot: IntExpr, t: IntExpr, terms: Sequence[Any]) -> None:
        """Parts as ordinary numbers have them; where a warp has others, all of its are made again."""
        count = counted(terms, work.raw)
        found, size, first = ordinary(work.raw, count)
        known = dict(zip(parts(work.raw, count), found, strict=True))
        largest, least = (self.builder.registers("edge", f32, (1,), l.Literal(x, f32)) for x in (0.0, 1.0))
        extremes = ((largest, "max", size), (least, "min", first))
        work.write(slot, t, {x: known[x] for x in terms}, extremes)
        here = [l.Load(place, (0,)) for place in (largest, least)]
        tests = ((f, x, l.Literal(edge, f32)) for f, x, edge in (("lt", here[0], LARGE), ("gt", here[1], 0.0)))
        fits = l.apply("and_", *(self.builder.let(l.apply(*test)) for test in tests))
        all_fit = self.builder.let(k.Vote("all", self.builder.let(fits)))
        number = self.builder.let(l.apply("where", all_fit, l.Literal(0, i64), l.Literal(1, i64)))
        self.builder.where([Loaded(number, 2) - 1], lambda: work.write(slot, t, {x: x for x in terms}))

    def place(self, layout: Layout, coordinate: str, pair: IntExpr) -> IntExpr:
        """Where this thread's neighbours lie along a coordinate: the first bit of a register's number is k's."""
        warp = self.bindings.warp % WARPS_IN_A_GROUP
        numbers = {"reg": pair * 2, "lane": k.LANE, "warp": warp}
        images = {part: list(layout.part(part)) for part in numbers}
        images["reg"][0] = 0
        return sum(
            (spread(component(images[part], layout, coordinate), number) for part, number in numbers.items()), start=0
        )


@dataclass(frozen=True)
class _Beside:
    """Registers with what was loaded beside a slab, indexed by so many-th of the variables that say where a thread is
    in it.
    """

    place: k.Registers
    used: tuple[int, ...]


@dataclass
class _Work:
    """What one team makes of a slab in a step, and where it goes."""

    whole: Converted
    slab: Slab
    raw: l.Load
    places: dict[Node, k.Registers]
    down: tuple[Var, ...]
    each: int
    count: int
    rows: Part
    deep: Part
    layout: Layout

    @property
    def bits(self) -> int:
        """Of the number of a pair of neighbours in a fragment."""
        return (self.each // 2).bit_length() - 1

    def at(self, step: IntExpr, pair: IntExpr) -> dict[Any, IntExpr]:
        """Where in its slab the first of two neighbours lies."""
        rows = value([d for d in self.rows.digits if d.level in ("warpgroup", "reg")])
        return {
            self.rows.axis: rows + self.whole.place(self.layout, "m", pair),
            self.deep.axis: step * (self.deep.size // self.count) + self.whole.place(self.layout, "k", pair),
        }

    def write(
        self,
        slot: IntExpr,
        t: IntExpr,
        terms: Mapping[Any, Any],
        extremes: Sequence[tuple[k.Registers, str, Node]] = (),
    ) -> None:
        """Two neighbours after the other, of each the `terms` that stand for those of the product; `extremes` are kept
        of all.
        """
        whole, builder = self.whole, self.whole.builder
        step, pair, j = (
            whole.bindings.loop_variable(x, n) for x, n in (("k", self.count), ("e", self.each // 2), ("j", 2))
        )
        at = self.at(step, pair)
        here = (*self.down, step, *(pair // (1 << n) % 2 for n in range(self.bits)), j)
        beside = {x: l.Load(b.place, tuple(here[n] for n in b.used)) for x, b in whole.beside.items()}

        def two() -> None:
            held = self.read(slot, at)

            def one() -> None:
                env: dict[Any, Any] = {**self.axes(t, at, j, terms), **beside, self.raw: l.Load(held, (j,))}
                for x, term in terms.items():
                    index = (*self.down, step * self.each + pair * 2 + j)
                    builder.add(l.Store(self.places[x], index, whole.copies.computed(term, env)))
                for place, function, term in extremes:
                    both = l.apply(function, l.Load(place, (0,)), whole.copies.computed(term, env))
                    builder.add(l.Store(place, (0,), both))

            builder.loops([(j, True)], one)

        builder.loops([(v, True) for v in (*self.down, step, pair)], two)

    def axes(self, t: IntExpr, at: Mapping[Any, IntExpr], j: IntExpr, terms: Mapping[Any, Any]) -> dict[Any, Any]:
        """Where an element lies in its tensor, where terms are made of that."""
        if not any(isinstance(x, l.Index) for x in topological([*terms.values()])):
            return {}
        parts = self.slab.parts
        return self.whole.copies.coordinates(self.slab, [at[p.axis] + (j if p is self.deep else 0) for p in parts], t)

    def read(self, slot: IntExpr, at: dict[Any, IntExpr]) -> k.Registers:
        """Two neighbours along k, at once where memory runs so."""
        slab, builder = self.slab, self.whole.builder
        held = builder.registers("raw", slab.place.type.dtype, (2,))

        def place(more: int) -> tuple[IntExpr, ...]:
            return slab.at(slot, [at[p.axis] + (more if p is self.deep else 0) for p in slab.parts])

        if slab.parts[-1] is self.deep:
            builder.add(k.Move(held, (0,), slab.place, place(0), 2))
        else:
            builder.add(*(k.Move(held, (n,), slab.place, place(n), 1) for n in range(2)))
        return held
