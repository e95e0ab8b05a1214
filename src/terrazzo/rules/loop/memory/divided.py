"""What a kernel stores beside other things is stored sooner, or later, by a kernel of its own.

Fusion makes one kernel of what reads the same, or is small and alike. All that it reads waits until it runs, and all
that it stores is there from then on: states of a recurrent net that are all read at the end, gates of all steps. Where
most memory is in use, such a kernel becomes several, each of which runs as soon as what it reads is there, or right
before what it stores is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from terrazzo.ir.canonical import canonical
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import topological
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.cost import Rates, cost
from terrazzo.rules.loop.definitions import unused
from terrazzo.rules.loop.memory.lifetimes import WORTH, Steps, in_use, reads_of
from terrazzo.rules.loop.memory.remake import storing

PASS = "remake"
RULE = "divide"
RATE = 4.0
"""How many times the part of memory must be saved that it takes of the time."""
LOSS = 0.05
"""The part of the time of a program that is given for memory at most."""
ROUNDS = 32
"""How often it is looked where most memory is in use."""
LARGEST = 8
"""How many kernels are tried, those that read and store most of what is in use there."""
SAVED = 0.01
"""The part of what is in use there that each of them reads and stores at least."""

Group = tuple[l.Store, ...]
"""Stores that stay together."""


@dataclass(frozen=True)
class _Way:
    """The steps of a program in which `parts` do what a kernel did."""

    kernel: l.Kernel
    parts: tuple[l.Kernel, ...]
    steps: tuple[l.Kernel | l.Call, ...]


def divide(program: l.Program, log: Log, rates: Rates, worth: int = WORTH, pass_name: str = PASS) -> l.Program:
    """`program` with kernels that store several things as several, which run apart, as long as the part of memory that
    this saves is several times the part of the time that it takes.

    @loop
    def f(x: f32[8, 16]):
        with kernel('y', y=f32[16]):
            for a0 in free(16):
                for r0 in reduce(8):
                    in0 = x[r0, a0]
                    acc0 <- max(in0)
                y[a0] = acc0
        with kernel('z', z=f32[16]):
            for r0 in reduce(16):
                in0 = y[r0]
                v0 = exp(in0)
                acc0 <- max(v0)
            for a0 in free(16):
                z[a0] = acc0
        with kernel('w', w=f32[16]):
            for r0 in reduce(16):
                in0 = z[r0]
                v0 = exp(in0)
                acc0 <- max(v0)
            for a0 in free(16):
                w[a0] = acc0
        with kernel('u', s=f32[1], t=f32[1], u=f32[1]):
            for r0 in reduce(16):
                in0 = y[r0]
                in1 = z[r0]
                in2 = w[r0]
                acc0 <- sum(in0)
                acc1 <- sum(in1)
                acc2 <- sum(in2)
            s[0] = acc0
            t[0] = acc1
            u[0] = acc2
        return (s, t, u)
    =>
    @loop
    def f(x: f32[8, 16]):
        with kernel('y', y=f32[16]):
            for a0 in free(16):
                for r0 in reduce(8):
                    in0 = x[r0, a0]
                    acc0 <- max(in0)
                y[a0] = acc0
        with kernel('s', s=f32[1]):
            for r0 in reduce(16):
                in0 = y[r0]
                acc0 <- sum(in0)
            s[0] = acc0
        with kernel('z', z=f32[16]):
            for r0 in reduce(16):
                in0 = y[r0]
                v0 = exp(in0)
                acc0 <- max(v0)
            for a0 in free(16):
                z[a0] = acc0
        with kernel('t', t=f32[1]):
            for r0 in reduce(16):
                in0 = z[r0]
                acc0 <- sum(in0)
            t[0] = acc0
        with kernel('w', w=f32[16]):
            for r0 in reduce(16):
                in0 = z[r0]
                v0 = exp(in0)
                acc0 <- max(v0)
            for a0 in free(16):
                w[a0] = acc0
        with kernel('u', u=f32[1]):
            for r0 in reduce(16):
                in0 = w[r0]
                acc0 <- sum(in0)
            u[0] = acc0
        return (s, t, u)
    """
    prices: dict[l.Kernel, float] = {}

    def price(step: l.Kernel | l.Call) -> float:
        if isinstance(step, l.Call):
            return 0.0
        form = canonical(step).kernel
        if form not in prices:
            prices[form] = cost(form, rates)
        return prices[form]

    highest = least = max(in_use(program.steps, program.results, inputs=program.inputs), default=0)
    now, whole, spent, taken = program, 0.0, 0.0, 0
    found: list[tuple[_Way, int, int, float]] = []
    while len(found) < ROUNDS:
        used = in_use(now.steps, now.results, inputs=now.inputs)
        if (most := max(used, default=0)) < worth:
            break
        whole = whole or max(sum(map(price, now.steps)), 1.0)
        best = most, used.count(most), 0.0
        chosen: _Way | None = None
        for way in _ways(now, used.index(most)):
            after = in_use(way.steps, now.results, inputs=now.inputs)
            more = max(sum(map(price, way.parts)) - price(way.kernel), 0.0)
            mine = max(after), after.count(max(after)), more
            if spent + more <= LOSS * whole and mine < best and (chosen or mine[:2] < best[:2]):
                best, chosen = mine, way
        if chosen is None:
            break
        less, _, more = best
        now, spent = l.Program(program.name, program.inputs, chosen.steps, program.results), spent + more
        found.append((chosen, most, less, more))
        if less < least and (highest - less) / highest >= RATE * spent / whole:
            least, taken = less, len(found)
    for way, most, less, more in found[:taken]:
        why = f"{most / 1e6:.1f} MB are in use, and {less / 1e6:.1f} MB then, for {more / 1000:.1f} us more"
        log.add(Event(pass_name, RULE, way.kernel.name, True, f"{len(way.parts)} kernels: {why}"))
        log.applied(pass_name, RULE, way.kernel.name, [way.kernel], list(way.parts))
    steps = found[taken - 1][0].steps if taken else program.steps
    return l.Program(program.name, program.inputs, steps, program.results) if taken else program


def _ways(program: l.Program, peak: int) -> Iterator[_Way]:
    """Programs in which a kernel that reads or stores much of what is in use at a step is several."""
    steps, kept = program.steps, {*program.inputs, *program.results}
    made = {b: n for n, s in enumerate(steps) for b in s.writes}
    uses = reads_of(steps)
    alive = {b for b, n in made.items() if b not in kept and n <= peak <= uses.get(b, [n])[-1]}
    least = SAVED * sum(b.type.span for b in alive)
    large: list[tuple[int, int, l.Kernel]] = []
    for n, s in enumerate(steps):
        size = sum(b.type.span for b in {*s.reads, *s.writes} & alive)
        if isinstance(s, l.Kernel) and len(s.stores) > 1 and size > least:
            large.append((size, n, s))
    large = sorted(large, key=lambda x: -x[0])[:LARGEST]
    for n, kernel, groups in ((n, s, groups) for _, n, s in large for groups in _groups(s)):
        ready = {g: 1 + max((made.get(b, -1) for b in _reads(g)), default=-1) for g in groups}
        wanted = {g: min((k for x in g for k in uses.get(x.buffer, ())), default=len(steps)) for g in groups}
        for at, place in ((ready, max), (wanted, min)):
            for some in _divided(groups, at):
                parts = _parts(kernel, [[x for g in part for x in g] for part in some], {s.name for s in steps})
                before: list[list[l.Kernel | l.Call]] = [[] for _ in range(len(steps) + 1)]
                for part, done in zip(some, parts, strict=True):
                    before[place(at[g] for g in part)].append(done)
                new = [x for k, s in enumerate((*steps, None)) for x in (*before[k], *([s] if s and k != n else []))]
                yield _Way(kernel, parts, tuple(new))
                if place is min and (later := _with_makers(new, parts, kept)) != new:
                    yield _Way(kernel, parts, tuple(later))


def _with_makers(steps: Steps, parts: Collection[l.Kernel], kept: Set[l.Buffer]) -> list[l.Kernel | l.Call]:
    """Steps in an order in which those that only these parts need, or others do that only they need, come right before
    the first that does.
    """
    makers = {b: s for s in steps for b in s.writes}
    readers: dict[l.Buffer, set[l.Kernel | l.Call]] = {}
    for s in steps:
        for b in s.reads:
            readers.setdefault(b, set()).add(s)
    moved = set[l.Kernel | l.Call](parts)
    for s in reversed(steps):
        needing = {r for b in s.writes for r in readers.get(b, ())}
        bound = (isinstance(s, l.Call) and s.order) or not kept.isdisjoint(s.writes)
        if not bound and needing and needing <= moved:
            moved.add(s)
    waiting, order = moved.difference(parts), list[l.Kernel | l.Call]()
    for s in [s for s in steps if s not in waiting]:
        needed = [(s, iter(s.reads))]  # each with what it reads that was not looked at
        while needed:
            first, reads = needed[-1]
            if maker := next((m for b in reads if (m := makers.get(b)) in waiting), None):
                waiting.remove(maker)
                needed.append((maker, iter(maker.reads)))
            else:
                order.append(first)
                needed.pop()
    return order


def _groups(kernel: l.Kernel) -> list[tuple[Group, ...]]:
    """Ways to divide the stores of a kernel into such as stay together: those that share a sum, which would be computed
    again, or also those that read the same.
    """
    summed = {s: {x for x in topological([s.value]) if isinstance(x, l.Reduce | l.Scan)} for s in kernel.stores}
    read = {s: {frozenset(_reads([s]))} for s in kernel.stores}
    ways = [_meeting(kernel.stores, lambda s: summed[s] | read[s]), _meeting(kernel.stores, lambda s: summed[s])]
    return [groups for groups in dict.fromkeys(map(tuple, ways)) if len(groups) > 1]


def _meeting(stores: Iterable[l.Store], of: Callable[[l.Store], set[Any]]) -> list[Group]:
    """Stores, those together that have something in common."""
    found: list[tuple[Group, set[Any]]] = []
    for store in stores:
        mine: Group = (store,)
        own = of(store)
        for meeting in [g for g in found if g[1] & own]:
            found.remove(meeting)
            mine, own = meeting[0] + mine, meeting[1] | own
        found.append((mine, own))
    return [mine for mine, _ in found]


def _reads(group: Iterable[l.Store]) -> set[l.Buffer]:
    """What is read for some stores."""
    return {x.buffer for x in topological(list(group)) if isinstance(x, l.Load)}


def _divided(groups: Sequence[Group], at: Mapping[Group, int]) -> Iterator[list[list[Group]]]:
    """Groups of stores as 2, 4, 8 ... parts, or each by itself, in the order of where they belong; those that belong at
    the same place stay together.
    """
    places: dict[int, list[Group]] = {}
    for g in sorted(groups, key=at.__getitem__):
        places.setdefault(at[g], []).append(g)
    each, count = [*places.values()], 2
    while count < 2 * len(each):
        ends = [len(each) * k // min(count, len(each)) for k in range(min(count, len(each)) + 1)]
        yield [[g for some in each[i:j] for g in some] for i, j in pairwise(ends)]
        count *= 2


def _parts(kernel: l.Kernel, some: Sequence[Sequence[l.Store]], names: Collection[str]) -> tuple[l.Kernel, ...]:
    """A kernel as several, each with some of its stores and the axes of these. That with the last one has its name."""
    found, taken = [], {*names}
    for stores in some:
        last = kernel.stores[-1] in stores
        name = kernel.name if last else unused(stores[-1].buffer.name, taken)
        taken.add(name)
        found.append(storing(kernel, [x for x in kernel.stores if x in stores], name))
    return tuple(found)
