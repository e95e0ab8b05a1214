"""Sums over what chains of products store go inside: a chain goes over its steps in rounds.

Where heads of queries share keys, the gradient of a key is summed over all queries of all these heads. A chain for each
head would store a gradient in 32 bits, and a kernel of its own would add them up.
"""

from __future__ import annotations

from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.instances import Asked, instances
from terrazzo.ir.monoid import monoid
from terrazzo.ir.node import topological, transformed
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.definitions import in_order
from terrazzo.rules.loop.fusion.inline import inline
from terrazzo.rules.loop.judging import Price, Refusal
from terrazzo.rules.loop_to_tile.chains.chain import chain

PASS = "online"
RULE = "sums_inside"


def sums_inside(program: l.Program, log: Log, price: Price, refusal: Refusal) -> l.Program:
    """`program` with sums of what chains store in these, where that is faster by the model. `refusal` says why a kernel
    is not worth having.

    @loop
    def f(x: f32[4, 6], y: f32[2, 5, 6], u: f32[2, 5, 3]):
        with kernel('w', w=f32[2, 4, 3]):
            for a0 in free(2):
                for a1 in free(4):
                    for a2 in free(3):
                        for r1 in reduce(5):
                            in0 = u[a0, r1, a2]
                            for r0 in reduce(6):
                                in1 = x[a1, r0]
                                in2 = y[a0, r1, r0]
                                v0 = mul(in1, in2)
                                acc1 <- sum(v0)
                            v1 = exp(acc1)
                            v2 = mul(v1, in0)
                            acc0 <- sum(v2)
                        w[a0, a1, a2] = acc0
        with kernel('z', z=f32[4, 3]):
            for a0 in free(4):
                for a1 in free(3):
                    for r0 in reduce(2):
                        in0 = w[r0, a0, a1]
                        v0 = mul(in0, f32(0.25))
                        acc0 <- sum(v0)
                    z[a0, a1] = acc0
        return (z,)
    =>
    @loop
    def f(x: f32[4, 6], y: f32[2, 5, 6], u: f32[2, 5, 3]):
        with kernel('z', z=f32[4, 3]):
            for a0 in free(4):
                for a1 in free(3):
                    for r1, r2 in reduce(2, 5):
                        in0 = u[r1, r2, a1]
                        for r0 in reduce(6):
                            in1 = x[a0, r0]
                            in2 = y[r1, r2, r0]
                            v0 = mul(in1, in2)
                            acc1 <- sum(v0)
                        v1 = exp(acc1)
                        v2 = mul(v1, in0)
                        acc0 <- sum(v2)
                    v3 = mul(acc0, f32(0.25))
                    z[a0, a1] = v3
        return (z,)
    """
    kept = {*program.results, *(b for s in program.steps if isinstance(s, l.Call) for b in s.reads)}
    readers: dict[l.Buffer, list[l.Kernel]] = {}
    kernels = [s for s in program.steps if isinstance(s, l.Kernel)]
    for s in kernels:
        for b in s.reads:
            readers.setdefault(b, []).append(s)
    instance = instances(kernels)
    inside = Asked(summed, instance)  # each pair once, whatever its buffers are called
    found: dict[Any, list[tuple[l.Kernel, l.Kernel, l.Kernel]]] = {}
    for maker in [s for s in kernels if len(s.stores) == 1]:
        buffer = maker.stores[0].buffer
        if buffer in kept or len(readers.get(buffer, ())) != 1 or chain(maker) is None:
            continue
        (reader,) = readers[buffer]
        made = inside(instance(maker), instance(reader))
        if made is not None and (c := chain(made.kernel)) is not None:
            alike = tuple(a.extent for a in (*made.kernel.axes, *c.rounds, c.steps))
            found.setdefault(alike, []).append((maker, reader, made.kernel))
    steps = list(program.steps)
    for group in found.values():  # chains of the same axes become one kernel, so they go around together
        before, after = price([s for maker, reader, _ in group for s in (maker, reader)]), price([x for *_, x in group])
        times = f"{after / 1000:.1f} us in rounds, {before / 1000:.1f} us apart, by the model"
        why = next(filter(None, (refusal(made) for *_, made in group)), "") or (times if after > before else "")
        for maker, reader, made in group:
            subject = f"{maker.name}, {reader.name}"
            log.add(Event(PASS, RULE, subject, not why, why or f"the sum goes on: {times}"))
            if not why:
                log.applied(PASS, RULE, subject, [maker, reader], [made])
                steps[steps.index(reader)] = made
                steps.remove(maker)
    return in_order(program, steps) if steps != [*program.steps] else program


def summed(maker: l.Kernel, reader: l.Kernel) -> l.Kernel | None:
    """A chain and the sum of what it stores as one chain in rounds; None where that is something else."""
    sums = [x for x in topological(reader.stores) if isinstance(x, l.Reduce)]
    if len(sums) != 1 or len(reader.stores) != 1 or sums[0].monoid.name != "sum":
        return None
    whole = inline(reader, maker)
    stores = transformed(whole.stores, _flat)
    made = l.Kernel(reader.name, reader.axes, stores, reader.source)
    found = chain(made)
    return made if found is not None and found.rounds else None


def _flat(x: Any) -> Any:
    """A sum of sums as one, with constants that each is multiplied by outside."""
    if not isinstance(x, l.Reduce) or x.monoid.name != "sum":
        return x
    axes, (term,) = l.open_binder(x)
    constants = []
    while isinstance(term, l.Apply) and term.fn.name == "mul" and isinstance(term.args[1], l.Literal):
        constants.append(term.args[1])
        term = term.args[0]
    if not isinstance(term, l.Reduce) or term.monoid.name != "sum":
        return x
    inner, args = l.open_binder(term)
    made: Any = l.Reduce.make(monoid("sum"), (*axes, *inner), args)
    for c in reversed(constants):
        made = l.apply("mul", made, c)
    return made
