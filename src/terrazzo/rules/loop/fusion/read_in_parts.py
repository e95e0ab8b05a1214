"""A product of which one kernel reads parts side by side is computed by that kernel, part by part.

A gated layer whose two weights lie one below the other is one product, and what multiplies its halves reads twice as
much as it stores. Two weights by themselves would be two sums in one kernel, and so are the halves: what the kernel
reads of the product is as much as there is, so nothing is computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import topological
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.definitions import Definitions, in_order
from terrazzo.rules.loop.fusion.inline import inline, unproved
from terrazzo.rules.loop.fusion.joined import plain_sums
from terrazzo.rules.loop.judging import Price

PASS = "online"
RULE = "read_in_parts"
PARTS = 2
"""How many parts are read: with a sum for each of more, tiles are so small that memory is read too often."""


def read_in_parts(program: l.Program, log: Log, price: Price, materialize: Iterable[str] = ()) -> l.Program:
    """`program` with products of 16 bits computed by the one kernel that reads parts of them, where that is faster by
    the model. `materialize` names what is kept.

    @loop
    def f(x: bf16[3, 64], w: bf16[10, 64]):
        with kernel('t', t=bf16[3, 10]):
            for a0 in free(3):
                for a1 in free(10):
                    for r0 in reduce(64):
                        in0 = x[a0, r0]
                        v0 = f32(in0)
                        in1 = w[a1, r0]
                        v1 = f32(in1)
                        v2 = mul(v0, v1)
                        acc0 <- sum(v2)
                    v3 = bf16(acc0)
                    t[a0, a1] = v3
        with kernel('z', z=bf16[3, 5]):
            for a0 in free(3):
                for a1 in free(5):
                    in0 = t[a0, a1]
                    v0 = f32(in0)
                    in1 = t[a0, a1 + 5]
                    v1 = f32(in1)
                    v2 = mul(v0, v1)
                    v3 = bf16(v2)
                    z[a0, a1] = v3
        return (z,)
    =>
    @loop
    def f(x: bf16[3, 64], w: bf16[10, 64]):
        with kernel('z', z=bf16[3, 5]):
            for a0 in free(3):
                for a1 in free(5):
                    for r0 in reduce(64):
                        in0 = x[a0, r0]
                        v0 = f32(in0)
                        in1 = w[a1, r0]
                        v1 = f32(in1)
                        v2 = mul(v0, v1)
                        in2 = w[a1 + 5, r0]
                        v3 = f32(in2)
                        v4 = mul(v0, v3)
                        acc0 <- sum(v2)
                        acc1 <- sum(v4)
                    v5 = bf16(acc0)
                    v6 = f32(v5)
                    v7 = bf16(acc1)
                    v8 = f32(v7)
                    v9 = mul(v6, v8)
                    v10 = bf16(v9)
                    z[a0, a1] = v10
        return (z,)
    """
    known, kept = Definitions(program), {*materialize}
    steps = [*program.steps]
    for reader in [s for s in steps if isinstance(s, l.Kernel) and not s.carried]:
        for b in reader.reads:
            maker = known.makers.get(b)
            if maker is None or b in known.kept or b.name in kept or known.readers[b] != [reader]:
                continue
            if not plain_sums(maker) or not _in_parts(reader, b):
                continue
            made = inline(reader, maker)
            if why := unproved([made]):
                log.add(Event(PASS, RULE, made.name, False, why))
                continue
            apart, time = price([maker, reader]), price([made])
            times = f"{time / 1000:.1f} us by one kernel, {apart / 1000:.1f} us by two, by the model"
            log.add(Event(PASS, RULE, made.name, time < apart, times))
            if time < apart:
                log.applied(PASS, RULE, made.name, [maker, reader], [made])
                steps = [made if s is reader else s for s in steps if s is not maker]
                break
    return in_order(program, steps) if steps != [*program.steps] else program


def _in_parts(reader: l.Kernel, b: l.Buffer) -> bool:
    """Whether a kernel reads a buffer at as many places as there may be parts, and as much of it as there is."""
    loads = {x for x in topological([s.value for s in reader.stores]) if isinstance(x, l.Load) and x.buffer is b}
    extents = [a.extent for a in reader.axes]
    if any(x.inside for x in loads) or len({x.index for x in loads}) != PARTS:
        return False
    read = PARTS * math.prod(n for n in extents if isinstance(n, int))
    return all(isinstance(n, int) for n in extents) and read == math.prod(b.type.static_shape)
