"""Points of a thread that take the steps of reductions together, as a stencil's or a depthwise convolution's do.

A load moves with some of the loops over points and over unrolled steps. Its distinct places are loaded into registers
before these loops, so neighbouring points share a window's rows, pixels a filter's weights and channels the places they
are read at. What depends on no point is computed once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from terrazzo.ir import nest as n
from terrazzo.ir.address import mentions
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Var, at_least
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.ir.plan import Jam as Line
from terrazzo.ir.plan import Plan
from terrazzo.rules.access import together, wide
from terrazzo.rules.moves import moves
from terrazzo.rules.tile import bodies
from terrazzo.rules.tile.digits import LOOPED, Bindings, Digit, extent, value, zero
from terrazzo.rules.tile.draft import axis_name
from terrazzo.rules.tile_to_kernel.builder import Builder
from terrazzo.rules.tile_to_kernel.scope import Scope, noting_nothing

Loops = Sequence[tuple[Var, bool]]
"""Loops, and whether each is unrolled."""


class Jam:
    """Writes a kernel whose points go together."""

    def __init__(self, kernel: l.Kernel, plan: Plan, builder: Builder, bindings: Bindings) -> None:
        self.kernel, self.builder, self.bindings = kernel, builder, bindings
        self.names: dict[Node, str] = {site: name for name, site in n.accumulators(kernel).items()}
        self.jammed = {w.name for w in plan.one(Line).points}
        self.loops: dict[Any, list[Var]] = {}  # of axes: those over points or over unrolled steps
        self.later: dict[Node, None] = {}  # terms that points differ in, in order
        self.ends: list[IntExpr] = []  # what must be >= 0 for a point to be one

    def write(self) -> None:
        """All of it."""
        found = bodies.flat(self.kernel)
        assert not isinstance(found, str)
        axes, statements = found
        scope, outer, inside = Scope(), [], []
        for a in axes:
            digits = self.bindings.digits(axis_name(a), None, extent(a))
            scope.env[a] = at = value(digits)
            scope.threads |= {bit for d in digits for bit in d.bits}
            points = [d for d in digits if d.level == "reg" and axis_name(a) in self.jammed]
            self.loops[a] = [d.variable for d in points]
            outer += [d for d in digits if d.level in LOOPED and d not in points]
            end = extent(a) - 1 - at
            for d in points:  # all of a thread's points are beyond the end, or none: it is tested once
                end = substitute(end, {d.variable: 0}) if together(end, d.variable, d.size) else end
            inside.append(end)
        inside = [e for e in inside if not at_least(e, 0)]
        self.ends = [e for e in inside if any(mentions(e, v) for v in self.points)]
        whole = [e for e in inside if e not in self.ends]
        write = partial(self.builder.where, whole, lambda: self.body(statements, scope))
        self.builder.loops([(d.variable, d.unrolled) for d in outer], write)

    @property
    def points(self) -> list[Var]:
        """The loops over points."""
        return [v for a in self.kernel.axes for v in self.loops.get(a, ())]

    def moving(self, term: Node) -> list[Var]:
        """The loops over points and unrolled steps that a term depends on."""
        return [v for a, found in self.loops.items() if a in term.free for v in found]

    # -- terms ---------------------------------------------------------------------------------------------------------

    def body(self, statements: Sequence[n.Statement], scope: Scope) -> None:
        for s in statements:
            match s:
                case n.Let() if self.moving(s.term):
                    self.later[s.term] = None
                case n.Let():
                    self.compute(s.term, scope)
                case n.Loop():
                    self.reduce(s, scope)
        self.finish([s for s in statements if isinstance(s, l.Store)], scope)

    def compute(self, term: Any, scope: Scope) -> None:
        """A term where writing is. Points beyond the end load nothing."""
        if term in scope.env or isinstance(term, l.Reduce | l.Get):
            return
        found, here = scope(term), self.moving(term)
        ends = [e for e in self.ends if any(mentions(e, v) for v in here)]
        if isinstance(term, l.Load):
            found = l.Load.make(found.buffer, found.index, (*found.inside, *ends))
        else:
            found = noting_nothing(found, ends)
        scope.env[term] = self.builder.let(found, "in" if isinstance(term, l.Load) else "v")

    def prepare(self, terms: Sequence[Node], scope: Scope) -> list[Node]:
        """Compute what moves with no loop, and load windows; what is left for the loops."""
        left = []
        for t in terms:
            if t in scope.env:
                continue
            if not self.moving(t):
                self.compute(t, scope)
            elif not (isinstance(t, l.Load) and self.window(t, scope)):
                left.append(t)
        return left

    def window(self, load: l.Load, scope: Scope) -> bool:
        """Load the distinct places of a load into registers, if loops move it evenly."""
        found: l.Load = scope(load)
        loops = self.moving(load)
        ends = [e for e in self.ends if any(mentions(e, v) for v in loops)]
        shape = found.buffer.type.static_shape
        edges = [e for i, size in zip(found.index, shape, strict=True) for e in (i, size - 1 - i)] if ends else []
        every = [*found.index, *found.inside, *edges]
        directions = moves(every, [(v, extent(v)) for v in loops])
        if directions is None:
            return False
        places = {d: self.bindings.loop_variable("u", d.extent) for d in directions}
        first = dict.fromkeys(loops, 0)
        for p, e in enumerate(every):
            every[p] = substitute(e, first)
            for d, u in places.items():
                every[p] = every[p] + (u - d.first) * d.steps[p]
        rank = len(shape)
        moved = l.Load.make(found.buffer, tuple(every[:rank]), tuple(every[rank:]))
        row = next((d for d, u in places.items() if _power(d.extent) and wide(moved, u, d.extent)), None)
        order = [*(d for d in directions if d is not row), *([row] if row else [])]
        init = l.Literal(zero(load.dtype), load.dtype) if row and moved.inside else None
        registers = self.builder.registers("in", load.dtype, [d.extent for d in order], init)
        variables = [places[d] for d in order]
        if row is None:
            self.unrolled(variables, lambda: self.builder.add(l.Store(registers, tuple(variables), moved)))
        else:
            *outer, u = variables
            at = tuple(substitute(i, {u: 0}) for i in moved.index)
            move = k.Move(registers, (*outer, 0), found.buffer, at, row.extent)
            inside = [substitute(e, {u: 0}) for e in moved.inside]
            self.unrolled(outer, lambda: self.builder.where(inside, partial(self.builder.add, move)))
        scope.env[load] = l.Load(registers, tuple(d.place for d in order))
        return True

    def unrolled(self, variables: Sequence[Var], write: Callable[[], None]) -> None:
        self.builder.loops([(v, True) for v in variables], write)

    # -- reductions ----------------------------------------------------------------------------------------------------

    def reduce(self, s: n.Loop, scope: Scope) -> None:
        """The steps of reductions over the same axes."""
        site = self.bindings.site([self.names[r] for r in s.carried])
        inner = scope.inner()
        levels: list[list[Digit]] = [[]]  # an axis' second factor, and what follows: reductions of these start afresh
        unrolled: list[Var] = []
        for a in s.axes:
            digits = self.bindings.digits(axis_name(a), site, extent(a))
            inner.env[a] = value(digits)
            times = [d for d in digits if d.level == "time"]
            levels[-1] += times[:1]
            levels += [[d] for d in times[1:]]
            self.loops[a] = [d.variable for d in digits if d.level != "time"]
            unrolled += self.loops[a]
        mine = [v for v in self.points if any(v in self.moving(r) for r in s.carried)]
        for r in s.carried:
            inner.env[r] = self.declare(r, mine)  # type: ignore[arg-type]
        self.steps(s, inner, mine, [[(d.variable, False) for d in level] for level in levels], unrolled)
        for r in s.carried:
            own = self.moving(r)  # of the points that it does not know, each has the same
            for p, place in enumerate(inner.env[r]):
                at = tuple(v if v in own else 0 for v in mine)
                scope.env[r if r.monoid.width == 1 else l.Get(r, p)] = l.Load(place, at)

    def steps(
        self, s: n.Loop, scope: Scope, mine: Sequence[Var], levels: Sequence[Loops], unrolled: Sequence[Var]
    ) -> None:
        """All steps. Those of an inner level start afresh and are added to those of the level around: so each sum is of
        fewer terms, and rounds less.
        """
        outer, *inner = levels
        some = partial(self.afresh, s, scope, mine, inner, unrolled)
        self.builder.loops(outer, some if inner else partial(self.step, s, scope, unrolled, mine))

    def afresh(
        self, s: n.Loop, scope: Scope, mine: Sequence[Var], levels: Sequence[Loops], unrolled: Sequence[Var]
    ) -> None:
        """Some steps in accumulators of their own, which are added to those of `scope`."""
        inner = scope.inner()
        for r in s.carried:
            inner.env[r] = self.declare(r, mine)  # type: ignore[arg-type]
        self.steps(s, inner, mine, levels, unrolled)

        def add() -> None:
            for r in s.carried:
                old = [[l.Load(p, tuple(mine)) for p in x.env[r]] for x in (scope, inner)]
                new = r.monoid.combine(l.apply, *old)
                self.builder.add(*(l.Store(p, tuple(mine), y) for p, y in zip(scope.env[r], new, strict=True)))

        self.unrolled(mine, add)

    def declare(self, r: l.Reduce, mine: Sequence[Var]) -> list[k.Registers]:
        """Accumulators at their identity, for every point."""
        types = r.dtype if r.monoid.width > 1 else (r.dtype,)
        return [
            self.builder.registers("acc", dtype, [extent(v) for v in mine], l.Literal(identity, dtype))
            for dtype, identity in zip(types, r.monoid.identity(types), strict=True)
        ]

    def step(self, s: n.Loop, scope: Scope, unrolled: Sequence[Var], mine: Sequence[Var]) -> None:
        """A step of the serial loops: windows first, then the unrolled steps, and in each all points."""
        scope = scope.inner()
        args = [x.args for x in s.body if isinstance(x, n.Accumulate)]
        needed = set(topological([a for x in args for a in x]))
        terms = [t for t in (*self.later, *(x.term for x in s.body if isinstance(x, n.Let))) if t in needed]
        left = self.prepare(terms, scope)

        def one() -> None:
            here = scope.inner()
            for t in left:
                if not set(self.moving(t)) & set(mine):
                    self.compute(t, here)
            self.unrolled(mine, lambda: self.combine(s, left, here.inner(), mine))

        self.unrolled(unrolled, one)

    def combine(self, s: n.Loop, left: Sequence[Node], scope: Scope, mine: Sequence[Var]) -> None:
        """One step of one point."""
        for t in left:
            self.compute(t, scope)
        for x in s.body:
            if isinstance(x, n.Accumulate):
                places = scope.env[x.into]
                old = [l.Load(p, tuple(mine)) for p in places]
                new = x.into.monoid.combine(l.apply, old, [scope(a) for a in x.args])
                if len(new) > 1:
                    new = tuple(self.builder.let(y, "c") for y in new)
                self.builder.add(*(l.Store(p, tuple(mine), y) for p, y in zip(places, new, strict=True)))

    # -- results -------------------------------------------------------------------------------------------------------

    def finish(self, stores: Sequence[l.Store], scope: Scope) -> None:
        """What follows the reductions, for every point; vectors where memory runs along points."""
        needed = set(topological([s.value for s in stores]))
        left = self.prepare([t for t in self.later if t in needed], scope)
        first = self.bindings.first(scope.threads)
        row = next((v for v in self.points if all(self.fits(s, v, scope) for s in stores)), None)
        if row is None:

            def point() -> None:
                here = scope.inner()
                for t in left:
                    self.compute(t, here)
                added = [l.Store(s.buffer, here.all(s.index), here(s.value)) for s in stores]
                self.builder.where([*first, *self.ends], partial(self.builder.add, *added))

            return self.unrolled(self.points, point)
        self.unrolled([v for v in self.points if v is not row], lambda: self.row(stores, left, row, first, scope))

    def fits(self, s: l.Store, v: Var, scope: Scope) -> bool:
        """Whether the values of a store for all of a loop's points leave at once."""
        size = extent(v)
        return _power(size) and wide(l.Load(s.buffer, scope.all(s.index), tuple(self.ends)), v, size)

    def row(
        self, stores: Sequence[l.Store], left: Sequence[Node], v: Var, first: Sequence[IntExpr], scope: Scope
    ) -> None:
        """The results of points that lie side by side."""
        kept = [self.builder.registers("out", s.buffer.type.dtype, (extent(v),)) for s in stores]

        def point() -> None:
            here = scope.inner()
            for t in left:
                self.compute(t, here)
            self.builder.add(*(l.Store(p, (v,), here(s.value)) for s, p in zip(stores, kept, strict=True)))

        self.unrolled([v], point)
        start = {v: 0}
        for s, p in zip(stores, kept, strict=True):
            to = tuple(substitute(i, start) for i in scope.all(s.index))
            move = k.Move(s.buffer, to, p, (0,), extent(v))
            inside = [substitute(e, start) for e in self.ends]
            self.builder.where([*first, *inside], partial(self.builder.add, move))


def _power(size: int) -> bool:
    return size > 1 and size & size - 1 == 0
