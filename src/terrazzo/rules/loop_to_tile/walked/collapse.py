"""Axes that are only walked become one: what is contiguous stays so, and threads divide it whatever the shape was."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from terrazzo.collector import remembered
from terrazzo.ir.address import coefficient, flatten, unflatten
from terrazzo.ir.contraction import Contraction, contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import FloorDiv, Mod, Var
from terrazzo.ir.node import substitute, substituted, topological, transformed
from terrazzo.ir.sites import product
from terrazzo.rules.moves import meeting


@remembered
def collapse(kernel: l.Kernel) -> l.Kernel:
    """`kernel` over one axis, where every store is at every point of its axes and nothing scans. The axis runs through
    memory as the first store does.

    @loop
    def f(x: f32[3, 3], y: f32[3, 3]):
        with kernel('z', z=f32[3, 3]):
            for a0 in free(3):
                for a1 in free(3):
                    in0 = x[a1, a0]
                    in1 = y[a0, a1]
                    v0 = sub(in0, in1)
                    z[a0, a1] = v0
        return (z,)
    =>
    @loop
    def f(x: f32[3, 3], y: f32[3, 3]):
        with kernel('z', z=f32[3, 3]):
            for a0 in free(9):
                in0 = x[a0 % 3, a0 // 3]
                in1 = y[a0 // 3, a0 % 3]
                v0 = sub(in0, in1)
                z[a0 // 3, a0 % 3] = v0
        return (z,)
    """
    axes = frozenset(kernel.axes)
    extents = [a.extent for a in kernel.axes]
    if (
        len(extents) < 2
        or not all(isinstance(e, int) and e > 0 for e in extents)
        or any(s.free & axes != axes for s in kernel.stores)
    ):
        return kernel
    if any(isinstance(x, l.Scan) for x in topological([s.value for s in kernel.stores])):
        return kernel
    flat = Var(kernel.axes[0].name, math.prod(extents))
    first = kernel.stores[0]
    place = flatten(first.index, first.buffer.type.element_strides)
    steps = [coefficient(place, a) for a in kernel.axes]
    ordered = list(kernel.axes)
    if all(isinstance(s, int) for s in steps):
        far: dict[Any, Any] = dict(zip(ordered, steps, strict=True))
        ordered.sort(key=lambda a: -far[a])
    digits = dict(zip(ordered, unflatten(flat, tuple(a.extent for a in ordered)), strict=True))
    stores = substituted(kernel.stores, digits)
    return l.Kernel(kernel.name, (flat,), stores, kernel.source)


def merge_axes(kernel: l.Kernel, axes: Sequence[Var]) -> l.Kernel:
    """`kernel` with several of its axes as one, in this order, where all that is stored or reduced goes along all of
    them or none. Who reads beside a place, where there is one, keeps the axes that say so.

    @loop
    def f(x: f32[3, 3, 4]):
        with kernel('z', z=f32[3, 3]):
            for a0 in free(3):
                for a1 in free(3):
                    for r0 in reduce(4):
                        in0 = x[a1, a0, r0]
                        acc0 <- sum(in0)
                    z[a0, a1] = acc0
        return (z,)
    =>
    @loop
    def f(x: f32[3, 3, 4]):
        with kernel('z', z=f32[3, 3]):
            for a0 in free(9):
                for r0 in reduce(4):
                    in0 = x[a0 % 3, a0 // 3, r0]
                    acc0 <- sum(in0)
                z[a0 // 3, a0 % 3] = acc0
        return (z,)
    """
    mine = frozenset(axes)
    reduces = [x for x in topological(kernel.stores) if isinstance(x, l.Reduce | l.Scan)]
    known = all(isinstance(a.extent, int) and a.extent > 0 for a in axes)
    if any(isinstance(x, l.Scan) and x.at in mine for x in reduces):
        return kernel
    if any(isinstance(x, l.Load) and x.inside and x.free & mine for x in topological(kernel.stores)):
        return kernel
    if len(axes) < 2 or not known or any(0 < len(x.free & mine) < len(mine) for x in (*kernel.stores, *reduces)):
        return kernel
    extents = tuple(a.extent for a in axes)
    flat = Var(axes[0].name, math.prod(extents))
    digits: dict[Any, Any] = dict(zip(axes, unflatten(flat, extents), strict=True))
    first = next(a for a in kernel.axes if a in mine)
    new = tuple(flat if a is first else a for a in kernel.axes if a is first or a not in mine)
    return l.Kernel(kernel.name, new, substituted(kernel.stores, digits), kernel.source)


def merge_product_axes(kernel: l.Kernel, products: Sequence[Contraction]) -> l.Kernel:
    """`kernel` with the axes that the same factors of its products know as one: rows of a batch, pixels of an image.

    @loop
    def f(x: f32[2, 3, 4], w: f32[5, 4]):
        with kernel('z', z=f32[2, 3, 5]):
            for a0 in free(2):
                for a1 in free(3):
                    for a2 in free(5):
                        for r0 in reduce(4):
                            in0 = x[a0, a1, r0]
                            in1 = w[a2, r0]
                            v0 = mul(in0, in1)
                            acc0 <- sum(v0)
                        z[a0, a1, a2] = acc0
        return (z,)
    =>
    @loop
    def f(x: f32[2, 3, 4], w: f32[5, 4]):
        with kernel('z', z=f32[2, 3, 5]):
            for a0 in free(6):
                for a2 in free(5):
                    for r0 in reduce(4):
                        in0 = x[a0 // 3, a0 % 3, r0]
                        in1 = w[a2, r0]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    z[a0 // 3, a0 % 3, a2] = acc0
        return (z,)
    """
    axes = frozenset(kernel.axes)
    if any(s.free & axes != axes for s in kernel.stores):
        return kernel
    groups: dict[Any, list[Var]] = {}
    for a in kernel.axes:
        groups.setdefault(tuple(a in f.free for c in products for f in c.factors), []).append(a)
    if len(groups) == len(kernel.axes) or not all(isinstance(a.extent, int) and a.extent > 0 for a in kernel.axes):
        return kernel
    new: dict[Any, Any] = {}
    merged: dict[Var, Var] = {}
    for group in groups.values():
        extents = [a.extent for a in group]
        flat = Var(group[0].name, math.prod(extents)) if len(group) > 1 else group[0]
        new.update(zip(group, unflatten(flat, tuple(extents)) if len(group) > 1 else (flat,), strict=True))
        merged[group[0]] = flat
    stores = substituted(kernel.stores, {a: e for a, e in new.items() if e is not a})
    return l.Kernel(kernel.name, tuple(merged[a] for a in kernel.axes if a in merged), stores, kernel.source)


@remembered
def digits_apart(kernel: l.Kernel) -> l.Kernel:
    """`kernel` with an axis for every digit that operands are read by: in memory, each has steps of its own.

    @loop
    def f(x: f32[2, 5, 4], w: f32[5, 4]):
        with kernel('z', z=f32[6, 5]):
            for a0 in free(6):
                for a1 in free(5):
                    for r0 in reduce(4):
                        in0 = x[a0 // 3, a0 % 3 + 1, r0]
                        in1 = w[a1, r0]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    z[a0, a1] = acc0
        return (z,)
    =>
    @loop
    def f(x: f32[2, 5, 4], w: f32[5, 4]):
        with kernel('z', z=f32[6, 5]):
            for a0 in free(2):
                for a1 in free(3):
                    for a2 in free(5):
                        for r0 in reduce(4):
                            in0 = x[a0, a1 + 1, r0]
                            in1 = w[a2, r0]
                            v0 = mul(in0, in1)
                            acc0 <- sum(v0)
                        z[a0 * 3 + a1, a2] = acc0
        return (z,)
    """
    new: dict[Any, Any] = {}
    axes: list[Var] = []
    for a in kernel.axes:
        sizes = sizes_of_digits(a, kernel.stores)
        digits = [Var(f"a{len(axes) + k}", n) for k, n in enumerate(sizes)]
        axes += digits
        new[a] = number_of(digits)
    if len(axes) > len(kernel.axes):
        kernel = l.Kernel(kernel.name, tuple(axes), substituted(kernel.stores, new), kernel.source)
    stores = transformed(kernel.stores, _steps_apart)
    return kernel if stores == kernel.stores else l.Kernel(kernel.name, kernel.axes, stores, kernel.source)


def _steps_apart(node: Any) -> Any:
    """A sum of products over an axis for every digit that its factors are read by."""
    if not isinstance(node, l.Reduce) or contraction(node) is None:
        return node
    axes, args = l.open_binder(node)
    digits = {a: [Var(l.fresh_name(), n) for n in sizes_of_digits(a, args)] for a in axes}
    if all(len(x) == 1 for x in digits.values()):
        return node
    new: dict[Any, Any] = {a: number_of(x) for a, x in digits.items()}
    inner = tuple(d for a in axes for d in digits[a])
    return l.Reduce.make(node.monoid, inner, tuple(substitute(a, new) for a in args))


def sizes_of_digits(axis: Any, terms: Sequence[Any]) -> list[Any]:
    """How long the digits of an axis are by which terms divide it, outermost first."""
    every = topological(terms)
    steps = sorted({x.b for x in every if isinstance(x, FloorDiv | Mod) and x.a is axis and isinstance(x.b, int)})
    sizes = [1, *steps, axis.extent]
    if not isinstance(axis.extent, int) or any(y % x for x, y in pairwise(sizes)):
        return [axis.extent]
    return [y // x for x, y in reversed([*pairwise(sizes)])]


def number_of(digits: Sequence[Any]) -> Any:
    """What digits stand for."""
    found: Any = 0
    for d in digits:
        found = found * d.extent + d
    return found


@remembered
def flat_reductions(kernel: l.Kernel) -> l.Kernel:
    """`kernel` with every reduction over one axis, so that threads and pieces divide all of it. The contractions of a
    product stay as they are, and so do short ones and windows, whose places would be found by dividing.

    @loop
    def f(x: f32[3, 3, 3]):
        with kernel('z', z=f32[3]):
            for a0 in free(3):
                for r0, r1 in reduce(3, 3):
                    in0 = x[r0, a0, r1]
                    acc0 <- max(in0)
                z[a0] = acc0
        return (z,)
    =>
    @loop
    def f(x: f32[3, 3, 3]):
        with kernel('z', z=f32[3]):
            for a0 in free(3):
                for r0 in reduce(9):
                    in0 = x[r0 // 3, a0, r0 % 3]
                    acc0 <- max(in0)
                z[a0] = acc0
        return (z,)
    """
    whole = product(kernel) is not None
    return _flat(as_memory_runs(kernel), lambda r: contraction(r) is None or not (whole or _in_place(r)))


def as_memory_runs(kernel: l.Kernel, products: bool = False) -> l.Kernel:
    """`kernel` with the steps of its long reductions, or of its sums of `products`, in the order in which memory runs
    through what they read, or most of it: those of groups of channels go along channels first, where these come last.

    @loop
    def f(x: f32[2, 64, 6, 6] @ (2304, 1, 384, 64)):
        with kernel('z', z=f32[2, 8]):
            for a0 in free(2):
                for a1 in free(8):
                    for r0 in reduce(288):
                        in0 = x[a0, r0 // 36 + a1 * 8, r0 // 6 % 6, r0 % 6]
                        acc0 <- sum(in0)
                    z[a0, a1] = acc0
        return (z,)
    =>
    @loop
    def f(x: f32[2, 64, 6, 6] @ (2304, 1, 384, 64)):
        with kernel('z', z=f32[2, 8]):
            for a0 in free(2):
                for a1 in free(8):
                    for r0 in reduce(288):
                        in0 = x[a0, r0 % 8 + a1 * 8, r0 // 48, r0 // 8 % 6]
                        acc0 <- sum(in0)
                    z[a0, a1] = acc0
        return (z,)
    """
    stores = transformed(kernel.stores, partial(_as_memory_runs, products))
    return kernel if stores == kernel.stores else l.Kernel(kernel.name, kernel.axes, stores, kernel.source)


def _as_memory_runs(products: bool, node: Any) -> Any:
    """A reduction of one value, in whatever order, over one axis that runs as memory does."""
    if not isinstance(node, l.Reduce) or node.monoid.width > 1 or (contraction(node) is not None) is not products:
        return node
    axes, args = l.open_binder(node)
    sizes = [(a, sizes_of_digits(a, args)) for a in axes]
    digits = {a: [Var(l.fresh_name(), n) for n in found] for a, found in sizes}
    every = [d for a in axes for d in digits[a]]
    extents = [d.extent for d in every if isinstance(d.extent, int) and d.extent > 0]
    if len(every) < 2 or len(extents) < len(every):
        return node
    inner = [substitute(x, {a: number_of(digits[a]) for a in axes}) for x in args]
    loads = [x for x in topological(inner) if isinstance(x, l.Load) and set(every) <= x.free]
    loads = [x for x in loads if products or not x.inside]
    if not loads or (math.prod(extents) <= SHORT and not products):
        return node
    most = max(loads, key=lambda x: math.prod(a.extent for a in x.free)) if products else loads[0]
    steps = [coefficient(flatten(most.index, most.buffer.type.element_strides), d) for d in every]
    if not all(isinstance(s, int) for s in steps):
        return node
    far: dict[Any, Any] = dict(zip(every, steps, strict=True))
    ordered = sorted(every, key=lambda d: -abs(far[d]))
    if ordered == every or far[ordered[-1]] != 1:
        return node
    flat = Var(l.fresh_name(), math.prod(d.extent for d in every))
    new: dict[Any, Any] = dict(zip(ordered, unflatten(flat, tuple(d.extent for d in ordered)), strict=True))
    return l.Reduce.make(node.monoid, (flat,), tuple(substitute(x, new) for x in inner))


SHORT = 16
"""Products that a thread sums by itself, at most."""


def _in_place(r: l.Reduce) -> bool:
    """Whether a sum of products is short, or one of few taps: it reads where a reduced axis and a free one meet in one
    dimension, and as many free points do as reduced ones. Sums over points under taps are long, and threads share them.
    """
    if math.prod(a.extent for a in r.axes) <= SHORT:
        return True
    axes, args = l.open_binder(r)
    loads = [x for x in topological(args) if isinstance(x, l.Load)]
    results, summed = meeting(loads, frozenset().union(*(x.free for x in loads)) - set(axes), axes)
    return results > 1 and summed <= results


@remembered
def flat_products(kernel: l.Kernel) -> l.Kernel:
    """`kernel` with every sum of products over one axis: the channels and taps of a window are so many steps.

    @loop
    def f(x: f32[2, 6, 9], w: f32[5, 2, 3]):
        with kernel('z', z=f32[2, 5]):
            for a0 in free(2):
                for a1 in free(5):
                    for r0, r1 in reduce(2, 3):
                        in0 = x[r0, a0 * 3 + r1, 0]
                        in1 = w[a1, r0, r1]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    z[a0, a1] = acc0
        return (z,)
    =>
    @loop
    def f(x: f32[2, 6, 9], w: f32[5, 2, 3]):
        with kernel('z', z=f32[2, 5]):
            for a0 in free(2):
                for a1 in free(5):
                    for r0 in reduce(6):
                        in0 = x[r0 // 3, r0 % 3 + a0 * 3, 0]
                        in1 = w[a1, r0 // 3, r0 % 3]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    z[a0, a1] = acc0
        return (z,)
    """
    return _flat(kernel, lambda r: contraction(r) is not None)


def _flat(kernel: l.Kernel, which: Callable[[l.Reduce], bool]) -> l.Kernel:
    """`kernel` with some reductions over one axis."""

    def visit(node: Any) -> Any:
        if not isinstance(node, l.Reduce) or len(node.axes) < 2:
            return node
        extents = [a.extent for a in node.axes]
        if not all(isinstance(e, int) and e > 0 for e in extents) or not which(node):
            return node
        axes, args = l.open_binder(node)
        flat = Var(l.fresh_name(), math.prod(extents))
        digits = dict(zip(axes, unflatten(flat, tuple(extents)), strict=True))
        return l.Reduce.make(node.monoid, (flat,), tuple(substitute(a, digits) for a in args))

    return l.Kernel(kernel.name, kernel.axes, transformed(kernel.stores, visit), kernel.source)
