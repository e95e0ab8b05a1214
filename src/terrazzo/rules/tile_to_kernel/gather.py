"""Results on their way through shared memory: fragments are put there by columns, and leave in whole rows, or in whole
columns where memory runs along these (`turned`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from terrazzo.hw import ldmatrix
from terrazzo.ir.address import divides
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Var
from terrazzo.ir.layout import Layout
from terrazzo.ir.node import topological
from terrazzo.ir.plan import Convert, Result
from terrazzo.ir.schedule import WARPS_IN_A_GROUP
from terrazzo.ir.types import Type
from terrazzo.rules.access import WIDEST, box, together, wide
from terrazzo.rules.tile.digits import Bindings, zero
from terrazzo.rules.tile.draft import axis_name
from terrazzo.rules.tile_to_kernel.builder import Builder
from terrazzo.rules.tile_to_kernel.copies import Part
from terrazzo.rules.tile_to_kernel.multiply import Fragment, component, spread
from terrazzo.rules.tile_to_kernel.scope import Scope
from terrazzo.rules.tile_to_kernel.team_tile import Leaf, Side, TeamTile, at_once

ROOM, OTHERS = 48, 48
"""32-bit registers of a thread for what the results of two subtiles load, at most, and for what is neither that nor an
accumulator: so many beside 128 accumulators do not spill.
"""
SUBTILES = 8
"""Subtiles whose operands are on their way, at most."""
MOST = 168
"""Registers that a thread without a role is taken to have: what 384 threads find. Fewer threads may have more."""


class Gather:
    """Writes the way of one store's values. `compute` writes a term where it is wanted; what is fetched first is where
    the tile is `begun`, or else where its sums are known.
    """

    def __init__(
        self, builder: Builder, bindings: Bindings, compute: Callable[[Any, Scope], None], begun: int | None = None
    ) -> None:
        self.builder, self.bindings, self.compute, self.begun = builder, bindings, compute, begun

    def write(
        self,
        line: Result,
        place: k.Shared,
        store: l.Store,
        leaf: Leaf,
        fragments: Mapping[l.Reduce, Fragment],
        scope: Scope,
    ) -> None:
        """All subtiles of a store, one after the other."""
        fragments = {r: f for r, f in fragments.items() if set(f.axes) <= set(leaf.axes)}
        fragment = next(f for f in fragments.values() if f.instruction is not None)
        assert fragment.instruction is not None
        rows, columns = _parts(line, fragment)
        tile = TeamTile(line, place, store, leaf, fragments, scope, fragment.instruction, rows, columns)
        count = tile.length(columns) // line.width
        if at_once(columns):
            self.before(line)
            self.put(tile, 0, {}, {})
            self.after(tile, range(count))
            return
        c = self.bindings.loop_variable("c", count)
        operands: dict[l.Load, Operand] = {}
        once: dict[Any, Once] = {}
        soon = 0

        def first() -> None:
            nonlocal operands, once, soon
            operands = self.operands(tile, count)
            once = self.once(tile, tile.rows, 0, operands.keys())
            soon = min((x.place.type.static_shape[0] for x in operands.values()), default=1) - 1
            for early in range(soon):
                self.fetch(tile, early, operands)

        def subtile() -> None:
            self.builder.where([count - 1 - soon - c], lambda: self.fetch(tile, c + soon, operands))
            every = {**once, **self.once(tile, (columns,), c * tile.each, operands.keys() | once.keys())}
            self.before(line)
            self.bring(tile, c, operands)
            self.put(tile, c, operands, every)
            self.after(tile, [c])

        self.builder.earlier(self.begun, first)
        self.builder.loops([(c, True)], subtile)

    # -- operands of the results ---------------------------------------------------------------------------------------

    def once(self, tile: TeamTile, parts: Sequence[Part], first: IntExpr, known: Set[Any]) -> dict[Any, Once]:
        """What results know of rows alone, or of the columns of the subtile that begins at a register, computed once
        for each of a thread, where tiles end amid rows or columns: ptxas finds what is the same where nothing is asked.
        """
        side = tile.side(parts, first, self.bindings.loop_variable)
        here, lets = self.point(tile, side.register), [let.term for let in tile.leaf.lets]
        axes = {p.axis for p in parts}
        others = {p.axis for p in (*tile.rows, tile.columns)} - axes
        known |= tile.fragments.keys()  # sums of rows are in registers as it is
        mine = [x for x in lets if not x.free & others and x not in here.env and not known & {*topological([x])}]
        rest = [*(x for x in lets if x not in mine), tile.store.value]
        used = [x for x in mine if x in set(topological(rest, stop=lambda y: y in mine or y in known))]
        points = [x for x in lets if isinstance(x, l.Load) and x.free >= others and x.free & axes and x not in known]
        room, sizes = self.room(tile) // 2 // (1 + len(points)), side.sizes  # ptxas loads some of these early
        if not here.pending or not used or math.prod(sizes) * len(used) > room:
            return {}
        found = {x: Once(self.builder.registers("once", x.dtype, sizes), side) for x in used}
        inside = tile.inside(here)

        def step() -> None:
            for x in mine:
                here.pending = tuple(e for a, e in inside.items() if a in x.free)
                self.compute(x, here)
            for x, one in found.items():
                self.builder.add(l.Store(one.place, side.loops, here(x)))

        self.builder.loops([(v, True) for v in side.loops], step)
        return found

    def operands(self, tile: TeamTile, count: int) -> dict[l.Load, Operand]:
        """Registers for what the values of a subtile load, neighbours at once: for as many of the `count` subtiles as
        there is room for, of which all but one are on their way while that is computed, which takes less than loading
        it. What has no neighbours, or no room, is loaded value by value. One comes in whole rows, if it may.
        """
        if any(x.level == "reg" for p in tile.rows for x in p.digits):
            return {}
        p, j = self.bindings.loop_variable("p", tile.instruction.d.elements // 2), self.bindings.loop_variable("j", 2)
        here = self.point(tile, 2 * p + j)
        if not all(together(e, j, 2) for e in here.pending):
            return {}
        terms = [let.term for let in tile.leaf.lets if isinstance(let.term, l.Load) and let.term not in here.env]
        paired = [x for x in terms if tile.columns.axis in x.free and not x.inside and wide(here(x), j, 2)]
        sizes = [tile.each * x.dtype.size // 4 for x in paired]
        room = self.room(tile)
        slots = max(1, min(room // max(sum(sizes), 1), count, SUBTILES))
        taken = [x for n, x in enumerate(paired) if slots * sum(sizes[: n + 1]) <= room]
        rows = next((x for x in taken if self.in_rows(tile, x)), None)
        init = {x: l.Literal(zero(x.dtype), x.dtype) if here.pending else None for x in taken}
        places = {x: self.builder.registers("in", x.dtype, (slots, tile.each), init[x]) for x in taken}
        return {x: Operand(place, x is rows) for x, place in places.items()}

    def room(self, tile: TeamTile) -> int:
        """32-bit registers for what a store's results load."""
        sums = sum(k.shared_bytes(x) // 4 for x in {f.place for f in tile.fragments.values()})
        return min(ROOM, (self.bindings.agent.registers or MOST) - sums - OTHERS) // len(tile.leaf.stores)

    def in_rows(self, tile: TeamTile, x: l.Load) -> bool:
        """Whether threads of a warp may load a subtile of an operand in whole rows, 16 bytes each, rather than pairs of
        elements of eight rows, for which they wait eight times as long: then it becomes fragments in shared memory,
        where the results will be.
        """
        dtype = tile.store.buffer.type.dtype
        known = all(p.axis in x.free for p in tile.rows)
        boxes = tile.line.by == "tma" and tile.line.width * dtype.size % WIDEST == 0 and not tile.line.turned
        return known and boxes and x.dtype is dtype and self.whole(tile, x, WIDEST // dtype.size)

    def fetch(self, tile: TeamTile, c: IntExpr, operands: Mapping[l.Load, Operand]) -> None:
        """Load what the values of subtile c are made of."""
        for x, place in ((x, o.place) for x, o in operands.items() if o.rows):
            inside = c % (tile.length(tile.columns) // tile.line.width)  # as c is: no column is beyond the tile
            self.pieces(tile, inside, WIDEST // x.dtype.size, partial(self.piece, tile, c, x, place))
        pairs = {x: o.place for x, o in operands.items() if not o.rows}
        if not pairs:
            return
        p = self.bindings.loop_variable("p", tile.each // 2)
        here = self.point(tile, c * tile.each + 2 * p)

        def load() -> None:
            for x, place in pairs.items():
                self.builder.add(k.Move(place, (c % place.type.static_shape[0], 2 * p), x.buffer, here(x).index, 2))

        self.builder.loops([(p, True)], lambda: self.builder.where(here.pending, load))

    def piece(
        self, tile: TeamTile, c: IntExpr, x: l.Load, place: k.Registers, i: IntExpr, row: IntExpr, column: IntExpr
    ) -> None:
        """Load the i-th piece that a thread has of the rows of subtile c."""
        vector = WIDEST // x.dtype.size
        slot = c % place.type.static_shape[0]
        self.builder.add(k.Move(place, (slot, i * vector), x.buffer, tile.index(x.index, row, column), vector))

    def bring(self, tile: TeamTile, c: IntExpr, operands: Mapping[l.Load, Operand]) -> None:
        """Put the rows that were loaded of subtile c where its results will be: there, each thread finds its own."""
        for x, place in ((x, o.place) for x, o in operands.items() if o.rows):
            self.pieces(tile, c, WIDEST // x.dtype.size, partial(self.put_piece, tile, c, place), guarded=False)
            self.sync()

    def put_piece(
        self, tile: TeamTile, c: IntExpr, place: k.Registers, i: IntExpr, row: IntExpr, column: IntExpr
    ) -> None:
        """Put the i-th piece that a thread has of the rows of subtile c where its results will be."""
        vector = WIDEST // place.type.dtype.size
        slot = c % place.type.static_shape[0]
        self.builder.add(k.Move(tile.place, self.at(tile, c, row, column), place, (slot, i * vector), vector))

    # -- waiting -------------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """The threads of the team meet."""
        self.builder.add(self.bindings.sync)

    def before(self, line: Result) -> None:
        """Until the slot that is written next has been read."""
        if line.by == "tma":
            self.builder.where(self.bindings.leader, lambda: self.builder.add(k.WaitGroups(line.slots - 1, "bulk")))
        self.sync()

    def after(self, tile: TeamTile, subtiles: Sequence[IntExpr]) -> None:
        """What was put into shared memory leaves it."""
        if tile.line.by == "tma":
            self.builder.add(k.Fence("proxy"))
            self.sync()
            self.builder.where(self.bindings.leader, lambda: self.boxes(tile, subtiles))
            return
        self.sync()
        for c in subtiles:
            self.copy(tile, c)

    # -- into shared memory --------------------------------------------------------------------------------------------

    def put(self, tile: TeamTile, c: IntExpr, operands: Mapping[l.Load, Operand], once: Mapping[Any, Once]) -> None:
        """This thread's values of subtile c (of all subtiles, where they go at once)."""
        converts = self.bindings.plan.all(Convert)
        group, move, layout, lanes = _way(next(x for x in converts if x.to == tile.line.slab))
        regs = [x for p in (*tile.rows, tile.columns) for x in p.digits if x.level == "reg"]
        each = tile.each
        q = self.bindings.loop_variable("q", each // group)
        e = self.bindings.loop_variable("e", group)
        first = q * group + c * each

        def one() -> None:
            held = self.builder.registers("h", tile.store.buffer.type.dtype, (group,))
            row, column = tile.row(first, lanes=move is None), tile.column(first, lanes=move is None)
            if move is not None:
                row = row + spread(component(lanes, layout, "m"))
                column = column + spread(component(lanes, layout, "n"))
            there = self.at(tile, c, row, column)
            known = {x: l.Load(o.place, o.side.of(first + e)) for x, o in once.items()}
            for x, o in operands.items():
                known[x] = l.Load(o.place, (c % o.place.type.static_shape[0], q * group + e))
                if o.rows:
                    mine = self.builder.registers("g", x.dtype, (group,))
                    if move is not None:
                        self.builder.add(k.LoadMatrix(move.reverse, mine, (0,), tile.place, there))
                    else:
                        self.builder.add(k.Move(mine, (0,), tile.place, there, group))
                    known[x] = l.Load(mine, (e,))
            self.builder.loops([(e, True)], lambda: self.value(tile, held, e, first + e, known))
            if move is not None:
                self.builder.add(k.StoreMatrix(move.name, tile.place, there, held, (0,)))
            else:
                self.builder.add(k.Move(tile.place, there, held, (0,), group))

        self.builder.loops([*((x.variable, True) for x in regs), (q, True)], one)

    def at(self, tile: TeamTile, c: IntExpr, row: IntExpr, column: IntExpr) -> tuple[IntExpr, ...]:
        """The place of an element of the tile."""
        wave, width = self.bindings.wave, tile.line.width
        if at_once(tile.columns):
            slot, column = column // width, column % width
        else:  # slots go on from tile to tile
            number = c if wave is None else wave * (tile.length(tile.columns) // width) + c
            slot, column = number % tile.line.slots, column - c * width
        if panel := tile.line.panel:
            return self.bindings.place, slot, row // panel, column, row % panel
        return (self.bindings.place, slot, *((column, row) if tile.line.turned else (row, column)))

    def value(
        self, tile: TeamTile, held: k.Registers, e: IntExpr, number: IntExpr, known: Mapping[l.Load, l.Load]
    ) -> None:
        """One value of the store, from register `number` of the accumulators, into `held`."""
        here = self.point(tile, number)
        here.env.update(known)
        for reduce, fragment in tile.fragments.items():
            here.env[reduce] = l.Load(fragment.place, fragment.element(number))
        wanted = set(topological([tile.store.value], stop=lambda x: x in here.env))
        for let in tile.leaf.lets:
            if let.term in wanted:
                self.compute(let.term, here)
        self.builder.add(l.Store(held, (e,), here(tile.store.value)))

    def point(self, tile: TeamTile, number: IntExpr) -> Scope:
        """What is known where register `number` of the accumulators belongs."""
        here = tile.scope.inner()
        for part in (*tile.rows, tile.columns):
            here.env[part.axis] = tile.first(part) + tile.coordinate(part, number)
        here.pending = tuple(tile.inside(here).values())
        return here

    # -- out of it -----------------------------------------------------------------------------------------------------

    def boxes(self, tile: TeamTile, subtiles: Sequence[IntExpr]) -> None:
        """One thread sends subtiles to global memory."""
        panel, (*outer, inner) = tile.line.panel, tile.rows
        sizes = {p.axis: 1 if panel else tile.length(p) for p in outer}
        sizes |= {inner.axis: panel or tile.length(inner), tile.columns.axis: tile.line.width}
        found = box(tile.store, sizes, tile.line.by_axes, sizes)
        assert not isinstance(found, str)
        view = found.place.tensor if found.place.tensor is not tile.store.buffer.type else None
        for c in subtiles:
            for row in range(0, tile.height, panel or tile.height):
                to = tile.index(found.place.index, row, c * tile.line.width)
                place = (*self.at(tile, c, row, c * tile.line.width)[:-2], 0, 0)
                self.builder.add(k.TensorStore(tile.store.buffer, to, tile.place, place, found.sides, "", view))
        self.builder.add(k.Commit("bulk"))

    def copy(self, tile: TeamTile, c: IntExpr) -> None:
        """The threads of the team move rows of a subtile, 16 bytes at a time where these begin at multiples of 16."""
        vector = WIDEST // tile.store.buffer.type.dtype.size
        while tile.line.width % vector or not self.whole(tile, tile.store, vector):
            vector //= 2
        held = self.builder.registers("o", tile.store.buffer.type.dtype, (vector,))

        def move(i: IntExpr, row: IntExpr, column: IntExpr) -> None:
            self.builder.add(
                k.Move(held, (0,), tile.place, self.at(tile, c, row, column), vector),
                k.Move(tile.store.buffer, tile.index(tile.store.index, row, column), held, (0,), vector),
            )

        self.pieces(tile, c, vector, move)

    def pieces(
        self,
        tile: TeamTile,
        c: IntExpr,
        vector: int,
        write: Callable[[IntExpr, IntExpr, IntExpr], None],
        guarded: bool = True,
    ) -> None:
        """The rows of a subtile in pieces of so many elements, those of a warp side by side: `write` what a thread does
        with its i-th one, whose row and column these are, inside the tensor.
        """
        width, first = tile.line.width, c * tile.line.width
        warps = self.bindings.warps if self.bindings.groups == 1 else WARPS_IN_A_GROUP
        threads = warps * k.WARP
        total = tile.height * (width // vector)
        i = self.bindings.loop_variable("i", -(-total // threads))
        p = self.bindings.warp % warps * k.WARP + k.LANE + i * threads
        row, column = p // (width // vector), p % (width // vector) * vector + first
        at = zip((*tile.rows, tile.columns), tile.at(row, column), strict=True)
        ends = [part.axis.extent - 1 - x for part, x in at] if guarded else []
        inside = [total - 1 - p, *ends]
        self.builder.loops([(i, True)], lambda: self.builder.where(inside, partial(write, i, row, column)))

    def whole(self, tile: TeamTile, x: l.Load | l.Store, vector: int) -> bool:
        """Whether so many columns lie together in global memory, all of them inside the tensor or none."""
        row, q, j = Var("$r", tile.height), Var("$q", 2), Var("$j", vector)
        there = l.Load(x.buffer, tile.index(x.index, row, q * vector + j))
        return divides(vector, tile.columns.axis.extent) and (vector == 1 or wide(there, j, vector))


@dataclass(frozen=True)
class Once:
    """Where a thread has what is computed once for each element of a side."""

    place: k.Registers
    side: Side


@dataclass(frozen=True)
class Operand:
    """Where a thread has elements of what the values of subtiles load: its own, or whole rows."""

    place: k.Registers
    rows: bool


def _parts(line: Result, fragment: Fragment) -> tuple[tuple[Part, ...], Part]:
    """A block's parts of the axes of rows, and of columns."""
    by_name = {axis_name(p.axis): p for p in fragment.parts}
    return tuple(by_name[x] for x in line.box or (line.rows,)), by_name[line.columns]


def _way(line: Convert) -> tuple[int, ldmatrix.MatrixMove | None, Layout, tuple[int, ...]]:
    """How many registers go at once, by which instruction, with which layout, and what the bits of a lane's number add
    to the row it names.
    """
    layout = Layout.parse(line.layout)
    move = ldmatrix.MOVES.get(line.by)
    return 1 << layout.bits("reg"), move, layout, (move.rows(layout) or ()) if move else ()


def result_place(builder: Builder, line: Result, store: l.Store, groups: int, fragment: Fragment) -> k.Shared:
    """Shared memory for the subtiles of a store: for every warpgroup (or all warps), so many slots, or all subtiles."""
    rows, columns = _parts(line, fragment)
    height, width = (
        math.prod(d.size for p in ps for d in p.digits if d.level != "warpgroup") for ps in (rows, (columns,))
    )
    slots = width // line.width if at_once(columns) else line.slots
    down, across = (line.width, height) if line.turned else (height, line.width)
    panels = (across // line.panel,) if line.panel else ()
    across = line.panel or across
    row = across + line.pad
    strides = (slots * down * row, down * row, row, 1)
    kind = Type(store.buffer.type.dtype, (groups, slots, *panels, down, across), strides if line.pad else None)
    return builder.memory(line.slab, kind, line.swizzle)
