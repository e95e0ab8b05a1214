"""Sums of products over the points of images, one of which lies under the taps of a filter, as the gradient of a
convolution's weights. Channels are contiguous, and are rows and columns; each tap is a product of its own; and a step
takes channels at one point of many images, so that no window lies within a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from terrazzo.collector import remembered
from terrazzo.hw.gpu import Gpu
from terrazzo.ir.address import coefficient, mentions
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Var
from terrazzo.ir.nest import accumulators
from terrazzo.ir.node import substitute
from terrazzo.ir.schedule import Schedule
from terrazzo.ir.sites import Product, product
from terrazzo.rules.loop_to_tile.products import tiles, warpgroups
from terrazzo.rules.loop_to_tile.products.packed import channels_beside, dimension
from terrazzo.rules.loop_to_tile.products.results import along, results
from terrazzo.rules.loop_to_tile.products.warpgroup_tiles import ROWS
from terrazzo.rules.loop_to_tile.products.work import STEP
from terrazzo.rules.loop_to_tile.reductions.split import split
from terrazzo.rules.loop_to_tile.walked.crossed import copying
from terrazzo.rules.loop_to_tile.walked.threads import ceil

LEAST = 8
"""Steps that are worth an instruction, which takes 16 together."""
MOST = 4
"""Tiles that are worth trying, of each number of pieces."""


@dataclass(frozen=True)
class Taps:
    """Of such a sum: the axes of results, the last two of which are channels of either factor, and the numbers of the
    axes of its steps, the last of which a step takes many of, and the one before it is the longest. Of the kernel, an
    axis of steps is two, where a step takes a run of it.
    """

    kernel: l.Kernel
    axes: tuple[Any, ...]
    steps: tuple[int, ...]
    longest: int


@remembered
def found(kernel: l.Kernel) -> Taps | None:
    """A kernel as such a sum; None where it is none, or has more taps than points."""
    p = product(kernel)
    if p is None or len(p.sites) != 1 or len(p.axes) < 2:
        return None
    loads = [x for x in p.operands if isinstance(x, l.Load)]
    if len(loads) < len(p.operands):
        return None
    free, (first, second) = frozenset(kernel.axes), p.factors(p.sites[0])

    def contiguous(mine: Any, other: Any) -> list[Any]:
        side = [x for x in loads if x.free & free == mine.free & free]
        own = [a for a in kernel.axes if a in mine.free - other.free]
        return [a for a in own if all(along(x, a) and dimension(x, a) is not None for x in side)]

    rows, columns = contiguous(first, second), contiguous(second, first)
    if len(rows) != 1 or len(columns) != 1:
        return None
    channels = [a for a in kernel.axes if a in (*rows, *columns)]
    others = [a for a in kernel.axes if a not in channels]
    runs = {a: _run(loads, a) for a in p.axes}
    depth = max(p.axes, key=lambda a: (runs[a], runs[a] == a.extent, a.extent))
    if runs[depth] < LEAST:
        return None
    rest = sorted((a for a in p.axes if a is not depth), key=lambda a: a.extent)
    if math.prod(a.extent for a in others) > math.prod(a.extent for a in rest):  # as of a convolution: these are points
        return None
    number = {a: k for k, a in enumerate(p.axes)}
    run = runs[depth]
    if run < min(STEP, depth.extent) and depth.extent % run == 0:
        return found(_cut(kernel, number[depth], run))
    return Taps(kernel, (*others, *channels), (*(number[a] for a in rest), number[depth]), rest[-1].extent)


def _run(loads: Sequence[l.Load], axis: Any) -> int:
    """How much of an axis of steps a step may take: it walks a dimension, by itself, so that beyond its end both
    factors are 0; or together with others, and then steps are to be whole.
    """
    extent: int = axis.extent
    if all(dimension(x, axis) is not None for x in loads):
        return min(extent, STEP)
    places = [[e for e in x.index if mentions(e, axis)] for x in loads]
    if any(len(each) != 1 or coefficient(each[0], axis) != 1 for each in places):
        return 0
    return next((n for n in (STEP, STEP // 2, STEP // 4) if extent % n == 0), 0)


def taps_apart(kernel: l.Kernel, pieces: int = 1) -> tuple[l.Kernel, ...]:
    """A sum of products over points under taps, with its axes in the order in which tiles take them; or, in several
    `pieces` of its longest axis of steps, a kernel of partial sums and one that adds them up.

    @loop
    def f(g: f32[16, 4, 6] @ (24, 1, 4), x: f32[16, 5, 6] @ (30, 1, 5)):
        with kernel('z', z=f32[4, 5, 3]):
            for a0 in free(4):
                for a1 in free(5):
                    for a2 in free(3):
                        for r0, r1 in reduce(16, 6):
                            in0 = g[r0, a0, r1]
                            in1 = x[r0, a1, r1 + a2 - 1] if r1 + a2 >= 1 and r1 + a2 < 7 else 0
                            v0 = mul(in0, in1)
                            acc0 <- sum(v0)
                        z[a0, a1, a2] = acc0
        return (z,)
    =>
    @loop
    def f(g: f32[16, 4, 6] @ (24, 1, 4), x: f32[16, 5, 6] @ (30, 1, 5)):
        with kernel('z', z=f32[4, 5, 3]):
            for a2 in free(3):
                for a0 in free(4):
                    for a1 in free(5):
                        for r0, r1 in reduce(6, 16):
                            in0 = g[r1, a0, r0]
                            in1 = x[r1, a1, r0 + a2 - 1] if r0 + a2 >= 1 and r0 + a2 < 7 else 0
                            v0 = mul(in0, in1)
                            acc0 <- sum(v0)
                        z[a0, a1, a2] = acc0
        return (z,)
    """
    taps = found(kernel)
    if taps is None:
        return (kernel,)
    if pieces == 1:
        return (_ordered(taps.kernel, taps.axes, taps.steps),)
    return cut_along(_ordered(taps.kernel, taps.axes, taps.steps), len(taps.steps) - 2, pieces)


def cut_along(kernel: l.Kernel, number: int, pieces: int) -> tuple[l.Kernel, l.Kernel]:
    """A kernel of one sum as two: partial sums over pieces of an axis of its steps, and one that adds them up."""
    steps = range(len(_sum(kernel).axes))
    order = [*(k for k in steps if k != number), number]
    whole = _ordered(kernel, kernel.axes, order)
    part, rest = split(whole, [_sum(whole)], pieces)
    return _ordered(part, part.axes, [order.index(k) for k in steps]), rest


def _sum(kernel: l.Kernel) -> l.Reduce:
    """The one sum of a kernel, which a piece of it may have too few terms of to be a product."""
    (only,) = accumulators(kernel).values()
    assert isinstance(only, l.Reduce)
    return only


def _cut(kernel: l.Kernel, number: int, run: int) -> l.Kernel:
    """A kernel of one sum, an axis of whose steps is two: of runs of so many, and of those in a run."""
    old = _sum(kernel)
    inner, args = l.open_binder(old)
    axis = inner[number]
    runs, each = Var(l.fresh_name(), axis.extent // run), Var(l.fresh_name(), run)
    moved = tuple(substitute(x, {axis: runs * run + each}) for x in args)
    new = l.Reduce.make(old.monoid, (*inner[:number], runs, each, *inner[number + 1 :]), moved)
    return l.Kernel(kernel.name, kernel.axes, tuple(substitute(s, {old: new}) for s in kernel.stores), kernel.source)


def _ordered(kernel: l.Kernel, axes: Sequence[Any], steps: Sequence[int]) -> l.Kernel:
    """A kernel of one sum with its axes, and those of its steps, in another order."""
    old = _sum(kernel)
    inner, args = l.open_binder(old)
    new = l.Reduce.make(old.monoid, tuple(inner[k] for k in steps), tuple(args))
    return l.Kernel(kernel.name, tuple(axes), tuple(substitute(s, {old: new}) for s in kernel.stores), kernel.source)


@dataclass(frozen=True)
class Way:
    """Copies of factors and the kernel that reads them, those of its sum, the tile of the first of these, and
    nanoseconds of all by the model.
    """

    turned: tuple[l.Kernel, ...]
    kernels: tuple[l.Kernel, ...]
    product: Product
    plan: warpgroups.Plan
    pieces: int
    time: float

    def whole(self, gpu: Gpu) -> tuple[float, l.Kernel, Callable[[], Schedule]]:
        """What all of it takes, and the kernel that must be derived for that, with its schedule."""
        return self.time, self.kernels[0], partial(warpgroups.schedule, self.product, self.plan, gpu)


def _pieces(taps: Taps, gpu: Gpu) -> list[int]:
    """Into how many equal pieces the longest axis of steps may be cut."""
    *others, m, n = taps.axes
    blocks = math.prod(a.extent for a in others) * ceil(m.extent, ROWS) * ceil(n.extent, ROWS)
    return [1, *shares(taps.longest, blocks, gpu)]


def shares(extent: int, blocks: int, gpu: Gpu) -> list[int]:
    """Into how many equal pieces so many steps may be cut, so that tiles of 64 x 64, of which there are so many blocks,
    fill a quarter of a machine at least, and those of eight times as much fill it twice at most.
    """
    few, many = (x * gpu.processors / blocks for x in (1 / 4, 2 * 8))
    return [n for n in range(2, extent + 1) if extent % n == 0 and few <= n <= many]


def meeting(p: Product, gpu: Gpu) -> float:
    """Nanoseconds of storing the partial sums of a product and of adding them up."""
    has = gpu.warpgroups
    return has.part + has.states * results(p).points * 4 / gpu.cache if has is not None else math.inf


@remembered
def ways(kernel: l.Kernel, gpu: Gpu) -> tuple[Way, ...]:
    """The ways to run such a sum on instructions of warpgroups, best first; none where it is none."""
    turned = channels_beside(kernel)
    *copies, form = turned
    has, taps = gpu.warpgroups, found(form)
    if has is None or taps is None:
        return ()
    before = sum(copying(x, gpu) for x in copies)
    every: list[Way] = []
    for pieces in _pieces(taps, gpu):
        kernels = taps_apart(form, pieces)
        p = product(kernels[0])
        if p is None or warpgroups.instructions_for(p, gpu)[1]:
            continue
        together = meeting(p, gpu) if pieces > 1 else 0.0
        plans = [x for x in tiles.on_warpgroups(p, gpu) if x.pieces == 1][:MOST]
        every += [Way(turned, kernels, p, x, pieces, before + x.time + together) for x in plans]
    return tuple(sorted(every, key=lambda way: way.time))
