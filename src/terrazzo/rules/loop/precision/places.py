"""What must be the same wherever it is computed is rounded as it is written: a compiler may leave out the rounding of a
product that something is added to, in one kernel and not in another.

Whole numbers: places and their weights, computed where they are needed, would be those of different elements. And what
is exponentiated less its own largest: where scores are in the thousands, or 1e8 to say that there is none, their last
place is a number of some size, a weight of exp(0) becomes exp(64), and what is 0 times that NaN. And squares that are
subtracted, as in a variance: where all values are one, as of a node with one neighbour, nothing is left of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from terrazzo.ir.contraction import nested_contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.node import Node, rebuilt, topological
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.definitions import computed_by

PASS = "places"
STEPS = ("floor", "ceil", "trunc", "round")


def round_places(program: l.Program, log: Log) -> l.Program:
    """`program` with rounded_mul for the products of floats that become whole numbers, by a cast or by rounding.

    @loop
    def f(x: f32[4]):
        with kernel('z', z=i32[4]):
            for a0 in free(4):
                in0 = x[a0]
                v0 = mul(in0, f32(1.7))
                v1 = add(v0, f32(0.5))
                v2 = i32(v1)
                z[a0] = v2
        return (z,)
    =>
    @loop
    def f(x: f32[4]):
        with kernel('z', z=i32[4]):
            for a0 in free(4):
                in0 = x[a0]
                v0 = rounded_mul(in0, f32(1.7))
                v1 = add(v0, f32(0.5))
                v2 = i32(v1)
                z[a0] = v2
        return (z,)
    """
    return _each(program, log, "round_places", "floats become whole numbers", _products)


def round_differences(program: l.Program, log: Log) -> l.Program:
    """`program` with rounded_mul for the products in differences of which little may be left: those that something is
    added to in scores of a softmax or the logarithm of a sum of exponentials, and in the same scores wherever else they
    are computed; and squares that are subtracted from what was computed. Scores of attention, which lies between two
    products of matrices, are left as they are: they are sums that are not the same in two kernels anyway.

    @loop
    def f(c: f32[4], x: f32[4, 8], total: f32[4]):
        with kernel('z', z=f32[4, 8]):
            for a0 in free(4):
                in0 = c[a0]
                in1 = total[a0]
                for a1 in free(8):
                    in2 = x[a0, a1]
                    v0 = mul(in2, f32(0.1))
                    v1 = sub(in0, v0)
                    v2 = sub(v1, in1)
                    v3 = exp(v2)
                    z[a0, a1] = v3
        return (z,)
    =>
    @loop
    def f(c: f32[4], x: f32[4, 8], total: f32[4]):
        with kernel('z', z=f32[4, 8]):
            for a0 in free(4):
                in0 = c[a0]
                in1 = total[a0]
                for a1 in free(8):
                    in2 = x[a0, a1]
                    v0 = rounded_mul(in2, f32(0.1))
                    v1 = sub(in0, v0)
                    v2 = sub(v1, in1)
                    v3 = exp(v2)
                    z[a0, a1] = v3
        return (z,)
    """
    kernels = [s for s in program.steps if isinstance(s, l.Kernel)]
    multiplying = {k for k in kernels if any(isinstance(x, l.Reduce) and nested_contraction(x) for x in k.carried)}
    made = {b for k in multiplying for b in k.writes}
    taken = {b for k in multiplying for b in k.reads}
    between = {k for k in kernels if not (made.isdisjoint(k.reads) or taken.isdisjoint(k.writes))}
    left = multiplying | between
    rest = [k for k in kernels if k not in left]
    scores = {k: added for k in rest if (added := _added(k))}
    found = {form[x] for k, added in scores.items() for form in (_forms(k),) for x in added}

    def products(kernel: l.Kernel) -> set[Node]:
        squares = _squares(kernel)
        if kernel in left or not found:
            return squares
        named = _forms(kernel)
        return squares | {x for x in kernel.terms if _named(x, "mul") and named[x] in found}

    return _each(program, log, "round_differences", "differences of which little may be left", products)


def _each(program: l.Program, log: Log, rule: str, why: str, products: Callable[[l.Kernel], set[Node]]) -> l.Program:
    """`program` with rounded_mul for some products of its kernels."""
    steps = tuple(computed_by("rounded_mul", s, products(s)) if isinstance(s, l.Kernel) else s for s in program.steps)
    for old, new in zip(program.steps, steps, strict=True):
        if new is not old:
            log.add(Event(PASS, rule, old.name, True, why))
            log.applied(PASS, rule, old.name, [old], [new])
    return l.Program(program.name, program.inputs, steps, program.results)


def _products(kernel: l.Kernel) -> set[Node]:
    """The products of floats, in 32 bits or more, of which whole numbers are made without being stored before."""
    rest = [a for x in kernel.terms if _makes_whole(x) for a in x.args]  # type: ignore[attr-defined]
    seen: set[Node] = set()
    while rest:
        x = rest.pop()
        if x not in seen and isinstance(x, l.Apply) and x.dtype.is_float:
            seen.add(x)
            rest += x.args
    return {x for x in seen if x.fn.name == "mul" and x.dtype.size >= 4}  # type: ignore[attr-defined]


def _added(kernel: l.Kernel) -> set[Node]:
    """The products of floats, in 32 bits or more, that something is added to in what is exponentiated as a difference:
    in that itself, and in the same scores where their largest is found.
    """
    powers: list[Any] = [x.args[0] for x in kernel.terms if _named(x, "exp")]  # type: ignore[attr-defined]
    rest = [x for x in powers if _named(x, "sub")]
    seen: set[Node] = set()
    while rest:
        x = rest.pop()
        if x not in seen and (isinstance(x, l.Apply) or (isinstance(x, l.Reduce) and x.monoid.name == "max")):
            seen.add(x)
            rest += x.args
    return _terms(filter(_is_sum, seen))


def _terms(sums: Iterable[Any]) -> set[Node]:
    """The products of floats, in 32 bits or more, among the terms of sums and differences."""
    terms = [y.args[0] if _named(y, "neg") else y for x in sums for y in x.args]
    return {y for y in terms if _named(y, "mul") and y.dtype.is_float and y.dtype.size >= 4}


def _is_sum(x: Any) -> bool:
    return _named(x, "add") or _named(x, "sub")


def _forms(kernel: l.Kernel) -> dict[Node, Node]:
    """What every term computes of which buffers, wherever in these: scores are computed once for their largest, once
    for the sum of their powers, and again for results.
    """
    memo: dict[Node, Any] = {}
    for x in topological([s.value for s in kernel.stores]):
        if isinstance(x, l.Load):
            memo[x] = l.Load(x.buffer, (0,) * len(x.index))
        else:
            memo[x] = l.Index(0) if isinstance(x, l.Index) else rebuilt(x, memo)
    return memo


def _squares(kernel: l.Kernel) -> set[Node]:
    """The squares, in 32 bits or more, that are subtracted from what is no number of the program."""
    differences: list[Any] = [x for x in kernel.terms if _named(x, "sub")]
    found = [x.args[1] for x in differences if not isinstance(x.args[0], l.Literal)]
    squares = {y for y in found if _named(y, "mul") and y.args[0] is y.args[1]}
    return {y for y in squares if y.dtype.is_float and y.dtype.size >= 4}


def _named(x: Any, name: str) -> bool:
    return isinstance(x, l.Apply) and x.fn.name == name


def _makes_whole(x: Any) -> bool:
    if not isinstance(x, l.Apply) or not x.args[0].dtype.is_float:  # type: ignore[attr-defined]
        return False
    return x.fn.name in STEPS or (is_cast(x.fn) and x.dtype.kind in ("int", "uint"))
