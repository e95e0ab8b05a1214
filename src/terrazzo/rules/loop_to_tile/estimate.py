"""What the model expects of a kernel, and the least any kernel for it could take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

from terrazzo.collector import remembered
from terrazzo.hw.gpu import Gpu
from terrazzo.ir import nest as n
from terrazzo.ir.contraction import nested_contraction
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import bounds
from terrazzo.ir.node import Node, topological
from terrazzo.ir.placeless import placeless
from terrazzo.ir.schedule import Schedule
from terrazzo.ir.sites import Product, product
from terrazzo.ir.types import f64
from terrazzo.rules.loop_to_tile.chains import chains
from terrazzo.rules.loop_to_tile.chains.chain import Chain
from terrazzo.rules.loop_to_tile.products import boxes, taps, tiles, warpgroups
from terrazzo.rules.loop_to_tile.products.apart import products_apart
from terrazzo.rules.loop_to_tile.products.forms import columns_merged, for_warpgroups, merged
from terrazzo.rules.loop_to_tile.products.image_forms import boxed
from terrazzo.rules.loop_to_tile.products.product_candidates import shared
from terrazzo.rules.loop_to_tile.products.stored import stored
from terrazzo.rules.loop_to_tile.reductions import reduced, scans, scans_in_pieces, under_taps
from terrazzo.rules.loop_to_tile.walked import windows
from terrazzo.rules.loop_to_tile.walked.window_forms import multiplied_by_threads
from terrazzo.rules.tile.reach import share
from terrazzo.rules.tile_to_kernel.lower import derived

CHAINED, BETWEEN, BESIDE = 0.845, 36, 0.3
"""A chain of products: what of the instructions' rate it reaches, how many operations of CUDA cores a number that lies
between the products takes as long as, and how much of the shorter of both is not hidden behind the longer one. Fitted
to attention with heads of 64, 128 and 256 on an H200 (22 November 2026): within 15 % at 2048 tokens and more.
"""

OPERATION = 3.6
"""The same for an operation on such a number, where they are more than those of a softmax: with 8192 x 512 of tanh
between products on warps, which have 128 rows a block, a kernel took 24 us, and 19 by this (H200, November 2026).
"""

BOXED = 1.1
"""How much longer a convolution in boxes may take than its model says. Of 3x3 on 32 images of 64 x 56 x 56, 128 x 28 x
28, 256 x 14 x 14 and 512 x 7 x 7 it says 21.3, 17.1, 17.3 and 18.9 us; they took 22.2, 16.9, 15.5 and 18.1 with a bias
and a ReLU (H200, 22 November 2026).
"""


@dataclass(frozen=True)
class Estimate:
    """Nanoseconds: by the model, and by the data sheet's rates; `bound` says which of them it is, memory or
    arithmetic.
    """

    time: float
    least: float
    bound: str


def estimate(kernel: l.Kernel, gpu: Gpu) -> Estimate:
    """For a kernel: the bytes it moves, and its scalar operations (a multiply-add is two), in the best way there is."""
    memory, fma, tensor = gpu.roof
    operations, touched = work(kernel)
    moved = sum(count * b.type.dtype.size for b, count in touched.items())
    p = product(kernel)
    plans: list[tiles.Plan | boxes.Plan] = [x for x in tiles.plans(p, gpu) if x.pieces == 1] if p else []
    if p is not None and (image := boxes.moved(columns_merged(kernel, p))[0]) is not None:
        plans += boxes.plans(image, gpu)
    plans += reduced.plans(kernel, gpu)[:1]
    plan = min(plans, key=lambda x: x.time, default=None)
    both = chains.formed(kernel) if p is None else None
    found = windows.window(kernel, gpu) if multiplied_by_threads(kernel) or (p is None and plan is None) else None
    if found is not None and plan is not None and found.time < plan.time:
        plan = None
    if both is not None and (rate := chains.rate(both, gpu)):
        kernel = both.kernel
        points = math.prod(a.extent for a in kernel.axes) // both.columns.extent * both.steps.extent * both.times
        points = int(points * _visited(kernel, both))
        deep = sum(d.extent for d in both.depths) + len(both.outside) * both.columns.extent
        operations = 2 * points * deep * both.terms
        products = operations / (CHAINED * rate)
        between = points * max(BETWEEN, OPERATION * _between(kernel, both)) / gpu.fma
        work_time = max(products, between) + BESIDE * min(products, between)
        brought = chains.carried(both, gpu) * _visited(kernel, both) / gpu.cache
        time = max(moved / gpu.memory, brought, work_time * chains.idle(both, gpu)) + gpu.launch
        if both.terms > 1:  # whose steps are long, and have few slots
            time = max(time, chains.fastest(kernel, gpu) or 0.0)
    elif plan is not None:
        time = plan.time
    elif found is not None:
        time = found.time
    else:
        time = by_threads(kernel, gpu)
    if p is not None and plan is not None and plan.instruction:  # what its factors are computed by comes once for each
        arithmetic = _multiplied(kernel, p) / tensor
    else:
        arithmetic = operations / (tensor if both is not None else fma)
    traffic = moved / memory
    return Estimate(time, max(traffic, arithmetic), "memory" if traffic >= arithmetic else "arithmetic")


def roof(kernel: l.Kernel, gpu: Gpu) -> float:
    """Nanoseconds that no kernel is expected to take less than without tensor cores, by the data sheet's rates: what
    it moves, and what it multiplies and adds up. It is found in no time, where what is `expected` takes long to find.
    """
    return _busy(kernel, gpu, gpu.roof[1]) + gpu.launch


def least(kernel: l.Kernel, gpu: Gpu) -> float:
    """The same with tensor cores, without a launch."""
    return _busy(kernel, gpu, gpu.roof[2])


@remembered
def _busy(kernel: l.Kernel, gpu: Gpu, rate: float) -> float:
    """What memory takes for what a kernel moves, or what a product takes at a rate of operations."""
    moved = sum(count * b.type.dtype.size for b, count in work(kernel)[1].items())
    p = product(kernel)
    return max(moved / gpu.roof[0], _multiplied(kernel, p) / rate if p is not None else 0.0)


def _multiplied(kernel: l.Kernel, p: Product) -> int:
    """Operations of the products alone, a multiply-add being two."""
    points: int = math.prod(a.extent for a in (*kernel.axes, *p.axes))
    return 2 * points * sum(len(c.terms) for c in p.sites)


def by_threads(kernel: l.Kernel, gpu: Gpu) -> float:
    """Nanoseconds of a kernel whose threads load and compute what each of them needs, without tiles."""
    operations, touched = work(kernel)
    moved = sum(count * b.type.dtype.size for b, count in touched.items())
    computed = max(operations, _in_double(kernel)) / gpu.fma
    return max(moved / gpu.memory, computed, _loaded(kernel) / gpu.cache, scans.price(kernel, gpu)) + gpu.launch


def _visited(kernel: l.Kernel, found: Chain) -> float:
    """How much of its steps a chain visits: not those that a mask hides."""
    outer: Any = n.accumulators(kernel)[found.outer]
    c = nested_contraction(outer)
    return share(c, found.rows) if c is not None else 1.0


def _between(kernel: l.Kernel, found: Chain) -> float:
    """Operations on a number that lies between the products, conversions aside."""
    sums = n.accumulators(kernel)
    made: set[Node] = {sums[name] for name in found.sums}
    total = 0.0
    for x in topological([sums[found.outer]]):
        if isinstance(x, l.Apply) and any(y in made for y in x.args):
            made.add(x)
            total += 0.0 if is_cast(x.fn) else x.fn.cost
    return total


def expected(steps: Iterable[l.Kernel | l.Call], gpu: Gpu) -> float:
    """What the kernels among the steps take together, before schedules are chosen, in nanoseconds."""
    return sum(_expected(placeless(s), gpu) for s in steps if isinstance(s, l.Kernel))


@remembered
def _expected(kernel: l.Kernel, gpu: Gpu) -> float:
    whole = in_one_piece(kernel, gpu)
    pieces = under_taps.ways(kernel, gpu) if under_taps.least(kernel, gpu) < whole else ()
    scanned = (expected(parts, gpu) for parts in scans_in_pieces.ways(kernel, gpu).values())
    return min((whole, *(x.time for x in pieces[:1]), *scanned))


def in_one_piece(kernel: l.Kernel, gpu: Gpu) -> float:
    """What a kernel takes, with products in pieces of their steps; but no sum over images is cut for windows, and no
    scan.
    """
    found = _reduced(kernel, gpu) or _tiled(kernel, gpu)
    if found is not None:
        return found
    if product(kernel) is None:
        return estimate(kernel, gpu).time
    # One product that no tile can be derived of is left to threads; of several, each has tiles.
    each = products_apart(kernel)
    return sum(_expected(x, gpu) for x in each) if len(each) > 1 else by_threads(kernel, gpu)


def expected_below(steps: Iterable[l.Kernel | l.Call], gpu: Gpu, enough: float) -> tuple[float, str]:
    """What the kernels among the steps take together, in nanoseconds; or, where that is less than `enough`, what they
    take " at most": the best way that a product has takes several times as long to find as a good one.
    """
    kernels = [placeless(s) for s in steps if isinstance(s, l.Kernel)]
    found = sum(_in_a_way(x, gpu) for x in kernels) if enough > 0 else math.inf
    return (found, " at most") if found < enough else (expected(kernels, gpu), "")


def _in_a_way(kernel: l.Kernel, gpu: Gpu) -> float:
    """What a kernel takes at most: in the best tiles of warpgroups that can be derived, or else in boxes."""
    p = product(kernel)
    if p is None or _reduced(kernel, gpu) is not None:
        return _expected(kernel, gpu)
    whole = product(merged(kernel, p, gpu).kernel) or p
    plan = next((x for x in warpgroups.plans(whole, gpu) if x.pieces == 1), None)
    tiled = (plan.time, whole.kernel, partial(tiles.schedule, whole, plan, gpu)) if plan else None
    ways: Iterable[Way] = [tiled] if tiled else _in_boxes(kernel, gpu)
    return next((time for time, form, chosen in ways if _derives(form, chosen(), gpu)), math.inf)


def _reduced(kernel: l.Kernel, gpu: Gpu) -> float | None:
    """What a product takes whose results are reduced along its columns, with the meeting of states."""
    for way in reduced.ways(kernel, gpu):
        if _derives(way.part, way.schedule, gpu):
            return way.plan.time + (_expected(way.rest, gpu) if way.rest is not None else 0.0)
    return None


def _tiled(kernel: l.Kernel, gpu: Gpu) -> float | None:
    """What a product takes in the best tiles. Those of warpgroups count if the best of them can be derived."""
    if (p := product(kernel)) is None:
        return None
    as_it_is, p = p, product(merged(kernel, p, gpu).kernel) or p
    found = _in_tiles(p, gpu)
    if (other := next(iter(for_warpgroups(kernel, gpu)), None)) is not None and other.kernel is not p.kernel:
        found += _in_tiles(product(other.kernel) or p, gpu)  # tiles along digits of its axes, as of pixels
    if not found and p is not as_it_is:
        found = _in_tiles(as_it_is, gpu)
    if multiplied_by_threads(kernel) and (window := windows.window(kernel, gpu)) is not None:
        found.append(window.time)
    least = min(found, default=math.inf)
    ways = [*_by_taps(kernel, gpu), *_in_shares(kernel, gpu), *_in_boxes(kernel, gpu), *_stored(p.kernel, gpu)]
    for time, form, chosen in sorted(ways, key=lambda way: way[0]):
        if time >= least:  # to derive kernels takes long: those that are slower do not matter
            break
        if _derives(form, chosen(), gpu):
            return time
    return least if least < math.inf else None


def _in_tiles(p: Product, gpu: Gpu) -> list[float]:
    """What a product takes in each of its tiles, those of warpgroups but for the ones before the first that can be
    derived: the best may need more registers than there are.
    """
    whole = [plan for plan in warpgroups.plans(p, gpu) if plan.pieces == 1][: tiles.MOST]
    refused = list(takewhile(lambda x: not _derives(p.kernel, tiles.schedule(p, x, gpu), gpu), whole))
    none, tried = len(refused) == len(whole), {(x.tile, x.instruction) for x in refused}
    mine = (x for x in tiles.plans(p, gpu) if not none or not isinstance(x, warpgroups.Plan))
    return [x.time for x in mine if (x.tile, x.instruction) not in tried]


Way = tuple[float, l.Kernel, Callable[[], Schedule]]
"""What a product takes if it can be derived: nanoseconds, a kernel and its schedule."""


def _stored(kernel: l.Kernel, gpu: Gpu) -> Iterator[Way]:
    """A product whose operands are stored first."""
    for way in stored(kernel, gpu):
        for plan in way.plans(gpu)[:1]:
            yield plan.time + way.before(gpu), way.form, partial(tiles.schedule, way.product, plan, gpu)


def _by_taps(kernel: l.Kernel, gpu: Gpu) -> Iterator[Way]:
    """A sum over points under taps, a product for each tap."""
    yield from (way.whole(gpu) for way in taps.ways(kernel, gpu)[:1])


def _in_shares(kernel: l.Kernel, gpu: Gpu) -> Iterator[Way]:
    """A product whose blocks share an axis of its steps that is not the last."""
    yield from (way.whole(gpu) for way in shared(kernel, gpu)[:1])


def _in_boxes(kernel: l.Kernel, gpu: Gpu) -> Iterator[Way]:
    """A product of what is read at moved places in the best of its boxes, copies of operands included."""
    p = product(kernel)
    for time, form, plan in (boxed(kernel, p, gpu) if p is not None else [])[:1]:
        yield BOXED * time, form.moved.kernel, partial(boxes.schedule, form.moved, plan, gpu)


def _derives(kernel: l.Kernel, schedule: Schedule, gpu: Gpu) -> bool:
    return isinstance(derived(kernel, schedule, gpu), k.Kernel)


def work(kernel: l.Kernel) -> tuple[int, dict[l.Buffer, int]]:
    """Scalar operations of a kernel, conversions aside, and how many elements of each buffer it touches."""
    operations = 0
    read: dict[l.Buffer, list[_Read]] = {}
    written: dict[l.Buffer, int] = {}

    def walk(body: Iterable[n.Statement], points: int) -> None:
        nonlocal operations
        for s in body:
            match s:
                case n.Let(term=l.Load() as load):
                    read.setdefault(load.buffer, []).append(_read(load, points))
                case n.Let(term=l.Apply() as f) if not is_cast(f.fn):
                    operations += points
                case n.Accumulate():
                    operations += points * len(s.args)
                case l.Store():
                    written[s.buffer] = max(written.get(s.buffer, 0), min(points, _size(s.buffer, points)))
                case n.Loop():
                    walk(s.body, points * _points(s.axes))

    walk(n.nest(kernel), 1)
    touched = {b: min(sum(x.points for x in found), _around(b, found)) for b, found in read.items()}
    return operations, {b: max(touched.get(b, 0), written.get(b, 0)) for b in dict.fromkeys((*touched, *written))}


@dataclass(frozen=True)
class _Read:
    """What a load reads of its buffer: so many elements at most, which lie between two places in each dimension."""

    points: int
    places: tuple[tuple[int, int], ...]


def _read(load: l.Load, points: int) -> _Read:
    """Of a load in a loop of so many points: what it does not know is there once for all of it."""
    places = []
    for e, size in zip(load.index, load.buffer.type.shape, strict=True):
        low, high = bounds(e)
        last = size - 1 if isinstance(size, int) else points
        places.append((max(low or 0, 0), min(last, high if high is not None else last)))
    return _Read(min(points, _points(load.free)), tuple(places))


def _around(buffer: l.Buffer, found: Sequence[_Read]) -> int:
    """Elements between the first and the last place that is read in each dimension."""
    ends = (tuple(zip(*along, strict=True)) for along in zip(*(x.places for x in found), strict=True))
    around: int = math.prod(max(high) - min(low) + 1 for low, high in ends)
    return min(around, _size(buffer, around))


def _size(buffer: l.Buffer, otherwise: int) -> int:
    """Elements of a buffer, where that is known."""
    return buffer.type.numel if isinstance(buffer.type.numel, int) else otherwise


def _points(axes: Iterable[Any]) -> int:
    """How many points axes have; an extent that is not known counts as 1."""
    return math.prod(a.extent for a in axes if isinstance(a.extent, int))


DOUBLE = 4.0
"""How many operations in float32 one in float64 is worth: erfinv of 33 M elements took 1650 us on an H200, i0 1182 us,
digamma 475 us (22 November 2026), and by this 342, 812 and 306.
"""


def _in_double(kernel: l.Kernel) -> float:
    """What its operations in float64 outside of loops over steps are worth in float32."""
    points = _points(kernel.axes)
    terms = [x for x in topological([s.value for s in kernel.stores]) if isinstance(x, l.Apply) and not is_cast(x.fn)]
    mine = [x for x in terms if x.free and x.free <= set(kernel.axes) and getattr(x.args[-1], "dtype", None) is f64]
    return DOUBLE * points * sum(x.fn.cost for x in mine)


def _loaded(kernel: l.Kernel) -> int:
    """Bytes that threads load, where each loads what it needs: more than are touched where many need the same."""
    total = 0

    def walk(body: Iterable[n.Statement], points: int) -> None:
        nonlocal total
        for s in body:
            if isinstance(s, n.Let) and isinstance(s.term, l.Load):
                total += points * s.term.buffer.type.dtype.size
            elif isinstance(s, n.Loop):
                walk(s.body, points * _points(s.axes))

    walk(n.nest(kernel), 1)
    return total
