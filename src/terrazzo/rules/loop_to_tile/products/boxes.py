"""Schedules of sums of products in which one factor is read at moved places: convolutions. A block's rows are a box of
several axes (images, rows and columns of pixels), and the slab of a step is that box of the image, moved by the step.
TMA brings zeros for what lies outside, which is what the term has there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.collector import remembered
from terrazzo.hw import tma
from terrazzo.hw.gpu import Gpu
from terrazzo.hw.products import missing
from terrazzo.hw.wgmma import INSTRUCTIONS, WarpgroupInstruction
from terrazzo.ir.address import coefficient, flatten, mentions
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import bounds
from terrazzo.ir.node import derived, substitute
from terrazzo.ir.schedule import Factor, Like, Operand, Schedule, Site, Word
from terrazzo.ir.sites import Product, called, product
from terrazzo.rules import access
from terrazzo.rules.access import WIDEST
from terrazzo.rules.loop_to_tile.products.leaving import RESULTS, gathers, narrowest
from terrazzo.rules.loop_to_tile.products.making import promotes
from terrazzo.rules.loop_to_tile.products.packed import even
from terrazzo.rules.loop_to_tile.products.results import CACHED, PARTLY, SCATTERED, STRADDLED, WORD, results, scatter
from terrazzo.rules.loop_to_tile.products.warpgroup_tiles import ACCUMULATORS, PROMOTED, ROWS, longest_step
from terrazzo.rules.loop_to_tile.products.warpgroups import REGISTERS, SLOTS, after, promotion
from terrazzo.rules.loop_to_tile.products.work import LINE, STEP, Work, facts_of, lasts, powered
from terrazzo.rules.loop_to_tile.walked.threads import SECTOR, ceil, grid
from terrazzo.rules.swizzles import swizzled
from terrazzo.rules.tile.complete import Refused, complete
from terrazzo.rules.tile.reach import last_step, steps_taken

COLUMNS = (32, 64, 96, 128, 192, 256)
"""Columns of a tile that are tried."""
GATHERED, DIRECT = 20.6, 30.0
"""Bytes of results in a nanosecond that leave a block through shared memory, and from registers: no other tile's
products go on beside them, as they do for products of matrices.
"""
APART = 0.44
"""Of what a block fetches, what leaves the cache for it: blocks that work side by side share the rest."""
LONGEST = 256
"""Elements along a side of a box, at most."""
MOST, ALIKE = 8, 2
"""Plans that are worth trying. And of those that differ in the sides of their boxes only: they need equally many
registers, so where one spills, all of them do. Of eight boxes by 256 columns for a convolution that stored two results
each spilled 480 bytes or more, and each was compiled, one after the other.
"""
ALONE = 9.0
"""Bytes of results in 16 bits that leave a block's registers in a nanosecond one by one, where memory runs along rows
of a tile. Four convolutions of 3 x 3 with 3.2 to 10.5 million such results took 3 to 16 us longer than those that
stored the same channels last, which are 6 to 13 bytes (H200, 28 November 2026).
"""
ROW, STRADDLING = 2.15, 1.75
"""Nanoseconds in which TMA brings a row of an image, whatever it has up to 128 bytes, and how many times as long one
takes that lies across sectors where it has less. Of 8, 16 and 32 channels a row took 2.3, 2.2 and 2.1 ns, of 24
channels 3.8 (H200, 28 November 2026).
"""


@dataclass(frozen=True)
class Moved:
    """A kernel that is one sum of products of `images`, which know `rows`, and `filters`, which know `columns`, all of
    them contiguous along `depth`, or the filters along the columns; `taps` are the other axes it sums over, and all
    know the `batch`. There are several images, or filters, where these are parts of numbers: all are read at the same
    places.
    """

    kernel: l.Kernel
    whole: Product
    rows: tuple[Any, ...]
    columns: Any
    batch: tuple[Any, ...]
    depth: Any
    taps: tuple[Any, ...]
    images: tuple[l.Load, ...]
    filters: tuple[l.Load, ...]

    @property
    def name(self) -> str:
        """Of the sum."""
        return self.whole.names[0]

    @derived
    def image(self) -> l.Load:
        """The first of the images: where all of them are read."""
        return self.images[0]

    @derived
    def beside(self) -> bool:
        """Whether results lie side by side along the columns."""
        return all(_along(s, self.columns) for s in self.kernel.stores)

    def gathered(self, tile: Tile) -> int:
        """Bytes of a row of boxes as which the results of a tile leave, through shared memory; 0 where they leave from
        registers. Rows are of columns, or of runs of a warpgroup's rows, where memory runs along these.
        """
        size = narrowest(self.whole)
        sides = dict(zip(self.rows, tile.box, strict=True)) | {self.columns: _width(tile, size)}
        row = sides[self.columns]
        if not self.beside:
            sides |= dict.fromkeys(self.rows, 1) | {self.rows[-1]: (row := _run(tile, size))}
        known = gathers(self.whole) and (self.beside or (size == WORD and row * size >= SECTOR and self._in_runs))
        return row * size if known and all(_is_box(s, tuple(sides.items())) for s in self.kernel.stores) else 0

    @derived
    def visited(self) -> tuple[int, ...]:
        """How many of its taps each point of the batch takes, where those beyond are zeros; nothing where that is all
        of them for all.
        """
        (c,) = self.whole.sites
        if (end := last_step(c, self.batch)) is None:
            return ()
        others = math.prod(a.extent for a in self.taps if a is not c.reduce.axes[0])
        return tuple(others * n for n in steps_taken(c, end))

    @derived
    def _in_runs(self) -> bool:
        return all(_along(s, self.rows[-1]) for s in self.kernel.stores)

    @derived
    def step(self) -> int:
        """Elements of `depth` in a step: 128 bytes, the widest swizzle, or as many as there are; and as many as are
        promoted together.
        """
        extent: int = self.depth.extent
        return max(16, min(longest_step(self.whole), 1 << (extent - 1).bit_length()))


@remembered
def moved(kernel: l.Kernel) -> tuple[Moved | None, str]:
    """A kernel as such a sum, or why it is none (nothing, where it is not worth telling)."""
    p = product(kernel)
    if p is None or len(p.sites) != 1:
        return None, ""
    (c,) = p.sites
    first, second = p.factors(c)
    rows = tuple(a for a in kernel.axes if a in first.free and a not in second.free)
    columns = tuple(a for a in kernel.axes if a in second.free and a not in first.free)
    if len(rows) < len(columns):
        rows, columns = columns, rows
    batch = tuple(a for a in kernel.axes if a in first.free and a in second.free)
    if len(rows) < 2 or len(rows) + len(columns) + len(batch) < len(kernel.axes):
        return None, ""
    images: list[l.Load] = []
    filters: list[l.Load] = []
    for x in p.operands:
        if not isinstance(x, l.Load):
            return None, f"{called(x)} is computed on its way"
        (images if x.free & frozenset(rows) else filters).append(x)
    a, b = images[0], filters[0]
    pairs = (xy for side in (images, filters) for xy in itertools.pairwise(side))
    if any((x.index, x.inside) != (y.index, y.inside) for x, y in pairs):
        return None, f"it sums {len(c.terms)} products in a step, of what is read at several places"
    if len(columns) != 1:
        return None, f"{b.buffer.name} has {len(columns)} axes of its own, and instructions take one"
    beside = all(_along(y, columns[0]) for y in filters)
    depth = [x for x in c.reduce.axes if all(_along(y, x) for y in (*images, *(() if beside else filters)))]
    if len(depth) != 1:
        return None, f"{a.buffer.name} and {b.buffer.name} are contiguous along no axis that both are summed over"
    if any(_along(y, x) for x in rows for y in images):
        return (
            None,
            f"{a.buffer.name} is read at moved places where it is contiguous: a box would hold it many times",
        )
    for x in (*images, *filters):
        if not even(x.buffer):
            return None, f"rows of {x.buffer.name} do not begin at multiples of {WIDEST} bytes"
    taps = tuple(x for x in c.reduce.axes if x is not depth[0])
    if not taps and not a.inside and all(coefficient(e, x) in (0, 1) for e in a.index for x in rows):
        return None, ""  # a plain product, once its rows are one axis
    return Moved(kernel, p, rows, columns[0], batch, depth[0], taps, tuple(images), tuple(filters)), ""


def _along(x: l.Load | l.Store, axis: Any) -> bool:
    return coefficient(flatten(x.index, x.buffer.type.element_strides), axis) == 1


@remembered
def _is_box(store: l.Store, sides: tuple[tuple[Any, int], ...]) -> bool:
    found = access.box(store, dict(sides))
    return not isinstance(found, str) and not tma.problem(found.place.tensor, found.sides, 0)


@dataclass(frozen=True)
class Tile:
    """A block's part: a box of rows for `groups` warpgroups, and n columns."""

    box: tuple[int, ...]
    groups: int
    n: int

    @property
    def m(self) -> int:
        """Rows of a block."""
        return math.prod(self.box)


@dataclass(frozen=True)
class Plan:
    """A tile on an instruction, and the nanoseconds the model gives it."""

    tile: Tile
    instruction: WarpgroupInstruction
    time: float

    def __str__(self) -> str:
        box = " x ".join(map(str, self.tile.box))
        return f"boxes of {box} by {self.tile.n} on {self.instruction.name}: {self.time / 1000:.1f} us by the model"


@remembered
def plans(x: Moved, gpu: Gpu) -> tuple[Plan, ...]:
    """The best plans, best first; none where the machine has no instruction for it."""
    found = []
    columns = [n for n in COLUMNS if n <= (PROMOTED if promotes(x.whole) else 2 * ACCUMULATORS)]
    for i in INSTRUCTIONS:
        if {y.dtype for y in (*x.images, *x.filters)} == {i.operand} and i.shape[1] in columns and not missing(i, gpu):
            found += [Plan(tile, i, _time(x, tile, gpu)) for tile in _tiles(x, i.shape[1])]
    span = [bounds(substitute(e, dict.fromkeys(x.rows, 0))) for e in x.image.index]
    wide = {
        a: hi - lo
        for e, (lo, hi) in zip(x.image.index, span, strict=True)
        for a in x.rows
        if mentions(e, a) and lo is not None and hi is not None
    }

    def reach(tile: Tile) -> int:
        """Points of the image that the taps of a box touch: what the cache holds for it."""
        return math.prod(side + wide.get(a, 0) for a, side in zip(x.rows, tile.box, strict=True))

    kinds: dict[tuple[int, int], int] = {}
    best: list[Plan] = []
    for plan in sorted((p for p in found if p.time < math.inf), key=lambda p: (p.time, reach(p.tile))):
        kind = plan.tile.groups, plan.tile.n
        kinds[kind] = kinds.get(kind, 0) + 1
        if kinds[kind] <= ALIKE:
            best.append(plan)
    return tuple(best[:MOST])


def _tiles(x: Moved, n: int) -> Iterator[Tile]:
    """Boxes with a warpgroup's rows or two, no side of which is twice as long as it must be."""
    if n >= 2 * max(x.columns.extent, COLUMNS[0]):
        return
    for groups in (1, 2):
        for box in _boxes(groups * ROWS, [a.extent for a in x.rows]):
            yield Tile(box, groups, n)


def _boxes(count: int, extents: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Boxes of so many points, whose sides are powers of two."""
    if not extents:
        if count == 1:
            yield ()
        return
    side = 1
    while side <= min(count, LONGEST) and side < 2 * extents[0]:
        yield from ((side, *rest) for rest in _boxes(count // side, extents[1:]))
        side *= 2


def _slots(x: Moved, tile: Tile, gpu: Gpu) -> int:
    results = RESULTS * tile.m * sum(_width(tile, size) * size for size in (b.type.dtype.size for b in x.kernel.writes))
    return min(SLOTS, (gpu.shared - 2048 - results) // _held(x, tile))


def _held(x: Moved, tile: Tile) -> int:
    """Bytes of a step: a slab for each image and each filter."""
    size: int = x.image.dtype.size
    return (tile.m * len(x.images) + tile.n * len(x.filters)) * x.step * size


def _tile_counts(x: Moved, tile: Tile) -> list[int]:
    """How many tiles there are along rows and columns, for each point of the batch."""
    return [ceil(a.extent, side) for a, side in zip((*x.rows, x.columns), (*tile.box, tile.n), strict=True)]


def _time(x: Moved, tile: Tile, gpu: Gpu) -> float:
    """By the model of products: a step is a tap and so many channels. What the taps read again comes from the cache."""
    if (has := gpu.warpgroups) is None:
        return math.inf
    p = x.whole
    least = sum(y.buffer.type.span for y in (*x.images, *x.filters)) + results(p).moved
    promoted, tiles = promotes(p), math.prod((*_tile_counts(x, tile), *(a.extent for a in x.batch)))
    work = Work(
        tile.m, tile.n, facts_of(p).terms, tiles, 1,
        steps=round(_taps(x) * ceil(x.depth.extent, x.step)),
        fetched=_held(x, tile),
        held=_held(x, tile),
        leaving=_held(x, tile) * APART,
        read=x.image.dtype.size * facts_of(p).terms * tile.groups * (ROWS + tile.n) * x.step,
        alone=tile.groups == 1,
        slots=_slots(x, tile, gpu),
        results=x.kernel.stores[0].buffer.type.dtype.size,
        rate=min(GATHERED, row / ROW) if (row := x.gathered(tile)) else _direct(x, gpu),
        least=least,
        extra=promotion(p, tile.n, x.step) if promoted and tile.groups == 1 else 0.0,
        depth=x.step,
        after=after(p, tile.m * tile.n, has) + _scattered(x, tile) * min(gpu.processors, tiles) / tiles,
        parts=promoted and x.step == STEP,
        brought=_brought(x, tile),
        drawn=0.0 if promoted else _held(x, tile),
    )  # fmt: skip
    return max(lasts(work, gpu), powered(work, gpu))


def _taps(x: Moved) -> float:
    """How many taps a tile takes, in the mean."""
    return sum(x.visited) / len(x.visited) if x.visited else math.prod(a.extent for a in x.taps)


def _blocks(x: Moved, tile: Tile, gpu: Gpu) -> int:
    """How many blocks walk the tiles. Where these take unequally many taps, it is a number that lets every block come
    to all points of the batch in turn.
    """
    period = math.prod(a.extent for a in x.batch) * _tile_counts(x, tile)[-1] if x.visited else 1
    return next(n for n in range(gpu.processors, 0, -1) if math.gcd(n, period) == 1)


def _brought(x: Moved, tile: Tile) -> float:
    """Nanoseconds in which the rows of a step's images come."""
    pitch = x.depth.extent * x.image.dtype.size
    across = STRADDLING if SECTOR < pitch < LINE and pitch % SECTOR else 1.0
    return ROW * across * tile.m * len(x.images)


def _direct(x: Moved, gpu: Gpu) -> float:
    """Bytes of results in a nanosecond that leave a block's registers: a thread's two columns together, or alone."""
    if scatter(x.whole):
        whole = all(_in_sectors(size, steps) for size, _, steps in _stored(x))
        return (SCATTERED if whole else STRADDLED) / gpu.processors
    size = narrowest(x.whole)
    if size > 2:
        return DIRECT
    return DIRECT * size / WORD if x.beside else ALONE


def _scattered(x: Moved, tile: Tile) -> float:
    """Nanoseconds in which all sectors are stored that a warp fills in part, where results leave from registers: its
    lanes and their two rows go along the rows of a box. Those of rows that begin anywhere may reach one sector more.
    """
    if x.beside or x.gathered(tile) or sum(size * points for size, points, _ in _stored(x)) < CACHED:
        return 0.0
    places = list(itertools.islice(itertools.product(*map(range, tile.box)), ROWS // 4))
    found = 0.0
    for size, points, steps in _stored(x):
        at = [sum(c * i for c, i in zip(steps, place, strict=True)) * size for place in places]
        begins = [0] if _in_sectors(size, steps) else range(0, SECTOR, size)
        touched = [len({(y + first) // SECTOR for y in at}) for first in begins]
        if touched[0] * SECTOR > len(places) * size:
            found += sum(touched) / len(touched) / len(places) * points / PARTLY
    return found


def _in_sectors(size: int, steps: tuple[int, ...]) -> bool:
    """Whether rows of what is stored begin where sectors do."""
    return all(abs(c) * size % SECTOR == 0 for c in steps if abs(c) * size >= SECTOR)


@remembered
def _stored(x: Moved) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """Of each store: the bytes of an element, how many there are, and how many lie between those of successive rows."""
    found = []
    for s in x.kernel.stores:
        place = flatten(s.index, s.buffer.type.element_strides)
        steps = tuple(c if isinstance(c := coefficient(place, a), int) else 0 for a in x.rows)
        found.append((s.buffer.type.dtype.size, math.prod(s.buffer.type.static_shape), steps))
    return tuple(found)


def schedule(x: Moved, plan: Plan, gpu: Gpu) -> Schedule:
    """The bindings of a plan. Results gather in shared memory where they are boxes of what is stored."""
    gathered = x.gathered(plan.tile) > 0
    boxes = _schedule(x, plan, gpu, gathered)
    if gathered and isinstance(complete(x.kernel, boxes, gpu)[0], Refused):
        return _schedule(x, plan, gpu, False)
    return boxes


def _schedule(x: Moved, plan: Plan, gpu: Gpu, gathered: bool) -> Schedule:
    """Tiles of the columns come one after the other, for they read the same of the image."""
    t, depth = plan.tile, f"r{x.depth.label}"
    *rows, columns = _tile_counts(x, t)
    lines: list[tuple[str, Any]] = [
        (a.name, (Factor("grid", count), Factor("block", side)))
        for a, count, side in zip(x.rows, rows, t.box, strict=True)
    ]
    lines += [(a.name, grid(a.extent)) for a in x.batch]
    lines.append((x.columns.name, (Factor("grid", columns), Factor("block", t.n))))
    ring = (("ring", _slots(x, t, gpu)), *([("promote", True)] if promotes(x.whole) else []))
    lines.append((depth, (Factor("time", ceil(x.depth.extent, x.step), ring), Factor("block", x.step))))
    lines += [(f"r{a.label}", (Factor("time", a.extent),)) for a in x.taps]
    roles = (
        ("load", Word("warp", (1,))),
        ("math", Word("warpgroup", (t.groups,))),
        ("registers", REGISTERS[t.groups]),
    )
    across = t.n if _along(x.filters[0], x.columns) else x.step
    slabs = [Operand("smem", (("by", "tma"), ("swizzle", swizzled(2 * n)))) for n in (x.step, across)]
    site = Site(
        (x.name,),
        (
            *((a.name, factors) for a, factors in zip(x.rows, _rows(t), strict=True)),
            (x.columns.name, (Factor("inst.n", t.n),)),
            (depth, (Factor("reg", x.step // 16), Factor("inst.k", 16))),
        ),
        (*((called(o), slabs[0]) for o in x.images), *((called(o), slabs[1]) for o in x.filters)),
        plan.instruction.name,
    )
    return Schedule(
        x.kernel.name, gpu.arch, tuple(lines), (),
        (("persistent", (_blocks(x, t, gpu),), ()), ("roles", (), roles)),
        (site, *_results(x, t, gathered)),
    )  # fmt: skip


def _rows(t: Tile) -> list[tuple[Factor, ...]]:
    """How warpgroups and an instruction's rows divide the sides of a box: the outermost that are long enough are the
    warpgroups'.
    """
    out: list[tuple[Factor, ...]] = []
    left = t.groups
    for side in t.box:
        groups = math.gcd(left, side)
        left //= groups
        inner = Factor("inst.m", side // groups)
        out.append((Factor("warpgroup", groups), inner) if groups > 1 else (inner,))
    return out


def _run(t: Tile, size: int) -> int:
    """How many rows of a warpgroup lie side by side, of results of so many bytes, and no more than a line has."""
    return min(_rows(t)[-1][-1].size, LINE // size)


def _width(t: Tile, size: int) -> int:
    """Columns of a subtile of results of so many bytes: a power of two, as swizzles are."""
    return min(t.n & -t.n, LINE // size)


def _results(x: Moved, t: Tile, gathered: bool) -> Sequence[Site]:
    """How stores see the tile."""
    if not gathered:
        names = tuple(dict.fromkeys(b.name for b in x.kernel.writes))
        return (Site(names, tuple((a.name, Like(x.name)) for a in (*x.rows, x.columns))),)
    return [_site(b, x, t) for b in dict.fromkeys(x.kernel.writes)]


def _site(b: l.Buffer, x: Moved, t: Tile) -> Site:
    """How the store to a buffer sees the tile whose subtiles gather."""
    size = b.type.dtype.size
    width = _width(t, size)
    row = width if x.beside else _run(t, size)
    place = Operand("smem", (("by", "tma"), ("swizzle", swizzled(size * row))))
    time = Factor("time", t.n // width, (("ring", RESULTS),))
    return Site((b.name,), ((x.columns.name, (time, Factor("block", width))),), ((b.name, place),))
