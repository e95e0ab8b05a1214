"""Phases: what a convolution that is transposed, or a gradient of one with strides, adds up at each of its points.

Such a sum asks at every step whether its stride divides a place: of 4 x 4 steps of stride 2 it takes 4, and which ones
is the same for every other point. So each axis of the result is cut into points of one phase, and the sum runs over the
steps of that phase only. The gradient of a mean over windows is such a sum, without a product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from terrazzo.ir.address import coefficient
from terrazzo.ir.contraction import contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr, Mod, Var, floordiv, mod, terms_of
from terrazzo.ir.node import substitute, topological, transform
from terrazzo.ir.sites import sites
from terrazzo.rules.loop.folding.fold import folding
from terrazzo.targets.cpu.pieces import PAIR, known
from terrazzo.targets.cpu.runs import zero
from terrazzo.targets.cpu.tiles import extent


@dataclass(frozen=True)
class Asked:
    """Of a step, that `axis - by * step + rest` is a multiple of a stride, which is `place % stride == 0`."""

    place: Any
    stride: int
    axis: Var
    step: Var
    by: int
    rest: int


def phases(kernel: l.Kernel) -> l.Kernel:
    """`kernel` with sums of products over the steps that are multiples of strides only."""
    for reduce in sites(kernel).carried.values():
        if not isinstance(reduce, l.Reduce) or contraction(reduce) is None:
            continue
        axes, args = l.open_binder(reduce)
        for asked in _asked(args, axes, kernel.axes):
            if extent(asked.axis) % asked.stride == 0:
                return phases(_one(kernel, reduce, asked, axes, args))
    return kernel


def by_phases(kernel: l.Kernel, last: Var | None = None) -> list[l.Kernel]:
    """`kernel` as several, of which each sum of what is read at multiples of strides takes the steps that are these.
    What a stride leaves of an axis goes by itself. Where the `last` axis is one of phases, these are stores side by
    side.
    """
    for reduce in sites(kernel).carried.values():
        if not isinstance(reduce, l.Reduce) or reduce.monoid.name != "sum":
            continue
        steps, args = l.open_binder(reduce)
        for asked in _asked(args, steps, kernel.axes):
            if not _vanishes(args[0], asked):
                continue
            if (left := extent(asked.axis) % asked.stride) == 0:
                made = _one(kernel, reduce, asked, steps, args)
                return by_phases(made, made.axes[-1] if asked.axis is kernel.axes[-1] else last)
            if extent(asked.axis) > left:
                ends = _cut(kernel, asked.axis, extent(asked.axis) - left)
                return [y for x in ends for y in by_phases(x, last)]
    if last is None or len(kernel.axes) < 2 or extent(last) > PAIR:
        return [kernel]
    stores = [s for k in range(extent(last)) for s in known(kernel.stores, last, k, ())]
    return [l.Kernel(kernel.name, kernel.axes[:-1], tuple(stores), kernel.source)]


def _vanishes(x: Any, asked: Asked) -> bool:
    """Whether a term is 0 wherever a stride does not divide a place."""
    guard = mod(asked.place, asked.stride)

    def visit(y: Any) -> Any:
        if isinstance(y, l.Load) and any(isinstance(e, Expr) and guard in topological([e]) for e in y.inside):
            return l.Literal(zero(y), y.dtype)
        return folding(y)

    found = transform(x, visit)
    return isinstance(found, l.Literal) and found.value == 0


def _cut(kernel: l.Kernel, axis: Var, at: int) -> list[l.Kernel]:
    """A kernel as two, the second from a value of an axis on."""
    made = []
    for low, high in ((0, at), (at, extent(axis))):
        piece = Var(l.fresh_name(), high - low)
        axes = tuple(piece if a is axis else a for a in kernel.axes)
        made.append(l.Kernel(kernel.name, axes, known(kernel.stores, axis, piece + low, ()), kernel.source))
    return made


def _asked(args: Any, steps: Any, axes: Any) -> Iterator[Asked]:
    """What the loads of a sum ask of that form."""
    guards = [e for x in topological(args) if isinstance(x, l.Load) for e in x.inside]
    for e in guards:
        terms = [(factors, c) for factors, c in terms_of(e).items() if c]
        if len(terms) != 1 or terms[0][1] != -1 or len(terms[0][0]) != 1 or not isinstance(terms[0][0][0], Mod):
            continue
        place, stride = terms[0][0][0].a, terms[0][0][0].b
        for axis in axes:
            for step in steps:
                by = coefficient(place, step)
                if not isinstance(stride, int) or not isinstance(by, int) or coefficient(place, axis) != 1:
                    continue
                rest = place - axis - by * step
                static = all(isinstance(n, int) for n in (rest, axis.extent, step.extent))
                if static and math.gcd(by, stride) == 1:
                    yield Asked(place, stride, axis, step, -by, rest)


def _one(kernel: l.Kernel, reduce: l.Reduce, asked: Asked, steps: Any, args: Any) -> l.Kernel:
    """The kernel with an axis for the points of a phase, and one for phases, and a sum over the steps of a phase."""
    s, d = asked.stride, asked.by
    point, phase = Var(l.fresh_name(), asked.axis.extent // s), Var(l.fresh_name(), s)
    step = Var(l.fresh_name(), -(-asked.step.extent // s))
    first = mod((phase + asked.rest) * pow(d, -1, s), s)
    here: IntExpr = step * s + first
    there = point - d * step + floordiv(phase + asked.rest - d * first, s)
    beyond = [asked.step.extent - 1 - here] if asked.step.extent % s else []

    def guarded(x: Any) -> Any:
        steps = isinstance(x, l.Load) and any(step in e.free for e in (*x.index, *x.inside) if isinstance(e, Expr))
        return l.Load.make(x.buffer, x.index, (*x.inside, *beyond)) if steps and beyond else x

    made = []
    for x in args:
        x = substitute(x, {floordiv(asked.place, s): there, mod(asked.place, s): 0})
        made.append(transform(substitute(x, {asked.step: here}), guarded))
    inner = tuple(step if a is asked.step else a for a in steps)
    new = l.Reduce.make(reduce.monoid, inner, tuple(made))
    stores = (transform(x, lambda y: y, {reduce: new}) for x in kernel.stores)
    whole = tuple(substitute(x, {asked.axis: point * s + phase}) for x in stores)
    axes = [b for a in kernel.axes for b in ((point, phase) if a is asked.axis else (a,))]
    return l.Kernel(kernel.name, tuple(axes), whole, kernel.source)
