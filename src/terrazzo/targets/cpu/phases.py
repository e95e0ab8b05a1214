"""Phases: what a convolution that is transposed, or a gradient of one with strides, adds up at each of its points.

Such a sum asks at every step whether its stride divides a place: of 4 x 4 steps of stride 2 it takes 4, and which ones
is the same for every other point. So each axis of the result is cut into points of one phase, and the sum runs over the
steps of that phase only.
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
            return phases(_one(kernel, reduce, asked, axes, args))
    return kernel


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
                known = all(isinstance(n, int) for n in (rest, axis.extent, step.extent))
                if known and axis.extent % stride == 0 and math.gcd(by, stride) == 1:
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
