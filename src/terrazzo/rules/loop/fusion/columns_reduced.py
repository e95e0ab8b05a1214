"""A product that is only reduced along its columns becomes part of what reduces it: none of its results is stored.

    loss[r] = log(sum over c of exp(mm[r, c] - max)) + max - mm[r, y[r]],    mm[r, c] = sum over k of x[r, k] * w[c, k]

The maximum and the sum of exponentials below it are one reduction in a frame (ADR 004 §8), so that tiles of columns can
be reduced where they are summed, in any order. What is looked up of the product besides, the logit of a label, is the
sum over its row of what is 0 everywhere else: computed again, it would be rounded otherwise than what it is among.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Bound, Loaded, Var
from terrazzo.ir.instances import Asked, instances
from terrazzo.ir.monoid import monoid
from terrazzo.ir.node import Node, substitute, topological, transform
from terrazzo.ir.sites import product, reduced_product
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.attention.frames import in_frames
from terrazzo.rules.loop.definitions import Definitions, in_order
from terrazzo.rules.loop.fusion.inline import inline, unproved
from terrazzo.rules.loop.judging import Price, Refusal

PASS = "online"
RULE = "columns_reduced"
SURE = 0.98
"""How much of the time may be left where nothing is stored: less than the model knows of two kernels."""


def columns_reduced(
    program: l.Program, log: Log, price: Price, refusal: Refusal, materialize: Collection[str] = ()
) -> l.Program:
    """`program` with products in the kernels that reduce them along their columns, where nobody else reads them, nobody
    wants them in memory (`materialize`), and that is faster by the model. `refusal` says why a kernel has no tiles.

    @loop
    def f(x: bf16[4, 8], w: bf16[6, 8], y: i64[4]):
        with kernel('mm', mm=bf16[4, 6]):
            for a0 in free(4):
                for a1 in free(6):
                    for r0 in reduce(8):
                        acc0 <- sum(mul(f32(x[a0, r0]), f32(w[a1, r0])))
                    mm[a0, a1] = bf16(acc0)
        with kernel('z', z=f32[4]):
            for a0 in free(4):
                for r0 in reduce(6):
                    acc0 <- max(f32(mm[a0, r0]))
                for r1 in reduce(6):
                    acc1 <- sum(exp(sub(f32(mm[a0, r1]), acc0)))
                z[a0] = sub(sub(f32(mm[a0, at(y[a0], 6)]), acc0), log(acc1))
        return (z,)
    =>
    @loop
    def f(x: bf16[4, 8], w: bf16[6, 8], y: i64[4]):
        with kernel('z', z=f32[4]):
            for a0 in free(4):
                in0 = y[a0]
                v0 = index(at(in0, 6))
                for r1 in reduce(6):
                    v1 = index(r1)
                    v2 = eq(v1, v0)
                    for r0 in reduce(8):
                        in1 = x[a0, r0]
                        v3 = f32(in1)
                        in2 = w[r1, r0]
                        v4 = f32(in2)
                        v5 = mul(v3, v4)
                        acc2 <- sum(v5)
                    v6 = bf16(acc2)
                    v7 = f32(v6)
                    v8 = where(v2, v7, f32(0.0))
                    acc0 <- sum(v8)
                    acc1 <- logsumexp(v7, f32(1.0))
                v9 = bf16(acc0)
                v10 = f32(v9)
                v11 = get(acc1, 0)
                v12 = sub(v10, v11)
                v13 = get(acc1, 1)
                v14 = sub(v11, v11)
                v15 = exp(v14)
                v16 = mul(v13, v15)
                v17 = log(v16)
                v18 = sub(v12, v17)
                z[a0] = v18
        return (z,)
    """
    known = Definitions(program)
    steps: list[Any] = list(program.steps)
    kernels = [s for s in program.steps if isinstance(s, l.Kernel)]
    instance = instances(kernels)
    reduced = Asked(_reduced, instance)  # each pair once, whatever its buffers are called
    for last in [s for s in kernels if s.carried]:
        for first in _products(known, last, materialize):
            found = reduced(instance(first), instance(last))
            if found is None:
                continue
            made = found.kernel
            if not (why := unproved([made]) or refusal(made)):
                before, after = price([first, last]), price([made])
                times = f"{after / 1000:.1f} us reduced on its way, {before / 1000:.1f} us stored, by the model"
                why = "" if after < SURE * before else times
            log.add(Event(PASS, RULE, last.name, not why, why or f"{first.name} is not stored: {times}"))
            if not why:
                log.applied(PASS, RULE, last.name, [first, last], [made])
                steps[steps.index(last)] = made
                steps.remove(first)
                break
    return in_order(program, steps) if len(steps) < len(program.steps) else program


def _products(known: Definitions, last: l.Kernel, kept: Collection[str]) -> list[l.Kernel]:
    """The products that a kernel reads, and nobody else."""
    mine = [b for b in last.reads if b not in known.kept and b.name not in kept and known.readers[b] == [last]]
    found = [known.makers[b] for b in mine if b in known.makers]
    return [x for x in found if product(x) is not None]


def _reduced(first: l.Kernel, last: l.Kernel) -> l.Kernel | None:
    """`last` with a product that it reduces; None where it does something else with it."""
    buffer = first.stores[0].buffer
    whole = in_frames(last)
    inside = [x for r in whole.carried for x in topological(r.args) if isinstance(x, l.Load) and x.buffer is buffer]
    outside = [x for x in whole.terms if isinstance(x, l.Load) and x.buffer is buffer and x not in inside]
    picked: dict[Node, Node] = {x: p for x in outside for y in inside if (p := _picked(x, y)) is not None}
    if not inside or len(picked) < len(outside):
        return None
    stores = tuple(transform(s, lambda y: y, {**picked}) for s in whole.stores)
    made = inline(l.Kernel(whole.name, whole.axes, stores, whole.source), first)
    return made if reduced_product(made) is not None else None


def _picked(looked_up: l.Load, along: l.Load) -> Node | None:
    """What is looked up in a row, as the sum of all that is there, of which only that is no 0: it is the same number
    that others know, whoever adds it up. `along` reads the row. None where something else is looked up.
    """
    pairs = [(a, b) for a, b in zip(looked_up.index, along.index, strict=True) if a is not b]
    if len(pairs) != 1 or looked_up.inside or along.inside:
        return None
    ((where, axis),) = pairs
    if not isinstance(where, Loaded) or not isinstance(axis, Bound) or axis.extent != where.extent:
        return None
    at = Var(l.fresh_name(), axis.extent)
    found: Any = substitute(along, {axis: at})
    wide = found.dtype.compute
    value = found if wide is found.dtype else l.apply(wide.name, found)
    here = l.apply("eq", l.Index(at), l.Index(where))
    total: Any = l.Reduce.make(monoid("sum"), (at,), (l.apply("where", here, value, l.Literal(0.0, wide)),))
    return total if wide is found.dtype else l.apply(found.dtype.name, total)
