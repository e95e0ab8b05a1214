"""Convolutions of few results, as those that make an image of channels: every point of the image is multiplied with
all taps, as rows of a product, and what the taps of a result have is added up after. An instruction has few columns to
fill otherwise, and what it reads is brought in for each tap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any

from terrazzo.ir.address import coefficient
from terrazzo.ir.contraction import contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, Var, floordiv, terms_of
from terrazzo.ir.nest import accumulators
from terrazzo.ir.node import substitute
from terrazzo.ir.types import Type
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.definitions import unused
from terrazzo.rules.loop.layout.few_results import Price, has_few, surely
from terrazzo.rules.loop.layout.images import quotients
from terrazzo.rules.loop.layout.last_points import with_plain_axes
from terrazzo.rules.loop.layout.whole_steps import with_whole_steps
from terrazzo.rules.loop_to_tile.products.packed import even

PASS, RULE = "online", "taps_after"
TIMES = 16
"""How many times as many numbers as are read there are products for taps, at most: they wait in memory."""


def taps_after(program: l.Program, log: Log, price: Price) -> l.Program:
    """`program` with sums over the taps and the channels of an image as sums over channels for every point and tap, and
    sums over taps of these, where that is faster by the model. Filters are stored first with their channels contiguous.

    @loop
    def f(x: f32[8, 16], w: f32[8, 4, 3]):
        with kernel('z', z=f32[3, 16]):
            for a0 in free(3):
                for a1 in free(16):
                    for r0, r1 in reduce(8, 4):
                        in0 = x[r0, a1 + r1 - 1] if a1 + r1 >= 1 and a1 + r1 < 17 else 0
                        in1 = w[r0, r1, a0]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    z[a0, a1] = acc0
        return (z,)
    =>
    @loop
    def f(x: f32[8, 16], w: f32[8, 4, 3]):
        with kernel('z_w', z_w=f32[4, 3, 8]):
            for a0 in free(4):
                for a1 in free(3):
                    for a2 in free(8):
                        in0 = w[a2, a0, a1]
                        z_w[a0, a1, a2] = in0
        with kernel('z_taps', z_taps=f32[4, 3, 16]):
            for a0 in free(4):
                for a1 in free(3):
                    for a2 in free(16):
                        for r0 in reduce(8):
                            in0 = x[r0, a2]
                            in1 = z_w[a0, a1, r0]
                            v0 = mul(in0, in1)
                            acc0 <- sum(v0)
                        z_taps[a0, a1, a2] = acc0
        with kernel('z', z=f32[3, 16]):
            for a0 in free(3):
                for a1 in free(16):
                    for r0 in reduce(4):
                        in0 = z_taps[r0, a0, r0 + a1 - 1] if r0 + a1 >= 1 and r0 + a1 < 17 else 0
                        acc0 <- sum(in0)
                    z[a0, a1] = acc0
        return (z,)
    """

    def find(kernel: l.Kernel, names: Set[str]) -> tuple[l.Kernel, ...] | None:
        ways = [multiplied_first(kernel, names, last) for last in (False, True)]
        return min((way for way in ways if way), key=price, default=None)

    return surely(program, log, (PASS, RULE, "with few columns"), find, price)


def multiplied_first(kernel: l.Kernel, names: Set[str], last: bool = False) -> tuple[l.Kernel, ...] | None:
    """A kernel so: one that stores filters with their channels contiguous, where they are not, the product, and what
    adds up taps; None where it is no convolution of few results for a point, or of channels in groups. What taps
    multiply lies tap by tap, or point by point with the taps `last`, where points many taps apart read these together.
    """
    (r, *others) = accumulators(kernel).values() or (None,)
    c = contraction(r) if isinstance(r, l.Reduce) and not others else None
    if c is None or len(c.terms) > 1 or len(c.operands) != 2 or not all(isinstance(x, l.Load) for x in c.operands):
        return None
    inner, args = l.open_binder(c.reduce)
    loads: Any = [substitute(x, dict(zip(c.reduce.axes, inner, strict=True))) for x in c.operands]
    image, filters = sorted(loads, key=lambda x: not _under_window(x, kernel.axes, inner))
    channels = [a for a in inner if all(_alone(x, a) is not None for x in loads)]
    taps = [a for a in inner if a not in channels]
    sizes = (*(a.extent for a in kernel.axes), *(n for x in loads for n in x.buffer.type.shape))
    if not channels or not taps or not all(isinstance(n, int) for n in sizes):
        return None
    if not has_few(kernel, filters) or not _under_window(image, kernel.axes, inner):
        return None
    if last and not quotients(image):
        return None
    if (image.free & filters.free) - {*inner} or any(e.free & {*channels} for x in loads for e in x.inside):
        return None
    made: list[l.Kernel] = []
    sides: list[list[list[Any]]] = []
    at: dict[Any, Any] = {}
    for x in (filters, image):
        at[x], *side = _at_all_places(x, channels)
        sides.append(side)
    (f_axes, f_places), (i_axes, i_places) = sides
    if not (even(filters.buffer) and len(channels) == 1 and _contiguous(filters, channels[0])):
        shape = (*(a.extent for a in f_axes), *(a.extent for a in channels))
        place = l.Buffer(unused(f"{kernel.name}_{filters.buffer.name}", {*names}), Type(filters.dtype, shape))
        store = l.Store(place, (*f_axes, *channels), at[filters])
        made.append(with_plain_axes(place.name, (*f_axes, *channels), [store], kernel))
        at[filters] = l.Load.make(place, (*f_axes, *channels), ())
    axes = (*i_axes, *f_axes) if last else (*f_axes, *i_axes)
    if math.prod(a.extent for a in axes) > TIMES * sum(math.prod(x.buffer.type.static_shape) for x in loads):
        return None
    name = unused(f"{kernel.name}_taps", {*names, *(x.name for x in made)})
    products = l.Buffer(name, Type(c.reduce.dtype, tuple(a.extent for a in axes)))
    term = l.Reduce.make(c.reduce.monoid, tuple(channels), tuple(substitute(x, at) for x in args))
    made.append(with_plain_axes(name, axes, [l.Store(products, axes, term)], kernel))
    places = (*i_places, *f_places) if last else (*f_places, *i_places)
    read = l.Load.make(products, places, (*filters.inside, *image.inside))
    summed = l.Reduce.make(c.reduce.monoid, tuple(taps), (read,))
    stores = tuple(substitute(s, {c.reduce: summed}) for s in kernel.stores)
    return *made, with_whole_steps(l.Kernel(kernel.name, kernel.axes, stores, kernel.source))


def _at_all_places(x: l.Load, channels: Sequence[Any]) -> tuple[l.Load, list[Any], list[Any]]:
    """A load at all places of its buffer, where channels walk what they walk; the axes that walk the rest, and where
    the load is along these.
    """
    own = {_alone(x, a): a for a in channels}
    index, axes, places = [], [], []
    for d, (e, n) in enumerate(zip(x.index, x.buffer.type.static_shape, strict=True)):
        channel, size = own.get(d, 0), own[d].extent if d in own else 1
        if d in own and n == size:
            index.append(channel)
            continue
        axes.append(Var(l.fresh_name(), n // size))
        index.append(axes[-1] * size + channel)
        places.append(floordiv(e - channel, size))
    return l.Load.make(x.buffer, tuple(index), ()), axes, places


def _alone(x: l.Load, axis: Any) -> int | None:
    """The dimension that an axis walks from its first place to its last, where it is in no other; or in which it is the
    last digit, behind which others count how often all of it was walked.
    """
    found = [d for d, e in enumerate(x.index) if isinstance(e, Expr) and axis in e.free]
    if len(found) != 1 or coefficient(x.index[found[0]], axis) != 1:
        return None
    times = x.index[found[0]] - axis
    whole = all(isinstance(c, int) and c % axis.extent == 0 for c in terms_of(times).values())
    n = x.buffer.type.shape[found[0]]
    return found[0] if whole and (n == axis.extent if times == 0 else n % axis.extent == 0) else None


def _under_window(x: l.Load, points: Sequence[Any], steps: Sequence[Any]) -> bool:
    """Whether points and steps meet in a dimension of what is read."""
    return any(isinstance(e, Expr) and e.free & {*points} and e.free & {*steps} for e in x.index)


def _contiguous(x: l.Load, axis: Any) -> bool:
    d = _alone(x, axis)
    return d is not None and x.buffer.type.element_strides[d] == 1
