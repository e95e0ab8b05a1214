"""Two products, and what lies between them, in one kernel: no matrix of scores in memory.

The terms are what they were, each in the place of the buffer that it was stored in. So a kernel's text computes scores
wherever it reads them, and who writes it down as code keeps those of some rows.
"""

from __future__ import annotations

from terrazzo.ir.dialects import loop as l
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.attention.online import ChainSteps, kernels_between, with_rows
from terrazzo.rules.loop.definitions import in_order
from terrazzo.rules.loop.fusion.inline import unproved
from terrazzo.rules.loop.judging import Refusal

PASS = "one_kernel"
RULE = "products_joined"
WORTH = 1 << 18
"""Bytes of scores from which on they are not written to memory."""


def one_kernel(program: l.Program, log: Log, refusal: Refusal, worth: int = WORTH) -> l.Program:
    """`program` with products of what is made of products in one kernel, where nobody else reads what lies between
    them, that is large, and `refusal` has nothing against it.

    @loop
    def f(q: f32[8, 4], k: f32[16, 4], v: f32[16, 4]):
        with kernel('s', s=f32[8, 16]):
            for a0 in free(8):
                for a1 in free(16):
                    for r0 in reduce(4):
                        in0 = q[a0, r0]
                        in1 = k[a1, r0]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    s[a0, a1] = acc0
        with kernel('w', w=f32[8, 16]):
            for a0 in free(8):
                for r0 in reduce(16):
                    in0 = s[a0, r0]
                    acc0 <- max(in0)
                for a1 in free(16):
                    in1 = s[a0, a1]
                    v0 = sub(in1, acc0)
                    w[a0, a1] = v0
        with kernel('o', o=f32[8, 4]):
            for a0 in free(8):
                for a1 in free(4):
                    for r0 in reduce(16):
                        in0 = w[a0, r0]
                        in1 = v[r0, a1]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    o[a0, a1] = acc0
        return (o,)
    =>
    @loop
    def f(q: f32[8, 4], k: f32[16, 4], v: f32[16, 4]):
        with kernel('o', o=f32[8, 4]):
            for a0 in free(8):
                for r1 in reduce(16):
                    for r0 in reduce(4):
                        in0 = q[a0, r0]
                        in1 = k[r1, r0]
                        v0 = mul(in0, in1)
                        acc1 <- sum(v0)
                    acc0 <- max(acc1)
                for a1 in free(4):
                    for r2 in reduce(16):
                        in2 = v[r2, a1]
                        for r0 in reduce(4):
                            in3 = q[a0, r0]
                            in4 = k[r2, r0]
                            v1 = mul(in3, in4)
                            acc3 <- sum(v1)
                        v2 = sub(acc3, acc0)
                        v3 = mul(v2, in2)
                        acc2 <- sum(v3)
                    o[a0, a1] = acc2
        return (o,)
    """
    steps = ChainSteps(program)
    for last in [s for s in program.steps if isinstance(s, l.Kernel)]:
        found = kernels_between(steps, last)
        if not found or found[-1].stores[0].buffer.type.span < worth:
            continue
        made = with_rows(found, last)
        why = "rows are not those of the product" if made is None else steps.around(found[0], last)
        if made is None or (why := why or unproved([made]) or refusal(made)):
            log.add(Event(PASS, RULE, last.name, False, why))
            continue
        steps.replace(found, last, made)
        names = " and ".join(kernel.name for kernel in found[::-1])
        log.add(Event(PASS, RULE, last.name, True, f"{names} became part of it"))
        log.applied(PASS, RULE, last.name, [*found[::-1], last], [made])
    return in_order(program, list(steps.made.values()))
