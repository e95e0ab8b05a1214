"""Sums of products over the points of images under the taps of a filter, as the gradient of a filter's weights, in
pieces of a few rows of one image. Each is a window, of which a thread takes several taps together, which share what it
loads: so it needs neither tiles, which few channels leave empty, nor an image for every tap, as where there are none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from terrazzo.collector import remembered
from terrazzo.hw.gpu import Gpu
from terrazzo.ir.contraction import contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr, Var
from terrazzo.ir.nest import accumulators
from terrazzo.ir.node import substitute, topological
from terrazzo.ir.types import Type, f32
from terrazzo.rules.loop_to_tile.reductions.split import axis_of_pieces, moved
from terrazzo.rules.loop_to_tile.walked import windows
from terrazzo.rules.loop_to_tile.walked.threads import ceil, size_of
from terrazzo.rules.loop_to_tile.walked.window_forms import SHALLOW, over_an_image
from terrazzo.rules.moves import slides

STEPS = (SHALLOW // 4, SHALLOW)
"""Products that a piece adds up, at most: the first few in float32, of which a thread that adds up many one after the
other rounds more off than threads that share them.
"""
RUNS = (14, 8)
"""Points of a row of an image that a thread takes at once, at most: they share what taps read."""


def in_pieces_of_images(kernel: l.Kernel, most: int, run: int) -> tuple[l.Kernel, ...]:
    """A sum of products over points under taps as two kernels: of sums over pieces of `most` points at most, the last
    axis of which goes in runs of so many; and what adds these up. `kernel` alone where it is no such sum.

    @loop
    def f(g: f32[32, 6, 8, 5], x: f32[32, 6, 8, 5]):
        with kernel('z', z=f32[5, 3]):
            for a0 in free(5):
                for a1 in free(3):
                    for r0, r1, r2 in reduce(32, 6, 8):
                        in0 = g[r0, r1, r2, a0]
                        in1 = x[r0, r1, r2 + a1 - 1, a0] if r2 + a1 >= 1 and r2 + a1 < 9 else 0
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    z[a0, a1] = acc0
        return (z,)
    =>
    @loop
    def f(g: f32[32, 6, 8, 5], x: f32[32, 6, 8, 5]):
        with kernel('z_part', z_part=f32[64, 3, 5]):
            for s in free(64):
                for a1 in free(3):
                    for a0 in free(5):
                        for r0, r1, r2 in reduce(3, 2, 4):
                            in0 = g[s // 2, r0 + (s % 2) * 3, r1 * 4 + r2, a0]
                            in1 = x[s // 2, r0 + (s % 2) * 3, r1 * 4 + r2 + a1 - 1, a0] if r1 * 4 + r2 + a1 >= 1 and r1 * 4 + r2 + a1 < 9 else 0
                            v0 = mul(in0, in1)
                            acc0 <- sum(v0)
                        z_part[s, a1, a0] = acc0
        with kernel('z', z=f32[5, 3]):
            for a0 in free(5):
                for a1 in free(3):
                    for r0 in reduce(64):
                        in0 = z_part[r0, a1, a0]
                        acc0 <- sum(in0)
                    z[a0, a1] = acc0
        return (z,)
    """  # noqa: E501
    if (found := _under_taps(kernel)) is None:
        return (kernel,)
    r, last = found
    inner, args = l.open_binder(r)
    order = [*(a for a in inner if a is not inner[last]), inner[last]]
    each = _each(order, most, run)
    counts = [ceil(size_of(a), each[a]) for a in order]
    part, piece = axis_of_pieces(kernel, math.prod(counts)), 1
    steps: list[Var] = []
    for a, count in zip(reversed(order), reversed(counts), strict=True):
        sizes = (each[a] // run, run) if a is inner[last] else (each[a],)
        walked = [Var(l.fresh_name(), n) for n in sizes if n > 1]
        at: IntExpr = part // piece % count
        for v, n in zip(walked, (n for n in sizes if n > 1), strict=True):
            at = at * n + v
        args = moved(r, args, a, at)
        steps = [*walked, *steps]
        piece *= count
    own = sorted((a for a in kernel.axes if a in r.free), key=lambda a: (not _meets(r, a), size_of(a)))
    place = l.Buffer(f"{kernel.name}_part", Type(r.dtype, (part.extent, *map(size_of, own))))
    store = l.Store(place, (part, *own), l.Reduce.make(r.monoid, tuple(steps), tuple(args)))
    every = Var(l.fresh_name(), part.extent)
    whole = l.Reduce.make(r.monoid, (every,), (l.Load.make(place, (every, *own), ()),))
    rest = tuple(substitute(s, {r: whole}) for s in kernel.stores)
    return (
        l.Kernel(place.name, (part, *own), (store,), kernel.source),
        l.Kernel(kernel.name, kernel.axes, rest, kernel.source),
    )


def _under_taps(kernel: l.Kernel) -> tuple[l.Reduce, int] | None:
    """The sum of a kernel that is one over an image, and which of its axes taps move along, the last one."""
    (r, *others) = accumulators(kernel).values() or (None,)
    if not isinstance(r, l.Reduce) or others or (c := contraction(r)) is None or len(c.terms) > 1:
        return None
    every = (*kernel.axes, *r.axes)
    if not all(isinstance(x, l.Load) for x in c.operands) or not all(isinstance(a.extent, int) for a in every):
        return None
    along = [k for k, a in enumerate(r.axes) if _meets(r, a)]
    return (r, along[-1]) if along and slides(r) and over_an_image(r, kernel.axes) else None


def _meets(r: l.Reduce, axis: Any) -> bool:
    """Whether an axis of a sum's steps, or of its points, meets one of the others where something is read."""
    places = [e for x in topological(r.args) if isinstance(x, l.Load) for e in x.index if isinstance(e, Expr)]
    mine = frozenset(r.axes)
    return any(axis in e.free and e.free & mine and e.free - mine for e in places)


def _each(order: Sequence[Any], most: int, run: int) -> dict[Any, int]:
    """How many steps along each axis are in a piece: runs of the last one, and whole rows of those before it."""
    *others, last = order
    runs = ceil(size_of(last), run)
    each = {last: ceil(runs, ceil(runs, max(most // run, 1))) * run}
    left = most // each[last] if each[last] >= size_of(last) else 1
    for a in reversed(others):
        each[a] = max((n for n in range(1, min(left, size_of(a)) + 1) if size_of(a) % n == 0), default=1)
        left = left // each[a] if each[a] == size_of(a) else 1
    return each


@dataclass(frozen=True)
class Pieces:
    """Such a sum: its pieces, what adds them up, the windows of the first, and nanoseconds of all by the model."""

    kernels: tuple[l.Kernel, l.Kernel]
    window: windows.Window
    time: float


def least(kernel: l.Kernel, gpu: Gpu) -> float:
    """Nanoseconds that CUDA cores take for its products at least; infinity where it is no such sum. Most sums over
    images have so many channels that this says enough.
    """
    if (under := _under_taps(kernel)) is None:
        return math.inf
    return 2 * math.prod(map(size_of, (*kernel.axes, *under[0].axes))) / gpu.fma


@remembered
def ways(kernel: l.Kernel, gpu: Gpu) -> tuple[Pieces, ...]:
    """The ways to run a sum so, best first; none where it is no such sum."""
    if (under := _under_taps(kernel)) is None:
        return ()
    r, last = under
    found: list[Pieces] = []
    every = STEPS[:1] if any(x.dtype is f32 for x in topological(r.args) if isinstance(x, l.Load)) else STEPS
    for run, most in product(_runs(size_of(r.axes[last])), every):
        part, rest = in_pieces_of_images(kernel, most, run)
        if (window := windows.window(part, gpu, True)) is not None:
            (place,) = part.writes
            meets = place.type.span / gpu.memory + gpu.launch
            found.append(Pieces((part, rest), window, window.time + meets))
    return tuple(sorted(found, key=lambda x: x.time))


def _runs(extent: int) -> list[int]:
    """Runs of points as which an axis may be walked, without a rest where that does not leave few."""
    longest = [min(most, extent) for most in RUNS]
    even = (max(n for n in range(1, most + 1) if extent % n == 0) for most in longest)
    return list(dict.fromkeys(n if 2 * n >= most else most for n, most in zip(even, longest, strict=True)))
