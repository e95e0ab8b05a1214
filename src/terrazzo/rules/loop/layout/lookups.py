"""Operands of products that are looked up at places that data says are stored first: tiles of operands lie in memory,
where it is known before. So are images under windows whose places are found by division or reflection, as those of
pixels that are shuffled or repeated; and what is looked up beside sums of products that many of these have in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.canonical import may_have
from terrazzo.ir.contraction import Contraction, contraction, operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Bound, Expr, FloorDiv, Loaded, Var
from terrazzo.ir.node import substitute, topological, transformed
from terrazzo.ir.sites import loads
from terrazzo.ir.types import Type
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.cost import Rates, cost, looked_up
from terrazzo.rules.loop.layout.images import image, strewn

LONG = 32
"""Steps of a window from which on points that a thread computes together gain more by places that they share than
storing the image takes, although the filter is one for all.
"""
LOOKED_UP, READ = 0.0042, 0.0015
"""Nanoseconds in which something is looked up beside a sum of products, and is read that was looked up before: each
thread has sums of several rows, and loads the place and what is there one by one. Attention of 16 x 12 heads of 197
tokens took 31 us more than by the model, of 39 (H200, 29 November 2026), for a bias that is looked up by the distance
of tokens. What is read lies together, and is a load for two; how long it takes was not measured.
"""
PASS = "lookups"
RULE, BESIDE = "store_lookups", "store_beside"


def looked_up_first(program: l.Program, log: Log, rates: Rates) -> l.Program:
    """`program` with what products look up stored before, where that is cheaper: factors, and what is added to them."""
    if not rates.matrix:  # who looks up on a processor finds it as fast as anything
        return program
    return store_beside(store_lookups(program, log, rates), log, rates)


def store_lookups(program: l.Program, log: Log, rates: Rates) -> l.Program:
    """`program` with what factors of products look up stored before, once for all that look it up, where that is
    cheaper.

    @loop
    def f(t: bf16[40, 16], i: i64[48], w: bf16[32, 16]):
        with kernel('z', z=f32[48, 32]):
            for a0 in free(48):
                in0 = i[a0]
                for a1 in free(32):
                    for r0 in reduce(16):
                        in1 = t[at(in0, 40), r0]
                        v0 = f32(in1)
                        in2 = w[a1, r0]
                        v1 = f32(in2)
                        v2 = mul(v0, v1)
                        acc0 <- sum(v2)
                    z[a0, a1] = acc0
        return (z,)
    =>
    @loop
    def f(t: bf16[40, 16], i: i64[48], w: bf16[32, 16]):
        with kernel('z_t', z_t=bf16[48, 16]):
            for a0 in free(48):
                in0 = i[a0]
                for a1 in free(16):
                    in1 = t[at(in0, 40), a1]
                    z_t[a0, a1] = in1
        with kernel('z', z=f32[48, 32]):
            for a0 in free(48):
                for a1 in free(32):
                    for r0 in reduce(16):
                        in0 = z_t[a0, r0]
                        v0 = f32(in0)
                        in1 = w[a1, r0]
                        v1 = f32(in1)
                        v2 = mul(v0, v1)
                        acc0 <- sum(v2)
                    z[a0, a1] = acc0
        return (z,)
    """

    def find(s: l.Kernel, names: Set[str], known: Mapping[Any, l.Buffer]) -> tuple[l.Kernel, ...] | None:
        return operands_stored(s, _astray, names, known, True)

    def prices(s: l.Kernel, found: Sequence[l.Kernel]) -> tuple[float, float]:
        return cost(s, rates, as_it_is=True), sum(cost(k, rates) for k in found)

    return stored_first(program, log, (PASS, RULE, "looked up on the way"), find, prices)


def store_beside(program: l.Program, log: Log, rates: Rates) -> l.Program:
    """`program` with what is looked up beside sums of products stored before, where many sums have it in common, and
    that is cheaper: such as a bias of scores by the distance of tokens, which is the same in all images.

    @loop
    def f(q: bf16[64, 32, 16], k: bf16[64, 32, 16], t: bf16[63], i: i64[32, 32]):
        with kernel('z', z=f32[64, 32, 32]):
            for a0 in free(64):
                for a1 in free(32):
                    for a2 in free(32):
                        in0 = i[a1, a2]
                        in1 = t[at(in0, 63)]
                        v0 = f32(in1)
                        for r0 in reduce(16):
                            in2 = q[a0, a1, r0]
                            v1 = f32(in2)
                            in3 = k[a0, a2, r0]
                            v2 = f32(in3)
                            v3 = mul(v1, v2)
                            acc0 <- sum(v3)
                        v4 = add(acc0, v0)
                        z[a0, a1, a2] = v4
        return (z,)
    =>
    @loop
    def f(q: bf16[64, 32, 16], k: bf16[64, 32, 16], t: bf16[63], i: i64[32, 32]):
        with kernel('z_t', z_t=bf16[32, 32]):
            for a0 in free(32):
                for a1 in free(32):
                    in0 = i[a0, a1]
                    in1 = t[at(in0, 63)]
                    z_t[a0, a1] = in1
        with kernel('z', z=f32[64, 32, 32]):
            for a0 in free(64):
                for a1 in free(32):
                    for a2 in free(32):
                        in0 = z_t[a1, a2]
                        v0 = f32(in0)
                        for r0 in reduce(16):
                            in1 = q[a0, a1, r0]
                            v1 = f32(in1)
                            in2 = k[a0, a2, r0]
                            v2 = f32(in2)
                            v3 = mul(v1, v2)
                            acc0 <- sum(v3)
                        v4 = add(acc0, v0)
                        z[a0, a1, a2] = v4
        return (z,)
    """

    def prices(s: l.Kernel, found: Sequence[l.Kernel]) -> tuple[float, float]:
        *made, whole = found
        stored = sum(map(_looked_up, s.terms)) - sum(map(_looked_up, whole.terms))  # here, or for an earlier kernel
        points = _points(whole.axes) * stored
        first = sum(cost(k, rates) + _points(k.axes) * LOOKED_UP for k in made)
        return points * LOOKED_UP, points * READ + first

    return stored_first(program, log, (PASS, BESIDE, "looked up for each sum"), _beside_sums, prices)


def _beside_sums(kernel: l.Kernel, names: Set[str], known: Mapping[Any, l.Buffer]) -> tuple[l.Kernel, ...] | None:
    """Kernels that store the numbers that a product looks up beside its sums, by row and column, but not for all of its
    points, and the kernel that reads them. None where there are none.
    """
    sums = [c for r in kernel.terms if isinstance(r, l.Reduce) and (c := contraction(r)) is not None]
    axes = frozenset(kernel.axes)
    if not sums or any(not isinstance(a.extent, int) for a in axes):
        return None
    pairs = [tuple(f.free & axes for f in c.factors) for c in sums]
    sides = [side for one, other in pairs for side in (one - other, other - one)]
    factors = {*topological([a for c in sums for a in c.reduce.args])}
    made: list[l.Kernel] = []
    taken: dict[Any, Any] = {}
    for x in (y for y in kernel.terms if isinstance(y, l.Load) and y not in factors and y.dtype.is_float):
        if not (_looked_up(x) and x.free < axes and all(x.free & side for side in sides)):
            continue
        own = [a for a in kernel.axes if a in x.free]
        points = tuple(Var(f"a{d}", a.extent) for d, a in enumerate(own))
        value, name = substitute(x, dict(zip(own, points, strict=True))), f"{kernel.name}_{x.buffer.name}"
        if value not in known and name in {*names, *(k.name for k in made)}:
            return None
        place = known.get(value) or l.Buffer(name, Type(x.dtype, tuple(a.extent for a in points)))
        if value not in known:
            made.append(l.Kernel(name, points, (l.Store(place, points, value),), kernel.source))
        taken[x] = l.Load.make(place, tuple(own), ())
    if not taken:
        return None
    stores = transformed(kernel.stores, lambda x: taken.get(x, x))
    return *made, l.Kernel(kernel.name, kernel.axes, stores, kernel.source)


def _points(axes: Sequence[Any]) -> int:
    return math.prod(a.extent for a in axes)


def stored_first(
    program: l.Program,
    log: Log,
    told: tuple[str, str, str],
    find: Callable[[l.Kernel, Set[str], Mapping[Any, l.Buffer]], tuple[l.Kernel | l.Call, ...] | None],
    prices: Callable[[l.Kernel, Sequence[Any]], tuple[float, float]],
    sure: float = 1.0,
) -> l.Program:
    """`program` with kernels in several, as `find` has them: those that store operands, and the one that reads these
    (or several, and calls that say what these store pieces of). It gets the names there are and what is stored already.
    `prices` are those of both ways, of which the second is to be less than a part of the first, if one is to be `sure`;
    and `told` are the pass, the rule, and how it is done otherwise.
    """
    pass_name, rule, otherwise = told
    steps: list[l.Kernel | l.Call] = []
    known: dict[Any, l.Buffer] = {}
    names = {b.name for s in program.steps for b in s.writes} | {b.name for b in program.inputs}
    may = may_have(program, lambda form: find(form, frozenset(), {}) is not None)
    for s in program.steps:
        if isinstance(s, l.Kernel) and may(s) and (found := find(s, names, known)) is not None:
            *made, whole = found
            inlined, apart = prices(s, found)
            said = f"{inlined / 1000:.1f} us {otherwise}, {apart / 1000:.1f} us stored first"
            log.add(Event(pass_name, rule, s.name, apart < sure * inlined, said))
            if apart < sure * inlined:
                log.applied(pass_name, rule, s.name, [s], [*made, whole])
                known |= {k.stores[0].value: k.stores[0].buffer for k in made if isinstance(k, l.Kernel)}
                names |= {k.name for k in made}
                steps += made
                s = whole
        steps.append(s)
    return l.Program(program.name, program.inputs, tuple(steps), program.results)


def with_lookups_stored(kernel: l.Kernel, rates: Rates) -> float:
    """What a kernel costs, whether operands of its products that tiles cannot read are stored first or not."""
    inlined = cost(kernel, rates)
    found = operands_stored(kernel, _astray, frozenset(), {}) if rates.matrix and inlined > rates.launch else None
    return min(inlined, sum(cost(k, rates) for k in found)) if found is not None else inlined


def _looked_up(x: Any) -> bool:
    return isinstance(x, l.Load) and looked_up([x])


def _astray(x: Any) -> bool:
    """Whether an operand is looked up, or is where a point's and a step's places are found by dividing their sum, as in
    a band of weights whose rows are read as if they were longer: no tile of it lies in a box of memory. Where division
    must leave no rest, phases see the operand as it lies.
    """
    if not isinstance(x, l.Load) or looked_up([x]):
        return isinstance(x, l.Load)
    return strewn(x, [a for a in x.free if isinstance(a, Bound)]) and not _in_phases(x)


def _in_phases(x: Any) -> bool:
    """Whether an operand is found by a division that must leave no rest."""
    places = topological([e for e in x.index if isinstance(e, Expr)]) if isinstance(x, l.Load) else ()
    return any(-(y.a % y.b) in x.inside for y in places if isinstance(y, FloorDiv))


def operands_stored(
    kernel: l.Kernel,
    wanted: Callable[[Any], bool],
    names: Set[str],
    known: Mapping[Any, l.Buffer],
    images: bool = False,
) -> tuple[l.Kernel, ...] | None:
    """Kernels that store those operands of products that are `wanted` and read more than once, at the points of an axis
    that only the other factor has, but for what is `known` to be stored; and the kernel that reads them. With `images`,
    so are images under windows. None where there are none, or one of their names is among `names`.
    """
    taken: dict[Any, Any] = {}
    made: list[l.Kernel] = []
    reduces = [r for r in kernel.terms if isinstance(r, l.Reduce)]
    scanned = {s.axis for s in kernel.scans}
    for r in reduces:
        if (c := contraction(r)) is None:
            continue
        again = _read_again(c)
        for x in (*again, *(_long(c) if images else ())):
            if x in taken or scanned & x.free:
                continue
            around = [a for y in reversed(reduces) if y is not r for a in y.axes]  # reductions that this one is within
            whole, places = image(x, kernel.axes, r.axes) if images else (x, {})
            if not (places or (wanted(x) and x in again)):
                continue
            walked = [a for a in dict.fromkeys((*kernel.axes, *around, *r.axes, *places)) if a in whole.free]
            walked = walked if places else _in_order(walked, x)
            axes = tuple(Var(f"a{d}", a.extent) for d, a in enumerate(walked))
            value = substitute(whole, dict(zip(walked, axes, strict=True)))
            name = f"{kernel.name}_{load.buffer.name if (load := _read(x)) else 'places'}"
            if value not in known:
                if name in names or name in [k.name for k in made]:
                    return None
                place = l.Buffer(name, Type(x.dtype, tuple(a.extent for a in axes)))
                made.append(l.Kernel(name, axes, (l.Store(place, axes, value),), kernel.source))
            else:
                place = known[value]
            taken[x] = l.Load.make(place, tuple(places.get(a, a) for a in walked), ())
    if not taken:
        return None
    stores = transformed(kernel.stores, lambda x: taken.get(x, x))
    return *made, l.Kernel(kernel.name, kernel.axes, stores, kernel.source)


def _read_again(c: Contraction) -> tuple[Any, ...]:
    """The operands that are wanted at several points of an axis which the other factor has alone."""
    points = [f.free - frozenset(c.reduce.axes) for f in c.factors]
    more = [any(getattr(a, "extent", 2) != 1 for a in other - own) for own, other in (points, points[::-1])]
    return tuple(dict.fromkeys(operand(f) for pair in c.terms for f, again in zip(pair, more, strict=True) if again))


def _long(c: Contraction) -> tuple[Any, ...]:
    """The operands at places that division finds at every step of a long window, whatever the other factor knows: what
    a filter of many taps reads of what was turned.
    """
    steps = c.reduce.axes
    long = all(isinstance(a.extent, int) for a in steps) and math.prod(a.extent for a in steps) >= LONG
    return tuple(x for x in c.operands if strewn(x, steps) and not _in_phases(x)) if long else ()


def _read(x: Any) -> l.Load | None:
    """What an operand is made of: the load that it is, or its first one. None where places alone make it."""
    return x if isinstance(x, l.Load) else next(iter(loads(x)), None)


def _in_order(axes: list[Any], x: Any) -> list[Any]:
    """Axes as memory runs through them in what a term reads, where it does along them all. What data says where to find
    is as far apart as what lies beside it in its dimension.
    """
    if (load := _read(x)) is None:
        return axes
    strides = load.buffer.type.element_strides
    place = flatten(load.index, strides)

    def step(a: Any) -> Any:
        looked = (s for e, s in zip(load.index, strides, strict=True) if isinstance(e, Loaded) and a in e.free)
        return coefficient(place, a) or next(looked, 0)

    steps = {a: step(a) for a in axes}
    return sorted(axes, key=lambda a: -steps[a]) if all(steps.values()) else axes
