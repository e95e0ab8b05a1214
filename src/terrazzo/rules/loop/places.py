"""What whole numbers are made of is rounded as it is written: a compiler may leave out the rounding of a product that
something is added to, in one kernel and not in another. Places and their weights, computed where they are needed, would
be those of different elements then.
"""

from __future__ import annotations

from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.node import Node, rebuilt, topological
from terrazzo.rewrite.rule import Event, Log

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
    steps = tuple(_rounded(s) if isinstance(s, l.Kernel) else s for s in program.steps)
    for old, new in zip(program.steps, steps, strict=True):
        if new is not old:
            log.add(Event(PASS, "round_places", old.name, True, "floats become whole numbers"))
            log.applied(PASS, "round_places", old.name, [old], [new])
    return l.Program(program.name, program.inputs, steps, program.results)


def _rounded(kernel: l.Kernel) -> l.Kernel:
    products = _products(kernel)
    if not products:
        return kernel
    memo: dict[Node, Any] = {}
    for x in topological([kernel]):
        new: Any = rebuilt(x, memo)
        memo[x] = l.apply("rounded_mul", *new.args) if x in products else new
    return memo[kernel]  # type: ignore[no-any-return]


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


def _makes_whole(x: Any) -> bool:
    if not isinstance(x, l.Apply) or not x.args[0].dtype.is_float:  # type: ignore[attr-defined]
        return False
    return x.fn.name in STEPS or (is_cast(x.fn) and x.dtype.kind in ("int", "uint"))
