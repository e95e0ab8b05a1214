"""Keys and values that lie where a table says, as in the pages of a cache, are looked up by the chain that reads them.

Operands that data says where to find are stored first, since tiles of products come in boxes of memory. A chain of few
rows copies what it multiplies piece by piece, each from its own place, and reads it once: it needs no copy.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import topological
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.cost import looked_up
from terrazzo.rules.loop.definitions import Definitions
from terrazzo.rules.loop.fusion.inline import inline, unproved
from terrazzo.rules.loop.judging import Price, Refusal
from terrazzo.rules.loop_to_tile.chains.chains import formed
from terrazzo.rules.loop_to_tile.chains.few_rows import MOST

PASS = "online"
RULE = "look_up_on_the_way"


def look_up_on_the_way(program: l.Program, log: Log, price: Price, refusal: Refusal) -> l.Program:
    """`program` without copies that only chains of few rows read, where these are no slower by the model without them.
    `refusal` says why a kernel is not worth having.

    @loop
    def f(q: f32[2, 6], k: f32[9, 4, 6], v: f32[9, 4, 5], t: i64[3]):
        with kernel('c', c=f32[3, 4, 6]):
            for a0 in free(3):
                in0 = t[a0]
                for a1 in free(4):
                    for a2 in free(6):
                        in1 = k[at(in0, 9), a1, a2]
                        c[a0, a1, a2] = in1
        with kernel('z', z=f32[2, 5]):
            for a0 in free(2):
                for a1 in free(5):
                    for r1 in reduce(12):
                        in0 = v[0, r1 % 4, a1]
                        for r0 in reduce(6):
                            in1 = q[a0, r0]
                            in2 = c[r1 // 4, r1 % 4, r0]
                            v0 = mul(in1, in2)
                            acc1 <- sum(v0)
                        v1 = mul(acc1, in0)
                        acc0 <- sum(v1)
                    z[a0, a1] = acc0
        return (z,)
    =>
    @loop
    def f(q: f32[2, 6], k: f32[9, 4, 6], v: f32[9, 4, 5], t: i64[3]):
        with kernel('z', z=f32[2, 5]):
            for a0 in free(2):
                for a1 in free(5):
                    for r1 in reduce(12):
                        in0 = v[0, r1 % 4, a1]
                        in1 = t[r1 // 4]
                        for r0 in reduce(6):
                            in2 = q[a0, r0]
                            in3 = k[at(in1, 9), r1 % 4, r0]
                            v0 = mul(in2, in3)
                            acc1 <- sum(v0)
                        v1 = mul(acc1, in0)
                        acc0 <- sum(v1)
                    z[a0, a1] = acc0
        return (z,)
    """
    known = Definitions(program)
    steps = list(program.steps)
    for s in [x for x in program.steps if isinstance(x, l.Kernel)]:
        copies = [x for b in s.reads if (x := _copy(known, b, s)) is not None]
        if not copies or (found := formed(s)) is None:
            continue
        factors = {x.buffer for x in topological((*found.inside, *found.along)) if isinstance(x, l.Load)}
        if not (copies := [x for x in copies if {*x.writes} <= factors]):
            continue  # what is added to scores was stored because many of them have it in common
        tables = dict.fromkeys(x for c in copies for b in c.reads if (x := _table(known, b, copies)) is not None)
        made = reduce(inline, (*copies, *tables), s)
        before, after = price([*tables, *copies, s]), price([made])
        why = "" if found.rows.extent <= MOST else "rows are many, whose tiles come in boxes of memory"
        why = why or unproved([made]) or refusal(made)
        why = why or (f"{after / 1000:.1f} us without copies, {before / 1000:.1f} us with" if after > before else "")
        names = " and ".join(x.name for x in copies)
        log.add(Event(PASS, RULE, s.name, not why, why or f"{names} became part of it"))
        if not why:
            log.applied(PASS, RULE, s.name, [*tables, *copies, s], [made])
            steps[steps.index(s)] = made
            steps = [x for x in steps if x not in (*copies, *tables)]
    return l.Program(program.name, program.inputs, tuple(steps), program.results)


def _copy(known: Definitions, b: l.Buffer, reader: l.Kernel) -> l.Kernel | None:
    """The kernel that stores for `reader` alone what data says where to find."""
    maker = known.makers.get(b)
    if maker is None or b in known.kept or known.readers[b] != [reader]:
        return None
    value: Any = maker.stores[0].value
    return maker if isinstance(value, l.Load) and looked_up([value]) else None


def _table(known: Definitions, b: l.Buffer, readers: list[l.Kernel]) -> l.Kernel | None:
    """The kernel that makes of a table, number by number, the places which `readers` alone look up."""
    maker = known.makers.get(b)
    if maker is None or b in known.kept or any(x not in readers for x in known.readers[b]) or b.type.dtype.is_float:
        return None
    sums = [x for x in topological(maker.stores) if isinstance(x, l.Reduce | l.Scan)]
    return None if sums else maker
