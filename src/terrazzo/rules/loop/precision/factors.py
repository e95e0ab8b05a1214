"""The factors of products in float32: where they lie, which of them are made on their way, and their products as those
of parts.
"""

from __future__ import annotations

import math
from typing import Any

from terrazzo.collector import remembered
from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.contraction import Contraction, nested_contraction, operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.loop import apply
from terrazzo.ir.expr import Bound, Var
from terrazzo.ir.nest import accumulators
from terrazzo.ir.node import Node, substitute, substituted, topological
from terrazzo.ir.sites import product
from terrazzo.ir.types import f32
from terrazzo.rules.loop.precision.number_parts import pairs, small_parts, total
from terrazzo.rules.loop_to_tile.chains.chain import Chain
from terrazzo.rules.loop_to_tile.products.packed import across_channels, dimension
from terrazzo.rules.loop_to_tile.walked.threads import step
from terrazzo.rules.moves import meeting


@remembered
def multiplied(
    kernel: l.Kernel,
    products: tuple[Contraction, ...],
    read: tuple[tuple[Node, tuple[Node | None, ...]], ...],
    count: int,
    scale: float,
) -> l.Kernel:
    """A kernel whose products are those of the parts that are `read` for their operands; factors that are made of what
    was summed inside are made into parts there.
    """
    known, new = dict(read), dict[Any, Any]()
    for c in products:
        axes, _ = l.open_binder(c.reduce)
        own: dict[Any, Any] = dict(zip(c.reduce.axes, axes, strict=True))
        every = map(operand, c.factors)
        a, b = (small_parts(substitute(x, new), count) if made_inside(x) else known[x] for x in every)
        there = [(i + j, x, y) for i, j in pairs(count) if (x := a[i]) is not None and (y := b[j]) is not None]
        terms = [(rank, apply("mul", *(apply("f32", substitute(p, own)) for p in (x, y)))) for rank, x, y in there]
        new[c.reduce] = l.Reduce.make(c.reduce.monoid, axes, (total(terms, scale),))
    stores = substituted(kernel.stores, new)
    return l.Kernel(kernel.name, kernel.axes, stores, kernel.source)


def sums_outside(c: Chain) -> list[Contraction]:
    """The sums outside of a chain."""
    every = accumulators(c.kernel)
    found = [nested_contraction(every[name]) for name, _ in c.outside]
    return [x for x in found if x is not None]


def summed(x: Node) -> Contraction | None:
    return nested_contraction(x) if isinstance(x, l.Reduce) else None


def made_inside(x: Node) -> bool:
    """Whether a factor is made of what was summed inside."""
    return any(isinstance(y, l.Reduce) for y in topological([x]))


def sides(kernel: l.Kernel) -> list[frozenset[Node]]:
    """The operands of either side of a product, the larger ones first: their parts may be made on their way."""
    if (p := product(kernel)) is None:
        return []
    sides = [frozenset(operand(p.factors(c)[n]) for c in p.sites) for n in range(2)]
    sides = [side for side in sides if all(x.dtype is f32 for x in side)]  # type: ignore[attr-defined]
    return sorted(sides, key=lambda side: -sum(map(p.touched, side)))


def along_sums(kernel: l.Kernel) -> dict[l.Buffer, int]:
    """Of a product one of whose factors is an image, the dimensions that its operands are to lie along: that of the
    longest axis that both are summed over. Nothing where they do.
    """
    p = product(kernel)
    if p is None or len(p.sites) != 1 or len(kernel.axes) < 3:
        return {}
    loads = [x for x in p.operands if isinstance(x, l.Load)]
    shared = [a for a in p.axes if all(dimension(x, a) is not None for x in loads)]
    if len(loads) < len(p.operands) or not shared:
        return {}
    depth = max(shared, key=lambda a: a.extent)
    along = {x.buffer: dimension(x, depth) for x in loads if step(x, depth) != 1}
    return {b: d for b, d in along.items() if d is not None}


def along_channels(kernel: l.Kernel) -> dict[l.Buffer, int]:
    """Of a sum over points under taps (`taps.found`), the dimensions that its operands are to lie along: of each the
    longest axis that the other does not know. Nothing where they do.
    """
    p = product(kernel)
    loads = [x for x in p.operands if isinstance(x, l.Load)] if p else []
    if p is None or len(loads) < len(p.operands) or len(p.axes) < 2 or len(kernel.axes) < 3:
        return {}
    results, summed = meeting(loads, kernel.axes, p.axes)
    if results > summed:  # a convolution, whose results are points
        return {}
    return {x.buffer: d for x, d in across_channels(kernel).items()}


def is_window(x: Node) -> bool:
    """Whether an operand is a smaller part of its buffer, every element of which is there."""
    if not isinstance(x, l.Load) or x.inside:
        return False
    return points_of(x) < math.prod(x.buffer.type.static_shape)


def points_of(x: Any) -> int:
    """How many elements a load reads."""
    return math.prod(a.extent for a in x.free if isinstance(a, Var | Bound))  # type: ignore[misc]


def is_rearranged(x: Node) -> bool:
    """Whether an axis of a product goes through memory in no even steps, as heads do in gradients that are stacked:
    where that is no box of memory, parts of the buffer would not be either.
    """
    if not isinstance(x, l.Load) or x.inside:
        return False
    place = flatten(x.index, x.buffer.type.element_strides)
    return any(coefficient(place, a) is None for a in x.free if isinstance(a, Var | Bound))
