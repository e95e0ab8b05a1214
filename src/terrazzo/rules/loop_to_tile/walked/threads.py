"""Binding walked axes to threads: pointwise kernels, and reductions whose threads share a row or take columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from terrazzo.collector import remembered
from terrazzo.hw.gpu import Gpu
from terrazzo.ir.address import coefficient, evaluate, flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Bound, Expr, Loaded, Var, terms_of
from terrazzo.ir.node import per_node, substitute, topological
from terrazzo.ir.schedule import Factor, Schedule
from terrazzo.rules.access import WIDEST, before, wide
from terrazzo.rules.loop_to_tile.walked.cache_lines import said

WARP = 32
SECTOR = 32
"""Bytes that memory brings at least."""
THREADS = 2048
"""What a processor has room for."""
DEAR = 6.0
"""The cost of a term (in additions) from which on keeping it beats computing it again."""
KEPT = 32
"""Elements of one operand that a thread keeps in registers between two uses, at most."""


def pointwise(kernel: l.Kernel, gpu: Gpu, most: int = 8) -> Schedule:
    """One axis over the grid, warps, lanes and a vector of `most` elements at most. A block has one point of each
    further axis, or, where one warp takes the first axis and there are many such blocks, one of the longest for each of
    its warps.
    """
    if not kernel.axes:
        return Schedule(kernel.name, gpu.arch, ())
    free = [a for a in kernel.axes if a not in ordered(kernel)]
    if not free:
        return Schedule(kernel.name, gpu.arch, ())
    axis = _lanes_along(kernel, free, gpu)
    ragged, vector = (min(x, most) for x in _vector(kernel, axis, gpu))
    apart = vector > 1 and ragged == 1 and (_narrow(kernel, axis) or _gathers(kernel, axis, gpu))
    points = size_of(axis) // vector
    threads = 8 if points > 8 * WARP * gpu.processors else 4 if points > 4 * WARP else 1
    others = [a for a in free if a is not axis]
    beside = max(others, key=size_of, default=None)
    if threads > 1 or math.prod(map(size_of, others)) <= BLOCKS * gpu.processors or size_of(beside) < TOGETHER:
        beside = None
    lines = [(a.name, together(a, TOGETHER) if a is beside else grid(size_of(a))) for a in others]
    last = vector_at(vector, aligned=ragged > 1)
    inner = (*last, Factor("lane", WARP)) if apart else (Factor("lane", WARP), *last)
    own = (Factor("grid", ceil(size_of(axis), threads * WARP * vector)), *warps_of(threads), *inner)
    return Schedule(kernel.name, gpu.arch, (*lines, (axis.name, own)))


BLOCKS = 32
"""Of a processor, at once: more of a warp each would come and go."""
TOGETHER = 8
"""Warps of a block that have a point of another axis each."""


def together(axis: Any, warps: int) -> tuple[Factor, ...]:
    """An axis over the grid, of which every warp of a block has a point."""
    return Factor("grid", ceil(size_of(axis), warps)), Factor("warp", warps)


def walked(kernel: l.Kernel, gpu: Gpu) -> float:
    """Nanoseconds of a kernel without reductions under the schedule `pointwise`: what it moves, and the sectors that
    its warps touch. A warp has one point of each axis that lanes do not lie along, so all that is there is touched by
    every warp, whatever axes it knows.
    """
    axis = _lanes_along(kernel, kernel.axes, gpu)
    return gpu.launch + _touched(kernel, axis, gpu)


def _lanes_along(kernel: l.Kernel, free: Sequence[Any], gpu: Gpu) -> Any:
    """The axis under which warps touch fewest sectors, among those that memory is read or written along."""
    if len(free) == 1 or not all(isinstance(a.extent, int) for a in kernel.axes):
        return max(free, key=lambda a: (stride_one([kernel], a), size_of(a)))
    return min(free, key=lambda a: (_touched(kernel, a, gpu), not stride_one([kernel], a), -size_of(a)))


def _touched(kernel: l.Kernel, axis: Any, gpu: Gpu) -> float:
    """Nanoseconds for which warps whose lanes lie along an axis move sectors from and to the cache, or memory moves
    what they need.
    """
    _, vector = _vector(kernel, axis, gpu)
    warps = ceil(size_of(axis), WARP * vector) * math.prod(max(size_of(a), 1) for a in kernel.axes if a is not axis)
    accesses = {x for x in topological([s.value for s in kernel.stores]) if isinstance(x, l.Load)}
    accesses |= {l.Load(s.buffer, s.index) for s in kernel.stores}
    sizes = {x.buffer: math.prod(x.buffer.type.static_shape) * x.dtype.size for x in accesses}
    sectors = sum(_sectors(x, axis, WARP * vector) for x in accesses)
    found: float = max(sum(sizes.values()) / gpu.memory, SECTOR * sectors * warps / gpu.cache)
    return found


@remembered
def _sectors(x: l.Load, axis: Any, points: int) -> int:
    """Of how many sectors so many points of an axis are, from its first one on; each has its own where data says where
    they are.
    """
    points = min(points, size_of(axis))
    if axis not in x.free:
        return 1
    env: dict[Any, Any] = {**dict.fromkeys(x.free, 0), axis: np.arange(points)}
    for y in topological([i for i in x.index if isinstance(i, Expr)]):
        if isinstance(y, Loaded):
            env[y] = said(y, env)
    place = evaluate(flatten(x.index, x.buffer.type.element_strides), env)
    return len(np.unique(np.broadcast_to(place, (points,)) * x.dtype.size // SECTOR))


def _vector(kernel: l.Kernel, axis: Any, gpu: Gpu) -> tuple[int, int]:
    """How wide the vectors are of rows that begin anywhere, 1 for others, and how many elements a thread has."""
    ragged = ragged_vector(kernel.stores, axis) if vector_of(kernel.stores, axis) == 1 else 1
    return ragged, _width(kernel, axis, ragged, gpu)


def _narrow(kernel: l.Kernel, axis: Any) -> bool:
    """Whether what is stored side by side begins at no multiple of two elements: lanes lie side by side then, since
    nothing gathers what a thread stores in several pieces before it leaves the processor.
    """
    found = [l.Load(s.buffer, s.index) for s in kernel.stores]
    return all(step(x, axis) == 1 and vector_of([x], axis) == 1 for x in found)


def _gathers(kernel: l.Kernel, axis: Any, gpu: Gpu) -> bool:
    """Whether a point reads more places that data says than others along an axis, of more than is in a processor's
    cache: lanes lie side by side then, since places of neighbours are near each other, and none is there still when a
    thread comes to its next point.
    """
    near, far = len(kernel.stores), 0
    for x in topological([s.value for s in kernel.stores]):
        if isinstance(x, l.Load) and axis in x.free:
            times = math.prod(size_of(a) for a in x.free if isinstance(a, Bound))
            by_data = any(isinstance(y, Loaded) and axis in y.free for y in topological([x]))
            if by_data and x.buffer.type.span > gpu.shared:
                far += times
            else:
                near += times
    return far > near


def plain(kernel: l.Kernel, gpu: Gpu) -> Schedule:
    """A thread computes a point at a time, reductions and all. Nothing is shared or kept, so nothing can run out."""
    free = [a for a in kernel.axes if a not in ordered(kernel)]
    if not free:
        return Schedule(kernel.name, gpu.arch, ())
    axis = _lanes_along(kernel, free, gpu)
    lines = [(a.name, grid(size_of(a))) for a in free if a is not axis]
    return Schedule(kernel.name, gpu.arch, (*lines, (axis.name, grid(ceil(size_of(axis), WARP), ("lane", WARP)))))


def _width(kernel: l.Kernel, axis: Any, ragged: int, gpu: Gpu) -> int:
    """Elements for a thread of a pointwise kernel, the widest vector at most (or `ragged`, where there is none).

    A thread waits once for all that it loads. So more threads with less each, 16 bytes of all operands, are done
    sooner, until they fill the processors; and few points go to many processors.
    """
    vector = max(_as_stored(kernel, axis, vector_of(kernel.stores, axis)), ragged)
    if any(s.buffer.type.dtype.size == WIDEST // 2 for s in kernel.stores):  # lanes that store more leave half sectors
        vector = min(vector, 2)
    loads = {
        x for x in topological([s.value for s in kernel.stores]) if isinstance(x, l.Load) and stride_one([x], axis)
    }
    size, wave = sum(x.dtype.size for x in loads), gpu.processors * THREADS
    count = math.prod(size_of(a) for a in kernel.axes if a not in ordered(kernel))
    while vector > 1 and count // vector < (wave if vector * size > WIDEST else wave // 12):
        vector //= 2
    return vector


def _as_stored(kernel: l.Kernel, axis: Any, vector: int) -> int:
    """The widest vector up to this one in which all that is stored lies, if there is one: rows that end amid one, with
    room behind them, are stored element by element in wider ones, at places that are found by dividing.
    """
    stores = [l.Load(s.buffer, s.index) for s in kernel.stores if axis in s.free]

    def fits(size: int) -> bool:
        q, j = Var("$q", ceil(size_of(axis), size)), Var("$j", size)
        return all(wide(substitute(x, {axis: q * size + j}), j, size) for x in stores)

    known = size_of(axis) % vector == 0 and vector > 1
    return next((n for n in (8, 4, 2) if n <= vector and fits(n)), vector) if known and stores else vector


def grid(size: int, *inner: tuple[str, int]) -> tuple[Factor, ...]:
    return (Factor("grid", max(size, 1)), *(Factor(level, k) for level, k in inner))


def warps_of(count: int) -> tuple[Factor, ...]:
    return (Factor("warp", count),) if count > 1 else ()


def lanes_of(count: int) -> tuple[Factor, ...]:
    return (Factor("lane", count),) if count > 1 else ()


def vector_at(count: int, aligned: bool = False) -> tuple[Factor, ...]:
    return (Factor("reg", count, (("aligned", True),) if aligned else ()),) if count > 1 else ()


def ordered(kernel: l.Kernel) -> set[Any]:
    """The axes that scans run along: nothing but a serial loop takes their steps in order."""
    return {x.at for x in topological([s.value for s in kernel.stores]) if isinstance(x, l.Scan)}


def stride_one(terms: Sequence[Any], axis: Any) -> bool:
    """Whether memory is read or written along an axis."""
    for x in topological(terms):
        if isinstance(x, l.Load | l.Store) and coefficient(flatten(x.index, x.buffer.type.element_strides), axis) == 1:
            return True
    return False


def step(access: Any, axis: Any) -> int | None:
    """How far apart in memory an access is at the first two points of an axis, the others at theirs; None where data
    says where it is.
    """
    known = _steps(access)
    if axis not in known:
        known[axis] = _step(access, axis)
    return known[axis]


@per_node
def _steps(access: Any) -> dict[Any, int | None]:
    """What `step` found of an access: places that data says are long to take apart, and are asked after often."""
    return {}


def _step(access: Any, axis: Any) -> int | None:
    far: Any = 0
    first: dict[Any, Any] = dict.fromkeys(access.free, 0)
    for factors, count in terms_of(flatten(access.index, access.buffer.type.element_strides)).items():
        along = [x for x in factors if axis in x.free]  # a term without the axis is the same at both points
        if along == [axis] == [*factors]:
            far += count
        elif along:
            term = math.prod(factors, start=count)
            far += substitute(term, {**first, axis: 1}) - substitute(term, first)
    return far if isinstance(far, int) else None


def vector_of(terms: Sequence[Any], axis: Any) -> int:
    """The widest vector along an axis for which some access is one: 16 bytes of the narrowest type, at most 8
    elements.
    """
    accesses = [x for x in topological(terms) if isinstance(x, l.Load | l.Store) and axis in x.free]
    if not accesses:
        return 1
    narrowest = min(x.buffer.type.dtype.size for x in accesses)
    for size in (8, 4, 2):
        if size * narrowest <= WIDEST and size_of(axis) % size == 0:
            q, j = Var("$q", max(size_of(axis) // size, 1)), Var("$j", size)
            moved = [
                substitute(l.Load(x.buffer, x.index, getattr(x, "inside", ())), {axis: q * size + j}) for x in accesses
            ]
            if any(wide(x, j, size) for x in moved):
                return size
    return 1


WORD = 4
"""Bytes of which a line of the cache has one for every lane."""
LONG = 8
"""Vectors for each lane of a warp that a row has at least, where its ends are taken element by element."""


def ragged_vector(terms: Sequence[Any], axis: Any) -> int:
    """The widest vector along an axis whose rows begin and end anywhere, as `vector_of`, where what is no whole
    vector is taken element by element; 1 for short rows.

    Where something along the axis begins elsewhere than the rest, as the weight of a norm does, it is taken element by
    element everywhere, and vectors are words: lanes are as far apart in each of these accesses as vectors are long.
    """
    every = [x for x in topological(terms) if isinstance(x, l.Load | l.Store) and axis in x.free]
    accesses = [x for x in every if coefficient(flatten(x.index, x.buffer.type.element_strides), axis) == 1]
    if not accesses or not all(isinstance(a.extent, int) for a in (axis, *{v for x in every for v in x.free})):
        return 1
    narrowest = min(x.buffer.type.dtype.size for x in accesses)
    widest = min(8, WIDEST // narrowest)
    if size_of(axis) < LONG * WARP * widest:
        return 1
    for size in (widest, max(1, WORD // narrowest)):
        q, j = Var("$q", ceil(size_of(axis), size)), Var("$j", size)
        at = q * size + j + before(accesses, axis, size)
        moved = [substitute(l.Load(x.buffer, x.index, getattr(x, "inside", ())), {axis: at}) for x in accesses]
        if all(wide(x, j, size) for x in moved):
            return size
    return size if any(wide(x, j, size) for x in moved) else 1


def ceil(a: int, b: int) -> int:
    """a / b, rounded up, and at least 1: what is empty has one block, whose threads find nothing to do."""
    found = -(-a // b)
    return found if found > 0 else 1


def size_of(axis: Any) -> int:
    found: int = axis.extent
    return found


POWERS = (32, 16, 8, 4, 2, 1)
SPARE = 1.15
"""How many times as many threads there may be as have a point."""


def divided(threads: int, axes: Iterable[Any], parts: Mapping[Any, int], bound: dict[Any, int]) -> int:
    """Bind so many threads to axes, each as many as it has use for, besides those `bound`; how many are left."""
    for a in axes:
        most = SPARE * waste(parts[a], bound[a])
        k = next(k for k in POWERS if k == 1 or (k <= threads and waste(parts[a], bound[a] * k) <= most))
        bound[a], threads = bound[a] * k, threads // k
    return threads


def waste(points: int, threads: int) -> float:
    """How many times as many threads there are as have a point; 1 where there are no points."""
    return -(-points // threads) * threads / points if points else 1.0
