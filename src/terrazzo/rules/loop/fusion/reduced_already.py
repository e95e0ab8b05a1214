"""What the maker of something has reduced on its way is read beside it, not reduced again.

A variance is made of a mean, and who reads the one needs the other: where fusion put the mean into both, since neither
was much slower for it, every channel of a group adds up the whole group once more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from terrazzo.ir.contraction import contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Var
from terrazzo.ir.node import substitute
from terrazzo.ir.types import DType, Type
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.cost import Rates, cost
from terrazzo.rules.loop.definitions import unused

PASS = "fuse"
RULE = "reduced_already"

Found = tuple[l.Load, l.Reduce, l.Reduce]


def reduced_already(program: l.Program, log: Log, rates: Rates) -> l.Program:
    """`program` with reductions stored by kernels that have them, for others that read what these make and reduce the
    same again, where the model says that this is faster.

    @loop
    def f(x: f32[4, 4096]):
        with kernel('v', v=f32[4]):
            for a0 in free(4):
                for r0 in reduce(4096):
                    in0 = x[a0, r0]
                    acc0 <- max(in0)
                for r1 in reduce(4096):
                    in1 = x[a0, r1]
                    v0 = sub(in1, acc0)
                    v1 = exp(v0)
                    acc1 <- sum(v1)
                v[a0] = acc1
        with kernel('y', y=f32[4, 64, 64]):
            for a0 in free(4):
                in0 = v[a0]
                for r0 in reduce(4096):
                    in1 = x[a0, r0]
                    acc0 <- max(in1)
                for a1 in free(64):
                    for a2 in free(64):
                        in2 = x[a0, a1 * 64 + a2]
                        v0 = sub(in2, acc0)
                        v1 = exp(v0)
                        v2 = div(v1, in0)
                        y[a0, a1, a2] = v2
        return (y,)
    =>
    @loop
    def f(x: f32[4, 4096]):
        with kernel('v', v=f32[4], v_max=f32[4]):
            for a0 in free(4):
                for r0 in reduce(4096):
                    in0 = x[a0, r0]
                    acc0 <- max(in0)
                for r1 in reduce(4096):
                    in1 = x[a0, r1]
                    v0 = sub(in1, acc0)
                    v1 = exp(v0)
                    acc1 <- sum(v1)
                v[a0] = acc1
                v_max[a0] = acc0
        with kernel('y', y=f32[4, 64, 64]):
            for a0 in free(4):
                in0 = v_max[a0]
                in1 = v[a0]
                for a1 in free(64):
                    for a2 in free(64):
                        in2 = x[a0, a1 * 64 + a2]
                        v0 = sub(in2, in0)
                        v1 = exp(v0)
                        v2 = div(v1, in1)
                        y[a0, a1, a2] = v2
        return (y,)
    """
    steps: list[Any] = list(program.steps)
    makers = {b: n for n, s in enumerate(steps) if isinstance(s, l.Kernel) for b in s.writes}
    names = {b.name for b in (*program.inputs, *(b for s in steps for b in s.writes))}
    for n in [n for n, s in enumerate(steps) if isinstance(s, l.Kernel) and s.carried]:
        for load, term, again in list(_again(steps[n], steps, makers)):
            k = makers[load.buffer]
            old = steps[k], steps[n]
            if again not in steps[n].terms:  # it was in one that is read by now
                continue
            maker, b = _storing(steps[k], load.buffer, term, names)
            new = maker, substitute(steps[n], {again: l.Load(b, load.index)})
            before, after = (sum(cost(x, rates) for x in pair) for pair in (old, new))
            why = f"{after / 1000:.1f} us where it is read, {before / 1000:.1f} us where it is reduced again"
            log.add(Event(PASS, RULE, f"{b.name} for {steps[n].name}", after < before, why))
            if after < before:
                log.applied(PASS, RULE, steps[n].name, list(old), list(new))
                names.add(b.name)
                makers[b] = k
                steps[k], steps[n] = new
    return l.Program(program.name, program.inputs, tuple(steps), program.results)


def _again(reader: l.Kernel, steps: Sequence[Any], makers: Mapping[l.Buffer, int]) -> Iterator[Found]:
    """What a kernel loads, with a reduction that its maker has, and the same in terms of the kernel, largest first."""
    mine = {x for x in reader.carried if isinstance(x, l.Reduce)}
    for load in [x for x in reader.terms if isinstance(x, l.Load) and x.buffer in makers and not x.inside]:
        maker = steps[makers[load.buffer]]
        first, *others = (s for s in maker.stores if s.buffer is load.buffer)
        if maker is reader or others:
            continue
        at = {e: there for e, there in zip(first.index, load.index, strict=True) if isinstance(e, Var)}
        for term in reversed(maker.carried):
            plain = isinstance(term, l.Reduce) and isinstance(term.dtype, DType) and contraction(term) is None
            if not plain or not term.free <= at.keys() or (again := substitute(term, at)) not in mine:
                continue
            if load.free <= again.free:  # or else it stands where somebody is not bound who says what is loaded
                yield load, term, again


def _storing(maker: l.Kernel, beside: l.Buffer, term: l.Reduce, names: Collection[str]) -> tuple[l.Kernel, l.Buffer]:
    """The kernel that stores a term beside something else, and where; perhaps it does so already."""
    store = next(s for s in maker.stores if s.buffer is beside)
    for s in maker.stores:
        if s.value == term and s.index == store.index:
            return maker, s.buffer
    b = l.Buffer(unused(f"{beside.name}_{term.monoid.name}", names), Type(term.dtype, beside.type.shape))
    return l.Kernel(maker.name, maker.axes, (*maker.stores, l.Store(b, store.index, term)), maker.source), b
