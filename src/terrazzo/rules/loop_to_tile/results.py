"""What follows the sums of a product: what each result reads, and what computing it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.node import topological
from terrazzo.ir.sites import Product
from terrazzo.rules.loop_to_tile.threads import size_of


@dataclass(frozen=True)
class Results:
    """Of each result: the bytes it reads that neither its row nor its column shares, those it stores, and its
    operations, conversions aside. Every store computes anew what it is made of. There are `points`, and `moved` are all
    bytes of memory that they touch.
    """

    points: int
    read: int
    stored: int
    operations: float
    moved: int


@lru_cache(maxsize=1024)
def results(p: Product) -> Results:
    """What follows the sums of a product."""
    sums = {c.reduce for c in p.sites}
    each = [topological([s.value], stop=lambda x: x in sums) for s in p.kernel.stores]
    terms = {x: None for found in each for x in found}
    inner = [x for found in each for x in found if {p.m, p.n} <= x.free and x not in sums]
    loads = [x for x in inner if isinstance(x, l.Load)]
    work = sum(x.fn.cost for x in inner if isinstance(x, l.Apply) and not is_cast(x.fn))
    size = sum(b.type.dtype.size for b in p.kernel.writes)
    moved = sum(map(_touched, {x.buffer: x for x in terms if isinstance(x, l.Load)}.values()))
    points = math.prod(map(size_of, p.kernel.axes))
    return Results(points, sum(x.dtype.size for x in loads), size, work, moved + size * points)


def _touched(x: Any) -> int:
    points = math.prod(a.extent for a in x.free)
    return int(x.dtype.size * min(points, math.prod(x.buffer.type.static_shape)))
