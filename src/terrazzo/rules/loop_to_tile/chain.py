"""A product of a product, found in a kernel's terms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from terrazzo.ir.contraction import contraction, nested_contraction, operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.nest import accumulators
from terrazzo.ir.node import Node, topological


@dataclass(frozen=True)
class Chain:
    """sum over `steps` of f(sum over `depth` of a * b) * c: `rows` only a knows, `columns` only c."""

    kernel: l.Kernel
    inner: str
    outer: str
    rows: Any
    columns: Any
    steps: Any
    depth: Any
    operands: tuple[Node, Node, Node]


def chain(kernel: l.Kernel) -> Chain | None:
    """The kernel as a chain of two products, or None."""
    for inner, outer, steps, depth, (a, b, c) in nested(kernel):
        rows = [x for x in kernel.axes if x in a.free and x not in b.free and x not in c.free]
        columns = [x for x in kernel.axes if x in c.free and x not in a.free and x not in b.free]
        if rows and columns:
            return Chain(kernel, inner, outer, rows[-1], columns[-1], steps, depth, (a, b, c))
    return None


Nested = tuple[str, str, Any, Any, tuple[Node, Node, Node]]
"""The sums inside and outside by name, what they sum over (the outer one's is first), and the operands."""


def nested(kernel: l.Kernel) -> Iterator[Nested]:
    """The products of which one is a factor of the other, each over one axis."""
    names = {r: name for name, r in accumulators(kernel).items() if isinstance(r, l.Reduce)}
    for r, name in names.items():
        outer = nested_contraction(r)
        if outer is None or len(r.axes) != 1 or len(outer.terms) > 1 or contraction(r) is not None:
            continue
        (steps,) = r.axes
        for f, g in (outer.factors, outer.factors[::-1]):
            found = [contraction(x) for x in topological([f]) if isinstance(x, l.Reduce)]
            inner = [c for c in found if c and c.reduce in names and steps in c.reduce.free]
            inner = [c for c in inner if len(c.reduce.axes) == len(c.terms) == 1]
            if len(inner) != 1:
                continue
            (c,) = inner
            a, b = c.factors if steps in c.factors[1].free else c.factors[::-1]
            (depth,) = c.reduce.axes
            yield names[c.reduce], name, steps, depth, (operand(a), operand(b), operand(g))
