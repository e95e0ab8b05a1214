"""Results of convolutions that lie row by row are stored channels last, and turned by a kernel of their own, where that
is faster: from registers they would leave one by one, into sectors that a warp does not fill.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from typing import Any

from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr, Var, terms_of
from terrazzo.ir.node import substitute, topological, transform
from terrazzo.ir.sites import product
from terrazzo.ir.types import Type
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.access import WIDEST
from terrazzo.rules.loop.definitions import unused
from terrazzo.rules.loop.layout.lookups import stored_first

PASS, RULE = "online", "turned_after"
LEAST = 1 << 20
"""Results that are worth another kernel, at least."""


def turned_after(
    program: l.Program,
    log: Log,
    price: Callable[[Sequence[l.Kernel]], float],
    copying: Callable[[l.Kernel], float],
    least: int = LEAST,
) -> l.Program:
    """`program` with products of images whose results, `least` of them or more, lie across their channels, in 16 bits,
    as kernels that store these channels last, each phase by itself, and others that store them where they were, where
    that is faster by the model.

    @loop
    def f(x: bf16[3, 6, 8], w: bf16[2, 8, 8]):
        with kernel('z', z=bf16[3, 8, 10]):
            for a0 in free(3):
                for a1 in free(8):
                    for a2 in free(5):
                        for a3 in free(2):
                            for r0 in reduce(8):
                                in0 = x[a0, a2 + a3, r0]
                                v0 = f32(in0)
                                in1 = w[a3, a1, r0]
                                v1 = f32(in1)
                                v2 = mul(v0, v1)
                                acc0 <- sum(v2)
                            v3 = bf16(acc0)
                            z[a0, a1, a2 * 2 + a3] = v3
        return (z,)
    =>
    @loop
    def f(x: bf16[3, 6, 8], w: bf16[2, 8, 8]):
        with kernel('z_last', z_last=bf16[6, 5, 8]):
            for a0 in free(3):
                for a2 in free(5):
                    for a3 in free(2):
                        for a1 in free(8):
                            for r0 in reduce(8):
                                in0 = x[a0, a2 + a3, r0]
                                v0 = f32(in0)
                                in1 = w[a3, a1, r0]
                                v1 = f32(in1)
                                v2 = mul(v0, v1)
                                acc0 <- sum(v2)
                            v3 = bf16(acc0)
                            z_last[a0 + a3 * 3, a2, a1] = v3
        with kernel('z', z=bf16[3, 8, 10]):
            for a0 in free(3):
                for a1 in free(8):
                    for a2 in free(10):
                        in0 = z_last[(a2 % 2) * 3 + a0, a2 // 2, a1]
                        z[a0, a1, a2] = in0
        return (z,)
    """

    def find(s: l.Kernel, names: Set[str], _: object) -> tuple[l.Kernel, ...] | None:
        return channels_last_first(s, names, least)

    def prices(s: l.Kernel, found: Sequence[l.Kernel]) -> tuple[float, float]:
        return price([s]), price(found[:-1]) + copying(found[-1])

    made = stored_first(program, log, (PASS, RULE, "stored across"), find, prices)
    return read_across(made, log, {*program.steps})


def read_across(
    program: l.Program,
    log: Log,
    there: Set[l.Kernel | l.Call] = frozenset(),
    price: Callable[[Sequence[l.Kernel]], float] | None = None,
) -> l.Program:
    """`program` without copies, but for kernels that were `there`, whose readers all go point by point: they read what
    is copied. With a price, so do others, where it lies in the same order, and that is faster by the model.

    @loop
    def f(x: f32[3, 5]):
        with kernel('t', t=f32[3, 5]):
            for a0 in free(3):
                for a1 in free(5):
                    in0 = x[a0, a1]
                    v0 = exp(in0)
                    t[a0, a1] = v0
        with kernel('y', y=f32[15]):
            for a0 in free(15):
                in0 = t[a0 // 5, a0 % 5]
                y[a0] = in0
        with kernel('z', z=f32[7]):
            for a0 in free(7):
                in0 = y[a0 * 2]
                v0 = tanh(in0)
                z[a0] = v0
        return (z,)
    =>
    @loop
    def f(x: f32[3, 5]):
        with kernel('t', t=f32[3, 5]):
            for a0 in free(3):
                for a1 in free(5):
                    in0 = x[a0, a1]
                    v0 = exp(in0)
                    t[a0, a1] = v0
        with kernel('z', z=f32[7]):
            for a0 in free(7):
                in0 = t[(a0 * 2) // 5, (a0 * 2) % 5]
                v0 = tanh(in0)
                z[a0] = v0
        return (z,)
    """
    steps = list(program.steps)
    for s in program.steps:
        if not isinstance(s, l.Kernel) or s in there or not _copies(s) or s.stores[0].buffer in program.results:
            continue
        (store,) = s.stores
        readers = {k: x for k, x in enumerate(steps) if store.buffer in x.reads}
        if not all(isinstance(x, l.Kernel) and not x.over for x in readers.values()):
            continue
        through = {k: _through(x, store) for k, x in readers.items()}
        said = "its readers go point by point, and read what it copies"
        if any(isinstance(x, l.Kernel) and x.carried for x in readers.values()):
            if price is None or getattr(store.value, "index", None) != store.index:
                continue
            before, after = price([s, *readers.values()]), price([*through.values()])  # type: ignore[list-item]
            said = f"{before / 1000:.1f} us with a copy, {after / 1000:.1f} us without"
            if after >= before:
                log.add(Event(PASS, "read_across", s.name, False, said))
                continue
        for k, x in through.items():
            steps[k] = x
        log.add(Event(PASS, "read_across", s.name, True, said))
        log.applied(PASS, "read_across", s.name, [s, *readers.values()], [steps[k] for k in readers])
        steps.remove(s)
    return l.Program(program.name, program.inputs, tuple(steps), program.results)


def _copies(s: l.Kernel) -> bool:
    """Whether a kernel copies, element by element, what was computed, all of a buffer."""
    if len(s.stores) != 1 or s.over or not isinstance(s.stores[0].value, l.Load) or s.stores[0].value.inside:
        return False
    (store,) = s.stores
    extents = {a: a.extent for a in s.axes}
    every = len(store.index) == len(extents) == len({*store.index} & {*extents})
    return every and store.buffer.type.static_shape == tuple(extents[a] for a in store.index)  # type: ignore[index]


def _through(reader: Any, store: l.Store) -> l.Kernel:
    """A reader of a copy that reads what is copied."""

    def visit(x: Any) -> Any:
        if not isinstance(x, l.Load) or x.buffer is not store.buffer:
            return x
        copied: Any = store.value
        at = dict(zip(store.index, x.index, strict=True))
        return l.Load.make(copied.buffer, tuple(substitute(e, at) for e in copied.index), x.inside)

    return l.Kernel(reader.name, reader.axes, tuple(transform(s, visit) for s in reader.stores), reader.source)


def channels_last_first(kernel: l.Kernel, names: Set[str], least: int) -> tuple[l.Kernel, l.Kernel] | None:
    """A kernel that stores the results of a product of an image channels last, and the one that turns them; None where
    they lie so, or are made of what lies as they do.
    """
    p = product(kernel)
    if p is None or len(p.sites) != 1 or len(kernel.stores) != 1 or not all(isinstance(x, l.Load) for x in p.operands):
        return None
    (store,) = kernel.stores
    kind = store.buffer.type
    if any(not isinstance(n, int) for n in kind.shape) or kind.dtype.size != 2 or math.prod(kind.static_shape) < least:
        return None
    first, second = p.factors(p.sites[0])
    own = [[a for a in kernel.axes if a in f.free - g.free] for f, g in ((first, second), (second, first))]
    (*_, channels), rows = sorted(own, key=len)
    batch = [a for a in kernel.axes if a in first.free & second.free]
    if min(map(len, own)) != 1 or len(rows) < 2 or len(rows) + len(batch) + 1 < len(kernel.axes):
        return None
    after = [x for x in topological([store.value], lambda x: x is p.sites[0].reduce) if isinstance(x, l.Load)]
    uneven = channels.extent * kind.dtype.size % WIDEST
    if uneven or coefficient(flatten(store.index, kind.element_strides), channels) == 1:
        return None
    points = [Var(f"a{n}", e) for n, e in enumerate(kind.static_shape)]
    axes = _axes(store.index, points)
    if axes is None or set(axes) != set(kernel.axes) or any(x.free & {*rows, *batch} for x in after):
        return None
    phase: IntExpr = 0
    for a in batch:
        phase = phase * a.extent + a
    index: tuple[IntExpr, ...] = (phase * rows[0].extent + rows[0], *rows[1:], channels)
    shape = (math.prod(a.extent for a in batch) * rows[0].extent, *(a.extent for a in (*rows[1:], channels)))
    name = unused(f"{kernel.name}_last", {*names})
    place = l.Buffer(name, Type(kind.dtype, shape))
    last = (*(a for a in kernel.axes if a is not channels), channels)
    whole = l.Kernel(name, last, (l.Store(place, index, store.value),), kernel.source)
    there = l.Load.make(place, tuple(substitute(e, axes) if isinstance(e, Expr) else e for e in index))
    return whole, l.Kernel(kernel.name, tuple(points), (l.Store(store.buffer, tuple(points), there),), kernel.source)


def _axes(index: Sequence[IntExpr], points: Sequence[Any]) -> dict[Any, Any] | None:
    """The axes of which an index is made, as digits of its dimensions; None where a dimension is anything else."""
    found: dict[Any, Any] = {}
    for e, point in zip(index, points, strict=True):
        step = point.extent
        for factors, c in sorted(((f, c) for f, c in terms_of(e).items() if c), key=lambda term: -term[1]):
            if len(factors) != 1 or not isinstance(factors[0], Var) or factors[0].extent * c != step:
                return None
            found[factors[0]] = point // c % factors[0].extent
            step = c
        if step != 1:
            return None
    return found
