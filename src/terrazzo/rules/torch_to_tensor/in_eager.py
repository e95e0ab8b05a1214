"""How much memory a program takes in eager mode, and how much may be put together without taking more.

Torch IR says what is computed, and in which order it was called. What an op gives is there until its last use, and what
a program gives until the end; views lie where they are views of. Beside that, eager mode has what Python's variables
hold and what libraries need, and less where it computes in one kernel what is taken apart here (docs/adr/015). So this
is for comparing a program with one that differs in a rewriting, of which all that is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.ir.dialects.torch import Aten, Get
from terrazzo.ir.in_place import views
from terrazzo.ir.node import Node, topological
from terrazzo.ir.program import Input, Program
from terrazzo.rules.loop.cost import Rates
from terrazzo.rules.torch_to_tensor.sums import is_call

WORTH = 1 << 20
"""Bytes in use from which on it is asked."""
MORE = 1.05
"""How much of eager mode's memory what is put together may take without a second thought."""
LOSS = 0.1
"""The part of the time of a program that is given for memory at most."""
SAME_MEMORY = ("aten._unsafe_view.default",)
"""Ops that give views although their schema says otherwise."""
PRODUCTS = (
    "aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default", "aten.convolution.default",
    "aten.convolution_backward.default",
)  # fmt: skip
"""Ops that are a launch at least, whatever becomes of others."""


def most_in_eager(program: Program) -> int:
    """The most bytes that are in use at a time beside the inputs, in the order in which ops were called."""
    alive = {*topological(program.results)}
    order = topological((*(n for n in program.names if n in alive), *program.results))
    lies: dict[Node, Node] = {}
    last: dict[Node, int] = {}
    for n, x in enumerate(order):
        if x.children and (isinstance(x, Get) or (isinstance(x, Aten) and (views(x.name) or x.name in SAME_MEMORY))):
            lies[x] = lies.get(x.children[0], x.children[0])
        last |= {lies.get(y, y): n for y in (x, *x.children)}
    last |= {lies.get(x, x): len(order) for x in program.results}
    change = [0] * (len(order) + 2)
    for n, x in enumerate(order):
        if isinstance(x, Aten) and x not in lies:
            change[n] += (size := _bytes(x))
            change[last[x] + 1] -= size
    most = now = 0
    for size in change:
        now += size
        most = max(most, now)
    return most


def _bytes(x: Any) -> int:
    """What an op, or an input, takes."""
    kinds = x.type if isinstance(x.type, tuple) else (x.type,)
    return sum(t.span for t in kinds if t is not None)


@dataclass(frozen=True)
class Joined:
    """Something of so many pieces that are put together, in several groups for so many nanoseconds more each."""

    pieces: int
    price: float


def groups(
    program: Program, joined: Sequence[Joined], made: Callable[[Sequence[int]], Program], rates: Rates
) -> list[int]:
    """In how many groups each of these things is put together: in one, where what is `made` of the program so takes
    hardly more memory than the program; else in more, as long as that saves some and takes little of the time. As many
    groups as pieces means that it is not put together at all.
    """
    counts = [1] * len(joined)
    if (now := most_in_eager(made(counts))) < WORTH:
        return counts
    room = MORE * most_in_eager(program)
    left = LOSS * _time(program, rates) if now > room else 0.0
    while now > room:
        tried: list[tuple[int, float, list[int]]] = []
        each = [{n} for n in range(len(joined))]
        for some in each if len(each) == 1 else (*each, {*range(len(joined))}):
            more = [min(2 * c, joined[n].pieces) if n in some else c for n, c in enumerate(counts)]
            price = sum((m - c) * x.price for m, c, x in zip(more, counts, joined, strict=True))
            if 0 < price <= left and (less := most_in_eager(made(more))) < now:
                tried.append((less, price, more))
        if not tried:
            break
        now, price, counts = min(tried)
        left -= price
    return counts


def _time(program: Program, rates: Rates) -> float:
    """What products and convolutions take at least."""
    products = [x for x in topological(program.results) if is_call(x, *PRODUCTS)]
    moved = sum(_bytes(y) for x in products for y in (x, *x.children) if isinstance(y, Aten | Input))
    return len(products) * rates.launch + moved * rates.byte


def chunks(count: int, groups: int) -> list[range]:
    """The numbers of the pieces of each group, as many in each as can be."""
    each = -(-count // groups)
    return [range(n, min(n + each, count)) for n in range(0, count, each)]
