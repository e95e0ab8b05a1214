"""Sums of products as one product: of all that is multiplied from one side, one below the other, with all from the
other side.

A weight that is used at every step of a loop has such a gradient: each step adds the product of what came out, by its
gradient, and what went in. The sum over the steps and the sum in each product are one sum.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.node import Node, rebuilt, topological
from terrazzo.ir.program import Program
from terrazzo.ir.types import Type
from terrazzo.rewrite.rule import Choice, Event, Log, cheapest
from terrazzo.rules.loop.cost import Rates

PASS = "torch_to_tensor"
FEWEST = 3
"""Products of a sum from which on it is looked at."""


@dataclass(frozen=True)
class Term:
    """What is added: `x.T @ y`, where x is [k, m] and y is [k, n]; or the sums of the columns of x."""

    x: Node
    y: Node | None = None


def sums_together(program: Program, log: Log, rates: Rates) -> Program:
    """The program with every sum of many products as one, where that is cheaper: products that are rounded before they
    are added, and sums of columns beside them, are rounded once.

    @torch
    def f(x: f32[2, 3], y: f32[2, 4], z: f32[2, 3], u: f32[2, 4], v: f32[2, 3], w: f32[2, 4]):
        t: f32[3, 2] = aten.permute.default(x, [1, 0])
        a: f32[3, 4] = aten.mm.default(t, y)
        s: f32[3, 2] = aten.permute.default(z, [1, 0])
        b: f32[3, 4] = aten.mm.default(s, u)
        c: f32[3, 4] = aten.add.Tensor(a, b)
        r: f32[3, 2] = aten.permute.default(v, [1, 0])
        d: f32[3, 4] = aten.mm.default(r, w)
        e: f32[3, 4] = aten.add.Tensor(c, d)
        return (e,)
    =>
    @torch
    def f(x: f32[2, 3], y: f32[2, 4], z: f32[2, 3], u: f32[2, 4], v: f32[2, 3], w: f32[2, 4]):
        v0: f32[6, 3] = aten.cat.default([x, z, v])
        v1: f32[3, 6] = aten.permute.default(v0, [1, 0])
        v2: f32[6, 4] = aten.cat.default([y, u, w])
        e: f32[3, 4] = aten.mm.default(v1, v2)
        return (e,)
    """
    work = _Together(program, log, rates)
    return work.program() if work.taken else program


@dataclass
class _Together:
    source: Program
    log: Log
    rates: Rates
    taken: dict[Node, list[Term]] = field(default_factory=dict)
    joined: dict[tuple[Node, ...], Node] = field(default_factory=dict)  # what is one below the other, by its pieces
    orders: dict[frozenset[Node], tuple[Node, ...]] = field(default_factory=dict)  # and the order of these

    def __post_init__(self) -> None:
        nodes = [n for n in topological(self.source.results) if isinstance(n, Aten)]
        self.uses = Counter(c for n in nodes for c in n.children) + Counter(self.source.results)
        for n in nodes:
            if n.name in ("aten.stack.default", "aten.cat.default") and (n.args[1:] or (0,)) == (0,) and not n.kwargs:
                self.known(n.args[0], n)
        inner = {c for n in nodes if _adds(n) for c in n.children if _adds(c) and self.uses[c] == 1}
        sums = {n: [*self.terms(n)] for n in nodes if _adds(n) and n not in inner}
        for total, terms in sums.items():
            found = [x for x in terms if isinstance(x, Term)]
            if len(found) == len(terms) >= FEWEST and all(x.y is not None for x in found):
                self.consider(total, found)
        for total, terms in sums.items():  # which cost a read of what is one below the other anyway
            found = [x for x in terms if isinstance(x, Term) and x.y is None]
            if len(found) == len(terms) >= FEWEST and (order := self.orders.get(frozenset(x.x for x in found))):
                self.taken[total] = [Term(x) for x in order]
                self.log.add(Event(PASS, "sums_together", self.name(total), True, "what is summed is one already"))

    def known(self, pieces: tuple[Node, ...], node: Node) -> None:
        """A node that is these pieces, one below the other."""
        self.joined.setdefault(pieces, node)
        if len({*pieces}) == len(pieces):
            self.orders.setdefault(frozenset(pieces), pieces)

    def name(self, node: Node) -> str:
        """What a node is called."""
        return self.source.names.get(node, "")

    def terms(self, total: Node) -> Iterator[Term | None]:
        """What a sum adds up; None for what is neither a product nor a sum of columns."""
        stack = [total]
        while stack:
            node = stack.pop()
            if _adds(node) and (node is total or self.uses[node] == 1):
                stack += reversed(node.children)
            else:
                yield self.term(node)

    def term(self, node: Node) -> Term | None:
        """A product of matrices, transposed any number of times, or a sum of the columns of one."""
        flipped, out = False, node
        while self.uses[node] == 1 and (_flips(node) or _is(node, "aten.view.default")):
            if not _flips(node) and (node is not out or not _is(node.children[0], "aten.sum.dim_IntList")):
                return None
            flipped ^= _flips(node)
            node = node.children[0]
        if self.uses[node] != 1 or not isinstance(node, Aten) or node.kwargs:
            return None
        if node.name == "aten.sum.dim_IntList" and not flipped:
            x, dims = node.args[:2]
            columns = len(_shape(x)) == 2 and tuple(dims or ()) == (0,) and _shape(out) == _shape(x)[1:]
            return Term(x) if columns and x.type.dtype == node.type.dtype else None  # type: ignore[union-attr]
        if node.name != "aten.mm.default":
            return None
        a, b = node.args
        return Term(b, _transposed(a)) if flipped else Term(_transposed(a), b)

    def consider(self, total: Node, terms: list[Term]) -> None:
        """Take a sum of products as one, if that is cheaper."""
        sides: list[tuple[Any, ...]] = [tuple(x.x for x in terms), tuple(x.y for x in terms)]
        if any(len({_shape(x)[1] for x in side}) != 1 or len({*side}) < len(side) for side in sides):
            return  # what has a factor in common is another rewriting
        order = next((self.orders[frozenset(side)] for side in sides if frozenset(side) in self.orders), sides[0])
        at = {x: n for n, x in enumerate(order)}  # as one side lies there already, perhaps
        terms = sorted(terms, key=lambda x: at[x.y if x.y in at else x.x])
        sides = [tuple(x.x for x in terms), tuple(x.y for x in terms)]
        known = [side in self.joined for side in sides]
        sizes = [sum(map(_bytes, side)) for side in sides]
        out, count = _bytes(total), len(terms)
        copied = sum(2 * size for size, here in zip(sizes, known, strict=True) if not here)
        choice = Choice(
            self.name(total),
            {"together": terms, "apart": terms},
            {
                "together": (3 - sum(known)) * self.rates.launch + (copied + sum(sizes) + out) * self.rates.byte,
                "apart": count * self.rates.launch + (sum(sizes) + (2 * count + 1) * out) * self.rates.byte,
            },
        )
        better = cheapest(choice) == "together"
        self.log.add(Event(PASS, "sums_together", choice.subject, better, f"{count} products: {choice.prices()}"))
        if not better:
            return
        self.taken[total] = terms
        for pieces in sides:
            if pieces not in self.joined:
                self.known(pieces, _cat(pieces))

    def program(self) -> Program:
        """The program with what was taken."""
        memo: dict[Node, Any] = {}

        def new(node: Node) -> Any:
            for n in topological([node], stop=memo.__contains__):
                if n not in memo:
                    memo[n] = rebuilt(n, memo)
            return memo[node]

        for node in topological(self.source.results):
            terms = self.taken.get(node)
            memo[node] = self.one(node, terms, new) if terms else rebuilt(node, memo)
            if terms:
                self.log.applied(PASS, "sums_together", self.name(node), [rebuilt(node, memo)], [memo[node]])
        results = tuple(memo[r] for r in self.source.results)
        names = {memo[n]: name for n, name in self.source.names.items() if n in memo}
        return Program("torch", self.source.name, self.source.inputs, results, names, self.source.sources)

    def one(self, total: Node, terms: Sequence[Term], new: Callable[[Node], Any]) -> Node:
        """A sum as one product, or as one sum of columns, of new nodes."""
        out = total.type  # type: ignore[attr-defined]
        x = _flat(new(self.joined[tuple(term.x for term in terms)]))
        if terms[0].y is None:
            return Aten("aten.sum.dim_IntList", (x, (0,)), (), out)
        y = _flat(new(self.joined[tuple(term.y for term in terms if term.y)]))
        return Aten("aten.mm.default", (_transposed(x), y), (), out)


def _is(node: Node, *names: str) -> bool:
    """Whether a node is a call of one of these overloads."""
    return isinstance(node, Aten) and node.name in names


def _adds(node: Node) -> bool:
    """Whether a node adds two tensors of its own type."""
    if not isinstance(node, Aten) or node.name != "aten.add.Tensor" or node.kwargs:
        return False
    return all(isinstance(x, Node) and x.type == node.type for x in node.args)  # type: ignore[attr-defined]


def _shape(node: Any) -> tuple[int, ...]:
    found: tuple[int, ...] = node.type.shape
    return found


def _bytes(node: Any) -> int:
    return math.prod(_shape(node)) * int(node.type.dtype.size)


def _flips(node: Node) -> bool:
    """Whether a node is the transposition of a matrix."""
    if _is(node, "aten.t.default"):
        return True
    return _is(node, "aten.permute.default") and tuple(d % 2 for d in node.args[1]) == (1, 0) and len(_shape(node)) == 2  # type: ignore[attr-defined]


def _transposed(x: Any) -> Any:
    """A matrix, transposed."""
    if _flips(x):
        return x.args[0]
    return Aten("aten.permute.default", (x, (1, 0)), (), Type(x.type.dtype, _shape(x)[::-1]))


def _cat(pieces: Sequence[Any]) -> Aten:
    """Matrices one below the other."""
    rows = sum(_shape(x)[0] for x in pieces)
    return Aten("aten.cat.default", (tuple(pieces),), (), Type(pieces[0].type.dtype, (rows, _shape(pieces[0])[1])))


def _flat(x: Any) -> Any:
    """What is one below the other, as a matrix."""
    shape = _shape(x)
    if len(shape) == 2:
        return x
    rows = math.prod(shape[:-1])
    return Aten("aten.view.default", (x, (rows, shape[-1])), (), Type(x.type.dtype, (rows, shape[-1])))
