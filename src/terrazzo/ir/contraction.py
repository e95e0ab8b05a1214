"""Contractions, recognised from the loops: sums of products in which each factor misses a variable of the other.

Matrix products, batched ones, matrix times vector and convolutions are all of this form; which torch op they came from
is never asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from terrazzo.collector import remembered
from terrazzo.ir.dialects.loop import Apply, Literal, Reduce, Scan
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.node import Node, topological

PRODUCTS = ("mul", "tf32_mul")
"""What multiplies two factors: as they are, or with the digits that TF32 has, if that is faster."""


@dataclass(frozen=True)
class Contraction:
    """sum over `reduce.axes` of the products of `terms`, in this order, each times the number of the same place in
    `scales`. Of several, the first factors know the same axes, and so do the second ones.
    """

    reduce: Reduce
    terms: tuple[tuple[Node, Node], ...]
    scales: tuple[float, ...]

    @property
    def factors(self) -> tuple[Node, Node]:
        """Those of the first term, which know the axes that all do."""
        return self.terms[0]

    @cached_property
    def in_tf32(self) -> bool:
        """Whether its products may have the digits of TF32 only."""
        return all(isinstance(x, Apply) and x.fn.name == "tf32_mul" for x, _ in summands(self.reduce.args[0]))

    @cached_property
    def operands(self) -> tuple[Node, ...]:
        """What lies in memory, each once."""
        return tuple(dict.fromkeys(operand(f) for pair in self.terms for f in pair))

    def scaled(self, scale: float) -> Contraction:
        """That of the terms which are scaled so."""
        found = tuple((t, s) for t, s in zip(self.terms, self.scales, strict=True) if s == scale)
        return Contraction(self.reduce, tuple(t for t, _ in found), tuple(s for _, s in found))


@remembered
def contraction(reduce: Reduce) -> Contraction | None:
    """The reduction as a contraction, or None: a sum of products, where some variable occurs in one factor only."""
    found = nested_contraction(reduce)
    if found is None or any(isinstance(n, (Reduce, Scan)) for n in topological([x for t in found.terms for x in t])):
        return None
    return found


@remembered
def nested_contraction(reduce: Reduce) -> Contraction | None:
    """The same, where factors may hold reductions themselves: products of products."""
    if reduce.monoid.name != "sum":
        return None
    found = list(summands(reduce.args[0]))
    pairs = [x.args if isinstance(x, Apply) and x.fn.name in PRODUCTS else () for x, _ in found]
    if not all(pairs):
        return None
    a, b = pairs[0]
    axes = frozenset(reduce.axes)
    if not (a.free & axes and b.free & axes) or a.free - axes == b.free - axes:
        return None
    alike = [(x, y) if (x.free, y.free) == (a.free, b.free) else (y, x) for x, y in pairs]
    if any((x.free, y.free) != (a.free, b.free) for x, y in alike):
        return None
    return Contraction(reduce, tuple(alike), tuple(scale for _, scale in found))


def _has_terms(x: Node, several: bool) -> bool:
    """Whether what is scaled is a sum, or, where it stands in one, a product."""
    return _adds(x) or (several and _multiplies(x))


def summands(x: Node) -> Iterator[tuple[Node, float]]:
    """What is added up, from the left, and by what power of two each is scaled: which changes no digit of a sum. A
    product by itself is not scaled so.
    """
    several = _adds(x)
    todo: list[tuple[Any, float]] = [(x, 1.0)]
    while todo:
        term, scale = todo.pop()
        if _adds(term):
            todo += [(y, scale) for y in term.args[::-1]]
        elif _multiplies(term) and _is_scale(term.args[1]) and _has_terms(term.args[0], several):
            todo.append((term.args[0], scale * term.args[1].value))
        else:
            yield term, scale


def _is_scale(x: Node) -> bool:
    """Whether a term is a power of two, and positive."""
    return isinstance(x, Literal) and isinstance(x.value, float) and x.value > 0 and math.frexp(x.value)[0] == 0.5


def is_product(x: Any) -> bool:
    """Whether a term is a product of two factors."""
    return isinstance(x, Apply) and x.fn.name in PRODUCTS


def _adds(x: Node) -> bool:
    return isinstance(x, Apply) and x.fn.name == "add"


def _multiplies(x: Node) -> bool:
    return isinstance(x, Apply) and x.fn.name == "mul"


def operand(factor: Node) -> Node:
    """A factor without the conversions that only widen it: what lies in memory. A whole number that becomes a number of
    16 bits is one that is made, as tensor cores take it.
    """
    while isinstance(factor, Apply) and is_cast(factor.fn) and _size(factor.args[0]) < _size(factor):
        if _size(factor) == 2 and _kind(factor) != _kind(factor.args[0]):
            break
        factor = factor.args[0]
    return factor


def _kind(x: Any) -> str:
    found: str = x.dtype.kind
    return found


def _size(x: Any) -> int:
    found: int = x.dtype.size
    return found
