"""Scores times a constant, such as log2(e): who takes it in, and where it could make infinities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast


def scaled(x: Any, by: float) -> Any:
    """x times a positive constant, which constants of x take in."""
    if isinstance(x, l.Literal):
        return l.Literal(x.value * by, x.type)
    if isinstance(x, l.Apply) and x.fn.name == "mul":
        for one, other in (x.args, x.args[::-1]):
            if isinstance(other, l.Literal):
                return scaled(one, by * other.value) if other.value > 0 else l.apply("mul", one, scaled(other, by))
    if isinstance(x, l.Apply) and x.fn.name == "div" and isinstance(x.args[1], l.Literal) and x.args[1].value > 0:
        return scaled(x.args[0], by / x.args[1].value)
    if isinstance(x, l.Apply) and x.fn.name in ("add", "sub"):
        return l.apply(x.fn.name, *(scaled(a, by) for a in x.args))
    if isinstance(x, l.Apply) and x.fn.name == "where":
        return l.apply("where", x.args[0], *(scaled(a, by) for a in x.args[1:]))
    return l.apply("mul", x, l.Literal(by, x.dtype)) if by != 1 else x


def unscaled(x: Any) -> tuple[Any, l.Literal | None]:
    """What x is a positive multiple of, at all places that are not -inf, and the constant: the largest x is that
    multiple of the largest, and nobody has to multiply before the largest is known.
    """
    if not isinstance(x, l.Apply):
        return x, None
    args: Any = x.args
    if x.fn.name == "mul" and isinstance(args[1], l.Literal) and 0 < args[1].value < math.inf:
        return args[0], args[1]
    if x.fn.name == "where" and is_value(args[2], -math.inf):
        inner, by = unscaled(args[1])
        return l.apply("where", args[0], inner, args[2]), by
    for one, other in (args, args[::-1]) if x.fn.name == "add" else ():
        hides = isinstance(other, l.Apply) and other.fn.name == "where"
        if hides and is_value(other.args[1], 0.0) and is_value(other.args[2], -math.inf):
            inner, by = unscaled(one)
            return l.apply("add", inner, other), by
    return x, None


def is_value(x: Any, value: float | bool) -> bool:
    """Whether a term is this constant."""
    return isinstance(x, l.Literal) and x.value == value


def stays_finite(x: Any, by: float) -> bool:
    """Whether no part of x that is finite becomes an infinity in `scaled(x, by)`, whatever the data."""
    if isinstance(x, l.Literal):
        return math.isinf(x.value) or abs(x.value * by) <= float(np.finfo(x.dtype.numpy).max)
    if isinstance(x, l.Apply) and x.fn.name == "mul":
        for one, other in (x.args, x.args[::-1]):
            if isinstance(other, l.Literal):
                return stays_finite(one, by * other.value) if other.value > 0 else by * -other.value <= 1
    if isinstance(x, l.Apply) and x.fn.name == "div" and isinstance(x.args[1], l.Literal) and x.args[1].value > 0:
        return stays_finite(x.args[0], by / x.args[1].value)
    if isinstance(x, l.Apply) and x.fn.name in ("add", "sub", "where"):
        return all(stays_finite(a, by) for a in x.args[x.fn.name == "where" :])
    return by <= 1


def at_most(x: Any) -> float:
    """What a term is at most, without its sign, by its constants alone; an infinity where they do not say."""
    if isinstance(x, l.Literal):
        return abs(x.value)
    if not isinstance(x, l.Apply):
        return 1.0 if x.dtype.name == "bool" else math.inf
    if is_cast(x.fn):
        return at_most(x.args[0])
    if x.fn.name == "mul":
        return math.prod(map(at_most, x.args))
    if x.fn.name == "where":
        return max(map(at_most, x.args[1:]))
    return 1.0 if x.dtype.name == "bool" else math.inf
