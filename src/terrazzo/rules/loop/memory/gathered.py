"""Rows of which few elements are read: what is known of a row is stored, and readers compute the elements they read."""

from __future__ import annotations

from itertools import count
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import substitute, topological
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.cost import Rates, cost
from terrazzo.rules.loop.definitions import Steps
from terrazzo.rules.loop.fusion.inline import inline, unproved
from terrazzo.rules.loop.precision.sooner import takes_in
from terrazzo.rules.loop_to_tile.reductions.split import reduced_first

PASS = "fuse"
RULE = "rows_gathered"


def rows_gathered(program: l.Program, log: Log, rates: Rates, kept: tuple[str, ...] = ()) -> l.Program:
    """`program` with reductions of rows stored instead of the rows that were made of them, where readers want so few
    elements that they compute these sooner than all are stored: a logarithm of softmax, of which the loss looks up one
    a row. What is `kept` by name stays.

    @loop
    def f(x: f32[8, 64], i: i64[8]):
        with kernel('y', y=f32[8, 64]):
            for a0 in free(8):
                for r0 in reduce(64):
                    in0 = x[a0, r0]
                    acc0 <- max(in0)
                for a1 in free(64):
                    in1 = x[a0, a1]
                    v0 = sub(in1, acc0)
                    y[a0, a1] = v0
        with kernel('z', z=f32[8]):
            for a0 in free(8):
                in0 = i[a0]
                in1 = y[a0, at(in0, 64)]
                v0 = neg(in1)
                z[a0] = v0
        return (z,)
    =>
    @loop
    def f(x: f32[8, 64], i: i64[8]):
        with kernel('y_reduced', y_reduced=f32[8]):
            for a0 in free(8):
                for r0 in reduce(64):
                    in0 = x[a0, r0]
                    acc0 <- max(in0)
                y_reduced[a0] = acc0
        with kernel('z', z=f32[8]):
            for a0 in free(8):
                in0 = i[a0]
                in1 = x[a0, at(in0, 64)]
                in2 = y_reduced[a0]
                v0 = sub(in1, in2)
                v1 = neg(v0)
                z[a0] = v1
        return (z,)
    """
    steps = Steps(program.steps)
    fixed = {*program.inputs, *program.results}
    names = {b.name for s in program.steps for b in (*s.reads, *s.writes)}
    for n in sorted(steps):
        made = steps[n]
        if not isinstance(made, l.Kernel) or any(b in fixed or b.name in kept for b in made.writes):
            continue
        places = steps.reading(made)
        old: list[Any] = [made, *(steps[k] for k in places)]
        if not places or not (new := _gathered(old, names)):
            continue
        before, after = (sum(cost(x, rates) for x in found) for found in (old, new))
        fired = after < before
        told = f"{after / 1000:.1f} us with what is known of rows, {before / 1000:.1f} us with all elements stored"
        log.add(Event(PASS, RULE, made.name, fired, told))
        if fired:
            for k, s in zip((n, *places), new, strict=True):
                steps[k] = s
            names |= {b.name for b in new[0].writes}
            log.applied(PASS, RULE, made.name, old, new)
    return l.Program(program.name, program.inputs, steps.in_order(), program.results)


def _gathered(steps: list[Any], names: set[str]) -> list[l.Kernel]:
    """The reductions of the first kernel, and the others, which compute what they read of the rest; nothing where that
    is no such kernel, or where one of the others multiplies.
    """
    made, *readers = steps
    reduces = [x for x in made.carried if isinstance(x, l.Reduce)]
    if not reduces or made.scans or not all(map(takes_in, (made, *readers))):
        return []
    if not any(a not in r.free for r in reduces for a in made.axes):
        return []
    parts = reduced_first(made, reduces)
    if len(parts) != 2 or any(isinstance(x, l.Reduce) for x in topological(parts[1].stores)):
        return []
    first, rest = _named(parts, {*parts[0].writes} - {*made.writes}, names)
    new = [first, *(inline(x, rest) for x in readers)]
    return [] if unproved(new) else new


def _named(parts: tuple[l.Kernel, ...], made: set[l.Buffer], names: set[str]) -> tuple[l.Kernel, ...]:
    """Kernels with buffers that were made for them under names that nothing else has."""
    taken, new = {*names}, dict[Any, Any]()
    for b in sorted(made, key=lambda b: b.name):
        name = next(x for x in (f"{b.name}{'_' * n}" for n in count()) if x not in taken)
        taken.add(name)
        new[b] = l.Buffer(name, b.type)
    if all(b.name == x.name for b, x in new.items()):
        return parts
    return tuple(l.Kernel(x.name, x.axes, tuple(substitute(s, new) for s in x.stores), x.source) for x in parts)
