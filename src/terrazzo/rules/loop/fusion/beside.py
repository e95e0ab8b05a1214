"""Chains of products that share what they compute in a step become one kernel with a result each.

The gradients of keys and of values both sum, over all queries, what is made of the same scores: as one kernel they
compute these once, and bring in once what both multiply.
"""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import substitute, topological
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.definitions import in_order
from terrazzo.rules.loop.judging import Price, Refusal
from terrazzo.rules.loop_to_tile.chains.chain import Chain, chain

PASS = "online"
RULE = "chains_beside"


def chains_beside(program: l.Program, log: Log, price: Price, refusal: Refusal) -> l.Program:
    """`program` with chains in one kernel that share sums inside, where that is faster by the model. `refusal` says why
    a kernel is not worth having.

    @loop
    def f(x: f32[4, 6], y: f32[5, 6], u: f32[5, 3], v: f32[5, 3]):
        with kernel('z', z=f32[4, 3]):
            for a0 in free(4):
                for a1 in free(3):
                    for r1 in reduce(5):
                        in0 = u[r1, a1]
                        for r0 in reduce(6):
                            in1 = x[a0, r0]
                            in2 = y[r1, r0]
                            v0 = mul(in1, in2)
                            acc1 <- sum(v0)
                        v1 = exp(acc1)
                        v2 = mul(v1, in0)
                        acc0 <- sum(v2)
                    z[a0, a1] = acc0
        with kernel('w', w=f32[4, 3]):
            for a0 in free(4):
                for a1 in free(3):
                    for r1 in reduce(5):
                        in0 = v[r1, a1]
                        for r0 in reduce(6):
                            in1 = x[a0, r0]
                            in2 = y[r1, r0]
                            v0 = mul(in1, in2)
                            acc1 <- sum(v0)
                        v1 = tanh(acc1)
                        v2 = mul(v1, in0)
                        acc0 <- sum(v2)
                    w[a0, a1] = acc0
        return (z, w)
    =>
    @loop
    def f(x: f32[4, 6], y: f32[5, 6], u: f32[5, 3], v: f32[5, 3]):
        with kernel('z', z=f32[4, 3], w=f32[4, 3]):
            for a0 in free(4):
                for a1 in free(3):
                    for r1 in reduce(5):
                        in0 = u[r1, a1]
                        in1 = v[r1, a1]
                        for r0 in reduce(6):
                            in2 = x[a0, r0]
                            in3 = y[r1, r0]
                            v0 = mul(in2, in3)
                            acc2 <- sum(v0)
                        v1 = exp(acc2)
                        v2 = mul(v1, in0)
                        v3 = tanh(acc2)
                        v4 = mul(v3, in1)
                        acc0 <- sum(v2)
                        acc1 <- sum(v4)
                    z[a0, a1] = acc0
                    w[a0, a1] = acc1
        return (z, w)
    """
    kernels = [s for s in program.steps if isinstance(s, l.Kernel)]
    found = [(s, c) for s in kernels if len(s.stores) == 1 and (c := chain(s)) is not None]
    near = _near([c for _, c in found])
    steps = list(program.steps)
    done: set[l.Kernel] = set()
    for number, (one, c) in enumerate(found):
        for other, d in (found[n] for n in near[number]):
            if {one, other} & done or (made := together(c, d)) is None or _needs(program, other, one):
                continue
            subject = f"{one.name}, {other.name}"
            before, after = price([one, other]), price([made])
            times = f"{after / 1000:.1f} us as one kernel, {before / 1000:.1f} us as two, by the model"
            why = refusal(made) or (times if after > before else "")
            log.add(Event(PASS, RULE, subject, not why, why or f"they compute the same in every step: {times}"))
            if not why:
                log.applied(PASS, RULE, subject, [one, other], [made])
                steps[steps.index(one)] = made
                steps.remove(other)
                done |= {one, other}
    return in_order(program, steps) if done else program


def _near(chains: Sequence[Chain]) -> list[list[int]]:
    """For every chain those after it that multiply inside what it multiplies there: others share no sum with it."""
    inside = [{x.buffer for x in topological(c.inside) if isinstance(x, l.Load)} for c in chains]
    users: dict[l.Buffer, list[int]] = {}
    for n, buffers in enumerate(inside):
        for b in buffers:
            users.setdefault(b, []).append(n)
    return [sorted({m for b in buffers for m in users[b] if m > n}) for n, buffers in enumerate(inside)]


def _needs(program: l.Program, last: l.Kernel, first: l.Kernel) -> bool:
    """Whether a kernel reads what is made of another one's results."""
    made: set[l.Buffer] = set()
    for s in program.steps:
        if s is first or made & {*s.reads}:
            made |= {*s.writes}
    return bool(made & {*last.reads})


def together(c: Chain, d: Chain) -> l.Kernel | None:
    """Two chains as one kernel of both results; None where they share no sum inside."""
    one, other = c.kernel, d.kernel
    mine, its = ([*(a for a in x.kernel.axes if a not in (x.rows, x.columns)), x.rows, x.columns] for x in (c, d))
    if [a.extent for a in mine] != [a.extent for a in its]:
        return None
    places = dict(zip(its, mine, strict=True))
    stores = tuple(substitute(s, places) for s in other.stores)
    made = l.Kernel(one.name, one.axes, (*one.stores, *stores), one.source)
    found = chain(made)
    if found is None or len(found.outside) != 2 or len(found.sums) == len(c.sums) + len(d.sums):
        return None
    return made
