"""A factor that is made, point by point, of what a step has multiplied before: where those sums lie, in registers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.rules.loop.fusion.inline import guarded
from terrazzo.rules.tile.digits import Digit, zero
from terrazzo.rules.tile.reach import Either
from terrazzo.rules.tile_to_kernel.builder import Builder
from terrazzo.rules.tile_to_kernel.copies import Copies, Part
from terrazzo.rules.tile_to_kernel.frame import Kept, beyond, data_says, factors, held, loaded, rounded, seen
from terrazzo.rules.tile_to_kernel.multiply import Fragment


@dataclass
class Made:
    """What one team makes: `terms` of the `sums`, one or parts; or what these are rounded from, in place of one of the
    sums, their `home`. It is `bare` where no mask hides it, and `whole` where one may.

    `parts` are those of the axes that the sums have. Where a load knows nothing of a step's `columns`, it is `begun`
    once for a tile; others are fetched for every step. What was made `before` in this step, it may be made of.
    """

    copies: Copies
    fragments: dict[l.Reduce, Fragment]
    terms: tuple[Node, ...]
    whole: Node
    bare: Node
    sums: tuple[l.Reduce, ...]
    home: l.Reduce
    parts: tuple[Part, ...]
    columns: Part
    before: tuple[Made, ...] = ()
    begun: Kept = field(default_factory=dict)
    fetched: Kept = field(default_factory=dict)
    came: dict[l.Load, l.Load] = field(default_factory=dict)
    values: dict[Node, k.Registers] = field(default_factory=dict)

    @property
    def builder(self) -> Builder:
        """Where statements go."""
        return self.copies.builder

    @property
    def first(self) -> Fragment:
        """The sums in whose place the factor is made."""
        return self.fragments[self.home]

    @property
    def rounds(self) -> bool:
        """Whether a factor is computed in place of sums, and rounded later."""
        kind: Any = self.bare
        return kind.dtype is self.first.place.type.dtype

    @property
    def at(self) -> tuple[IntExpr, ...]:
        """Where in its registers an element is."""
        return self.first.index({p.axis: p.digits for p in self.first.parts})

    def declare(self) -> dict[Node, k.Registers]:
        """Registers for what a product takes."""
        self.values = factors(self.builder, self.terms, self.first)
        return self.values

    def fetch(self, env: dict[Any, Any], others: Collection[l.Load] = ()) -> None:
        """What the factor is made of besides sums comes to registers, while products are on their way; but for
        `others`, which came with slabs.
        """
        wanted = [x for x in self.loads() if x not in self.begun and x not in others]
        self.fetched = self._loaded(env, wanted, self.free)

    @property
    def free(self) -> list[k.Registers]:
        """Registers of what was made before in this step."""
        return [place for x in self.before for place, _ in x.fetched.values()]

    def read(self, places: Mapping[l.Load, l.Load]) -> None:
        """What came with slabs is read from where it is."""
        self.came = dict(places)

    def begin(self, env: dict[Any, Any]) -> None:
        """What rows have, once for the tile."""
        self.begun = self._loaded(env, [x for x in self.loads() if self.columns.axis not in x.free])

    def make(self, env: dict[Any, Any], hidden: Sequence[tuple[Either, IntExpr]]) -> None:
        """The factor, 0 where it is `hidden` unless one of some is >= 0, tested where what stands beside these is."""
        at, place = self.at, self.first.place if self.rounds else self.values[self.terms[0]]
        env = env | {x: l.Load(place, index) for x, (place, index) in (*self.begun.items(), *self.fetched.items())}
        env |= {r: l.Load(self.fragments[r].place, at) for r in self.sums}
        env |= {x.bare: l.Load(x.first.place, at) for x in self.before}
        edges = tuple(e for part in self.parts for e in beyond(part, env[part.axis]))
        kind: Any = self.bare

        def one(read: Mapping[Node, Node]) -> None:
            self.builder.add(l.Store(place, at, self.copies.computed(self.bare, {**env, **read}, edges)))

        def hide(tests: Sequence[Either]) -> None:
            x: Node = l.Load(place, at)
            for e in tests:
                x = self.builder.let(l.apply("where", seen(e), x, l.Literal(zero(kind.dtype), kind.dtype)))
            self.builder.add(l.Store(place, at, x))

        self._reading(one)
        for cut in dict.fromkeys(cut for _, cut in hidden):
            tests = [e for e, other in hidden if other == cut]
            self.builder.where([cut], partial(self._everywhere, partial(hide, tests)))

    def round(self) -> None:
        """The factor as a product takes it."""
        if self.rounds:
            self._everywhere(lambda: rounded(self.builder, self.values, self.whole, self.first))

    def _everywhere(self, write: Callable[[], None]) -> None:
        """At all elements in the order of their registers."""
        self.builder.loops([(d.variable, True) for d in self._digits], write)

    def _reading(self, write: Callable[[Mapping[Node, Node]], None]) -> None:
        """The same, where what came for neighbours comes to registers just before it is wanted, for a short time."""
        every = self._digits
        last = [d for d in held(self.columns) if d is every[-1]]
        outer = [d for d in held(self.columns) if d not in last]
        inner = [d for d in every if d not in outer]

        def read() -> None:
            found: dict[Node, Node] = {}
            for x, load in self.came.items():
                mine = [*(d for d in inner if d not in last and d.value in load.free), *last]
                found[x] = l.Load(loaded(self.builder, load, mine), tuple(d.value for d in mine))
            self.builder.loops([(d.variable, True) for d in inner], lambda: write(found))

        self.builder.loops([(d.variable, True) for d in outer], read)

    @property
    def _digits(self) -> list[Digit]:
        digits = [d for p in self.first.parts for d in held(p)]
        return sorted(digits, key=lambda d: (d.level == "frag", -d.place))

    def loads(self) -> list[l.Load]:
        """What the factor is made of besides sums."""
        known = {x.bare for x in self.before}
        inside = topological([self.bare], stop=lambda x: isinstance(x, l.Reduce) or x in known)
        return [x for x in inside if isinstance(x, l.Load)]

    def _loaded(self, env: dict[Any, Any], loads: Sequence[l.Load], free: Sequence[k.Registers] = ()) -> Kept:
        """Loads in registers, several elements at once where they lie side by side in memory and in a thread."""
        found: Kept = {}
        left = [*free]
        for x in loads:
            if data_says(x):
                continue
            edges = tuple(e for p in self.parts if p.axis in x.free for e in beyond(p, env[p.axis]))
            load = guarded(substitute(x, env), edges)
            mine = [d for p in self.parts for d in held(p) if d.value in load.free]
            found[x] = loaded(self.builder, load, mine, left), tuple(d.value for d in mine)
            left = [place for place in left if place is not found[x][0]]
        return found
