"""Schedules of sums of products in which one factor is read at moved places: convolutions. A block's rows are a box of
several axes (images, rows and columns of pixels), and the slab of a step is that box of the image, moved by the step.
TMA brings zeros for what lies outside, which is what the term has there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.hw.gpu import Gpu
from terrazzo.hw.products import missing
from terrazzo.hw.wgmma import INSTRUCTIONS, WarpgroupInstruction
from terrazzo.ir.address import coefficient, flatten, mentions
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import bounds, terms_of
from terrazzo.ir.node import substitute
from terrazzo.ir.schedule import Factor, Like, Operand, Schedule, Site, Word
from terrazzo.ir.sites import called, loads, product
from terrazzo.rules.access import WIDEST
from terrazzo.rules.loop_to_tile.products.leaving import RESULTS
from terrazzo.rules.loop_to_tile.products.packed import even
from terrazzo.rules.loop_to_tile.products.patches import patches
from terrazzo.rules.loop_to_tile.products.results import results
from terrazzo.rules.loop_to_tile.products.warpgroup_tiles import ROWS
from terrazzo.rules.loop_to_tile.products.warpgroups import REGISTERS, SLOTS, after
from terrazzo.rules.loop_to_tile.products.work import STEP, Work, lasts
from terrazzo.rules.loop_to_tile.walked.threads import ceil, step
from terrazzo.rules.swizzles import swizzled
from terrazzo.rules.tile.complete import Refused, complete

COLUMNS = (32, 64, 96, 128, 192, 256)
"""Columns of a tile that are tried."""
LONGEST = 256
"""Elements along a side of a box, at most."""
MOST = 8
"""Plans that are worth trying."""


@dataclass(frozen=True)
class Moved:
    """A kernel that is one sum of products of `image`, which knows `rows`, and `filters`, which knows `columns`, both
    contiguous along `depth`; `taps` are the other axes it sums over.
    """

    kernel: l.Kernel
    name: str
    rows: tuple[Any, ...]
    columns: Any
    depth: Any
    taps: tuple[Any, ...]
    image: l.Load
    filters: l.Load

    @property
    def gathered(self) -> bool:
        """Whether results leave as boxes, through shared memory: they lie side by side along the columns."""
        return all(_along(s, self.columns) and s.buffer.type.dtype.size == 2 for s in self.kernel.stores)

    @property
    def step(self) -> int:
        """Elements of `depth` in a step: 128 bytes, the widest swizzle, or as many as there are."""
        extent: int = self.depth.extent
        return max(16, min(STEP, 1 << (extent - 1).bit_length()))


def moved(kernel: l.Kernel) -> tuple[Moved | None, str]:
    """A kernel as such a sum, or why it is none (nothing, where it is not worth telling)."""
    p = product(kernel)
    if p is None or len(p.sites) != 1:
        return None, ""
    (c,) = p.sites
    if len(c.terms) > 1:
        return None, f"it sums {len(c.terms)} products in a step"
    image, filters = p.factors(c)
    rows = tuple(a for a in kernel.axes if a in image.free and a not in filters.free)
    columns = tuple(a for a in kernel.axes if a in filters.free and a not in image.free)
    if len(rows) < len(columns):
        (image, filters), rows, columns = (filters, image), columns, rows
    a, b = p.operands if p.operands[0].free & frozenset(rows) else p.operands[::-1]
    if len(rows) < 2 or len(rows) + len(columns) < len(kernel.axes):
        return None, ""
    if not isinstance(a, l.Load) or not isinstance(b, l.Load):
        return None, f"{called(a if not isinstance(a, l.Load) else b)} is computed on its way"
    if len(columns) != 1:
        return None, f"{b.buffer.name} has {len(columns)} axes of its own, and instructions take one"
    depth = [x for x in c.reduce.axes if _along(a, x) and _along(b, x)]
    if len(depth) != 1:
        return None, f"{a.buffer.name} and {b.buffer.name} are contiguous along no axis that both are summed over"
    for x in (a, b):
        if not even(x.buffer):
            return None, f"rows of {x.buffer.name} do not begin at multiples of {WIDEST} bytes"
    taps = tuple(x for x in c.reduce.axes if x is not depth[0])
    if not taps and not a.inside and all(coefficient(e, x) in (0, 1) for e in a.index for x in rows):
        return None, ""  # a plain product, once its rows are one axis
    return Moved(kernel, p.names[0], rows, columns[0], depth[0], taps, a, b), ""


def _along(x: l.Load | l.Store, axis: Any) -> bool:
    return coefficient(flatten(x.index, x.buffer.type.element_strides), axis) == 1


COPIED, UNEVEN, TRANSPOSED, PATCHES, WALKED = 1.1, 2.0, 2.0, 7.6, 2.5
"""How much longer a copy takes than the memory's rate says: 33.5 MB took 10.7 us on an H200, launch included. Where
rows begin anywhere, elements come one by one, of which a thread asks for eight at once: an estimate. Where it reads
along one dimension and writes along another, it was 6.6 with lanes along what is written; with lanes along what is
read, which store 16 bytes each, half of a sector, it was not measured. Patches that overlap are found by divisions for
each of their elements: 7 x 7 of 32 x 3 x 224 x 224 in bfloat16, 118 MB, took 233 us. Where threads go from one to the
next, an element takes 9 instructions and not 75, 19 us in all there, beside 33 for the memory: counted, not measured.
"""


def copying(kernel: l.Kernel, gpu: Gpu) -> float:
    """Nanoseconds of a kernel that stores what another one reads, in memory that lies otherwise."""
    factor = max((_copied(x, s, kernel.axes) for s in kernel.stores for x in loads(s.value)), default=COPIED)
    if factor == PATCHES and patches(kernel, gpu) is not None:
        factor = WALKED
    return gpu.launch + factor * sum(b.type.span for b in (*kernel.reads, *kernel.writes)) / gpu.memory


def _copied(load: l.Load, store: l.Store, axes: Sequence[Any]) -> float:
    digits = _single(load)
    places = [substitute(e, digits) for e in load.index]
    overlap = any(sum(map(bool, terms_of(e))) > 1 for e in places)  # padding reads every element once
    if overlap and math.prod(a.extent for a in axes) > math.prod(load.buffer.type.static_shape) > 1 and load.inside:
        return PATCHES
    along = next((a for a in axes if step(store, a) == 1), None)
    if along is None or (along in load.free and step(load, along) not in (0, 1)):
        return TRANSPOSED
    return UNEVEN if load.inside else COPIED


def _single(load: l.Load) -> dict[Any, int]:
    """The digits of which a load's conditions leave one value: of r % 2 where r % 2 is 0, as of what was stacked."""
    found: dict[Any, int] = {}
    for e in load.inside:
        terms = {factors: c for factors, c in terms_of(e).items() if factors}
        if len(terms) == 1 and bounds(e)[1] == 0:
            ((digit, *more), c), *_ = terms.items()
            if not more and abs(c) == 1:
                found[digit] = -terms_of(e).get((), 0) // c
    return found


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


def plans(x: Moved, gpu: Gpu) -> list[Plan]:
    """The best plans, best first; none where the machine has no instruction for it."""
    found = []
    for i in INSTRUCTIONS:
        if i.operand is x.image.dtype is x.filters.dtype and i.shape[1] in COLUMNS and not missing(i, gpu):
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

    return sorted((p for p in found if p.time < math.inf), key=lambda p: (p.time, reach(p.tile)))[:MOST]


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
    results = RESULTS * tile.m * _width(tile) * 2
    return min(SLOTS, (gpu.shared - 2048 - results) // ((tile.m + tile.n) * x.step * 2))


def _tile_counts(x: Moved, tile: Tile) -> list[int]:
    """How many tiles there are along rows and columns."""
    return [ceil(a.extent, side) for a, side in zip((*x.rows, x.columns), (*tile.box, tile.n), strict=True)]


def _time(x: Moved, tile: Tile, gpu: Gpu) -> float:
    """By the model of products: a step is a tap and so many channels. What the taps read again comes from the cache."""
    if (has := gpu.warpgroups) is None:
        return math.inf
    p = product(x.kernel)
    least = sum(b.type.span for b in (x.image.buffer, x.filters.buffer)) + (results(p).moved if p is not None else 0)
    work = Work(
        tile.m, tile.n, 1, math.prod(_tile_counts(x, tile)), 1,
        steps=math.prod(a.extent for a in x.taps) * ceil(x.depth.extent, x.step),
        fetched=(tile.m + tile.n) * x.step * 2,
        held=(tile.m + tile.n) * x.step * 2,
        slots=_slots(x, tile, gpu),
        results=x.kernel.stores[0].buffer.type.dtype.size,
        rate=has.gathered if x.gathered else has.direct,
        least=least,
        after=after(p, tile.m * tile.n, has) if p is not None else 0.0,
    )  # fmt: skip
    return lasts(work, gpu)


def schedule(x: Moved, plan: Plan, gpu: Gpu) -> Schedule:
    """The bindings of a plan. Results gather in shared memory where they are boxes of what is stored."""
    boxes = _schedule(x, plan, gpu, x.gathered)
    if x.gathered and isinstance(complete(x.kernel, boxes, gpu)[0], Refused):
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
    lines.append((x.columns.name, (Factor("grid", columns), Factor("block", t.n))))
    ring = (("ring", _slots(x, t, gpu)),)
    lines.append((depth, (Factor("time", ceil(x.depth.extent, x.step), ring), Factor("block", x.step))))
    lines += [(f"r{a.label}", (Factor("time", a.extent),)) for a in x.taps]
    roles = (
        ("load", Word("warp", (1,))),
        ("math", Word("warpgroup", (t.groups,))),
        ("registers", REGISTERS[t.groups]),
    )
    slab = Operand("smem", (("by", "tma"), ("swizzle", swizzled(2 * x.step))))
    site = Site(
        (x.name,),
        (
            *((a.name, factors) for a, factors in zip(x.rows, _rows(t), strict=True)),
            (x.columns.name, (Factor("inst.n", t.n),)),
            (depth, (Factor("reg", x.step // 16), Factor("inst.k", 16))),
        ),
        tuple((called(o), slab) for o in (x.image, x.filters)),
        plan.instruction.name,
    )
    return Schedule(
        x.kernel.name, gpu.arch, tuple(lines), (),
        (("persistent", (gpu.processors,), ()), ("roles", (), roles)),
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


def _width(t: Tile) -> int:
    """Columns of a subtile of results: a power of two, as swizzles are."""
    return min(t.n & -t.n, 64)


def _results(x: Moved, t: Tile, gathered: bool) -> Sequence[Site]:
    """How stores see the tile."""
    names = tuple(dict.fromkeys(b.name for b in x.kernel.writes))
    if not gathered:
        return (Site(names, tuple((a.name, Like(x.name)) for a in (*x.rows, x.columns))),)
    width = _width(t)
    time = Factor("time", t.n // width, (("ring", RESULTS),))
    return [
        Site(
            (name,),
            ((x.columns.name, (time, Factor("block", width))),),
            ((name, Operand("smem", (("by", "tma"), ("swizzle", swizzled(2 * width))))),),
        )
        for name in names
    ]
