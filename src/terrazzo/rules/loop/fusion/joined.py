"""Sums of products are one product, whose steps go along what the first one sums over, and then the next.

`a @ b + c @ d` stores a product and reads it again otherwise, or keeps the sums of both in registers, which halves the
tiles. As one sum over both axes it has one set of accumulators: only what a step brings differs (`ir/concatenated.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.canonical import together
from terrazzo.ir.concatenated import Piece, after_one_another, concatenated
from terrazzo.ir.contraction import Contraction, contraction, operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import Var
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.ir.types import f32
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.definitions import Definitions, in_order
from terrazzo.rules.loop.fusion.inline import inline
from terrazzo.rules.loop.judging import Price

PASS = "online"
RULE = "products_joined"
STEP = 64
"""What a product sums over begins at a multiple of so many steps of the joined axis, as slabs of 128 bytes do; before
that, both factors are 0.
"""


def products_joined(program: l.Program, log: Log, price: Price, materialize: Iterable[str] = ()) -> l.Program:
    """`program` with products of 16 bits that are only added as one product, where that is faster by the model. They
    are added before they are rounded, so the result is rounded once. `materialize` names what is kept.

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
                    in0 = b[a1]
                    v0 = f32(in0)
                    for r0 in reduce(96):
                        v1 = index(r0)
                        v2 = lt(v1, i64(64))
                        in1 = x[a0, r0] if r0 < 64 else 0
                        in2 = y[a0, r0 - 64] if r0 >= 64 else 0
                        v3 = where(v2, in1, in2)
                        v4 = f32(v3)
                        in3 = w[a1, r0] if r0 < 64 else 0
                        in4 = u[a1, r0 - 64] if r0 >= 64 else 0
                        v5 = where(v2, in3, in4)
                        v6 = f32(v5)
                        v7 = mul(v4, v6)
                        acc0 <- sum(v7)
                    v8 = add(acc0, v0)
                    v9 = bf16(v8)
                    z[a0, a1] = v9
        return (z,)
    """
    steps = [*program.steps]
    known = Definitions(program)
    kept = frozenset(materialize)
    prices: dict[Hashable, tuple[float, float]] = {}
    todo = [s for s in steps if isinstance(s, l.Kernel)]
    while todo:
        last = todo.pop(0)
        for before, made in _ways(last, known) if last in steps else ():
            if kept & ({b.name for s in before for b in s.writes} - {b.name for s in made for b in s.writes}):
                continue
            if (form := together(before).kernel) not in prices:
                prices[form] = price(before), price(made)
            apart, time = prices[form]
            times = f"{time / 1000:.1f} us joined, {apart / 1000:.1f} us apart, by the model"
            subject = ", ".join(s.name for s in before)
            log.add(Event(PASS, RULE, subject, time < apart, times))
            if time < apart:
                log.applied(PASS, RULE, subject, before, made)
                steps = [*(s for s in steps if s not in before), *made]
                known = Definitions(l.Program(program.name, program.inputs, tuple(steps), program.results))
                todo = [*made, *todo]  # which others may join
                break
    return in_order(program, steps) if steps != [*program.steps] else program


def _ways(last: l.Kernel, known: Definitions) -> Iterator[tuple[list[l.Kernel], list[l.Kernel]]]:
    """What may be joined with a kernel, and what becomes of it: its own sums; a product that it alone reads; and, where
    it is a concatenation, the products that read it.
    """
    if plain_sums(last):
        if (made := joined(last)) is not None:
            yield [last], [made]
        for b in last.reads:
            maker = known.makers.get(b)
            if maker is None or b in known.kept or known.readers[b] != [last] or not plain_sums(maker):
                continue
            if (made := joined(inline(last, maker))) is not None:
                yield [maker, last], [made]
    elif len(last.stores) == 1 and concatenated(last.stores[0].value) and last.writes[0] not in known.kept:
        readers = known.readers.get(last.writes[0], [])
        if readers and all(map(plain_sums, readers)):
            found = [inline(x, last) for x in readers]
            if all(map(plain_sums, found)):
                yield [last, *readers], found


def plain_sums(kernel: l.Kernel) -> bool:
    """Whether all that a kernel reduces are products of numbers of 16 bits that lie in memory, each over one axis, of
    one tensor or of several that are one after the other along it.
    """
    return bool(kernel.carried) and all(map(_plain, kernel.carried))


def _plain(r: l.Reduce | l.Scan) -> bool:
    c = contraction(r) if isinstance(r, l.Reduce) else None
    if c is None or len(c.terms) > 1 or len(c.reduce.axes) > 1 or not isinstance(c.reduce.axes[0].extent, int):
        return False
    (axis,) = c.reduce.axes
    return all(x.dtype.size == 2 and _pieces(x, axis) for x in c.operands)  # type: ignore[attr-defined]


def _pieces(x: Node, axis: Any) -> list[Piece]:
    """What lies in memory of an operand, along an axis; nothing where it is anything else."""
    if isinstance(x, l.Load):
        return [Piece(axis, 0, axis.extent, x)]
    return [y for y in concatenated(x) if y.axis is axis]


def joined(kernel: l.Kernel) -> l.Kernel | None:
    """A kernel whose sums of products are only added as one of a single sum; None where they are used otherwise, or
    their factors do not lie alike.
    """
    products = [c for r in kernel.carried if isinstance(r, l.Reduce) and (c := contraction(r)) is not None]
    if len(products) < 2:
        return None
    one = _joined(sorted(products, key=lambda c: _long(c) % STEP > 0))  # those of whole steps first
    if one is None:
        return None
    added = _adding({c.reduce for c in products}, one)
    stores = tuple(l.Store(s.buffer, s.index, added(s.value)) for s in kernel.stores)
    if any(isinstance(x, l.Reduce) and x is not one for x in topological(stores)):
        return None
    return l.Kernel(kernel.name, kernel.axes, stores, kernel.source)


def _long(c: Contraction) -> int:
    extent: int = c.reduce.axes[0].extent
    return extent


def _joined(products: Sequence[Contraction]) -> l.Reduce | None:
    """The sum over all that some sums are over, one after the other."""
    whole = [-(-_long(c) // STEP) * STEP for c in products[:-1]]
    begins = [0, *accumulate(whole)]
    axis = Var(l.fresh_name(), begins[-1] + _long(products[-1]))
    sides: tuple[list[l.Load], list[l.Load]] = [], []
    borders: tuple[list[int], list[int]] = [], []
    for c, begin in zip(products, begins, strict=True):
        (own,) = c.reduce.axes
        same = c.factors[0].free - {own} == products[0].factors[0].free - {*products[0].reduce.axes}
        for f, side, border in zip(c.factors if same else c.factors[::-1], sides, borders, strict=True):
            for x in _pieces(operand(f), own):
                load: Any = substitute(x.load, {own: axis - begin})
                inside = (axis - (begin + x.first), begin + x.end - 1 - axis)
                side.append(l.Load.make(load.buffer, load.index, (*load.inside, *inside)))
                border.append(begin + x.first)
    if not all(_alike(side, axis) for side in sides):
        return None
    both = (l.apply(f32.name, after_one_another(x, axis, begin)) for x, begin in zip(sides, borders, strict=True))
    return l.Reduce.make(products[0].reduce.monoid, (axis,), (l.apply("mul", *both),))


def _alike(loads: Sequence[l.Load], axis: Any) -> bool:
    """Whether loads know the same axes, are of one type, and memory runs along the same of these."""
    return len({(x.free, x.dtype, _memory(x)) for x in loads}) == 1 and axis in loads[0].free


def _memory(x: l.Load) -> Any:
    offset = flatten(x.index, x.buffer.type.element_strides)
    return frozenset(a for a in x.free if coefficient(offset, a) == 1)


def _adding(sums: set[Any], one: Node) -> Callable[[Any], Any]:
    """Gives a term with `one` in place of the sums, where these are added, each once."""

    @cache
    def added(x: Any) -> Any:
        if not isinstance(x, l.Apply):
            return x
        addends = _addends(x)
        if {*addends} >= sums and sum(a in sums for a in addends) == len(sums):
            found = one
            for a in (a for a in addends if a not in sums):
                found = l.apply("add", found, a)
            return found
        return l.Apply(x.fn, tuple(map(added, x.args)))

    return added


def _addends(x: Any) -> list[Any]:
    """What is added up to a term, and not rounded before it is."""
    if isinstance(x, l.Apply) and x.fn.name == "add" and x.dtype is f32:
        return [y for a in x.args for y in _addends(a)]
    if isinstance(x, l.Apply) and is_cast(x.fn) and x.dtype is f32:
        (inner,) = x.args
        wide: Any = inner.args[0] if isinstance(inner, l.Apply) and is_cast(inner.fn) and inner.dtype.is_float else None
        if wide is not None and wide.dtype is f32:
            found = _addends(wide)
            if isinstance(wide, l.Reduce) or len(found) > 1:
                return found
    return [x]
