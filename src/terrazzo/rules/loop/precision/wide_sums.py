"""Running sums, and short sums of squares, in float64: on a processor.

What is added up in float32 is off by a rounding for every step. PyTorch takes running sums and variances on a processor
in float64, so that only the last rounding is left, and we must be no further off. Squares are widened before they are
taken, with the differences they are of: of a few, a rounding of each is more than what the sum is off by. (Of many, the
roundings of each cancel out; how their sum is taken is up to the target.)
"""

from __future__ import annotations

import math
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import Node, transform
from terrazzo.ir.types import f32, f64
from terrazzo.rewrite.rule import Event, Log

SUMS = ("sum", "prod", "logsumexp")
EXACT = ("add", "sub", "mul", "neg")
"""What is computed in float64 for a sum in float64; whatever else it adds up is computed as it was."""
SHORT = 256
"""Steps of a short sum of squares, at most."""


def wide_sums(program: l.Program, log: Log) -> l.Program:
    """`program` with running sums and products in float32, and short sums of squares, taken in float64, then rounded.

    @loop
    def f(x: f32[4, 8]):
        with kernel('z', z=f32[4], y=f32[4, 8]):
            for a0 in free(4):
                for r0 in reduce(8):
                    in0 = x[a0, r0]
                    v0 = mul(in0, in0)
                    acc0 <- sum(v0)
                z[a0] = acc0
                for a1 in scan(8):
                    in1 = x[a0, a1]
                    acc1 <- sum(in1)
                    y[a0, a1] = acc1
        return (y, z)
    =>
    @loop
    def f(x: f32[4, 8]):
        with kernel('z', z=f32[4], y=f32[4, 8]):
            for a0 in free(4):
                for r0 in reduce(8):
                    in0 = x[a0, r0]
                    v0 = f64(in0)
                    v1 = mul(v0, v0)
                    acc0 <- sum(v1)
                v2 = f32(acc0)
                z[a0] = v2
                for a1 in scan(8):
                    in1 = x[a0, a1]
                    v3 = f64(in1)
                    acc1 <- sum(v3)
                    v4 = f32(acc1)
                    y[a0, a1] = v4
        return (y, z)
    """
    pairs: set[Node] = set()  # of several values, now in float64: who reads one reads it rounded

    def wider(node: Any) -> Any:
        if isinstance(node, l.Get) and node.x in pairs:
            return _rounded(node)
        if not isinstance(node, l.Reduce | l.Scan) or not _added(node):
            return node
        args = tuple(map(_wide, node.args))
        if isinstance(node, l.Reduce):
            new: l.Term = l.Reduce(node.monoid, node.axes, args)
        else:
            new = l.Scan(node.monoid, node.axis, args, node.at)
        if node.monoid.width == 1:
            return _rounded(new)
        pairs.add(new)
        return new

    memo: dict[Node, Any] = {}
    steps = tuple(transform(s, wider, memo) if isinstance(s, l.Kernel) else s for s in program.steps)
    for old, new in zip(program.steps, steps, strict=True):
        if new is not old:
            log.add(Event("wide_sums", "wide", old.name, True, "its sums are rounded once"))
            log.applied("wide_sums", "wide", old.name, [old], [new])
    return l.Program(program.name, program.inputs, steps, program.results)


def _added(x: l.Reduce | l.Scan) -> bool:
    """Whether it is a running sum or product of numbers in float32, or a short sum of their squares."""
    types = x.dtype if isinstance(x.dtype, tuple) else (x.dtype,)
    if x.monoid.name not in SUMS or any(t is not f32 for t in types):
        return False
    return isinstance(x, l.Scan) or (x.monoid.name == "sum" and _square(x.args[0]) and _steps(x) <= SHORT)


def _square(x: Any) -> bool:
    return isinstance(x, l.Apply) and x.fn.name == "mul" and x.args[0] is x.args[1]


def _steps(x: l.Reduce) -> int | float:
    return math.prod(a.extent if isinstance(a.extent, int) else math.inf for a in x.axes)


def _rounded(x: Node) -> Node:
    return l.apply("f32", x)


def _wide(x: Any) -> Any:
    """A number in float32 in float64, without what its last sums and products were rounded by."""
    if isinstance(x, l.Literal):
        return l.Literal(x.value, f64)
    if isinstance(x, l.Apply) and x.fn.name in EXACT:
        return l.Apply(x.fn, tuple(map(_wide, x.args)))
    return l.apply("f64", x)
