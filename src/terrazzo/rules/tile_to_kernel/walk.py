"""The loop nest of a kernel as statements of Kernel IR, each loop cut into the digits of its axis.

What a binding means for a reduction is derived here, once, for every monoid: digits in time and registers accumulate,
those in lanes meet by shuffles, those in warps through shared memory; every thread has the result then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from terrazzo.errors import Limitation, UserError
from terrazzo.ir import nest as n
from terrazzo.ir.address import mentions
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Var, at_least
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.ir.plan import Keep, Plan, Result
from terrazzo.ir.schedule import Site
from terrazzo.ir.types import Type
from terrazzo.rules.access import together, wide
from terrazzo.rules.tile.draft import axis_name
from terrazzo.rules.tile_to_kernel.builder import Builder
from terrazzo.rules.tile_to_kernel.digits import LOOPED, Bindings, Digit, extent, value, zero
from terrazzo.rules.tile_to_kernel.gather import Gather, leaf
from terrazzo.rules.tile_to_kernel.multiply import Fragment
from terrazzo.rules.tile_to_kernel.scope import Scope


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
    ) -> None:
        self.kernel, self.plan, self.builder, self.bindings = kernel, plan, builder, bindings
        self.fragments, self.places = fragments, places
        self.names: dict[Node, str] = {site: name for name, site in n.accumulators(kernel).items()}
        self.keep = {x.what for x in plan.all(Keep)}
        self.gathered = {r.store: r for r in plan.all(Result) if r.slab}
        self.tiled = {a for f in fragments.values() for a in map(axis_name, f.axes)}

    # -- the nest -----------------------------------------------------------------------------------------------------

    def statements(self, body: Sequence[n.Statement], scope: Scope) -> None:
        for s in self.left(body):
            match s:
                case n.Let():
                    self.compute(s.term, scope)
                case n.Accumulate():
                    self.combine(scope.env[s.into], scope.all(s.args), s.into)
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
        if isinstance(term, l.Load):
            found = l.Load.make(found.buffer, found.index, (*found.inside, *scope.pending))
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
        return self.bindings.site([x.buffer.name for x in _stores(s.body)])

    def digits(self, s: n.Loop) -> list[list[Digit]]:
        """The digits of every axis of a loop."""
        site = self.site(s)
        return [self.bindings.digits(axis_name(a), site, extent(a)) for a in s.axes]

    def loop(self, s: n.Loop, scope: Scope) -> None:
        stores = _stores(s.body) if self.gathered and axis_name(s.axes[0]) in self.tiled else []
        gathered = [x for x in stores if x.buffer.name in self.gathered]
        if gathered:
            if others := [x for x in stores if x not in gathered]:  # such as those of rows
                self.loop(_only(s, others), scope)
            return self.gather(_only(s, gathered) if others else s, scope)
        for r in s.carried:
            self.declare(r, scope)
        digits = self.digits(s)
        if s.kind == "scan" and any(d.level not in LOOPED for d in digits[0]):
            raise UserError(f"{axis_name(s.axes[0])} is bound to blocks or threads, and a scan along it runs in order")
        inner = scope.inner()
        mine = {bit for ds in digits for d in ds for bit in d.bits}
        if mine & scope.threads:
            names = ", ".join(map(axis_name, s.axes))
            raise UserError(
                f"{self.kernel.name}: {names} is bound to threads that an axis around it is bound to already"
            )
        inner.threads |= mine
        inside = self.enter(s.axes, digits, inner)
        inside, inner.pending = [*inside, *inner.pending], ()
        if self.parts(inside, s.body):
            if s.kind == "reduce":
                raise Limitation(
                    f"{self.kernel.name}: threads not all inside {axis_name(s.axes[0])} "
                    "meet in a reduction of its steps"
                )
            inside, inner.pending = [], tuple(inside)
        looped = [d for ds in digits for d in ds if d.level in LOOPED]
        leaf = not any(isinstance(x, n.Loop) for x in self.left(s.body))
        vector = (
            looped[-1]
            if leaf and looped and digits[-1] and digits[-1][-1] is looped[-1] and looped[-1].level != "time"
            else None
        )
        if leaf:
            self.keep_terms(s, digits, scope, inner)
        step = self.vector(s, vector, inside, inner) if vector is not None else None
        if step is not None and vector is not None:
            inside = [substitute(e, {vector.value: 0}) for e in inside]
            self.builder.peeled(looped[:-1], inside, step)
        else:
            self.builder.peeled(looped, inside, lambda: self.statements(s.body, inner))
        if s.kind == "reduce":
            for r in s.carried:
                self.meet(r, scope.env[r], digits)
        for r in s.carried:
            self.name_result(r, scope.env[r], scope)

    def gather(self, s: n.Loop, scope: Scope) -> None:
        """Stores whose values leave through shared memory."""
        whole = leaf(s, self.left)
        scope = scope.inner()
        for a in whole.axes:
            if axis_name(a) not in self.tiled:  # only the grid walks it
                scope.env[a] = self.bindings.base(axis_name(a), None)
        for x in whole.stores:
            line = self.gathered[x.buffer.name]
            one = Gather(self.builder, self.bindings, self.compute)
            one.write(line, self.places[x.buffer.name], x, whole, self.fragments, scope)

    def parts(self, inside: Sequence[IntExpr], body: Sequence[n.Statement]) -> bool:
        """Whether conditions keep some threads from where they have to meet others."""
        lanes, warps = (any(mentions(e, v) for e in inside) for v in (k.LANE, self.bindings.everyone))
        return (lanes or warps) and self.meets({"warp", "lane"} if lanes else {"warp"}, body)

    def meets(self, levels: set[str], body: Sequence[n.Statement]) -> bool:
        """Whether threads meet somewhere inside."""
        return any(
            self.meets(levels, s.body)
            or (s.kind == "reduce" and any(d.level in levels for ds in self.digits(s) for d in ds))
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
        loads = [
            x.term
            for x in s.body
            if isinstance(x, n.Let)
            and isinstance(x.term, l.Load)
            and x.term not in scope.env
            and wide(scope(x.term), j, size)
        ]
        stores = [x for x in s.body if isinstance(x, l.Store) and wide(l.Load(x.buffer, scope.all(x.index)), j, size)]
        if not loads and not stores:
            return None
        start = {j: 0}

        def step() -> None:
            here = scope.inner()
            here.kept = scope.kept
            for load in loads:
                self.wide_load(load, j, size, here)
            kept = {x: self.builder.registers("out", x.buffer.type.dtype, (size,)) for x in stores}
            rest = [x for x in self.left(s.body) if not (isinstance(x, n.Let) and x.term in loads)]

            def body() -> None:
                for x in rest:
                    if isinstance(x, l.Store) and x in kept:
                        self.builder.add(l.Store(kept[x], (j,), here(x.value)))
                    else:
                        self.statements([x], here)

            self.builder.loops([(j, True)], body)
            for x, place in kept.items():
                to = tuple(substitute(i, start) for i in scope.all(x.index))
                move = k.Move(x.buffer, to, place, (0,), size)
                self.builder.where(self.bindings.first(scope.threads), partial(self.builder.add, move))

        return step

    def wide_load(self, load: l.Load, j: Var, size: int, scope: Scope) -> None:
        found: l.Load = scope(load)
        at = tuple(substitute(i, {j: 0}) for i in found.index)
        if load in scope.kept:
            place, index = scope.kept[load]
        else:
            init = l.Literal(zero(load.dtype), load.dtype) if found.inside else None
            place, index = self.builder.registers("in", load.dtype, (size,), init), (j,)
        inside = [substitute(e, {j: 0}) for e in found.inside]
        self.builder.where(inside, lambda: self.builder.add(k.Move(place, (*index[:-1], 0), load.buffer, at, size)))
        scope.env[load] = l.Load(place, index)

    def keep_terms(self, s: n.Loop, digits: Sequence[Sequence[Digit]], scope: Scope, inner: Scope) -> None:
        """Terms of a leaf that registers keep, as the schedule says: found in those an earlier leaf filled, or to fill
        new ones.
        """
        looped = [d for ds in digits for d in ds if d.level in LOOPED]
        if not self.keep or any(d.level == "time" for d in looped):
            return
        variables = tuple(d.value for d in looped)
        same = {v: Var(f"kept{p}", d.size) for p, (v, d) in enumerate(zip(variables, looped, strict=True))}
        summands = {a for r in s.carried if self.names[r] in self.keep for a in r.args}
        made = dict(inner.env)  # what every term is made of, down to what registers hold
        for x in s.body:
            if not isinstance(x, n.Let) or isinstance(x.term, l.Get):
                continue
            made[x.term] = substitute(x.term, made)
            key = substitute(made[x.term], same)
            wanted = x.term.buffer.name in self.keep if isinstance(x.term, l.Load) else x.term in summands
            if key in scope.places:
                inner.env[x.term] = made[x.term] = l.Load(scope.places[key], variables)
            elif wanted:
                name = x.term.buffer.name if isinstance(x.term, l.Load) else "term"
                guarded = isinstance(x.term, l.Load) and x.term.inside  # it is 0 where nothing is loaded
                init = l.Literal(zero(x.term.dtype), x.term.dtype) if guarded else None
                scope.places[key] = self.builder.registers(name + "_", x.term.dtype, [d.size for d in looped], init)
                inner.kept[x.term] = scope.places[key], variables
                made[x.term] = l.Load(scope.places[key], variables)

    # -- reductions ----------------------------------------------------------------------------------------------------

    def declare(self, r: Any, scope: Scope) -> None:
        """Accumulators at their identity."""
        types = r.dtype if r.monoid.width > 1 else (r.dtype,)
        name = self.builder.fresh("acc")
        places = []
        for p, (dtype, identity) in enumerate(zip(types, r.monoid.identity(types), strict=True)):
            place = k.Registers(name if r.monoid.width == 1 else f"{name}_{p}", Type(dtype, ()))
            self.builder.add(k.Declare(place, l.Literal(identity, dtype)))
            places.append(place)
        scope.env[r] = tuple(places)

    def name_result(self, r: Any, places: Any, scope: Scope) -> None:
        """From here on, uses of the reduction or scan read its accumulators."""
        if r.monoid.width == 1:
            scope.env[r] = l.Load(places[0], ())
        else:
            for p, place in enumerate(places):
                scope.env[l.Get(r, p)] = l.Load(place, ())

    def combine(self, places: Any, args: Sequence[Node], r: Any) -> None:
        """places = combine(places, args)."""
        if isinstance(places, l.Load):  # a scan, of one value, that was named already
            places = (places.buffer,)
        new = r.monoid.combine(l.apply, [l.Load(p, ()) for p in places], list(args))
        if len(places) > 1:
            new = [self.builder.let(x, "c") for x in new]
        for place, x in zip(places, new, strict=True):
            self.builder.add(l.Store(place, (), x))

    def meet(self, r: Any, places: Any, digits: Sequence[Sequence[Digit]]) -> None:
        """Combine what the threads have: over lanes, then over warps."""
        for d in (d for ds in digits for d in ds if d.level == "lane"):
            for bit in range(d.size.bit_length() - 1):
                others = [self.builder.let(k.Shuffle(l.Load(p, ()), d.inner << bit), "other") for p in places]
                self.combine(places, others, r)
        warps = [d for ds in digits for d in ds if d.level == "warp"]
        if warps:
            meeting = self.meeting(places)
            self.builder.add(self.bindings.sync)
            self.reset(r, places)
            variables = [self.bindings.loop_variable("w", d.size) for d in warps]
            at: IntExpr = self.bindings.warp
            for d, v in zip(warps, variables, strict=True):
                at = at + (v - d.value) * d.inner
            self.builder.loops(
                [(v, True) for v in variables],
                lambda: self.combine(places, [l.Load(m, (at, k.LANE)) for m in meeting], r),
            )
            if self.builder.depth:
                self.builder.add(self.bindings.sync)  # before the next step of a loop writes there again
        if any(d.level == "cluster" for ds in digits for d in ds):
            self.meet_blocks(r, places)

    def meet_blocks(self, r: Any, places: Any) -> None:
        """The blocks of a cluster combine what they have in the order of their ranks, each for itself."""
        meeting = self.meeting(places)
        self.builder.add(k.ClusterSync())
        self.reset(r, places)
        rank = self.bindings.loop_variable("b", self.bindings.order.cluster_size)
        mine = (self.bindings.warp, k.LANE)

        def one() -> None:
            others = [self.builder.let(k.Remote(m, mine, rank), "other") for m in meeting]
            self.combine(places, others, r)

        self.builder.loops([(rank, True)], one)
        self.builder.add(k.ClusterSync())  # nobody leaves, or writes there again, while others still read

    def meeting(self, places: Any) -> list[k.Shared]:
        """Shared memory that has what every thread has in `places`."""
        shape = (self.bindings.warps, k.WARP)
        found = [self.builder.memory("meet", Type(p.type.dtype, shape)) for p in places]
        for m, p in zip(found, places, strict=True):
            self.builder.add(l.Store(m, (self.bindings.warp, k.LANE), l.Load(p, ())))
        return found

    def reset(self, r: Any, places: Any) -> None:
        """Accumulators at their identity again."""
        types = r.dtype if r.monoid.width > 1 else (r.dtype,)
        for p, dtype, identity in zip(places, types, r.monoid.identity(types), strict=True):
            self.builder.add(l.Store(p, (), l.Literal(identity, dtype)))


def _stores(body: Sequence[n.Statement]) -> list[l.Store]:
    inside = [x for s in body if isinstance(s, n.Loop) for x in _stores(s.body)]
    return [*(s for s in body if isinstance(s, l.Store)), *inside]


def _only(s: n.Loop, stores: Sequence[l.Store]) -> n.Loop:
    """A loop with some of the stores in it, and what these need."""
    needed = set(topological(stores))

    def some(body: Sequence[n.Statement]) -> tuple[n.Statement, ...]:
        found: list[n.Statement] = []
        for x in body:
            if isinstance(x, n.Loop) and not x.carried:
                inside = some(x.body)
                found += [replace(x, body=inside)] if _stores(inside) else []
            elif x in stores if isinstance(x, l.Store) else needed & set(_computes(x)):
                found.append(x)
        return tuple(found)

    return replace(s, body=some(s.body))


def _computes(x: n.Let | n.Accumulate | n.Loop) -> Sequence[Any]:
    """The terms that a statement gives a value."""
    return x.carried if isinstance(x, n.Loop) else (x.term,) if isinstance(x, n.Let) else (x.into,)
