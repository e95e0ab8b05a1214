"""What a kernel stores beside something else that it stores, and is made of that, is made by those who read it.

A convolution stores what it sums up for a skip connection, and its ReLU for the next one; a linear layer stores what it
adds up for its gradient, and its GELU for the product after it. Where products of float32 multiply parts (ADR 009), the
kernel that stores these is all that reads the second one, and computes it as it reads the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import substitute, topological
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.cost import Rates, cost
from terrazzo.rules.loop.folding.fold import fold_indices
from terrazzo.rules.loop.fusion.inline import inline, unproved
from terrazzo.rules.loop.precision.sooner import takes_in

PASS = "remake"
RULE = "read_beside"
WORTH = 1 << 20
"""Bytes of a tensor from which on it is asked."""
SMALL = 16
"""What else readers need for it takes at most this part of its memory."""


def read_beside(program: l.Program, log: Log, rates: Rates, worth: int = WORTH) -> l.Program:
    """`program` without temporaries of so many bytes that are made of what the same kernel stores, where all readers
    can make them of that on the way, and that takes no longer.

    @loop
    def f(x: f32[64, 16], y: f32[16, 32]):
        with kernel('t', t=f32[64, 32], u=f32[64, 32]):
            for a0 in free(64):
                for a1 in free(32):
                    for r0 in reduce(16):
                        in0 = x[a0, r0]
                        in1 = y[r0, a1]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    v1 = max(acc0, f32(0.0))
                    t[a0, a1] = acc0
                    u[a0, a1] = v1
        with kernel('z', z=f32[64]):
            for a0 in free(64):
                for r0 in reduce(32):
                    in0 = u[a0, r0]
                    acc0 <- sum(in0)
                z[a0] = acc0
        return (t, z)
    =>
    @loop
    def f(x: f32[64, 16], y: f32[16, 32]):
        with kernel('t', t=f32[64, 32]):
            for a0 in free(64):
                for a1 in free(32):
                    for r0 in reduce(16):
                        in0 = x[a0, r0]
                        in1 = y[r0, a1]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    t[a0, a1] = acc0
        with kernel('z', z=f32[64]):
            for a0 in free(64):
                for r0 in reduce(32):
                    in0 = t[a0, r0]
                    v0 = max(in0, f32(0.0))
                    acc0 <- sum(v0)
                z[a0] = acc0
        return (t, z)
    """
    steps = list(program.steps)
    fixed = {*program.inputs, *program.results}
    readers: dict[l.Buffer, list[int]] = {}
    for n, step in enumerate(steps):
        for b in step.reads:
            readers.setdefault(b, []).append(n)
    for n, step in enumerate(steps):
        if not isinstance(step, l.Kernel) or len(step.stores) < 2:
            continue
        for b in [b for b in step.writes if b not in fixed and b.type.span >= worth and b in readers]:
            places = readers[b]
            old = [steps[n], *(steps[k] for k in places)]
            if (new := _without(b, old)) and _price(new, rates) <= _price(old, rates):
                for k, x in zip((n, *places), new, strict=True):
                    for other in {*x.reads}.difference(steps[k].reads):
                        readers.setdefault(other, []).append(k)
                    steps[k] = x
                log.add(Event(PASS, RULE, b.name, True, f"its readers make it of what {step.name} stores beside it"))
                log.applied(PASS, RULE, b.name, old, new)
    return l.Program(program.name, program.inputs, tuple(steps), program.results)


def _price(steps: Sequence[Any], rates: Rates) -> float:
    return sum(cost(x, rates) for x in steps)


def _without(buffer: l.Buffer, steps: list[l.Kernel | l.Call]) -> list[l.Kernel]:
    """A kernel that does not store a buffer, and the readers of that, which make it of what the kernel stores beside
    it; nothing where that cannot be.
    """
    made, *readers = steps
    assert isinstance(made, l.Kernel)
    kernels = [x for x in readers if isinstance(x, l.Kernel) and takes_in(x)]
    store, *others = (s for s in made.stores if s.buffer is buffer)
    if others or len(kernels) < len(readers):
        return []
    within = set(topological([store.value]))
    there = {s.value: s for s in made.stores if s is not store and s.value in within and s.value.free}
    there = {v: s for v, s in there.items() if not isinstance(v, l.Load) and s.buffer.type.span <= buffer.type.span}
    value = substitute(store.value, {v: l.Load(s.buffer, s.index) for v, s in there.items()})
    terms = list(topological([value]))
    needed = {x.buffer for x in terms if isinstance(x, l.Load)} - {s.buffer for s in there.values()}
    if not there or any(isinstance(x, l.Reduce | l.Scan) for x in terms):
        return []
    if sum(b.type.span for b in needed) * SMALL > buffer.type.span:
        return []
    part = l.Kernel(made.name, made.axes, (l.Store(buffer, store.index, value),), made.source)
    rest = l.Kernel(made.name, made.axes, tuple(s for s in made.stores if s is not store), made.source)
    new = [rest, *(fold_indices(inline(x, part)) for x in kernels)]
    return [] if unproved(new) else new
