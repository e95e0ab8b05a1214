"""Numbers in float32 as two parts in float16, row by row, and their products: three in the place of six of bfloat16.

A float16 has 11 significant bits and 5 for exponents. So each row of a factor, along what is summed, is scaled by a
power of two that brings its largest number to 2^13 or more and below 2^15; and the second part is scaled by 2^11. What
these two leave of numbers that are 2^25 times as small as the largest of their row is added up for every row. The sums
of two rows will do if they are far larger than that can make them differ; if not, others stand in their place, which
CUDA cores sum (`ir/rescues.py`).

x = inf: its first part is 1, of its sign, and the second is x. NaN: as well. Parts that meet these are 0 where their
number is 0 only, and so the sums are infinite or NaN where those of float32 are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.ir.contraction import Contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.loop import apply
from terrazzo.ir.expr import Bound, IntExpr, Var
from terrazzo.ir.monoid import monoid
from terrazzo.ir.node import Node, substitute
from terrazzo.ir.sites import Product
from terrazzo.ir.types import Type, f32, i64
from terrazzo.rules.loop.precision.number_parts import pairs, total

SCALE = 2.0**11
"""By how much the second part is scaled up: what is left of a number is 2^-11 of it at most."""
LARGEST = 14
"""The exponent of the largest number of a row, scaled; or one less, since scales are squares."""
ROOT = 63
"""The largest exponent of the root of a scale: its square, and the inverse of that, are ordinary numbers."""
LEAST = 2.0**-24
"""The smallest float16 above 0."""
FEWER_DIGITS = 2.0**-12
"""Two parts of scaled numbers from here on leave 2^-23 of them at most, as rounding to float32 does twice."""
SURE = 2.0**22
"""How many times as large as what may be lost sums are that will do. Nearly always they are far larger: what is lost is
of either sign, and seldom meets the largest number of the other factor, as it is taken to do here.
"""
DEPTH = 256
"""Sums of fewer products are further off than those of float32, on some of the distributions of the tests."""


@dataclass(frozen=True)
class Halves:
    """The two parts of a factor in memory, and of each of its rows the root of what they are to be multiplied by, and
    how large sums are, at least, which what they leave hardly changes. So many rows of another factor lie `before` its
    own.
    """

    first: l.Buffer
    second: l.Buffer
    root: l.Buffer
    least: l.Buffer
    before: int = 0

    def at(self, index: Sequence[IntExpr]) -> tuple[IntExpr, ...]:
        """Where what the factor has somewhere, or the row of that, lies."""
        first, *others = index
        return (first + self.before, *others)


def depth_of(x: Node, c: Contraction) -> int | None:
    """Along which dimension a factor is summed, where it is a whole buffer, each dimension of which is an axis; None
    where it is not.
    """
    if not isinstance(x, l.Load) or x.inside or x.dtype is not f32:
        return None
    shape = x.buffer.type.static_shape
    whole = all(isinstance(i, Var | Bound) and i.extent == n for i, n in zip(x.index, shape, strict=True))
    along = [d for d, i in enumerate(x.index) if i in c.reduce.axes]
    return along[0] if whole and len(set(x.index)) == len(shape) and len(along) == 1 else None


def why_not(p: Product | None) -> str:
    """Why a product's factors are not two parts each; nothing where they may be."""
    if p is None or len(p.sites) != 1:
        return "two parts are of the factors of one product"
    (c,) = p.sites
    if len(c.terms) != 1 or len(c.reduce.axes) != 1:
        return "rows are scaled along one axis of sums"
    if c.reduce.axes[0].extent < DEPTH:
        return f"sums of fewer than {DEPTH} products are closer in six of bfloat16"
    if any(depth_of(x, c) is None for x in c.operands):
        return "rows that are scaled are those of a whole tensor"
    return ""


def halves(name: str, depth: int, laid_out: Type, fresh: Callable[[str], str]) -> Halves:
    """Where the parts of a tensor, summed along a dimension, come to lie."""
    rows = tuple(n for d, n in enumerate(laid_out.static_shape) if d != depth)
    first, second = (l.Buffer(fresh(f"{name}_{n}"), laid_out) for n in (1, 2))
    root, least = (l.Buffer(fresh(f"{name}_{x}"), Type(f32, rows)) for x in ("root", "least"))
    return Halves(first, second, root, least)


def makers(buffers: Sequence[l.Buffer], depth: int, found: Halves, name: str, source: str) -> list[l.Kernel]:
    """The kernels that store them: of one tensor, or of the rows of two, one behind the other. One kernel does, whose
    threads have a row; but where rows lie across memory, few threads would have all of it: there the roots come first,
    and then what goes by these.
    """
    shape = found.first.type.static_shape
    rows = [d for d in range(len(shape)) if d != depth]
    names = {d: f"a{n}" for n, d in enumerate([*rows, depth])}
    axes = {d: Var(names[d], shape[d]) for d in (*rows, depth)}
    along = Var("$k", shape[depth])

    def at(k: IntExpr) -> tuple[IntExpr, ...]:
        return tuple(k if d == depth else axes[d] for d in range(len(shape)))

    def loaded(k: IntExpr) -> Node:
        if len(buffers) == 1:
            return l.Load(buffers[0], at(k))
        (row, *others), end = at(k), buffers[0].type.static_shape[0]
        one = l.Load(buffers[0], (row, *others), (end - 1 - row,))
        other = l.Load(buffers[1], (row - end, *others), (row - end,))
        return apply("where", apply("lt", l.Index(row), l.Literal(end, i64)), one, other)

    def reduced(name: str, term: Callable[[Node], Node]) -> l.Reduce:
        return l.Reduce.make(monoid(name), (along,), (term(loaded(along)),))

    def stored(scale: Node) -> tuple[list[l.Store], l.Store]:
        """The two parts, and how large sums are to be, of rows that are scaled so."""
        halves = zip((found.first, found.second), parts(loaded(axes[depth]), scale)[:2], strict=True)
        lost = reduced("sum", lambda x: parts(x, scale)[2])
        least = apply("mul", lost, number(2.0 ** (LARGEST + 1) * SURE / SCALE))
        return [l.Store(b, at(axes[depth]), x) for b, x in halves], l.Store(found.least, row, least)

    row, every = tuple(axes[d] for d in rows), tuple(axes.values())
    root, scale = scales(reduced("max", lambda x: apply("where", finite(x), apply("abs", x), number(0.0))))
    first = l.Store(found.root, row, root)
    if any(b.type.element_strides[depth] == 1 for b in buffers):
        two, least = stored(scale)
        return [l.Kernel(name, every, (first, least, *two), source)]
    known = l.Load(found.root, row)
    two, least = stored(apply("div", number(1.0), apply("mul", known, known)))
    apart = (found.root.name, row, (first,)), (found.least.name, row, (least,)), (name, every, tuple(two))
    return [l.Kernel(x, axes, stores, source) for x, axes, stores in apart]


def scales(largest: Node) -> tuple[Node, Node]:
    """Of a row whose largest number is that, the root of what its scaled numbers are to be multiplied by, and what its
    numbers are to be.
    """
    half = apply("mul", apply("sub", apply("log2", largest), number(LARGEST - 1.0)), number(0.5))
    root = apply("max", apply("min", apply("floor", half), number(float(ROOT))), number(-float(ROOT)))
    return apply("exp2", root), apply("exp2", apply("mul", root, number(-2.0)))


def parts(x: Node, scale: Node) -> tuple[Node, Node, Node]:
    """The two parts of a number; and what they leave of a small one, times `SCALE`, with what the product of two second
    parts would add, which is left out.
    """
    real, scaled = finite(x), apply("mul", x, scale)
    some = apply("where", real, apply("max", apply("abs", scaled), number(LEAST)), number(1.0))
    near = apply("f16", apply("where", apply("eq", x, number(0.0)), x, apply("copysign", some, x)))
    left = apply("mul", apply("sub", scaled, apply("f32", near)), number(SCALE))
    second = apply("f16", apply("where", real, left, x))
    held = apply("f32", second)
    lost = apply("add", apply("abs", apply("sub", left, held)), apply("mul", apply("abs", held), number(2.0**-12)))
    small = apply("lt", apply("abs", scaled), number(FEWER_DIGITS))
    return near, second, apply("where", small, lost, number(0.0))


def multiplied(kernel: l.Kernel, c: Contraction, found: tuple[Halves, Halves]) -> l.Kernel:
    """A kernel whose product is that of two parts of each factor, and its own where that will not do."""
    axes, _ = l.open_binder(c.reduce)
    own = dict(zip(c.reduce.axes, axes, strict=True))
    loads: list[Any] = [substitute(x, own) for x in c.terms[0]]
    halved = [[l.Load(b, h.at(x.index)) for b in (h.first, h.second)] for x, h in zip(loads, found, strict=True)]
    terms = [(i + j, apply("mul", *(apply("f32", halved[n][p]) for n, p in ((0, i), (1, j))))) for i, j in pairs(2)]
    fast = l.Reduce.make(c.reduce.monoid, axes, (total(terms, SCALE),))
    rows = [h.at([i for i in x.index if i not in axes]) for x, h in zip(loads, found, strict=True)]
    root = apply("mul", *(l.Load(h.root, at) for h, at in zip(found, rows, strict=True)))
    least = apply("add", *(l.Load(h.least, at) for h, at in zip(found, rows, strict=True)))
    sure = apply("not_", apply("lt", apply("abs", fast), least))
    value = apply("where", sure, apply("mul", apply("mul", fast, root), root), c.reduce)
    stores = tuple(substitute(s, {c.reduce: value}) for s in kernel.stores)
    return l.Kernel(kernel.name, kernel.axes, stores, kernel.source)


def finite(x: Node) -> Node:
    """Whether a number is neither infinite nor NaN."""
    return apply("lt", apply("abs", x), number(float("inf")))


def number(value: float) -> l.Literal:
    """A number in float32."""
    return l.Literal(value, f32)
