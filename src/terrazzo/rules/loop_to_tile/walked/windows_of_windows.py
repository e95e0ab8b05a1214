"""What points of a window come to, in two kernels: along one of its axes for every place of the others, and then along
those. The sums of 31 x 31 points around each point are 31 sums of 31, and those of 1001 are 31 of 32, and 9 points.

Neighbours have most of their windows in common, and a kernel that goes through each window takes no notice of that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Var
from terrazzo.ir.node import Node, substitute, topological, transform
from terrazzo.ir.types import Type
from terrazzo.rules.loop.definitions import unused
from terrazzo.rules.loop_to_tile.walked.threads import size_of


@dataclass(frozen=True)
class _Window:
    """A reduction over `axes` of a term, in which an axis of the kernel and the first of these are only there as
    stride * axis + first.
    """

    reduce: l.Reduce
    axes: tuple[Var, ...]
    term: Any


def windows_of_windows(kernel: l.Kernel) -> tuple[l.Kernel, ...]:
    """`kernel`, all of whose reductions are over windows that move along one of its axes, as two.

    @loop
    def f(x: f32[9, 8]):
        with kernel('z', z=f32[7, 6]):
            for a0 in free(7):
                for a1 in free(6):
                    for r0, r1 in reduce(3, 3):
                        in0 = x[a0 + r0, a1 + r1]
                        acc0 <- sum(in0)
                    v0 = exp(acc0)
                    z[a0, a1] = v0
        return (z,)
    =>
    @loop
    def f(x: f32[9, 8]):
        with kernel('z_window', z_window=f32[9, 6]):
            for a0 in free(9):
                for a1 in free(6):
                    for r0 in reduce(3):
                        in0 = x[a0, r0 + a1]
                        acc0 <- sum(in0)
                    z_window[a0, a1] = acc0
        with kernel('z', z=f32[7, 6]):
            for a0 in free(7):
                for a1 in free(6):
                    for r0 in reduce(3):
                        in0 = z_window[r0 + a0, a1]
                        acc0 <- sum(in0)
                    v0 = exp(acc0)
                    z[a0, a1] = v0
        return (z,)
    """
    reduces = kernel.carried
    if not reduces or not all(isinstance(a.extent, int) for a in kernel.axes) or kernel.over:
        return (kernel,)
    if not all(isinstance(r, l.Reduce) and r.monoid.width == 1 and r.monoid.commutes for r in reduces):
        return (kernel,)
    if len({tuple(a.extent for a in r.axes) for r in reduces}) > 1:  # type: ignore[union-attr]
        return (kernel,)
    for number in range(len(reduces[0].axes)):  # type: ignore[union-attr]
        for axis in kernel.axes:
            found = [_window(r, axis, number) for r in reduces]  # type: ignore[arg-type]
            strides = {x[1] for x in found if x is not None}
            if None not in found and len(strides) == 1:
                return _in_two(kernel, axis, [x[0] for x in found if x is not None], strides.pop())
    return (kernel,)


def _window(reduce: l.Reduce, axis: Var, number: int) -> tuple[_Window, int] | None:
    """A reduction as a window along an axis of the kernel, one of its own first, and its stride; None where it is
    none.
    """
    axes, (term,) = l.open_binder(reduce)
    first, *rest = (axes[number], *axes[:number], *axes[number + 1 :])
    loads = [x for x in topological([term]) if isinstance(x, l.Load) and first in x.free]
    if size_of(first) < 2 or not loads or any(isinstance(x, l.Reduce | l.Scan) for x in topological([term])):
        return None
    moved = next(((coefficient(e, axis), coefficient(e, first)) for e in loads[0].index if _along(e, first)), (0, 0))
    stride, one = moved
    if not isinstance(stride, int) or stride < 1 or one != 1:
        return None
    if substitute(term, {axis: axis + 1, first: first - stride}) is not term:
        return None
    return _Window(reduce, (first, *rest), term), stride


def _along(e: Any, axis: Var) -> bool:
    return isinstance(e, Node) and axis in e.free


def _in_two(kernel: l.Kernel, axis: Var, found: Sequence[_Window], stride: int) -> tuple[l.Kernel, ...]:
    """The kernel of what is reduced first, for every place that a window begins or, where it has one axis, a part of
    it; and the one that reduces that.
    """
    long = size_of(found[0].axes[0])
    several = any(size_of(a) > 1 for a in found[0].axes[1:])
    part = 1 if several else _part(long)
    times = long // part
    if times < 2:
        return (kernel,)
    places = Var(axis.name, stride * (size_of(axis) - 1) + part * (times - 1) + 1)
    inner = [a for a in _as_stored(kernel) if a is axis or any(a in x.term.free for x in found)]
    taken = {b.name for b in (*kernel.reads, *kernel.writes)}
    name = unused(f"{kernel.name}_window", taken)
    stores: list[l.Store] = []
    memo: dict[Node, Node] = {}
    for k, x in enumerate(found):
        first, *rest = x.axes
        monoid = x.reduce.monoid
        step = Var(l.fresh_name(), part)
        term = substitute(x.term, {axis: 0, first: places + step if part > 1 else places})
        own = tuple(places if a is axis else a for a in inner)
        buffer = l.Buffer(f"{name}{k or ''}", Type(x.reduce.dtype, tuple(a.extent for a in own)))
        stores.append(l.Store(buffer, own, l.Reduce.make(monoid, (*rest, *((step,) if part > 1 else ())), (term,))))
        time = Var(l.fresh_name(), times)
        place = axis * stride + time * part
        value: Any = l.Load(buffer, tuple(place if a is axis else a for a in inner))
        whole: Any = l.Reduce.make(monoid, (time,), (value,))
        if left := long - part * times:
            end = Var(l.fresh_name(), left)
            last = l.Reduce.make(monoid, (end,), (substitute(x.term, {first: end + part * times}),))
            (whole,) = monoid.combine(l.apply, (whole,), (last,))
        memo[x.reduce] = whole
    ends = tuple(transform(s, lambda y: y, dict(memo)) for s in kernel.stores)
    axes = tuple(places if a is axis else a for a in kernel.axes if a in inner)
    return (
        l.Kernel(name, axes, tuple(stores), kernel.source),
        l.Kernel(kernel.name, kernel.axes, ends, kernel.source),
    )


def _part(long: int) -> int:
    """Of how many points a part of a window of one axis is, so that least is left to go through."""
    return min(range(1, long), key=lambda p: p + long // p + long % p, default=1)


def _as_stored(kernel: l.Kernel) -> list[Var]:
    """The axes of a kernel, those along which memory runs in what it stores first last."""
    store = kernel.stores[0]
    offset = flatten(store.index, store.buffer.type.element_strides)
    steps = {a: coefficient(offset, a) for a in kernel.axes}
    return sorted(kernel.axes, key=lambda a: -x if isinstance(x := steps[a], int) and x else -math.inf)
