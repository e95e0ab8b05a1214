"""What the rules that complete a plan look at: a kernel, its schedule, the machine, and what follows from these."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

from terrazzo.errors import UserError
from terrazzo.hw.gpu import Gpu
from terrazzo.hw.products import Matrix, matrix, warps
from terrazzo.ir import nest as n
from terrazzo.ir.contraction import Contraction, nested_contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Var
from terrazzo.ir.layout import HARDWARE
from terrazzo.ir.node import topological
from terrazzo.ir.rescues import Rescue, rescues
from terrazzo.ir.schedule import Factor, Like, Named, Operand, Schedule, Site, Value
from terrazzo.ir.sites import called, sites


def _sums_inside(r: l.Reduce | l.Scan) -> int:
    return sum(isinstance(x, l.Reduce) for x in topological(r.args))


def axis_name(axis: Any) -> str:
    """What schedules call an axis."""
    return axis.name if isinstance(axis, Var) else f"r{axis.label}"


@dataclass(frozen=True)
class Draft:
    """The kernel is the term, the schedule its bindings. Nothing here is decided."""

    kernel: l.Kernel
    schedule: Schedule
    gpu: Gpu

    @cached_property
    def names(self) -> dict[str, l.Reduce | l.Scan]:
        """The reductions and scans by name."""
        return n.accumulators(self.kernel)

    @cached_property
    def tiled(self) -> tuple[Any, ...]:
        """The axes of which a block has a part that its threads divide: there is a tile."""
        blocks = {a for a, b in self.schedule.axes if not isinstance(b, Like) for f in b if f.level == "block"}
        return tuple(a for a in self.axes if axis_name(a) in blocks)

    @cached_property
    def axes(self) -> tuple[Any, ...]:
        """The axes that a tile may have a part of: the kernel's, and those of reductions around sums of products."""
        return (*self.kernel.axes, *sites(self.kernel).around)

    @cached_property
    def products(self) -> dict[str, Contraction]:
        """The contractions that the tile is divided among threads for, in the order they are computed: what is made of
        few others comes first.
        """
        found = {}
        order = topological(self.names.values())
        for name, r in sorted(self.names.items(), key=lambda x: (_sums_inside(x[1]), order.index(x[1]))):
            if self.tiled and isinstance(r, l.Reduce) and self.site(name) and (c := nested_contraction(r)):
                found[name] = c
        return found

    @cached_property
    def rescued(self) -> dict[str, Rescue]:
        """The sums that stand in the place of a product's where these will not do, by name."""
        known, sums = rescues(self.kernel), {c.reduce for c in self.products.values()}
        return {
            name: known[r]  # type: ignore[index]
            for name, r in self.names.items()
            if r in known and known[r].of in sums  # type: ignore[index]
        }

    @cached_property
    def sites(self) -> dict[str, Site]:
        """What the schedule says of sites, by every name of theirs."""
        return {name: s for s in self.schedule.sites[::-1] for name in s.names}

    @cached_property
    def operands(self) -> dict[tuple[str, ...], dict[str, Operand]]:
        """What the schedule says of operands, by the names of the site; by none what it says for the whole kernel."""
        return {(): dict(self.schedule.operands), **{s.names: dict(s.operands) for s in self.schedule.sites[::-1]}}

    @cached_property
    def bindings(self) -> dict[tuple[Any, tuple[str, ...]], tuple[Factor, ...]]:
        """The factors of axes as sites see them, as far as somebody asked."""
        return {}

    @cached_property
    def spans(self) -> dict[str, tuple[str, ...]]:
        """The loops that slabs span (`over=`), by the operand of a product."""
        found: dict[str, tuple[str, ...]] = {}
        for name, c in self.products.items():
            for x in map(called, c.operands):
                given = dict(self.held(self.site(name), x).options).get("over", ())
                found[x] = given if isinstance(given, tuple) else (given,)
        return found

    def site(self, name: str) -> Site | None:
        """What the schedule says of a site."""
        return self.sites.get(name)

    def instruction(self, site: Site | None) -> Matrix | None:
        """The matrix instruction of a site; None on CUDA cores."""
        return matrix(site.instruction) if site else None

    def abreast(self, site: Site | None) -> int:
        """How many sums of a site share an instruction: each has so many-th of its columns."""
        instruction = self.instruction(site)
        return site.abreast(instruction.shape[1]) if site is not None and instruction is not None else 1

    def binding(self, axis: Any, site: Site | None) -> tuple[Factor, ...]:
        """The factors of an axis as a site sees it; an axis nobody binds is a serial loop."""
        where = axis, site.names if site else ()
        if where not in self.bindings:
            self.bindings[where] = self.schedule.binding(site, axis_name(axis)) or (Factor("time", axis.extent),)
        return self.bindings[where]

    def length(self, axis: Any, site: Site | None) -> int:
        """How much of an axis a block has in one step: what its threads, registers and instructions divide."""
        levels = ("grid", "cluster", "time", "block")
        return math.prod(f.size for f in self.binding(axis, site) if f.level not in levels)

    def beyond(self, axes: Iterable[Any], site: Site | None) -> frozenset[Any]:
        """Those of the axes that blocks and their steps walk beyond the end of."""
        walked = {a: math.prod(f.size for f in self.binding(a, site)) for a in axes}
        return frozenset(a for a, n in walked.items() if isinstance(a.extent, int) and n > a.extent)

    def times(self, axis: Any, site: Site | None) -> tuple[Factor, ...]:
        """The factors of an axis that are loops over steps."""
        return tuple(f for f in self.binding(axis, site) if f.level == "time")

    def held(self, site: Site | None, name: str) -> Operand:
        """What the schedule says of an operand: in its site, or for the whole kernel."""
        found = self.operands[site.names].get(name) if site else None
        return found or self.operands[()].get(name) or Operand("smem")

    def warps(self, site: Site | None) -> int:
        """The warps a site binds; 0 where it binds none."""
        used = [f for _, binding in self.schedule.lines(site) for f in binding]
        each = math.prod(f.size for f in used if f.level == "warp")
        groups = math.prod(f.size for f in used if f.level == "warpgroup")
        return each * groups * warps(self.instruction(site)) if each * groups > 1 or site else 0

    def read(self, site: Site | None, line: str, *words: str) -> Iterator[Named]:
        """The words of a line that begin so, as the schedule has them."""
        where = {site.names[0]} if site else {""}
        for w in self.schedule.words:
            if w.site in where and w.line == line and (not words or w.word.split("=")[0] in words):
                yield w

    def spread(self, name: str, options: dict[str, Any]) -> tuple[int | None, int]:
        """How the schedule has rows lie in shared memory: the span of their swizzle (None: it says nothing), and the
        elements between them.
        """
        swizzle, pad = options.get("swizzle"), options.get("pad", 0)
        if swizzle is not None and (swizzle not in HARDWARE or isinstance(swizzle, bool)):
            why = f"{name}: slabs are swizzled by 32, 64 or 128 bytes, or not (0): not by {swizzle}"
            raise self.fail(why, *self.line(name), f"swizzle={swizzle}")
        if not isinstance(pad, int) or isinstance(pad, bool) or pad < 0:
            raise self.fail(f"{name}: a pad is a number of elements, not {pad}", *self.line(name), f"pad={pad}")
        return (0 if pad else None) if swizzle is None else swizzle, pad

    def option(self, factor: Factor, name: str, default: Value) -> Value:
        """An option of a factor."""
        return dict(factor.options).get(name, default)

    def fail(self, why: str, *where: str) -> UserError:
        """An error of whoever wrote the schedule: of a word, a line or a site of it, from the outside in."""
        error = UserError(f"{self.kernel.name}: {why}")
        error.about = self.schedule.part(*where)
        return error

    def line(self, operand: str) -> tuple[str, str]:
        """Where the schedule speaks of an operand: the site, and the line."""
        sites = [s.names[0] for s in self.schedule.sites if operand in dict(s.operands)]
        return (sites[0] if sites else ""), operand


def unused(name: str, taken: Container[str]) -> str:
    """`name`, or the first of name1, name2 ... that no line of a plan has."""
    return next(x for k in count() if (x := f"{name}{k or ''}") not in taken)
