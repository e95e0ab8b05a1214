"""What a kernel is made of, found once and used by all who choose, price and derive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from terrazzo.ir import nest
from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.contraction import Contraction, contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Loaded
from terrazzo.ir.node import Node, topological


@dataclass(frozen=True)
class Product:
    """A kernel that is one tile of contractions and what follows them. `m` only the first factors know, `n` only the
    second.
    """

    kernel: l.Kernel
    names: tuple[str, ...]
    sites: tuple[Contraction, ...]
    m: Any
    n: Any

    @property
    def batch(self) -> list[Any]:
        return [a for a in self.kernel.axes if a is not self.m and a is not self.n]

    @property
    def axes(self) -> tuple[Any, ...]:
        return self.sites[0].reduce.axes

    @property
    def operands(self) -> list[Node]:
        return list(dict.fromkeys(x for c in self.sites for x in c.operands))

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


def no_product(kernel: l.Kernel) -> str:
    """Why a kernel is no product; nothing where it is one, or where nothing in it is a sum of products."""
    found = _product(kernel)
    return found if isinstance(found, str) else ""


@lru_cache(maxsize=1024)
def _product(kernel: l.Kernel) -> Product | str:
    """A kernel as a product, or why it is none."""
    found = nest.accumulators(kernel)
    sites = {name: contraction(r) if isinstance(r, l.Reduce) else None for name, r in found.items()}
    products = tuple(c for c in sites.values() if c)
    if not products:
        return ""
    if other := next((name for name, c in sites.items() if c is None), ""):
        return f"{other}, beside a sum of products, is none"
    if any(c.reduce.axes != products[0].reduce.axes for c in products):
        return "its sums of products are over different axes"
    if not _chain(nest.nest(kernel)):
        return "its sums of products are not in the innermost of its loops"
    extents = [a.extent for a in (*kernel.axes, *products[0].reduce.axes)]
    if not all(isinstance(e, int) and e > 0 for e in extents):
        return "an axis is empty, or its extent is not known"
    if any(isinstance(x, Loaded | l.Index) for c in products for x in topological(c.operands)):
        return "where a factor is read depends on data, or a factor on its place"
    axes = frozenset(kernel.axes)
    if any(s.free & axes != axes for s in kernel.stores):
        return "a store is not at every point of its axes"
    best: Product | None = None
    for column in kernel.axes:
        for row in kernel.axes:
            pairs = [c.factors if row in c.factors[0].free else c.factors[::-1] for c in products]
            if row is not column and all(
                row in a.free and row not in b.free and column in b.free and column not in a.free for a, b in pairs
            ):
                along = all(
                    coefficient(flatten(s.index, s.buffer.type.element_strides), column) == 1 for s in kernel.stores
                )
                score = (row.extent * column.extent, along)
                if best is None or score > (best.m.extent * best.n.extent, _along(best)):
                    best = Product(kernel, tuple(found), products, row, column)
    if best is None or best.m.extent < 2 or best.n.extent < 2:
        return "one of its factors is a vector: there are no two axes of which each is in one factor alone"
    if (depth := math.prod(a.extent for a in best.axes)) < 8:
        return f"it sums {depth} products only"
    return best


def _along(p: Product) -> bool:
    return all(coefficient(flatten(s.index, s.buffer.type.element_strides), p.n) == 1 for s in p.kernel.stores)


def _chain(body: Sequence[nest.Statement]) -> bool:
    """True for loops in one another, with reductions in the innermost only."""
    for s in body:
        if isinstance(s, nest.Loop) and s.kind == "free":
            if any(isinstance(x, nest.Loop) for x in body if x is not s):
                return False
            return _chain(s.body)
        if isinstance(s, nest.Loop) and (s.kind != "reduce" or any(isinstance(x, nest.Loop) for x in s.body)):
            return False
    return True


def loads(term: Node) -> list[l.Load]:
    """What a term reads."""
    return [x for x in topological([term]) if isinstance(x, l.Load)]


def called(term: Node) -> str:
    """What schedules call an operand: the first buffer it reads."""
    found = loads(term)
    return found[0].buffer.name if found else "slab"
