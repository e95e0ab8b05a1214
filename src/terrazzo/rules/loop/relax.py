"""Compute no more exactly than the reader rounds.

A quotient that is rounded to 16 bits at once, or as a factor of a product that is, needs no correctly rounded division:
two units in the last of its 24 bits are a thousandth of what f16 rounds away, and an IEEE division costs a GPU fifteen
instructions and a branch where this one costs two.
"""

from __future__ import annotations

from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast, scalar
from terrazzo.ir.node import Node, transform
from terrazzo.ir.types import f32
from terrazzo.rewrite.rule import Event, Log


def relax(program: l.Program, log: Log) -> l.Program:
    """`program` with bf16(div(a, b)) and f16(div(a, b)) of 32-bit floats made bf16(approx_div(a, b)), also where the
    quotient is a factor of what is rounded: bf16(mul(x, div(a, b))), as in silu.

    @loop
    def f(x: f32[4], y: f32[4]):
        with kernel('z', z=f16[4]):
            for a0 in free(4):
                in0 = x[a0]
                in1 = y[a0]
                v0 = div(in0, in1)
                v1 = f16(v0)
                z[a0] = v1
        return (z,)
    =>
    @loop
    def f(x: f32[4], y: f32[4]):
        with kernel('z', z=f16[4]):
            for a0 in free(4):
                in0 = x[a0]
                in1 = y[a0]
                v0 = approx_div(in0, in1)
                v1 = f16(v0)
                z[a0] = v1
        return (z,)
    """
    memo: dict[Node, Any] = {}
    steps = tuple(transform(s, _rounded, memo) if isinstance(s, l.Kernel) else s for s in program.steps)
    for old, new in zip(program.steps, steps, strict=True):
        if new is not old:
            log.add(Event("relax", "approx_div", old.name, True, "its quotients are rounded to 16 bits"))
            log.applied("relax", "approx_div", old.name, [old], [new])
    return l.Program(program.name, program.inputs, steps, program.results)


def _rounded(node: Any) -> Any:
    if isinstance(node, l.Apply) and is_cast(node.fn) and node.dtype.is_float and node.dtype.size == 2:
        (x,) = node.args
        if (relaxed := _factor(x)) is not x:
            return l.Apply(node.fn, (relaxed,))
    return node


def _factor(x: Any) -> Any:
    """A quotient without its correct rounding, or a product with such factors."""
    if not isinstance(x, l.Apply) or x.dtype is not f32:
        return x
    if x.fn.name == "div":
        return l.Apply(scalar("approx_div"), x.args)
    if x.fn.name == "mul" and (factors := tuple(map(_factor, x.args))) != x.args:
        return l.Apply(x.fn, factors)
    return x
