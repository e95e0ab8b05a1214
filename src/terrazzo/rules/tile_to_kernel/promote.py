"""Sums that begin afresh in every step, and are added to those of the tile on CUDA cores.

Tensor cores truncate as they add: long sums of theirs are off by more than float32 is. CUDA cores round as they add:
where registers have room for a third set, sums of a few steps become part of the tile's together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from terrazzo.hw.wgmma import WarpgroupInstruction
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.plan import Plan, Product
from terrazzo.ir.types import f16
from terrazzo.rules.loop.precision.number_parts import every_digit
from terrazzo.rules.tile.digits import Bindings, zero
from terrazzo.rules.tile.draft import Draft
from terrazzo.rules.tile.promoted import TOGETHER, few, groups, opens, scales
from terrazzo.rules.tile_to_kernel.builder import Builder
from terrazzo.rules.tile_to_kernel.multiply import Fragment

CUT, MORE_CUT = 2.2e-8, 6.5e-8
"""How much of a sum is added to it for what a tensor core cuts off of products of parts: of parts in bfloat16, whose
products have 16 bits, and of those in float16, whose products have 22. Sums are 2.4e-8 and 5.2e-8 too small in the mean
without it (of normal numbers; of numbers from 0 to 1 3.5e-8 and 8e-8, of those behind a ReLU 1e-8 and 5e-8: emulated),
0.5e-8 and 0.8e-8 with it. It is more than what is cut off since additions that are exact stay so.
"""
MOST = 2.9e-8
"""How much of a sum is added to it at once, at most: less than 2^-25, so that one of which nothing was cut off, of
whole numbers perhaps, stays what it is.
"""


Sums = tuple[k.Registers, k.Registers, float]
"""The tile's, those of a group of products of a step, which are to be added to them, and how these are scaled."""


class Promotion:
    """The sums of one step after the other. Where none are begun, nothing is added. Those of a few steps are `held`
    apart from the tile's, where there is room; and where groups of a step's products may be open, each has sums of its
    own, which are added up while later groups are on their way.
    """

    def __init__(self, builder: Builder, bindings: Bindings) -> None:
        self.builder, self.bindings = builder, bindings
        self.open: list[Sums] = []  # those that were begun last
        self.begun: list[list[Sums]] = []  # those of groups before them that are on their way
        self.again: dict[k.Registers, k.Registers] = {}  # this step's, which may be overwritten, by the tile's
        self.groups: list[dict[k.Registers, k.Registers]] = []  # the same of each group, where groups may be open
        self.held: dict[k.Registers, k.Registers] = {}  # those of a few steps, by the tile's
        self.together = TOGETHER
        self.often = False  # whether sums are brought nearer whenever those of a few steps are added, or in the end
        self.by = 0.0  # of a sum, that is added to it then
        self.whole: IntExpr | None = None  # at least 0 where the last sums of a step make whole ones

    def prepare(
        self, draft: Draft, plan: Plan, p: Product, totals: Sequence[Fragment], steps: int, whole: IntExpr | None
    ) -> None:
        """What sums there are of a product with these in so many steps, the last of which is where `whole` is not
        negative, if there is one.
        """
        self.often = any(x.dtype is f16 for x in draft.products[p.sites[0]].operands)  # type: ignore[attr-defined]
        self.by, self.together = added(1, self.often), together(steps, self.often)
        if few(draft, plan, p, steps) and steps > self.together:
            self.by = added(-(-steps // self.together), self.often)
            self.held.update({x.place: self.like(x, "few", empty=True) for x in totals})
        elif p.promote and every_digit(scales(draft, p)):
            self.whole = whole
        if opens(draft, plan, p):
            self.apart(totals, len(groups(draft, p)))

    def apart(self, totals: Sequence[Fragment], count: int) -> None:
        """Have sums of its own for each of so many groups of a step."""
        self.groups = [{x.place: self.like(x, "part") for x in totals} for _ in range(count)]

    def like(self, total: Fragment, name: str, empty: bool = False) -> k.Registers:
        """Registers for sums like others, with nothing in them."""
        kind = total.place.type
        init = l.Literal(zero(kind.dtype), kind.dtype) if empty else None
        return self.builder.registers(name, kind.dtype, kind.static_shape, init)

    def begin(self, totals: tuple[Fragment, ...], scale: float, first: bool) -> tuple[Fragment, ...]:
        """Accumulators of a step, or of a piece of it, as those of the tile. A warpgroup's first product overwrites
        them.
        """
        if self.groups:
            self.again = self.groups[len(self.begun)]
        elif first:
            self.again = {}
        for total in totals:
            own = isinstance(total.instruction, WarpgroupInstruction)
            place = self.again.get(total.place)
            if place is None:
                place = self.like(total, "part", empty=not own)
            if own:
                self.again[total.place] = place
            self.open.append((total.place, place, scale))
        return self.go_on(totals, scale)

    def go_on(self, totals: tuple[Fragment, ...], scale: float) -> tuple[Fragment, ...]:
        """The sums that were begun, which were waited for, as those of products that are scaled so, which are added to
        them: all are rounded once, where they become part of the tile's.
        """
        for _, part, before in self.open:
            if before != scale:
                self.rescale(part, before / scale)
        self.open = [(total, part, scale) for total, part, _ in self.open]
        begun = {total: part for total, part, _ in self.open}
        return tuple(Fragment(begun[x.place], x.parts, x.instruction) for x in totals)

    def leave(self) -> None:
        """The sums that were begun stay on their way while others begin."""
        self.begun, self.open = [*self.begun, self.open], []

    def add(self, ends: bool = False) -> None:
        """The sums of the step that were begun first, which were waited for, become part of the tile's, or of those of
        a few steps. Those that end the last step make whole ones, where they are added to the tile's.
        """
        if self.begun:
            done, *self.begun = self.begun
        else:
            done, self.open = self.open, []
        for total, part, scale in done:
            add = partial(self.more, self.held.get(total, total), part, scale)
            if ends and self.whole is not None and scale == 1:
                self.builder.where([-1 - self.whole], add)
                self.builder.where([self.whole], partial(self.each, total, partial(self.nearer, total, part)))
            else:
                add()

    def go_to(self, t: IntExpr) -> None:
        """Before step t: once in a few steps, their sums become part of the tile's, and begin again."""
        if self.held:
            self.builder.where([t - 1, -(t % self.together)], self.gather)

    def gather(self) -> None:
        """The sums of a few steps become part of the tile's, and begin again."""
        for total, some in self.held.items():
            self.join(total, some)
            none = l.Literal(zero(some.type.dtype), some.type.dtype)
            self.each(some, lambda at, x=some, none=none: l.Store(x, at, none))  # type: ignore[misc]

    def finish(self) -> None:
        """The sums of the last few steps become part of the tile's."""
        for total, some in self.held.items():
            self.join(total, some, last=True)

    def join(self, total: k.Registers, some: k.Registers, last: bool = False) -> None:
        """The sums of a few steps become part of the tile's, the last ones or others."""
        if self.often or last:
            self.each(total, partial(self.nearer, total, some))
        else:
            self.more(total, some)

    def nearer(self, total: k.Registers, some: k.Registers, at: tuple[IntExpr, ...]) -> l.Store:
        """Two sums added up and brought nearer, rounded once. What an addition left out is known but for a rounding
        where the second sum is the larger one.
        """
        one, other = l.Load(total, at), l.Load(some, at)
        both = self.builder.let(l.apply("add", one, other))
        left = self.builder.let(l.apply("sub", other, l.apply("sub", both, one)))
        more = l.apply("mul", both, l.Literal(self.by, both.type))
        better = l.apply("add", both, l.apply("add", more, left))
        sound = l.apply("le", l.apply("abs", left), l.apply("abs", other))  # not where a sum is infinite or NaN
        return l.Store(total, at, l.apply("where", sound, better, both))

    def more(self, total: k.Registers, part: k.Registers, scale: float = 1.0) -> None:
        """Sums become part of others."""
        self.each(total, lambda at: l.Store(total, at, l.apply("add", l.Load(total, at), _times(part, at, scale))))

    def rescale(self, part: k.Registers, by: float) -> None:
        """Sums are multiplied by a number."""
        self.each(part, lambda at: l.Store(part, at, _times(part, at, by)))

    def each(self, place: k.Registers, write: Callable[[tuple[IntExpr, ...]], l.Store]) -> None:
        """A statement for every accumulator."""
        at = tuple(self.bindings.loop_variable("e", n) for n in place.type.static_shape)
        self.builder.loops([(v, True) for v in at], lambda: self.builder.add(write(at)))


def _times(place: k.Registers, at: tuple[IntExpr, ...], scale: float) -> l.Term:
    """An accumulator, scaled."""
    held: l.Term = l.Load(place, at)
    return held if scale == 1 else l.apply("mul", held, l.Literal(scale, place.type.dtype))


def together(steps: int, often: bool) -> int:
    """Of so many steps, how many are added up by themselves. What is brought nearer is so only with sums of others."""
    return min(2 * TOGETHER, max(steps // 4, 2)) if often else TOGETHER


def added(sums: int, often: bool) -> float:
    """How much of a sum is added to it when it is brought nearer: in the end, or as `often` as it gets another one of
    so many sums of a few steps, with the second of which it is 2 / sums of the whole, and so on.
    """
    whole = sum(n / sums for n in range(2, sums + 1))
    return min(MOST, MORE_CUT / max(whole, 1)) if often else CUT
