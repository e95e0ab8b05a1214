"""Which steps a tile visits: all, or those that a mask leaves anything of; in one round, or in several."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.expr import IntExpr, Loaded, Var, at_least
from terrazzo.ir.node import Node, substitute
from terrazzo.ir.plan import Plan, Product, Reach
from terrazzo.rules.tile.digits import Bindings
from terrazzo.rules.tile.draft import Draft
from terrazzo.rules.tile.lengths import steps_of
from terrazzo.rules.tile.reach import Visits, ends_early, idle, visited
from terrazzo.rules.tile.rings import axis_called
from terrazzo.rules.tile_to_kernel.builder import Builder
from terrazzo.rules.tile_to_kernel.copies import Steps
from terrazzo.rules.tile_to_kernel.scope import Scope


class Visiting:
    """The steps of a tile, as one team counts them. `rounds` are the variables of the loops around them."""

    def __init__(
        self,
        draft: Draft,
        plan: Plan,
        builder: Builder,
        bindings: Bindings,
        scope: Scope,
        steps: Steps,
        rounds: tuple[Var, ...],
    ) -> None:
        self.draft, self.plan, self.builder, self.bindings = draft, plan, builder, bindings
        self.scope, self.steps, self.rounds = scope, steps, rounds

    @cached_property
    def visits(self) -> Visits | None:
        """Which steps there are, where a mask leaves nothing of others."""
        if not self.plan.all(Reach):
            return None
        p = self.plan.all(Product)[-1]
        if not p.made:
            end = ends_early(self.draft)
            assert end is not None
            return Visits(None, substitute(end.until, self.scope.env))
        site, rows = self.draft.site(p.sites[0]), axis_called(self.draft, p.rows)
        base, length = self.bindings.base(rows.name, site), self.draft.length(rows, site)
        ((axis, count),) = self.steps.times
        found = visited(self.draft, p, rows, base, length, self.steps.depth[axis], count)
        if found is None:  # there is only one tile, which visits all
            return None
        ends = (found.since, found.until, found.length, found.first, found.last)
        since, until, length, begin, end = (substitute(e, self.scope.env) for e in ends)
        return Visits(since, until, length, begin, end, found.each)

    @property
    def count(self) -> IntExpr:
        """How many steps there are in a round."""
        if self.visits is None:
            return self.steps.count
        return (self.bindings.until or self.visits.until) - (self.bindings.since or 0)

    @cached_property
    def idle(self) -> bool:
        """Whether there are tiles of which a mask leaves no step, so that nothing begins their sums."""
        return bool(self.plan.all(Reach)) and idle(self.plan, self.draft)

    def begin(self) -> None:
        """The first step that is visited and the end of them, where a mask hides others: not before the first there is,
        and not after the last.
        """
        if self.visits is None:
            return
        count, bindings, (first, until) = self.steps.count, self.bindings, (self.visits.since, self.visits.until)
        begins, told = self.visits.first, (self.visits.length, self.visits.last)
        if first is not None or begins is not None:
            most = count if begins is None else self._many * self.visits.each + 1
            bindings.since = self._integer(bindings.since, "since", most, 0)
            self.steps.first = bindings.since
        if bindings.since is not None and first is not None:
            self._set(bindings.since, first, first - 1)
        if bindings.since is not None and begins is not None:
            steps = self._blocks(begins)
            self._set(bindings.since, steps, steps - 1 - bindings.since)
        some, few = at_least(until, 0), at_least(count - until, 0)
        if told != (None, None) or not some or not few:
            bindings.until = self._integer(bindings.until, "until", count + 1, count)
        if bindings.until is not None and not (some and few):
            self._set(bindings.until, until, count - 1 - until, *([] if some else [until]))
        if bindings.until is not None and not some:
            self._set(bindings.until, 0, -1 - until)
        many, ends = told
        if bindings.until is not None and many is not None:
            ((axis, _),) = self.steps.times
            steps = steps_of(self.builder.let(many), axis.extent, self.steps.depth[axis])
            self._set(bindings.until, steps, bindings.until - 1 - steps)
        if bindings.until is not None and ends is not None:
            steps = self._blocks(ends)
            self._set(bindings.until, steps, bindings.until - 1 - steps)
        if begins is not None or told != (None, None):
            self._one()

    def _blocks(self, number: Node) -> IntExpr:
        """The step that a block begins with."""
        assert self.visits is not None
        return Loaded(self.builder.let(number), self._many + 1) * self.visits.each

    @property
    def _many(self) -> int:
        """How many blocks there are."""
        assert self.visits is not None
        return -(-self.steps.count // self.visits.each)

    def _one(self) -> None:
        """Where data leaves no step of a tile and steps overlap, one is visited in which all is masked; else none."""
        since, until, last = self.bindings.since, self.bindings.until, self.steps.count - 1
        if since is not None and until is not None and self.idle:
            self._set(since, until, since - 1 - until)
        if since is not None and not self.idle:
            self._set(since, last, since - 1 - last)
        if until is not None and not self.idle:
            self._set(until, (since or 0) + 1, (since or 0) - until)

    def go_around(self, write: Callable[[], None]) -> None:
        """`write` in every round, after which its steps are counted: slots go on from one to the next."""
        counted = self.bindings.steps
        if not self.rounds or counted is None:
            return write()

        def one() -> None:
            write()
            self.builder.add(k.SetInteger(counted, (counted + self.count) % counted.extent))

        self.builder.loops([(v, False) for v in self.rounds], one)

    def _integer(self, known: k.Integer | None, name: str, extent: int, value: int) -> k.Integer:
        """A number that is counted in, which is `value` at first."""
        found = known or k.Integer(self.builder.fresh(name), extent)
        self.builder.add(k.DeclareInteger(found, value))
        return found

    def _set(self, place: k.Integer, value: IntExpr, *where: IntExpr) -> None:
        """A number takes a value where something is >= 0."""
        self.builder.where(where, lambda: self.builder.add(k.SetInteger(place, value)))
