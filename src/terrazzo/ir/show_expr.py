"""Printing what all IRs have in common: numbers, index expressions and conditions, types."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.expr import Bound, FloorDiv, IntExpr, Loaded, Mod, Size, Sum, Var, comparison
from terrazzo.ir.node import Node
from terrazzo.ir.types import Type

Namer = Callable[[Node], str]


def show_type(ty: Type | tuple[Any, ...] | None) -> str:
    """`f32[2, 3]`, `f32` for a scalar, `f32[4, 8] @ (1, 4)` with strides, a tuple for several."""
    if ty is None:
        return "None"
    if isinstance(ty, tuple):
        return "(" + ", ".join(map(show_type, ty)) + ("," if len(ty) == 1 else "") + ")"
    return str(ty)


def show_expr(e: IntExpr, name: Namer | None = None) -> str:
    """An index expression; `name` names the terms behind loaded indices."""
    if isinstance(e, int):
        return str(e)
    match e:
        case Var() | Size():
            return e.name
        case Bound():
            return f"r{e.label}"
        case Sum():
            return _sum(e, name)
        case FloorDiv():
            return f"{_factor(e.a, name)} // {_factor(e.b, name)}"
        case Mod():
            return f"{_factor(e.a, name)} % {_factor(e.b, name)}"
        case Loaded():
            value, of = e.value, name or repr
            inner = f"{of(value.x)}[{show_list(value.index, name) or '()'}]" if isinstance(value, t.Read) else of(value)
            return f"at({inner}, {show_expr(e.extent, name)})"
    raise TypeError(f"no text for {type(e).__name__}")


def _sum(e: Sum, name: Namer | None) -> str:
    text = ""
    for c, factors in e.terms:
        product = " * ".join(_factor(f, name) for f in factors)
        part = product if abs(c) == 1 else f"{product} * {abs(c)}"
        text += (f" {'-' if c < 0 else '+'} " if text else ("-" if c < 0 else "")) + part
    if not text:
        return str(e.constant)
    return text + (f" {'-' if e.constant < 0 else '+'} {abs(e.constant)}" if e.constant else "")


def _factor(e: IntExpr, name: Namer | None) -> str:
    text = show_expr(e, name)
    return f"({text})" if isinstance(e, (Sum, FloorDiv, Mod)) else text


def show_list(items: Iterable[IntExpr], name: Namer | None = None) -> str:
    return ", ".join(show_expr(i, name) for i in items)


def show_condition(e: IntExpr, name: Namer | None = None) -> str:
    """`e >= 0` as a person would write it: `lane == 0`, `t < 53`, `warp >= 4`, `i <= j + 2`."""
    left, word, right = comparison(e)
    return f"{show_expr(left, name)} {word} {show_expr(right, name)}"


def show_conditions(inside: Iterable[IntExpr], name: Namer | None = None) -> str:
    """All of them."""
    return " and ".join(show_condition(e, name) for e in inside)


def show_inside(inside: Iterable[IntExpr], name: Namer | None = None) -> str:
    tests = show_conditions(inside, name)
    return f" if {tests} else 0" if tests else ""


def number(v: bool | int | float | complex) -> str:
    """A Python number that reads back as itself; inf and nan are names."""
    if isinstance(v, complex):
        return f"complex({number(v.real)}, {number(v.imag)})"
    if isinstance(v, float) and not math.isfinite(v):
        return "nan" if math.isnan(v) else ("inf" if v > 0 else "-inf")
    return repr(v)
