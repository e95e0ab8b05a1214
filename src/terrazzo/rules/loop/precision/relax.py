"""Compute no more exactly than the reader rounds.

A quotient that is rounded to 16 bits at once, or as a factor of a product that is, needs no correctly rounded division:
two units in the last of its 24 bits are a thousandth of what f16 rounds away, and an IEEE division costs a GPU fifteen
instructions and a branch where this one costs two. So it is with the functions that activations are made of: what
follows a product in its tile is computed while nothing is multiplied.
"""

from __future__ import annotations

import math
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.node import Node, transform
from terrazzo.ir.types import f32
from terrazzo.rewrite.rule import Event, Log

LOG2E = math.log2(math.e)


def relax(program: l.Program, log: Log) -> l.Program:
    """`program` with bf16(div(a, b)) and f16(div(a, b)) of 32-bit floats made bf16(approx_div(a, b)), also where the
    quotient is a factor of what is rounded: bf16(mul(x, div(a, b))). So are x / (1 + exp(-y)), as in silu, 1 + tanh(y)
    and the normal distribution function, as in gelu, whose approximations are as good near 0.

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
            log.add(Event("relax", "approximate", old.name, True, "its factors are rounded to 16 bits"))
            log.applied("relax", "approximate", old.name, [old], [new])
    return l.Program(program.name, program.inputs, steps, program.results)


def _rounded(node: Any) -> Any:
    if isinstance(node, l.Apply) and is_cast(node.fn) and node.dtype.is_float and node.dtype.size == 2:
        (x,) = node.args
        if (relaxed := _factor(x)) is not x:
            return l.Apply(node.fn, (relaxed,))
    return node


def _factor(x: Any) -> Any:
    """A factor of what is rounded, with an error that is small beside it."""
    if not isinstance(x, l.Apply) or x.dtype is not f32:
        return x
    name, args = x.fn.name, x.args
    if name == "mul" and (factors := tuple(map(_factor, args))) != args:
        return l.Apply(x.fn, factors)
    if name == "div":
        return _quotient(*args)
    if name == "ndtr":
        return l.apply("approx_ndtr", *args)
    if (y := _beside_one(x, "tanh")) is not None:  # 1 + tanh(y) = 2 / (1 + exp(-2 y))
        return l.apply("mul", _number(2.0), l.apply("approx_logistic", l.apply("mul", y, _number(-2 * LOG2E))))
    return x


def _quotient(a: Any, b: Any) -> Any:
    """A quotient without its correct rounding; that of 1 + exp(-y) with an approximate exponential."""
    exponent = _beside_one(b, "exp")
    if exponent is None:
        return l.apply("approx_div", a, b)
    bare, by = (exponent.args[0], -LOG2E) if _is(exponent, "neg") else (exponent, LOG2E)
    logistic = l.apply("approx_logistic", l.apply("mul", bare, _number(by)))
    return logistic if _one(a) else l.apply("mul", a, logistic)


def _beside_one(x: Any, name: str) -> Any:
    """What f is taken of in 1 + f(y), where f has this name; else None."""
    for one, other in (x.args, x.args[::-1]) if _is(x, "add") else ():
        if _one(one) and _is(other, name):
            return other.args[0]
    return None


def _is(x: Any, name: str) -> bool:
    return isinstance(x, l.Apply) and x.fn.name == name


def _one(x: Any) -> bool:
    return isinstance(x, l.Literal) and x.value == 1


def _number(value: float) -> l.Literal:
    return l.Literal(value, f32)
