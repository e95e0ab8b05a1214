"""The products of one step: fragments of the operands into registers, and what an instruction makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from terrazzo.hw import ldmatrix
from terrazzo.hw.instruction import MatrixInstruction
from terrazzo.hw.movmatrix import TURN
from terrazzo.hw.products import Matrix
from terrazzo.hw.wgmma import WarpgroupInstruction
from terrazzo.ir.address import coefficient, divides, flatten, unflatten
from terrazzo.ir.contraction import Contraction, operand
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, at_least
from terrazzo.ir.layout import Layout
from terrazzo.ir.node import Node, substitute
from terrazzo.ir.plan import Convert
from terrazzo.ir.types import u32
from terrazzo.rules.access import WIDEST
from terrazzo.rules.tile.digits import THREADS, Bindings, Digit, value
from terrazzo.rules.tile.handed import COPIES
from terrazzo.rules.tile_to_kernel.builder import Builder
from terrazzo.rules.tile_to_kernel.copies import Part, Slab


@dataclass(frozen=True)
class Fragment:
    """Where a reduction's accumulators lie: indexed by the register digits of `parts`, then by the instruction's
    registers, of which those before `first` are those of sums that share the instruction.
    """

    place: k.Registers
    parts: tuple[Part, ...]
    instruction: Matrix | None
    first: int = 0

    @property
    def axes(self) -> tuple[Any, ...]:
        return tuple(p.axis for p in self.parts)

    def index(self, digits: Mapping[Any, Sequence[Digit]]) -> tuple[IntExpr, ...]:
        """The place of the element that digits of the axes name, which divide them as the accumulators are divided."""
        own = tuple(d.value for a in self.axes for d in digits[a] if d.level == "reg")
        if self.instruction is None:
            return own
        number: IntExpr = self.first
        for a in self.axes:
            for d in digits[a]:
                if d.level == "frag":
                    number = number + d.value * (1 << d.place)
        return (*own, number)

    def at(self, coordinates: Mapping[Any, IntExpr]) -> tuple[IntExpr, ...]:
        """The place of what this thread has where its axes are so far from where the thread's elements begin."""
        parts = ((p, [d for d in p.digits if d.level in ("reg", "frag")]) for p in self.parts)
        here = {p.axis: [replace(d, value=coordinates[p.axis] // d.stride % d.size) for d in ds] for p, ds in parts}
        return self.index(here)

    def element(self, number: IntExpr) -> tuple[IntExpr, ...]:
        """The place of register `number` of an instruction's results."""
        return (*(d.value for p in self.parts for d in p.digits if d.level == "reg"), number + self.first)


@dataclass(frozen=True)
class Group:
    """Contractions over the same axes, bound alike, whose accumulators lie in `fragments`.

    `inner` has the factors of every reduce axis inside a step; `m` and `n` are the axes of an instruction's rows and
    columns, `k` is what a step goes along; `values` has the factors that lie in registers already, in place of slabs. A
    warpgroup's sums begin with the first product where `step` is 0. `where` says where the loops inside a step are. A
    warpgroup's first factor comes to the registers `turns`, where there are such: to one half of them while the other
    is multiplied. `converts` says how factors come to fragments.
    """

    sites: tuple[Contraction, ...]
    fragments: tuple[Fragment, ...]
    instruction: Matrix | None
    inner: Mapping[Any, tuple[Digit, ...]]
    m: Any
    n: Any
    k: Any
    slabs: Mapping[Node, Slab]
    slots: Mapping[str, IntExpr]
    values: Mapping[Node, k.Registers]
    step: IntExpr
    where: dict[Any, IntExpr]
    turns: k.Registers | None = None
    converts: tuple[Convert, ...] = ()

    @property
    def axes(self) -> tuple[Any, ...]:
        return self.sites[0].reduce.axes

    def depth(self, axis: Any) -> tuple[list[Digit], IntExpr]:
        """The loops over an instruction's parts of a step's k, and where such a part begins."""
        digits = self.inner[axis]
        return [d for d in digits if d.level == "reg"], value(digits)

    def terms(self, c: Contraction) -> list[tuple[Node, Node]]:
        """The products that are summed, each as the factor of m and that of n."""
        return [pair if self.m in pair[0].free else (pair[1], pair[0]) for pair in c.terms]

    def brought(self, slab: Slab, letter: str) -> tuple[ldmatrix.MatrixMove, Layout, tuple[int, ...]]:
        """What loads a factor's fragments from its slab, what of them at once, and the rows that the lanes name."""
        line = next(x for x in self.converts if x.value == slab.stream.name and x.to.endswith(f".{letter}"))
        move, layout = ldmatrix.move(line.by), Layout.parse(line.layout)
        axis, coordinate = (self.m, "m") if letter == "a" else (self.n, "n")
        rows = move.rows(layout, coordinate if slab.parts[-1].axis is axis else "k")
        assert rows is not None
        return move, layout, rows

    def moved(self, letter: str) -> bool:
        """Whether values came to fragments of their own, rather than lie as sums do."""
        return any(x.to.endswith(f".{letter}") and x.by in (COPIES, TURN.name) for x in self.converts)

    def slot(self, slab: Slab) -> IntExpr:
        """The slot a slab is in."""
        return self.slots[slab.ring.name]


class Multiply:
    """Writes the products of a group."""

    def __init__(self, builder: Builder, bindings: Bindings) -> None:
        self.builder, self.bindings = builder, bindings

    def write(self, group: Group) -> None:
        """All products of one step."""
        if group.instruction is None:
            self._elements(group)
        elif isinstance(group.instruction, WarpgroupInstruction):
            self._warpgroups(group, group.instruction)
        else:
            self._warps(group, group.instruction)

    # -- CUDA cores ----------------------------------------------------------------------------------------------------

    def _elements(self, group: Group) -> None:
        """Outer products: fragments of both operands, then every product of theirs."""
        regs = [(a, d) for a in group.axes for d in group.inner[a] if d.level == "reg"]
        along = any(s.parts[-1].axis in group.inner for s in group.slabs.values())
        # where slabs run along k, a fragment has several steps of it, side by side
        digits = [d for _, d in regs]
        outer, last = (digits[:-1], digits[-1:]) if along else (digits, [])
        depth = {a: value(group.inner[a]) for a in group.axes}
        self.builder.loops([(d.variable, True) for d in outer], lambda: self._outer_product(group, depth, last))

    def _outer_product(self, group: Group, depth: Mapping[Any, IntExpr], last: list[Digit]) -> None:
        held: dict[Node, Node] = {}
        for term, slab in group.slabs.items():
            digits = {p.axis: [d for d in p.digits if d.level == "reg"] for p in slab.parts}
            index = [depth[p.axis] if p.axis in depth else value(p.digits) for p in slab.parts]
            own = [d for ds in digits.values() for d in ds]
            own += last if any(p.axis in depth for p in slab.parts) else []
            held[term] = self._fragment(slab, slab.seen(group.slot(slab), index, group.where), own)
        parts = group.fragments[0].parts
        loops = last + [d for p in parts for d in p.digits if d.level == "reg"]
        digits_of = {p.axis: p.digits for p in parts}

        def product() -> None:
            for c, fragment in zip(group.sites, group.fragments, strict=True):
                at = fragment.index(digits_of)
                for pair in c.terms:
                    both = l.apply("mul", *(substitute(f, held) for f in pair))
                    self.builder.add(l.Store(fragment.place, at, l.apply("add", l.Load(fragment.place, at), both)))

        self.builder.loops([(d.variable, True) for d in loops], product)

    def _fragment(self, slab: Slab, at: tuple[IntExpr, ...], digits: list[Digit]) -> l.Load:
        """A piece of a slab in registers, indexed by digits, read in wide accesses where one of them runs along the
        slab.
        """
        offset = flatten(at, slab.place.type.element_strides)
        j = next((d for d in digits if coefficient(offset, d.variable) == 1), None)
        width = 1
        if j is not None:
            start = substitute(offset, {j.value: 0})
            width = next(
                v
                for v in (16, 8, 4, 2, 1)
                if v * slab.place.type.dtype.size <= WIDEST and j.size % v == 0 and (v == 1 or divides(v, start))
            )
        order = [d for d in digits if d is not j] + ([j] if j else [])
        place = self.builder.registers(_named(slab, "f"), slab.place.type.dtype, [d.size for d in order])
        index = tuple(d.value for d in order)
        if j is None or width == 1:
            copy = l.Store(place, index, l.Load(slab.place, at))
            self.builder.loops([(d.variable, True) for d in order], partial(self.builder.add, copy))
            return l.Load(place, index)
        v = self.bindings.loop_variable("v", j.size // width)
        there = tuple(substitute(x, {j.value: v * width}) for x in at)
        move = k.Move(place, (*index[:-1], v * width), slab.place, there, width)
        self.builder.loops([*((d.variable, True) for d in order[:-1]), (v, True)], partial(self.builder.add, move))
        return l.Load(place, index)

    # -- instructions of a warp ----------------------------------------------------------------------------------------

    def _warps(self, group: Group, instruction: MatrixInstruction) -> None:
        """Fragments by ldmatrix, products by a matrix instruction."""
        regs, depth = group.depth(group.k)

        def body() -> None:
            loaded: dict[Node, tuple[k.Registers, tuple[IntExpr, ...]]] = {}
            parts = group.fragments[0].parts
            for a, b in (pair for c in group.sites for pair in group.terms(c)):
                for factor, x, letter in ((a, group.m, "a"), (b, group.n, "b")):
                    term, part = operand(factor), next(p for p in parts if p.axis is x)
                    if term in group.values:
                        held = group.values[term]
                        loaded[term] = held, self._held(group, held, part, instruction, letter)
                    elif term not in loaded:
                        loaded[term] = self._load(group, group.slabs[term], part, depth, letter)
            order = [p for p in parts if p.axis not in (group.n, group.m)]  # those of neither first, then m fastest
            order += [next(p for p in parts if p.axis is x) for x in (group.n, group.m)]
            loops = [(d.variable, True) for p in order for d in p.digits if d.level == "reg"]
            for c, fragment in zip(group.sites, group.fragments, strict=True):
                own = tuple(d.variable for p in fragment.parts for d in p.digits if d.level == "reg")
                for a, b in group.terms(c):
                    (left, i), (right, j) = loaded[operand(a)], loaded[operand(b)]
                    product = k.Multiply(instruction.name, fragment.place, (*own, 0), left, i, right, j)
                    self.builder.loops(loops, partial(self.builder.add, product))

        self.builder.loops([(d.variable, True) for d in regs], body)

    def _load(
        self, group: Group, slab: Slab, part: Part, depth: IntExpr, letter: str
    ) -> tuple[k.Registers, tuple[IntExpr, ...]]:
        """All fragments of an operand along its axis, two at a time where an instruction loads two; for every value of
        the axes that are no instruction's.
        """
        others = [p for p in slab.parts if p.axis not in (part.axis, group.k)]
        more = [d for p in others for d in p.digits if d.level == "reg"]
        regs = [d for d in part.digits if d.level == "reg"]
        assert isinstance(group.instruction, MatrixInstruction)
        move, layout, rows = group.brought(slab, letter)
        own, name = (group.instruction.a, "m") if letter == "a" else (group.instruction.b, "n")
        size, pair = 1 << dict(own.layout.extents)[name], 1 << layout.bits("reg") - own.layout.bits("reg")
        count = move.count // pair
        place = self.builder.registers(_named(slab, "f"), u32, [*(d.size for d in (*more, *regs)), count])
        row = {c: spread(component(rows, layout, c)) for c, _ in layout.extents}
        variables = [d.variable for d in regs]
        pairs: list[IntExpr] = list(variables)
        loops = list(variables)
        if pair == 2:
            half = self.bindings.loop_variable("p", regs[-1].size // 2)
            pairs, loops = [*variables[:-1], half * 2], [*variables[:-1], half]
        outer = value([d for d in part.digits if d.level in ("warp", "warpgroup") and d.stride >= size])
        for d, x in zip(regs, pairs, strict=True):
            outer = outer + x * d.stride
        at = {part.axis: outer + row[name], group.k: depth + row["k"], **{p.axis: value(p.digits) for p in others}}
        where = slab.seen(group.slot(slab), [at[p.axis] for p in slab.parts], group.where)
        first = tuple(d.variable for d in more)
        load = k.LoadMatrix(move.name, place, (*first, *pairs, 0), slab.place, where)
        self.builder.loops([(v, True) for v in (*first, *loops)], partial(self.builder.add, load))
        return place, (*first, *variables, 0)

    def _held(
        self, group: Group, place: k.Registers, part: Part, instruction: Matrix, letter: str
    ) -> tuple[IntExpr, ...]:
        """Where an instruction's part of values begins: of fragments, or where they lie as another product's sums do.
        Then its rows are this one's, and its columns go along this one's k, as many registers as a fragment has for
        each part. Where warps share k, each has its own.
        """
        own = value([d for d in group.inner[group.k] if d.level not in THREADS])
        rows = tuple(d.variable for d in part.digits if d.level == "reg")
        if group.moved(letter):
            return (*rows, own // instruction.shape[2], 0)
        first = own // instruction.shape[2] * instruction.a.elements
        return (*rows, *unflatten(first, place.type.static_shape[len(rows) :]))

    # -- instructions of a warpgroup -----------------------------------------------------------------------------------

    def _warpgroups(self, group: Group, instruction: WarpgroupInstruction) -> None:
        """Products straight from the slabs, or with values in registers as the first factor; they are on their way. One
        term goes through all of a step before the next one does: small ones first, they add up before they meet the
        large ones.
        """
        axis = group.k
        steps, depth = group.depth(axis)
        first = sum((d.value for d in steps), start=group.step)  # 0 at the first product
        if group.turns is None:
            self.builder.add(k.Fence("wgmma"))

        def body(number: int) -> None:
            if group.turns is not None:
                self._turn(group, instruction)
            for c, fragment in zip(group.sites, group.fragments, strict=True):
                if number >= len(c.terms) or fragment.first:  # which the first one's instruction sums too
                    continue
                a, b = group.terms(c)[number]
                fresh = -1 if number or at_least(first - 1, 0) else -first
                regs = [d for p in fragment.parts for d in p.digits if d.level == "reg"]
                own = tuple(d.value for d in regs)
                right, at_b = self._operand(group, operand(b), axis, depth)
                if operand(a) in group.values:
                    rows = next(p for p in fragment.parts if p.axis is group.m)
                    held = group.values[operand(a)]
                    left: l.Buffer = held
                    at_a = self._held(group, held, rows, instruction, "a")
                elif group.turns is not None:
                    left, at_a = group.turns, self._half(group, instruction, group.slabs[operand(a)])
                else:
                    left, at_a = self._operand(group, operand(a), axis, depth)
                assert isinstance(right, k.Shared)
                turned = "".join(
                    x for x, place in (("a", a), ("b", b)) if operand(place) in group.slabs
                    and (x == "b" or group.turns is None)
                    and group.slabs[operand(place)].parts[-1].axis is not axis
                )  # fmt: skip
                product = k.MultiplyAsync(
                    instruction.name, fragment.place, (*own, 0), left, at_a, right, at_b, fresh, turned
                )
                self.builder.loops([(d.variable, True) for d in regs], partial(self.builder.add, product))
            if group.turns is not None:
                self.builder.add(k.Commit("wgmma"))

        for number in range(max(len(c.terms) for c in group.sites)):
            self.builder.loops([(d.variable, True) for d in steps], partial(body, number))
        if group.turns is None:
            self.builder.add(k.Commit("wgmma"))

    def _turn(self, group: Group, instruction: WarpgroupInstruction) -> None:
        """Fragments of the first factor come to one half of its registers, once these were multiplied."""
        assert group.turns is not None
        (_, depth), slab = group.depth(group.k), group.slabs[operand(group.terms(group.sites[0])[0][0])]
        move, layout, rows = group.brought(slab, "a")
        first, down = (spread(component(rows, layout, c)) for c in "km")
        at = [
            depth + first
            if p.axis is group.k
            else value([d for d in p.digits if d.level in ("warpgroup", "reg", "warp")])
            + (down if p.axis is group.m else 0)
            for p in slab.parts
        ]
        load = k.LoadMatrix(
            move.name,
            group.turns,
            self._half(group, instruction, slab),
            slab.place,
            slab.seen(group.slot(slab), at, group.where),
        )
        regs = [(d.variable, True) for p in slab.parts for d in p.digits if d.level == "reg" and p.axis is not group.k]
        self.builder.add(k.WaitGroups(group.turns.type.static_shape[0] - 1, "wgmma"))
        self.builder.loops(regs, partial(self.builder.add, load))
        self.builder.add(k.Fence("wgmma"))

    def _half(self, group: Group, instruction: WarpgroupInstruction, slab: Slab) -> tuple[IntExpr, ...]:
        """Where the fragments of a part of a step are."""
        assert group.turns is not None
        steps, _ = group.depth(group.k)
        regs = [d.value for p in slab.parts for d in p.digits if d.level == "reg" and p.axis is not group.k]
        return (value(steps) // instruction.shape[2] % group.turns.type.static_shape[0], *regs, 0)

    def _operand(self, group: Group, term: Node, axis: Any, depth: IntExpr) -> tuple[k.Shared, tuple[IntExpr, ...]]:
        """Where an instruction's part of a slab begins."""
        slab = group.slabs[term]
        at = [
            depth if p.axis is axis else value([d for d in p.digits if d.level in ("warpgroup", "reg")])
            for p in slab.parts
        ]
        return slab.place, slab.seen(group.slot(slab), at, group.where)


def _named(slab: Slab, suffix: str) -> str:
    return slab.place.name.rstrip("0123456789") + suffix


def component(rows: Sequence[int], layout: Layout, coordinate: str) -> list[int]:
    """What each bit of the lane adds to one coordinate."""
    shift = 0
    for name, bits in layout.extents:
        if name == coordinate:
            return [row >> shift & (1 << bits) - 1 for row in rows]
        shift += bits
    return []


def spread(images: Sequence[int], number: IntExpr = k.LANE) -> IntExpr:
    """The sum over the bits of a number, the lane's, of what each adds, neighbours that stay neighbours together."""
    total: IntExpr = 0
    bit = 0
    while bit < len(images):
        end = bit + 1
        while images[bit] and end < len(images) and images[end] == images[bit] << end - bit:
            end += 1
        total = total + number // (1 << bit) % (1 << end - bit) * images[bit]
        bit = end
    return total
