"""What only those read who store its parts is made by these.

Where products of float32 multiply parts (ADR 009), the kernels that store these read what products read before, and
fusion is over. A convolution stores what it sums up for a skip connection, and its ReLU for the next one; a linear
layer stores what it adds up for its gradient, and its GELU for the product after it: the second is made of the first.
Images lie side by side in memory only to be read once more, channels last.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import substitute, topological
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.cost import Rates, cost
from terrazzo.rules.loop.folding.fold import fold_indices
from terrazzo.rules.loop.fusion.inline import inline, unproved
from terrazzo.rules.loop.memory.in_windows import stored_again
from terrazzo.rules.loop.precision.sooner import takes_in

PASS = "remake"
RULE = "read_beside"
WORTH = 1 << 20
"""Bytes of a tensor from which on it is asked."""


def read_beside(
    program: l.Program, log: Log, rates: Rates, kept: Collection[str] = (), worth: int = WORTH
) -> l.Program:
    """`program` without temporaries of so many bytes that are made of what the same kernel stores, where all readers
    can make them of that on the way, and that takes no longer; nor those without sums of which all readers only store
    parts. Whatever else lives longer for it takes no more memory than they did. What is to be `kept` is.

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
    steps: list[Any] = list(program.steps)
    fixed = {*program.inputs, *program.results, *(b for s in steps for b in s.writes if b.name in kept)}
    readers: dict[l.Buffer, set[int]] = {}
    for n, step in enumerate(steps):
        for b in step.reads:
            readers.setdefault(b, set()).add(n)

    def read_by(b: l.Buffer) -> list[int]:
        return sorted(k for k in readers.get(b, ()) if steps[k] is not None and b in steps[k].reads)

    for n, step in enumerate(program.steps):
        for b in [b for b in step.writes if b not in fixed and b.type.span >= worth]:
            if not (places := read_by(b)):
                continue
            old = [steps[n], *(steps[k] for k in places)]
            new = _without(b, old)
            if not new or _price(new, rates) > _price(old, rates):
                continue
            rest, then = new[: -len(places)], dict(zip(places, new[-len(places) :], strict=True))
            last = {x: k for k, s in then.items() for x in s.reads if x not in fixed}
            if sum(x.type.span for x, k in last.items() if k > max(read_by(x), default=n)) > b.type.span:
                continue
            steps[n] = rest[0] if rest else None
            for k, s in then.items():
                steps[k] = s
                for x in s.reads:
                    readers.setdefault(x, set()).add(k)
            log.add(
                Event(PASS, RULE, b.name, True, f"its readers make it of what {step.name} reads or stores beside it")
            )
            log.applied(PASS, RULE, b.name, old, new)
    return l.Program(program.name, program.inputs, tuple(s for s in steps if s is not None), program.results)


def _price(steps: Sequence[Any], rates: Rates) -> float:
    return sum(cost(x, rates) for x in steps)


def _without(buffer: l.Buffer, steps: list[l.Kernel | l.Call]) -> list[l.Kernel]:
    """A kernel that does not store a buffer, if it stores something else, and the readers of that, which make it;
    nothing where that cannot be.
    """
    made, *readers = steps
    kernels = [x for x in readers if isinstance(x, l.Kernel) and takes_in(x)]
    if not isinstance(made, l.Kernel):
        return []
    store, *others = (s for s in made.stores if s.buffer is buffer)
    if others or len(kernels) < len(readers):
        return []
    within = set(topological([store.value]))
    there = {s.value: s for s in made.stores if s is not store and s.value in within and s.value.free}
    known = {v: l.Load(s.buffer, s.index) for v, s in there.items() if not isinstance(v, l.Load)}
    value = substitute(store.value, known)
    terms = list(topological([value]))
    if any(isinstance(x, l.Reduce | l.Scan) for x in terms) or not (known or all(map(stored_again, kernels))):
        return []
    part = l.Kernel(made.name, made.axes, (l.Store(buffer, store.index, value),), made.source)
    left = tuple(s for s in made.stores if s is not store)
    rest = [l.Kernel(made.name, made.axes, left, made.source)] if left else []
    new = [*rest, *(fold_indices(inline(x, part)) for x in kernels)]
    return [] if unproved(new) else new
