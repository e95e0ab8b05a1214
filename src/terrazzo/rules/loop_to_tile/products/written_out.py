"""Products of a few rows and columns over many steps: a sum for each result, all in one loop."""

from __future__ import annotations

import math
from functools import reduce
from itertools import product as every

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.loop import apply
from terrazzo.ir.node import Node, substitute
from terrazzo.ir.sites import product
from terrazzo.ir.types import Type, i64
from terrazzo.rules.loop_to_tile.walked.threads import size_of

MOST = 96
"""Results that are written out: each is a sum in a register of every thread, of which threads of 16 warps have 128."""
DEPTH = 64
"""Steps for each result, at least: fewer are no work for many blocks, which meet in the end."""


def written_out(kernel: l.Kernel, depth: int = DEPTH) -> tuple[l.Kernel, ...]:
    """A product whose rows and columns would fill no tile, as a kernel of sums beside each other, which reads each row
    and each column once, and one that puts them where they belong. The kernel alone where it has many results, or
    less than so many steps for each.

    @loop
    def f(x: f32[1, 2, 8], w: f32[1, 2, 8]):
        with kernel('y', y=f32[1, 2, 2]):
            for a0 in free(1):
                for a1 in free(2):
                    for a2 in free(2):
                        for r0 in reduce(8):
                            in0 = x[a0, a1, r0]
                            in1 = w[a0, a2, r0]
                            v0 = mul(in0, in1)
                            acc0 <- sum(v0)
                        y[a0, a1, a2] = acc0
        return (y,)
    =>
    @loop
    def f(x: f32[1, 2, 8], w: f32[1, 2, 8]):
        with kernel('y_sums', y_acc0_0_0=f32[1], y_acc0_0_1=f32[1], y_acc0_1_0=f32[1], y_acc0_1_1=f32[1]):
            for a0 in free(1):
                for r0 in reduce(8):
                    in0 = x[a0, 0, r0]
                    in1 = w[a0, 0, r0]
                    v0 = mul(in0, in1)
                    in2 = w[a0, 1, r0]
                    v1 = mul(in0, in2)
                    in3 = x[a0, 1, r0]
                    v2 = mul(in3, in1)
                    v3 = mul(in3, in2)
                    acc0 <- sum(v0)
                    acc1 <- sum(v1)
                    acc2 <- sum(v2)
                    acc3 <- sum(v3)
                y_acc0_0_0[a0] = acc0
                y_acc0_0_1[a0] = acc1
                y_acc0_1_0[a0] = acc2
                y_acc0_1_1[a0] = acc3
        with kernel('y', y=f32[1, 2, 2]):
            for a0 in free(1):
                in0 = y_acc0_1_0[a0]
                in1 = y_acc0_0_1[a0]
                in2 = y_acc0_0_0[a0]
                in3 = y_acc0_1_1[a0]
                for a1 in free(2):
                    v0 = index(a1)
                    v1 = eq(v0, i64(1))
                    v2 = eq(v0, i64(0))
                    for a2 in free(2):
                        v3 = index(a2)
                        v4 = eq(v3, i64(0))
                        v5 = and_(v1, v4)
                        v6 = eq(v3, i64(1))
                        v7 = and_(v2, v6)
                        v8 = and_(v2, v4)
                        v9 = where(v8, in2, in3)
                        v10 = where(v7, in1, v9)
                        v11 = where(v5, in0, v10)
                        y[a0, a1, a2] = v11
        return (y,)
    """
    if (p := product(kernel)) is None:
        return (kernel,)
    both = tuple(a for a in kernel.axes if all(a in x.free and a in y.free for x, y in map(p.factors, p.sites)))
    own = tuple(a for a in kernel.axes if a not in both)
    sizes = tuple(map(size_of, own))
    results = math.prod(sizes) * len(p.sites)
    if results > MOST or math.prod(map(size_of, p.axes)) < depth * results:
        return (kernel,)
    first: list[l.Store] = []
    selected: dict[Node, Node] = {}
    for name, site in zip(p.names, p.sites, strict=True):
        sums: list[tuple[Node, Node]] = []
        for at in every(*map(range, sizes)):
            place = dict(zip(own, at, strict=True))
            label = "_".join(map(str, (kernel.name, name, *at)))
            buffer = l.Buffer(label, Type(site.reduce.dtype, tuple(a.extent for a in both)))
            first.append(l.Store(buffer, both, substitute(site.reduce, place)))
            tests = [apply("eq", l.Index(a), l.Literal(k, i64)) for a, k in place.items()]
            sums.append((reduce(lambda x, y: apply("and_", x, y), tests), l.Load(buffer, both)))
        *others, (_, found) = sums
        for test, value in others:
            found = apply("where", test, value, found)
        selected[site.reduce] = found
    stores = tuple(substitute(s, selected) for s in kernel.stores)
    before = l.Kernel(f"{kernel.name}_sums", both, tuple(first), kernel.source)
    return before, l.Kernel(kernel.name, kernel.axes, stores, kernel.source)
