"""Products with a factor of which several elements along the steps lie in one whole number: weights of four bits."""

from __future__ import annotations

from functools import reduce
from typing import Any

from terrazzo.ir.contraction import Contraction, operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import FloorDiv, Mod, Var
from terrazzo.ir.node import Node, substitute, topological, transform
from terrazzo.ir.sites import made_of, not_made, sites
from terrazzo.ir.types import Type, ordered_strides
from terrazzo.rules.access import WIDEST
from terrazzo.rules.loop.folding.fold import folded
from terrazzo.rules.loop_to_tile.walked.collapse import collapse

MOST = 16
"""Elements that lie in a number, at most."""


def digits_summed(kernel: l.Kernel) -> tuple[l.Kernel, ...]:
    """A product with a factor made of numbers that hold several elements along its steps, as one whose steps go along
    these numbers, and which has a term for each of their elements; after a kernel that copies the other factor so that
    each term finds its own side by side.

    @loop
    def f(x: bf16[3, 16], q: u8[5, 8]):
        with kernel('z', z=f32[3, 5]):
            for a0 in free(3):
                for a1 in free(5):
                    for r0 in reduce(16):
                        in0 = x[a0, r0]
                        v0 = f32(in0)
                        in1 = q[a1, r0 // 2]
                        v1 = index((r0 % 2) * 4)
                        v2 = u8(v1)
                        v3 = shr(in1, v2)
                        v4 = and_(v3, u8(15))
                        v5 = bf16(v4)
                        v6 = f32(v5)
                        v7 = mul(v0, v6)
                        acc0 <- sum(v7)
                    z[a0, a1] = acc0
        return (z,)
    =>
    @loop
    def f(x: bf16[3, 16], q: u8[5, 8]):
        with kernel('z_x', z_x=bf16[2, 3, 8]):
            for a0 in free(48):
                in0 = x[(a0 // 8) % 3, (a0 // 24) + (a0 % 8) * 2]
                z_x[a0 // 24, (a0 // 8) % 3, a0 % 8] = in0
        with kernel('z', z=f32[3, 5]):
            for a0 in free(3):
                for a1 in free(5):
                    for r0 in reduce(8):
                        in0 = z_x[0, a0, r0]
                        v0 = f32(in0)
                        in1 = q[a1, r0]
                        v1 = shr(in1, u8(0))
                        v2 = and_(v1, u8(15))
                        v3 = bf16(v2)
                        v4 = f32(v3)
                        v5 = mul(v0, v4)
                        in2 = z_x[1, a0, r0]
                        v6 = f32(in2)
                        v7 = shr(in1, u8(4))
                        v8 = and_(v7, u8(15))
                        v9 = bf16(v8)
                        v10 = f32(v9)
                        v11 = mul(v6, v10)
                        v12 = add(v5, v11)
                        acc0 <- sum(v12)
                    z[a0, a1] = acc0
        return (z,)
    """
    found = sites(kernel)
    (c, *others) = found.contractions.values() or (None,)
    if c is None or others or not found.multiplies or len(c.terms) > 1 or len(c.reduce.axes) > 1:
        return (kernel,)
    for plain, packed in (c.factors, c.factors[::-1]):
        x = operand(plain)
        if not isinstance(x, l.Load) or x.inside:
            continue
        for count in _divisors(packed, c.reduce.axes[0]):
            if made := _digits(kernel, c, (plain, x), packed, count):
                return made
    return (kernel,)


def _divisors(packed: Node, axis: Any) -> list[int]:
    """How many elements along an axis a number may hold: by what that is divided where a factor is read."""
    every = {x.b for x in topological([packed]) if isinstance(x, FloorDiv | Mod) and axis in x.free}
    return sorted(b for b in every if isinstance(b, int) and 1 < b <= MOST and axis.extent % b == 0)


def _digits(
    kernel: l.Kernel, c: Contraction, other: tuple[Node, l.Load], packed: Node, count: int
) -> tuple[l.Kernel, ...]:
    """The kernels for numbers of so many elements; none where not all of these are made of the same numbers. The other
    factor is given with what it reads.
    """
    plain, x = other
    (axis,) = c.reduce.axes
    quotient = Var(l.fresh_name(), axis.extent // count)
    terms = [_at(packed, {axis: quotient * count + d}) for d in range(count)]
    sources = {made_of(t) for t in terms}
    if len(sources) > 1 or any(not_made(t) for t in terms) or not all(y.dtype.is_integer for y in sources if y):
        return ()
    walked = [a for a in kernel.axes if a in x.free]
    shape: Any = (count, *(a.extent for a in walked), quotient.extent)
    strides = ordered_strides(shape, range(len(shape)), WIDEST // x.dtype.size)
    dense = ordered_strides(shape, range(len(shape)), 1)
    place = l.Buffer(f"{kernel.name}_{x.buffer.name}", Type(x.dtype, shape, None if strides == dense else strides))
    axes = [Var(f"a{n}", size) for n, size in enumerate(shape)]
    here: dict[Any, Any] = dict(zip(walked, axes[1:-1], strict=True))  # at once: these may be called as those
    value = _at(x, {**here, axis: axes[-1] * count + axes[0]})
    copy = l.Kernel(place.name, tuple(axes), (l.Store(place, tuple(axes), value),), kernel.source)
    products = [
        l.apply("mul", substitute(plain, {x: l.Load(place, (d, *walked, quotient))}), t) for d, t in enumerate(terms)
    ]
    total = l.Reduce.make(c.reduce.monoid, (quotient,), (reduce(lambda a, b: l.apply("add", a, b), products),))
    stores = tuple(transform(s, lambda y: total if y is c.reduce else y) for s in kernel.stores)
    return collapse(copy), l.Kernel(kernel.name, kernel.axes, stores, kernel.source)


def _at(x: Any, places: dict[Any, Any]) -> Any:
    """A term at places of some axes, with what is known of these folded."""

    def visit(y: Any) -> Any:
        return l.Load.make(y.buffer, y.index, y.inside) if isinstance(y, l.Load) else y

    return folded(transform(substitute(x, places), visit))
