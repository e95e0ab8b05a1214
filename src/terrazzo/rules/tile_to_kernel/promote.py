"""Sums that begin afresh in every step, and are added to those of the tile on CUDA cores.

Tensor cores truncate as they add: long sums of theirs are off by more than float32 is.
"""

from __future__ import annotations

from functools import partial

from terrazzo.hw.wgmma import WarpgroupInstruction
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.rules.tile_to_kernel.builder import Builder
from terrazzo.rules.tile_to_kernel.digits import Bindings, zero
from terrazzo.rules.tile_to_kernel.multiply import Fragment


class Promotion:
    """The sums of one step after the other. Where none are begun, nothing is added."""

    def __init__(self, builder: Builder, bindings: Bindings) -> None:
        self.builder, self.bindings = builder, bindings
        self.open: list[tuple[k.Registers, k.Registers]] = []  # the tile's sums, and this step's

    def begin(self, totals: tuple[Fragment, ...]) -> tuple[Fragment, ...]:
        """Accumulators of a step, as those of the tile. A warpgroup's first product overwrites them."""
        found = []
        for total in totals:
            kind = total.place.type
            own = isinstance(total.instruction, WarpgroupInstruction)
            init = None if own else l.Literal(zero(kind.dtype), kind.dtype)
            place = self.builder.registers("part", kind.dtype, kind.static_shape, init)
            self.open.append((total.place, place))
            found.append(Fragment(place, total.parts, total.instruction))
        return tuple(found)

    def add(self) -> None:
        """The sums of the step, which were waited for, become part of the tile's."""
        for total, part in self.open:
            at = tuple(self.bindings.loop_variable("e", n) for n in total.type.static_shape)
            both = l.apply("add", l.Load(total, at), l.Load(part, at))
            self.builder.loops([(v, True) for v in at], partial(self.builder.add, l.Store(total, at, both)))
        self.open = []
