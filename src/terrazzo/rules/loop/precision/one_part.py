"""Numbers in float32 as one in float16 each, scaled, where the digits of TF32 will do (`tf32_mul`).

A float16 has as many digits as TF32, 11, and 5 bits for exponents where TF32 has 8. So a factor is scaled by powers of
two that bring its largest number, or that of each of its rows, to 2^13 or more and below 2^15: what is 2^27 times as
small as that has fewer digits, and is off by 2^-38 of the largest at most, where TF32 is off by 2^-11 of each number. A
row is all that belongs to one place along an axis that the product keeps, such as an image, or a filter: of other rows
it takes nothing. Products are as fast as those of bfloat16, twice as fast as TF32's.

Infinities and NaN are what they are, and a number that is not 0 has a part that is not 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from terrazzo.ir.contraction import Contraction, operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.loop import apply
from terrazzo.ir.expr import Bound, IntExpr, Var
from terrazzo.ir.monoid import monoid
from terrazzo.ir.node import Node, substitute
from terrazzo.ir.types import Type, f16, f32
from terrazzo.rules.loop.definitions import computed_by
from terrazzo.rules.loop.precision.number_parts import laid_out, order_of
from terrazzo.rules.loop.precision.scaled_parts import LEAST, finite, number, scales

SHORT = 8192
"""Numbers of a row that the threads of a block keep, and scale by the largest of them: filters, and small images."""


@dataclass(frozen=True)
class Single:
    """A factor in memory as numbers in float16, and the root of what these are to be multiplied by, for each place
    along the dimensions `rows` of it; one for all, where there are none.
    """

    part: l.Buffer
    root: l.Buffer
    rows: tuple[int, ...]

    def rooted(self, index: Sequence[IntExpr]) -> l.Load:
        """The root for what lies somewhere."""
        return l.Load(self.root, tuple(index[d] for d in self.rows))


def why_not(c: Contraction) -> str:
    """Why a product's factors are not one part each; nothing where they may be."""
    if len(c.terms) != 1:
        return "it has several terms"
    if any(x.dtype is not f32 for x in c.operands):  # type: ignore[attr-defined]
        return "what is scaled is a number in float32"
    return ""


def in_memory(c: Contraction) -> bool:
    """Whether a product's factors are tensors in memory; what is computed on its way is stored first."""
    return all(isinstance(x, l.Load) for x in c.operands)


def rows_of(x: l.Load, c: Contraction) -> tuple[int, ...]:
    """The dimensions of a factor, from the outermost in memory on, along each of which an axis goes that the product
    keeps, from end to end, and that is in no other index. Where the outermost is none, the first of all that are.
    """
    shape, order = x.buffer.type.static_shape, order_of(x.buffer.type)

    def kept(d: int) -> bool:
        i = x.index[d]
        others = [*x.index[:d], *x.index[d + 1 :], *x.inside]
        if not isinstance(i, Var | Bound) or i in c.reduce.axes or i.extent != shape[d] or shape[d] == 1:
            return False
        return not any(isinstance(j, Node) and i in j.free for j in others)

    outer = tuple(takewhile(kept, (d for d in order if shape[d] > 1)))
    return outer or tuple(d for d in range(len(shape)) if kept(d))[:1]


def makers(
    buffer: l.Buffer, rows: tuple[int, ...], inner: int | None, source: str, fresh: Callable[[str], str]
) -> tuple[Single, list[l.Kernel]]:
    """Where a tensor's numbers in float16 come to lie, along the dimension `inner` if not as the tensor does, and the
    kernels that store them: the roots first; or one for both, whose threads have a row that is `SHORT`.
    """
    shape, kind = buffer.type.static_shape, laid_out(buffer.type, f16, inner)
    part = l.Buffer(fresh(f"{buffer.name}_1"), kind)
    found = Single(part, l.Buffer(fresh(f"{buffer.name}_root"), Type(f32, tuple(shape[d] for d in rows))), rows)
    order = order_of(kind)
    at = tuple(Var(f"a{order.index(d)}", n) for d, n in enumerate(shape))
    every, here = tuple(at[d] for d in order), tuple(at[d] for d in rows)
    lines = tuple(x if d in rows else Var(f"${d}", x.extent) for d, x in enumerate(at))
    along = tuple(x for d, x in enumerate(lines) if d not in rows)
    size = apply("abs", l.Load(buffer, lines))
    size = apply("where", finite(l.Load(buffer, lines)), size, number(0.0))
    root, scale = scales(l.Reduce.make(monoid("max"), along, (size,)))
    first, name = l.Store(found.root, here, root), fresh(f"{buffer.name}_part")
    outer = [tuple(d for d in x if shape[d] > 1)[: len(rows)] for x in (order_of(buffer.type), order)]
    if rows and outer == [rows, rows] and math.prod(shape) <= SHORT * math.prod(shape[d] for d in rows):
        both = first, l.Store(part, at, _part(l.Load(buffer, at), scale))
        return found, [l.Kernel(name, every, both, source)]
    known = found.rooted(at)
    second = l.Store(part, at, _part(l.Load(buffer, at), apply("div", number(1.0), apply("mul", known, known))))
    return found, [l.Kernel(found.root.name, here, (first,), source), l.Kernel(name, every, (second,), source)]


def multiplied(kernel: l.Kernel, c: Contraction, found: Mapping[Node, tuple[l.Load, Single]]) -> l.Kernel:
    """A kernel whose product is that of the parts of its factors, each with where it is loaded from."""
    axes, _ = l.open_binder(c.reduce)
    own = dict(zip(c.reduce.axes, axes, strict=True))
    factors = [found[x] for x in map(operand, c.terms[0])]
    parts = [apply("f32", substitute(l.Load(x.part, at.index, at.inside), own)) for at, x in factors]
    root = apply("mul", *(x.rooted(at.index) for at, x in factors))
    total = l.Reduce.make(c.reduce.monoid, axes, (apply("mul", *parts),))
    value = apply("mul", apply("mul", total, root), root)
    return l.Kernel(
        kernel.name, kernel.axes, tuple(substitute(s, {c.reduce: value}) for s in kernel.stores), kernel.source
    )


def exact(program: l.Program) -> l.Program:
    """`program` with products as they are in place of those of which fewer digits would do."""

    def rough(kernel: l.Kernel) -> set[Node]:
        return {x for x in kernel.terms if isinstance(x, l.Apply) and x.fn.name == "tf32_mul"}

    steps = tuple(computed_by("mul", s, rough(s)) if isinstance(s, l.Kernel) else s for s in program.steps)
    return l.Program(program.name, program.inputs, steps, program.results)


def _part(x: Node, scale: Node) -> Node:
    """A number in float16, of which it is so many times as large."""
    some = apply("copysign", apply("max", apply("abs", apply("mul", x, scale)), number(LEAST)), x)
    return apply("f16", apply("where", apply("and_", finite(x), apply("ne", x, number(0.0))), some, x))
