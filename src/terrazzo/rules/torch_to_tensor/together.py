"""Sums of products as one product: of all that is multiplied from one side, one below the other, with all from the
other side.

A weight that is used at every step of a loop has such a gradient: each step adds the product of what came out, by its
gradient, and what went in. The sum over the steps and the sum in each product are one sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.node import Node, topological
from terrazzo.ir.program import Program
from terrazzo.ir.types import Type
from terrazzo.rewrite.rule import Choice, Event, Log, cheapest
from terrazzo.rules.loop.cost import Rates
from terrazzo.rules.torch_to_tensor.in_eager import Joined, groups
from terrazzo.rules.torch_to_tensor.sums import (
    FEWEST,
    PASS,
    added,
    cat,
    flat,
    flips,
    is_call,
    lying,
    replaced,
    shape,
    size,
    sums,
    transposed,
    uses,
)


@dataclass(frozen=True)
class Term:
    """What is added: `x.T @ y`, where x is [k, m] and y is [k, n]; or the sums of the columns of x."""

    x: Node
    y: Node | None = None


def sums_together(program: Program, log: Log, rates: Rates) -> Program:
    """The program with every sum of many products as one, where that is cheaper: products that are rounded before they
    are added, and sums of columns beside them, are rounded once. Where that takes more memory than eager mode does
    those stay apart that gain little.

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
    products = [*work.gains]

    def made(counts: Sequence[int], log: Log) -> Program:
        new = {total: partial(work.one, *parts) for total, parts in work.without(_apart(products, counts)).items()}
        return replaced(program, log, "sums_together", new)

    if not work.taken:
        return program
    joined = [Joined(2, work.gains[total]) for total in products]
    counts = groups(program, joined, lambda counts: made(counts, Log()), rates)
    for total in _apart(products, counts):
        why = "as one they would take more memory than in eager mode"
        log.add(Event(PASS, "sums_together", work.name(total), False, why))
    return made(counts, log)


def _apart(products: Sequence[Node], counts: Sequence[int]) -> set[Node]:
    """The sums of products that stay as they are, where others are one group."""
    return {total for total, count in zip(products, counts, strict=True) if count > 1}


def _sides(terms: Sequence[Term]) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """What terms multiply from either side."""
    return tuple(x.x for x in terms), tuple(x.y for x in terms if x.y)


@dataclass
class _Together:
    source: Program
    log: Log
    rates: Rates
    taken: dict[Node, tuple[list[Term], list[Node]]] = field(default_factory=dict)  # one sum, and what is added to it
    gains: dict[Node, float] = field(default_factory=dict)  # nanoseconds, of sums of products
    joined: dict[tuple[Node, ...], Node] = field(default_factory=dict)  # what is one below the other, by its pieces
    orders: dict[frozenset[Node], tuple[Node, ...]] = field(default_factory=dict)  # and the order of these

    def __post_init__(self) -> None:
        self.uses = uses(self.source)
        for n in topological(self.source.results):
            if not is_call(n, "aten.stack.default", "aten.cat.default"):
                continue
            values, *rest = n.args  # type: ignore[attr-defined]
            if rest in ([], [0]) and not n.kwargs:  # type: ignore[attr-defined]
                self.known(values, n)
        every = {total: [(x, self.term(x)) for x in terms] for total, terms in sums(self.source, self.uses).items()}
        for total, terms in every.items():
            found = [x for _, x in terms if x and x.y]
            if len(found) >= FEWEST and self.better(total, found):
                self.take(total, found, [n for n, x in terms if not (x and x.y)])
        for total, terms in every.items():  # which cost a read of what is one below the other anyway
            found = [x for _, x in terms if x and not x.y]
            if len(found) >= FEWEST and (order := self.orders.get(frozenset(x.x for x in found))):
                self.take(total, [Term(x) for x in order], [n for n, x in terms if not x or x.y])
                self.log.add(Event(PASS, "sums_together", self.name(total), True, "what is summed is one already"))

    def known(self, pieces: tuple[Node, ...], node: Node) -> None:
        """A node that is these pieces, one below the other."""
        self.joined.setdefault(pieces, node)
        if len({*pieces}) == len(pieces):
            self.orders.setdefault(frozenset(pieces), pieces)

    def name(self, node: Node) -> str:
        """What a node is called."""
        return self.source.names.get(node, "")

    def term(self, node: Node) -> Term | None:
        """A product of matrices, transposed any number of times, or a sum of the columns of one."""
        flipped, out = False, node
        while self.uses[node] == 1 and (flips(node) or is_call(node, "aten.view.default")):
            if not flips(node) and (node is not out or not is_call(node.children[0], "aten.sum.dim_IntList")):
                return None
            flipped ^= flips(node)
            node = node.children[0]
        if self.uses[node] != 1 or not isinstance(node, Aten) or node.kwargs:
            return None
        if node.name == "aten.sum.dim_IntList" and not flipped:
            x, dims = node.args[:2]
            columns = len(shape(x)) == 2 and tuple(dims or ()) == (0,) and shape(out) == shape(x)[1:]
            return Term(x) if columns and x.type.dtype == node.type.dtype else None  # type: ignore[union-attr]
        if node.name != "aten.mm.default":
            return None
        a, b = node.args
        return Term(b, transposed(a)) if flipped else Term(transposed(a), b)

    def better(self, total: Node, terms: list[Term]) -> bool:
        """Whether products are cheaper as one; `terms` are brought to the order in which one side lies already."""
        sides: list[tuple[Any, ...]] = [tuple(x.x for x in terms), tuple(x.y for x in terms)]
        if any(len({shape(x)[1] for x in side}) != 1 or len({*side}) < len(side) for side in sides):
            return False  # what has a factor in common is another rewriting
        for side in sides:
            if frozenset(side) not in self.orders and (found := lying(side)):
                self.known(*found)
        order = next((self.orders[frozenset(side)] for side in sides if frozenset(side) in self.orders), sides[0])
        at = {x: n for n, x in enumerate(order)}
        terms.sort(key=lambda x: at[x.y if x.y in at else x.x])
        sides = [tuple(x.x for x in terms), tuple(x.y for x in terms)]
        known = [side in self.joined for side in sides]
        sizes = [sum(map(size, side)) for side in sides]
        out, count = size(total), len(terms)
        copied = sum(2 * n for n, here in zip(sizes, known, strict=True) if not here)
        choice = Choice(
            self.name(total),
            {"together": terms, "apart": terms},
            {
                "together": (3 - sum(known)) * self.rates.launch + (copied + sum(sizes) + out) * self.rates.byte,
                "apart": count * self.rates.launch + (sum(sizes) + (2 * count + 1) * out) * self.rates.byte,
            },
        )
        if fired := cheapest(choice) == "together":
            self.gains[total] = choice.cost["apart"] - choice.cost["together"]
        self.log.add(Event(PASS, "sums_together", choice.subject, fired, f"{count} products: {choice.prices()}"))
        return fired

    def take(self, total: Node, terms: list[Term], others: list[Node]) -> None:
        """These terms of a sum are one."""
        if total in self.taken:
            return
        self.taken[total] = terms, others
        for pieces in {*_sides(terms)} - {()}:
            if pieces not in self.joined:
                self.known(pieces, cat(pieces))

    def without(self, apart: set[Node]) -> dict[Node, tuple[list[Term], list[Node]]]:
        """What is one sum each where some sums of products stay `apart`, and what only they put one below the other."""
        kept = {total: parts for total, parts in self.taken.items() if total not in apart}
        sides = {pieces for total in kept if total in self.gains for pieces in _sides(kept[total][0])}
        alone = {pieces for total in apart for pieces in _sides(self.taken[total][0])} - sides
        return {
            total: parts for total, parts in kept.items() if total in self.gains or _sides(parts[0])[0] not in alone
        }

    def one(self, terms: list[Term], others: list[Node], now: Any) -> Any:
        """Terms as one product, or as one sum of columns, of new values, and the others."""
        x = flat(now(self.joined[tuple(x.x for x in terms)]))
        if terms[0].y is None:
            out = now(terms[0].x).type
            one = Aten("aten.sum.dim_IntList", (x, (0,)), (), Type(out.dtype, out.shape[1:]))
        else:
            y = flat(now(self.joined[tuple(x.y for x in terms if x.y)]))
            one = Aten("aten.mm.default", (transposed(x), y), (), Type(y.type.dtype, (shape(x)[1], shape(y)[1])))
        return added([one, *map(now, others)])
