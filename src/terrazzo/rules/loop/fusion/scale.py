"""Constant factors leave a contraction: sum(c x y) is c sum(x y).

Attention scales its queries and keys before it multiplies them. Taken out, the constant is applied once to each result
and not to each product, the operands are plain loads, which copies can bring in, and nobody stores scaled ones. Where
scaled ones would be rounded to the type that they had before, they are not: the sum is the more exact for it.

So does a factor that no step moves, where it alone knows some axis of what is summed: what is left is the same sum for
all along that axis. That is the gradient of a product whose columns were added up, or their mean taken.
"""

from __future__ import annotations

from typing import Any

from terrazzo.ir.contraction import contraction, operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.node import transformed

SMALL, LARGE = 2.0**-16, 2.0**16
"""The constants that are taken out. Others bring sums nearer to an overflow, or products to nothing, than what they are
scaled to; and a negative one makes -0 of a sum that is 0.
"""


def scale_after(kernel: l.Kernel) -> l.Kernel:
    """`kernel` with the constants of its contractions' factors multiplied into their results, and factors that are the
    same in all steps.
    """
    if all(_scaled(x) is x for x in kernel.carried):
        return kernel
    return l.Kernel(kernel.name, kernel.axes, transformed(kernel.stores, _scaled), kernel.source)


def is_scaled(value: Any) -> bool:
    """Whether a term is a load, or a conversion of one, times a constant."""
    rest, c = _apart(value)
    return rest is not value and c != 0 and isinstance(uncast(rest), l.Load)


def uncast(value: Any) -> Any:
    """What a term converts."""
    while isinstance(value, l.Apply) and is_cast(value.fn):
        (value,) = value.args
    return value


def _scaled(node: Any) -> Any:
    if not isinstance(node, l.Reduce):
        return node
    if (c := contraction(node)) is None or len(c.terms) > 1:
        return _shared(node)
    p, q = (c for _, c in map(_apart, node.args[0].children))
    ones = p == q == 1.0 and any(_apart(x)[0] is not x for x in node.args[0].children)
    if not ones and (p * q == 1.0 or node.dtype.size < 4 or not SMALL < p * q < LARGE):
        return node
    axes, (product,) = l.open_binder(node)
    a, b = (rest for rest, _ in map(_apart, product.children))
    if ones:  # what is multiplied by one
        return l.Reduce.make(node.monoid, axes, (l.apply("mul", a, b),))
    return l.apply("mul", l.Reduce.make(node.monoid, axes, (l.apply("mul", a, b),)), l.Literal(p * q, node.dtype))


def _shared(node: l.Reduce) -> Any:
    """sum(r)(x[a] * y[b, r]) is x[a] * sum(r)(y[b, r]), which is one sum for all of `a`. The term itself where `y`
    knows all that `x` does: its sums would be as many, and their overflows others.
    """
    (term,) = node.args[:1]
    float_sum = node.monoid.name == "sum" and node.dtype.is_float and node.dtype.size >= 4
    if not float_sum or not isinstance(term, l.Apply) or term.fn.name != "mul":
        return node
    axes = frozenset(node.axes)
    for one, other in (term.args, term.args[::-1]):
        if not one.free & axes and axes <= other.free and any(a not in other.free for a in one.free):
            steps, (product,) = l.open_binder(node)
            rest = product.children[term.children.index(other)]
            return l.apply("mul", one, l.Reduce.make(node.monoid, steps, (rest,)))
    return node


def _apart(x: Any) -> tuple[Any, float]:
    """A factor without the constants it is multiplied by, and their product; and without what rounds it then, where it
    was of that type before.
    """
    rounded = operand(x)
    if rounded is not x and isinstance(rounded, l.Apply) and is_cast(rounded.fn) and rounded.dtype.is_float:
        rest, c = _apart(rounded.args[0])
        if rest is not rounded.args[0] and isinstance(y := operand(rest), l.Load) and y.dtype == rounded.dtype:
            return rest, c
    if isinstance(x, l.Apply) and x.fn.name == "mul" and x.dtype.is_float:
        for one, other in (x.args, x.args[::-1]):
            if isinstance(other, l.Literal):
                rest, c = _apart(one)
                return rest, c * other.value
    return x, 1.0
