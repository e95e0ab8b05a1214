"""Binding walked axes to threads: pointwise kernels, and reductions whose threads share a row or take columns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from terrazzo.hw.gpu import Gpu
from terrazzo.ir import nest as n
from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Var
from terrazzo.ir.node import substitute, topological
from terrazzo.ir.schedule import Factor, Like, Operand, Schedule, Site
from terrazzo.rules.access import WIDEST, wide
from terrazzo.rules.tile.draft import axis_name

WARP = 32
THREADS = 2048
"""What a processor has room for."""
DEAR = 6.0
"""The cost of a term (in additions) from which on keeping it beats computing it again."""
KEPT = 32
"""Elements of one operand that a thread keeps in registers between two uses, at most."""


def pointwise(kernel: l.Kernel, gpu: Gpu) -> Schedule:
    """One axis over the grid, warps, lanes and a vector; further axes are walked."""
    if not kernel.axes:
        return Schedule(kernel.name, gpu.arch, ())
    free = [a for a in kernel.axes if a not in _ordered(kernel)]
    if not free:
        return Schedule(kernel.name, gpu.arch, ())
    axis = max(free, key=lambda a: (stride_one([kernel], a), _size(a)))
    vector = _width(kernel, axis, gpu)
    points = _size(axis) // vector
    threads = 8 if points > 8 * WARP * gpu.processors else 4 if points > 4 * WARP else 1
    lines = [(a.name, grid(_size(a))) for a in free if a is not axis]
    size = threads * WARP * vector
    own = (Factor("grid", ceil(_size(axis), size)), *_warps(threads), Factor("lane", WARP), *_vector(vector))
    return Schedule(kernel.name, gpu.arch, (*lines, (axis.name, own)))


def plain(kernel: l.Kernel, gpu: Gpu) -> Schedule:
    """A thread computes a point at a time, reductions and all. Nothing is shared or kept, so nothing can run out."""
    free = [a for a in kernel.axes if a not in _ordered(kernel)]
    if not free:
        return Schedule(kernel.name, gpu.arch, ())
    axis = max(free, key=lambda a: (stride_one([kernel], a), _size(a)))
    lines = [(a.name, grid(_size(a))) for a in free if a is not axis]
    return Schedule(kernel.name, gpu.arch, (*lines, (axis.name, grid(ceil(_size(axis), WARP), ("lane", WARP)))))


def _width(kernel: l.Kernel, axis: Any, gpu: Gpu) -> int:
    """Elements for a thread of a pointwise kernel, the widest vector at most.

    A thread waits once for all that it loads. So more threads with less each, 16 bytes of all operands, are done
    sooner, until there are many waves of them; and few points go to many processors.
    """
    vector = vector_of(kernel.stores, axis)
    loads = {
        x for x in topological([s.value for s in kernel.stores]) if isinstance(x, l.Load) and stride_one([x], axis)
    }
    size, wave = sum(x.dtype.size for x in loads), gpu.processors * THREADS
    while vector > 1 and _size(axis) // vector < (4 * wave if vector * size > WIDEST else wave // 12):
        vector //= 2
    return vector


def reduction(kernel: l.Kernel, gpu: Gpu, most: int = 32) -> Schedule:
    """Rows over the grid; the threads of a block (of `most` warps at most), or of a warp for short rows, share each
    reduction of a row and what is stored of it.

    Where memory runs along a free axis instead, lanes take its columns and warps share the reduction.
    """
    top = _outermost(kernel)
    ordered = _ordered(kernel)
    rows = _rows(kernel, top)
    top = [
        r for r in top if r.free <= frozenset(rows)
    ]  # others lie in loops that threads share, so each thread computes its own
    if not top:
        return pointwise(kernel, gpu)
    rows = [a for a in rows if a not in ordered]
    longest = max((r.axes[-1] for r in top), key=_size)
    columns = [
        a for a in rows if stride_one(_leaves(top), a) and not any(stride_one(_leaves([r]), r.axes[-1]) for r in top)
    ]
    if columns:
        return _columns(kernel, gpu, rows, columns[-1], top)
    inner = [a for a in kernel.axes if a not in rows and a not in ordered]
    vector = min(
        [vector_of(_leaves([r]), r.axes[-1]) for r in top]
        + [vector_of(kernel.stores, a) for a in inner if _size(a) == _size(longest)]
    )
    length, count = _size(longest), math.prod(map(_size, rows))
    if length <= 16 and not inner and rows:
        return Schedule(kernel.name, gpu.arch, _row_lines(rows, (*_warps(4), Factor("lane", WARP)), 4 * WARP))
    if length <= WARP * vector * 4 and rows and count >= gpu.processors:
        warps, lines = 1, _row_lines(rows, _warps(4), 4)
    else:
        read = {x.buffer for r in top for x in topological(r.args) if isinstance(x, l.Load) and r.axes[-1] in x.free}
        warps = min(most, _block(length, vector, count, sum(b.type.dtype.size for b in read), gpu))
        lines = tuple((a.name, grid(_size(a))) for a in rows)
    used = warps * WARP
    sites: list[Site] = []
    bound: dict[tuple[str, int], str] = {}
    for name, r in n.accumulators(kernel).items():
        if r in top:
            axis = r.axes[-1]
            key = (axis_name(axis), _size(axis))
            own = (
                Like(bound[key])
                if key in bound
                else shared_axis(_size(axis), used, vector if _size(axis) % vector == 0 else 1)
            )
            sites.append(Site((name,), ((axis_name(axis), own),)))
            bound.setdefault(key, name)
    same = {size: f"{name}.{axis}" for (axis, size), name in reversed(bound.items())}
    for store in kernel.stores:
        mine = [a for a in inner if a in store.free]
        if mine:
            axis = max(mine, key=lambda a: (stride_one([store], a), _size(a)))
            own = (
                Like(same[_size(axis)])
                if _size(axis) in same
                else shared_axis(_size(axis), used, vector_of([store], axis))
            )
            if not any(dict(s.axes).keys() == {axis.name} and s.names[0] not in n.accumulators(kernel) for s in sites):
                sites.append(Site((store.buffer.name,), ((axis.name, own),)))
            else:
                sites[-1] = Site((*sites[-1].names, store.buffer.name), sites[-1].axes)
    per_thread = ceil(length, used * vector) * vector
    loads = {x.buffer.name: 0 for x in topological([s.value for s in kernel.stores]) if isinstance(x, l.Load)}
    for x in topological([s.value for s in kernel.stores]):
        if isinstance(x, l.Load):
            loads[x.buffer.name] += 1
    keep = tuple((b, Operand("reg")) for b, uses in loads.items() if uses > 1) if per_thread <= KEPT * 2 else ()
    terms = tuple((name, Operand("reg")) for name in _again(kernel, top, inner)) if per_thread <= KEPT else ()
    return Schedule(kernel.name, gpu.arch, lines, (*keep[:2], *terms[:1]), (), tuple(sites))


def _again(kernel: l.Kernel, top: Sequence[l.Reduce], inner: Sequence[Any]) -> Iterator[str]:
    """The reductions whose summand, dear to compute, is wanted again at the same places of a row, as softmax's
    exponentials are.
    """
    stored = set(topological([s.value for s in kernel.stores]))
    for name, r in n.accumulators(kernel).items():
        if isinstance(r, l.Reduce) and r in top and len(r.args) == 1 and len(r.axes) == 1:
            cost = sum(x.fn.cost for x in topological(r.args) if isinstance(x, l.Apply) and r.axes[0] in x.free)
            same = [a for a in inner if _size(a) == _size(r.axes[0])]
            if cost >= DEAR and any(substitute(r.args[0], {r.axes[0]: a}) in stored for a in same):
                yield name


def finish(kernel: l.Kernel, gpu: Gpu) -> Schedule:
    """What follows a split: short reductions of partial states, a thread for each point where there are many."""
    found = n.accumulators(kernel)
    if math.prod(map(_size, kernel.axes)) < 1024:
        return reduction(kernel, gpu)
    *outer, last = kernel.axes
    warps = 4 if _size(last) >= 4 * WARP else 1
    lines = (
        *((a.name, grid(_size(a))) for a in outer),
        (last.name, grid(ceil(_size(last), warps * WARP), *([("warp", warps)] if warps > 1 else []), ("lane", WARP))),
    )
    sites = tuple(
        Site(
            (name,),
            ((axis_name(r.axes[0]), (Factor("reg" if _size(r.axes[0]) <= KEPT else "time", _size(r.axes[0])),)),),
        )
        for name, r in found.items()
        if isinstance(r, l.Reduce)
    )
    return Schedule(kernel.name, gpu.arch, lines, (), (), sites)


def _columns(kernel: l.Kernel, gpu: Gpu, rows: Sequence[Any], column: Any, top: Sequence[l.Reduce]) -> Schedule:
    lines = tuple((a.name, grid(ceil(_size(a), WARP), ("lane", WARP)) if a is column else grid(_size(a))) for a in rows)
    sites = []
    for name, r in n.accumulators(kernel).items():
        if isinstance(r, l.Reduce) and r in top:
            axis = max(r.axes, key=_size)
            warps = 8
            sites.append(
                Site((name,), ((axis_name(axis), (Factor("time", ceil(_size(axis), warps)), Factor("warp", warps))),))
            )
    return Schedule(kernel.name, gpu.arch, lines, (), (), tuple(sites))


def shared_axis(length: int, threads: int, vector: int) -> tuple[Factor, ...]:
    """An axis divided among threads: registers (or a loop, where they would be many), warps, lanes, a vector."""
    while vector > 1 and length < threads * vector:  # all lanes have work before any has a vector
        vector //= 2
    each = ceil(length, threads * vector)
    outer = Factor("reg" if each * vector <= KEPT * 2 else "time", max(each, 1))
    return (outer, *_warps(threads // WARP), Factor("lane", WARP), *_vector(vector))


def _block(length: int, vector: int, rows: int, size: int, gpu: Gpu) -> int:
    """Warps of a block for a row, of which a thread reads elements of so many bytes in all.

    Where rows are many, few enough that a thread has several accesses on their way; else fewer than could take part
    where that leaves no rest, while a thread reads 128 bytes at most.
    """
    each = max(16, 4 * vector) if rows >= 4 * gpu.processors else vector
    wanted = ceil(length, WARP * each)
    most = min(32, 1 << (wanted - 1).bit_length() if vector == 1 else 1 << wanted.bit_length() - 1)
    whole = (
        w
        for w in (32, 16, 8, 4, 2)
        if w <= most and length % (w * WARP * vector) == 0 and length // (w * WARP) * size <= 128
    )
    return next(whole, most)


def _row_lines(rows: Sequence[Any], inner: tuple[Factor, ...], size: int) -> tuple[tuple[str, tuple[Factor, ...]], ...]:
    """The last row axis shared by warps or lanes too."""
    *outer, last = rows
    return (
        *((a.name, grid(_size(a))) for a in outer),
        (last.name, (Factor("grid", max(ceil(_size(last), size), 1)), *inner)),
    )


def grid(size: int, *inner: tuple[str, int]) -> tuple[Factor, ...]:
    return (Factor("grid", max(size, 1)), *(Factor(level, k) for level, k in inner))


def _warps(count: int) -> tuple[Factor, ...]:
    return (Factor("warp", count),) if count > 1 else ()


def _vector(count: int) -> tuple[Factor, ...]:
    return (Factor("reg", count),) if count > 1 else ()


def _rows(kernel: l.Kernel, top: Sequence[l.Reduce]) -> list[Any]:
    """The axes around all of the outermost reductions: those they depend on, and the loops around these."""
    last = max((k for k, a in enumerate(kernel.axes) if all(a in r.free for r in top)), default=-1)
    return list(kernel.axes[: last + 1])


def _ordered(kernel: l.Kernel) -> set[Any]:
    """The axes that scans run along: nothing but a serial loop takes their steps in order."""
    return {x.at for x in topological([s.value for s in kernel.stores]) if isinstance(x, l.Scan)}


def _outermost(kernel: l.Kernel) -> list[l.Reduce]:
    """Reductions that are in no other one."""
    found: list[l.Reduce] = []
    for s in n.nest(kernel):
        found += _carried(s)
    return found


def _carried(s: n.Statement) -> Iterator[l.Reduce]:
    if isinstance(s, n.Loop):
        if s.kind == "reduce":
            yield from (r for r in s.carried if isinstance(r, l.Reduce))
        else:
            for x in s.body:
                yield from _carried(x)


def _leaves(reduces: Sequence[l.Reduce]) -> list[Any]:
    return [a for r in reduces for a in r.args]


def stride_one(terms: Sequence[Any], axis: Any) -> bool:
    """Whether memory is read or written along an axis."""
    for x in topological(terms):
        if isinstance(x, l.Load | l.Store) and coefficient(flatten(x.index, x.buffer.type.element_strides), axis) == 1:
            return True
    return False


def vector_of(terms: Sequence[Any], axis: Any) -> int:
    """The widest vector along an axis for which some access is one: 16 bytes of the narrowest type, at most 8
    elements.
    """
    accesses = [x for x in topological(terms) if isinstance(x, l.Load | l.Store) and axis in x.free]
    if not accesses:
        return 1
    narrowest = min(x.buffer.type.dtype.size for x in accesses)
    for size in (8, 4, 2):
        if size * narrowest <= WIDEST and _size(axis) % size == 0:
            q, j = Var("$q", max(_size(axis) // size, 1)), Var("$j", size)
            moved = [
                substitute(l.Load(x.buffer, x.index, getattr(x, "inside", ())), {axis: q * size + j}) for x in accesses
            ]
            if any(wide(x, j, size) for x in moved):
                return size
    return 1


def ceil(a: int, b: int) -> int:
    """a / b, rounded up, and at least 1: what is empty has one block, whose threads find nothing to do."""
    return max(-(-a // b), 1)


def _size(axis: Any) -> int:
    found: int = axis.extent
    return found
