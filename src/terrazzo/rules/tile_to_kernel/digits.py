"""Bindings as digits: what every factor of an axis is at run time, as an expression of block, warp and lane or as a
loop's variable.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.errors import Limitation, UserError
from terrazzo.hw import mma_sync
from terrazzo.hw.instruction import MatrixInstruction
from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.kernel import BLOCK, LANE
from terrazzo.ir.expr import IntExpr, Var, terms_of
from terrazzo.ir.layout import Layout
from terrazzo.ir.node import substitute
from terrazzo.ir.schedule import Binding, Factor, Like, Schedule, Site, Word
from terrazzo.ir.types import DType

LOOPED = ("time", "reg", "frag")
"""The levels whose digit is a loop's variable. "frag" is the part of an instruction's axis that lies in a lane's own registers."""

WIDEST = 16
"""Bytes one access of a thread moves at most."""


@dataclass(frozen=True)
class Digit:
    """One factor of an axis. `value` is in [0, size) and counts `stride` elements.

    `inner` is the place value of a warp's or lane's digit in their number. A digit of level "frag" adds value <<
    `place` to the number of the fragment's register.
    """

    level: str
    size: int
    value: IntExpr
    stride: int
    inner: int = 1
    place: int = 0

    @property
    def variable(self) -> Var:
        """The variable of the loop over a looped digit."""
        assert isinstance(self.value, Var)
        return self.value

    @property
    def bits(self) -> set[tuple[str, int]]:
        """The bits of a lane's or warp's number that this is."""
        first = self.inner.bit_length() - 1
        return (
            {(self.level, first + n) for n in range(self.size.bit_length() - 1)}
            if self.level in ("lane", "warp")
            else set()
        )

    @property
    def role(self) -> tuple[str, int, int, int, int]:
        """All but the name of its loop's variable."""
        return self.level, self.size, self.stride, self.inner, self.place

    @property
    def unrolled(self) -> bool:
        """Whether its loop leaves no loop behind."""
        return self.level != "time"


@dataclass(frozen=True)
class _Grid:
    axis: str
    size: int
    order: Word | None


class Bindings:
    """The digits of every axis of a kernel, as its sites see them."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.numbers = itertools.count()
        grids = [_Grid(a, f.size, _order(f)) for a, b in schedule.axes for f in factors(b) if f.level == "grid"]
        self.blocks = math.prod(g.size for g in grids)
        self.warps = max([1, *(self._count("warp", s) for s in (None, *schedule.sites))])
        self.block, self.warp = Var(BLOCK, self.blocks), Var("warp", self.warps)
        self.grid = _grid_digits(grids, self.block)

    def loop_variable(self, prefix: str, size: int) -> Var:
        """A variable no other loop of this kernel has."""
        return Var(f"{prefix}{next(self.numbers)}", size)

    def site(self, names: Sequence[str]) -> Site | None:
        """The first site among those of these names that the schedule describes."""
        return next((s for name in names for s in self.schedule.sites if name in s.names), None)

    def factors(self, axis: str, site: Site | None, default: int) -> tuple[Factor, ...]:
        """The factors of an axis as a site sees it. What is left of a block is of one element, or nobody walks it."""
        found = self.schedule.binding(site, axis) or (Factor("time", default),)
        if left := [f for f in found if f.level == "block" and f.size > 1]:
            raise UserError(f"{axis}: {left[0]} is divided among threads by no site that needs it")
        return found

    def digits(self, axis: str, site: Site | None, default: int) -> list[Digit]:
        """The digits of an axis, outermost first. One that nothing binds is a serial loop of `default` steps."""
        factors = self.factors(axis, site, default)
        instruction = self.instruction(site, axis)
        out: list[Digit] = []
        stride = math.prod(f.size for f in factors)
        for f in factors:
            stride //= max(f.size, 1)
            if f.size == 1:
                continue
            if f.level == "grid":
                out.append(Digit("grid", f.size, self.grid[axis], stride))
            elif f.level in ("time", "reg"):
                out.append(
                    Digit(f.level, f.size, self.loop_variable("t" if f.level == "time" else "i", f.size), stride)
                )
            elif f.level in ("warp", "lane"):
                inner = self._inner(f, axis, site)
                number = self.warp if f.level == "warp" else LANE
                out.append(Digit(f.level, f.size, number // inner % f.size, stride, inner))
            elif (
                f.level.startswith("inst.")
                and instruction is not None
                and f.level[-1] in dict(instruction.d.layout.extents)
            ):
                out += self._fragment(instruction.d.layout, f.level[-1], stride)
            else:
                raise Limitation(f"{axis} = ... {f} ...: nothing derives a kernel from the level {f.level} yet")
        return out

    def instruction(self, site: Site | None, axis: str) -> MatrixInstruction | None:
        """The matrix instruction that binds parts of an axis."""
        while site is not None and isinstance(like := dict(site.axes).get(axis), Like):
            name, _, other = like.site.partition(".")
            site, axis = self.site([name]), other or axis
        return mma_sync.PRODUCTS.get(site.instruction or "") if site else None

    def _fragment(self, layout: Layout, coordinate: str, stride: int) -> list[Digit]:
        return [
            Digit("lane" if part == "lane" else "frag", size,
                  LANE // (1 << first) % size if part == "lane" else self.loop_variable("e", size), stride << bit, 1 << first, first)
            for part, first, bit, size in runs(layout, coordinate)
        ]  # fmt: skip

    def _count(self, level: str, site: Site | None) -> int:
        return math.prod(f.size for _, b in self.schedule.lines(site) for f in b if f.level == level)

    def _inner(self, factor: Factor, axis: str, site: Site | None) -> int:
        """The place value of a factor in the number of its level. The axes' innermost factors count fastest, of these
        the later axes'.
        """
        ranked = []
        for n, (a, binding) in enumerate(self.schedule.lines(site)):
            same = [f for f in binding if f.level == factor.level]
            ranked += [(rank, -n, a, f) for rank, f in enumerate(reversed(same))]
        ranked.sort(key=lambda x: x[:2])
        mine = next(n for n, (_, _, a, f) in enumerate(ranked) if f is factor and a == axis)
        return math.prod(f.size for *_, f in ranked[:mine])


def runs(layout: Layout, coordinate: str) -> list[tuple[str, int, int, int]]:
    """(part, first bit there, first bit of the coordinate, size) for stretches of bits of one coordinate, highest
    first.
    """
    shift, at = {}, 0
    for name, bits in layout.extents:
        shift[name] = at
        at += bits
    width = dict(layout.extents)[coordinate]
    owner = {}
    for part, images in layout.places:
        for k, image in enumerate(images):
            if image and image >> shift[coordinate] and (image >> shift[coordinate]) < 1 << width:
                owner[(image >> shift[coordinate]).bit_length() - 1] = (part, k)
    out: list[tuple[str, int, int, int]] = []
    for bit in range(width):
        part, k = owner[bit]
        if out and out[-1][0] == part and out[-1][1] + out[-1][3].bit_length() - 1 == k:
            p, first, start, size = out[-1]
            out[-1] = (p, first, start, size * 2)
        else:
            out.append((part, k, bit, 2))
    return out[::-1]


def factors(binding: Binding) -> tuple[Factor, ...]:
    """The factors of a binding that is not like another one."""
    return () if isinstance(binding, Like) else binding


def _order(f: Factor) -> Word | None:
    found = dict(f.options).get("order")
    if isinstance(found, Word) and found.name == "grouped" and (len(found.args) != 1 or found.args[0] < 1):
        raise UserError(f"{f}: grouped takes the number of rows of a group")
    return found if isinstance(found, Word) else None


def _grid_digits(grids: Sequence[_Grid], block: Var) -> dict[str, IntExpr]:
    """The grid digit of every axis: the last axis counts fastest, but for groups, which walk down their rows first."""
    out: dict[str, IntExpr] = {}
    rest: IntExpr = block
    todo = list(grids)
    while todo:
        g = todo.pop()
        if (
            todo
            and (order := todo[-1].order) is not None
            and order.name == "grouped"
            and todo[-1].size % order.args[0] == 0
        ):
            rows, height = todo.pop(), order.args[0]
            group = height * g.size
            out[rows.axis] = rest // group % (rows.size // height) * height + rest % height
            out[g.axis] = rest % group // height
            rest = rest // (rows.size * g.size)
        else:
            out[g.axis] = rest % g.size
            rest = rest // g.size
    return out


def value(digits: Sequence[Digit]) -> IntExpr:
    """The index that digits make."""
    total: IntExpr = 0
    for d in digits:
        total = total + d.value * d.stride
    return total


def axis_name(axis: Any) -> str:
    """What schedules call an axis."""
    return axis.name if isinstance(axis, Var) else f"r{axis.label}"


def zero(dtype: DType) -> bool | int | float:
    """0 of a type."""
    return 0.0 if dtype.is_float else False if dtype.kind == "bool" else 0


def divides(d: int, e: IntExpr) -> bool:
    """Whether d divides an expression, visibly."""
    return all(c % d == 0 for c in terms_of(e).values())


def wide(load: l.Load, j: Any, size: int) -> bool:
    """Whether the loads for all j in [0, size) lie one behind the other, aligned, under one condition."""
    offset = flatten(load.index, load.buffer.type.element_strides)
    least = min(size, WIDEST // load.dtype.size)
    whole = all(together(e, j, size) for e in load.inside)
    return coefficient(offset, j) == 1 and divides(least, substitute(offset, {j: 0})) and whole


def together(e: IntExpr, j: Var, size: int) -> bool:
    """Whether e >= 0 holds for all j in [0, size) or for none: e = -j + multiples of size + (size - 1), or free of
    j.
    """
    c = coefficient(e, j)
    return c == 0 or (c == -1 and divides(size, e + j - (size - 1)))


def extent(axis: Any) -> int:
    """The extent of an axis, which must be known."""
    if not isinstance(axis.extent, int):
        raise Limitation(f"the axis {axis_name(axis)} has a symbolic extent")
    return axis.extent
