"""What a product takes that no slab brings: made of what its step has multiplied before, in registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from terrazzo.errors import CompilerBug
from terrazzo.ir.address import coefficient, mentions
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import IntExpr, Loaded
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.ir.plan import Frame as FrameLine
from terrazzo.ir.plan import Plan, Product
from terrazzo.rules.tile.digits import Bindings, Digit, value
from terrazzo.rules.tile.draft import Draft
from terrazzo.rules.tile.frames import computed, framed, reductions
from terrazzo.rules.tile.overlap import made_before, made_first, multiples
from terrazzo.rules.tile.reach import Either, grows, masked
from terrazzo.rules.tile.rings import across, axis_called, outermost, staggered
from terrazzo.rules.tile_to_kernel.copies import Copies, Part, Slab
from terrazzo.rules.tile_to_kernel.frame import Frame, beyond
from terrazzo.rules.tile_to_kernel.made import Made
from terrazzo.rules.tile_to_kernel.multiply import Fragment


class Factors:
    """Writes values for the products of a tile's steps, and weights, whose frame goes along from step to step.

    `fragments` has the accumulators as they are declared, `part` says how a site divides an axis, `beside` where
    something is that came with the slabs of a step.
    """

    def __init__(
        self,
        draft: Draft,
        plan: Plan,
        bindings: Bindings,
        copies: Copies,
        fragments: dict[l.Reduce, Fragment],
        part: Callable[[Any, Any], Part],
        beside: Callable[[Node, IntExpr], tuple[Slab, IntExpr] | None],
    ) -> None:
        self.draft, self.plan, self.bindings, self.copies = draft, plan, bindings, copies
        self.builder, self.steps, self.scope = copies.builder, copies.steps, copies.scope
        self.fragments, self.part, self.beside = fragments, part, beside
        self.frame: Frame | None = None
        self.whole: k.Value | None = None  # whether all of a step is seen
        self.made: dict[str, Made] = {}
        self.firsts: dict[str, Made] = {}

    def begin(self) -> None:
        """The state of frames before the first step."""
        for line in self.plan.all(FrameLine):
            p = next(x for x in self.plan.all(Product) if line.product in x.sites)
            inner = self.plan.all(Product)[0]
            site = self.draft.site(inner.sites[0])
            found = framed(self.draft, p)
            assert found is not None
            rows, columns = (self.part(x, site) for x in across(self.draft, p, inner))
            self.frame = Frame(self.builder, found, rows, columns, line.above)
        for p in self.plan.all(Product) if self.frame is None else ():
            if p.made:
                made = self.point_by_point(p)
                for each in (*filter(None, [self.firsts.get(p.sites[0])]), made):
                    each.begin({**self.scope.env, **{x.axis: x.base + value(x.digits) for x in each.parts}})

    def meet(self, sums: Fragment, digits: Sequence[Digit]) -> None:
        """Threads that share the steps, as these digits divide them, have their sums in one frame."""
        if self.frame is not None and digits:
            self.frame.meet_warps(self.bindings, sums, digits)

    def finish(self) -> None:
        """What lanes know of their rows' weights is summed, and known by name."""
        for line in self.plan.all(FrameLine):
            assert self.frame is not None
            self.frame.finish(self.fragments[self.draft.products[line.product].reduce])
            total = self.draft.names.get(line.total)
            assert total is None or isinstance(total, l.Reduce)
            self.fragments.update(self.frame.fragments(self.frame.found.top, total))

    def values(self, p: Product, t: IntExpr) -> dict[Node, k.Registers]:
        """A factor that is made of what this step has multiplied before: computed where its accumulators lie. Nothing,
        where all factors come from memory.
        """
        if not p.made:
            return {}
        found = self.declare(p)
        if self.frame is None:
            self.fetch(p, t)
        self.weigh(p, t)
        self.move(p)
        self.round(p)
        return found

    def declare(self, p: Product) -> dict[Node, k.Registers]:
        """Registers for the factor of a step."""
        if self.frame is None:
            return self.point_by_point(p).declare()
        scores, _ = self.scores(p)
        return self.frame.declare(scores)

    def point_by_point(self, p: Product) -> Made:
        """How a factor is made that is in no frame."""
        if p.sites[0] not in self.made:
            terms = computed(self.draft.products[p.sites[0]])
            hidden = masked(self.draft, p)
            assert hidden is not None
            known = tuple(self.point_by_point(q) for q in made_before(self.draft, self.plan, p).values())
            if staggered(self.draft, self.plan.all(Product)) and (part := made_first(self.draft, self.plan, p)):
                known = (self.in_place((part,), part),)
                self.firsts[p.sites[0]] = known[0]
            self.made[p.sites[0]] = self.in_place(terms, hidden.bare, known)
        return self.made[p.sites[0]]

    def in_place(self, terms: tuple[Any, ...], bare: Node, known: tuple[Made, ...] = ()) -> Made:
        """What is made in place of sums: of those that nothing is in place of that was made before."""
        sums = tuple(x for x in topological(terms[:1]) if isinstance(x, l.Reduce))
        whole = terms[0].args[0] if isinstance(terms[0], l.Apply) and is_cast(terms[0].fn) else terms[0]
        home = next((x for x in sums if all(x is not made.home for made in known)), sums[0])
        first = next(x for x in self.plan.all(Product) if home in [self.draft.products[s].reduce for s in x.sites])
        site = self.draft.site(first.sites[0])
        outer = next(x for x in self.plan.all(Product) if outermost(self.draft, x))
        columns = self.part(across(self.draft, outer, first)[1], site)
        every = (*(self.part(a, site) for a in self.draft.tiled if a in home.free), columns)
        return Made(self.copies, self.fragments, terms, whole, bare, sums, home, every, columns, known)

    @property
    def begun(self) -> Frame:
        """The frame of this tile's sums."""
        if self.frame is None:
            raise CompilerBug("a frame that was not begun")
        return self.frame

    def scores(self, p: Product) -> tuple[Fragment, l.Reduce]:
        """Where the scores lie that become a product's weights, and what they are the sums of."""
        (source,) = [c.reduce for c in self.draft.products.values() if c.reduce in reductions(self.begun.found.score)]
        return self.fragments[source], source

    def move(self, p: Product) -> None:
        """What a product has summed comes to the frame of the last weights, where there is one."""
        if self.frame is not None:
            self.frame.move(self.fragments[self.draft.products[p.sites[0]].reduce])

    def round(self, p: Product) -> None:
        """The last weights come to where a product takes them."""
        if self.frame is None:
            self.point_by_point(p).round()
        else:
            self.frame.round(self.scores(p)[0])

    def places(self, p: Product, t: IntExpr, made: Made | None = None) -> tuple[Part, Part, dict[Any, Any]]:
        """The rows and columns of what step t has multiplied, and how to compute what is at one of them: where a factor
        is made, or a part of it.
        """
        first = self.steps.firsts(t)
        parts = (made or self.point_by_point(p)).parts if self.frame is None else self.scores(p)[0].parts
        env = {**self.scope.env, **first}
        for part in parts:
            env[part.axis] = first.get(part.axis, part.base) + value(part.digits)
        mine = axis_called(self.draft, p.rows)
        return next(x for x in parts if x.axis is mine), next(x for x in parts if x.axis in first), env

    def fetch(self, p: Product, t: IntExpr) -> None:
        """What the factor of step t is made of besides products, on its way while these are."""
        rows, columns, env = self.places(p, t)
        if self.frame is None:
            self.point_by_point(p).fetch(env, {*self.came(self.point_by_point(p), t)})
            if part := self.firsts.get(p.sites[0]):
                part.fetch(self.places(p, t, part)[2], {*self.came(part, t)})
            return
        hidden = masked(self.draft, p)
        assert hidden is not None
        scores, source = self.scores(p)
        env[source] = self.score(scores)
        edges = (*beyond(rows, env[rows.axis]), *beyond(columns, env[columns.axis]))
        every = topological([hidden.bare], stop=lambda x: isinstance(x, l.Reduce))
        loads = [x for x in every if isinstance(x, l.Load)]
        came = self.read(loads, (rows, columns), t)
        self.frame.fetch(self.copies, env, hidden.bare, edges, came)
        self.whole = self.seen_whole(p, t)

    def weigh(self, p: Product, t: IntExpr, begun: bool = True) -> None:
        """The factor of step t in place of its scores, in the frame of the scores so far if there is one; whether the
        product has `begun` to sum.
        """
        rows, columns, env = self.places(p, t)
        hidden, last = masked(self.draft, p), beyond(columns, env[columns.axis])
        assert hidden is not None
        tests = [(x, next((e for e in x if mentions(e, rows.axis)), x[0])) for x in hidden.inside]
        inside = [(substituted(x, env), self.cut(e, rows.axis, columns.axis, t)) for x, e in tests]
        inside += [((e,), t + self.steps.first - columns.axis.extent // self.steps.depth[columns.axis]) for e in last]
        if self.frame is None:
            self.point_by_point(p).read(self.came(self.point_by_point(p), t))
            done = {substituted(x, env) for q in multiples(self.draft, self.plan, p) for x in self.hides(q)}
            edges = last if multiples(self.draft, self.plan, p) else ()
            inside = [(x, cut) for x, cut in inside if x not in done and x not in [(e,) for e in edges]]
            self.point_by_point(p).make(env, inside)
            return
        scores, source = self.scores(p)
        env[source] = self.score(scores)
        edges = (*beyond(rows, env[rows.axis]), *last)
        whole, self.whole = self.whole or self.seen_whole(p, t), None
        predicate = hidden.blocks.predicate if hidden.blocks is not None else None
        told = (predicate, -Loaded(whole, 2)) if whole is not None and predicate is not None else None
        sums = self.fragments[self.draft.products[p.sites[0]].reduce] if begun else None
        self.frame.weigh(self.copies, env, hidden.bare, inside, edges, scores, told, sums)

    def seen_whole(self, p: Product, t: IntExpr) -> k.Value | None:
        """Whether data says that all of step t is seen by all rows; None where it says nothing of that."""
        hidden = masked(self.draft, p)
        if hidden is None or hidden.blocks is None or hidden.blocks.whole is None:
            return None
        rows, columns, env = self.places(p, t)
        first = {rows.axis: rows.base, columns.axis: self.steps.firsts(t)[columns.axis]}
        return self.builder.let(substitute(hidden.blocks.whole, {**env, **first}), "whole")

    def has_first(self, p: Product) -> bool:
        """Whether a part of a product's factor needs the first sums alone."""
        self.point_by_point(p)
        return p.sites[0] in self.firsts

    def weigh_first(self, p: Product, t: IntExpr) -> None:
        """That part, in place of these sums."""
        part = self.firsts[p.sites[0]]
        part.read(self.came(part, t))
        part.make(self.places(p, t, part)[2], ())

    def hides(self, p: Product) -> tuple[Either, ...]:
        """The tests of what hides parts of a product's factor."""
        hidden = masked(self.draft, p)
        return hidden.inside if hidden is not None else ()

    def came(self, made: Made, t: IntExpr) -> dict[l.Load, l.Load]:
        """What a factor is made of that came with the slabs of step t, in shared memory."""
        return self.read(made.loads(), made.parts, t)

    def read(self, loads: Sequence[l.Load], parts: Sequence[Part], t: IntExpr) -> dict[l.Load, l.Load]:
        """Loads of what came with the slabs of step t, as loads of where it is, at these parts' elements."""
        at = {part.axis: value(part.digits) for part in parts}
        places = ((x, self.beside(x, t)) for x in loads)
        return {
            x: l.Load(slab.place, slab.at(slot, [at[part.axis] for part in slab.parts]))
            for x, found in places
            if found is not None
            for slab, slot in [found]
        }

    def score(self, scores: Fragment) -> l.Load:
        """A score, where its digits say."""
        return l.Load(scores.place, scores.index({x.axis: x.digits for x in scores.parts}))

    def cut(self, e: IntExpr, rows: Any, axis: Any, t: IntExpr) -> IntExpr:
        """What is >= 0 in the steps that a predicate may cut: those that reach beyond what the first row of the tile
        sees last, or begin before what the last row sees first.
        """
        p = self.plan.all(Product)[-1]
        site, step, sign = self.draft.site(p.sites[0]), self.steps.depth[axis], coefficient(e, axis)
        base = self.bindings.base(rows.name, site)
        bound = e + axis if sign == -1 else axis - e if sign == 1 else None
        if bound is None or not grows(bound, rows):
            return 0
        begins: IntExpr = t + self.steps.first
        if sign == -1:
            whole: IntExpr = substitute((substitute(bound, {rows: base}) + 1) // step, self.scope.env)
            return begins - whole
        last = self.draft.length(rows, site) - 1
        lower: IntExpr = substitute(substitute(bound, {rows: base + last}), self.scope.env)
        return lower - 1 - begins * step


def substituted(either: Either, env: dict[Any, Any]) -> Either:
    """Expressions of which one is >= 0, at a place."""
    return tuple(substitute(e, env) for e in either)
