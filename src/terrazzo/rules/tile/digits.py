"""Bindings as digits: what every factor of an axis is at run time, as an expression of block, warp and lane or as a
loop's variable.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from terrazzo.hw.instruction import Fragment
from terrazzo.hw.products import Matrix, matrix, warps
from terrazzo.hw.wgmma import WarpgroupInstruction
from terrazzo.ir.dialects.kernel import BLOCK, LANE, WARP, Integer, Sync
from terrazzo.ir.expr import IntExpr, Var
from terrazzo.ir.layout import Layout
from terrazzo.ir.plan import Agent, Combine, Order, Plan, Product
from terrazzo.ir.schedule import WARPS_IN_A_GROUP, Factor, Like, Schedule, Site
from terrazzo.ir.types import DType
from terrazzo.rewrite.rule import need

THREADS = ("warp", "warpgroup", "lane")
"""The levels whose digit is a part of a thread's number."""
LOOPED = ("time", "reg", "frag")
"""The levels whose digit is a loop's variable. "frag" is the part of an instruction's axis that lies in a lane's own
registers.
"""


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
            {(self.level, first + n) for n in range((self.size - 1).bit_length())}
            if self.level in ("lane", "warp", "warpgroup", "cluster")
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


class Bindings:
    """The digits of every axis of a kernel, as the sites of one team of one agent see them."""

    def __init__(
        self, schedule: Schedule, plan: Plan, agent: Agent, team: int = 0, numbers: Iterator[int] | None = None
    ) -> None:
        self.schedule, self.plan, self.agent, self.team = schedule, plan, agent, team
        self.numbers = numbers or itertools.count()
        self.order = plan.one(Order)
        total = sum(a.warps for a in plan.all(Agent))
        self.warps = agent.each
        self.block, self.everyone = Var(BLOCK, self.order.blocks), Var("warp", total)
        first = agent.first + team * agent.each
        self.warp: IntExpr = self.everyone
        if self.warps < total:
            self.warp = self.everyone % self.warps if first % self.warps == 0 else self.everyone - first
        self.groups = 1  # warpgroups of the agent, and which of them this is
        self.group: IntExpr = 0
        self.place: IntExpr = 0  # where results of this team gather, and how many such places there are
        self.places = 1
        if agent.turns:
            self.place, self.places = team, agent.teams
        elif any(warps(matrix(s.instruction)) > 1 for s in schedule.sites):
            self.groups = agent.warps // WARPS_IN_A_GROUP
            self.group = team if agent.teams == self.groups else self.warp // WARPS_IN_A_GROUP
            self.place, self.places = self.group, self.groups
        size = self.order.cluster_size
        self.rank: IntExpr = self.block % size if size > 1 else 0
        self.tile: IntExpr = self.block // size if size > 1 else self.block
        self.wave: Var | None = None
        self.turn: IntExpr = 0  # the number of the tile among those of the block
        self.steps: Integer | None = None  # steps before this tile, up to a multiple of what rings repeat after
        self.since: Integer | None = None  # the first step of this tile that is visited
        self.until: Integer | None = None  # the one after the last
        if self.order.persistent:
            each = self.order.walkers * (agent.teams if agent.turns else 1)
            self.wave = self.loop_variable("i", -(-self.order.count // each))
            self.turn = self.wave * agent.teams + team if agent.turns else self.wave
            self.tile = self.tile + self.turn * self.order.walkers
        self.grid = _grid_digits(self.order, self.tile)
        self.begin: IntExpr = self.grid[self.order.begin] if self.order.begin else 0  # where a tile's steps begin
        self.parts = {p.n: c.parts for p in plan.all(Product) for c in plan.all(Combine) if c.site in p.sites}

    @property
    def alone(self) -> bool:
        """Whether the warps of this team are all of the block's."""
        return len(self.plan.all(Agent)) == 1 and self.agent.teams == 1

    @property
    def sync(self) -> Sync:
        """Where the threads of this team meet: all of the block's, or those of its own barrier."""
        return Sync() if self.alone else Sync(1 + self.team, self.warps)

    def loop_variable(self, prefix: str, size: IntExpr) -> Var:
        """A variable no other loop of this kernel has."""
        return Var(f"{prefix}{next(self.numbers)}", size)

    def site(self, names: Sequence[str]) -> Site | None:
        """The first site among those of these names that the schedule describes."""
        return next((s for name in names for s in self.schedule.sites if name in s.names), None)

    def divided(self, axis: str, site: Site | None) -> Site | None:
        """The site that divides a block's part of an axis: this one, or that of the products where it says nothing."""
        if any(f.level == "block" and f.size > 1 for f in self.schedule.binding(site, axis)):
            for p in reversed(self.plan.all(Product)):
                if (found := self.site(p.sites)) is not None and axis in dict(found.axes):
                    return found
        return site

    def factors(self, axis: str, site: Site | None, default: int) -> tuple[Factor, ...]:
        """The factors of an axis as a site sees it. What is left of a block is of one element, or nobody walks it."""
        found = self.schedule.binding(site, axis) or (Factor("time", default),)
        left = [f for f in found if f.level == "block" and f.size > 1]
        need(not left, f"{axis}: {left[0] if left else ''} is divided among threads by no site that needs it")
        return found

    def digits(self, axis: str, site: Site | None, default: int, whole: bool = False) -> list[Digit]:
        """The digits of an axis, outermost first. One that nothing binds is a serial loop of `default` steps. Where
        blocks of a cluster share sums, each has a part of a tile's columns in the end, and in its steps the `whole`.
        """
        site = self.divided(axis, site)
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
            elif f.level == "cluster":
                out.append(Digit("cluster", f.size, self.rank, stride))
            elif f.level in ("time", "reg"):
                out.append(
                    Digit(f.level, f.size, self.loop_variable("t" if f.level == "time" else "i", f.size), stride)
                )
            elif f.level == "warpgroup" and self.groups > 1:
                inner = self.schedule.inner(f, axis, site)
                out.append(Digit("warpgroup", f.size, self.number("warpgroup", site) // inner % f.size, stride, inner))
            elif f.level in ("warp", "lane"):
                inner = self.schedule.inner(f, axis, site)
                out.append(Digit(f.level, f.size, self.number(f.level, site) // inner % f.size, stride, inner))
            elif (
                f.level.startswith("inst.")
                and instruction is not None
                and f.level[-1] in dict(instruction.d.layout.extents)
            ):
                parts = 1 if whole or f.level != "inst.n" else self.parts.get(axis, 1)
                size, inner = f.size // parts, self.schedule.inner(f, axis, site)
                if parts > 1 and isinstance(instruction, WarpgroupInstruction):
                    out.append(Digit("cluster", parts, self.rank, stride * size))
                    instruction = instruction.narrow(parts)
                out += self._fragment(instruction.d, f.level[-1], stride, inner, size)
            else:
                need(False, f"{axis} = ... {f} ...: nothing derives a kernel from the level {f.level} there")
        return out

    def base(self, axis: str, site: Site | None) -> IntExpr:
        """Where a block's part of an axis begins."""
        factors = self.schedule.binding(site, axis)
        total: IntExpr = 0
        stride = math.prod(f.size for f in factors)
        for f in factors:
            stride //= max(f.size, 1)
            if f.level in ("grid", "cluster") and f.size > 1:
                total = total + (self.grid[axis] if f.level == "grid" else self.rank) * stride
        return total

    def first(self, threads: Set[tuple[str, int]]) -> list[IntExpr]:
        """Only the first of those who have the same, where axes are bound to these bits of the threads' numbers."""
        if self.groups > 1:  # sites of warps count those of all warpgroups
            inside = WARPS_IN_A_GROUP.bit_length() - 1
            threads = {("warpgroup", n - inside) if x == "warp" and n >= inside else (x, n) for x, n in threads}
        apart = any(level == "warpgroup" for level, _ in threads)
        counts = {
            "lane": (LANE, WARP), "warp": (self.warp, WARPS_IN_A_GROUP if apart else self.warps),
            "warpgroup": (self.group, self.groups), "cluster": (self.rank, self.order.cluster_size),
        }  # fmt: skip
        found: list[IntExpr] = []
        for level, (number, count) in counts.items():
            bits = range((count - 1).bit_length())
            missing = [n for n in bits if (level, n) not in threads]
            found += [-number] if len(missing) == len(bits) else [-(number // (1 << n) % 2) for n in missing]
        return found

    @property
    def leader(self) -> list[IntExpr]:
        """The first thread of a team (of a warpgroup, where they multiply)."""
        first = self.warp % WARPS_IN_A_GROUP if self.groups > 1 else self.warp
        return [-first, -LANE]

    def instruction(self, site: Site | None, axis: str) -> Matrix | None:
        """The matrix instruction that binds parts of an axis."""
        while site is not None and isinstance(like := dict(site.axes).get(axis), Like):
            name, _, other = like.site.partition(".")
            site, axis = self.site([name]), other or axis
        found = matrix(site.instruction) if site else None
        count = site.abreast(found.shape[1]) if site is not None and isinstance(found, WarpgroupInstruction) else 1
        return found.narrow(count) if count > 1 and isinstance(found, WarpgroupInstruction) else found

    def _fragment(self, fragment: Fragment, coordinate: str, stride: int, inner: int, size: int) -> list[Digit]:
        """The digits of an axis that has `size` points of an instruction's coordinate, `inner` of it apart."""
        layout = fragment.layout
        numbers: dict[str, IntExpr] = {
            "lane": LANE,
            "warp": self.warp % WARPS_IN_A_GROUP if self.groups > 1 else self.warp,
        }
        out = []
        if coordinate == "n" and fragment.repeats > 1:
            far, bits = dict(layout.extents)["n"], layout.bits("reg")
            repeat = self.loop_variable("e", fragment.repeats)
            out.append(Digit("frag", fragment.repeats, repeat, stride << far, 1 << bits, bits))
        low = inner.bit_length() - 1
        once = size // fragment.repeats if coordinate == "n" else size
        for part, first, bit, count in runs(layout, coordinate, low, low + once.bit_length() - 1):
            at = stride << bit - low
            if part in numbers:
                out.append(Digit(part, count, numbers[part] // (1 << first) % count, at, 1 << first, first))
            else:
                out.append(Digit("frag", count, self.loop_variable("e", count), at, 1 << first, first))
        return out

    def number(self, level: str, site: Site | None) -> IntExpr:
        """Of this thread, among those that a site divides axes among: of its lane, its warp or its warpgroup. Sites of
        warps count all of the agent's, where teams are warpgroups.
        """
        if level == "warpgroup":
            return self.group
        if level == "warp" and self.groups == self.agent.teams > 1 and warps(self._matrix(site)) == 1:
            return self.team * WARPS_IN_A_GROUP + self.warp
        return LANE if level == "lane" else self.warp

    def _matrix(self, site: Site | None) -> Matrix | None:
        return matrix(site.instruction) if site is not None else None


def runs(layout: Layout, coordinate: str, low: int, high: int) -> list[tuple[str, int, int, int]]:
    """(part, first bit there, first bit of the coordinate, size) for stretches of a coordinate's bits from `low` up to
    `high`, highest first.
    """
    shift, at = {}, 0
    for name, bits in layout.extents:
        shift[name] = at
        at += bits
    width = dict(layout.extents)[coordinate]
    owner: dict[int, tuple[str, int]] = {}
    for part, images in layout.places:
        for k, image in enumerate(images):
            if image and image >> shift[coordinate] and (image >> shift[coordinate]) < 1 << width:
                owner[(image >> shift[coordinate]).bit_length() - 1] = (part, k)
    out: list[tuple[str, int, int, int]] = []
    for bit in range(low, high):
        part, k = owner[bit]
        if out and out[-1][0] == part and out[-1][1] + out[-1][3].bit_length() - 1 == k:
            p, first, start, size = out[-1]
            out[-1] = (p, first, start, size * 2)
        else:
            out.append((part, k, bit, 2))
    return out[::-1]


def _grid_digits(order: Order, tile: IntExpr) -> dict[str, IntExpr]:
    """The grid digit of every axis: the last axis counts fastest, but for groups, which walk down their rows first."""
    out: dict[str, IntExpr] = {}
    rest = tile
    todo = list(order.tiles)
    heights = {w.name: w.args[0] for w in order.grouped}
    while todo:
        last = todo.pop()
        size = last.args[0]
        height = heights.get(todo[-1].name, 0) if todo else 0
        if height and todo[-1].args[0] % height == 0:
            rows = todo.pop()
            group = height * size
            out[rows.name] = rest // group % (rows.args[0] // height) * height + rest % height
            out[last.name] = rest % group // height
            rest = rest // (rows.args[0] * size)
        else:
            out[last.name] = rest % size
            rest = rest // size
    sizes = {w.name: w.args[0] for w in order.tiles}
    return {a: sizes[a] - 1 - digit if a in order.backward else digit for a, digit in out.items()}


def value(digits: Sequence[Digit]) -> IntExpr:
    """The index that digits make."""
    total: IntExpr = 0
    for d in digits:
        total = total + d.value * d.stride
    return total


def begins_anywhere(digits: Sequence[Digit], vector: int | None) -> bool:
    """Whether a site's digits of an axis end in the `vector` that a plan aligns for axes of this name: others of the
    same kernel may be called so too, and be divided otherwise.
    """
    return vector is not None and digits[-1].level == "reg" and digits[-1].size == vector


def zero(dtype: DType) -> bool | int | float:
    """0 of a type."""
    return 0.0 if dtype.is_float else False if dtype.kind == "bool" else 0


def extent(axis: Any) -> int:
    """The extent of an axis: schedules bind none that is symbolic."""
    assert isinstance(axis.extent, int)
    return axis.extent
