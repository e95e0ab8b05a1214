"""What a kernel is made of, found once and used by all who choose, price and derive."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from terrazzo.collector import remembered
from terrazzo.ir import nest
from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.canonical import canonical, nameless
from terrazzo.ir.contraction import Contraction, contraction, nested_contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Loaded, bounds
from terrazzo.ir.node import Node, per_node, topological
from terrazzo.ir.rescues import rescues


@dataclass(frozen=True)
class Sites:
    """What a kernel computes, and where: its reductions and scans in the order and by the names that its nest has them,
    and which of them are sums of products. Those that are rarely wanted (`ir/rescues.py`) are not among them.
    """

    kernel: l.Kernel
    carried: Mapping[str, l.Reduce | l.Scan]
    contractions: Mapping[str, Contraction]

    @property
    def multiplies(self) -> bool:
        """Whether it sums products and does nothing else that goes from point to point."""
        return bool(self.contractions) and len(self.contractions) == len(self.carried)

    @cached_property
    def around(self) -> tuple[Any, ...]:
        """The axes of reductions around its sums of products, outermost first; none where a sum of products is among
        them: its steps go along its axes.
        """
        sums = {c.reduce for c in self.contractions.values()}
        outer = [r for r in self.carried.values() if r not in sums and not sums.isdisjoint(topological([r]))]
        found = [r for r in outer if isinstance(r, l.Reduce) and not nested_contraction(r)]
        return tuple(dict.fromkeys(a for r in found for a in r.axes)) if len(found) == len(outer) else ()

    @property
    def everywhere(self) -> bool:
        """Whether it stores at every point of its axes."""
        axes = frozenset(self.kernel.axes)
        return all(s.free & axes == axes for s in self.kernel.stores)

    @property
    def placed(self) -> bool:
        """Whether where factors are read depends on data, or a factor on its place."""
        every = [x for c in self.contractions.values() for x in c.operands]
        return any(isinstance(x, Loaded | l.Index) for x in topological(every))

    @property
    def looked_up(self) -> bool:
        """Whether where factors are read depends on data."""
        every = [x for c in self.contractions.values() for x in c.operands]
        return any(isinstance(x, Loaded) for x in topological(every))

    @property
    def one_chain(self) -> bool:
        """Whether its loops are in one another, beside reductions that hold no others."""
        return _chain(nest.nest(self.kernel), beside=True)

    @property
    def innermost(self) -> bool:
        """Whether they are, with reductions in the innermost one only."""
        return _chain(nest.nest(self.kernel), beside=False)

    def sides(self, row: Any, column: Any) -> list[tuple[Node, Node]] | None:
        """The factors of all sums of products, those of the row first; None where one knows the other's axis too, or
        not its own.
        """
        every = [c.factors for c in self.contractions.values()]
        pairs = [(a, b) if row in a.free else (b, a) for a, b in every]
        fits = all(row in a.free - b.free and column in b.free - a.free for a, b in pairs)
        return pairs if fits and row is not column else None


@remembered
def sites(kernel: l.Kernel) -> Sites:
    """Of a kernel."""
    rare = rescues(kernel)
    carried = {name: r for name, r in nest.accumulators(kernel).items() if r not in rare}
    found = {name: contraction(r) if isinstance(r, l.Reduce) else None for name, r in carried.items()}
    return Sites(kernel, carried, {name: c for name, c in found.items() if c})


@dataclass(frozen=True, eq=False)
class Product:
    """A kernel that is one tile of contractions and what follows them. `m` only the first factors know, `n` only the
    second. There is one of each kernel.
    """

    kernel: l.Kernel
    names: tuple[str, ...]
    sites: tuple[Contraction, ...]
    m: Any
    n: Any

    @cached_property
    def nameless(self) -> Product:
        """The product that differs from this one in names only, and is the same for all that do. Axes are the same."""
        found = product(nameless(self.kernel))
        assert found is not None
        return found

    @cached_property
    def batch(self) -> list[Any]:
        return [a for a in self.kernel.axes if a is not self.m and a is not self.n]

    @property
    def axes(self) -> tuple[Any, ...]:
        return self.sites[0].reduce.axes

    @property
    def rescued(self) -> bool:
        """Whether other sums stand in the place of its own where these will not do."""
        return bool(rescues(self.kernel))

    @cached_property
    def operands(self) -> tuple[Node, ...]:
        return tuple(dict.fromkeys(x for c in self.sites for x in c.operands))

    @cached_property
    def sources(self) -> tuple[l.Load, ...]:
        """What of its operands lies in memory, each once: an operand, or what one is made of."""
        return tuple(dict.fromkeys(y for x in self.operands if (y := made_of(x)) is not None))

    def touched(self, operand: Node) -> int:
        """Elements of an operand that are read, each once, however many of the axes it misses."""
        axes = dict.fromkeys((*self.kernel.axes, self.n, *self.axes))
        found: int = math.prod(a.extent for a in axes if a in operand.free)
        return found

    def factors(self, c: Contraction) -> tuple[Node, Node]:
        """The factor of m, that of n."""
        a, b = c.factors
        return (a, b) if self.m in a.free else (b, a)


def product(kernel: l.Kernel) -> Product | None:
    """The kernel as a product, or None: all its reductions are contractions over the same axes, in the innermost of its
    loops.
    """
    found = _product(kernel)
    return found if isinstance(found, Product) else None


def is_product(kernel: l.Kernel) -> bool:
    """Whether a kernel is a product, asked once of all that differ in names only."""
    return product(canonical(kernel).kernel) is not None


def no_product(kernel: l.Kernel) -> str:
    """Why a kernel is no product; nothing where it is one, or where nothing in it is a sum of products."""
    found = _product(kernel)
    return found if isinstance(found, str) else ""


@remembered
def _product(kernel: l.Kernel) -> Product | str:
    """A kernel as a product, or why it is none."""
    found = sites(kernel)
    products = tuple(found.contractions.values())
    if not products:
        return ""
    if other := next((name for name in found.carried if name not in found.contractions), ""):
        return f"{other}, beside a sum of products, is none"
    if any(c.reduce.axes != products[0].reduce.axes for c in products):
        return "its sums of products are over different axes"
    if not found.innermost:
        return "its sums of products are not in the innermost of its loops"
    extents = [a.extent for a in (*kernel.axes, *products[0].reduce.axes)]
    if not all(isinstance(e, int) and e > 0 for e in extents):
        return "an axis is empty, or its extent is not known"
    if found.looked_up:
        return "where a factor is read depends on data"
    if not found.everywhere:
        return "a store is not at every point of its axes"
    best: Product | None = None
    for column in kernel.axes:
        for row in kernel.axes:
            if found.sides(row, column):
                along = all(
                    coefficient(flatten(s.index, s.buffer.type.element_strides), column) == 1 for s in kernel.stores
                )
                score = (row.extent * column.extent, along)
                if best is None or score > (best.m.extent * best.n.extent, _along(best)):
                    best = Product(kernel, tuple(found.contractions), products, row, column)
    if best is None or best.m.extent < 2 or best.n.extent < 2:
        return "one of its factors is a vector: there are no two axes of which each is in one factor alone"
    if (depth := math.prod(a.extent for a in best.axes)) < 8:
        return f"it sums {depth} products only"
    return best


@remembered
def reduced_product(kernel: l.Kernel) -> Product | None:
    """A kernel as a product whose results are reduced along its columns, and not stored; None where it is none."""
    found = sites(kernel)
    sums = tuple(found.contractions.values())
    if len(found.around) != 1 or len({c.reduce.axes for c in sums}) > 1 or found.looked_up or not found.everywhere:
        return None
    (column,) = found.around
    inner = {c.reduce for c in sums}
    others = [r for r in found.carried.values() if r not in inner]
    if any(r.axes != (column,) or inner.isdisjoint(topological([r])) for r in others):  # type: ignore[union-attr]
        return None
    extents = [a.extent for a in (*kernel.axes, column, *sums[0].reduce.axes)]
    rows: list[Any] = [a for a in kernel.axes if found.sides(a, column)]
    if not rows or not all(isinstance(e, int) and e > 0 for e in extents):
        return None
    return Product(kernel, tuple(found.contractions), sums, max(rows, key=lambda a: a.extent), column)


def _along(p: Product) -> bool:
    return all(coefficient(flatten(s.index, s.buffer.type.element_strides), p.n) == 1 for s in p.kernel.stores)


def _chain(body: Sequence[nest.Statement], beside: bool) -> bool:
    """True for loops in one another, with reductions in the innermost only, or `beside` them too."""
    loops = [s for s in body if isinstance(s, nest.Loop)]
    free = [s for s in loops if s.kind == "free"]
    others = [s for s in loops if s.kind != "free"]
    if len(free) > 1 or (free and others and not beside):
        return False
    if any(s.kind != "reduce" or any(isinstance(x, nest.Loop) for x in s.body) for s in others):
        return False
    return all(_chain(s.body, beside) for s in free)


def loads(term: Node) -> list[l.Load]:
    """What a term reads."""
    return [*_read_below(term), *([term] if isinstance(term, l.Load) else [])]


@per_node
def _read_below(term: Node) -> tuple[l.Load, ...]:
    return tuple(x for x in topological(term.children) if isinstance(x, l.Load))


@per_node
def made_of(term: Node) -> l.Load | None:
    """The load that a term is made of, point by point: of several the one that reads most. None where it reads
    nothing.
    """
    return max(loads(term), key=read, default=None)


BESIDE = 4
"""How many times as much as from each other tensor that a factor is made of, scales perhaps, is read at least from the
one that it is made of point by point.
"""


def not_made(x: Node) -> str:
    """Why a factor is not made on its way to instructions of warpgroups; nothing where it is: of one tensor, point by
    point, and of few numbers beside it.
    """
    if (source := made_of(x)) is None or source.free != x.free:
        return f"{called(x)} is computed on its way, and TMA brings what lies in memory"
    if not alone(x) or any(y is not source and y.buffer is source.buffer for y in loads(x)):
        return f"{called(x)} is computed of several tensors, and TMA brings one that a factor is made of"
    if any(isinstance(y, Loaded) for y in topological([x])):
        return f"{called(x)} is read where data says"
    return ""


def alone(x: Node) -> bool:
    """Whether a factor is made of one tensor, and of few numbers beside it."""
    source = made_of(x)
    return source is not None and all(
        BESIDE * read(y) <= read(source) for y in loads(x) if y.buffer is not source.buffer
    )


def read(load: l.Load) -> int:
    """How many elements a load reads at most: each once, however many axes its place follows from. A dimension of
    which nothing is known counts as one element.
    """
    sides = [bounds(e) for e in load.index]
    return math.prod((high or 0) - (low or 0) + 1 for low, high in sides)


def called(term: Node) -> str:
    """What schedules call an operand: the buffer that it is made of."""
    found = made_of(term)
    return found.buffer.name if found is not None else "slab"
