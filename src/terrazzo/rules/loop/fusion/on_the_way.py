"""A factor that is made of one tensor, point by point, is made on its way to the product that alone reads it.

Fusion stores such a factor: where instructions take both factors from shared memory, nothing else will do. Those of
warpgroups take the first one from registers, where it may be made (ADR 016): whether that is faster than storing it
depends on the tiles that a product has so, and those that it has otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import topological
from terrazzo.ir.sites import loads, not_made, product
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.definitions import Definitions
from terrazzo.rules.loop.fusion.inline import inline
from terrazzo.rules.loop.judging import Price

PASS, RULE = "online", "factors_made"
SURE = 0.98
"""How much of the time may be left: the model knows no better. Before 4096 x 4096 x 4096 a ReLU is made on its way by
it in 0.976 of the time of storing it, which took 0.96 (H200).
"""


def factors_made(program: l.Program, log: Log, price: Price, materialize: Iterable[str] = ()) -> l.Program:
    """`program` with factors of products made where they are multiplied, where that is faster by the model.
    `materialize` names what is kept.

    @loop
    def f(x: bf16[8, 64], w: bf16[16, 64]):
        with kernel('y', y=bf16[8, 64]):
            for a0 in free(8):
                for a1 in free(64):
                    in0 = x[a0, a1]
                    v0 = f32(in0)
                    v1 = max(v0, f32(0.0))
                    v2 = bf16(v1)
                    y[a0, a1] = v2
        with kernel('z', z=bf16[8, 16]):
            for a0 in free(8):
                for a1 in free(16):
                    for r0 in reduce(64):
                        in0 = y[a0, r0]
                        v0 = f32(in0)
                        in1 = w[a1, r0]
                        v1 = f32(in1)
                        v2 = mul(v0, v1)
                        acc0 <- sum(v2)
                    v3 = bf16(acc0)
                    z[a0, a1] = v3
        return (z,)
    =>
    @loop
    def f(x: bf16[8, 64], w: bf16[16, 64]):
        with kernel('z', z=bf16[8, 16]):
            for a0 in free(8):
                for a1 in free(16):
                    for r0 in reduce(64):
                        in0 = x[a0, r0]
                        v0 = f32(in0)
                        v1 = max(v0, f32(0.0))
                        v2 = bf16(v1)
                        v3 = f32(v2)
                        in1 = w[a1, r0]
                        v4 = f32(in1)
                        v5 = mul(v3, v4)
                        acc0 <- sum(v5)
                    v6 = bf16(acc0)
                    z[a0, a1] = v6
        return (z,)
    """
    known, kept = Definitions(program), {*materialize}
    gone: set[l.Kernel] = set()
    became: dict[l.Kernel, l.Kernel] = {}
    for reader in [s for s in program.steps if isinstance(s, l.Kernel)]:
        maker = _maker(reader, known)
        if maker is None or maker.stores[0].buffer.name in kept:
            continue
        made = inline(reader, maker)
        p = product(made)
        if p is None or any(not_made(x) for x in p.operands if not isinstance(x, l.Load)):
            continue
        before, after = price([maker, reader]), price([made])
        fired = after < SURE * before
        why = f"{after / 1000:.1f} us with {maker.name} made on its way, {before / 1000:.1f} us where it is stored"
        log.add(Event(PASS, RULE, reader.name, fired, why))
        if fired:
            log.applied(PASS, RULE, reader.name, [maker, reader], [made])
            gone.add(maker)
            became[reader] = made
    if not became:
        return program
    steps = tuple(became.get(s, s) if isinstance(s, l.Kernel) else s for s in program.steps if s not in gone)
    return l.Program(program.name, program.inputs, steps, program.results)


def _maker(reader: l.Kernel, known: Definitions) -> l.Kernel | None:
    """The kernel that makes one factor of a product of 16 bits for this product alone, of one tensor of its type."""
    p = product(reader)
    if p is None or not all(isinstance(x, l.Load) and x.dtype.size == 2 for x in p.operands):
        return None
    for x in p.operands:
        assert isinstance(x, l.Load)
        maker = known.makers.get(x.buffer)
        if maker is None or x.buffer in known.kept or known.readers[x.buffer] != [reader]:
            continue
        once = [y for y in loads(reader.stores[0].value) if y.buffer is x.buffer]
        if len(once) == 1 and _pointwise(maker):
            return maker
    return None


def _pointwise(maker: l.Kernel) -> bool:
    """Whether a kernel computes something of one tensor of its own type, point by point."""
    (store,) = maker.stores
    found = loads(store.value)
    reduces = any(isinstance(x, l.Reduce | l.Scan) for x in topological([store.value]))
    one = len(found) == 1 and found[0].dtype is store.buffer.type.dtype and not isinstance(store.value, l.Load)
    return one and not reduces and not found[0].inside
