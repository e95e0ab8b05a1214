"""Kernels up to where in memory they begin to read: what one takes is what all take that read elsewhere.

Every step of an unrolled net, and every chunk of a sequence, reads what belongs to it, at another number in an index.
These are kernels of their own until they read windows (`rules/loop/memory/places_read.py`), long after it was asked
what each of them takes. The form of a kernel without places reads at the beginning of its buffers, as far as lines of
memory begin there as they did.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from terrazzo.ir.canonical import canonical, sorted_by_names
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr, bounds, terms_of
from terrazzo.ir.node import Node, per_node, transformed

LINE = 128
"""Bytes: what begins at a multiple of them begins at a multiple of all that instructions and boxes ask for."""


@per_node
def placeless(kernel: l.Kernel) -> l.Kernel:
    """The canonical form of a kernel (`ir/canonical.py`), without places."""
    return placeless_together((canonical(kernel).kernel,))[0]


def placeless_together(kernels: Sequence[l.Kernel]) -> tuple[l.Kernel, ...]:
    """Several kernels without places. What one of them writes others read where it is."""
    back = {b: tuple(-n for n in place) for b, place in _begins(kernels).items()}
    return tuple(moved(s, back) for s in kernels)


@per_node
def begins(kernel: l.Kernel) -> Mapping[l.Buffer, tuple[int, ...]]:
    """Where a kernel begins to read, in those buffers in which this is not the beginning; nowhere else where names have
    a say in what is where.
    """
    return {} if sorted_by_names(kernel) else _begins((kernel,))


def moved(kernel: l.Kernel, by: Mapping[l.Buffer, Sequence[int]]) -> l.Kernel:
    """A kernel that reads so many elements further on in some buffers."""

    def visit(x: Node) -> Node:
        if not isinstance(x, l.Load) or x.buffer not in by:
            return x
        return l.Load(x.buffer, tuple(e + n for e, n in zip(x.index, by[x.buffer], strict=True)), x.inside)

    return l.Kernel(kernel.name, kernel.axes, transformed(kernel.stores, visit), kernel.source) if by else kernel


def _begins(kernels: Sequence[l.Kernel]) -> dict[l.Buffer, tuple[int, ...]]:
    """Where kernels begin to read in those buffers in which this is not the beginning: in whole lines of memory."""
    written = {b for s in kernels for b in s.writes}
    found: dict[l.Buffer, list[int] | None] = {}
    for x in (x for s in kernels for x in s.terms if isinstance(x, l.Load)):
        known = found.get(x.buffer, [])
        if known is None or x.buffer in written or x.inside:
            found[x.buffer] = None  # where its guards hold depends on its places
            continue
        lows = list(map(_low, x.index))
        found[x.buffer] = list(map(min, known, lows)) if known else lows
    whole = {b: _in_lines(b, lows) for b, lows in found.items() if lows and any(lows)}
    return {b: lows for b, lows in whole.items() if any(lows)}


def _low(e: IntExpr) -> int:
    """The constant of an index, or what it is at least if that is less: never less than 0."""
    constant = terms_of(e).get((), 0)
    if constant <= 0:
        return 0
    least = bounds(e)[0] if isinstance(e, Expr) else constant
    return max(min(constant, least), 0) if isinstance(least, int) else 0


def _in_lines(b: l.Buffer, lows: Sequence[int]) -> tuple[int, ...]:
    """As many of so many elements along each dimension as are whole lines of memory."""
    steps = [s * b.type.dtype.size if isinstance(s, int) else 0 for s in b.type.element_strides]
    lines = [LINE // math.gcd(LINE, step) if step else 0 for step in steps]
    return tuple(low // n * n if n else 0 for low, n in zip(lows, lines, strict=True))
