"""A product of a product, found in a kernel's terms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from terrazzo.ir.contraction import contraction, nested_contraction, operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.nest import accumulators
from terrazzo.ir.node import Node, topological

WHOLE = 16
"""Heads of 40 or 72 are made whole to a multiple of what an instruction takes at once."""


@dataclass(frozen=True)
class Chain:
    """sum over `steps` of f(sum over `depth` of a * b) * c: `rows` only a knows, `columns` only c. f may have further
    such sums `beside` the first, each with its own a and b, over the same axes. There may be `others` of such f and c,
    which share sums inside.
    """

    kernel: l.Kernel
    inner: str
    outer: str
    rows: Any
    columns: Any
    steps: Any
    depth: Any
    operands: tuple[Node, Node, Node]
    beside: tuple[tuple[str, Node, Node], ...] = ()
    others: tuple[tuple[str, Node], ...] = ()

    @property
    def sums(self) -> tuple[str, ...]:
        """The sums inside, by name."""
        return (self.inner, *(name for name, *_ in self.beside))

    @property
    def outside(self) -> tuple[tuple[str, Node], ...]:
        """The sums outside, by name, each with its c."""
        return ((self.outer, self.operands[2]), *self.others)

    @property
    def width(self) -> int:
        """Columns as instructions take them: what lies beyond is brought in as zeros, and not stored."""
        return -(-int(self.columns.extent) // WHOLE) * WHOLE

    @property
    def deep(self) -> int:
        """What the sums inside go along, as instructions take it."""
        return -(-int(self.depth.extent) // WHOLE) * WHOLE

    @property
    def inside(self) -> tuple[Node, ...]:
        """What the sums inside multiply, each once."""
        return tuple(dict.fromkeys((*self.operands[:2], *(x for _, *pair in self.beside for x in pair))))


def chain(kernel: l.Kernel) -> Chain | None:
    """The kernel as a chain of products, or None."""
    found = list({outer: x for x in _nested(kernel) if (outer := x[1])}.values())
    if not found:
        return None
    inner = list(dict.fromkeys(x for sums, *_ in found for x in sums))
    (name, a, b, depth), *more = inner
    (_, outer, steps, c), *rest = found
    if any(d is not depth for *_, d in more) or any(x is not steps for *_, x, _ in rest):
        return None
    others = tuple((other, x) for _, other, _, x in rest)
    outside = (c, *(x for _, x in others))
    first, last = (a, *(x for _, x, *_ in more)), (b, *(x for *_, x, _ in more))
    rows = [x for x in kernel.axes if _in_each(x, first) and not _in_any(x, (*last, *outside))]
    columns = [x for x in kernel.axes if _in_each(x, outside) and not _in_any(x, (*first, *last))]
    if not rows or not columns:
        return None
    beside = tuple((other, x, y) for other, x, y, _ in more)
    return Chain(kernel, name, outer, rows[-1], columns[-1], steps, depth, (a, b, c), beside, others)


def _in_each(axis: Any, terms: tuple[Node, ...]) -> bool:
    return all(axis in x.free for x in terms)


def _in_any(axis: Any, terms: tuple[Node, ...]) -> bool:
    return any(axis in x.free for x in terms)


Nested = tuple[str, str, Any, Any, tuple[Node, Node, Node]]
"""The sums inside and outside by name, what they sum over (the outer one's is first), and the operands."""


def nested(kernel: l.Kernel) -> Iterator[Nested]:
    """The products of which one is a factor of the other, each over one axis."""
    for inner, outer, steps, c in _nested(kernel):
        if len(inner) == 1:
            ((name, a, b, depth),) = inner
            yield name, outer, steps, depth, (a, b, c)


Inner = tuple[str, Node, Node, Any]
"""A sum by name, its operands, of which the second knows the steps of the sum around it, and what it sums over."""


def _nested(kernel: l.Kernel) -> Iterator[tuple[list[Inner], str, Any, Node]]:
    """The products that have products in a factor: these, the outer one by name, its axis, and its other factor."""
    names = {r: name for name, r in accumulators(kernel).items() if isinstance(r, l.Reduce)}
    for r, name in names.items():
        outer = nested_contraction(r)
        if not r.free >= frozenset(
            kernel.axes
        ):  # it would be computed again at every point of an axis it does not know
            continue
        if outer is None or len(r.axes) != 1 or len(outer.terms) > 1 or contraction(r) is not None:
            continue
        (steps,) = r.axes
        for f, g in (outer.factors, outer.factors[::-1]):
            found = [contraction(x) for x in topological([f]) if isinstance(x, l.Reduce)]
            inner = [c for c in found if c and c.reduce in names and steps in c.reduce.free]
            inner = [c for c in inner if len(c.reduce.axes) == len(c.terms) == 1]
            pairs = [c.factors if steps in c.factors[1].free else c.factors[::-1] for c in inner]
            if inner:
                each = zip(inner, pairs, strict=True)
                sums = [(names[c.reduce], operand(a), operand(b), c.reduce.axes[0]) for c, (a, b) in each]
                yield sums, name, steps, operand(g)
