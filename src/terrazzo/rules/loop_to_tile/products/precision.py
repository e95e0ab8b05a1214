"""Whether a product in float32 is faster as products of bfloat16 on the instructions of warpgroups."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial

from terrazzo.hw.gpu import Gpu
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.placeless import placeless
from terrazzo.ir.sites import Product, no_product, product
from terrazzo.rules.loop.precision.number_parts import SCALE
from terrazzo.rules.loop_to_tile.chains import chains
from terrazzo.rules.loop_to_tile.chains.chain import chain
from terrazzo.rules.loop_to_tile.estimate import BOXED, Way, expected, roof, work
from terrazzo.rules.loop_to_tile.products import boxes, taps, tiles, warpgroups
from terrazzo.rules.loop_to_tile.products.apart import products_apart
from terrazzo.rules.loop_to_tile.products.forms import columns_merged, for_warpgroups, merged
from terrazzo.rules.loop_to_tile.products.stored import stored
from terrazzo.rules.loop_to_tile.walked.threads import size_of
from terrazzo.rules.tile.complete import Refused
from terrazzo.rules.tile_to_kernel.lower import derived

DEPTH = 128
"""A tensor core truncates where CUDA cores round, which shows in short sums in which few products are large: of 128
log-normal ones the error is 1.4 times that of float32, of 64 it is 1.7 times that.
"""
ROWS = 64
"""An instruction's."""
FEW = 16
"""Rows, or columns, for which CUDA cores multiply as fast as memory brings the other factor: 16 x 3584 x 18944 took 103
us there and 107 in parts, and twice as many rows 134 and 104 (H200, 23 November 2026).
"""

HALVING = 1.2
"""How much longer it takes to store the scaled parts of factors than to move what they touch: rows are read, reduced
and stored one after the other. By the model 10.8, 7.6 and 6.0 us in one launch for 1024 and 640 rows of 3584 and 768 of
2048, which took 11.2, 7.6 and 5.6 (H100).
"""


def gain(
    before: Sequence[l.Kernel],
    after: Sequence[l.Kernel],
    gpu: Gpu,
    lost: Callable[[k.Kernel], str],
    best: float = -math.inf,
) -> tuple[float, str]:
    """The nanoseconds gained by `after`, the last of which multiplies parts, in place of `before`, if its last took no
    longer than its `roof`, which it does; or why they are not worth having. Where others gain `best`, and these do not
    gain more, just how much is not asked.
    """
    if chain(after[-1]) is not None:  # which stores no scores, and which nothing multiplies otherwise
        return 0.0, chains.refusal(after[-1], gpu, lost) if best < 0.0 else ""
    scaled = (p := product(after[-1])) is not None and p.rescued
    made = _halved(after[:-1], gpu) if scaled else expected(after[:-1], gpu)
    sure = expected(before[:-1], gpu) + roof(before[-1], gpu)  # what takes less is a gain, whatever `before` takes
    time, why = _in_parts(after[-1], gpu, lost, sure - max(best, 0.0) - made)
    if not why and sure <= time + made < sure - best:
        old = expected(before, gpu)
        time, why = _in_parts(after[-1], gpu, lost, min(old, sure - best) - made)
        if not why and time + made >= old:
            why = f"{(time + made) / 1000:.1f} us with parts made, {old / 1000:.1f} us as it is, by the model"
    return sure - time - made, why


def _halved(makers: Sequence[l.Kernel], gpu: Gpu) -> float:
    """What kernels take that store scaled parts."""
    moved = sum(count * b.type.dtype.size for x in makers for b, count in work(x)[1].items())
    return HALVING * (moved / gpu.memory + len(makers) * gpu.launch)


def no_gain(kernel: l.Kernel, count: int, gpu: Gpu) -> str:
    """Why a kernel is not worth having as products of so many parts, whichever are stored: found before any is written
    down, since most small products of a long graph are none. Nothing where that is to be seen.
    """
    if "wgmma" not in gpu.features:
        return f"parts are multiplied by wgmma, and the target is {gpu.arch}"
    if chain(kernel) is not None or (p := product(kernel)) is None:
        return ""
    a, b = p.factors(p.sites[0])
    sides = a.free - b.free, b.free - a.free
    rows, columns = (math.prod(size_of(x) for x in kernel.axes if x in own) for own in sides)
    return _few(rows, columns) or _short(p, SCALE ** (1 - count))


def _few(rows: int, columns: int) -> str:
    """Why so many results, of all axes that one factor alone knows, are too few; or nothing."""
    if max(rows, columns) < ROWS:
        return f"{rows} x {columns} results fill no tile of {ROWS} rows"
    return f"{rows} x {columns} results wait for memory on CUDA cores too" if min(rows, columns) <= FEW else ""


def _short(p: Product, least: float) -> str:
    """Why sums are too short of which the smallest products are scaled so; or nothing."""
    depth = math.prod(map(size_of, p.axes))
    few = f"it sums {depth} products, and CUDA cores are as exact where there are fewer than {DEPTH}"
    return few if depth < DEPTH and least <= SCALE**-2 else ""


def _in_parts(kernel: l.Kernel, gpu: Gpu, lost: Callable[[k.Kernel], str], most: float) -> tuple[float, str]:
    """What a product of parts takes on warpgroups; or why it is none that they take. Whether a kernel can be derived is
    asked only where it takes less than `most` nanoseconds.
    """
    if (p := product(kernel)) is None:
        return math.inf, no_product(kernel) or "it is no product"
    whole = product(merged(kernel, p, gpu).kernel) or p
    if why := _few(whole.m.extent, whole.n.extent) or _short(whole, min(min(c.scales) for c in whole.sites)):
        return math.inf, why
    time, why = _multiplied(kernel, gpu, lost, most)
    if len(each := products_apart(kernel)) > 1:  # fewer parts of more products fit in a tile together
        once = cache(lambda x: _multiplied(x, gpu, lost, most)[0])  # those of a sum are alike
        if (apart := sum(once(placeless(x)) for x in each)) < time:
            time, why = apart, ""
    return time, why


def _multiplied(kernel: l.Kernel, gpu: Gpu, lost: Callable[[k.Kernel], str], most: float) -> tuple[float, str]:
    """What a product takes on warpgroups, as it is or with one for each tap, or, where it has one part of each factor,
    after these were stored otherwise, such as in patches; or why it does not run there.
    """
    tapped, refused = _built((way.whole(gpu) for way in taps.ways(kernel, gpu)), gpu, lost, most, "")
    whole, why = _as_one(kernel, gpu, lost, min(most, tapped))
    again, _ = _built(_after_stores(kernel, gpu), gpu, lost, min(most, tapped, whole), "")
    best = min(tapped, whole, again)
    return (whole, why or refused) if best == whole else (best, "")


def _after_stores(kernel: l.Kernel, gpu: Gpu) -> list[Way]:
    """The plans of a product whose operands are stored first, best first."""
    if (p := product(kernel)) is None or len(p.sites) > 1 or len(p.sites[0].terms) > 1:
        return []
    ways = [(way, x) for way in stored(merged(kernel, p, gpu).kernel, gpu) for x in way.plans(gpu)[: tiles.MOST]]
    found = [(x.time + way.before(gpu), way.form, partial(warpgroups.schedule, way.product, x, gpu)) for way, x in ways]
    return sorted(found, key=lambda x: x[0])


def _as_one(kernel: l.Kernel, gpu: Gpu, lost: Callable[[k.Kernel], str], most: float) -> tuple[float, str]:
    """What a product takes on warpgroups as it is; or why it does not run there."""
    forms = [x for form in for_warpgroups(kernel, gpu) if (x := product(form.kernel)) is not None]
    if not forms:
        image, why = boxes.moved(columns_merged(kernel, p) if (p := product(kernel)) else kernel)
        if image is not None:
            plans = boxes.plans(image, gpu)
            boxed = ((BOXED * x.time, image.kernel, partial(boxes.schedule, image, x, gpu)) for x in plans)
            return _built(boxed, gpu, lost, most, "no box of it is filled by half")
        return math.inf, why or (warpgroups.instructions_for(p, gpu)[1] if p else no_product(kernel))
    return _built(_in_tiles(forms, gpu), gpu, lost, most, "no tile of it is filled by half")


def _in_tiles(forms: Sequence[Product], gpu: Gpu) -> Iterator[Way]:
    """The plans of products in one piece, best first. Those in several, which can be built if it can, count as its."""
    for p in forms:
        plans = warpgroups.plans(p, gpu)
        for plan in [x for x in plans if x.pieces == 1][: tiles.MOST]:
            time = min(x.time for x in plans if x is plan or x.pieces > 1)
            yield time, p.kernel, partial(warpgroups.schedule, p, plan, gpu)


def _built(ways: Iterable[Way], gpu: Gpu, lost: Callable[[k.Kernel], str], most: float, why: str) -> tuple[float, str]:
    """What the first way takes whose kernel can be derived and was not lost, or that takes `most` nanoseconds or more;
    or why there is none.
    """
    for time, form, chosen in ways:
        if time >= most:
            return time, ""
        made = derived(form, chosen(), gpu)
        why = made.reason if isinstance(made, Refused) else lost(made)
        if not why:
            return time, ""
    return math.inf, why
