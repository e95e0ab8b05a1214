"""Sums of several tensors in Torch IR, and how matrices of a program lie to one another: what rewritings of whole sums
share.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from terrazzo.ir.dialects.torch import Aten, Get
from terrazzo.ir.node import Node, rebuilt, topological
from terrazzo.ir.program import Program
from terrazzo.ir.types import Type
from terrazzo.rewrite.rule import Log

PASS = "torch_to_tensor"
FEWEST = 3
"""Terms of a sum, or products by a weight, from which on they are looked at."""


def uses(program: Program) -> Counter[Node]:
    """How often each value is read, or is a result."""
    return Counter(c for n in topological(program.results) for c in n.children) + Counter(program.results)


def sums(program: Program, read: Mapping[Node, int]) -> dict[Node, list[Node]]:
    """What every sum of several tensors adds up. Parts of a sum that are read elsewhere are terms."""
    nodes = [n for n in topological(program.results) if adds(n)]
    inner = {c for n in nodes for c in n.children if adds(c) and read[c] == 1}

    def terms(total: Node) -> Iterator[Node]:
        stack = [total]
        while stack:
            node = stack.pop()
            if adds(node) and (node is total or read[node] == 1):
                stack += reversed(node.children)
            else:
                yield node

    return {n: [*terms(n)] for n in nodes if n not in inner}


def replaced(
    program: Program, log: Log, rule: str, new: Mapping[Node, Callable[[Callable[[Node], Any]], Any]]
) -> Program:
    """The program with other values for some: each is made by a function, given what stands for a value of the
    program, or for one that is made of these.
    """
    memo: dict[Node, Any] = {}

    def now(node: Node) -> Any:
        for n in topological([node], stop=memo.__contains__):
            if n in memo:
                continue
            memo[n] = old = rebuilt(n, memo)
            if n in new:
                memo[n] = new[n](now)
                log.applied(PASS, rule, program.names.get(n, ""), [old], [memo[n]])
        return memo[node]

    results = tuple(map(now, program.results))
    names = {memo[n]: name for n, name in program.names.items() if n in memo}
    return Program("torch", program.name, program.inputs, results, names, program.sources)


def is_call(node: Any, *names: str) -> bool:
    """Whether a node is a call of one of these overloads."""
    return isinstance(node, Aten) and node.name in names


def is_zero(x: Any) -> bool:
    """Whether a value is 0 everywhere."""
    return (is_call(x, "aten.full.default") and x.args[1] == 0) or is_call(x, "aten.zeros.default")


def adds(node: Node) -> bool:
    """Whether a node adds two tensors of its own type."""
    if not isinstance(node, Aten) or node.name != "aten.add.Tensor" or node.kwargs:
        return False
    return all(isinstance(x, Node) and x.type == node.type for x in node.args)  # type: ignore[attr-defined]


def added(parts: Sequence[Any]) -> Any:
    """The sum of tensors of one type."""
    total, *rest = parts
    for x in rest:
        total = Aten("aten.add.Tensor", (total, x), (), total.type)
    return total


def shape(node: Any) -> tuple[int, ...]:
    """The sizes of a value."""
    found: tuple[int, ...] = node.type.shape
    return found


def size(node: Any) -> int:
    """Its bytes."""
    return math.prod(shape(node)) * int(node.type.dtype.size)


def flips(node: Any) -> bool:
    """Whether a node is the transposition of a matrix."""
    if is_call(node, "aten.permute.default") and len(shape(node)) == 2:
        return tuple(d % 2 for d in node.args[1]) == (1, 0)
    return is_call(node, "aten.t.default") and len(shape(node)) == 2


def transposed(x: Any) -> Any:
    """A matrix, transposed."""
    if flips(x):
        return x.args[0]
    return Aten("aten.permute.default", (x, (1, 0)), (), Type(x.type.dtype, shape(x)[::-1]))


def reshaped(x: Any, sizes: tuple[int, ...]) -> Any:
    """The same elements in another shape."""
    return x if shape(x) == sizes else Aten("aten.reshape.default", (x, sizes), (), Type(x.type.dtype, sizes))


def flat(x: Any) -> Any:
    """What lies one below the other, as a matrix."""
    return reshaped(x, (math.prod(shape(x)[:-1]), shape(x)[-1]))


def cat(pieces: Sequence[Any]) -> Any:
    """Matrices one below the other."""
    rows = sum(shape(x)[0] for x in pieces)
    return Aten("aten.cat.default", (tuple(pieces),), (), Type(pieces[0].type.dtype, (rows, shape(pieces[0])[1])))


def lying(pieces: Sequence[Any]) -> tuple[tuple[Any, ...], Any] | None:
    """Tensors in the order in which they lie in a larger one, of which they are all there is, and this with them along
    its first dimension; None where there is none.
    """
    found = [place(x) for x in pieces]
    first = found[0]
    if first is None or any(x is None or (x[0], x[1]) != first[:2] for x in found):
        return None
    x, dim, _ = first
    at = {place[2]: piece for place, piece in zip(found, pieces, strict=True) if place}
    if sorted(at) != list(range(len(pieces))) or math.prod(shape(x)) != sum(math.prod(shape(p)) for p in pieces):
        return None
    order = (dim, *(d for d in range(len(shape(x))) if d != dim))
    if dim:
        x = Aten("aten.permute.default", (x, order), (), Type(x.type.dtype, tuple(shape(x)[d] for d in order)))
    return tuple(at[n] for n in range(len(pieces))), reshaped(x, (len(pieces), *shape(pieces[0])))


def place(x: Any) -> tuple[Any, int, int] | None:
    """What a value is an equal part of, along which dimension, and the how manieth."""
    if is_call(x, "aten.select.int"):
        whole, dim, n = x.args
        rank = len(shape(whole))
        return whole, dim % rank, n % shape(whole)[dim]
    if isinstance(x, Get) and x.x.name == "aten.unbind.int":
        whole, dim = x.x.args[0], x.x.args[1] if x.x.args[1:] else 0
        return whole, dim % len(shape(whole)), x.index
    if is_call(x, "aten.slice.Tensor") and len(x.args) == 4 and x.args[1] == 0:
        whole, _, begin, end = x.args
        return None if begin % (end - begin) else (whole, 0, begin // (end - begin))
    return None
