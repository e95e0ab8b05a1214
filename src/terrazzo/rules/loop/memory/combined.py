"""What waits to be combined with others, or summed, is combined as soon as it is there.

Fusion makes one kernel of a chain of sums, which is read once and stored nowhere in between. But where its summands are
made one after the other, as the branches of a net or gradients of what is used at every step, all of them wait for the
last one. Some are combined sooner then, and what they are combined to waits instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from terrazzo.ir.contraction import contraction, nested_contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import Expr
from terrazzo.ir.in_place import pairs
from terrazzo.ir.node import Node, topological
from terrazzo.ir.placeless import placeless
from terrazzo.ir.regions import regions
from terrazzo.ir.types import DType, Type
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.cost import Rates, cost
from terrazzo.rules.loop.memory.lifetimes import WORTH, Steps, in_use, reads_of
from terrazzo.rules.loop_to_tile.products.apart import products_apart, term_apart

PASS = "remake"
RULE = "combine_sooner"
RATE = 4.0
"""How many times the part of memory must be saved that it takes of the time."""
LOSS = 0.05
"""The part of the time of a program that is given for memory at most."""
ROUNDS = 64
"""How often it is looked where most memory is in use."""
TRIED = 32
"""How many terms that save most there are tried."""
MANY = 4
"""Products of a kernel that are no more than one has accumulators for: more will be kernels of their own."""


@dataclass(frozen=True)
class _Way:
    """Before step `at`, what `sooner` stores; and step number `reader`, which loads that. So many bytes less are in use
    where most are.
    """

    at: int
    sooner: l.Kernel
    reader: int
    rest: l.Kernel
    saves: int


def combine_sooner(program: l.Program, log: Log, rates: Rates, worth: int = WORTH) -> l.Program:
    """`program` with parts of kernels that run as soon as what they read is there, as long as the part of memory that
    this saves is several times the part of the time that it takes.

    @loop
    def f(x: f32[8, 16]):
        with kernel('y', y=f32[8, 16]):
            for a0 in free(8):
                for a1 in free(16):
                    for r0 in reduce(8):
                        in0 = x[r0, a1]
                        acc0 <- max(in0)
                    y[a0, a1] = acc0
        with kernel('z', z=f32[8, 16]):
            for a0 in free(8):
                for a1 in free(16):
                    for r0 in reduce(8):
                        in0 = y[r0, a1]
                        acc0 <- max(in0)
                    z[a0, a1] = acc0
        with kernel('w', w=f32[8, 16]):
            for a0 in free(8):
                for a1 in free(16):
                    for r0 in reduce(8):
                        in0 = x[r0, a1]
                        acc0 <- sum(in0)
                    w[a0, a1] = acc0
        with kernel('out', out=f32[8, 16]):
            for a0 in free(8):
                for a1 in free(16):
                    in0 = y[a0, a1]
                    in1 = z[a0, a1]
                    v0 = add(in0, in1)
                    in2 = w[a0, a1]
                    v1 = add(v0, in2)
                    out[a0, a1] = v1
        return (out,)
    =>
    @loop
    def f(x: f32[8, 16]):
        with kernel('y', y=f32[8, 16]):
            for a0 in free(8):
                for a1 in free(16):
                    for r0 in reduce(8):
                        in0 = x[r0, a1]
                        acc0 <- max(in0)
                    y[a0, a1] = acc0
        with kernel('z', z=f32[8, 16]):
            for a0 in free(8):
                for a1 in free(16):
                    for r0 in reduce(8):
                        in0 = y[r0, a1]
                        acc0 <- max(in0)
                    z[a0, a1] = acc0
        with kernel('out_sooner1', out_sooner1=f32[8, 16]):
            for a0 in free(8):
                for a1 in free(16):
                    in0 = y[a0, a1]
                    in1 = z[a0, a1]
                    v0 = add(in0, in1)
                    out_sooner1[a0, a1] = v0
        with kernel('w', w=f32[8, 16]):
            for a0 in free(8):
                for a1 in free(16):
                    for r0 in reduce(8):
                        in0 = x[r0, a1]
                        acc0 <- sum(in0)
                    w[a0, a1] = acc0
        with kernel('out', out=f32[8, 16]):
            for a0 in free(8):
                for a1 in free(16):
                    in0 = out_sooner1[a0, a1]
                    in1 = w[a0, a1]
                    v0 = add(in0, in1)
                    out[a0, a1] = v0
        return (out,)
    """
    prices: dict[l.Kernel, float] = {}

    def price(step: l.Kernel | l.Call) -> float:
        if isinstance(step, l.Call):
            return 0.0
        form = placeless(step)
        if form not in prices:
            apart = products_apart(form)
            # each product once: those of a sum, of which every way takes one, are alike
            prices[form] = sum(map(price, apart)) if len(apart) > MANY else cost(form, rates)
        return prices[form]

    left = LOSS
    for _ in range(ROUNDS):
        users, among, named = _users(program.steps), pairs(program.steps), regions(program.steps, program.results)
        used = in_use(program.steps, program.results, among, named=named, inputs=program.inputs)
        most = max(used, default=0)
        if most < worth:
            break
        whole = max(sum(map(price, program.steps)), 1.0)
        found: list[tuple[tuple[int, int, float], _Way, list[l.Kernel | l.Call]]] = []
        for way in _ways(program, used.index(most)):
            more = max(price(way.sooner) + price(way.rest) - price(program.steps[way.reader]), 0.0) / whole
            if more > min(left, way.saves / most / RATE):
                continue
            steps = [*program.steps]
            steps[way.reader] = way.rest
            steps.insert(way.at, way.sooner)
            theirs = {b: old for b, old in among.items() if b not in way.rest.writes} | pairs((way.sooner, way.rest))
            after = in_use(steps, program.results, theirs, partial(_last_uses, users, way), named, program.inputs)
            if (max(after), after.count(max(after))) < (most, used.count(most)):
                found.append(((max(after), after.count(max(after)), more), way, steps))
        if not found:
            break
        (least, _, more), way, steps = min(found, key=lambda x: x[0])
        left -= more
        old = program.steps[way.reader]
        why = f"{most / 1e6:.1f} MB are in use, and {least / 1e6:.1f} MB then, for {more * whole / 1000:.1f} us more"
        log.add(Event(PASS, RULE, old.name, True, f"{', '.join(b.name for b in way.sooner.reads)}: {why}"))
        log.applied(PASS, RULE, old.name, [old], [way.sooner, way.rest])
        program = l.Program(program.name, program.inputs, tuple(steps), program.results)
    return program


def _users(steps: Steps) -> dict[l.Buffer, list[int]]:
    """The numbers of the steps that read or write a buffer, in order."""
    found: dict[l.Buffer, list[int]] = {}
    for n, s in enumerate(steps):
        for b in dict.fromkeys((*s.reads, *s.writes)):
            found.setdefault(b, []).append(n)
    return found


def _last_uses(users: Mapping[l.Buffer, Sequence[int]], way: _Way, steps: Steps) -> dict[l.Buffer, int]:
    """The last uses of buffers by the `steps` that a way makes of those of which the `users` are known: most stay."""
    found = {b: n + (n >= way.at) for b, (*_, n) in users.items()}
    for b in (x for x, n in found.items() if n == way.reader + 1):  # which may read less now
        others = [n for n in users[b] if n != way.reader]
        found[b] = others[-1] + (others[-1] >= way.at) if others else -1
    for n in (way.at, way.reader + 1):
        found |= {b: max(n, found.get(b, n)) for b in (*steps[n].reads, *steps[n].writes)}
    return found


def _ways(program: l.Program, peak: int) -> list[_Way]:
    """What may be combined before a step, where it saves most there."""
    steps, kept = program.steps, {*program.inputs, *program.results}
    made = {b: n for n, s in enumerate(steps) for b in s.writes}
    uses = reads_of(steps)
    names = {s.name for s in steps} | {b.name for b in (*made, *program.inputs)}
    asked: list[tuple[int, Any, int, Any, int, set[l.Buffer]]] = []
    for n, s in enumerate(steps[peak:], peak):
        # what waits for this step alone while the peak passes
        waiting = {b for b in s.reads if b not in kept and made[b] < peak and uses[b][-1] == n}
        waiting = {b for b in waiting if all(k < peak for k in uses[b][:-1])}
        for term, reads in _terms(s) if isinstance(s, l.Kernel) and waiting else ():
            at = 1 + max((made.get(b, -1) for b in reads), default=-1)
            size = term.dtype.size * math.prod(a.extent for a in term.free)
            saves = sum(b.type.span for b in reads & waiting) - size
            if at <= peak and saves > 0:
                asked.append((saves, s, n, term, at, waiting))
    asked.sort(key=lambda x: -x[0])
    found = (_way(s, n, term, at, waiting, names) for _, s, n, term, at, waiting in asked[:TRIED])
    return [way for way in found if way]


def _terms(kernel: l.Kernel) -> Iterator[tuple[Any, set[l.Buffer]]]:
    """The terms of a kernel with the buffers that they read, those of their indices among them: all that have no sums,
    and outside of sums those that have some. Of several products each is such a term, if none is summed again; but
    products of parts, which run in windows as one, and one product by itself, are not taken apart. Nor is a cast to a
    wider type a term of its own: it would store more than it reads, and instructions that multiply 16 bits could not
    read that.
    """
    inside = set(topological([x for r in kernel.carried for x in r.args]))
    every = {r: c for r in kernel.carried if isinstance(r, l.Reduce) and (c := contraction(r)) and len(c.terms) == 1}
    apart = len(every) > 1 and len(every) == len(kernel.carried) and inside.isdisjoint(every)
    reads: dict[Node, set[l.Buffer] | None] = {}
    summed: set[Node] = set()
    stored = {s.value for s in kernel.stores}
    for x in kernel.terms:
        theirs = [reads.get(a, set()) for a in x.children]
        own = {x.buffer} if isinstance(x, l.Load) else set()
        reads[x] = None if any(r is None for r in theirs) else own.union(*(r or () for r in theirs))
        if isinstance(x, l.Scan | l.Get) or (isinstance(x, l.Reduce) and nested_contraction(x) and not apart):
            reads[x] = None
        elif isinstance(x, l.Apply | l.Reduce):
            summed |= {x} if isinstance(x, l.Reduce) or not summed.isdisjoint(x.args) else set()
            part = isinstance(x.dtype, DType) and x not in stored and not (x in summed and x in inside)
            if part and not _wider(x) and (mine := reads[x]):
                yield x, mine


def _wider(term: Any) -> bool:
    """Whether a term is a cast to a type of more bytes."""
    if not (isinstance(term, l.Apply) and is_cast(term.fn)):
        return False
    narrow: Any = term.args[0]
    return bool(narrow.dtype.size < term.dtype.size)


def _way(kernel: l.Kernel, number: int, term: Any, at: int, waiting: set[l.Buffer], names: set[str]) -> _Way | None:
    """A kernel that stores a term, and the one that loads it, if less waits for that."""
    stem = f"{kernel.stores[0].buffer.name.split('_sooner')[0]}_sooner"
    name = next(x for k in range(1, 9999) if (x := f"{stem}{k}") not in names)
    kind, index = _place(kernel, term)
    sooner, rest = term_apart(kernel, term, l.Buffer(name, kind), index)
    saves = sum(b.type.span for b in waiting - set(rest.reads)) - kind.span
    return _Way(at, sooner, number, rest, saves) if saves > 0 else None


def _place(kernel: l.Kernel, term: Any) -> tuple[Type, tuple[Any, ...]]:
    """How a term is stored: as something lies that it is made of, or along the loops."""
    bound = [a for r in kernel.carried for a in (r.axes if isinstance(r, l.Reduce) else (r.axis,))]
    axes = [a for a in dict.fromkeys((*kernel.axes, *bound)) if a in term.free]
    for x in (x for x in topological([term]) if isinstance(x, l.Load)):
        at: tuple[Any, ...] = x.index
        whole = not x.inside and sorted(map(id, at)) == sorted(map(id, axes))
        if whole and x.buffer.type.shape == tuple(a.extent for a in at):
            return Type(term.dtype, x.buffer.type.shape, x.buffer.type.strides), at
    order = _order(term, axes)
    return Type(term.dtype, tuple(a.extent for a in order)), tuple(order)


def _order(term: Any, axes: list[Any]) -> list[Any]:
    """Axes as the first load of a term has them that has all."""
    for x in topological([term]):
        if isinstance(x, l.Load) and set(axes) == x.free:
            at = [[n for n, e in enumerate(x.index) if isinstance(e, Expr) and a in e.free][:1] for a in axes]
            if all(at) and len({n for (n,) in at}) == len(at):  # its guards may name more axes than its index
                return [a for _, a in sorted(zip(at, axes, strict=True), key=lambda y: y[0])]
    return axes
