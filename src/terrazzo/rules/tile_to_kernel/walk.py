"""The loop nest of a kernel as statements of Kernel IR, each loop cut into the digits of its axis.

What a binding means for a reduction is derived here, once, for every monoid: digits in time and registers accumulate,
those in lanes meet by shuffles, those in warps through shared memory; every thread has the result then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from terrazzo.ir import nest as n
from terrazzo.ir.address import mentions
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Var, at_least, floordiv
from terrazzo.ir.node import Node, substitute
from terrazzo.ir.plan import Align, Keep, Plan, Result
from terrazzo.ir.schedule import Site
from terrazzo.rules.access import before, together, wide
from terrazzo.rules.loop.fusion.inline import in_bounds
from terrazzo.rules.tile import bodies
from terrazzo.rules.tile.digits import LOOPED, Bindings, Digit, begins_anywhere, extent, value, zero
from terrazzo.rules.tile.draft import axis_name
from terrazzo.rules.tile.loops import columns
from terrazzo.rules.tile_to_kernel.accumulate import Accumulators
from terrazzo.rules.tile_to_kernel.builder import Builder
from terrazzo.rules.tile_to_kernel.direct import Direct, beside, room
from terrazzo.rules.tile_to_kernel.frame import data_says
from terrazzo.rules.tile_to_kernel.gather import Gather
from terrazzo.rules.tile_to_kernel.in_frame import InFrame, StepFrame, stepwise, twice
from terrazzo.rules.tile_to_kernel.multiply import Fragment
from terrazzo.rules.tile_to_kernel.pieces import pieces
from terrazzo.rules.tile_to_kernel.scans import SharedScan
from terrazzo.rules.tile_to_kernel.scope import Scope, noting_nothing
from terrazzo.rules.tile_to_kernel.team_tile import Leaf, leaf

Wide = tuple[list[l.Load], dict[l.Store, IntExpr]]
"""Loads and stores of places side by side, and of each store, which of these it goes to."""


class Walker:
    """Writes what follows the steps of a tile, or all of a kernel that has no tile, for one team. `names` says what the
    sites of the kernel are called in schedules; `fragments` has the accumulators of products.
    """

    def __init__(
        self,
        kernel: l.Kernel,
        plan: Plan,
        builder: Builder,
        bindings: Bindings,
        fragments: dict[l.Reduce, Fragment],
        places: dict[str, k.Shared],
        begun: int | None = None,
    ) -> None:
        self.kernel, self.plan, self.builder, self.bindings = kernel, plan, builder, bindings
        self.fragments, self.places, self.begun = fragments, places, begun
        self.names: dict[Node, str] = {site: name for name, site in n.accumulators(kernel).items()}
        self.keep = {x.what for x in plan.all(Keep)}
        self.filled: dict[k.Registers, list[IntExpr]] = {}  # kept registers: where, of all threads and steps
        self.gathered = {r.store: r for r in plan.all(Result) if r.slab}
        self.tiled = {a for f in fragments.values() for a in map(axis_name, f.axes)}
        self.aligned = {w.name: w.args[0] for x in plan.all(Align) for w in x.vectors}
        self.accumulators = Accumulators(builder, bindings)

    # -- the nest -----------------------------------------------------------------------------------------------------

    def statements(self, body: Sequence[n.Statement], scope: Scope) -> None:
        if self.accumulators.columns is not None:
            return self.side_by_side(body, self.accumulators.columns, scope)
        for s in self.left(body):
            self.statement(s, scope)

    def statement(self, s: n.Statement, scope: Scope) -> None:
        match s:
            case n.Let():
                self.compute(s.term, scope)
            case n.Accumulate():
                self.accumulators.combine(scope.env[s.into], scope.all(s.args), s.into)
                if isinstance(s.into, l.Scan):
                    self.name_result(s.into, scope.env[s.into], scope)
            case l.Store():
                self.store(s, scope)
            case n.Loop():
                self.loop(s, scope)

    def left(self, body: Sequence[n.Statement]) -> list[n.Statement]:
        """Statements without the contractions that were written already."""
        return [
            s for s in body if not (isinstance(s, n.Loop) and s.carried and all(r in self.fragments for r in s.carried))
        ]

    def compute(self, term: Any, scope: Scope) -> None:
        if term in scope.env or isinstance(term, l.Reduce | l.Scan):
            return
        found = scope(term)
        if isinstance(term, l.Load) and (data_says(term) or not in_bounds(found)):
            told = [noting_nothing(e, scope.pending) for e in found.inside]
            found = l.Load.make(found.buffer, found.index, (*told, *scope.pending))
        elif not isinstance(term, l.Load):
            found = noting_nothing(found, scope.pending)
        scope.env[term] = self.builder.let(found, "in" if isinstance(term, l.Load) else "v")
        if term in scope.kept:
            place, index = scope.kept[term]
            self.builder.add(l.Store(place, index, scope.env[term]))

    def store(self, s: l.Store, scope: Scope) -> None:
        """Of lanes (or warps, or the blocks of a cluster) that no axis is bound to, and so have the same value, the
        first stores it.
        """
        self.builder.where(
            [*self.bindings.first(scope.threads), *scope.pending],
            lambda: self.builder.add(l.Store(s.buffer, scope.all(s.index), scope(s.value))),
        )

    def site(self, s: n.Loop) -> Site | None:
        """What the schedule says of the sites in a loop: of the accumulators it carries, else of what it stores."""
        if s.carried:
            return self.bindings.site([self.names[r] for r in s.carried])
        return self.bindings.site([x.buffer.name for x in bodies.stores(s.body)])

    def digits(self, s: n.Loop) -> list[list[Digit]]:
        """The digits of every axis of a loop."""
        site = self.site(s)
        return [self.bindings.digits(axis_name(a), site, extent(a)) for a in s.axes]

    def loop(self, s: n.Loop, scope: Scope) -> None:
        stores = bodies.stores(s.body) if self.gathered else []
        gathered = [x for x in stores if x.buffer.name in self.gathered]
        if gathered and axis_name(s.axes[0]) in self.tiled:
            if others := [x for x in stores if x not in gathered]:  # such as those of rows
                self.loop(bodies.only(s, others), scope)
            return self.gather(bodies.only(s, gathered) if others else s, scope)
        if self.fragments and not gathered and (results := self.direct(s, scope)) is not None:
            return results.write()
        digits = self.digits(s)
        if s.kind == "scan" and any(d.level not in LOOPED for d in digits[0]):
            return SharedScan(self, s, digits[0], self.kernel.name).write(scope)
        outer = self.accumulators.columns
        side = None if self.fragments else columns(s, self.left(s.body), digits[0])
        self.accumulators.columns = outer or side
        self.divided(s, digits, scope)
        self.accumulators.columns = outer

    def divided(self, s: n.Loop, digits: Sequence[Sequence[Digit]], scope: Scope) -> None:
        """A loop cut into digits. Threads that share a reduction meet after it."""
        for r in s.carried:
            scope.env[r] = self.accumulators.declare(r)
        inner = scope.inner()
        inner.threads |= {bit for ds in digits for d in ds for bit in d.bits}
        inside = self.enter(s.axes, digits, inner)
        inside, inner.pending = [*inside, *inner.pending], ()
        if self.parts(inside, s.body):
            inside, inner.pending = [], tuple(inside)
        body = self.left(s.body)
        if self.fragments and twice(s, body, digits):
            steps = replace(s, body=tuple(body))
            InFrame(self.builder, self.bindings, steps, digits, inside, inner, self.statements).write()
            return self.name_results(s, scope)
        if begins_anywhere(digits[-1], self.aligned.get(axis_name(s.axes[-1]))):
            self.ragged(s, digits, inside, scope, inner)
        elif self.accumulators.columns is None and not self.keep and (own := stepwise(s, body)):
            frame = StepFrame(self.accumulators, own, digits, scope)
            frame.write(lambda rest: self.steps(s, rest, inside, scope, inner))
        else:
            self.steps(s, digits, inside, scope, inner)
        if s.kind == "reduce":
            for r in s.carried:
                self.accumulators.meet(r, scope.env[r], digits)
        self.name_results(s, scope)

    def name_results(self, s: n.Loop, scope: Scope) -> None:
        """From here on, uses of what a loop carried read its accumulators."""
        for r in s.carried:
            self.name_result(r, scope.env[r], scope)

    def steps(
        self, s: n.Loop, digits: Sequence[Sequence[Digit]], inside: Sequence[IntExpr], scope: Scope, inner: Scope
    ) -> None:
        """The body of a loop for all values of its looped digits, those of the innermost at once where that is wide."""
        columns = self.accumulators.columns
        looped = [d for ds in digits for d in ds if d.level in LOOPED and d is not columns]
        if columns is not None:
            inside = [substitute(e, {columns.value: 0}) for e in inside]
            if not bodies.loops(self.left(s.body)):
                self.keep_terms(s, [*digits, [columns]], inside, scope, inner)
            return self.builder.peeled(looped, inside, lambda: self.statements(s.body, inner))
        leaf = not bodies.loops(self.left(s.body))
        vector = (
            looped[-1]
            if leaf and looped and digits[-1] and digits[-1][-1] is looped[-1] and looped[-1].level != "time"
            else None
        )
        if leaf:
            self.keep_terms(s, digits, inside, scope, inner)
        step = self.vector(s, vector, inside, inner) if vector is not None else None
        if step is not None and vector is not None:
            inside = [substitute(e, {vector.value: 0}) for e in inside]
            self.builder.peeled(looped[:-1], inside, step)
        else:
            self.builder.peeled(looped, inside, lambda: self.statements(s.body, inner))

    def direct(self, s: n.Loop, scope: Scope) -> Direct | None:
        """The loops over a tile whose results leave registers as they are; None where these are made of nothing else,
        or some are stored elsewhere than at every point of it.
        """
        loops = bodies.chain(s, self.left)
        axes = [a for x in loops for a in x.axes]
        digits = {a: ds for x in loops for a, ds in zip(x.axes, self.digits(x), strict=True)}
        if self.keep or any(d.level == "time" for ds in digits.values() for d in ds) or not loops:
            return None
        if not all(a in digits for f in self.fragments.values() for a in f.axes):
            return None
        here = scope.inner()
        here.threads |= {bit for ds in digits.values() for d in ds for bit in d.bits}
        inside = self.enter(axes, list(digits.values()), here)
        lets = [x for s in loops for x in self.left(s.body) if isinstance(x, n.Let)]
        whole = Leaf(tuple(axes), tuple(lets), tuple(x for x in loops[-1].body if isinstance(x, l.Store)))
        axis, side = beside(digits, inside, lambda d: self.wide([*lets, *whole.stores], d.variable, d.size, here))
        if not any(isinstance(x.term, l.Load) for x in lets) and (side is None or axis is axes[-1]):
            return None
        own = {a: [d.variable for d in ds if d.level in LOOPED and d is not side] for a, ds in digits.items()}
        inside = [substitute(e, {side.value: 0}) for e in inside] if side is not None else inside

        def one(body: Sequence[n.Statement], here: Scope) -> None:
            if side is None:
                return self.statements(body, here)
            j, size = side.variable, side.size
            self.at_once(body, j, size, here, *self.wide(body, j, size, here))

        return Direct(
            self.builder, here, whole, frozenset([axis]), frozenset(a for a in axes if a is not axis and own[a]),
            tuple(v for a in axes if a is not axis for v in own[a]), tuple(own[axis]),
            side.variable if side is not None else None, tuple(inside),
            room(self.plan, self.bindings, self.fragments), self.compute, one,
        )  # fmt: skip

    def ragged(
        self, s: n.Loop, digits: Sequence[Sequence[Digit]], inside: Sequence[IntExpr], scope: Scope, inner: Scope
    ) -> None:
        """A leaf along rows that begin anywhere: whole vectors from where memory is aligned on, then what lies before
        and behind them, of which a thread takes an element.
        """
        axis, own, size = s.axes[-1], digits[-1], digits[-1][-1].size
        terms = (x.term if isinstance(x, n.Let) else x for x in s.body)
        accesses = [x for x in terms if isinstance(x, l.Load | l.Store)]
        first: IntExpr = scope(before(accesses, axis, size))
        last = first + floordiv(extent(axis) - first, size) * size
        number = sum((d.value * (d.stride // size) for d in own if d.level not in LOOPED), start=0)
        others = [e for e in inside if e != extent(axis) - 1 - value(own)]
        vector = value(own) - own[-1].variable + first
        for at, mine, condition in (
            (value(own) + first, own, extent(axis) - size - vector),
            (number, (), first - 1 - number),
            (last + number, (), extent(axis) - 1 - last - number),
        ):
            if not at_least(-1 - condition, 0):
                here = inner.inner()
                here.env[axis] = at
                self.steps(s, (*digits[:-1], mine), [*others, condition], scope, here)

    def gather(self, s: n.Loop, scope: Scope) -> None:
        """Stores whose values leave through shared memory."""
        whole = leaf(s, self.left)
        scope = scope.inner()
        for a in whole.axes:
            if axis_name(a) not in self.tiled:  # only the grid walks it
                scope.env[a] = self.bindings.base(axis_name(a), None)
        for x in whole.stores:
            line = self.gathered[x.buffer.name]
            one = Gather(self.builder, self.bindings, self.compute, self.begun)
            one.write(line, self.places[x.buffer.name], x, whole, self.fragments, scope)

    def parts(self, inside: Sequence[IntExpr], body: Sequence[n.Statement]) -> bool:
        """Whether conditions keep some threads from where they have to meet others."""
        lanes, warps = (any(mentions(e, v) for e in inside) for v in (k.LANE, self.bindings.everyone))
        return (lanes or warps) and self.meets({"warp", "lane"} if lanes else {"warp"}, body)

    def meets(self, levels: set[str], body: Sequence[n.Statement]) -> bool:
        """Whether threads meet somewhere inside."""
        return any(
            self.meets(levels, s.body)
            or (s.kind != "free" and any(d.level in levels for ds in self.digits(s) for d in ds))
            for s in self.left(body)
            if isinstance(s, n.Loop)
        )

    def enter(self, axes: Sequence[Any], digits: Sequence[Sequence[Digit]], scope: Scope) -> list[IntExpr]:
        """Give axes their values in a scope; what must be >= 0 for them to be in range."""
        inside = []
        for axis, ds in zip(axes, digits, strict=True):
            scope.env[axis] = at = value(ds)
            scope.digits[axis] = list(ds)
            inside.append(extent(axis) - 1 - at)
        for r, fragment in self.fragments.items():
            if all(a in scope.digits for a in fragment.axes):
                scope.env[r] = l.Load(fragment.place, fragment.index(scope.digits))
        return [e for e in inside if not at_least(e, 0)]

    # -- vectors and kept loads --------------------------------------------------------------------------------------

    def vector(self, s: n.Loop, digit: Digit, inside: Sequence[IntExpr], scope: Scope) -> Callable[[], None] | None:
        """The body of a leaf for all values of its innermost digit at once, with wide loads and stores; None where none
        is wide.

        The conditions `inside` must hold for all of them or for none.
        """
        j, size = digit.value, digit.size
        assert isinstance(j, Var)
        if size & size - 1 or any(not together(e, j, size) for e in inside):
            return None
        loads, stores = self.wide(self.left(s.body), j, size, scope)
        if not loads and not stores:
            return None

        def step() -> None:
            here = scope.inner()
            here.kept = scope.kept
            self.at_once(self.left(s.body), j, size, here, loads, stores)

        return step

    def wide(self, body: Sequence[n.Statement], j: Var, size: int, scope: Scope) -> Wide:
        """The loads and stores that are wide along j."""
        loads = [
            x.term
            for x in body
            if isinstance(x, n.Let)
            and isinstance(x.term, l.Load)
            and x.term not in scope.env
            and wide(scope(x.term), j, size)
        ]
        ways = ((x, _way(x, j, size, scope)) for x in body if isinstance(x, l.Store))
        return loads, {x: way for x, way in ways if way is not None}

    def at_once(
        self,
        body: Sequence[n.Statement],
        j: Var,
        size: int,
        scope: Scope,
        loads: Sequence[l.Load],
        stores: Mapping[l.Store, IntExpr],
        keep: Sequence[Any] = (),
    ) -> None:
        """Statements for all j, after what is loaded at once and before what is stored so. Registers have what to keep
        for later.
        """
        for load in loads:
            self.wide_load(load, j, size, scope)
        taken = {*loads, *self.out_of_order(body, loads, j, size, scope)}
        out = {x: self.builder.registers("out", x.buffer.type.dtype, (size,)) for x in stores}
        later = {x: self.builder.registers("term", x.dtype, (size,)) for x in keep if x not in taken}

        def one() -> None:
            here = scope.inner()
            here.kept = scope.kept
            for x in body:
                if isinstance(x, l.Store) and x in out:
                    self.builder.add(l.Store(out[x], (stores[x],), here(x.value)))
                elif not isinstance(x, n.Let) or x.term not in taken:
                    self.statement(x, here)
                    if isinstance(x, n.Let) and x.term in later:
                        self.builder.add(l.Store(later[x.term], (j,), here.env[x.term]))

        self.builder.loops([(j, True)], one)
        scope.env.update({x: l.Load(place, (j,)) for x, place in later.items()})
        inside = [substitute(e, {j: 0}) for e in (*self.bindings.first(scope.threads), *scope.pending)]
        for x, place in out.items():
            first = substitute(stores[x], {j: 0})
            to = tuple(substitute(i, {j: first}) for i in scope.all(x.index))
            move = k.Move(x.buffer, to, place, (0,), size)
            self.builder.where(inside, partial(self.builder.add, move))

    def wide_load(self, load: l.Load, j: Var, size: int, scope: Scope) -> None:
        found: l.Load = scope(load)
        at = tuple(substitute(i, {j: 0}) for i in found.index)
        if load in scope.kept:
            place, index = scope.kept[load]
        else:
            init = l.Literal(zero(load.dtype), load.dtype) if found.inside or scope.pending else None
            place, index = self.builder.registers("in", load.dtype, (size,), init), (j,)
        inside = [substitute(e, {j: 0}) for e in (*found.inside, *scope.pending)]
        self.builder.where(inside, lambda: self.builder.add(k.Move(place, (*index[:-1], 0), load.buffer, at, size)))
        scope.env[load] = l.Load(place, index)

    def out_of_order(
        self, body: Sequence[n.Statement], others: Sequence[Any], j: Var, size: int, scope: Scope
    ) -> list[l.Load]:
        """Load what points read of a piece of memory in another order than their own, and which loads these are. All
        points are in range, or none.
        """
        if not all(together(e, j, size) for e in scope.pending):
            return []
        own = [x.term for x in body if isinstance(x, n.Let) and isinstance(x.term, l.Load) and x.term not in others]
        found = pieces([(x, scope(x)) for x in own if x not in scope.env and x not in scope.kept], j, size)
        pending = tuple(substitute(e, {j: 0}) for e in scope.pending)
        for piece in found:
            inside = (*piece.inside, *pending)
            init = l.Literal(zero(piece.buffer.type.dtype), piece.buffer.type.dtype) if inside else None
            place = self.builder.registers("in", piece.buffer.type.dtype, (piece.count,), init)
            self.builder.where(
                inside, partial(self.builder.add, k.Move(place, (0,), piece.buffer, piece.at, piece.count))
            )
            scope.env.update({x: l.Load.make(place, (at,), where) for x, at, where in piece.loads})
        return [x for piece in found for x, _, _ in piece.loads]

    def keep_terms(
        self, s: n.Loop, digits: Sequence[Sequence[Digit]], inside: Sequence[IntExpr], scope: Scope, inner: Scope
    ) -> None:
        """Terms of a leaf that registers keep, as the schedule says: found in those an earlier leaf filled, where its
        conditions hold wherever those of this one do, or to fill new ones.
        """
        looped = [d for ds in digits for d in ds if d.level in LOOPED]
        if not self.keep or any(d.level == "time" for d in looped):
            return
        columns = self.accumulators.columns  # what is the same for all of them is kept once
        same = {d.value: Var(f"kept{p}", d.size) for p, d in enumerate(looped)}
        summands = {a for r in s.carried if self.names[r] in self.keep for a in r.args}
        if len(row := [a for a in self.kernel.axes if a not in inner.env]) == 1:  # what will be stored along this loop
            stored = [x.value for x in self.kernel.stores if x.buffer.name in self.keep]
            summands |= {substitute(x, {row[0]: s.axes[-1]}) for x in stored}
        made = dict(inner.env)  # what every term is made of, down to what registers hold
        where = [substitute(e, same) for e in (*inside, *inner.pending)]
        for x in s.body:
            if not isinstance(x, n.Let) or isinstance(x.term, l.Get):
                continue
            made[x.term] = substitute(x.term, made)
            key = substitute(made[x.term], same)
            wanted = x.term.buffer.name in self.keep if isinstance(x.term, l.Load) else x.term in summands
            own = [d for d in looped if d is not columns or mentions(made[x.term], d.variable)]
            variables = tuple(d.value for d in own)
            filled = scope.places.get(key)
            if filled is not None and all(any(at_least(e - x, 0) for x in where) for e in self.filled[filled]):
                inner.env[x.term] = made[x.term] = l.Load(filled, variables)
            elif wanted:
                name = x.term.buffer.name if isinstance(x.term, l.Load) else "term"
                guarded = isinstance(x.term, l.Load) and x.term.inside  # it is 0 where nothing is loaded
                init = l.Literal(zero(x.term.dtype), x.term.dtype) if guarded else None
                scope.places[key] = self.builder.registers(name + "_", x.term.dtype, [d.size for d in own], init)
                self.filled[scope.places[key]] = where
                inner.kept[x.term] = scope.places[key], variables
                made[x.term] = l.Load(scope.places[key], variables)

    def name_result(self, r: Any, places: Any, scope: Scope) -> None:
        """From here on, uses of the reduction or scan read its accumulators."""
        if r.monoid.width == 1:
            scope.env[r] = self.accumulators.load(places[0])
        else:
            for p, place in enumerate(places):
                scope.env[l.Get(r, p)] = self.accumulators.load(place)

    # -- columns side by side -----------------------------------------------------------------------------------------

    def side_by_side(self, body: Sequence[n.Statement], columns: Digit, scope: Scope) -> None:
        """Statements between the loops of a body, for all columns at once; what is used after a loop is kept."""
        rest = self.left(body)
        while rest:
            count = next((at for at, s in enumerate(rest) if isinstance(s, n.Loop)), len(rest))
            run, rest = rest[:count], rest[count:]
            self.run(run, rest, columns, scope)
            if rest and isinstance(loop := rest.pop(0), n.Loop):
                self.loop(loop, scope)

    def run(self, run: Sequence[n.Statement], rest: Sequence[n.Statement], columns: Digit, scope: Scope) -> None:
        """Statements without loops. What other columns share is computed once."""
        j = columns.variable
        mine: list[n.Statement] = []
        own = scope.pending
        scope.pending = tuple(substitute(e, {j: 0}) for e in own)  # where one column is in range, the first is
        for s in run:
            if isinstance(s, n.Let) and not mentions(scope(s.term), j):
                self.compute(s.term, scope)
            else:
                mine.append(s)
        scope.pending = own
        loads, stores = self.wide(mine, j, columns.size, scope)
        used = bodies.used(rest)
        keep = [s.term for s in mine if isinstance(s, n.Let) and s.term in used and s.term not in loads]
        if mine:
            self.at_once(mine, j, columns.size, scope, loads, stores, keep)


def _way(store: l.Store, j: Var, size: int, scope: Scope) -> IntExpr | None:
    """Which of `size` places side by side, aligned, a store goes to: j, or from the last one down; else None."""
    place = l.Load(store.buffer, scope.all(store.index))
    return next((way for way in (j, size - 1 - j) if wide(substitute(place, {j: way}), j, size)), None)
