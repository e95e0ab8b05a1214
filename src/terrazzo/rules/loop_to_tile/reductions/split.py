"""A reduction split over the grid: one kernel for partial states, and one that combines them in order and does all the
rest.

For every monoid: split-K, split reductions, split-KV are this one rewrite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

from terrazzo.errors import UserError, about
from terrazzo.ir.contraction import contraction, summands
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Var, at_least
from terrazzo.ir.nest import accumulators
from terrazzo.ir.node import Node, substitute, topological, transform, transformed
from terrazzo.ir.schedule import Like, Schedule
from terrazzo.ir.sites import loads
from terrazzo.ir.types import Type
from terrazzo.rules.loop.definitions import unused
from terrazzo.rules.loop.fusion.inline import guarded, keeps_zero, rewrite_loads, select


def split(kernel: l.Kernel, reduces: Sequence[l.Reduce], pieces: int, unit: int = 1) -> tuple[l.Kernel, l.Kernel]:
    """`kernel` as two, its `reduces` (over axes of the same extents) in so many pieces of the last axis, multiples of
    `unit`. Where these are more than the axis has, the last piece is short.

    @loop
    def f(x: f32[3, 4]):
        with kernel('z', z=f32[3]):
            for a0 in free(3):
                for r0 in reduce(4):
                    in0 = x[a0, r0]
                    v0 = exp(in0)
                    acc0 <- sum(v0)
                v1 = log(acc0)
                z[a0] = v1
        return (z,)
    =>
    @loop
    def f(x: f32[3, 4]):
        with kernel('z_part', z_part=f32[2, 3]):
            for s in free(2):
                for a0 in free(3):
                    for r0 in reduce(2):
                        in0 = x[a0, r0 + s * 2]
                        v0 = exp(in0)
                        acc0 <- sum(v0)
                    z_part[s, a0] = acc0
        with kernel('z', z=f32[3]):
            for a0 in free(3):
                for r0 in reduce(2):
                    in0 = z_part[r0, a0]
                    acc0 <- sum(in0)
                v0 = log(acc0)
                z[a0] = v0
        return (z,)
    """
    axes = tuple(a for a in kernel.axes if any(a in r.free for r in reduces))
    part = axis_of_pieces(kernel, pieces)
    stores: list[l.Store] = []
    whole: dict[Node, Node] = {}
    for number, r in enumerate(reduces):
        inner, args = l.open_binder(r)
        last = inner[-1]
        step = -(-last.extent // (pieces * unit)) * unit
        short = Var(l.fresh_name(), step)
        fresh = (*inner[:-1], short)
        partial = l.Reduce.make(r.monoid, fresh, moved(r, args, last, part * step + short))
        types = r.dtype if r.monoid.width > 1 else (r.dtype,)
        own = tuple(a for a in axes if a in r.free)
        loads = []
        for p, dtype in enumerate(types):
            name = f"{kernel.name}_part{number or ''}{f'_{p}' if len(types) > 1 else ''}"
            buffer = l.Buffer(name, Type(dtype, (pieces, *(a.extent for a in own))))
            stores.append(l.Store(buffer, (part, *own), l.Get(partial, p) if len(types) > 1 else partial))
            s = Var(l.fresh_name(), pieces)
            loads.append((s, l.Load(buffer, (s, *own))))
        one = loads[0][0]
        again = [substitute(x, {s: one}) for s, x in loads]
        whole[r] = l.Reduce.make(r.monoid, (one,), tuple(again))
    first = l.Kernel(f"{kernel.name}_part", (part, *axes), tuple(stores), kernel.source)
    second = l.Kernel(
        kernel.name, kernel.axes, tuple(transform(s, lambda x: x, dict(whole)) for s in kernel.stores), kernel.source
    )
    return first, second


def axis_of_pieces(kernel: l.Kernel, pieces: int) -> Var:
    """An axis that none of a kernel's is: equal names and extents make one."""
    return Var(unused("s", {a.name for a in kernel.axes}), pieces)


def pinned_split(kernel: l.Kernel, schedule: Schedule) -> tuple[l.Kernel, Schedule, l.Kernel] | None:
    """A kernel as two, where its schedule binds an axis that is reduced to the grid: the one for partial states, with
    the rest of the schedule, and the one that combines them. None where it binds none.

    UserError where the schedule splits other than the last axis of reductions that are over the same ones.
    """
    lines = {a: b for a, b in schedule.axes if not isinstance(b, Like)}
    reduces = [r for r in accumulators(kernel).values() if isinstance(r, l.Reduce)]
    over = {f"r{a.label}": r for r in reduces for a in r.axes}
    cut = [a for a, b in lines.items() if a in over and any(f.level == "grid" and f.size > 1 for f in b)]
    if not cut:
        return None
    last = {f"r{r.axes[-1].label}" for r in reduces}
    if len(cut) > 1 or last != set(cut) or any(isinstance(x, l.Reduce) for r in reduces for x in topological(r.args)):
        with about(*schedule.part("", cut[0])):
            raise UserError(
                f"the schedule of {kernel.name}: blocks share {', '.join(cut)}, and can share the last axis that all "
                f"of its reductions are over, which is {' and '.join(sorted(last))}"
            )
    (axis,) = cut
    grid, *rest = lines[axis]
    first, second = split(kernel, reduces, grid.size, math.prod(f.size for f in rest))
    part = first.axes[0].name
    names = {s.buffer.name: p.buffer.name for s, p in zip(kernel.stores, first.stores, strict=False)}
    sites = tuple(replace(s, names=tuple(names.get(x, x) for x in s.names)) for s in schedule.sites)
    axes = tuple((a, tuple(rest) if a == axis else b) for a, b in schedule.axes)
    bound = replace(
        schedule, kernel=first.name, axes=((part, (grid,)), *(x for x in axes if x[1])), sites=sites, origin=schedule
    )
    return first, bound, second


def moved(r: l.Reduce | l.Scan, args: Sequence[Any], axis: Var, to: IntExpr) -> tuple[Any, ...]:
    """What is reduced or scanned at another place of an axis; beyond its end, where nothing is loaded, what changes
    nothing.
    """
    there, inside = [substitute(a, {axis: to}) for a in args], (axis.extent - 1 - to,)
    if at_least(*inside, 0):
        return tuple(there)
    along = frozenset(to.free) if isinstance(to, Node) else frozenset()
    found = [rewrite_loads(a, lambda load: guarded(load, inside) if along & load.free else load) for a in there]
    if r.monoid.name == "sum" and isinstance(r, l.Reduce) and contraction(r) is not None:
        return (_no_products(found[0], along, inside),)
    if r.monoid.name == "sum" and keeps_zero(args[0]):
        return tuple(found)
    types = r.dtype if r.monoid.width > 1 else (r.dtype,)
    identity = r.monoid.identity(types)
    if r.monoid.frame:  # what lies infinitely far below a frame is worth nothing, whatever it is
        return (select(inside, found[0], identity[0]), *found[1:])
    return tuple(select(inside, a, x) for a, x in zip(found, identity, strict=True))


def _no_products(total: Node, along: Set[Any], inside: tuple[IntExpr, ...]) -> Any:
    """A sum of products whose loads are 0 beyond an axis' end, with factors that are made of places 0 there, too: these
    may be anything, and infinity times 0 is no number.
    """
    factors = [f for x, _ in summands(total) for f in x.children if isinstance(f, Node)]
    made = [f for f in factors if along & f.free and not any(along & x.free for x in loads(f))]
    taken = {f: select(inside, f) for f in made}
    return transformed((total,), lambda x: taken.get(x, x))[0]


def moments(kernel: l.Kernel) -> tuple[l.Reduce, l.Reduce] | None:
    """The two reductions of a kernel, where these are a sum and the sum of squared distances from its mean."""
    found = accumulators(kernel)
    if len(found) != 2:
        return None
    total, squares = found.values()
    if not (isinstance(total, l.Reduce) and isinstance(squares, l.Reduce)) or total.monoid.name != "sum":
        return None
    if (
        squares.monoid.name != "sum"
        or len(total.axes) != 1
        or [a.extent for a in total.axes] != [a.extent for a in squares.axes]
    ):
        return None
    (axis,), (value,) = l.open_binder(squares)
    (own,), (summed,) = l.open_binder(total)
    match value:
        case l.Apply(fn=product, args=(l.Apply(fn=minus, args=(x, mean)) as far, same)) if far is same:
            right = (product.name, minus.name) == ("mul", "sub") and x is substitute(summed, {own: axis})
            return (total, squares) if right and total.free == squares.free and _is_mean(mean, total) else None
    return None


def _around(squares: l.Reduce) -> Any:
    """What a sum of squares has distances from."""
    _, (value,) = l.open_binder(squares)
    return value.args[0].args[1]  # type: ignore[attr-defined]


def _is_mean(term: Any, total: l.Reduce) -> bool:
    length = total.axes[0].extent
    match term:
        case l.Apply(fn=fn, args=(l.Reduce() as r, l.Literal(value=v))) if r is total:
            return (fn.name in ("div", "approx_div") and v == length) or (fn.name == "mul" and v * length == 1)
    return False


def split_moments(kernel: l.Kernel, pieces: int, unit: int = 1) -> tuple[l.Kernel, l.Kernel] | None:
    """`kernel` as two, its sum and its sum of squared distances from the mean in so many pieces, multiples of `unit`,
    of which the last may be short: these are the squares of every piece around its own mean, and those of the pieces'
    means around that of all (Chan, Golub and LeVeque 1979). None where a kernel is otherwise.

    @loop
    def f(x: f32[3, 4]):
        with kernel('z', z=f32[3]):
            for a0 in free(3):
                for r0 in reduce(4):
                    in0 = x[a0, r0]
                    acc0 <- sum(in0)
                v0 = div(acc0, f32(4.0))
                for r1 in reduce(4):
                    in1 = x[a0, r1]
                    v1 = sub(in1, v0)
                    v2 = mul(v1, v1)
                    acc1 <- sum(v2)
                z[a0] = acc1
        return (z,)
    =>
    @loop
    def f(x: f32[3, 4]):
        with kernel('z_part', z_part=f32[2, 3], z_part1=f32[2, 3]):
            for s in free(2):
                for a0 in free(3):
                    for r0 in reduce(2):
                        in0 = x[a0, r0 + s * 2]
                        acc0 <- sum(in0)
                    v0 = div(acc0, f32(2.0))
                    for r1 in reduce(2):
                        in1 = x[a0, r1 + s * 2]
                        v1 = sub(in1, v0)
                        v2 = mul(v1, v1)
                        acc1 <- sum(v2)
                    z_part[s, a0] = acc0
                    z_part1[s, a0] = acc1
        with kernel('z', z=f32[3]):
            for a0 in free(3):
                for r0 in reduce(2):
                    in0 = z_part[r0, a0]
                    acc0 <- sum(in0)
                v0 = div(acc0, f32(4.0))
                for r1 in reduce(2):
                    in1 = z_part1[r1, a0]
                    in2 = z_part[r1, a0]
                    v1 = div(in2, f32(2.0))
                    v2 = sub(v1, v0)
                    v3 = mul(v2, v2)
                    v4 = mul(f32(2.0), v3)
                    v5 = add(in1, v4)
                    acc1 <- sum(v5)
                z[a0] = acc1
        return (z,)
    """
    if (found := moments(kernel)) is None:
        return None
    total, squares = found
    (axis,), (summed,) = l.open_binder(total)
    if not isinstance(length := axis.extent, int):
        return None
    step = -(-length // (pieces * unit)) * unit
    if (last := length - (pieces - 1) * step) <= 0:
        return None
    part, dtype = axis_of_pieces(kernel, pieces), total.dtype

    def size(piece: Var) -> Any:
        """How many elements a piece has."""
        return select((pieces - 2 - piece,) if last < step else (), l.Literal(float(step), dtype), float(last))

    short = Var(l.fresh_name(), step)
    own = l.Reduce.make(total.monoid, (short,), moved(total, (summed,), axis, part * step + short))
    short = Var(l.fresh_name(), step)
    (value,) = moved(total, (summed,), axis, part * step + short)
    far = l.apply("sub", value, l.apply("div", own, size(part)))
    inside = (length - 1 - part * step - short,) if last < step else ()
    around = l.Reduce.make(squares.monoid, (short,), (select(inside, l.apply("mul", far, far)),))
    axes = tuple(a for a in kernel.axes if a in total.free)
    names = f"{kernel.name}_part", f"{kernel.name}_part1"
    sums, spreads = (l.Buffer(x, Type(dtype, (pieces, *(a.extent for a in axes)))) for x in names)
    stores = tuple(l.Store(b, (part, *axes), x) for b, x in ((sums, own), (spreads, around)))
    first = l.Kernel(names[0], (part, *axes), stores, kernel.source)
    s = Var(l.fresh_name(), pieces)
    whole = l.Reduce.make(total.monoid, (s,), (l.Load(sums, (s, *axes)),))
    mean = substitute(_around(squares), {total: whole})
    s = Var(l.fresh_name(), pieces)
    apart = l.apply("sub", l.apply("div", l.Load(sums, (s, *axes)), size(s)), mean)
    more = l.apply("mul", size(s), l.apply("mul", apart, apart))
    spread = l.Reduce.make(squares.monoid, (s,), (l.apply("add", l.Load(spreads, (s, *axes)), more),))
    memo: dict[Node, Node] = {total: whole, squares: spread}
    ends = tuple(transform(x, lambda y: y, dict(memo)) for x in kernel.stores)
    return first, l.Kernel(kernel.name, kernel.axes, ends, kernel.source)


def reduced_first(kernel: l.Kernel, reduces: Sequence[l.Reduce]) -> tuple[l.Kernel, ...]:
    """`kernel` after one that stores these reductions of it, and whatever goes along no more axes than they do.

    @loop
    def f(x: f32[3, 4]):
        with kernel('z', z=f32[3, 4]):
            for a0 in free(3):
                for r0 in reduce(4):
                    in0 = x[a0, r0]
                    acc0 <- max(in0)
                for a1 in free(4):
                    in1 = x[a0, a1]
                    v0 = sub(in1, acc0)
                    z[a0, a1] = v0
        return (z,)
    =>
    @loop
    def f(x: f32[3, 4]):
        with kernel('z_reduced', z_reduced=f32[3]):
            for a0 in free(3):
                for r0 in reduce(4):
                    in0 = x[a0, r0]
                    acc0 <- max(in0)
                z_reduced[a0] = acc0
        with kernel('z', z=f32[3, 4]):
            for a0 in free(3):
                in0 = z_reduced[a0]
                for a1 in free(4):
                    in1 = x[a0, a1]
                    v0 = sub(in1, in0)
                    z[a0, a1] = v0
        return (z,)
    """
    axes = tuple(a for a in kernel.axes if any(a in r.free for r in reduces))
    stores: list[l.Store] = []
    whole: dict[Node, Node] = {}
    own_name = f"{kernel.name}_reduced"
    while any(b.name.startswith(own_name) for b in kernel.reads):  # and what was stored before those, which is not read
        own_name += "_"
    for number, r in enumerate(reduces):
        types = r.dtype if r.monoid.width > 1 else (r.dtype,)
        own = tuple(a for a in axes if a in r.free)
        for p, dtype in enumerate(types):
            name = f"{own_name}{number or ''}{f'_{p}' if len(types) > 1 else ''}"
            buffer = l.Buffer(name, Type(dtype, tuple(a.extent for a in own)))
            value = l.Get(r, p) if len(types) > 1 else r
            stores.append(l.Store(buffer, own, value))
            whole[value] = l.Load(buffer, own)
    rest = [transform(s, lambda x: x, dict(whole)) for s in kernel.stores]
    inner = [s for s in rest if not s.free <= frozenset(axes) or any(isinstance(x, l.Reduce) for x in topological([s]))]
    if not inner or not reduces:
        return (kernel,)
    used = {x.buffer for x in topological(inner) if isinstance(x, l.Load)}
    early = [s for s, new in zip(kernel.stores, rest, strict=True) if new not in inner]
    first = (*(s for s in stores if s.buffer in used), *early)
    mine = tuple(a for a in axes if any(a in s.free for s in first))
    if all(s.buffer.name != own_name for s in first):  # the rest, which reads none of them, may be divided so again
        own_name = f"{own_name}_{first[0].buffer.name}"
    return (
        l.Kernel(own_name, mine, first, kernel.source),
        l.Kernel(kernel.name, kernel.axes, tuple(inner), kernel.source),
    )
