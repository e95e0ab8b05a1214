"""A product of a product, found in a kernel's terms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from terrazzo.ir.contraction import Contraction, contraction, nested_contraction, operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.nest import accumulators
from terrazzo.ir.node import Node, topological

WHOLE = 16
"""Heads of 40 or 72 are made whole to a multiple of what an instruction takes at once."""


@dataclass(frozen=True)
class Chain:
    """sum over `steps` of f(sum over depth of a * b) * c: `rows` only a knows, `columns` only c. f may have further
    such sums `beside` the first, each with its own a and b, and of `depths` of their own. There may be `others` of such
    f and c, which share sums inside. Sums may have several `terms`, as those of parts of float32: a, b and c are the
    first one's then, and `factors` has all. Sums outside may go over the steps in several `rounds`: those of other
    axes, as heads are that share keys, which a knows nothing of.
    """

    kernel: l.Kernel
    inner: str
    outer: str
    rows: Any
    columns: Any
    steps: Any
    depths: tuple[Any, ...]
    operands: tuple[Node, Node, Node]
    beside: tuple[tuple[str, Node, Node], ...] = ()
    others: tuple[tuple[str, Node], ...] = ()
    factors: tuple[tuple[str, tuple[Node, ...]], ...] = ()
    terms: int = 1
    rounds: tuple[Any, ...] = ()

    @property
    def times(self) -> int:
        """How often a tile goes over the steps."""
        return math.prod(a.extent for a in self.rounds)

    @property
    def sums(self) -> tuple[str, ...]:
        """The sums inside, by name."""
        return (self.inner, *(name for name, *_ in self.beside))

    @property
    def outside(self) -> tuple[tuple[str, Node], ...]:
        """The sums outside, by name, each with its c."""
        return ((self.outer, self.operands[2]), *self.others)

    def read(self, *names: str) -> tuple[Node, ...]:
        """What some sums multiply that lies in memory, each once."""
        return tuple(dict.fromkeys(x for name, found in self.factors if name in names for x in found))

    @property
    def inside(self) -> tuple[Node, ...]:
        """What the sums inside multiply, each once."""
        return self.read(*self.sums)

    @property
    def along(self) -> tuple[Node, ...]:
        """What the sums outside multiply that lies in memory, each once."""
        return self.read(*(name for name, _ in self.outside))

    @property
    def width(self) -> int:
        """Columns as instructions take them: what lies beyond is brought in as zeros, and not stored."""
        return -(-int(self.columns.extent) // WHOLE) * WHOLE

    @property
    def deep(self) -> tuple[int, ...]:
        """What the sums inside go along, as instructions take it."""
        return tuple(-(-int(d.extent) // WHOLE) * WHOLE for d in self.depths)

    def deep_of(self, x: Node) -> int:
        """The same for what a sum inside multiplies."""
        return next(deep for name, deep in zip(self.sums, self.deep, strict=True) if x in self.read(name))

    @property
    def down(self) -> int:
        """Elements of a row of what the sums inside multiply that is held for a tile."""
        return sum(self.deep_of(x) for x in self.inside if self.rows in x.free)

    @property
    def brought(self) -> int:
        """Elements of a step of what the sums inside multiply that comes with it."""
        return sum(self.deep_of(x) for x in self.inside if self.rows not in x.free)


def chain(kernel: l.Kernel) -> Chain | None:
    """The kernel as a chain of products, or None."""
    if len(kernel.carried) < 2:
        return None
    found = list({outer: x for x in _nested(kernel) if (outer := x[1])}.values())
    if not found:
        return None
    inner = list(dict.fromkeys(x for sums, *_ in found for x in sums))
    (name, pairs, _), *more = inner
    (_, outer, (*rounds, steps), along), *rest = found
    if any(x != (*rounds, steps) for *_, x, _ in rest):
        return None
    if len({len(x) for x in (along, *(x for *_, x in rest), *(x for _, x, _ in inner))}) > 1:
        return None
    if any(x.free & {*rounds} and steps not in x.free for x in topological(kernel.stores) if isinstance(x, l.Load)):
        return None  # what is held for a tile is the same in all rounds
    others = tuple((other, x[0]) for _, other, _, x in rest)
    outside = (along[0], *(x for _, x in others))
    if any(isinstance(x, l.Reduce) for x in topological(list(outside))):  # made on the way too
        return None
    first, last = (tuple(x[0][side] for _, x, _ in inner) for side in (0, 1))
    rows = [x for x in kernel.axes if _in_each(x, first) and not _in_any(x, (*last, *outside))]
    columns = [x for x in kernel.axes if _in_each(x, outside) and not _in_any(x, (*first, *last))]
    if not rows or not columns:
        return None
    beside = tuple((other, *x[0]) for other, x, _ in more)
    factors = [(x, tuple(y for pair in found for y in pair)) for x, found, _ in inner]
    factors += [(outer, along), *((x, found) for _, x, _, found in rest)]
    operands = *pairs[0], along[0]
    depths = tuple(d for *_, d in inner)
    sums = name, outer, _longest(rows), columns[-1], steps, depths, operands, beside, others
    return Chain(kernel, *sums, tuple(factors), len(along), tuple(rounds))


def _longest(axes: list[Any]) -> Any:
    """The axis that fills tiles: heads that share keys are rows as tokens are, but few of them, and may come last where
    results lie by token. The last one of several.
    """
    return max(reversed(axes), key=lambda x: x.extent if isinstance(x.extent, int) else 0)


def _in_each(axis: Any, terms: tuple[Node, ...]) -> bool:
    return all(axis in x.free for x in terms)


def _in_any(axis: Any, terms: tuple[Node, ...]) -> bool:
    return any(axis in x.free for x in terms)


Nested = tuple[str, str, Any, Any, tuple[Node, Node, Node]]
"""The sums inside and outside by name, what they sum over (the outer one's is first), and the operands."""


def nested(kernel: l.Kernel) -> Iterator[Nested]:
    """The products of which one is a factor of the other, each over one axis."""
    for inner, outer, steps, along in _nested(kernel):
        if len(inner) == len(along) == len(steps) == 1:
            ((name, ((a, b),), depth),) = inner
            yield name, outer, steps[0], depth, (a, b, along[0])


Inner = tuple[str, tuple[tuple[Node, Node], ...], Any]
"""A sum by name, its pairs of operands, of which the second ones know the steps of the sum around it, and what it sums
over.
"""


def _nested(kernel: l.Kernel) -> Iterator[tuple[list[Inner], str, tuple[Any, ...], tuple[Node, ...]]]:
    """The products that have products in a factor: these, the outer one by name, its axes, of which the last one has
    the steps, and its other factors, one for each of its terms.
    """
    names = {r: name for name, r in accumulators(kernel).items() if isinstance(r, l.Reduce)}
    for r, name in names.items():
        outer = nested_contraction(r)
        if not r.free >= frozenset(
            kernel.axes
        ):  # it would be computed again at every point of an axis it does not know
            continue
        if outer is None or contraction(r) is not None:
            continue
        *_, steps = r.axes
        for side in (0, 1):
            made = [pair[side] for pair in outer.terms]
            found = [contraction(x) for x in topological(made) if isinstance(x, l.Reduce)]
            inner = [c for c in found if c and c.reduce in names and steps in c.reduce.free]
            inner = [c for c in inner if len(c.reduce.axes) == 1]
            if inner:
                sums: list[Inner] = [(names[c.reduce], _pairs(c, steps), c.reduce.axes[0]) for c in inner]
                yield sums, name, r.axes, tuple(operand(pair[1 - side]) for pair in outer.terms)


def _pairs(c: Contraction, steps: Any) -> tuple[tuple[Node, Node], ...]:
    """What is multiplied, the factors that know the steps last."""
    return tuple((operand(a), operand(b)) if steps in b.free else (operand(b), operand(a)) for a, b in c.terms)
