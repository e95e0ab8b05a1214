"""What is kept in 32 bits though it was made of 16 bits is kept as these, and its readers go on from there."""

from __future__ import annotations

from typing import Any

from terrazzo.ir.contraction import contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.node import substitute, topological
from terrazzo.ir.types import Type
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.cost import Rates, cost
from terrazzo.rules.loop.folding.fold import fold_indices
from terrazzo.rules.loop.fusion.inline import inline, unproved

RULE = "store_sooner"
SMALL = 16
"""What else readers need for it takes at most this part of its memory."""


def store_sooner(program: l.Program, log: Log, rates: Rates, worth: int, pass_name: str) -> l.Program:
    """`program` with temporaries of so many bytes stored before they became wider, where all readers can make the rest
    of them on the way, and that moves fewer bytes.

    @loop
    def f(x: f32[64, 16], m: f32[16]):
        with kernel('t', t=f32[64, 16]):
            for a0 in free(64):
                for a1 in free(16):
                    in0 = x[a0, a1]
                    v0 = exp(in0)
                    v1 = bf16(v0)
                    v2 = f32(v1)
                    in1 = m[a1]
                    v3 = sub(v2, in1)
                    t[a0, a1] = v3
        with kernel('z', z=f32[64]):
            for a0 in free(64):
                for r0 in reduce(16):
                    in0 = t[a0, r0]
                    acc0 <- sum(in0)
                z[a0] = acc0
        return (z,)
    =>
    @loop
    def f(x: f32[64, 16], m: f32[16]):
        with kernel('t', t=bf16[64, 16]):
            for a0 in free(64):
                for a1 in free(16):
                    in0 = x[a0, a1]
                    v0 = exp(in0)
                    v1 = bf16(v0)
                    t[a0, a1] = v1
        with kernel('z', z=f32[64]):
            for a0 in free(64):
                for r0 in reduce(16):
                    in0 = t[a0, r0]
                    v0 = f32(in0)
                    in1 = m[r0]
                    v1 = sub(v0, in1)
                    acc0 <- sum(v1)
                z[a0] = acc0
        return (z,)
    """
    steps = list(program.steps)
    fixed = {*program.inputs, *program.results}
    readers: dict[l.Buffer, set[int]] = {}
    for n, step in enumerate(steps):
        for b in step.reads:
            readers.setdefault(b, set()).add(n)
    for n in range(len(steps)):
        made = steps[n]
        for b in made.writes if isinstance(made, l.Kernel) else ():
            if b in fixed or b.type.span < worth:
                continue
            places = sorted(k for k in readers.get(b, ()) if b in steps[k].reads)
            old = [steps[n], *(steps[k] for k in places)]
            if places and (new := _sooner(old, b)) and _price(new, rates) <= _price(old, rates):
                for k, s in zip((n, *places), new, strict=True):
                    steps[k] = s
                    for x in s.reads:
                        readers.setdefault(x, set()).add(k)
                log.add(Event(pass_name, RULE, b.name, True, f"{b.type} was made of 16 bits, which are kept instead"))
                log.applied(pass_name, RULE, b.name, old, new)
    return l.Program(program.name, program.inputs, tuple(steps), program.results)


def _sooner(steps: list[Any], buffer: l.Buffer) -> list[l.Kernel]:
    """A kernel that stores less of what it stores to a buffer, and the readers of that, which make the rest; nothing
    where that cannot be.
    """
    made, *readers = steps
    if not all(map(takes_in, readers)):
        return []
    store, *others = (s for s in made.stores if s.buffer is buffer)
    value = store.value
    narrow = [x for x in topological([value]) if _narrower(x, buffer) and x.free <= set(made.axes)]
    if others or not narrow or narrow[-1] is value:
        return []
    kind: Any = narrow[-1]
    kept = l.Buffer(buffer.name, Type(kind.dtype, buffer.type.shape, buffer.type.strides))
    rest = substitute(value, {narrow[-1]: l.Load(kept, store.index)})
    terms = topological([rest])
    more = sum(x.type.span for x in {x.buffer for x in terms if isinstance(x, l.Load)} - {kept})
    if any(isinstance(x, l.Reduce | l.Scan) for x in terms) or more * SMALL > buffer.type.span:
        return []
    part = l.Kernel(made.name, made.axes, (l.Store(buffer, store.index, rest),), made.source)
    new = [fold_indices(inline(x, part)) for x in readers]
    stores = tuple(l.Store(kept, s.index, narrow[-1]) if s is store else s for s in made.stores)
    new = [l.Kernel(made.name, made.axes, stores, made.source), *new]
    return [] if unproved(new) else new


def _narrower(x: Any, buffer: l.Buffer) -> bool:
    """Whether a term is rounded to less than a buffer of floating point has."""
    kind = buffer.type.dtype
    return isinstance(x, l.Apply) and is_cast(x.fn) and x.dtype.is_float and kind.is_float and x.dtype.size < kind.size


def takes_in(kernel: l.Kernel | l.Call) -> bool:
    """Whether a step may compute what it reads on the way: a kernel that is as fast as memory, since it multiplies
    nothing and needs no order.
    """
    if isinstance(kernel, l.Call):
        return False
    sums = [x for x in topological(kernel.stores) if isinstance(x, l.Reduce | l.Scan)]
    return not any(isinstance(x, l.Scan) or contraction(x) is not None for x in sums)


def _price(steps: list[Any], rates: Rates) -> float:
    return sum(cost(x, rates) for x in steps)
