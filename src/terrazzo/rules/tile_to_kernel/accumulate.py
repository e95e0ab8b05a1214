"""The accumulators of reductions: declared, combined into, and met by the threads that share a reduction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.node import Node
from terrazzo.ir.types import Type
from terrazzo.rules.tile.digits import Bindings, Digit
from terrazzo.rules.tile_to_kernel.builder import Builder

Places = tuple[k.Registers, ...]

FEW = 4
"""Warps whose values every lane reads and combines, at most."""


class Accumulators:
    """Writes what happens to accumulators. `columns` is the digit of a free axis whose values a thread reduces side by
    side: then every accumulator is an array, with a place for each of them.
    """

    def __init__(self, builder: Builder, bindings: Bindings) -> None:
        self.builder, self.bindings = builder, bindings
        self.columns: Digit | None = None
        self.collect: dict[Any, Callable[[Sequence[Node]], None]] = {}

    @property
    def at(self) -> tuple[IntExpr, ...]:
        """Where an accumulator is in its registers."""
        return () if self.columns is None else (self.columns.value,)

    def each(self, write: Callable[[], None]) -> None:
        """`write` for every value of the columns."""
        self.builder.loops([] if self.columns is None else [(self.columns.variable, True)], write)

    def declare(self, r: Any) -> Places:
        """Accumulators at their identity."""
        types = r.dtype if r.monoid.width > 1 else (r.dtype,)
        shape = () if self.columns is None else (self.columns.size,)
        name = self.builder.fresh("acc")
        places = []
        for p, (dtype, identity) in enumerate(zip(types, r.monoid.identity(types), strict=True)):
            place = k.Registers(name if r.monoid.width == 1 else f"{name}_{p}", Type(dtype, shape))
            self.builder.add(k.Declare(place, l.Literal(identity, dtype)))
            places.append(place)
        return tuple(places)

    def load(self, place: k.Registers) -> l.Load:
        """What an accumulator has."""
        return l.Load(place, self.at)

    def combine(self, places: Any, args: Sequence[Node], r: Any, earlier: bool = False) -> None:
        """places = combine(places, args); or, where these are collected, they are kept. What is `earlier` than what the
        places have comes first, if that makes a difference.
        """
        if r in self.collect:
            return self.collect[r](args)
        if isinstance(places, l.Load):  # a scan, of one value, that was named already
            places = (places.buffer,)
        own, other = list(map(self.load, places)), list(args)
        new = r.monoid.combine(l.apply, *((other, own) if earlier and not r.monoid.commutes else (own, other)))
        if len(places) > 1:
            new = [self.builder.let(x, "c") for x in new]
        for place, x in zip(places, new, strict=True):
            self.builder.add(l.Store(place, self.at, x))

    def meet(self, r: Any, places: Places, digits: Sequence[Sequence[Digit]]) -> None:
        """Combine what the threads have: over lanes, then over warps."""
        for d in (d for ds in digits for d in ds if d.level == "lane"):
            for bit in range(d.size.bit_length() - 1):
                self.each(lambda bit=bit, d=d: self.shuffle(r, places, d.inner << bit))  # type: ignore[misc]
        warps = [d for ds in digits for d in ds if d.level == "warp"]
        together = math.prod(d.size for ds in digits for d in ds if d.level == "lane") == k.WARP
        if warps and together and math.prod(d.size for d in warps) <= k.WARP:
            self.meet_together(r, places, warps)
        elif warps:
            self.meet_warps(r, places, warps)
        if any(d.level == "cluster" for ds in digits for d in ds):
            self.meet_blocks(r, places)

    def shuffle(self, r: Any, places: Places, far: int) -> None:
        """Combine with what the lane has whose number differs in one bit."""
        others = [self.builder.let(k.Shuffle(self.load(p), far), "other") for p in places]
        self.combine(places, others, r)

    def meet_warps(self, r: Any, places: Places, warps: Sequence[Digit]) -> None:
        """Every warp combines what those that share the reduction have, lane by lane."""
        meeting = self.meeting(places)
        self.builder.add(self.bindings.sync)
        self.combine_each(r, places, warps, meeting, k.LANE)
        if self.builder.depth:
            self.builder.add(self.bindings.sync)  # before the next step of a loop writes there again

    def meet_together(self, r: Any, places: Places, warps: Sequence[Digit]) -> None:
        """The lanes of every warp, which have the same, combine what the warps have that share the reduction. Few are
        read by every lane, in order, which takes no shuffle; of many the lanes take one each, and combine it as they
        did before: in as many steps as the number of warps has bits.
        """
        shape = (*(n for p in places[:1] for n in p.type.static_shape), self.bindings.warps)
        meeting = [self.builder.memory("meet", Type(p.type.dtype, shape)) for p in places]
        for m, p in zip(meeting, places, strict=True):
            store = l.Store(m, (*self.at, self.bindings.warp), self.load(p))
            self.builder.where([-k.LANE], partial(self.each, partial(self.builder.add, store)))
        self.builder.add(self.bindings.sync)
        if len(places) == 1 and math.prod(d.size for d in warps) <= FEW:
            self.combine_each(r, places, warps, meeting)
        else:
            self.combine_lanes(r, places, warps, meeting)
        if self.builder.depth:
            self.builder.add(self.bindings.sync)  # before the next step of a loop writes there again

    def combine_each(
        self, r: Any, places: Places, warps: Sequence[Digit], meeting: Sequence[k.Shared], *lane: IntExpr
    ) -> None:
        """Accumulators become what the warps left that share the reduction, combined in order."""
        self.reset(r, places)
        variables = [self.bindings.loop_variable("w", d.size) for d in warps]
        at: IntExpr = self.bindings.warp
        for d, v in zip(warps, variables, strict=True):
            at = at + (v - d.value) * d.inner

        def one() -> None:
            self.combine(places, [l.Load(m, (*self.at, at, *lane)) for m in meeting], r)

        self.builder.loops([(v, True) for v in variables], lambda: self.each(one))

    def combine_lanes(self, r: Any, places: Places, warps: Sequence[Digit], meeting: Sequence[k.Shared]) -> None:
        """The same, by lanes that begin with one each."""
        at, count = self.bindings.warp, 1
        for d in warps:
            at = at + (k.LANE // count % d.size - d.value) * d.inner
            count *= d.size
        for m, p in zip(meeting, places, strict=True):
            found = l.Store(p, self.at, l.Load(m, (*self.at, at)))
            self.each(lambda found=found: self.builder.add(found))  # type: ignore[misc]
        for bit in range(count.bit_length() - 1):
            self.each(lambda bit=bit: self.shuffle(r, places, 1 << bit))  # type: ignore[misc]

    def meet_blocks(self, r: Any, places: Places) -> None:
        """The blocks of a cluster combine what they have in the order of their ranks, each for itself."""
        meeting = self.meeting(places)
        self.builder.add(k.ClusterSync())
        self.reset(r, places)
        rank = self.bindings.loop_variable("b", self.bindings.order.cluster_size)

        def one() -> None:
            mine = (*self.at, self.bindings.warp, k.LANE)
            others = [self.builder.let(k.Remote(m, mine, rank), "other") for m in meeting]
            self.combine(places, others, r)

        self.builder.loops([(rank, True)], lambda: self.each(one))
        self.builder.add(k.ClusterSync())  # nobody leaves, or writes there again, while others still read

    def meeting(self, places: Places) -> list[k.Shared]:
        """Shared memory that has what every thread has in `places`."""
        shape = (*(n for p in places[:1] for n in p.type.static_shape), self.bindings.warps, k.WARP)
        found = [self.builder.memory("meet", Type(p.type.dtype, shape)) for p in places]
        for m, p in zip(found, places, strict=True):
            store = l.Store(m, (*self.at, self.bindings.warp, k.LANE), self.load(p))
            self.each(lambda store=store: self.builder.add(store))  # type: ignore[misc]
        return found

    def reset(self, r: Any, places: Places) -> None:
        """Accumulators at their identity again."""
        types = r.dtype if r.monoid.width > 1 else (r.dtype,)
        for p, dtype, identity in zip(places, types, r.monoid.identity(types), strict=True):
            store = l.Store(p, self.at, l.Literal(identity, dtype))
            self.each(lambda store=store: self.builder.add(store))  # type: ignore[misc]
