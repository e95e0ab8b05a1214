"""Sums that begin afresh in every step, and are added to those of the tile on CUDA cores.

Tensor cores truncate as they add: long sums of theirs are off by more than float32 is.
"""

from __future__ import annotations

from functools import partial

from terrazzo.hw.products import matrix
from terrazzo.hw.wgmma import WarpgroupInstruction
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.plan import Product
from terrazzo.rules.tile.digits import Bindings, zero
from terrazzo.rules.tile.draft import Draft
from terrazzo.rules.tile_to_kernel.builder import Builder
from terrazzo.rules.tile_to_kernel.multiply import Fragment


class Promotion:
    """The sums of one step after the other, or of those of its products that are scaled alike. Where none are begun,
    nothing is added.
    """

    def __init__(self, builder: Builder, bindings: Bindings) -> None:
        self.builder, self.bindings = builder, bindings
        self.open: list[tuple[k.Registers, k.Registers, float]] = []  # the tile's sums, this step's, and their scale
        self.again: dict[k.Registers, k.Registers] = {}  # this step's, which may be overwritten

    def begin(self, totals: tuple[Fragment, ...], scale: float, first: bool) -> tuple[Fragment, ...]:
        """Accumulators of a step, or of some of its products, as those of the tile. A warpgroup's first product
        overwrites them.
        """
        found = []
        if first:
            self.again = {}
        for total in totals:
            kind = total.place.type
            own = isinstance(total.instruction, WarpgroupInstruction)
            init = None if own else l.Literal(zero(kind.dtype), kind.dtype)
            place = self.again.get(total.place)
            if place is None:
                place = self.builder.registers("part", kind.dtype, kind.static_shape, init)
            if own:
                self.again[total.place] = place
            self.open.append((total.place, place, scale))
            found.append(Fragment(place, total.parts, total.instruction))
        return tuple(found)

    def add(self) -> None:
        """The sums of the step, which were waited for, become part of the tile's."""
        for total, part, scale in self.open:
            at = tuple(self.bindings.loop_variable("e", n) for n in total.type.static_shape)
            more: l.Term = l.Load(part, at)
            if scale != 1:
                more = l.apply("mul", more, l.Literal(scale, part.type.dtype))
            both = l.apply("add", l.Load(total, at), more)
            self.builder.loops([(v, True) for v in at], partial(self.builder.add, l.Store(total, at, both)))
        self.open = []


def halves(draft: Draft, p: Product) -> int:
    """Into how many pieces a step of a warpgroup's product is cut: two where that leaves two instructions each."""
    site, sums = draft.site(p.sites[0]), draft.products[p.sites[0]]
    factors = [f for a in sums.reduce.axes for f in draft.binding(a, site)]
    deep = [f.size for f in factors if f.level == "reg" and f.size > 1]
    own = isinstance(matrix(p.on), WarpgroupInstruction) and p.a != "ldmatrix"
    return 2 if own and len(deep) == 1 and deep[0] % 4 == 0 else 1
