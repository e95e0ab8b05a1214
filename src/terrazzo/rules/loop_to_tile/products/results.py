"""What follows the sums of a product: what each result reads, and what computing it takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.node import topological
from terrazzo.ir.rescues import rescues
from terrazzo.ir.sites import Product
from terrazzo.rules.loop_to_tile.walked.threads import size_of


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


@lru_cache(maxsize=1024)
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


@lru_cache(maxsize=4096)
def along(x: Any, axis: Any) -> bool:
    """Whether an access goes along an axis where memory does."""
    return axis in x.free and coefficient(flatten(x.index, x.buffer.type.element_strides), axis) == 1


def _touched(x: Any) -> int:
    points = math.prod(a.extent for a in x.free)
    return int(x.dtype.size * min(points, math.prod(x.buffer.type.static_shape)))
