"""Slabs: the pieces of a contraction's operands in shared memory, and how the threads of a block bring them there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from terrazzo.errors import Limitation, UserError
from terrazzo.hw.tma import tensor_map
from terrazzo.ir.address import coefficient, flatten, mentions, unflatten
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Var, at_least
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.ir.schedule import Site
from terrazzo.ir.types import Type, contiguous_strides
from terrazzo.rules.tile_to_kernel.digits import WIDEST, Digit, axis_name, divides, wide, zero

if TYPE_CHECKING:
    from terrazzo.rules.tile_to_kernel.scope import Scope
    from terrazzo.rules.tile_to_kernel.walk import Walker


@dataclass(frozen=True)
class Tiled:
    """An axis of a slab: where the block's part begins, how long it is, and the digits by which threads divide it."""

    axis: Any
    base: IntExpr
    size: int
    digits: tuple[Digit, ...]


@dataclass(frozen=True)
class Slab:
    """A piece of an operand in shared memory: `place` is indexed by the slot of the ring and by `axes`, the last one
    contiguous.

    In global memory it is contiguous along number `memory` of its axes; `vector` elements are brought in at once, by
    ordinary loads ("ld"), asynchronous copies ("cp.async") or TMA ("tma").
    """

    term: Node
    place: k.Shared
    axes: tuple[Tiled, ...]
    memory: int
    vector: int
    by: str


@dataclass(frozen=True)
class Steps:
    """The steps of a contraction: `times` has the axes whose loops make them, `depth` what a step covers of every
    reduce axis.
    """

    times: tuple[tuple[Any, int], ...]
    depth: Mapping[Any, int]
    ring: int

    @property
    def count(self) -> int:
        return math.prod(n for _, n in self.times)


class Slabs:
    """Lays slabs out and writes the statements that fill them."""

    def __init__(self, walker: Walker, site: Site, tiles: Mapping[Any, Tiled], steps: Steps, scope: Scope) -> None:
        self.w, self.site, self.tiles, self.steps, self.scope = walker, site, tiles, steps, scope
        self.threads = walker.bindings.warps * k.WARP

    def slab(self, term: Node) -> Slab:
        """How an operand lies in shared memory, and how wide the accesses are that bring it there."""
        axes = [t for a, t in self.tiles.items() if a in term.free]
        axes += [
            Tiled(a, 0, self.steps.depth[a], ()) for a in self.steps.depth if a in term.free and self.steps.depth[a] > 1
        ]
        loads = [x for x in topological([term]) if isinstance(x, l.Load)]
        name = loads[0].buffer.name if loads else "slab"
        held = dict(self.site.operands).get(name)
        options: dict[str, Any] = dict(held.options) if held else {}
        if not axes:
            raise Limitation(f"{name}: a step of the tile needs one element of it, which is no slab")
        offset = flatten(loads[0].index, loads[0].buffer.type.element_strides) if loads else 0
        memory = next((t for t in axes if coefficient(offset, t.axis) == 1), axes[-1])
        along = next((t for t in axes if axis_name(t.axis) == options.get("along")), memory)
        axes.sort(key=lambda t: t is along)
        dtype = term.dtype  # type: ignore[attr-defined]
        strides, step = [], 1
        for t in reversed(axes):
            strides.append(step)
            step = step * t.size + (options.get("pad", 0) if len(strides) == 1 else 0)
        kind = Type(dtype, (self.steps.ring, *(t.size for t in axes)), (step, *reversed(strides)))
        place = k.Shared(self.w.fresh(name + "_s"), kind, options.get("swizzle", 0))
        slab = Slab(term, place, tuple(axes), axes.index(memory), 1, options.get("by", "ld"))
        if slab.by == "tma":
            self.box(slab)  # which says why, where TMA cannot
            return slab
        vector = next(v for v in (16, 8, 4, 2, 1) if v * dtype.size <= WIDEST and self.fits(slab, v))
        copied = isinstance(term, l.Load) and vector * dtype.size in (4, 8, 16)
        if options.get("by") == "cp.async" and not copied:
            raise Limitation(f"{name}: cp.async needs a plain load of which 4 bytes at least lie together")
        return replace(slab, vector=vector)

    def fits(self, slab: Slab, width: int) -> bool:
        """Whether a thread may bring in `width` elements along the last axis at once."""
        if width == 1:
            return True
        strides = slab.place.type.element_strides
        last = slab.axes[-1]
        if (
            not isinstance(slab.term, l.Load)
            or slab.memory != len(slab.axes) - 1
            or last.size % width
            or any(not isinstance(s, int) or s % width for s in strides[:-1])
        ):
            return False
        q, j = Var("$q", max(last.size // width, 1)), Var("$j", width)
        env = self.coordinates(
            slab,
            [*(Var(f"${n}", t.size) for n, t in enumerate(slab.axes[:-1])), q * width + j],
            Var("$t", self.steps.count),
        )
        found: l.Load = substitute(slab.term, env)
        uniform = all(
            divides(width, t.axis.extent) for t in slab.axes[-1:] if not at_least(t.axis.extent - 1 - env[t.axis], 0)
        )
        return uniform and wide(found, j, width)

    def coordinates(self, slab: Slab, at: Sequence[IntExpr], t: IntExpr) -> dict[Any, Any]:
        """The axes' values at an element of a slab, in step t."""
        env = dict(self.scope.env)
        rest = self.steps.count
        for a in self.steps.depth:
            env[a] = 0
        for a, count in self.steps.times:
            rest //= count
            digit = t // rest if a is self.steps.times[0][0] else t // rest % count
            env[a] = env[a] + digit * self.steps.depth[a]
        for tiled, x in zip(slab.axes, at, strict=True):
            env[tiled.axis] = (env[tiled.axis] if tiled.axis in self.steps.depth else tiled.base) + x
        return env

    def pieces(self, slab: Slab, write: Callable[[IntExpr, tuple[IntExpr, ...]], None]) -> None:
        """write(number of the piece, coordinates in the slab) for this thread's pieces. Lanes go along what is
        contiguous in memory.
        """
        order = [*(n for n in range(len(slab.axes)) if n != slab.memory), slab.memory]
        shape = [slab.axes[n].size for n in order]
        shape[-1] //= slab.vector
        total = math.prod(shape)
        i = self.w.bindings.loop_variable("i", -(-total // self.threads))
        p: IntExpr = self.w.bindings.warp * k.WARP + k.LANE + i * self.threads
        digits = list(unflatten(p, tuple(shape)))
        digits[-1] = digits[-1] * slab.vector
        at = tuple(digits[order.index(n)] for n in range(len(order)))
        self.w.loops([(i, True)], lambda: self.w.where([total - 1 - p], lambda: write(i, at)))

    def guards(self, slab: Slab, env: dict[Any, Any]) -> tuple[IntExpr, ...]:
        """What keeps a piece inside the tensor, where tiles overhang."""
        return tuple(e for t in slab.axes if not at_least(e := t.axis.extent - 1 - env[t.axis], 0))

    def box(self, slab: Slab) -> tuple[int, ...]:
        """The box of the tensor that a slab is; Limitation, with the reason, where it is none."""
        name = slab.place.name
        if not isinstance(slab.term, l.Load) or slab.term.inside:
            raise Limitation(f"{name}: TMA brings in plain loads only")
        found: list[int] = []
        order: list[Any] = []
        for e, extent in zip(slab.term.index, slab.term.buffer.type.static_shape, strict=True):
            mine = [t for t in slab.axes if mentions(e, t.axis)]
            if len(mine) > 1 or (mine and coefficient(e, mine[0].axis) != 1):
                raise Limitation(f"{name}: TMA takes one axis with a stride of one along each dimension, not {e}")
            found.append(mine[0].size if mine else 1)
            order += mine
            if (
                mine
                and mine[0].axis.extent % mine[0].size
                and not (e is mine[0].axis and mine[0].axis.extent == extent)
            ):  # type: ignore[union-attr]
                raise Limitation(
                    f"{name}: what lies beyond {axis_name(mine[0].axis)} is not beyond the tensor, and TMA would read it"
                )
        if order != list(slab.axes):
            raise Limitation(f"{name}: the slab's dimensions are not in the order of the tensor's, which TMA keeps")
        if slab.place.type.element_strides[1:] != contiguous_strides(slab.place.type.static_shape)[1:]:
            raise UserError(f"{name}: TMA leaves no room between rows: a slab has a pad or comes by TMA")
        tensor_map(slab.term.buffer.type, tuple(found), slab.place.swizzle)  # which refuses what the hardware does
        size = math.prod(found) * slab.place.type.dtype.size
        if size % max(slab.place.swizzle * 8, 128):
            raise Limitation(
                f"{name}: a slab of {size} bytes does not end where the swizzle of {slab.place.swizzle} bytes repeats"
            )
        return tuple(found)

    def tensor_load(self, slab: Slab, t: IntExpr, slot: IntExpr, barriers: k.Barriers) -> None:
        """Start a slab of step t on its way into a slot, by TMA."""
        load: l.Load = substitute(slab.term, self.coordinates(slab, [0] * len(slab.axes), t))
        if not divides(WIDEST // load.dtype.size, load.index[-1]):
            raise Limitation(f"{slab.place.name}: its boxes do not begin at multiples of 16 bytes")
        to = (slot, *(0 for _ in slab.axes))
        self.w.add(k.TensorLoad(slab.place, to, load.buffer, load.index, self.box(slab), barriers, slot))

    def copy(self, slabs: Sequence[Slab], t: IntExpr, slot: IntExpr) -> None:
        """Start copying the slabs of step t into a slot."""
        for s in slabs:

            def piece(_: IntExpr, at: tuple[IntExpr, ...], s: Slab = s) -> None:
                env = self.coordinates(s, at, t)
                load: l.Load = substitute(s.term, env)
                inside = (*self.guards(s, env), *load.inside)
                self.w.out.append(k.AsyncCopy(s.place, (slot, *at), load.buffer, load.index, s.vector, inside))

            self.pieces(s, piece)

    def fetch_registers(self, slab: Slab) -> k.Registers:
        total = math.prod(t.size for t in slab.axes) // slab.vector
        shape = (-(-total // self.threads), slab.vector)
        return self.w.registers(slab.place.name + "_r", slab.place.type.dtype, shape)

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
                write = lambda: self.w.out.append(get)  # noqa: E731
            else:
                write = lambda: self.w.out.append(l.Store(place, (i, 0), self.computed(term, env)))  # noqa: E731
            if inside:
                nothing = l.Literal(zero(place.type.dtype), place.type.dtype)
                self.w.out += [l.Store(place, (i, v), nothing) for v in range(slab.vector)]
            self.w.where(inside, write)

        self.pieces(slab, piece)

    def computed(self, term: Node, env: dict[Any, Any]) -> Node:
        for x in topological([term]):
            if isinstance(x, l.Term) and not isinstance(x, l.Literal) and x not in env:
                env[x] = self.w.let(substitute(x, env))
        found: Node = env[term]
        return found

    def put(self, slab: Slab, place: k.Registers, slot: IntExpr) -> None:
        def piece(i: IntExpr, at: tuple[IntExpr, ...]) -> None:
            self.w.out.append(k.Move(slab.place, (slot, *at), place, (i, 0), slab.vector))

        self.pieces(slab, piece)
