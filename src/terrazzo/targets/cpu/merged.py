"""Axes that memory runs through one behind the other, as one: rows and columns of an image are so many places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from terrazzo.ir.address import coefficient, flatten, unflatten
from terrazzo.ir.contraction import contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, FloorDiv, Var
from terrazzo.ir.node import substitute, substituted, topological, transformed
from terrazzo.rules.loop_to_tile.walked.collapse import merge_axes, number_of, sizes_of_digits


def merged(kernel: l.Kernel) -> l.Kernel:
    """`kernel` with neighbouring axes as one where all that knows one of them reads and writes along both, as if they
    were one: its loops are longer, so that there are vectors of them. Whoever divides to find a place keeps its axes.

    @loop
    def f(x: f32[3, 7, 7]):
        with kernel('z', z=f32[3]):
            for a0 in free(3):
                for r0, r1 in reduce(7, 7):
                    in0 = x[a0, r0, r1]
                    acc0 <- sum(in0)
                z[a0] = acc0
        return (z,)
    =>
    @loop
    def f(x: f32[3, 7, 7]):
        with kernel('z', z=f32[3]):
            for a0 in free(3):
                for r0 in reduce(49):
                    in0 = x[a0, r0 // 7, r0 % 7]
                    acc0 <- sum(in0)
                z[a0] = acc0
        return (z,)
    """
    stores = transformed(kernel.stores, _one_run)
    if stores != kernel.stores:
        kernel = l.Kernel(kernel.name, kernel.axes, stores, kernel.source)
    return free_merged(kernel)


def free_merged(kernel: l.Kernel) -> l.Kernel:
    """The same for the axes of a kernel alone, and not for those that it reduces."""
    for axes in _runs(kernel.axes[:-1] if kernel.scans else kernel.axes, kernel.stores):
        kernel = merge_axes(kernel, axes)
    return kernel


def as_stored(kernel: l.Kernel) -> l.Kernel:
    """`kernel` with its axes in the order in which all of its results lie, where it goes point by point, or reduces for
    each point what lies along the last of them, too: images whose channels lie last are walked along these. Axes stay
    where a sum is computed once for what follows them.
    """
    reduces = [x for x in topological(kernel.stores) if isinstance(x, l.Reduce)]
    if not kernel.axes or kernel.scans or not all({*kernel.axes} <= x.free for x in reduces):
        return kernel
    places = [flatten(s.index, s.buffer.type.element_strides) for s in kernel.stores]
    by: dict[Var, list[Any]] = {a: [coefficient(place, a) for place in places] for a in kernel.axes}
    if not all(isinstance(x, int) and x > 0 for along in by.values() for x in along):
        return kernel
    axes = tuple(sorted(kernel.axes, key=lambda a: -by[a][0]))
    alike = all(x >= y for a, b in pairwise(axes) for x, y in zip(by[a], by[b], strict=True))
    if reduces and not _read_along(reduces, axes[-1], kernel.axes[-1]):
        return kernel
    return l.Kernel(kernel.name, axes, kernel.stores, kernel.source) if alike and axes != kernel.axes else kernel


def _read_along(terms: Sequence[Any], axis: Var, other: Var) -> bool:
    """Whether terms read along an axis, and nothing along the other one."""
    loads = [x for x in topological(terms) if isinstance(x, l.Load)]
    places = [flatten(x.index, x.buffer.type.element_strides) for x in loads]
    return any(coefficient(p, axis) == 1 for p in places) and not any(coefficient(p, other) == 1 for p in places)


def summed_as_stored(kernel: l.Kernel) -> l.Kernel:
    """`kernel` with an axis for every digit by which a reduction divides to find a place, in the order in which memory
    runs: groups of channels that lie last are read along these. Where such a run is short, it is the outermost: steps
    along the others are loops of lanes.

    @loop
    def f(x: f32[2, 64, 6, 6] @ (2304, 1, 384, 64)):
        with kernel('z', z=f32[2]):
            for a0 in free(2):
                for r0 in reduce(2304):
                    in0 = x[a0, r0 // 36, r0 // 6 % 6, r0 % 6]
                    acc0 <- sum(in0)
                z[a0] = acc0
        return (z,)
    =>
    @loop
    def f(x: f32[2, 64, 6, 6] @ (2304, 1, 384, 64)):
        with kernel('z', z=f32[2]):
            for a0 in free(2):
                for r0, r1, r2 in reduce(6, 6, 64):
                    in0 = x[a0, r2, r0, r1]
                    acc0 <- sum(in0)
                z[a0] = acc0
        return (z,)
    """
    stores = transformed(kernel.stores, _summed_as_stored)
    return kernel if stores == kernel.stores else l.Kernel(kernel.name, kernel.axes, stores, kernel.source)


def _summed_as_stored(node: Any) -> Any:
    """A reduction of one value, in whatever order, along memory."""
    if type(node) is not l.Reduce or node.monoid.width > 1 or contraction(node) is not None:
        return node
    axes, args = l.open_binder(node)
    apart = {a: [Var(l.fresh_name(), x) for x in sizes_of_digits(a, args)] for a in axes}
    every = [d for a in axes for d in apart[a]]
    if len(every) == len(axes) or not all(isinstance(d.extent, int) and d.extent > 0 for d in every):
        return node
    inner = [substitute(x, {a: number_of(apart[a]) for a in axes}) for x in args]
    loads = [x for x in topological(inner) if isinstance(x, l.Load) and {*every} <= x.free and not x.inside]
    if not loads:
        return node
    place = flatten(loads[0].index, loads[0].buffer.type.element_strides)
    far = {d: by for d in every if isinstance(by := coefficient(place, d), int)}
    if len(far) < len(every):
        return node
    ordered = sorted(every, key=lambda d: -abs(far[d]))
    run, first = 1, len(ordered)  # elements of a run along the axes from the first on
    while first and abs(far[ordered[first - 1]]) == run:
        first -= 1
        run *= int(ordered[first].extent)  # type: ignore[arg-type]
    if run < RUN:
        ordered = [*ordered[first:], *ordered[:first]]
    return l.Reduce.make(node.monoid, tuple(ordered), tuple(inner))


RUN = 32
"""Elements of a run from which on it is the innermost loop, which is lanes then."""


def quotients_apart(kernel: l.Kernel) -> l.Kernel:
    """`kernel` with an axis in two where reductions know its quotient alone: what is known of a group of channels is
    computed for the group, and not again for each of its channels. Channels that lie side by side stay so.
    """
    reduces = [x for x in topological(kernel.stores) if isinstance(x, l.Reduce)]
    new: dict[Any, Any] = {}
    axes: list[Var] = []
    for a in kernel.axes:
        known = [x for x in reduces if a in x.free]
        steps = {x.b for x in topological(known) if isinstance(x, FloorDiv) and x.a is a}
        step = steps.pop() if len(steps) == 1 else None
        new[a] = a
        if isinstance(a.extent, int) and isinstance(step, int) and a.extent % step == 0:
            whole, part = Var(l.fresh_name(), a.extent // step), Var(l.fresh_name(), step)
            if all(_knows_quotient(x, a, whole * step + part, part) for x in known):
                new[a] = whole * step + part
                axes += [whole, part]
                continue
        axes.append(a)
    if len(axes) == len(kernel.axes):
        return kernel
    return l.Kernel(kernel.name, tuple(axes), substituted(kernel.stores, new), kernel.source)


def _knows_quotient(x: Any, axis: Var, digits: Any, part: Var) -> bool:
    """Whether a term does not know the last of two digits of an axis, and reads nothing that lies in line along it."""
    loads = [y for y in topological([x]) if isinstance(y, l.Load)]
    lying = [pair for y in loads for pair in zip(y.index, y.buffer.type.element_strides, strict=True)]
    beside = any(by == 1 and isinstance(e, Expr) and axis in e.free for e, by in lying)
    return not beside and part not in substitute(x, {axis: digits}).free


def _one_run(node: Any) -> Any:
    """A reduction over as few axes as memory lets it."""
    if type(node) is not l.Reduce or len(node.axes) < 2:
        return node
    axes, args = l.open_binder(node)
    new: dict[Any, Any] = {}
    kept: list[Var] = []
    runs = {run[0]: run for run in _runs(axes, args)}
    for a in axes:
        if a in runs:
            sizes = tuple(int(x.extent) for x in runs[a])  # type: ignore[arg-type]
            kept.append(Var(l.fresh_name(), math.prod(sizes)))
            new |= zip(runs[a], unflatten(kept[-1], sizes), strict=True)
        elif a not in new:
            kept.append(a)
    return l.Reduce.make(node.monoid, tuple(kept), tuple(substitute(x, new) for x in args)) if new else node


def _runs(axes: Sequence[Var], roots: Sequence[Any]) -> list[tuple[Var, ...]]:
    """The neighbours among axes that can be one, as many together as there are."""
    nodes = topological(roots)
    accesses = [x for x in nodes if isinstance(x, l.Load | l.Store)]
    places = [flatten(x.index, x.buffer.type.element_strides) for x in accesses]
    asked = [e for x in nodes if isinstance(x, l.Load) for e in x.inside]
    asked += [e for x in nodes if not isinstance(x, l.Load | l.Store | Expr) for e in x.children if isinstance(e, Expr)]
    fixed = frozenset[Any]().union(*(e.free for e in asked if isinstance(e, Expr)))
    found: list[tuple[Var, ...]] = []
    for a, b in pairwise(axes):
        known = all(isinstance(x.extent, int) and x.extent > 0 and x not in fixed for x in (a, b))
        if not known or not all(_behind(place, a, b) for place in places):
            continue
        if found and found[-1][-1] is a:
            found[-1] = (*found[-1], b)
        else:
            found.append((a, b))
    return found


def _behind(place: Any, a: Var, b: Var) -> bool:
    """Whether a step along `a` is as far as all of those along `b`, in memory."""
    by, far = coefficient(place, b), coefficient(place, a)
    return isinstance(by, int) and isinstance(far, int) and far == by * b.extent
