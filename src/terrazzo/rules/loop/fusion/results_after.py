"""What chains of products make of another of their results is made after them, by a kernel of its own.

A chain has one result in the arrangements that multiply fastest. One that stores its result in two ways, as attention
in training does with what it keeps for the backward pass, may take longer than a chain and a pass over it.
"""

from __future__ import annotations

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import substitute, topological
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.judging import Price
from terrazzo.rules.loop_to_tile.chains.chain import chain

PASS, RULE = "online", "results_after"


def results_after(program: l.Program, log: Log, price: Price) -> l.Program:
    """`program` with results that chains of products make of another of their results in kernels of their own, where
    that is faster by the model.

    @loop
    def f(x: bf16[6, 4], y: bf16[6, 4], u: bf16[6, 4]):
        with kernel('z', z=bf16[6, 4], w=bf16[6, 4]):
            for a0 in free(6):
                for a1 in free(4):
                    for r1 in reduce(6):
                        in0 = u[r1, a1]
                        v0 = f32(in0)
                        for r0 in reduce(4):
                            in1 = x[a0, r0]
                            v1 = f32(in1)
                            in2 = y[r1, r0]
                            v2 = f32(in2)
                            v3 = mul(v1, v2)
                            acc1 <- sum(v3)
                        v4 = bf16(acc1)
                        v5 = f32(v4)
                        v6 = mul(v5, v0)
                        acc0 <- sum(v6)
                    v7 = bf16(acc0)
                    v8 = f32(v7)
                    v9 = add(v8, f32(1.0))
                    v10 = bf16(v9)
                    z[a0, a1] = v7
                    w[a0, a1] = v10
        return (z, w)
    =>
    @loop
    def f(x: bf16[6, 4], y: bf16[6, 4], u: bf16[6, 4]):
        with kernel('z', z=bf16[6, 4]):
            for a0 in free(6):
                for a1 in free(4):
                    for r1 in reduce(6):
                        in0 = u[r1, a1]
                        v0 = f32(in0)
                        for r0 in reduce(4):
                            in1 = x[a0, r0]
                            v1 = f32(in1)
                            in2 = y[r1, r0]
                            v2 = f32(in2)
                            v3 = mul(v1, v2)
                            acc1 <- sum(v3)
                        v4 = bf16(acc1)
                        v5 = f32(v4)
                        v6 = mul(v5, v0)
                        acc0 <- sum(v6)
                    v7 = bf16(acc0)
                    z[a0, a1] = v7
        with kernel('w', w=bf16[6, 4]):
            for a0 in free(6):
                for a1 in free(4):
                    in0 = z[a0, a1]
                    v0 = f32(in0)
                    v1 = add(v0, f32(1.0))
                    v2 = bf16(v1)
                    w[a0, a1] = v2
        return (z, w)
    """
    steps: list[l.Kernel | l.Call] = []
    for s in program.steps:
        made = in_two(s) if isinstance(s, l.Kernel) and len(s.stores) > 1 and chain(s) is not None else None
        if not isinstance(s, l.Kernel) or made is None:
            steps.append(s)
            continue
        before, after = price([s]), price(made)
        times = f"{before / 1000:.1f} us as one kernel, {after / 1000:.1f} us as two, by the model"
        log.add(Event(PASS, RULE, s.name, after < before, times))
        if after < before:
            log.applied(PASS, RULE, s.name, [s], made)
        steps += made if after < before else [s]
    return l.Program(program.name, program.inputs, tuple(steps), program.results)


def in_two(kernel: l.Kernel) -> list[l.Kernel] | None:
    """A kernel without what it makes of another of its results, and a kernel of that; None where there is none."""
    for first in kernel.stores:
        load = l.Load.make(first.buffer, first.index)
        for last in kernel.stores:
            value = substitute(last.value, {first.value: load})
            sums = any(isinstance(x, l.Reduce | l.Scan) for x in topological([value]))
            if last is first or value is last.value or sums:
                continue
            rest = tuple(x for x in kernel.stores if x is not last)
            after = l.Store(last.buffer, last.index, value)
            return [
                l.Kernel(rest[-1].buffer.name, kernel.axes, rest, kernel.source),
                l.Kernel(last.buffer.name, kernel.axes, (after,), kernel.source),
            ]
    return None
