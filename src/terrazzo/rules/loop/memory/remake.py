"""What lives long and is made fast is made again where it is needed, instead of being kept.

Between a forward pass and its gradients everything that is saved is in memory at once. Of that much is a copy of
something that lives there anyway: a number in float32 beside its parts, what was normed beside what it was made of. It
is made again by a kernel of its own, right before who needs it, or by whoever reads it, on the way.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from terrazzo.ir.contraction import contraction, nested_contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import substitute, topological
from terrazzo.ir.regions import regions
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.cost import Rates, cost
from terrazzo.rules.loop.folding.fold import fold_indices
from terrazzo.rules.loop.fusion.inline import inline, unproved
from terrazzo.rules.loop.memory.lifetimes import WORTH, in_order, in_use
from terrazzo.rules.loop.precision.sooner import store_sooner, takes_in

PASS = "remake"
RULE = "make_again"
RATE = 4.0
"""How many times the part of memory must be saved that it takes of the time."""
ROUNDS = 64
"""How often it is looked where most memory is in use."""
SHORT = 16
"""Steps of a product up to which it takes hardly longer than what it reads and stores."""
IDLE = 8
"""Rounds in which less was nowhere found, after which no more are made: of parts that one step reads, each is made
again after the others, over and over.
"""


@dataclass(frozen=True)
class _Way:
    """How what kernel number `made` stores is made again by a `part` of it: for the steps `later`, by a kernel before
    them, or by these themselves, as `readers`. So many bytes less are in use where most are, for so much more time.
    """

    made: int
    part: l.Kernel
    later: tuple[int, ...]
    readers: tuple[l.Kernel, ...]
    saves: int
    price: float


def remake(
    program: l.Program,
    log: Log,
    rates: Rates,
    expected: Callable[[Sequence[l.Kernel | l.Call]], float],
    worth: int = WORTH,
) -> l.Program:
    """`program` with kernels that run again where their results are needed late, as long as the part of memory that
    this saves is several times the part of the time that it takes. What products of products take is `expected`.

    @loop
    def f(x: f32[8, 16]):
        with kernel('y', y=f32[8, 16]):
            for a0 in free(8):
                for a1 in free(16):
                    in0 = x[a0, a1]
                    v0 = exp(in0)
                    y[a0, a1] = v0
        with kernel('s', s=f32[8]):
            for a0 in free(8):
                for r0 in reduce(16):
                    in0 = y[a0, r0]
                    acc0 <- sum(in0)
                s[a0] = acc0
        with kernel('z', z=f32[8, 16]):
            for a0 in free(8):
                in0 = s[a0]
                for a1 in free(16):
                    in1 = x[a0, a1]
                    v0 = mul(in1, in0)
                    z[a0, a1] = v0
        with kernel('w', w=f32[8, 16]):
            for a0 in free(8):
                for a1 in free(16):
                    for r0 in reduce(8):
                        in0 = z[r0, a1]
                        v0 = neg(in0)
                        acc0 <- max(v0)
                    w[a0, a1] = acc0
        with kernel('out', out=f32[8, 16]):
            for a0 in free(8):
                for a1 in free(16):
                    in0 = w[a0, a1]
                    in1 = y[a0, a1]
                    v0 = mul(in0, in1)
                    out[a0, a1] = v0
        return (out,)
    =>
    @loop
    def f(x: f32[8, 16]):
        with kernel('y', y=f32[8, 16]):
            for a0 in free(8):
                for a1 in free(16):
                    in0 = x[a0, a1]
                    v0 = exp(in0)
                    y[a0, a1] = v0
        with kernel('s', s=f32[8]):
            for a0 in free(8):
                for r0 in reduce(16):
                    in0 = y[a0, r0]
                    acc0 <- sum(in0)
                s[a0] = acc0
        with kernel('z', z=f32[8, 16]):
            for a0 in free(8):
                in0 = s[a0]
                for a1 in free(16):
                    in1 = x[a0, a1]
                    v0 = mul(in1, in0)
                    z[a0, a1] = v0
        with kernel('w', w=f32[8, 16]):
            for a0 in free(8):
                for a1 in free(16):
                    for r0 in reduce(8):
                        in0 = z[r0, a1]
                        v0 = neg(in0)
                        acc0 <- max(v0)
                    w[a0, a1] = acc0
        with kernel('out', out=f32[8, 16]):
            for a0 in free(8):
                for a1 in free(16):
                    in0 = w[a0, a1]
                    in1 = x[a0, a1]
                    v0 = exp(in1)
                    v1 = mul(in0, v0)
                    out[a0, a1] = v1
        return (out,)
    """
    program = in_order(store_sooner(program, log, rates, max(worth, 1), PASS), log, PASS)
    return _again(program, log, _Remake(rates, expected), worth)


def made_again(
    program: l.Program,
    log: Log,
    rates: Rates,
    expected: Callable[[Sequence[l.Kernel | l.Call]], float],
    worth: int = WORTH,
) -> l.Program:
    """The same of steps that stay in this order, if all of it together is worth it, too. What all windows of something
    read waits for the last one; made by a kernel of its own before each that reads it, it does not (`in_windows`).
    """
    work, told = _Remake(rates, expected), Log(applications=None if log.applications is None else [])
    found = _again(program, told, work, worth)
    most, less = (max(in_use(x.steps, x.results, inputs=x.inputs), default=0) for x in (program, found))
    whole, more = (sum(map(work.price, x.steps)) for x in (program, found))
    worse = (most - less) / max(most, 1) < RATE * (more - whole) / max(whole, 1.0)
    if found is program or worse or _called(found) > _called(program):  # a copy of a region may be none
        return program
    for event in told.events:
        log.add(event)
    if log.applications is not None:
        log.applications += told.applications or ()
    return found


def _called(program: l.Program) -> int:
    """How many ops PyTorch runs."""
    return sum(isinstance(s, l.Call) for s in program.steps) - len(regions(program.steps, program.results).calls)


def _again(program: l.Program, log: Log, work: _Remake, worth: int) -> l.Program:
    """`program` in the last round in which less was in use than before."""
    best, least, idle = program, (sys.maxsize, 0), 0
    for _ in range(ROUNDS):
        used = in_use(program.steps, program.results, inputs=program.inputs)
        most = max(used, default=0)
        now = most, used.count(most)
        best, least, idle = (program, now, 0) if now < least else (best, least, idle + 1)
        if most < worth or idle == IDLE or not (ways := work.ways(program, used.index(most))):
            break
        whole = sum(map(work.price, program.steps))
        ways = [x for x in ways if x.saves / most >= RATE * x.price / max(whole, 1.0)]
        if not ways:
            break
        ways.sort(key=lambda x: max(x.price, 0.0) / x.saves)
        program = _applied(program, ways[: 1 + len(ways) // 8], most, log)
    return best


def _applied(program: l.Program, ways: Sequence[_Way], most: int, log: Log) -> l.Program:
    """The program with what is made again. Of ways that have the same readers the first is taken."""
    steps: dict[int, list[l.Kernel | l.Call]] = {n: [s] for n, s in enumerate(program.steps)}
    names = {s.name for s in program.steps} | {b.name for s in program.steps for b in (*s.reads, *s.writes)}
    taken: set[int] = set()
    for way in ways:
        if not taken.isdisjoint(way.later):
            continue
        taken.update(way.later)
        old = [program.steps[n] for n in (way.made, *way.later)]
        new = list(way.readers) or _with_clone(way.part, old[1:], names)
        for n, reader in zip(way.later, new[-len(way.later) :], strict=True):
            steps[n] = [reader]
        steps[way.later[0]][:0] = new[: -len(way.later)]
        how = "on the way" if way.readers else "by a kernel of its own"
        why = f"{way.saves / 1e6:.1f} MB less of {most / 1e6:.1f} are in use, {way.price / 1000:.1f} us more {how}"
        log.add(Event(PASS, RULE, old[0].name, True, why))
        log.applied(PASS, RULE, old[0].name, old, [old[0], *new])
    kept = tuple(x for n in range(len(program.steps)) for x in steps[n])
    return _needed(l.Program(program.name, program.inputs, kept, program.results))


def _with_clone(part: l.Kernel, readers: Sequence[Any], names: set[str]) -> list[Any]:
    """A kernel that makes again what these read, and they, who read that."""
    again = {s.buffer: l.Buffer(_fresh(s.buffer.name, names), s.buffer.type) for s in part.stores}
    stores = tuple(l.Store(again[s.buffer], s.index, s.value) for s in part.stores)
    clone = l.Kernel(_fresh(part.name, names), part.axes, stores, part.source)
    return [clone, *(substitute(x, again) for x in readers)]


def _fresh(name: str, names: set[str]) -> str:
    """A name that nothing has yet."""
    name = re.sub(r"_again\d*$", "", name)
    found = next(x for k in range(1, 9999) if (x := f"{name}_again{k if k > 1 else ''}") not in names)
    names.add(found)
    return found


def _needed(program: l.Program) -> l.Program:
    """Without stores of what nobody reads any more."""
    wanted = {b for s in program.steps for b in s.reads} | set(program.results)
    steps: list[l.Kernel | l.Call] = []
    for s in program.steps:
        if isinstance(s, l.Kernel):
            stores = tuple(x for x in s.stores if x.buffer in wanted)
            if not stores:
                continue
            s = s if len(stores) == len(s.stores) else storing(s, stores)
        steps.append(s)
    return l.Program(program.name, program.inputs, tuple(steps), program.results)


def storing(kernel: l.Kernel, stores: Sequence[l.Store], name: str = "") -> l.Kernel:
    """A kernel with some of its stores, and the axes of these."""
    axes = tuple(a for a in kernel.axes if any(a in x.free for x in stores))
    return l.Kernel(name or kernel.name, axes, tuple(stores), kernel.source)


class _Remake:
    """What may be made again; what was worked out once is kept, since programs change little from round to round."""

    def __init__(self, rates: Rates, expected: Callable[[Sequence[l.Kernel | l.Call]], float]) -> None:
        self.rates, self.expected = rates, expected
        self.prices: dict[Any, float] = {}
        self.inlined: dict[Any, tuple[l.Kernel, ...]] = {}

    def price(self, step: l.Kernel | l.Call) -> float:
        """Nanoseconds, by the model; nothing for calls of PyTorch. By the rates attention takes a second, since they
        have products of products taken step by step: all else would be no part of the time of a program with it.
        """
        if step not in self.prices:
            chained = isinstance(step, l.Kernel) and any(map(_of_product, step.carried))
            known = cost(step, self.rates) if isinstance(step, l.Kernel) and not chained else 0.0
            self.prices[step] = self.expected([step]) if chained else known
        return self.prices[step]

    def ways(self, program: l.Program, at: int) -> list[_Way]:
        """What there is to make again of all that is alive at a step, and not used by it."""
        steps, kept = program.steps, {*program.results, *program.inputs}
        uses: dict[l.Buffer, list[int]] = {}
        for n, s in enumerate(steps):
            for b in dict.fromkeys((*s.writes, *s.reads)):
                uses.setdefault(b, []).append(n)
        found: list[_Way] = []
        for n, made in enumerate(steps[:at]):
            alive = [b for b in made.writes if b not in kept and uses[b][-1] > at and at not in uses[b]]
            if not alive or not isinstance(made, l.Kernel):
                continue
            readers = {b: [r for r in uses[b] if r > at] for b in alive}
            simple = {b for b in alive if all(takes_in(steps[r]) for r in readers[b]) and _pointwise(made, b)}
            each = [(simple, True), (set(alive) - simple, False)]
            if not (takes_in(made) or _short(made)):  # what it stores beside its sums may be made of these
                each = [({b}, all(takes_in(steps[r]) for r in readers[b])) for b in alive if len(made.writes) > 1]
            for some, inline_it in each:
                if not some:
                    continue
                later = tuple(sorted({r for b in some for r in readers[b]}))
                there = {b for b in made.writes if b not in some and (b in kept or uses[b][-1] > at)}
                part = storing(made, [_from_stored(s, made, there) for s in made.stores if s.buffer in some])
                if not (takes_in(part) or _short(part)):
                    continue
                more = sum(b.type.span for b in part.reads if b not in kept and uses[b][-1] < at)
                if (saves := sum(b.type.span for b in some) - more) <= 0:
                    continue
                if not inline_it:
                    found.append(_Way(n, part, later, (), saves, self.price(part)))
                elif new := self.taken_in(part, [steps[r] for r in later]):
                    price = sum(map(self.price, new)) - sum(self.price(steps[r]) for r in later)
                    found.append(_Way(n, part, later, new, saves, price))
        return found

    def taken_in(self, part: l.Kernel, readers: Sequence[Any]) -> tuple[l.Kernel, ...]:
        """The readers, which compute what a kernel stores themselves; none where that cannot be proved right."""
        key = (part, *readers)
        if key not in self.inlined:
            new = tuple(fold_indices(inline(x, part)) for x in readers)
            self.inlined[key] = () if unproved(new) else new
        return self.inlined[key]


def _short(kernel: l.Kernel) -> bool:
    """Whether a kernel sums products of so few steps that it is as fast as memory all the same."""
    steps = [math.prod(a.extent for a in r.axes) for r in kernel.carried if isinstance(r, l.Reduce)]
    return not kernel.scans and all(isinstance(n, int) and n <= SHORT for n in steps)


def _of_product(r: Any) -> bool:
    """Whether a reduction is a product that holds others."""
    return isinstance(r, l.Reduce) and nested_contraction(r) is not None and contraction(r) is None


def _pointwise(kernel: l.Kernel, buffer: l.Buffer) -> bool:
    """Whether what a kernel stores to a buffer is no sum."""
    values = [s.value for s in kernel.stores if s.buffer is buffer]
    return not any(isinstance(x, l.Reduce | l.Scan) for x in topological(values))


def _from_stored(store: l.Store, kernel: l.Kernel, there: Set[l.Buffer]) -> l.Store:
    """A store, with what other stores of its kernel keep, to buffers that are still there, read from these."""
    known = {
        s.value: l.Load(s.buffer, s.index)
        for s in kernel.stores
        if s.buffer in there and not isinstance(s.value, l.Load | l.Literal)
    }
    return l.Store(store.buffer, store.index, substitute(store.value, known))
