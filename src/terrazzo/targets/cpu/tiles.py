"""The tiles of a kernel of products: which of its axes are rows, which are columns, and how factors are read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.contraction import Contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import Expr, IntExpr, Loaded, Var
from terrazzo.ir.node import Node, topological
from terrazzo.ir.sites import Sites, sites
from terrazzo.targets.cpu.images import Image, image
from terrazzo.targets.cpu.runs import stride

ROWS = 192
"""Rows of one block, at most: the tile of results stays in the second-level cache."""
PACKED = 96
"""The same, where they are written first."""
COLUMNS = 256
"""Columns that share what was written of the rows of a block."""
TILE = 12
"""Rows of a tile in registers, at most."""
LARGEST = 1 << 20
"""Elements of a factor that is written whole, where it need not be."""
RUN = 25.0
"""What a run costs besides its elements, in vectors of multiply-adds."""
FILLING = 1.0
"""What writing a number of an image costs, in vectors of multiply-adds."""
COPYING = 0.1
"""What copying a number of an image to a panel costs."""
NEAR = (1, 2)
"""How far apart neighbours may be that are written to images."""
FEW = 16
"""Rows up to which images are read where they are."""
PAGE = 128
"""Elements that steps of what is read in place may be apart."""
CHEAP = 2
"""The price of a factor, in additions, up to which it may be computed several times."""


@dataclass(frozen=True)
class Site:
    """One contraction, with its factors as (of rows, of columns); and the axes of its steps, in the order in which
    they are counted.
    """

    reduce: l.Reduce
    left: Node
    right: Node
    steps: tuple[Any, ...]


@dataclass(frozen=True)
class Tiled:
    """The contractions of a kernel, and which of its axes are their rows and their columns; of a single one perhaps the
    second factor as images.
    """

    sites: tuple[Site, ...]
    rows: tuple[Any, ...]
    columns: tuple[Any, ...]
    image: Image | None = None

    @property
    def count(self) -> int:
        """How many columns there are, with those points of an image between them that are none."""
        return self.image.columns if self.image else numel(self.columns)


def tiled(kernel: l.Kernel) -> Tiled | None:
    """The contractions of a kernel that is one chain of loops, as the cheapest tiles; None where there are none."""
    found = sites(kernel)
    if not (found.multiplies and found.one_chain and found.everywhere):
        return None
    products = list(found.contractions.values())
    kind = products[0].reduce.dtype
    if kind.name not in ("f32", "f64") or any(len(p.terms) > 1 or p.reduce.dtype is not kind for p in products):
        return None
    if kernel.axes and not any(kernel.axes[-1] in p.reduce.free for p in products):  # which are computed once for it
        return None
    every = (*kernel.axes, *(a for p in products for a in p.reduce.axes))
    if not all(isinstance(a.extent, int) for a in every):
        return None
    ways = {(w.rows, w.columns, w.image): w for w in (*_ways(kernel, found, products), *_in_images(kernel, products))}
    return min(ways.values(), key=lambda w: _price(kernel, w), default=None)


def _ways(kernel: l.Kernel, found: Sites, products: Sequence[Contraction]) -> Iterator[Tiled]:
    """The rows and columns that a kernel may have, its axes as memory has them."""
    for row in kernel.axes:
        for column in kernel.axes:
            pairs = found.sides(row, column)
            if not pairs:
                continue
            rows = [a for a in kernel.axes if all(a in x.free and a not in y.free for x, y in pairs)]
            columns = [a for a in kernel.axes if all(a in y.free and a not in x.free for x, y in pairs)]
            rows = _as_read([x for x, _ in pairs], rows) or _as_stored(kernel, rows)
            columns = _as_stored(kernel, columns)
            made = tuple(Site(p.reduce, *pair, _steps(p, pair)) for p, pair in zip(products, pairs, strict=True))
            if in_place := _together(made, rows):
                rows = in_place
            for some in (columns[k:] for k in range(len(columns))):  # a block of the last ones may be one run
                if numel(rows) >= 2 and numel(some) >= 4:
                    yield Tiled(made, tuple(rows), tuple(some))


def _in_images(kernel: l.Kernel, products: Sequence[Contraction]) -> Iterator[Tiled]:
    """The ways in which the one product of a kernel reads images, with as many dimensions as there may be."""
    if len(products) > 1 or len({s.buffer.type.shape for s in kernel.stores}) > 1:
        return
    (p,) = products
    for left, right in (p.factors, p.factors[::-1]):
        rows = _as_stored(kernel, [a for a in kernel.axes if a in left.free and a not in right.free])
        columns = _as_stored(kernel, [a for a in kernel.axes if a in right.free and a not in left.free])
        steps = _steps(p, (left, right))
        site = Site(p.reduce, left, right, steps)
        if together := _together((site,), rows):
            rows = together
        if not rows and not _along(kernel, right, columns[-1:]):  # they have better vectors along something else
            continue
        for k in range(len(columns)):
            if (found := image(right, columns[k:], steps)) is not None and numel(columns[k:]) >= 16:
                yield Tiled((site,), tuple(rows), tuple(columns[k:]), found)
                break


def _along(kernel: l.Kernel, factor: Node, axes: Sequence[Any]) -> bool:
    """Whether memory runs along an axis, where a factor is read and where results are stored."""
    one, offsets = load(factor), [flatten(s.index, s.buffer.type.element_strides) for s in kernel.stores]
    near = [one is not None and stride(one, a) in NEAR and all(coefficient(o, a) == 1 for o in offsets) for a in axes]
    return bool(near) and all(near)


def _as_stored(kernel: l.Kernel, axes: Sequence[Any]) -> list[Any]:
    """Axes in the order in which results lie."""
    offsets = [flatten(s.index, s.buffer.type.element_strides) for s in kernel.stores]

    def along(a: Any) -> int:
        return max((abs(c) for o in offsets if isinstance(c := coefficient(o, a), int)), default=0)

    return sorted(axes, key=lambda a: -along(a))


def _as_read(factors: Sequence[Node], axes: Sequence[Any]) -> list[Any] | None:
    """Axes in the order in which what all of the factors are of lies; None where they are of nothing such."""
    loads = {load(f) for f in factors}
    (one,) = loads if len(loads) == 1 else (None,)
    strides = {a: stride(one, a) for a in axes} if one is not None else {}
    if not strides or not all(strides.values()):
        return None
    return sorted(axes, key=lambda a: -abs(strides[a]))  # type: ignore[arg-type]


def _together(made: Sequence[Site], rows: Sequence[Any]) -> list[Any] | None:
    """The last rows, in their order, that all first factors have one behind the other, if they are enough or all."""
    for k in range(len(rows)):
        few = numel(rows[k:]) < ENOUGH and k > 0
        if not few and all(direct(site, rows[k:]) for site in made):
            return [*rows[k:]]
    return None


ENOUGH = 24
"""Rows of a block that are as good as more of them that have to be written first."""


def _steps(p: Contraction, pair: tuple[Node, Node]) -> tuple[Any, ...]:
    """The axes of a sum in the order in which its factors are read with the fewest steps from one place to another."""
    axes = p.reduce.axes
    orders = [tuple(axes)]
    for f in pair:
        one = load(f)
        strides = {a: stride(one, a) for a in axes} if one is not None else {}
        if strides and all(strides.values()):
            orders.append(tuple(sorted(axes, key=lambda a: -abs(strides[a]))))  # type: ignore[arg-type]
    return min(orders, key=lambda order: sum(_reading(f, order) for f in pair))


def _reading(f: Node, order: Sequence[Any]) -> float:
    """What reading a factor along these axes costs, for all of its elements."""
    one, size = load(f), numel([a for a in f.free if isinstance(a, Var)]) * numel(order)
    if one is None or price(f) > CHEAP:
        return 0.0  # it is computed, in whatever order
    free = [a for a in one.free if isinstance(a, Var) and stride(one, a) == 1 and extent(a) > 1]
    if free or (plain(one) and flat(one, order) is not None):
        return 0.0
    last = order[-1]
    return float(size * (1 + 8 / float(last.extent) if stride(one, last) == 1 else 4))


def _price(kernel: l.Kernel, way: Tiled) -> float:
    """What a way of tiling costs, in vectors of 16 multiply-adds."""
    m, count = numel(way.rows), way.count
    around = numel([a for a in kernel.axes if a not in way.rows and a not in way.columns])
    work = 0.0
    for site in way.sites:
        k = depth(site)
        slow = 1 if m >= TILE else 1.5 if m >= 4 or way.image else 4
        work += m * slow * -(-count // 32) * 2 * k
        panels = 1 if kept(site, way) else -(-m // ROWS)
        if way.image:
            work += way.image.size * FILLING + (0.0 if m <= FEW else panels * count * k * COPYING)
        else:
            work += panels * count * k * _packing(site.right, site.steps, way.columns)
        if read_across(site, way.rows):
            work += -(-count // COLUMNS) * m * k * 0.25
        elif direct(site, way.rows) is None:
            along, groups = site.steps, 1
            if not whole(site, way):
                along, groups = (way.rows if by_rows(site, way) else along), -(-count // COLUMNS)
            work += groups * m * k * _packing(site.left, site.steps, along)
    offsets = [flatten(s.index, s.buffer.type.element_strides) for s in kernel.stores]
    contiguous = all(coefficient(o, way.columns[-1]) == 1 for o in offsets)
    return float(around * (work + m * count * len(offsets) * (0.1 if contiguous else 1.0)))


def _packing(x: Node, steps: Sequence[Any], along: Sequence[Any]) -> float:
    """What writing an element of a factor costs, in runs along the last of some axes."""
    one = load(x)
    if one is None:
        return 1.0
    by, far = stride(one, along[-1]), float(along[-1].extent)
    if plain(one) and flat(one, along) == 1 and flat(one, steps) is not None:
        return 0.25  # lines of a panel, copied
    if by == 1:
        return 0.15 + RUN * (1 / 32 + (1 / far if len(along) > 1 else 0))
    return 0.3 if plain(one) and flat(one, steps) == 1 else 0.5 + 1 / far if by == 2 else 1.5


def load(x: Node) -> l.Load | None:
    """What a factor is of: the one load of which it is made."""
    found = [y for y in topological([x]) if isinstance(y, l.Load)]
    return found[0] if len(found) == 1 else None


def price(x: Node) -> float:
    """What computing a factor costs, conversions aside."""
    return sum(y.fn.cost for y in topological([x]) if isinstance(y, l.Apply) and not is_cast(y.fn))


def plain(x: Any) -> bool:
    """Whether a load is one at every place, and data does not say where."""
    return isinstance(x, l.Load) and not x.inside and not _gathers(x)


def kept(site: Site, way: Tiled) -> bool:
    """Whether the panels of all columns are written once, since many blocks of rows read them."""
    size = numel([a for a in site.right.free if isinstance(a, Var)]) * depth(site)
    block = PACKED if packed(site, way) else ROWS
    return way.image is None and numel(way.rows) > 2 * block and 0 < size <= LARGEST


def packed(site: Site, way: Tiled) -> bool:
    """Whether a block of the first factor's rows is written before it is multiplied."""
    if direct(site, way.rows) is None:
        return not whole(site, way)
    return way.image is None and read_across(site, way.rows)


def whole(site: Site, way: Tiled) -> bool:
    """Whether all rows are written once: what is computed, and what is small."""
    one = load(site.left)
    size = numel([a for a in site.left.free if isinstance(a, Var)]) * depth(site)
    windows = one is not None and size >= 2 * _size(one.buffer)
    if price(site.left) > CHEAP and numel(way.columns) > COLUMNS // 2:
        return True
    return size <= LARGEST and not windows and not by_rows(site, way)


def by_rows(site: Site, way: Tiled) -> bool:
    """Whether the first factor lies along its rows in memory, and not along its steps."""
    one = load(site.left)
    if one is None or not way.rows:
        return False
    return stride(one, way.rows[-1]) == 1 and stride(one, site.steps[-1]) != 1


def direct(site: Site, rows: Sequence[Any]) -> tuple[l.Load, IntExpr, IntExpr] | None:
    """The first factor as (load, stride along rows, stride along k), where it can be read in place."""
    one = site.left
    if not plain(one):
        return None
    assert isinstance(one, l.Load)
    along_m, along_k = flat(one, rows), flat(one, site.steps)
    return (one, along_m, along_k) if along_m is not None and along_k is not None else None


def read_across(site: Site, rows: Sequence[Any]) -> bool:
    """Whether a first factor that could be read in place lies along its rows, and its steps so far apart that few of
    them have places in the first-level cache beside each other, and each has a page of its own.
    """
    in_place = direct(site, rows)
    return in_place is not None and in_place[1] == 1 and isinstance(in_place[2], int) and in_place[2] >= PAGE


def flat(one: l.Load, axes: Sequence[Any]) -> IntExpr | None:
    """The stride of the flattened axes, where they lie one behind the other in memory."""
    offset = flatten(one.index, one.buffer.type.element_strides)
    longer = [a for a in axes if a.extent != 1]
    by: IntExpr | None = None
    for a in reversed(longer):
        own = coefficient(offset, a)
        if own is None or (by is not None and own != by):
            return None
        by = own * a.extent
    return coefficient(offset, longer[-1]) if longer else 0


def _gathers(one: l.Load) -> bool:
    return any(isinstance(x, Loaded) for x in topological([e for e in one.index if isinstance(e, Expr)]))


def depth(site: Site) -> int:
    """How many products are added up."""
    return numel(site.steps)


def extent(axis: Var) -> int:
    """The extent of an axis, which is known here."""
    assert isinstance(axis.extent, int)
    return axis.extent


def numel(axes: Sequence[Any]) -> int:
    return math.prod(int(a.extent) for a in axes)


def _size(b: l.Buffer) -> int:
    return math.prod(b.type.static_shape)
