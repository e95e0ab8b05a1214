"""Products that were fused, undone: each is a kernel of its own, and the last one reads what the others stored."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from terrazzo.collector import remembered
from terrazzo.ir.contraction import contraction, nested_contraction, operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import Bound, Var
from terrazzo.ir.nest import accumulators
from terrazzo.ir.node import Node, substitute, topological, transform, transformed
from terrazzo.ir.types import Type


@remembered
def products_apart(kernel: l.Kernel) -> tuple[l.Kernel, ...]:
    """A kernel of several products as one for each. Results that have no product in common are kernels of their own; of
    several products for the same results the last does all the rest, and what is rounded at once is stored so.

    @loop
    def f(x: f32[3, 4], w: f32[5, 4], u: f32[5, 4]):
        with kernel('z', z=f32[3, 5]):
            for a0 in free(3):
                for a1 in free(5):
                    for r0 in reduce(4):
                        in0 = x[a0, r0]
                        in1 = w[a1, r0]
                        v0 = mul(in0, in1)
                        in2 = u[a1, r0]
                        v1 = mul(in0, in2)
                        acc0 <- sum(v0)
                        acc1 <- sum(v1)
                    v2 = bf16(acc0)
                    v3 = f32(v2)
                    v4 = tanh(v3)
                    v5 = mul(v4, acc1)
                    z[a0, a1] = v5
        return (z,)
    =>
    @loop
    def f(x: f32[3, 4], w: f32[5, 4], u: f32[5, 4]):
        with kernel('z_sum0', z_sum0=bf16[3, 5]):
            for a0 in free(3):
                for a1 in free(5):
                    for r0 in reduce(4):
                        in0 = x[a0, r0]
                        in1 = w[a1, r0]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    v1 = bf16(acc0)
                    z_sum0[a0, a1] = v1
        with kernel('z', z=f32[3, 5]):
            for a0 in free(3):
                for a1 in free(5):
                    in0 = z_sum0[a0, a1]
                    v0 = f32(in0)
                    v1 = tanh(v0)
                    for r0 in reduce(4):
                        in1 = x[a0, r0]
                        in2 = u[a1, r0]
                        v2 = mul(in1, in2)
                        acc0 <- sum(v2)
                    v3 = mul(v1, acc0)
                    z[a0, a1] = v3
        return (z,)
    """
    sums = [r for r in accumulators(kernel).values() if isinstance(r, l.Reduce) and contraction(r) is not None]
    if len(sums) < 2 or len(sums) < len(accumulators(kernel)):
        return (kernel,)
    made: list[l.Kernel] = []
    for stores, own in _of_their_own(kernel, sums):
        name = kernel.name if stores[-1] is kernel.stores[-1] else stores[-1].buffer.name
        one = l.Kernel(name, kernel.axes, stores, kernel.source)
        made += _stored(one, {f"{kernel.name}_sum{sums.index(r)}": r for r in own[:-1]})
    return tuple(made)


def _of_their_own(kernel: l.Kernel, sums: Sequence[l.Reduce]) -> list[tuple[tuple[l.Store, ...], tuple[l.Reduce, ...]]]:
    """The stores of a kernel with the sums they are made of, those that have a sum in common together; what is made of
    none goes with the last.
    """
    of = {s: {r for r in sums if r in topological([s.value])} for s in kernel.stores}
    groups: list[set[l.Reduce]] = []
    for mine in filter(None, of.values()):
        meeting = [g for g in groups if g & mine]
        groups = [*(g for g in groups if g not in meeting), set().union(mine, *meeting)]
    if not of[kernel.stores[-1]]:  # it names the kernel
        groups = [set().union(*groups)]
    groups.sort(key=lambda g: g >= of[kernel.stores[-1]])
    return [
        (
            tuple(s for s in kernel.stores if of[s] & g or (not of[s] and g is groups[-1])),
            tuple(r for r in sums if r in g),
        )
        for g in groups
    ]


def results_apart(kernel: l.Kernel, first: Collection[Any] = ()) -> tuple[l.Kernel, ...]:
    """A kernel of one product as one that stores its sums, rounded where they are rounded at once, and one that reads
    these and does all the rest. Sums lie in memory as the kernel's axes do, but for some that come `first`, where there
    may be two.

    @loop
    def f(x: f32[3, 4], w: f32[5, 4], u: f32[3, 5]):
        with kernel('z', z=f32[3, 5]):
            for a0 in free(3):
                for a1 in free(5):
                    for r0 in reduce(4):
                        in0 = x[a0, r0]
                        in1 = w[a1, r0]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    v1 = bf16(acc0)
                    v2 = f32(v1)
                    in2 = u[a0, a1]
                    v3 = tanh(in2)
                    v4 = mul(v2, v3)
                    z[a0, a1] = v4
        return (z,)
    =>
    @loop
    def f(x: f32[3, 4], w: f32[5, 4], u: f32[3, 5]):
        with kernel('z_product', z_product=bf16[3, 5]):
            for a0 in free(3):
                for a1 in free(5):
                    for r0 in reduce(4):
                        in0 = x[a0, r0]
                        in1 = w[a1, r0]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    v1 = bf16(acc0)
                    z_product[a0, a1] = v1
        with kernel('z', z=f32[3, 5]):
            for a0 in free(3):
                for a1 in free(5):
                    in0 = z_product[a0, a1]
                    v0 = f32(in0)
                    in1 = u[a0, a1]
                    v1 = tanh(in1)
                    v2 = mul(v0, v1)
                    z[a0, a1] = v2
        return (z,)
    """
    sums = [r for r in accumulators(kernel).values() if isinstance(r, l.Reduce) and contraction(r) is not None]
    names = [f"{kernel.name}_product{n or ''}" for n in range(len(sums))]
    if len(sums) != len(accumulators(kernel)) or len(sums) not in ((1, 2) if first else (1,)):
        return (kernel,)
    if any(x.name in names for x in kernel.reads):
        return (kernel,)
    return _stored(kernel, dict(zip(names, sums, strict=True)), first)


def factor_apart(kernel: l.Kernel) -> tuple[l.Kernel, ...]:
    """A product one of whose factors is made of another product as two kernels: one stores that factor, rounded where
    it is rounded, and the other reads it.

    @loop
    def f(x: f32[3, 4], w: f32[6, 4], u: f32[5, 6]):
        with kernel('z', z=f32[3, 5]):
            for a0 in free(3):
                for a1 in free(5):
                    for r1 in reduce(6):
                        in0 = u[a1, r1]
                        for r0 in reduce(4):
                            in1 = x[a0, r0]
                            in2 = w[r1, r0]
                            v0 = mul(in1, in2)
                            acc1 <- sum(v0)
                        v1 = max(acc1, f32(0.0))
                        v2 = bf16(v1)
                        v3 = f32(v2)
                        v4 = mul(v3, in0)
                        acc0 <- sum(v4)
                    z[a0, a1] = acc0
        return (z,)
    =>
    @loop
    def f(x: f32[3, 4], w: f32[6, 4], u: f32[5, 6]):
        with kernel('z_factor', z_factor=bf16[3, 6]):
            for a0 in free(3):
                for b1 in free(6):
                    for r0 in reduce(4):
                        in0 = x[a0, r0]
                        in1 = w[b1, r0]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    v1 = max(acc0, f32(0.0))
                    v2 = bf16(v1)
                    z_factor[a0, b1] = v2
        with kernel('z', z=f32[3, 5]):
            for a0 in free(3):
                for a1 in free(5):
                    for r0 in reduce(6):
                        in0 = z_factor[a0, r0]
                        v0 = f32(in0)
                        in1 = u[a1, r0]
                        v1 = mul(v0, in1)
                        acc0 <- sum(v1)
                    z[a0, a1] = acc0
        return (z,)
    """
    sums = [r for r in kernel.carried if isinstance(r, l.Reduce)]
    if len(sums) != 2 or len(sums) < len(kernel.carried) or contraction(sums[0]) is None:
        return (kernel,)
    inner, outer = sums
    name, whole = f"{kernel.name}_factor", nested_contraction(outer)
    made = [x for x in (whole.factors if whole else ()) if inner in topological([x])]
    if len(made) != 1 or any(b.name == name for b in kernel.reads):
        return (kernel,)
    value: Any = operand(made[0])
    index = tuple(a for a in (*kernel.axes, *outer.axes) if a in value.free)
    both = term_apart(kernel, value, l.Buffer(name, Type(value.dtype, tuple(a.extent for a in index))), index)
    return (kernel,) if inner in both[1].carried else both


def term_apart(kernel: l.Kernel, term: Any, place: l.Buffer, index: Sequence[Any]) -> tuple[l.Kernel, l.Kernel]:
    """A kernel that stores a term of another at all points of an index, along axes of sums too, and what is left of the
    other, which loads it.
    """
    own = {a: Var(f"b{n}", a.extent) for n, a in enumerate(index) if isinstance(a, Bound)}
    axes = (*(a for a in kernel.axes if a in index), *own.values())
    store = l.Store(place, tuple(own.get(a, a) for a in index), substitute(term, own))
    maker = l.Kernel(place.name, axes, (store,), kernel.source)
    return maker, substitute(kernel, {term: l.Load(place, tuple(index))})


def stores_apart(kernel: l.Kernel) -> tuple[l.Kernel, ...]:
    """A kernel without reductions that stores at points of different axes, as one for each set of axes, those of
    few points first. Who comes later reads what was stored, where computing it takes more than a load.

    @loop
    def f(x: f32[3, 4], y: f32[3]):
        with kernel('z', s=f32[3], z=f32[3, 4]):
            for a0 in free(3):
                in0 = y[a0]
                v0 = exp(in0)
                s[a0] = v0
                for a1 in free(4):
                    in1 = x[a0, a1]
                    v1 = mul(in1, v0)
                    z[a0, a1] = v1
        return (s, z)
    =>
    @loop
    def f(x: f32[3, 4], y: f32[3]):
        with kernel('s', s=f32[3]):
            for a0 in free(3):
                in0 = y[a0]
                v0 = exp(in0)
                s[a0] = v0
        with kernel('z', z=f32[3, 4]):
            for a0 in free(3):
                in0 = s[a0]
                for a1 in free(4):
                    in1 = x[a0, a1]
                    v0 = mul(in1, in0)
                    z[a0, a1] = v0
        return (s, z)
    """
    groups: dict[Any, list[l.Store]] = {}
    for s in kernel.stores:
        groups.setdefault(s.free, []).append(s)
    if len(groups) < 2 or accumulators(kernel):
        return (kernel,)
    made: list[l.Kernel] = []
    stored: dict[Node, Any] = {}
    for free in sorted(groups, key=lambda found: math.prod(a.extent for a in found)):
        stores = tuple(transform(s, lambda x: x, dict(stored)) for s in groups[free])
        stored |= {s.value: l.Load(s.buffer, s.index) for s in groups[free] if _dear(s.value)}
        name = kernel.name if len(made) == len(groups) - 1 else stores[0].buffer.name
        made.append(l.Kernel(name, tuple(a for a in kernel.axes if a in free), stores, kernel.source))
    return tuple(made)


def _dear(value: Any) -> bool:
    """Whether computing a value takes more than loading it."""
    return any(isinstance(x, l.Apply) and not is_cast(x.fn) for x in topological([value]))


def _stored(kernel: l.Kernel, sums: dict[str, l.Reduce], outer: Collection[Any] = ()) -> tuple[l.Kernel, ...]:
    """Kernels that store these sums of a kernel, by the names of what they are stored to, and what is left of it."""
    first: list[l.Kernel] = []
    taken: dict[Node, Any] = {}
    for name, r in sums.items():
        value = _rounded(kernel, r)
        axes = tuple(sorted((a for a in kernel.axes if a in r.free), key=lambda a: a not in outer))
        kind = Type(value.dtype, tuple(a.extent for a in axes))
        place = l.Buffer(name, kind)
        first.append(l.Kernel(place.name, axes, (l.Store(place, axes, value),), kernel.source))
        taken[value] = l.Load(place, axes)
    stores = transformed(kernel.stores, lambda x: taken.get(x, x))
    return (*first, l.Kernel(kernel.name, kernel.axes, stores, kernel.source))


CHEAP = 2.0
"""Operations before a sum is rounded, at most, for it to be stored so: a bias is added, or it is scaled."""


def _rounded(kernel: l.Kernel, r: l.Reduce) -> Any:
    """What is wanted of a reduction: itself, or the smaller type that all convert it to, with a bias perhaps, but with
    no other reduction: that is stored by itself.
    """
    found: Any = r
    work = 0.0
    own = _reductions(r)
    while work <= CHEAP:
        users = {x for s in kernel.stores for x in topological([s.value]) if isinstance(x, l.Apply) and found in x.args}
        if len(users) != 1 or any(s.value is found for s in kernel.stores):
            break
        (found,) = users
        if not _reductions(found) <= own:
            break
        if is_cast(found.fn) and found.dtype.size < r.dtype.size:
            return found
        if not found.free <= r.free:
            break
        work += found.fn.cost
    return r


def _reductions(x: Any) -> set[l.Reduce]:
    return {y for y in topological([x]) if isinstance(y, l.Reduce)}
