"""Numbers in float32 as sums of numbers in bfloat16, whose products tensor cores take (ADR 009).

A float32 has 24 significant bits, and a bfloat16 has 8 with the same range of exponents. So x = x1 + x2/s + x3/s^2 with
s = 2^6, each what is left rounded to 8 bits, and of the nine products of x and w the six whose ranks add to at most
four leave out less than float32 rounds away:

    x w  ~  (x3 w1 + x2 w2 + x1 w3) / s^2  +  (x2 w1 + x1 w2) / s  +  x1 w1

They are written, and added, the small ones first. Two parts and three products are closer than tf32, one is bfloat16.
Scaled, the later parts of small numbers are no smaller than a bfloat16 may be: all of x is there from 2^-122 on, and
from 2^-145 on a part. Sums of theirs are still smaller than those of x1 w1, so they overflow no earlier.

Parts are rounded to nearest, so what is left out is of either sign: were they cut, every product would be a little too
small, and sums over thousands of rows (the gradient of a bias) would keep that, where errors of either sign cancel.

What is no ordinary number keeps its meaning. The parts of large numbers are cut towards zero and have the sign of the
number, so products of two such that overflow do so on the same side, and none becomes infinite (but the second of two
is rounded, so numbers 2^-16 below the largest may overflow). The last part alone is infinite or NaN, and it meets no
part but the other factor's first one, which is 0 only where that factor is: so infinity times a number is infinite, and
times zero NaN. The first part of an infinity is 1, so that two of them meet as they should.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from itertools import groupby

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.loop import apply
from terrazzo.ir.node import Node
from terrazzo.ir.types import DType, Type, bf16, bool_, f32, i8, ordered_strides, u8

SCALE = 2.0**6
"""By how much a part is scaled up, and the next one once more: what is left of a number is 2^-7 of it at most."""
SMALLEST = 2.0**-133
"""The smallest bfloat16 above 0."""
LARGE = 2.0**60
"""Numbers from here on are cut. Of smaller ones, no sum of a step's products overflows."""
FAR = 2.0**-11
"""How products with second parts of float16 are scaled; with those of bfloat16 2^-6."""
ALIGNED = 8
"""Rows of parts begin at multiples of so many: 16 bytes, as TMA takes them."""
EXACT = (bf16, i8, u8, bool_)
"""What a bfloat16 holds as it is: three products less for a factor of such a type beside one of float32, or two."""


def every_digit(scales: Sequence[float]) -> bool:
    """Whether someone wants all digits of float32 of products that are scaled so: of three scales, or so far apart."""
    return len(set(scales)) > 2 or min(scales) <= FAR


def pairs(count: int) -> list[tuple[int, int]]:
    """Which of `count` parts of both factors are multiplied, the smallest products first."""
    return [(rank - j, j) for rank in reversed(range(count)) for j in range(rank + 1)]


def parts(x: Node, count: int, scale: float = SCALE) -> list[Node]:
    """A term in float32 as so many terms in bfloat16 that add up to it, each but the first times `scale` once more than
    the one before. From `LARGE` on they have its sign.
    """
    if count == 1:
        return [apply("bf16", x)]
    size = apply("abs", x)
    finite, large = apply("lt", size, _number(float("inf"))), apply("ge", size, _number(LARGE))
    some = apply("where", finite, apply("max", size, _number(SMALLEST)), _number(1.0))
    first = apply("where", apply("eq", x, _number(0.0)), x, apply("copysign", some, x))
    found: list[Node] = [_rounded(first, large)]
    left = _left(x, found[0], scale)
    for _ in range(count - 2):
        found.append(_rounded(left, large, finite))
        left = _left(left, found[-1], scale)
    return [*found, apply("bf16", left)]


def few_parts(x: Node, count: int) -> list[Node | None]:
    """The same of a number of `EXACT`, which is its own first part: None where a part is 0 whatever the number is. One
    of floating point that is not finite is the last part, which alone may be that.
    """
    first, last = apply("bf16", x) if x.dtype is not bf16 else x, None  # type: ignore[attr-defined]
    if x.dtype is bf16 and count > 1:  # type: ignore[attr-defined]
        wide = apply("f32", x)
        finite = apply("lt", apply("abs", wide), _number(float("inf")))
        first = apply("bf16", apply("where", finite, wide, apply("copysign", _number(1.0), wide)))
        last = apply("bf16", apply("where", finite, _number(0.0), wide))
    return [first, *(None for _ in range(count - 2)), last][:count]


def small_parts(x: Node, count: int) -> list[Node]:
    """The same of a number that is neither large nor infinite, as weights are: what parts leave, rounded."""
    found: list[Node] = []
    for _ in range(count):
        found.append(apply("bf16", x))
        x = _left(x, found[-1], 1.0)
    return found


def ordinary(x: Node, count: int) -> tuple[list[Node], Node, Node]:
    """The parts of a number that is neither large nor tiny nor 0, in few operations, its size, and that of its first
    part: where the one is below `LARGE` and the other above 0, its parts are these.
    """
    found: list[Node] = []
    left, first = x, x
    for _ in range(count - 1):
        near = apply("f32", apply("bf16", left))
        first = first if found else near
        found.append(apply("bf16", near))  # of two neighbours at once, where each is rounded by itself
        left = apply("mul", apply("sub", left, near), _number(SCALE))
    return [*found, apply("bf16", left)], apply("abs", x), apply("abs", first)


def counted(terms: Sequence[Node], x: Node) -> int:
    """Into how many parts a number is, where terms are the parts of it; else 0."""
    if x.dtype is not f32:  # type: ignore[attr-defined]
        return 0
    return next((n for n in (2, 3) if set(terms) == set(parts(x, n))), 0)


def _left(x: Node, part: Node, scale: float) -> Node:
    """What a part leaves of a number, scaled."""
    left = apply("sub", x, apply("f32", part))
    return apply("mul", left, _number(scale)) if scale != 1 else left


def total(products: Sequence[tuple[int, Node]], scale: float = SCALE) -> Node:
    """The sum of the products of `pairs`, each with its rank: those of one rank are added up and scaled together."""
    sums = []
    for rank, mine in groupby(products, key=lambda x: x[0]):
        one = reduce(partial(apply, "add"), [x for _, x in mine])
        sums.append(apply("mul", one, _number(scale**-rank)) if rank and scale != 1 else one)
    return reduce(partial(apply, "add"), sums)


def _rounded(x: Node, large: Node, finite: Node | None = None) -> Node:
    """The nearest bfloat16, or, where the number is large, the next one towards zero; 0 where it is not finite."""
    near = apply("where", large, x, apply("f32", apply("bf16", x)))
    return apply("cut_bf16", apply("where", finite, near, _number(0.0)) if finite else near)


def _number(value: float) -> l.Literal:
    return l.Literal(value, f32)


def order_of(kind: Type) -> list[int]:
    """The dimensions of a tensor as they lie in memory, the outermost first."""
    return sorted(range(kind.rank), key=lambda d: -stride(kind, d))


def laid_out(kind: Type, dtype: DType = bf16, inner: int | None = None) -> Type:
    """The type of parts of a tensor: its dimensions lie in memory in the same order, but for one that may be the
    innermost, and rows begin aligned.
    """
    order = sorted(order_of(kind), key=lambda d: d == inner)
    found, plain = Type(dtype, kind.shape, ordered_strides(kind.static_shape, order, ALIGNED)), Type(dtype, kind.shape)
    return plain if found.element_strides == plain.element_strides else found


def stride(kind: Type, d: int) -> float:
    """How far apart the elements along a dimension are. One that repeats itself is outermost, as is one of one."""
    found = kind.element_strides[d]
    return found if isinstance(found, int) and found and kind.shape[d] != 1 else float("inf")
