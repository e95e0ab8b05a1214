"""What an agent brings: slabs, their pieces for each thread, and where these lie in global memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.ir.address import unflatten
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, at_least
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.ir.plan import Ring, Stream
from terrazzo.rules.loop.fusion.inline import guarded, looked_up
from terrazzo.rules.tile.digits import Bindings, Digit
from terrazzo.rules.tile.spans import Span
from terrazzo.rules.tile_to_kernel.builder import Builder
from terrazzo.rules.tile_to_kernel.scope import Scope


@dataclass(frozen=True)
class Part:
    """A block's part of an axis: where it begins, how long it is, and the digits by which threads divide it. A slab has
    a `halo` besides, which is part of its size.
    """

    axis: Any
    base: IntExpr
    size: int
    digits: tuple[Digit, ...]
    halo: int = 0


@dataclass(frozen=True)
class Slab:
    """A stream with its place, which is indexed by the slot and by the parts, the last one contiguous. It may `begin`
    further on there, behind another one.
    """

    stream: Stream
    ring: Ring
    term: Node
    place: k.Shared
    parts: tuple[Part, ...]
    span: Span
    begin: tuple[int, ...] = ()

    @property
    def memory(self) -> int:
        """Which part is contiguous in global memory."""
        return next(n for n, w in enumerate(self.stream.axes) if w.name == self.stream.memory)

    @property
    def vector(self) -> int:
        """Elements a thread moves at once."""
        return self.stream.vector

    @property
    def bytes(self) -> int:
        """Of one slot."""
        return math.prod(p.size for p in self.parts) * self.place.type.dtype.size

    def seen(self, slot: IntExpr, index: Sequence[IntExpr], where: dict[Any, IntExpr]) -> tuple[IntExpr, ...]:
        """The place of an element of the tile, where the loops inside a step are at `where`."""
        return self.at(slot, [x + self.span.at(p.axis, where) for x, p in zip(index, self.parts, strict=True)])

    def at(self, slot: IntExpr, index: Sequence[IntExpr]) -> tuple[IntExpr, ...]:
        """The place of an element of the slab."""
        if self.begin:
            index = [x + first for x, first in zip(index, self.begin, strict=True)]
        if self.stream.panel:
            *rows, last = index
            return (slot, last // self.stream.panel, *rows, last % self.stream.panel)
        return (slot, *index)


@dataclass
class Steps:
    """The steps of a tile: `times` has the axes whose loops make them, `depth` what a step covers of every axis that is
    no tile's. They are counted from the first that is visited, number `first`, or from number `begin` on, and go
    around; a block's part of an axis begins at its `base`.
    """

    times: tuple[tuple[Any, int], ...]
    depth: dict[Any, int]
    base: dict[Any, IntExpr]
    first: IntExpr = 0
    begin: IntExpr = 0

    @property
    def count(self) -> int:
        return math.prod(n for _, n in self.times)

    def firsts(self, t: IntExpr) -> dict[Any, IntExpr]:
        """Where every axis begins in step t."""
        found: dict[Any, IntExpr] = {a: self.base.get(a, 0) for a in self.depth}
        t = t + self.first if isinstance(self.begin, int) else (t + self.begin) % self.count
        rest = self.count
        for a, count in self.times:
            rest //= count
            digit = t // rest if a is self.times[0][0] else t // rest % count
            found[a] = found[a] + digit * self.depth[a]
        return found


class Copies:
    """The pieces of slabs for the threads of a team, and where they are found in each step."""

    def __init__(self, builder: Builder, bindings: Bindings, steps: Steps, scope: Scope) -> None:
        self.builder, self.bindings, self.steps, self.scope = builder, bindings, steps, scope
        self.threads = bindings.warps * k.WARP

    def coordinates(self, slab: Slab, at: Sequence[IntExpr], t: IntExpr) -> dict[Any, Any]:
        """The axes' values at an element of a slab, in step t."""
        env = {**self.scope.env, **self.steps.firsts(t)}
        for part, x in zip(slab.parts, at, strict=True):
            env[part.axis] = (env[part.axis] if part.axis in self.steps.depth else part.base) + x
        return env

    def pieces(self, slab: Slab, write: Callable[[IntExpr, tuple[IntExpr, ...]], None]) -> None:
        """write(number of the piece, coordinates in the slab) for this thread's pieces. Lanes go along what is
        contiguous in memory.
        """
        order = [*(n for n in range(len(slab.parts)) if n != slab.memory), slab.memory]
        shape = [slab.parts[n].size for n in order]
        shape[-1] //= slab.vector
        total = math.prod(shape)
        i = self.bindings.loop_variable("i", -(-total // self.threads))
        p: IntExpr = self.bindings.warp * k.WARP + k.LANE + i * self.threads
        digits = list(unflatten(p, tuple(shape)))
        digits[-1] = digits[-1] * slab.vector
        at = tuple(digits[order.index(n)] for n in range(len(order)))
        self.builder.loops([(i, True)], lambda: self.builder.where([total - 1 - p], lambda: write(i, at)))

    def guards(self, slab: Slab, env: dict[Any, Any]) -> tuple[IntExpr, ...]:
        """What keeps a piece inside the tensor, where tiles overhang."""
        return tuple(e for p in slab.parts if not at_least(e := p.axis.extent + p.halo - 1 - env[p.axis], 0))

    def count(self, slab: Slab) -> int:
        """How many pieces of a slab a thread has."""
        total = math.prod(p.size for p in slab.parts) // slab.vector
        return -(-total // self.threads)

    def computed(self, term: Node, env: dict[Any, Any], inside: tuple[IntExpr, ...] = ()) -> Node:
        """An operand that is a term of what is loaded, at one place; only places `inside` have something to load."""
        for x in topological([term], stop=lambda x: x in env):
            if isinstance(x, l.Term) and not isinstance(x, l.Literal) and x not in env:
                found = substitute(x, env)
                if isinstance(found, l.Load):
                    found = looked_up(guarded(found, inside), inside) if inside else found
                env[x] = self.builder.let(found)
        result: Node = env[term]
        return result
