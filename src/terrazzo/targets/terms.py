"""Terms and index expressions as C++ or CUDA."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from terrazzo.errors import CompilerBug
from terrazzo.ir.address import flatten
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import CASTS, COMPARISONS
from terrazzo.ir.expr import FloorDiv, IntExpr, Loaded, Mod, Sum, at_least, bounds, comparison
from terrazzo.ir.node import Node, topological
from terrazzo.ir.ranges import Range, stays
from terrazzo.ir.types import DTYPES, DType, bf16, f16, f32


def c_type(dtype: DType) -> str:
    """The C++ name of an element type."""
    return dtype.name


def in_memory(dtype: DType) -> str:
    """The C++ name of what a processor's buffers hold: GCC has no vectors of bools that lie in memory."""
    return "u8" if dtype.kind == "bool" else c_type(dtype)


@dataclass
class Scope:
    """What terms and variables are called where code is being written. Inner scopes see outer names.

    `notes_zero` says whether the code notes divisions of whole numbers by zero; `spans` what named numbers may
    be, and `whole` the type of the code's indices.
    """

    names: dict[Node, str] = field(default_factory=dict)
    buffers: dict[l.Buffer, str] = field(default_factory=dict)
    counter: list[int] = field(default_factory=lambda: [0])
    notes_zero: bool = False
    spans: dict[Node, Range] = field(default_factory=dict)
    whole: str = "i64"

    def inner(self) -> Scope:
        return Scope(dict(self.names), self.buffers, self.counter, self.notes_zero, self.spans, self.whole)

    def fresh(self, prefix: str) -> str:
        """A name that nothing else has; no type either (the 64th name of all is no index called i64)."""
        self.counter[0] += 1
        name = f"{prefix}{self.counter[0] - 1}"
        return self.fresh(prefix) if name in DTYPES else name


def index(e: IntExpr, scope: Scope) -> str:
    """An index expression in arithmetic of the scope's type, or in int64_t where that does not hold what it comes by;
    floor division and remainder where the operand may be negative.
    """
    if isinstance(e, int):
        return str(e)
    if e in scope.names:
        return scope.names[e]
    match e:
        case Sum():
            text, wide = "", "" if scope.whole == "i64" or _short_range(e.on_the_way) else "(i64)"
            for c, fs in sorted(e.terms, key=lambda x: x[0] < 0):
                product = wide + " * ".join([*(index(f, scope) for f in fs), *([str(abs(c))] if abs(c) != 1 else [])])
                text += (" - " if c < 0 else " + ") + product if text else "-" * (c < 0) + product
            if e.constant or not text:
                text += f" {'-' if e.constant < 0 else '+'} {abs(e.constant)}" if text else str(e.constant)
            return f"({text})"
        case FloorDiv():
            a, b = index(e.a, scope), index(e.b, scope)
            return f"({a} / {b})" if at_least(e.a, 0) else f"tz_fdiv({a}, {b})"
        case Mod():
            a, b = index(e.a, scope), index(e.b, scope)
            return f"({a} % {b})" if at_least(e.a, 0) else f"tz_fmod_index({a}, {b})"
        case Loaded() if _stays(e, scope):
            return f"({scope.whole}){term(e.value, scope)}"
        case Loaded():
            return f"tz_at({term(e.value, scope)}, {index(e.extent, scope)}, bad)"
    raise CompilerBug(f"{e} has no value here")


def _stays(e: Loaded, scope: Scope) -> bool:
    """Whether an index from data is inside its dimension, whatever data is."""
    return stays(e.value, e.extent, scope.spans)


def literal(value: Any, dtype: DType) -> str:
    """A constant of an element type."""
    if dtype.is_float:
        if dtype.compute is not dtype:
            return f"tz_cast<{c_type(dtype)}>({literal(value, dtype.compute)})"
        limits = f"std::numeric_limits<{c_type(dtype)}>"
        if math.isnan(value):
            return f"{limits}::quiet_NaN()"
        if math.isinf(value):
            return f"({'-' if value < 0 else ''}{limits}::infinity())"
        text = float(value).hex()
        return f"({text}{'f' if dtype.name == 'f32' else ''})"
    if dtype.kind == "bool":
        return "true" if value else "false"
    if dtype.name == "i64" and value == -(2**63):
        return "INT64_MIN"
    suffix = "LL" if dtype.name == "i64" else "ULL" if dtype.name == "u64" else ""
    return f"(({c_type(dtype)}){int(value)}{suffix})"


def term(x: Node, scope: Scope) -> str:
    """A term by its name where it has one, else written out."""
    return scope.names[x] if x in scope.names else expression(x, scope)


def expression(x: Node, scope: Scope) -> str:
    """The right-hand side for one term; its operands are named or written out."""
    match x:
        case l.Literal():
            return literal(x.value, x.type)
        case l.Index(value=Loaded() as e) if scope.notes_zero and e not in scope.names and not _stays(e, scope):
            return f"tz_among({term(e.value, scope)}, {index(e.extent, scope)}, bad)"
        case l.Index():
            return f"(int64_t){index(x.value, scope)}"
        case l.Load():
            return load(x, scope)
        case l.Apply():
            return apply(x, scope)
        case k.Shuffle():
            return f"shuffle_xor({term(x.x, scope)}, {x.mask})"
        case k.Vote():
            return f"vote_{x.kind}({term(x.x, scope)})"
        case k.Remote():
            return f"remote({address(x.buffer, x.index, scope)}, {index(x.rank, scope)})"
        case l.Get():
            return component(scope.names[x.x], x.index)
    raise CompilerBug(f"no expression for {type(x).__name__}")


def component(name: str, k: int) -> str:
    """The k-th value of something with several: acc_1 of acc, acc_1[l] of acc[l]."""
    base, bracket, rest = name.partition("[")
    return f"{base}_{k}{bracket}{rest}"


def load(x: l.Load, scope: Scope) -> str:
    """An element of a buffer; 0 where a guard does not hold, and then nothing is read."""
    found = element(x.buffer, x.index, scope)
    if scope.notes_zero and x.dtype.kind == "bool":  # of a processor's memory
        found = f"({found} != 0)"
    if 0 in x.buffer.type.shape:  # nothing is there; an index from data is looked at all the same
        found = f"((void)({offset(x.buffer, x.index, scope)}), {c_type(x.dtype)}{{}})"
    return f"({guard(x.inside, scope)} ? {found} : {c_type(x.dtype)}{{}})" if x.inside else found


def element(place: l.Buffer, at: Sequence[IntExpr], scope: Scope) -> str:
    """An element of any place."""
    if isinstance(place, k.Registers) and not place.type.rank:
        return scope.buffers[place]
    if isinstance(place, k.Shared) and place.swizzle:
        return f"*{address(place, at, scope)}"
    return f"{scope.buffers[place]}[{offset(place, at, scope)}]"


def address(place: l.Buffer, at: Sequence[IntExpr], scope: Scope) -> str:
    """A pointer to an element of a place."""
    name, elements = scope.buffers[place], offset(place, at, scope)
    if isinstance(place, k.Shared) and place.swizzle:
        byte = f"swizzle<{place.swizzle}>({elements} * {place.type.dtype.size})"
        return f"reinterpret_cast<{c_type(place.type.dtype)}*>(reinterpret_cast<u8*>({name}) + {byte})"
    return name if elements == "0" else f"{name} + {elements}"


def offset(place: l.Buffer, at: Sequence[IntExpr], scope: Scope) -> str:
    """How many elements of a place come before one."""
    return index(flatten(tuple(at), place.type.element_strides), scope)


def guard(inside: Iterable[IntExpr], scope: Scope) -> str:
    """The conjunction of the guards."""
    found = []
    for e in inside:
        left, word, right = comparison(e)
        found.append(f"{index(left, scope)} {word} {index(right, scope)}")
    return " && ".join(found)


_WRAPPING = ("add", "sub", "mul", "neg")


def _short(x: Any, scope: Scope) -> str:
    """A place or a constant in 32 bits, where it fits: so a processor's vectors of what is chosen by comparing them are
    as long as those of what it is compared for. Nothing for anything else.
    """
    whole: IntExpr
    if isinstance(x, l.Index):
        whole = x.value
    elif isinstance(x, l.Literal) and x.type.is_integer:
        whole = int(x.value)
    else:
        return ""
    if isinstance(whole, Node) and any(isinstance(y, Loaded) and y not in scope.names for y in topological([whole])):
        return ""
    return f"(int32_t){index(whole, scope)}" if _short_range(bounds(whole)) else ""


def _short_range(found: tuple[int | None, int | None]) -> bool:
    """Whether all of a range fits into 32 bits."""
    low, high = found
    return low is not None and high is not None and low > -(1 << 31) and high < 1 << 31


def _rounded(x: l.Apply, scope: Scope) -> str:
    """A number that is rounded to 16 bits and widened again, by a processor; "" for anything else."""
    inner = x.args[0]
    if not scope.notes_zero or x.fn is not CASTS[f32] or not isinstance(inner, l.Apply):
        return ""
    if inner.fn not in (CASTS[f16], CASTS[bf16]) or inner.args[0].dtype is not f32:  # type: ignore[attr-defined]
        return ""
    return f"tz_rounded<{inner.fn.name}>({term(inner.args[0], scope)})"


def apply(x: l.Apply, scope: Scope) -> str:
    if rounded := _rounded(x, scope):
        return rounded
    args = [term(a, scope) for a in x.args]
    first = x.args[0].dtype  # type: ignore[attr-defined]
    if first.is_integer and x.fn.name in _WRAPPING:
        return f"tz_{x.fn.name}({', '.join(args)})"
    if scope.notes_zero and l.may_divide_by_zero(x):
        args[1] = f"tz_divisor({args[1]}, bad)"
    if scope.notes_zero and x.fn.name in COMPARISONS and all(shorter := [_short(a, scope) for a in x.args]):
        args = shorter
    return x.fn.c.format(*args, f="f" if first.name == "f32" else "", t=c_type(first))
