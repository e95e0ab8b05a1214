"""What a loop over time does step by step, at once: the parts of a tensor that each step adds, and products by a
weight whose other factors are all there before the first of them is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.node import Node, topological
from terrazzo.ir.program import Program
from terrazzo.ir.types import Type
from terrazzo.rewrite.rule import Choice, Event, Log, cheapest
from terrazzo.rules.loop.cost import Rates
from terrazzo.rules.torch_to_tensor.in_eager import Joined, chunks
from terrazzo.rules.torch_to_tensor.in_eager import groups as in_groups
from terrazzo.rules.torch_to_tensor.sums import (
    FEWEST,
    PASS,
    added,
    cat,
    flat,
    is_call,
    is_zero,
    lying,
    replaced,
    shape,
    size,
    sums,
    uses,
)

Pieces = dict[int, tuple[Node, Any]]
"""Which parts of a tensor are added, and what adds them, by where they lie."""


def parts_stacked(program: Program, log: Log) -> Program:
    """The program with every sum of tensors that are 0 but for a part of their own as these parts, side by side. Such
    is the gradient by what a loop reads step by step.

    @torch
    def f(x: f32[2, 4], y: f32[2, 4], z: f32[2, 4]):
        n: f32[2, 3, 4] = aten.full.default([2, 3, 4], 0, dtype=f32)
        a: f32[2, 3, 4] = aten.select_scatter.default(n, x, 1, 2)
        b: f32[2, 3, 4] = aten.select_scatter.default(n, y, 1, 1)
        c: f32[2, 3, 4] = aten.add.Tensor(a, b)
        d: f32[2, 3, 4] = aten.select_scatter.default(n, z, 1, 0)
        e: f32[2, 3, 4] = aten.add.Tensor(c, d)
        return (e,)
    =>
    @torch
    def f(x: f32[2, 4], y: f32[2, 4], z: f32[2, 4]):
        e: f32[2, 3, 4] = aten.stack.default([z, y, x], 1)
        return (e,)
    """
    read = uses(program)
    new: dict[Node, Any] = {}
    for total, terms in sums(program, read).items():
        parts: dict[int, Pieces] = {}
        x: Any
        for x in terms:
            if read[x] == 1 and is_call(x, "aten.select_scatter.default") and is_zero(x.args[0]):
                _, part, dim, n = x.args
                dim %= len(shape(x))
                parts.setdefault(dim, {}).setdefault(n % shape(x)[dim], (x, part))
        dim, most = max(parts.items(), key=lambda x: len(x[1]), default=(0, {}))
        if len(most) >= FEWEST:
            reason = f"{len(most)} parts of it are added"
            log.add(Event(PASS, "parts_stacked", program.names.get(total, ""), True, reason))
            taken = {x for x, _ in most.values()}
            others = [x for x in terms if x not in taken]
            new[total] = partial(_stacked, total, dim, {n: part for n, (_, part) in most.items()}, others)
    return replaced(program, log, "parts_stacked", new) if new else program


def _stacked(total: Any, dim: int, pieces: dict[int, Any], others: Sequence[Node], now: Any) -> Any:
    """The sum of parts side by side along a dimension, and the others."""
    kind = Type(total.type.dtype, (*shape(total)[:dim], *shape(total)[dim + 1 :]))
    nothing = Aten("aten.full.default", (kind.shape, 0), (("dtype", kind.dtype),), kind)
    each = tuple(now(pieces[n]) if n in pieces else nothing for n in range(shape(total)[dim]))
    return added([Aten("aten.stack.default", (each, dim), (), total.type), *map(now, others)])


def stacks_whole(program: Program, log: Log) -> Program:
    """The program with stacks of all equal parts of a tensor, in their order, as this tensor.

    @torch
    def f(x: f32[6, 4]):
        a: f32[2, 4] = aten.slice.Tensor(x, 0, 0, 2)
        b: f32[2, 4] = aten.slice.Tensor(x, 0, 2, 4)
        c: f32[2, 4] = aten.slice.Tensor(x, 0, 4, 6)
        d: f32[2, 3, 4] = aten.stack.default([a, b, c], 1)
        return (d,)
    =>
    @torch
    def f(x: f32[6, 4]):
        v0: f32[3, 2, 4] = aten.reshape.default(x, [3, 2, 4])
        d: f32[2, 3, 4] = aten.permute.default(v0, [1, 0, 2])
        return (d,)
    """
    new: dict[Node, Any] = {}
    for n in topological(program.results):
        if is_call(n, "aten.stack.default") and len(n.args[0]) >= FEWEST:  # type: ignore[attr-defined]
            pieces, dim = n.args[0], n.args[1] if n.args[1:] else 0  # type: ignore[attr-defined]
            there = lying(pieces)
            if there and there[0] == pieces:
                log.add(Event(PASS, "stacks_whole", program.names.get(n, ""), True, "its parts lie so in one tensor"))
                new[n] = partial(_moved, there[1], dim % len(shape(n)), n)
    return replaced(program, log, "stacks_whole", new) if new else program


def _moved(x: Any, dim: int, old: Any, now: Any) -> Any:
    """A tensor with its first dimension at another place."""
    order = [*range(1, len(shape(x)))]
    order.insert(dim, 0)
    return now(x) if not dim else Aten("aten.permute.default", (now(x), tuple(order)), (), old.type)


def products_together(program: Program, log: Log, rates: Rates) -> Program:
    """The program with products by one weight as one, where none of them needs another, where that is cheaper, and
    where what reads them reads another product too, or takes them apart, so that it is a kernel of its own anyway.
    Where that takes more memory than eager mode does they are several, of some steps each.

    @torch
    def f(x: f32[2, 3, 4], w: f32[4, 5], u: f32[5, 5], h: f32[2, 5]):
        a: f32[2, 4] = aten.select.int(x, 1, 0)
        b: f32[2, 5] = aten.mm.default(a, w)
        c: f32[2, 5] = aten.mm.default(h, u)
        d: f32[2, 5] = aten.add.Tensor(b, c)
        e: f32[2, 4] = aten.select.int(x, 1, 1)
        g: f32[2, 5] = aten.mm.default(e, w)
        i: f32[2, 5] = aten.mm.default(d, u)
        j: f32[2, 5] = aten.add.Tensor(g, i)
        k: f32[2, 4] = aten.select.int(x, 1, 2)
        l: f32[2, 5] = aten.mm.default(k, w)
        m: f32[2, 5] = aten.mm.default(j, u)
        n: f32[2, 5] = aten.add.Tensor(l, m)
        return (n,)
    =>
    @torch
    def f(x: f32[2, 3, 4], w: f32[4, 5], u: f32[5, 5], h: f32[2, 5]):
        v0: f32[3, 2, 4] = aten.permute.default(x, [1, 0, 2])
        v1: f32[6, 4] = aten.reshape.default(v0, [6, 4])
        v2: f32[6, 5] = aten.mm.default(v1, w)
        l: f32[2, 5] = aten.slice.Tensor(v2, 0, 4, 6)
        g: f32[2, 5] = aten.slice.Tensor(v2, 0, 2, 4)
        b: f32[2, 5] = aten.slice.Tensor(v2, 0, 0, 2)
        c: f32[2, 5] = aten.mm.default(h, u)
        d: f32[2, 5] = aten.add.Tensor(b, c)
        i: f32[2, 5] = aten.mm.default(d, u)
        j: f32[2, 5] = aten.add.Tensor(g, i)
        m: f32[2, 5] = aten.mm.default(j, u)
        n: f32[2, 5] = aten.add.Tensor(l, m)
        return (n,)
    """
    order = topological(program.results)
    place = {n: at for at, n in enumerate(order)}
    readers: dict[Node, list[Node]] = {}
    for n in order:
        for c in n.children:
            readers.setdefault(c, []).append(n)
    results = {*program.results}
    groups: dict[tuple[Any, Any], list[Any]] = {}
    for n in order:
        if isinstance(n, Aten) and is_call(n, "aten.mm.default", "aten.addmm.default") and not n.kwargs:
            *bias, _, w = n.args
            if not bias or len(shape(bias[0])) == 1:
                groups.setdefault((bias[0] if bias else None, w), []).append(n)
    found: list[_Stack] = []
    for (bias, w), group in groups.items():
        if len(group) < FEWEST:
            continue
        mine = {*group}
        for level in _levels(order, place, group):
            ready = [n for n in level if n not in results and all(_apart(r, n, mine) for r in readers[n])]
            name = program.names.get(ready[0], "") if ready else ""
            xs = tuple(n.args[-2] for n in ready)
            if len({*xs}) < FEWEST:
                continue
            there = lying(tuple(dict.fromkeys(xs)))
            pieces, one = there or (tuple(dict.fromkeys(xs)), None)
            whole = sum(map(size, pieces))
            choice = Choice(
                name,
                {"together": ready, "apart": ready},
                {
                    "together": (2 - (one is not None)) * rates.launch
                    + (whole * (1 if one is not None else 3) + size(w)) * rates.byte,
                    "apart": len(ready) * (rates.launch + size(w) * rates.byte) + whole * rates.byte,
                },
            )
            fired = cheapest(choice) == "together"
            log.add(Event(PASS, "products_together", name, fired, f"{len(ready)} products: {choice.prices()}"))
            if fired:
                found.append(_Stack(bias, w, ready, pieces, one))

    def made(counts: Sequence[int], log: Log) -> Program:
        new = {n: make for stack, count in zip(found, counts, strict=True) for n, make in stack.products(count).items()}
        return replaced(program, log, "products_together", new)

    if not found:
        return program
    joined = [Joined(len(x.pieces), rates.launch + size(x.w) * rates.byte) for x in found]
    counts = in_groups(program, joined, lambda counts: made(counts, Log()), rates)
    for stack, count in zip(found, counts, strict=True):
        if count > 1:
            why = f"in {count} groups: as one they would take more memory than in eager mode"
            log.add(Event(PASS, "products_together", program.names.get(stack.ready[0], ""), True, why))
    return made(counts, log)


@dataclass(frozen=True)
class _Stack:
    """Products by a weight as one: of the pieces that are multiplied, which lie in `one` tensor, or nowhere yet."""

    bias: Any
    w: Any
    ready: list[Any]
    pieces: tuple[Any, ...]
    one: Any

    def products(self, groups: int) -> dict[Node, Any]:
        """What makes each product, where so many pieces are multiplied at once as are in one of the groups."""
        new: dict[Node, Any] = {}
        for some in chunks(len(self.pieces), groups):
            if len(some) == 1:  # it stays as it is
                continue
            pieces = self.pieces[some.start : some.stop]
            x = cat(pieces) if self.one is None else flat(_part(self.one, some))
            made = partial(_product, self.bias, self.w, x)
            begins = dict(zip(pieces, accumulate((shape(x)[0] for x in pieces), initial=0), strict=False))
            new |= {n: partial(_rows, made, begins[x], n) for n in self.ready if (x := n.args[-2]) in begins}
        return new


def _part(x: Any, some: range) -> Any:
    """Some along the first dimension of a tensor."""
    if len(some) == shape(x)[0]:
        return x
    kind = Type(x.type.dtype, (len(some), *shape(x)[1:]))
    return Aten("aten.slice.Tensor", (x, 0, some.start, some.stop), (), kind)


def _levels(order: Sequence[Node], place: Mapping[Node, int], group: Sequence[Any]) -> list[list[Any]]:
    """Products of which those of one level do not need each other, given the `order` of all nodes and the place that
    each has in it. What comes before the first of them needs none.
    """
    mine = {*group}
    depth: dict[Node, int] = {}
    first, last = (ends(place[n] for n in group) for ends in (min, max))
    for n in order[first : last + 1]:
        depth[n] = max((depth.get(c, 0) + (c in mine) for c in n.children), default=0)
    levels: dict[int, list[Any]] = {}
    for n in group:
        levels.setdefault(depth[n], []).append(n)
    return [*levels.values()]


def _apart(reader: Any, product: Any, group: set[Any]) -> bool:
    """Whether what reads a product is a kernel of its own anyway."""
    if is_call(reader, "aten.add.Tensor"):
        other = [x for x in reader.children if x is not product]
        return len(other) == 1 and is_call(other[0], "aten.mm.default", "aten.addmm.default") and other[0] not in group
    return is_call(reader, *TAKE_APART)


TAKE_APART = (
    "aten.split.Tensor", "aten.split_with_sizes.default", "aten.slice.Tensor", "aten.stack.default", "aten.cat.default",
)  # fmt: skip
"""Ops that read parts of a tensor, or put several together."""


def _product(bias: Any, w: Any, xs: Any, now: Any) -> Any:
    x, weight = now(xs), now(w)
    kind = Type(x.type.dtype, (shape(x)[0], shape(weight)[1]))
    if bias is None:
        return Aten("aten.mm.default", (x, weight), (), kind)
    return Aten("aten.addmm.default", (now(bias), x, weight), (), kind)


def _rows(made: Any, begin: int, old: Any, now: Any) -> Any:
    """The rows of a product that are what an earlier one was."""
    return Aten("aten.slice.Tensor", (made(now), 0, begin, begin + shape(old)[0]), (), old.type)
