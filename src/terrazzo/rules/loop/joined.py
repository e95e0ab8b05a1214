"""Sums of products are one product, whose steps go along what the first one sums over, and then the next.

`a @ b + c @ d` stores a product and reads it again otherwise, or keeps the sums of both in registers, which halves the
tiles. As one sum over both axes it has one set of accumulators: only what a step brings differs (`ir/concatenated.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.concatenated import after_one_another, concatenated
from terrazzo.ir.contraction import Contraction, contraction, operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import Var
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.ir.types import f32
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.definitions import Definitions, in_order
from terrazzo.rules.loop.inline import inline
from terrazzo.rules.loop.judging import Price

PASS = "online"
RULE = "products_joined"
STEP = 64
"""What a product sums over begins at a multiple of so many steps of the joined axis, as slabs of 128 bytes do; before
that, both factors are 0.
"""


def products_joined(program: l.Program, log: Log, price: Price) -> l.Program:
    """`program` with products of 16 bits that are only added as one product, where that is faster by the model. They
    are added before they are rounded, so the result is rounded once.

    @loop
    def f(x: bf16[3, 64], w: bf16[5, 64], y: bf16[3, 32], u: bf16[5, 32], b: bf16[5]):
        with kernel('t', t=bf16[3, 5]):
            for a0 in free(3):
                for a1 in free(5):
                    for r0 in reduce(32):
                        in0 = y[a0, r0]
                        v0 = f32(in0)
                        in1 = u[a1, r0]
                        v1 = f32(in1)
                        v2 = mul(v0, v1)
                        acc0 <- sum(v2)
                    v3 = bf16(acc0)
                    t[a0, a1] = v3
        with kernel('z', z=bf16[3, 5]):
            for a0 in free(3):
                for a1 in free(5):
                    for r0 in reduce(64):
                        in0 = x[a0, r0]
                        v0 = f32(in0)
                        in1 = w[a1, r0]
                        v1 = f32(in1)
                        v2 = mul(v0, v1)
                        acc0 <- sum(v2)
                    in2 = b[a1]
                    v3 = f32(in2)
                    v4 = add(acc0, v3)
                    v5 = bf16(v4)
                    v6 = f32(v5)
                    in3 = t[a0, a1]
                    v7 = f32(in3)
                    v8 = add(v6, v7)
                    v9 = bf16(v8)
                    z[a0, a1] = v9
        return (z,)
    =>
    @loop
    def f(x: bf16[3, 64], w: bf16[5, 64], y: bf16[3, 32], u: bf16[5, 32], b: bf16[5]):
        with kernel('z', z=bf16[3, 5]):
            for a0 in free(3):
                for a1 in free(5):
                    for r0 in reduce(96):
                        v0 = index(r0)
                        v1 = lt(v0, i64(64))
                        in0 = x[a0, r0] if r0 < 64 else 0
                        in1 = y[a0, r0 - 64] if r0 >= 64 else 0
                        v2 = where(v1, in0, in1)
                        v3 = f32(v2)
                        in2 = w[a1, r0] if r0 < 64 else 0
                        in3 = u[a1, r0 - 64] if r0 >= 64 else 0
                        v4 = where(v1, in2, in3)
                        v5 = f32(v4)
                        v6 = mul(v3, v5)
                        acc0 <- sum(v6)
                    in4 = b[a1]
                    v7 = f32(in4)
                    v8 = add(acc0, v7)
                    v9 = bf16(v8)
                    z[a0, a1] = v9
        return (z,)
    """
    while (found := _one_joined(program, log, price)) is not None:
        program = found
    return program


def _one_joined(program: l.Program, log: Log, price: Price) -> l.Program | None:
    known = Definitions(program)
    for last in [s for s in program.steps if isinstance(s, l.Kernel)]:
        for before, whole in _together(last, known):
            if (made := joined(whole)) is None:
                continue
            apart, time = price(before), price([made])
            times = f"{time / 1000:.1f} us joined, {apart / 1000:.1f} us apart, by the model"
            subject = ", ".join(s.name for s in before)
            log.add(Event(PASS, RULE, subject, time < apart, times))
            if time < apart:
                log.applied(PASS, RULE, subject, before, [made])
                steps = [made if s is last else s for s in program.steps if s is last or s not in before]
                return in_order(program, steps)
    return None


def _together(last: l.Kernel, known: Definitions) -> Iterator[tuple[list[l.Kernel], l.Kernel]]:
    """A kernel of several sums; or one with another whose product it alone reads, and these as one kernel."""
    sums = [x for x in topological(last.stores) if isinstance(x, l.Reduce)]
    if not sums or any(contraction(r) is None for r in sums):
        return
    yield [last], last
    for b in last.reads:
        maker = known.makers.get(b)
        if maker is None or b in known.kept or known.readers[b] != [last]:
            continue
        own = [x for x in topological(maker.stores) if isinstance(x, l.Reduce)]
        if len(own) == 1 and contraction(own[0]) is not None:
            yield [maker, last], inline(last, maker)


def joined(kernel: l.Kernel) -> l.Kernel | None:
    """A kernel whose sums of products are only added as one of a single sum; None where they are used otherwise, or
    their factors do not lie alike.
    """
    sums = [x for x in topological(kernel.stores) if isinstance(x, l.Reduce)]
    products = [c for r in sums if (c := contraction(r)) is not None]
    if len(sums) < 2 or len(products) < len(sums) or not all(map(_plain, products)):
        return None
    one = _joined(sorted(products, key=lambda c: _long(c) % STEP > 0))  # of whole steps first
    if one is None:
        return None
    stores = tuple(l.Store(s.buffer, s.index, _added(s.value, set(sums), one)) for s in kernel.stores)
    if [x for x in topological(stores) if isinstance(x, l.Reduce)] != [one]:
        return None
    return l.Kernel(kernel.name, kernel.axes, stores, kernel.source)


def _plain(c: Contraction) -> bool:
    """Whether a sum is of one product of numbers of 16 bits that lie in memory, over one axis."""
    one = len(c.terms) == len(c.reduce.axes) == 1 and isinstance(c.reduce.axes[0].extent, int)
    found = [operand(f) for f in c.factors]
    return one and all(isinstance(x, l.Load) and x.dtype.size == 2 and not x.inside for x in found)


def _long(c: Contraction) -> int:
    extent: int = c.reduce.axes[0].extent
    return extent


def _joined(products: Sequence[Contraction]) -> l.Reduce | None:
    """The sum over all that some sums are over, one after the other."""
    whole = [-(-_long(c) // STEP) * STEP for c in products[:-1]]
    borders = [0, *accumulate(whole)]
    axis = Var(l.fresh_name(), borders[-1] + _long(products[-1]))
    sides: tuple[list[l.Load], list[l.Load]] = [], []
    known = [f.free for f in products[0].factors]
    for c, first in zip(products, borders, strict=True):
        factors = c.factors if c.factors[0].free - {*c.reduce.axes} == known[0] - {*products[0].reduce.axes} else c.factors[::-1]
        for side, f in zip(sides, factors, strict=True):
            load: Any = substitute(operand(f), {c.reduce.axes[0]: axis - first})
            inside = (axis - first, first + _long(c) - 1 - axis)
            side.append(l.Load.make(load.buffer, load.index, inside))
    if not all(_alike(side, axis) for side in sides):
        return None
    both = (l.apply(f32.name, after_one_another(side, axis, borders)) for side in sides)
    return l.Reduce.make(products[0].reduce.monoid, (axis,), (l.apply("mul", *both),))


def _alike(loads: Sequence[l.Load], axis: Any) -> bool:
    """Whether loads know the same axes, are of one type, and memory runs along the same of these."""
    found = {(x.free, x.dtype, _memory(x)) for x in loads}
    return len(found) == 1 and axis in loads[0].free


def _memory(x: l.Load) -> Any:
    offset = flatten(x.index, x.buffer.type.element_strides)
    return next((a for a in x.free if coefficient(offset, a) == 1), None)


def _added(x: Any, sums: set[Any], one: Node) -> Any:
    """A term with `one` in place of the sums, where these are added."""
    if not isinstance(x, l.Apply):
        return x
    addends = _addends(x)
    if sums <= set(addends) and len([a for a in addends if a in sums]) == len(sums):
        for a in (a for a in addends if a not in sums):
            one = l.apply("add", one, a)
        return one
    return l.Apply(x.fn, tuple(_added(a, sums, one) for a in x.args))


def _addends(x: Any) -> list[Any]:
    """What is added up to a term, and not rounded before it is."""
    if isinstance(x, l.Apply) and x.fn.name == "add" and x.dtype is f32:
        return [y for a in x.args for y in _addends(a)]
    if isinstance(x, l.Apply) and is_cast(x.fn) and x.dtype is f32:
        (inner,) = x.args
        wide = inner.args[0] if isinstance(inner, l.Apply) and is_cast(inner.fn) and inner.dtype.is_float else None
        if wide is not None and wide.dtype is f32 and (isinstance(wide, l.Reduce) or len(_addends(wide)) > 1):
            return _addends(wide)
    return [x]
