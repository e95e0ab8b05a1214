"""Schedules of a product of a product: both in one loop of steps, what lies between them in registers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from terrazzo.hw.gpu import Gpu
from terrazzo.hw.mma_sync import PRODUCTS
from terrazzo.ir.schedule import Factor, Like, Operand, Schedule, Site, Word
from terrazzo.ir.sites import called
from terrazzo.rules.loop_to_tile.chains.chain import Chain
from terrazzo.rules.loop_to_tile.walked.threads import ceil, grid
from terrazzo.rules.swizzles import swizzled
from terrazzo.rules.tile.draft import axis_name

SLOTS = 2
FEW = 16
"""Rows of an instruction of warps. A warpgroup's 64 are not worth it for fewer."""
HELD = 220
"""Registers of a thread for sums, values and fragments; what is left of 255 is for addresses and the frame."""
FEWER = 210
"""The same where there are few rows, whose states go to memory."""
MORE = 20
"""What every further 16 rows of a warp take of the rest, or that warps meet."""


@dataclass(frozen=True)
class Tile:
    """What a block has in a step: `rows` and `step` columns of the inner product, in so many slots. Of the outer
    columns it has all, or so many blocks share them. Tiles of all heads may come before the next rows' are begun
    (`down_last`), or those that differ in axes that what is `beside` the scores does not know, which share it.
    """

    rows: int
    step: int
    slots: int = SLOTS
    shared: int = 1
    down_last: bool = False
    beside: tuple[Any, ...] = ()

    def lines(self, c: Chain, longest_first: bool, *, overlap: bool = False) -> list[tuple[str, Any]]:
        """The kernel's axes: the grid walks the rows, a block the steps."""
        order = (("order", Word("longest_first")),) if longest_first else ()
        others = [a for a in c.kernel.axes if a not in (c.rows, c.columns)]
        last = [a for a in others if self.beside and not any(a in x.free for x in self.beside)]
        lines: list[tuple[str, Any]] = [(a.name, grid(_size(a))) for a in others if a not in last]
        rows = Factor("grid", ceil(c.rows.extent, self.rows), order), Factor("block", self.rows)
        lines.insert(0 if self.down_last else len(lines), (c.rows.name, rows))
        lines += [(a.name, grid(_size(a))) for a in last]
        over = (Factor("grid", self.shared),) if c.width > c.columns.extent or self.shared > 1 else ()
        lines.append((c.columns.name, (*over, Factor("block", c.width // self.shared))))
        count = ceil(c.steps.extent, self.step)
        early = (("overlap", 1),) if overlap and count > 1 else ()
        exact = (("promote", True),) if c.terms > 1 else ()
        steps = Factor("time", count, (("ring", self.slots), *early, *exact)), Factor("block", self.step)
        around = [(axis_name(a), (Factor("time", a.extent),)) for a in c.rounds]
        return [*lines, *around, (axis_name(c.steps), steps)]


def alike(c: Chain) -> tuple[Site, ...]:
    """Results leave from the registers they are in."""
    stores = [(s.buffer.name, [x for x in (c.rows, c.columns) if x in s.free]) for s in c.kernel.stores]
    return tuple(Site((name,), tuple((x.name, Like(c.outer)) for x in axes)) for name, axes in stores)


# -- warps -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Warps:
    """`down` warps divide a block's rows, each with `each` times 16 of them; `deep` warps divide a step's columns."""

    down: int
    each: int
    deep: int
    step: int
    slots: int = SLOTS

    @property
    def rows(self) -> int:
        return self.down * self.each * FEW

    def held(self, c: Chain) -> int:
        """Registers for all products' sums, the values between them and fragments."""
        width, own = c.width, self.step // self.deep
        each = len(c.sums) * own // 2 + len(c.outside) * (width // 2 + own // 4) + 4
        return self.each * each + max(width, own) // 4 + MORE * (self.each - 1 + (self.deep > 1))

    def shared(self, c: Chain) -> int:
        """Bytes of shared memory for the operands, and where warps meet."""
        along = c.brought + len(c.along) * c.width
        meeting = 4 * self.deep * self.rows * (c.width + 8) if self.deep > 1 else 0
        return 2 * (c.down * self.rows + self.slots * self.step * along) + meeting


def arrangements(c: Chain, gpu: Gpu) -> Iterator[Warps]:
    """How warps may divide a step that a block has room for, best first: many rows, for each of which fragments of the
    other operands are loaded once; where there are few rows, warps divide the columns. Where a machine has warpgroups,
    chains of several sums or of several terms are theirs: how long these take on its warps was not measured.
    """
    if gpu.warpgroups is not None and (c.beside or c.others or c.rounds or c.terms > 1):
        return
    most = ceil(c.steps.extent, 16) * 16
    few = c.rows.extent <= FEW
    ways = ((1, 1, 4), (1, 1, 2), (1, 1, 1)) if few else ((4, 2, 1), (8, 1, 1), (4, 1, 1), (2, 1, 1), (1, 1, 1))
    for step in (64, 32, 16):
        for down, each, deep in ways:
            found = Warps(down, each, deep, min(step, most))
            fills = found.rows < 2 * c.rows.extent or (down, each) == (1, 1)
            fits = found.held(c) <= (FEWER if few else HELD) and found.shared(c) <= gpu.shared
            if fills and fits and found.step % (16 * deep) == 0:
                yield _deepest(found, c, gpu) if few else found


def _deepest(way: Warps, c: Chain, gpu: Gpu) -> Warps:
    """With more slots, as long as two blocks fit on a processor: nothing but memory is waited for."""
    more = [replace(way, slots=slots) for slots in (4, 3)]
    return next((x for x in more if x.shared(c) <= gpu.shared // 2), way)


def on_warps(c: Chain, gpu: Gpu, way: Warps, longest_first: bool = False) -> Schedule | None:
    """Everybody copies operands to the slots of a ring and multiplies."""
    kind = c.operands[0].dtype.name  # type: ignore[attr-defined]
    width = c.width
    deep = 16 if gpu.number >= 80 else 8
    on = f"mma.m16n8k{deep}.f32.{kind}"
    if on not in PRODUCTS or PRODUCTS[on].since > gpu.number:
        return None
    name = axis_name(c.steps)
    rows = (c.rows.name, (*_warps(way.down), Factor("reg", way.each), Factor("inst.m", FEW)))
    own = way.step // way.deep
    across = (name, (*_warps(way.deep), Factor("reg", own // 8), Factor("inst.n", 8)))
    along = (name, (*_warps(way.deep), *_depth(own, deep)))
    by = "cp.async" if gpu.number >= 80 else "ld"
    columns = (c.columns.name, (Factor("reg", width // 8), Factor("inst.n", 8)))

    def site(names: tuple[str, ...], axes: tuple[Any, ...], size: int) -> Site:
        return Site(names, axes, tuple({called(x): _copied(size, by) for x in c.read(*names)}.items()), on)

    inside = [c.sums] if len({*c.depths}) == 1 else [(x,) for x in c.sums]
    along_depth = ((axis_name(d), _depth(size, deep)) for d, size in zip(c.depths, c.deep, strict=True))
    first = [site(x, (rows, across, d), size) for x, d, size in zip(inside, along_depth, c.deep, strict=False)]
    last = [site((name,), (rows, columns, along), width) for name, _ in c.outside]
    lines = Tile(way.rows, way.step, way.slots).lines(c, longest_first)
    return Schedule(c.kernel.name, gpu.arch, tuple(lines), (), (), (*first, *last, *alike(c)))


def _depth(size: int, each: int) -> tuple[Factor, ...]:
    return (Factor("reg", size // each), Factor("inst.k", each))


def _warps(count: int) -> tuple[Factor, ...]:
    return (Factor("warp", count),) if count > 1 else ()


def _copied(width: int, by: str) -> Operand:
    """In panels as wide as a swizzle. Eight rows of an odd number of 16 bytes lie in different banks as they are."""
    swizzle = swizzled(2 * width)
    return Operand("smem", (("by", by), *((("swizzle", swizzle),) if swizzle else ())))


def parts(width: int) -> int:
    """Columns of a result that leave together."""
    return min(width & -width, 64)


def _size(axis: Any) -> int:
    found: int = axis.extent
    return found
