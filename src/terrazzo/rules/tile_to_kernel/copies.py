"""How an agent brings the operands of a step from global memory to the slots of a ring."""

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
from terrazzo.rules.access import box
from terrazzo.rules.loop.inline import guarded
from terrazzo.rules.tile.spans import Span
from terrazzo.rules.tile_to_kernel.builder import Builder
from terrazzo.rules.tile_to_kernel.digits import Bindings, Digit, zero
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
    """A stream with its place, which is indexed by the slot and by the parts, the last one contiguous."""

    stream: Stream
    ring: Ring
    term: Node
    place: k.Shared
    parts: tuple[Part, ...]
    span: Span

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
        if self.stream.panel:
            *rows, last = index
            return (slot, last // self.stream.panel, *rows, last % self.stream.panel)
        return (slot, *index)


@dataclass
class Steps:
    """The steps of a tile: `times` has the axes whose loops make them, `depth` what a step covers of every axis that is
    no tile's. They are counted from the first that is visited, number `first`.
    """

    times: tuple[tuple[Any, int], ...]
    depth: dict[Any, int]
    first: IntExpr = 0

    @property
    def count(self) -> int:
        return math.prod(n for _, n in self.times)

    def firsts(self, t: IntExpr) -> dict[Any, IntExpr]:
        """Where every axis begins in step t."""
        found: dict[Any, IntExpr] = dict.fromkeys(self.depth, 0)
        t = t + self.first
        rest = self.count
        for a, count in self.times:
            rest //= count
            digit = t // rest if a is self.times[0][0] else t // rest % count
            found[a] = found[a] + digit * self.depth[a]
        return found


class Copies:
    """Writes the statements with which the threads of a team fill slots."""

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

    # -- boxes ---------------------------------------------------------------------------------------------------------

    def boxes(self, slabs: Sequence[Slab], t: IntExpr, slot: IntExpr, full: k.Barriers) -> None:
        """One thread asks for the slabs of step t, whose bytes count at the barrier of their slot."""
        self.builder.add(k.Expect(full, slot, sum(s.bytes for s in slabs)))
        for s in slabs:
            load = s.term
            assert isinstance(load, l.Load)
            sizes = {p.axis: p.size for p in s.parts}
            found = box(load, sizes, s.stream.by_axes, sizes)
            assert not isinstance(found, str)
            env = self.coordinates(s, [0] * len(s.parts), t)
            ranks = s.stream.multicast
            share, first = list(found.sides), found.along.index(s.parts[0].axis)
            share[first] //= ranks
            begin: list[IntExpr] = [0] * len(s.parts)
            begin[0] = self.bindings.rank * share[first] if ranks > 1 else 0
            at = tuple(substitute(e, env) + (begin[0] if n == first else 0) for n, e in enumerate(found.place.index))
            view = found.place.tensor if found.place.tensor is not load.buffer.type else None
            width = s.stream.panel or share[-1]
            for panel in range(share[-1] // width):
                begin[-1] = begin[-1] + width if panel else begin[-1]
                there = (*at[:-1], at[-1] + panel * width)
                place = s.at(slot, begin)
                self.builder.add(
                    k.TensorLoad(
                        s.place, place, load.buffer, there, (*share[:-1], width), full, slot,
                        (1 << ranks) - 1 if ranks > 1 else 0, view,
                    )
                )  # fmt: skip

    # -- cp.async ------------------------------------------------------------------------------------------------------

    def copy(self, slabs: Sequence[Slab], t: IntExpr, slot: IntExpr) -> None:
        """Start copying the slabs of step t into a slot."""
        for s in slabs:

            def piece(_: IntExpr, at: tuple[IntExpr, ...], s: Slab = s) -> None:
                env = self.coordinates(s, at, t)
                load: l.Load = substitute(s.term, env)
                inside = (*self.guards(s, env), *load.inside)
                self.builder.add(k.AsyncCopy(s.place, s.at(slot, at), load.buffer, load.index, s.vector, inside))

            self.pieces(s, piece)

    # -- through registers ---------------------------------------------------------------------------------------------

    def fetched(self, slab: Slab) -> k.Registers:
        """Registers for this thread's pieces of a slab."""
        total = math.prod(p.size for p in slab.parts) // slab.vector
        shape = (-(-total // self.threads), slab.vector)
        return self.builder.registers(slab.place.name + "_r", slab.place.type.dtype, shape)

    def fetch(self, slab: Slab, place: k.Registers, t: IntExpr) -> None:
        """The slab of step t into registers, zeros outside the tensor."""

        def piece(i: IntExpr, at: tuple[IntExpr, ...]) -> None:
            env = self.coordinates(slab, at, t)
            term = slab.term
            inside = list(self.guards(slab, env))
            if isinstance(term, l.Load):
                load: l.Load = substitute(term, env)
                inside += load.inside
                get: Node = k.Move(place, (i, 0), load.buffer, load.index, slab.vector)
                write = lambda: self.builder.add(get)  # noqa: E731
            else:
                write = lambda: self.builder.add(l.Store(place, (i, 0), self.computed(term, env)))  # noqa: E731
            if inside:
                nothing = l.Literal(zero(place.type.dtype), place.type.dtype)
                self.builder.add(*(l.Store(place, (i, v), nothing) for v in range(slab.vector)))
            self.builder.where(inside, write)

        self.pieces(slab, piece)

    def computed(self, term: Node, env: dict[Any, Any], inside: tuple[IntExpr, ...] = ()) -> Node:
        """An operand that is a term of what is loaded, at one place; only places `inside` have something to load."""
        for x in topological([term], stop=lambda x: x in env):
            if isinstance(x, l.Term) and not isinstance(x, l.Literal) and x not in env:
                found = substitute(x, env)
                env[x] = self.builder.let(guarded(found, inside) if isinstance(found, l.Load) else found)
        result: Node = env[term]
        return result

    def put(self, slab: Slab, place: k.Registers, slot: IntExpr) -> None:
        """What was fetched goes to a slot."""

        def piece(i: IntExpr, at: tuple[IntExpr, ...]) -> None:
            self.builder.add(k.Move(slab.place, slab.at(slot, at), place, (i, 0), slab.vector))

        self.pieces(slab, piece)
