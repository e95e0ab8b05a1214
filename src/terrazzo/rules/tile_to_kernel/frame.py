"""Sums in a moving frame, in registers: the maximum of the scores so far, the sum of weights, and what the product has
summed are brought to the new frame in every step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import product
from typing import Any

import numpy as np

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Loaded, at_least
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.ir.types import i64
from terrazzo.rules.access import wide
from terrazzo.rules.loop.fusion.inline import guarded
from terrazzo.rules.tile.digits import Bindings, Digit, zero
from terrazzo.rules.tile.frames import Framed
from terrazzo.rules.tile.reach import Either
from terrazzo.rules.tile_to_kernel.builder import Builder
from terrazzo.rules.tile_to_kernel.copies import Copies, Part
from terrazzo.rules.tile_to_kernel.meet import meet
from terrazzo.rules.tile_to_kernel.multiply import Fragment


@dataclass(frozen=True)
class Rows(Fragment):
    """A value for every row of a thread's fragment."""

    def index(self, digits: Mapping[Any, Any]) -> tuple[IntExpr, ...]:
        return tuple(d.value for p in self.parts for d in digits[p.axis] if d.level in ("reg", "frag"))

    def element(self, number: IntExpr) -> tuple[IntExpr, ...]:
        found = []
        for d in held(self.parts[0]):
            found.append(number // (1 << d.place) % d.size if d.level == "frag" else d.value)
        return tuple(found)


Kept = dict[Node, tuple[k.Registers, tuple[IntExpr, ...]]]
"""Loads, the registers that have what they load, and where in these it is."""


def loaded(builder: Builder, load: l.Load, digits: Sequence[Digit], free: Sequence[k.Registers] = ()) -> k.Registers:
    """Registers, indexed by some digits, with what a load loads: several at once where they lie side by side. Those
    that are `free` and fit are taken again.
    """
    init = l.Literal(zero(load.dtype), load.dtype) if load.inside else None
    shape, index = tuple(d.size for d in digits), tuple(d.value for d in digits)
    fits = (x for x in free if (x.type.dtype, x.type.static_shape) == (load.dtype, shape))
    if (place := next(fits, None)) is None:
        place = builder.registers("in", load.dtype, shape, init)
    elif init is not None:
        nothing = l.Store(place, index, init)
        builder.loops([(d.variable, True) for d in digits], partial(builder.add, nothing))
    if digits and wide(load, digits[-1].variable, digits[-1].size):
        start = {digits[-1].value: 0}
        source, target, inside = (tuple(substitute(e, start) for e in y) for y in (load.index, index, load.inside))
        move: Node = k.Move(place, target, load.buffer, source, digits[-1].size)
        digits = digits[:-1]
    else:
        inside, move = load.inside, l.Store(place, index, l.Load(load.buffer, load.index))
    write = partial(builder.where, inside, partial(builder.add, move))
    builder.loops([(d.variable, True) for d in digits], write)
    return place


def data_says(load: l.Load) -> bool:
    """Whether where a load reads depends on data."""
    return any(isinstance(x, Loaded) for x in topological([e for e in load.index if isinstance(e, Node)]))


def held(part: Part) -> list[Digit]:
    """The digits of a part that lie in a thread's own registers."""
    return [d for d in part.digits if d.level in ("reg", "frag")]


class Frame:
    """The state of one team's rows: `top` is the highest score, `total` the sum of weights (of this thread's columns).
    The frame is `top`, or, where it moves only for scores that are so far `above` it, what `base` says; `top` is what
    each lane knows of it then.
    """

    def __init__(self, builder: Builder, found: Framed, rows: Part, columns: Part, above: int = 0) -> None:
        self.builder, self.found, self.rows, self.columns, self.above = builder, found, rows, columns, above
        shape, kind = [d.size for d in held(rows)], found.top.dtype
        self.top = builder.registers("top", kind, shape, l.Literal(-math.inf, kind))
        self.total = builder.registers("total", kind, shape, l.Literal(0.0, kind))
        self.none = l.Literal(float(np.finfo(kind.numpy).min), kind)  # what is subtracted where no score is above -inf
        self.base = builder.registers("base", kind, shape, self.none) if above else None
        self.weights: dict[Node, k.Registers] = {}
        self.fetched: Kept = {}
        self.worth: k.Registers | None = None

    def declare(self, scores: Fragment) -> dict[Node, k.Registers]:
        """Registers for the weights of a step, or parts of them, and for what the sums so far are worth in their
        frame.
        """
        self.weights = factors(self.builder, self.found.rounded, scores)
        if self.base is None:
            self.worth = self.builder.registers("worth", self.found.top.dtype, self.top.type.static_shape)
        return self.weights

    def fetch(
        self,
        copies: Copies,
        env: dict[Any, Any],
        term: Node,
        edges: tuple[IntExpr, ...],
        came: Mapping[l.Load, l.Load],
    ) -> None:
        """What scores are made of besides the product, a mask's elements, and what weights are multiplied by, into
        registers: several at once, where they lie side by side in memory and in a thread, and each once, where rows or
        columns share it. They are on their way while products are. What `came` with slabs is read from where it is.
        """
        digits = [*held(self.rows), *held(self.columns)]
        self.fetched = {}
        known = {*env, self.found.weight}
        for x in topological([term, self.found.whole], stop=lambda x: x in known or isinstance(x, l.Reduce)):
            if not isinstance(x, l.Load) or x in env or data_says(x):
                continue
            load = came[x] if x in came else guarded(substitute(x, env), edges)
            mine = [d for d in digits if d.value in load.free]
            if x in came or len(mine) < len(digits) or wide(load, mine[-1].variable, mine[-1].size):
                self.fetched[x] = loaded(self.builder, load, mine), tuple(d.value for d in mine)

    def weigh(
        self,
        copies: Copies,
        env: dict[Any, Any],
        term: Node,
        inside: Sequence[tuple[Either, IntExpr]],
        edges: tuple[IntExpr, ...],
        scores: Fragment,
        told: tuple[Node, IntExpr] | None = None,
        sums: Fragment | None = None,
    ) -> None:
        """The weights of a step in place of its scores, in the frame of the scores so far. `env` says how to compute
        the term that scores are where one at least of each of `inside` is >= 0; each is tested in the steps where what
        stands beside it is >= 0, and so is what data says (`told`). `edges` hold where there is a row and a column at
        all. `sums` are what the product has summed, if it has: a frame that moves rarely takes them along at once.
        """
        builder, found, kind = self.builder, self.found, self.found.top.dtype
        place, moved = scores.place, self.worth
        row = tuple(d.value for d in held(self.rows))
        mine = {p.axis: p.digits for p in scores.parts}
        at = scores.index(mine)
        columns = [(d.variable, True) for d in held(self.columns)]
        nothing = l.Literal(-math.inf, kind)
        env = env | {x: l.Load(*kept) for x, kept in self.fetched.items()}

        def score() -> None:
            """The score in place of the product."""
            x = copies.computed(term, {**env}, edges)
            if x is not l.Load(place, at):
                builder.add(l.Store(place, at, x))

        def hide(hidden: Sequence[Either]) -> None:
            """What the mask hides, or lies beyond the last column, weighs nothing."""
            x: Node = l.Load(place, at)
            for e in hidden:
                x = builder.let(l.apply("where", seen(e), x, nothing))
            builder.add(l.Store(place, at, x))

        def look(predicate: Node) -> None:
            """The same of what data hides."""
            shown = copies.computed(predicate, dict(env), edges)
            builder.add(l.Store(place, at, l.apply("where", shown, l.Load(place, at), nothing)))

        def highest(new: k.Registers, index: tuple[IntExpr, ...]) -> None:
            builder.add(l.Store(new, index, l.apply("max", l.Load(new, index), l.Load(place, at))))

        def weight(base: Node) -> None:
            e = builder.let(found.above(l.Load(place, at), base))
            builder.add(l.Store(self.total, row, l.apply("add", l.Load(self.total, row), e)))
            gated = copies.computed(found.whole, env | {found.weight: e}, edges)
            builder.add(l.Store(place, at, gated))

        def one() -> None:
            new = builder.registers("new", kind, ())
            builder.add(l.Store(new, (), l.Load(self.top, row)))
            builder.loops(columns, partial(highest, new, ()))
            self.meet(new, "max")
            base, worth = self.moved(l.Load(self.top, row), l.Load(new, ()))
            builder.add(l.Store(self.top, row, l.Load(new, ())))
            self.bring(self.total, row, worth)
            less = builder.let(found.base(base)) if found.early else base
            builder.loops(columns, partial(weight, less))
            assert moved is not None
            builder.add(l.Store(moved, row, worth))

        rows = [(d.variable, True) for d in held(self.rows)]
        if computed := builder.inside(score):
            builder.loops([*rows, *columns], lambda: builder.add(*computed))
        for cut in dict.fromkeys(cut for _, cut in inside):
            hidden = [e for e, other in inside if other is cut or other == cut]
            builder.where([cut], partial(builder.loops, [*rows, *columns], partial(hide, hidden)))
        if told is not None:
            predicate, cut = told
            builder.where([cut], partial(builder.loops, [*rows, *columns], partial(look, predicate)))
        if (base := self.base) is None:
            return builder.loops(rows, one)
        builder.loops([*rows, *columns], partial(highest, self.top, row))
        self.move_rarely(sums)
        builder.loops([*rows, *columns], partial(weight, l.Load(base, row)))

    def move_rarely(self, sums: Fragment | None) -> None:
        """A new frame, where a lane of the warp has a score too far above the one that is. That is rare, so it may wait
        until products are done.
        """
        builder, kind = self.builder, self.found.top.dtype
        digits, row, base = held(self.rows), tuple(d.value for d in held(self.rows)), self.base
        assert base is not None
        height = self.found.height(l.Load(self.top, row), l.Load(base, row))
        far = l.apply("gt", height, l.Literal(float(self.above), kind))
        each = product(*(range(d.size) for d in digits))
        every = (substitute(far, {d.variable: i for d, i in zip(digits, at, strict=True)}) for at in each)
        moved = builder.let(k.Vote("any", builder.let(reduce(partial(l.apply, "or_"), every))), "moved")
        number = builder.let(l.apply("where", moved, l.Literal(1, i64), l.Literal(0, i64)))

        def one() -> None:
            _, worth = self.highest(row)
            self.bring(self.total, row, worth)
            if sums is not None:
                self.bring_sums(sums, row, worth)

        def move() -> None:
            if sums is not None:
                builder.add(k.WaitGroups(0, "wgmma"))
            builder.loops([(d.variable, True) for d in digits], one)

        builder.where([Loaded(number, 2) - 1], move)

    def highest(self, row: tuple[IntExpr, ...]) -> tuple[Node, Node]:
        """The highest score of all lanes, which becomes the frame, and what sums of the old one are worth in it."""
        builder, kind, base = self.builder, self.found.top.dtype, self.base
        assert base is not None
        new = builder.registers("new", kind, ())
        builder.add(l.Store(new, (), l.Load(self.top, row)))
        self.meet(new, "max")
        none = l.apply("eq", l.Load(new, ()), l.Literal(-math.inf, kind))
        less = builder.let(l.apply("where", none, self.none, self.found.base(l.Load(new, ()))))
        worth = builder.let(self.found.between(l.Load(base, row), less))
        builder.add(l.Store(base, row, less))
        return l.Load(new, ()), worth

    def move(self, sums: Fragment) -> None:
        """What the product has summed comes to the frame of the last weights, if it is not there."""
        row, worth = tuple(d.value for d in held(self.rows)), self.worth
        if worth is None:
            return
        rows = [(d.variable, True) for d in held(self.rows)]
        self.builder.loops(rows, lambda: self.bring_sums(sums, row, l.Load(worth, row)))

    def round(self, scores: Fragment) -> None:
        """The last weights, which lie in place of their scores, as the product takes them."""
        loops = [(d.variable, True) for d in (*held(self.rows), *held(self.columns))]
        self.builder.loops(loops, lambda: rounded(self.builder, self.weights, self.found.whole, scores))

    def moved(self, old: Node, new: Node) -> tuple[Node, Node]:
        """What to subtract in a new frame, and what sums of the old one are worth in it. Where there is no score yet,
        any frame will do.
        """
        kind = self.found.top.dtype
        none = l.apply("eq", new, l.Literal(-math.inf, kind))
        base = self.builder.let(l.apply("where", none, l.Literal(0.0, kind), new))
        return base, self.builder.let(self.found.of(l.apply("sub", old, base)))

    def bring(self, target: k.Registers, index: tuple[IntExpr, ...], worth: Node) -> None:
        """Something that was summed, to a new frame."""
        self.builder.add(l.Store(target, index, l.apply("mul", l.Load(target, index), worth)))

    def bring_sums(self, sums: Fragment, row: tuple[IntExpr, ...], worth: Node) -> None:
        """What the product has summed for a row, to a new frame."""
        far = {p.axis: p.digits for p in sums.parts}
        (mine,) = (p for p in sums.parts if p.axis is self.rows.axis)  # where columns are stored first, not the first
        own = {d.variable: r for d, r in zip(held(mine), row, strict=True)}
        there = tuple(substitute(e, own) for e in sums.index(far))
        rest = [(d.variable, True) for p in sums.parts if p.axis is not self.rows.axis for d in held(p)]
        self.builder.loops(rest, partial(self.bring, sums.place, there, worth))

    def meet_warps(self, bindings: Bindings, sums: Fragment, digits: Sequence[Digit]) -> None:
        """Warps that share the steps have frames of their own: all states are brought to the highest, and the sums of
        weights meet. What the product has summed may be added then.
        """
        builder, kind = self.builder, self.found.top.dtype
        row = tuple(d.value for d in held(self.rows))
        rows = [(d.variable, True) for d in held(self.rows)]
        highest = builder.registers("top", kind, self.top.type.static_shape)
        builder.loops(rows, lambda: builder.add(l.Store(highest, row, l.Load(self.top, row))))
        meet(builder, bindings, highest, digits, "max")

        def one() -> None:
            _, worth = self.moved(l.Load(self.top, row), l.Load(highest, row))
            self.bring(self.total, row, worth)
            self.bring_sums(sums, row, worth)
            builder.add(l.Store(self.top, row, l.Load(highest, row)))

        builder.loops(rows, one)
        meet(builder, bindings, self.total, digits)

    def finish(self, sums: Fragment) -> None:
        """The sums of weights of all columns meet, in the frame of the highest score, and so what the product has
        summed.
        """
        row = tuple(d.value for d in held(self.rows))
        builder = self.builder

        def one() -> None:
            if self.base is not None:
                top, worth = self.highest(row)
                builder.add(l.Store(self.top, row, top))
                self.bring(self.total, row, worth)
                self.bring_sums(sums, row, worth)
            whole = builder.registers("sum", self.found.top.dtype, ())
            builder.add(l.Store(whole, (), l.Load(self.total, row)))
            self.meet(whole, "add")
            builder.add(l.Store(self.total, row, l.Load(whole, ())))

        builder.loops([(d.variable, True) for d in held(self.rows)], one)

    def meet(self, place: k.Registers, function: str) -> None:
        """The lanes that have columns of the same row combine what they have."""
        for d in (d for d in self.columns.digits if d.level == "lane"):
            for bit in range(d.size.bit_length() - 1):
                other = self.builder.let(k.Shuffle(l.Load(place, ()), d.inner << bit), "other")
                self.builder.add(l.Store(place, (), l.apply(function, l.Load(place, ()), other)))

    def fragments(self, top: l.Reduce, total: l.Reduce | None) -> dict[l.Reduce, Fragment]:
        """Where what follows finds the frame and the sum."""
        found: dict[l.Reduce, Fragment] = {top: Rows(self.top, (self.rows,), None)}
        if total is not None:
            found[total] = Rows(self.total, (self.rows,), None)
        return found


def factors(builder: Builder, terms: Sequence[Any], sums: Fragment) -> dict[Node, k.Registers]:
    """Registers for what is made in place of sums, as a product takes it: one term, or parts."""
    return {x: builder.registers("w", x.dtype, sums.place.type.static_shape) for x in terms}


def rounded(builder: Builder, places: Mapping[Node, k.Registers], made: Node, sums: Fragment) -> None:
    """An element of what was `made` in place of sums, as a product takes it. Of parts, each is made of what those
    before leave, which is found in 32 bits.
    """
    at = sums.index({p.axis: p.digits for p in sums.parts})
    known: dict[Node, Node] = {made: l.Load(sums.place, at)}
    (*first, last) = places.items()
    for x, place in first:
        kind: Any = x
        near = builder.let(l.apply("f32", builder.let(substitute(x, known))))
        builder.add(l.Store(place, at, l.apply(kind.dtype.name, near)))
        known[l.apply("f32", x)] = near
    builder.add(l.Store(last[1], at, substitute(last[0], known)))


def beyond(part: Part, at: IntExpr) -> tuple[IntExpr, ...]:
    """What is negative for rows or columns beyond the last one, where a tile or a step may have such."""
    if part.size and part.axis.extent % part.size == 0:
        return ()
    e = part.axis.extent - 1 - at
    return () if at_least(e, 0) else (e,)


def seen(either: Either) -> Node:
    """Whether one of some expressions is >= 0."""
    return reduce(partial(l.apply, "or_"), (l.apply("ge", l.Index(e), l.Literal(0, i64)) for e in either))
