"""What follows the sums of a product: what each result reads, and what computing it takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from terrazzo.collector import remembered
from terrazzo.hw.gpu import Gpu
from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.node import topological
from terrazzo.ir.rescues import rescues
from terrazzo.ir.sites import Product
from terrazzo.rules.loop_to_tile.walked.threads import SECTOR, size_of, step

PARTLY, CACHED = 50.0, 50e6
"""Sectors that warps of all processors store in part in a nanosecond, where results are more bytes than the cache has:
who stores the rest of one comes later. Fitted to transposed convolutions with a stride of 2 in bfloat16, of whose
results a warp stores every other one along rows (H200, 28 November 2026, with copies of operands): 128 x 64 x 258 x 258
took 10.9 ms in boxes of 128 x 1 x 1 and 4.0 in those of 16 x 1 x 8, 32 x 24 x 66 x 66 x 66 took 3.5 in boxes of 32 x 1
x 2 x 2 and 2.6 in those of 32 x 1 x 1 x 4; by this 12.1, 3.8, 3.6 and 2.7. In 32 x 32 x 128 x 128, which the cache has,
it took 9 us longer than channels last.
"""
WORD, SCATTERED, STRADDLED = 4, 3000.0, 1250.0
"""Bytes of a register, and those of results in a nanosecond that leave so all processors where they are more than the
cache has: warps store eight pieces of 32 bytes at a time, each in a line of its own; and where these pieces are of two
sectors each, since rows begin anywhere. Fitted on an H200 (28 November 2026) to what calls took beside the kernels that
make parts: 16384 x 32 x 16384 took 397 us, 8 x 64 x 512 x 512 to 128 channels, 1x1, 755; 16 x 16 x 1024 x 1024 to 128,
3x3, whose rows are of 1022 numbers, 8.0 ms for 8.6 GB, and 8 x 64 x 1024 x 1024 to 64, transposed, 3.7 for 4.3.
"""
OF_WORDS = 1.3
"""How many bytes more of 32-bit results gather in shared memory in a nanosecond than of those of 16: 16384 x 32 x 16384
took 321 us so, 8192 x 512 x 8192 149.
"""


@dataclass(frozen=True)
class Results:
    """Of each result: the bytes it reads that neither its row nor its column shares, those it stores, and its
    operations, conversions aside. Every store computes anew what it is made of. There are `points`, and `moved` are all
    bytes of memory that they touch. Some operations are those of a row or of a column alone, by the product's axis;
    `across` are the bytes of what memory runs across that axis in.
    """

    points: int
    read: int
    stored: int
    operations: float
    moved: int
    alone: Mapping[Any, float]
    across: Mapping[Any, int]


@remembered
def results(p: Product) -> Results:
    """What follows the sums of a product."""
    sums = {c.reduce for c in p.sites} | {*rescues(p.kernel)}
    each = [topological([s.value], stop=lambda x: x in sums) for s in p.kernel.stores]
    terms = {x: None for found in each for x in found}
    inner = [x for found in each for x in found if {p.m, p.n} <= x.free and x not in sums]
    loads = [x for x in inner if isinstance(x, l.Load)]
    work = _operations(inner)
    size = sum(b.type.dtype.size for b in p.kernel.writes)
    moved = sum(map(_touched, {x.buffer: x for x in terms if isinstance(x, l.Load)}.values()))
    points = math.prod(map(size_of, p.kernel.axes))
    alone = {a: _operations(x for x in terms if a in x.free and b not in x.free) for a, b in ((p.m, p.n), (p.n, p.m))}
    across = {a: sum(x.dtype.size for x in loads if not along(x, a)) for a in (p.m, p.n)}
    return Results(points, sum(x.dtype.size for x in loads), size, work, moved + size * points, alone, across)


def _operations(terms: Iterable[Any]) -> float:
    return sum(x.fn.cost for x in terms if isinstance(x, l.Apply) and not is_cast(x.fn))


@remembered
def scatter(p: Product) -> bool:
    """Whether results of 32 bits, beside others of 16 perhaps, are more than the cache has: they had better not leave
    the registers of matrix instructions. What a tile's rows are reduced to has no columns that could.
    """
    if not all(p.m in s.free and p.n in s.free for s in p.kernel.stores):
        return False
    sizes = {s.buffer: s.buffer.type.dtype.size for s in p.kernel.stores}.values()
    return max(sizes) == WORD and min(sizes) >= 2 and sum(sizes) * math.prod(map(size_of, p.kernel.axes)) >= CACHED


def apart(p: Product, gpu: Gpu) -> float:
    """Nanoseconds more than memory needs in which results leave registers that had better not."""
    r = results(p)
    return r.stored * r.points * max(1 / SCATTERED - 1 / gpu.memory, 0.0) if scatter(p) else 0.0


@remembered
def partly_stored(p: Product) -> float:
    """Nanoseconds in which results are stored that lie apart in memory, so that no warp fills a sector, and that are
    more than the cache has: such as the points of one phase of a transposed convolution. 16 x 64 x 318 x 638 of stride
    5 took 2.6 ms so where memory alone takes 0.2 (H200, 28 November 2026).
    """
    found = 0.0
    for s in p.kernel.stores:
        size, points = s.buffer.type.dtype.size, math.prod(map(size_of, p.kernel.axes))
        steps = [abs(x) for a in (p.m, p.n) if (x := step(s, a)) and size_of(a) > 1]
        if size * points >= CACHED and steps and min(steps) > 1:
            found += points * min(1.0, min(steps) * size / SECTOR) / PARTLY
    return found


@remembered
def along(x: Any, axis: Any) -> bool:
    """Whether an access goes along an axis where memory does."""
    return axis in x.free and coefficient(flatten(x.index, x.buffer.type.element_strides), axis) == 1


def _touched(x: Any) -> int:
    points = math.prod(a.extent for a in x.free)
    return int(x.dtype.size * min(points, math.prod(x.buffer.type.static_shape)))
