"""A team's part of a tile whose results gather in shared memory: what is computed there, and where elements are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.hw.products import Matrix
from terrazzo.ir import nest as n
from terrazzo.ir.address import unflatten
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Var, at_least
from terrazzo.ir.node import substitute
from terrazzo.ir.plan import Result
from terrazzo.rules.tile_to_kernel.copies import Part
from terrazzo.rules.tile_to_kernel.multiply import Fragment
from terrazzo.rules.tile_to_kernel.scope import Scope


@dataclass(frozen=True)
class Leaf:
    """What is computed at every point of a tile, and stored: the terms in order, then the stores."""

    axes: tuple[Any, ...]
    lets: tuple[n.Let, ...]
    stores: tuple[l.Store, ...]


def leaf(s: n.Loop, left: Callable[[Sequence[n.Statement]], list[n.Statement]]) -> Leaf:
    """The loops over a tile, one in the other, as one."""
    axes, lets = list(s.axes), []
    body = left(s.body)
    while loops := [x for x in body if isinstance(x, n.Loop)]:
        lets += [x for x in body if isinstance(x, n.Let)]
        axes += loops[0].axes
        body = left(loops[0].body)
    lets += [x for x in body if isinstance(x, n.Let)]
    return Leaf(tuple(axes), tuple(lets), tuple(x for x in body if isinstance(x, l.Store)))


@dataclass(frozen=True)
class Side:
    """Rows of a thread, or columns: those of `regs`, which are loops over instructions, and of `counter`, whose digits
    are at such places in a register's number and of such sizes; `first` is the first of the registers.
    """

    regs: tuple[Var, ...]
    bits: tuple[tuple[int, int], ...]
    counter: Var
    first: IntExpr

    @property
    def loops(self) -> tuple[Var, ...]:
        """The loops over them."""
        return (*self.regs, self.counter)

    @property
    def sizes(self) -> list[int]:
        """How many values each of them has."""
        return [v.extent for v in self.loops]  # type: ignore[misc]

    @property
    def register(self) -> IntExpr:
        """A register with the row or column that the loops are at."""
        number, below = self.first, 1
        for place, size in self.bits:
            number, below = number + self.counter // below % size * (1 << place), below * size
        return number

    def of(self, number: IntExpr) -> tuple[IntExpr, ...]:
        """Where a register's row or column is among them."""
        found: IntExpr = 0
        below = 1
        for place, size in self.bits:
            found, below = found + number // (1 << place) % size * below, below * size
        return (*self.regs, found)


@dataclass(frozen=True)
class TeamTile:
    """A team's part of a tile, and where its elements are."""

    line: Result
    place: k.Shared
    store: l.Store
    leaf: Leaf
    fragments: Mapping[l.Reduce, Fragment]
    scope: Scope
    instruction: Matrix
    rows: tuple[Part, ...]
    columns: Part

    def side(self, parts: Sequence[Part], first: IntExpr, variable: Callable[[str, IntExpr], Var]) -> Side:
        """A thread's rows, or the columns of the subtile that begins with a register."""
        digits = [d for p in parts for d in p.digits]
        bits = [(d.place, min(d.size, self.each >> d.place)) for d in digits if d.level == "frag"]
        bits = [(place, size) for place, size in bits if size > 1]
        regs = tuple(d.variable for d in digits if d.level == "reg")
        return Side(regs, tuple(bits), variable("p", math.prod(size for _, size in bits)), first)

    @property
    def each(self) -> int:
        """Registers of the accumulators of one instruction that a subtile has (all, where all go at once)."""
        elements = self.instruction.d.elements
        return elements if at_once(self.columns) else elements * self.line.width // self.length(self.columns)

    @property
    def height(self) -> int:
        """How many rows the team has."""
        return math.prod(map(self.length, self.rows))

    def inside(self, here: Scope) -> dict[Any, IntExpr]:
        """What must be >= 0 for a point to be inside the tensor, by axes that end amid a tile."""
        ends = {p.axis: p.axis.extent - 1 - here.env[p.axis] for p in (*self.rows, self.columns)}
        return {a: e for a, e in ends.items() if not at_least(e, 0)}

    def length(self, part: Part) -> int:
        """What the team has of an axis."""
        return math.prod(d.size for d in part.digits if d.level != "warpgroup")

    def first(self, part: Part) -> IntExpr:
        """Where that begins."""
        return part.base + sum((d.value * d.stride for d in part.digits if d.level == "warpgroup"), start=0)

    def coordinate(self, part: Part, number: IntExpr, lanes: bool = True) -> IntExpr:
        """Where register `number` of this thread (of lane 0, without `lanes`) lies along an axis."""
        total: IntExpr = 0
        for d in part.digits:
            if d.level == "frag":
                total = total + number // (1 << d.place) % d.size * d.stride
            elif d.level != "warpgroup" and (lanes or d.level != "lane"):
                total = total + d.value * d.stride
        return total

    def row(self, number: IntExpr, lanes: bool = True) -> IntExpr:
        """Rows count the points of their axes."""
        found: IntExpr = 0
        for part in self.rows:
            found = found * self.length(part) + self.coordinate(part, number, lanes)
        return found

    def column(self, number: IntExpr, lanes: bool = True) -> IntExpr:
        return self.coordinate(self.columns, number, lanes)

    def at(self, row: IntExpr, column: IntExpr) -> tuple[IntExpr, ...]:
        """What the axes of rows and columns are at an element of the team's part."""
        points = (*unflatten(row, tuple(map(self.length, self.rows))), column)
        return tuple(self.first(part) + x for part, x in zip((*self.rows, self.columns), points, strict=True))

    def index(self, index: Sequence[IntExpr], row: IntExpr, column: IntExpr) -> tuple[IntExpr, ...]:
        """A place in global memory at an element of the team's part."""
        axes = [p.axis for p in (*self.rows, self.columns)]
        env = {**self.scope.env, **dict(zip(axes, self.at(row, column), strict=True))}
        return tuple(substitute(e, env) for e in index)


def at_once(columns: Part) -> bool:
    """Whether all subtiles go at once: several warps, or registers of several instructions, have parts of them."""
    return any(d.level in ("warp", "reg") for d in columns.digits)
