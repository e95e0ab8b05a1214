"""Sums on CUDA cores, in the place of those of a tile that will not do. A warp looks at all it has. Where few will not
do, its lanes go through the products of each of these together; where many will not, each lane goes through those of
all that it has. Either reads memory, is rare, and slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

from terrazzo.ir.address import flatten, unflatten
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Loaded, at_least
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.ir.rescues import Rescue
from terrazzo.ir.types import f32, i64, ordered_strides, u32
from terrazzo.rules.loop.fusion.inline import guarded
from terrazzo.rules.tile.digits import Bindings, Digit, value, zero
from terrazzo.rules.tile_to_kernel.builder import Builder
from terrazzo.rules.tile_to_kernel.frame import loaded
from terrazzo.rules.tile_to_kernel.multiply import Fragment
from terrazzo.rules.tile_to_kernel.scope import Scope

MOST = 128.0
"""Sums of a warp that its lanes find one after the other: each of 2048 products takes some microseconds so, and all
that a warp has of a tile take a millisecond (H100).
"""
WORD = 32
"""Bits of a word that says which sums of a lane will not do."""
TOGETHER = 2
"""Products that are loaded at once."""


class Rescued:
    """Has the sums of one team's tile become what they are to be: what is made of them, where they will do, and others
    where they will not. `scope` has the axes around the tile; `spare` are registers for all of them, if there are some.
    """

    def __init__(
        self,
        builder: Builder,
        bindings: Bindings,
        found: Rescue,
        tile: Fragment,
        scope: Scope,
        spare: k.Registers | None = None,
    ) -> None:
        self.builder, self.bindings, self.found, self.tile, self.spare = builder, bindings, found, tile, spare
        self.digits = [d for p in tile.parts for d in p.digits if d.level in ("reg", "frag")]
        self.elements = [(d.variable, True) for d in self.digits]
        self.at = tile.index({p.axis: p.digits for p in tile.parts})
        self.env = dict(scope.env)
        self.edges: dict[Any, IntExpr] = {}
        for p in tile.parts:
            self.env[p.axis] = x = p.base + value(p.digits)
            if not at_least(p.axis.extent - 1 - x, 0):
                self.edges[p.axis] = p.axis.extent - 1 - x
        shape = tile.place.type.static_shape
        self.number = flatten(self.at, ordered_strides(shape, range(len(shape))))
        self.words = -(-math.prod(shape) // WORD)
        self.doubts = builder.registers("doubts", u32, (self.words,), l.Literal(0, u32))
        self.none = l.Literal(zero(found.plain.dtype), found.plain.dtype)

    def write(self) -> None:
        """All of it."""
        self.look()
        words: list[Node] = [l.Load(self.doubts, (w,)) for w in range(self.words)]
        some = l.apply("ne", reduce(partial(l.apply, "or_"), words), l.Literal(0, u32))
        self.where_any(self.builder.let(some), self.sums)

    def look(self) -> None:
        """What is made of each sum in its place, and which of them each lane doubts: none beyond the results, where
        sums are 0, and what a row or a column lost is not.
        """
        builder, sum_ = self.builder, l.Load(self.tile.place, self.at)
        known = {**self.env, self.found.of: sum_}
        beyond = [l.apply("lt", l.Index(e), l.Literal(0, i64)) for e in self.edges.values()]

        def one() -> None:
            will_do, fast = (builder.let(substitute(x, known)) for x in (self.found.sure, self.found.fast))
            bit = l.apply("shl", l.Literal(1, u32), l.apply("u32", l.Index(self.number % WORD)))
            word = l.Load(self.doubts, (self.number // WORD,))
            fine: list[Node] = [will_do, *beyond]
            more = l.apply("where", reduce(partial(l.apply, "or_"), fine), l.Literal(0, u32), bit)
            builder.add(l.Store(self.doubts, word.index, l.apply("or_", word, more)))
            builder.add(l.Store(self.tile.place, self.at, fast))

        self.each([self.found.sure, self.found.fast], known, one)

    def doubted(self, word: IntExpr, bit: IntExpr) -> Node:
        """Whether this lane doubts the sums of a number."""
        shifted = l.apply("shr", l.Load(self.doubts, (word,)), l.apply("u32", l.Index(bit)))
        return self.builder.let(l.apply("ne", l.apply("and_", shifted, l.Literal(1, u32)), l.Literal(0, u32)))

    def sums(self) -> None:
        """The plain sums, of few elements or of all, by how many the warp doubts."""
        builder = self.builder
        many = builder.registers("many", f32, (), l.Literal(0.0, f32))
        word = self.bindings.loop_variable("w", self.words)
        bit = self.bindings.loop_variable("b", WORD)

        def count() -> None:
            one = l.apply("where", self.doubted(word, bit), l.Literal(1.0, f32), l.Literal(0.0, f32))
            builder.add(l.Store(many, (), l.apply("add", l.Load(many, ()), one)))

        builder.loops([(word, True), (bit, False)], count)
        self.meet(many)
        few = builder.let(l.apply("le", l.Load(many, ()), l.Literal(MOST, f32)))
        self.where_any(few, self.one_by_one)
        self.where_any(builder.let(l.apply("not_", few)), self.all)

    def each(
        self, terms: Sequence[Node], known: dict[Any, Any], write: Callable[[], None], along: Sequence[Digit] = ()
    ) -> None:
        """`write` for every element of a lane, and every step `along` what is summed, where what terms load is
        `known`: loaded once for all elements that share it, for a row of elements at a time.
        """
        outer = max(self.digits, key=lambda d: d.size)
        inner = [*(d for d in self.digits if d is not outer), *along]

        def fetch(own: bool) -> None:
            for x in topological(terms, stop=lambda x: x in known):
                if not isinstance(x, l.Load) or x in known:
                    continue
                load = self.load(x, known, self.edges)
                if (outer.value in load.free) == own:
                    mine = [d for d in inner if d.value in load.free]
                    known[x] = l.Load(loaded(self.builder, load, mine), tuple(d.value for d in mine))

        def row() -> None:
            fetch(own=True)
            self.builder.loops([(d.variable, True) for d in inner], write)

        fetch(own=False)
        self.builder.loops([(outer.variable, True)], row)

    def one_by_one(self) -> None:
        """The lanes of the warp sum the products of every doubtful element together."""
        builder = self.builder
        word = self.bindings.loop_variable("w", self.words)
        bit, lane = self.bindings.loop_variable("b", WORD), self.bindings.loop_variable("i", k.WARP)
        number = word * WORD + bit
        index = unflatten(number, self.tile.place.type.static_shape)
        where = {d.variable: self.decoded(d, index) for d in self.digits} | {k.LANE: lane}

        def element() -> None:
            mine = self.doubted(word, bit)
            self.where_any(mine, lambda: builder.loops([(lane, False)], partial(of_lane, mine)))

        def of_lane(mine: Node) -> None:
            own = l.apply("eq", l.Index(k.LANE), l.Index(lane))
            self.where_any(builder.let(l.apply("and_", mine, own)), partial(total, own))

        def total(own: Node) -> None:
            part = builder.registers("part", self.none.type, (), self.none)
            *outer, last = self.found.plain.axes
            steps = {a: self.bindings.loop_variable("r", a.extent) for a in outer}
            t = self.bindings.loop_variable("t", -(-last.extent // k.WARP))
            at = t * k.WARP + k.LANE
            end = () if last.extent % k.WARP == 0 else (last.extent - 1 - at,)
            env = {x: substitute(e, where) if isinstance(e, Node) else e for x, e in self.env.items()}
            edges = {a: substitute(e, where) for a, e in self.edges.items()}

            def add() -> None:
                one = self.product({**env, **steps, last: at}, edges | ({last: end[0]} if end else {}))
                builder.add(l.Store(part, (), l.apply("add", l.Load(part, ()), one)))

            builder.loops([*((v, False) for v in steps.values()), (t, False)], add)
            self.meet(part)
            builder.loops(self.elements, partial(keep, own, part))

        def keep(own: Node, part: k.Registers) -> None:
            here = l.apply("and_", own, l.apply("eq", l.Index(self.number), l.Index(number)))
            held = l.Load(self.tile.place, self.at)
            builder.add(l.Store(self.tile.place, self.at, l.apply("where", here, l.Load(part, ()), held)))

        builder.loops([(word, True), (bit, False)], element)

    def all(self) -> None:
        """Every lane sums the products of all that it has, some steps at a time, and takes those that it doubts."""
        builder, shape = self.builder, self.tile.place.type.static_shape
        plain = self.spare or builder.registers("plain", self.none.type, shape)
        builder.loops(self.elements, partial(builder.add, l.Store(plain, self.at, self.none)))
        *outer, last = self.found.plain.axes
        size = TOGETHER if last.extent % TOGETHER == 0 else 1
        steps = {a: self.bindings.loop_variable("r", a.extent) for a in outer}
        t, u = self.bindings.loop_variable("t", last.extent // size), self.bindings.loop_variable("u", size)

        def some() -> None:
            (product,) = self.found.plain.args
            known = {**self.env, **steps, last: t * size + u}

            def add() -> None:
                more = l.apply("add", l.Load(plain, self.at), substitute(product, known))
                builder.add(l.Store(plain, self.at, more))

            self.each([product], known, add, [Digit("reg", size, u, 1)])

        def take() -> None:
            doubted = self.doubted(self.number // WORD, self.number % WORD)
            held = l.Load(self.tile.place, self.at)
            builder.add(l.Store(self.tile.place, self.at, l.apply("where", doubted, l.Load(plain, self.at), held)))

        builder.loops([*((v, False) for v in steps.values()), (t, False)], some)
        builder.loops(self.elements, take)

    def product(self, env: dict[Any, Any], edges: dict[Any, IntExpr]) -> Node:
        """A product where axes are as `env` says; 0 is loaded for what lies beyond the tensors."""
        (product,) = self.found.plain.args
        for x in topological([product], stop=lambda x: x in env):
            if isinstance(x, l.Load) and x not in env:
                env[x] = self.builder.let(self.load(x, env, edges), "in")
        found: Node = substitute(product, env)
        return found

    def load(self, x: l.Load, env: dict[Any, Any], edges: dict[Any, IntExpr]) -> l.Load:
        """A load where its axes are as `env` says."""
        own = (e for a, e in edges.items() if a in x.free)
        found = guarded(substitute(x, env), tuple(own))
        assert isinstance(found, l.Load)
        return found

    def decoded(self, digit: Digit, index: tuple[IntExpr, ...]) -> IntExpr:
        """The value of a digit where an element of the sums lies."""
        if digit.level == "frag":
            number = index[-1] - self.tile.first
            return number // (1 << digit.place) % digit.size
        return index[[d for d in self.digits if d.level == "reg"].index(digit)]

    def where_any(self, wanted: Node, write: Callable[[], None]) -> None:
        """`write` where any lane of the warp wants it."""
        some = self.builder.let(k.Vote("any", wanted), "some")
        number = self.builder.let(l.apply("where", some, l.Literal(1, i64), l.Literal(0, i64)))
        self.builder.where([Loaded(number, 2) - 1], write)

    def meet(self, place: k.Registers) -> None:
        """What the lanes of a warp have, added up."""
        for bit in range(k.WARP.bit_length() - 1):
            other = self.builder.let(k.Shuffle(l.Load(place, ()), 1 << bit), "other")
            self.builder.add(l.Store(place, (), l.apply("add", l.Load(place, ()), other)))
