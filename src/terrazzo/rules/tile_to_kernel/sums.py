"""Long sums of a thread as sums of short ones.

An addition rounds at the size of the sum so far. Of n terms that are added one after the other the last ones so lose
as much as sums of n do, and all are off by about n times what one is; of sqrt(n) sums of sqrt(n) terms, by sqrt(n)
times. That costs a few registers and an addition for each short sum, where memory is waited for anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from terrazzo.ir.address import mentions
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Var
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.ir.types import f32
from terrazzo.rules.tile.digits import Bindings
from terrazzo.rules.tile_to_kernel.builder import Builder

LONG = 32
"""Terms of a sum that is cut."""
SHORT = 8
"""Terms of a part of it, at least."""
SMALL = 8
"""Statements of a step, at most, for the steps of a part to be written one after the other: their loads are on their
way together then.
"""
FEW = 8
"""Sums of a thread at most: more leave no registers."""
PRODUCTS = 128
"""Products of a sum that is cut. A library has their sums of few results in pieces too, which it spreads over more
processors; arithmetic may take the time there, so fewer are no matter, and each part has `TOGETHER` at least.
"""
TOGETHER = 16
TILE = 16
"""Sums of products of a thread at most: larger tiles leave no registers."""


class ShortSums:
    """Rewrites the loops in which threads add up more than `LONG` terms."""

    def __init__(self, builder: Builder, bindings: Bindings) -> None:
        self.builder, self.bindings = builder, bindings

    def body(self, statements: Sequence[Node]) -> tuple[Node, ...]:
        """Statements, the long sums in their loops cut."""
        return tuple(y for x in statements for y in self.statement(x))

    def statement(self, s: Node) -> Iterator[Node]:
        if isinstance(s, k.For) and s.most > 1 and (places := long(s)):
            yield self.cut(s, places)
        elif isinstance(s, k.For):
            yield k.For(s.axis, self.body(s.body), s.unrolled)
        elif isinstance(s, k.If):
            yield k.If(s.inside, self.body(s.body))
        elif isinstance(s, k.Role):
            yield k.Role(s.first, s.count, self.body(s.body), s.registers)
        else:
            yield s

    def cut(self, s: k.For, places: Sequence[k.Registers]) -> Node:
        """A loop whose body adds to sums of its own, and these to the long ones; in two loops where a body adds too
        little for that.
        """
        extent = s.axis.extent if isinstance(s.axis.extent, int) else 1
        each = min(n for p, n in terms(s).items() if p in places) // extent
        if each < SHORT:
            size = next((n for n in range(2, extent) if extent % n == 0 and n * each >= SHORT), 0)
            if not size:
                return s
            inner, outer = (self.bindings.loop_variable("i", n) for n in (size, extent // size))
            body = tuple(substitute(x, {s.axis: outer * size + inner}) for x in s.body)
            at_once = s.unrolled or (size <= SHORT and len(list(k.walk(body))) <= SMALL)
            return self.cut(k.For(outer, (k.For(inner, body, at_once),), s.unrolled), places)
        own = {p: k.Registers(self.builder.fresh("sum"), p.type) for p in places}
        zero = l.Literal(0.0, f32)
        body = self.body([substitute(x, own) for x in s.body])
        begun = (k.Declare(q, zero) for q in own.values())
        return k.For(s.axis, (*begun, *body, *(self.added(p, q) for p, q in own.items())), s.unrolled)

    def added(self, place: k.Registers, part: k.Registers) -> Node:
        """A part becomes part of its sum."""
        at = tuple(self.bindings.loop_variable("e", n) for n in place.type.static_shape)
        found: Node = l.Store(place, at, l.apply("add", l.Load(place, at), l.Load(part, at)))
        for v in reversed(at):
            found = k.For(v, (found,), True)
        return found


def long(loop: k.For) -> list[k.Registers]:
    """The registers in which a loop adds up so much that it is cut."""
    return [p for p, n in terms(loop).items() if n >= LONG]


def terms(loop: k.For) -> dict[k.Registers, int]:
    """The registers in which each step of a loop adds up numbers, where it does nothing else with them, and how many
    terms each sum gets.
    """
    found: dict[k.Registers, int] = {}
    products: set[k.Registers] = set()
    others: set[Any] = set()
    for s, around in _inside(loop, ()):
        if isinstance(s, l.Store) and isinstance(s.buffer, k.Registers) and _adds(s):
            own = [v for v in around if any(mentions(i, v) for i in s.index)]
            moving = [v.extent for v in around if v not in own and isinstance(v.extent, int)]
            found[s.buffer] = found.get(s.buffer, 0) + math.prod(moving)
            products |= {s.buffer} if _multiplies(s) else set()
            others |= set(topological([s.value.args[1]]))  # type: ignore[attr-defined]
            others |= {s.buffer} if loop.axis in own else set()
        elif not isinstance(s, k.For | k.If):
            others |= set(topological([s]))
    steps = loop.axis.extent if isinstance(loop.axis.extent, int) else 1

    def may(p: k.Registers, n: int) -> bool:
        most = TILE if p in products else FEW
        enough = p not in products or (n >= PRODUCTS and n // steps >= TOGETHER)
        return enough and p not in others and p.type.dtype is f32 and math.prod(p.type.static_shape) <= most

    return {p: n for p, n in found.items() if may(p, n)}


def _inside(s: Node, around: tuple[Var, ...]) -> Iterator[tuple[Node, tuple[Var, ...]]]:
    """The statements in a loop, with the variables of the loops around them."""
    around = (*around, s.axis) if isinstance(s, k.For) else around
    yield s, around
    for x in s.body if isinstance(s, k.For | k.If) else ():
        yield from _inside(x, around)


def _adds(s: l.Store) -> bool:
    """Whether a statement adds something to a number."""
    v = s.value
    return isinstance(v, l.Apply) and v.fn.name == "add" and v.args[0] == l.Load(s.buffer, s.index)


def _multiplies(s: l.Store) -> bool:
    """Whether what a statement adds is a product."""
    term = s.value.args[1]  # type: ignore[attr-defined]
    return isinstance(term, l.Apply) and term.fn.name == "mul"
