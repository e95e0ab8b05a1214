"""Binding reductions to threads: those of a block share a row, or take columns where memory runs so."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from terrazzo.hw.gpu import Gpu
from terrazzo.ir import nest as n
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import substitute, topological
from terrazzo.ir.schedule import Factor, Like, Operand, Schedule, Site
from terrazzo.rules.access import WIDEST
from terrazzo.rules.loop_to_tile.collapse import merge_axes
from terrazzo.rules.loop_to_tile.threads import (
    DEAR,
    KEPT,
    SECTOR,
    WARP,
    ceil,
    grid,
    ordered,
    pointwise,
    ragged_vector,
    size_of,
    step,
    vector_at,
    vector_of,
    warps_of,
)
from terrazzo.rules.tile.draft import axis_name


def reduction(kernel: l.Kernel, gpu: Gpu, most: int = 32, whole: bool = True) -> Schedule:
    """Rows over the grid; the threads of a block (of `most` warps at most), or of a warp for short rows, share each
    reduction of a row and what is stored of it.

    Where memory runs along a free axis instead, lanes take its columns and warps share the reduction: few columns,
    where there are few blocks and the `whole` of a row is reduced in one.
    """
    rows, inner, top = parts(kernel)
    if not top:
        return pointwise(kernel, gpu)
    if (column := column_of(rows, top)) is not None:
        return columns(kernel, gpu, column, whole)
    longest = max((r.axes[-1] for r in top), key=size_of)
    vector = min(
        [vector_of(_leaves([r]), r.axes[-1]) for r in top]
        + [vector_of(kernel.stores, a) for a in inner if size_of(a) == size_of(longest)]
    )
    ragged = _ragged(kernel, top, inner, longest) if vector == 1 else 1
    vector = max(vector, ragged)
    length, count = size_of(longest), math.prod(map(size_of, rows))
    if length <= 16 and not inner and rows:
        return Schedule(kernel.name, gpu.arch, _row_lines(rows, (*warps_of(4), Factor("lane", WARP)), 4 * WARP))
    if not inner and rows and count >= MANY * gpu.processors and (lanes := _lanes(kernel, top, vector)):
        return _several_rows(kernel, gpu, rows, lanes, vector)
    if length <= WARP * vector * 4 and rows and count >= gpu.processors:
        warps, lines = 1, _row_lines(rows, warps_of(4), 4)
    else:
        read = {x.buffer for r in top for x in topological(r.args) if isinstance(x, l.Load) and r.axes[-1] in x.free}
        warps = min(most, _block(length, vector, count, sum(b.type.dtype.size for b in read), gpu))
        lines = tuple((a.name, grid(size_of(a))) for a in rows)
    used = warps * WARP
    sites: list[Site] = []
    bound: dict[tuple[str, int], str] = {}
    for name, r in n.accumulators(kernel).items():
        if r in top:
            axis = r.axes[-1]
            key = (axis_name(axis), size_of(axis))
            own = Like(bound[key]) if key in bound else _row(axis, used, vector, ragged, length)
            sites.append(Site((name,), ((axis_name(axis), own),)))
            bound.setdefault(key, name)
    same = {size: f"{name}.{axis}" for (axis, size), name in reversed(bound.items())}
    for store in kernel.stores:
        mine = [a for a in inner if a in store.free]
        if mine:
            axis = max(mine, key=lambda a: (step(store, a) == 1, size_of(a)))
            own = (
                Like(same[size_of(axis)])
                if size_of(axis) in same
                else _row(axis, used, vector_of([store], axis), ragged, length)
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


MANY = 64
"""Rows for each processor from which on a warp may take several short ones at once."""


def _lanes(kernel: l.Kernel, top: Sequence[l.Reduce], vector: int) -> int:
    """The lanes that share a row in one access each of 16 bytes, where they are fewer than a warp has; else 0."""
    sizes = {tuple(map(size_of, r.axes)) for r in top}
    if len(sizes) > 1 or len(top[0].axes) > 1 or {*n.accumulators(kernel).values()} != {*top}:
        return 0
    if any(x in top for r in top for x in topological(r.args)):
        return 0
    ((length,),) = sizes
    lanes = length // vector
    widest = max((x.dtype.size for x in _loads(top)), default=0) * vector == WIDEST
    return lanes if widest and lanes * vector == length and lanes in (4, 8, 16) else 0


def _several_rows(kernel: l.Kernel, gpu: Gpu, rows: Sequence[Any], lanes: int, vector: int) -> Schedule:
    """A warp takes as many short rows as its lanes have 16 bytes of: enough is on its way at once."""
    each = WARP // lanes
    lines = _row_lines(rows, (*warps_of(8), Factor("lane", each)), 8 * each)
    names = [(name, r) for name, r in n.accumulators(kernel).items() if isinstance(r, l.Reduce)]
    share = (Factor("lane", lanes), *vector_at(vector))
    sites = tuple(Site((name,), ((axis_name(r.axes[-1]), share),)) for name, r in names)
    return Schedule(kernel.name, gpu.arch, lines, (), (), sites)


def _ragged(kernel: l.Kernel, top: Sequence[l.Reduce], inner: Sequence[Any], longest: Any) -> int:
    """Elements that threads take at once of rows that begin anywhere, where an element is less than a word: a warp's
    access would be less than a line of the cache.
    """
    along = [(_leaves([r]), r.axes[-1]) for r in top if size_of(r.axes[-1]) == size_of(longest)]
    along += [(list(kernel.stores), a) for a in inner if size_of(a) == size_of(longest)]
    loads = [x for r in top for x in _loads([r]) if step(x, r.axes[-1]) == 1]
    return min(ragged_vector(*x) for x in along) if any(x.dtype.size < WORD for x in loads) else 1


def _row(axis: Any, threads: int, vector: int, ragged: int, length: int) -> tuple[Factor, ...]:
    """An axis of a row divided among threads, in vectors that begin where memory is aligned where rows are ragged."""
    if ragged > 1 and size_of(axis) == length:
        return shared_axis(length, threads, ragged, aligned=True)
    return shared_axis(size_of(axis), threads, vector if size_of(axis) % vector == 0 else 1)


def parts(kernel: l.Kernel) -> tuple[list[Any], list[Any], list[l.Reduce]]:
    """The axes of rows, those inside them, and the reductions that threads share: others lie in loops that threads
    share, so each thread computes its own.
    """
    top = _outermost(kernel)
    rows = _rows(kernel, top)
    top = [r for r in top if r.free <= frozenset(rows)]
    rest = [a for a in kernel.axes if a not in ordered(kernel)]
    return [a for a in rest if a in rows], [a for a in rest if a not in rows], top


def column_of(rows: Sequence[Any], top: Sequence[l.Reduce]) -> Any:
    """The axis of rows along which memory runs, by most of what reductions read; None where it runs along these."""
    along = sum(_bytes(x) for r in top for x in _loads([r]) if step(x, r.axes[-1]) == 1)
    found = {a: sum(_bytes(x) for x in _loads(top) if step(x, a) == 1) for a in rows}
    best = max(rows, key=lambda a: found[a], default=None)
    return best if best is not None and found[best] > along else None


def _loads(reduces: Sequence[l.Reduce]) -> list[l.Load]:
    return [x for x in topological(_leaves(reduces)) if isinstance(x, l.Load)]


def _bytes(load: l.Load) -> int:
    """How much of memory a load reads."""
    points = math.prod(size_of(a) for a in load.free)
    return int(load.dtype.size * min(points, math.prod(load.buffer.type.static_shape)))


def flattened(kernel: l.Kernel) -> l.Kernel:
    """`kernel` with what lies inside a row as one axis, so that threads divide all of it; and with its rows as one axis
    that runs as memory does, where lanes take them as columns.
    """
    rows, inner, top = parts(kernel)
    found = merge_axes(kernel, sorted(inner, key=lambda a: -_far(kernel.stores, a))) if top else kernel
    if column_of(rows, top) is None:
        return found
    return merge_axes(found, sorted(rows, key=lambda a: -_far(sorted(_loads(top), key=_bytes, reverse=True), a)))


def _far(accesses: Sequence[Any], axis: Any) -> int:
    """The step of an axis in the first access that goes along it."""
    return next((abs(d) for x in accesses if axis in x.free and (d := step(x, axis)) is not None), 0)


BLOCKS = 4
"""Blocks for each processor that a reduction is cut into, at most: so many of 256 threads are on one at a time."""
LEAST = 16384
"""Bytes that a block reads at least, where reductions are cut: the states of less are much beside it."""
NEAR = 32768
"""Bytes that a block reads twice at most, where it can be helped: the second time they come from the cache beside it,
which blocks share.
"""


def pieces(kernel: l.Kernel, gpu: Gpu, together: bool = False, before: int = 0) -> int:
    """Into how many pieces the reductions of a kernel are cut, by what the model says of both ways: 1 where it cannot
    be, or is not worth it.

    A block reads as fast as a processor's share of the memory at most, so many blocks are faster than few. Pieces take
    a launch more, and their states are written and read; so many kernels come `before` that would not otherwise. Where
    a piece has a state for one reduction after the other, `together`, it is short enough to be read from memory once.
    """
    rows, inner, top = parts(kernel)
    found = n.accumulators(kernel).values()
    nested = any(x in found and x not in top for x in topological(top))
    if not top or nested or len({tuple(map(size_of, r.axes)) for r in top}) > 1:
        return 1
    if inner and column_of(rows, top) is not None:
        return 1  # what is read by columns and stored by rows is transposed on its way, in one kernel
    chosen = reduction(kernel, gpu, whole=False)
    blocks = _blocks(chosen)
    first = [r for r in top if not any(x in top for x in topological(r.args))]
    once, read = (sum(map(_bytes, {x for r in found for x in _loads([r])})) for found in (first, top))
    read = sum(sum(map(_bytes, _loads([r]))) for r in top if r not in first) + once
    rest = sum(map(_bytes, _inside(kernel, inner)))
    far = together and not chosen.operands and once // blocks > NEAR
    most = max(ceil(BLOCKS * gpu.processors, blocks), once // (blocks * NEAR) if far else 1)
    length = size_of(top[0].axes[-1])
    if (most := min(most, once // (blocks * LEAST), length // 8)) < 2:
        return 1
    states = 8 * most * sum(math.prod(size_of(a) for a in rows if a in r.free) for r in top)
    launches = before + (1 if together or len(first) == len(top) else 2 * _stages(top) - 1) + bool(rest)
    share = gpu.memory / gpu.processors
    stored = sum(_bytes(l.Load(s.buffer, s.index)) for s in kernel.stores)
    whole = once + stored if chosen.operands else (once if together and not far else read) + rest
    cut = (once if together else read) / min(gpu.memory, blocks * most * share) + rest / gpu.memory
    cut += states / gpu.cache + launches * gpu.launch
    return _even(length, most, unit(top)) if cut < whole / min(gpu.memory, blocks * share) else 1


def crowded(kernel: l.Kernel, gpu: Gpu) -> bool:
    """Whether the few blocks that share short reductions have so many points of rows to compute that the others would
    be faster, even a launch later.
    """
    rows, inner, top = parts(kernel)
    if not (inner and top) or column_of(rows, top) is not None:
        return False
    chosen = reduction(kernel, gpu)
    speed = min(gpu.memory, _blocks(chosen) * gpu.memory / gpu.processors)
    read, rest = (sum(map(_bytes, found)) for found in (set(_loads(top)), _inside(kernel, inner)))
    stored = sum(_bytes(l.Load(s.buffer, s.index)) for s in kernel.stores)
    whole = read + stored if chosen.operands else read + rest
    return read / speed + rest / gpu.memory + gpu.launch < whole / speed


def _blocks(schedule: Schedule) -> int:
    lines = [b for _, b in schedule.axes if not isinstance(b, Like)]
    return math.prod(f.size for b in lines for f in b if f.level == "grid")


def uneven(kernel: l.Kernel) -> list[l.Reduce]:
    """Of reductions that are not equally long, which pieces of one size cannot divide: the longest, or where those need
    others, what needs none. None where all are alike.
    """
    _, _, top = parts(kernel)
    sizes = [math.prod(map(size_of, r.axes)) for r in top]
    longest = [r for r, size in zip(top, sizes, strict=True) if size == max(sizes)]
    if len(longest) == len(top):
        return []
    first = [r for r in top if not any(x in top for x in topological(r.args))]
    return longest if set(longest) <= set(first) else first


def _stages(top: Sequence[l.Reduce]) -> int:
    """How many reductions come one after the other."""
    depth: dict[l.Reduce, int] = {}
    for r in topological(top):
        if isinstance(r, l.Reduce) and r in top:
            depth[r] = 1 + max((depth[x] for x in topological(r.args) if x in depth), default=0)
    return max(depth.values())


def unit(top: Sequence[l.Reduce]) -> int:
    """What the pieces of reductions should be multiples of: what is loaded at once."""
    return min(vector_of(_leaves([r]), r.axes[-1]) for r in top)


def _even(length: int, most: int, unit: int) -> int:
    """As many pieces as there may be, or up to half of that where they are of one size then."""
    found = (s for u in (unit, 1) for s in range(most, most // 2, -1) if length % s == 0 and length // s % u == 0)
    return next(found, -(-length // (-(-length // (most * unit)) * unit)))


def strangers(kernel: l.Kernel) -> bool:
    """Whether what is computed at the points of rows needs none of their reductions and reads other places than these
    do: only the extents of their axes are alike.
    """
    _, inner, top = parts(kernel)
    points = [s for s in kernel.stores if s.free & set(inner)]
    terms = set(topological(points))
    read = {substitute(x, {r.axes[-1]: a}) for r in top for x in _loads([r]) if r.axes[-1] in x.free for a in inner}
    return bool(points) and bool(top) and not terms & {*top, *read}


def _inside(kernel: l.Kernel, inner: Sequence[Any]) -> set[l.Load]:
    """What is loaded or stored at every point of a row, as loads."""
    loads = [x for x in topological(kernel.stores) if isinstance(x, l.Load)]
    stores = [l.Load(s.buffer, s.index) for s in kernel.stores]
    return {x for x in (*loads, *stores) if x.free & set(inner)}


AHEAD = 4
"""Accesses that a thread has on their way at once, in a loop along a row."""
FLYING = 128
"""Bytes that a thread has on their way at once, at most: registers hold them."""
COLUMNS = 32
"""Accumulators of a thread that takes several columns, at most."""
WORD = 4
"""Bytes of which a line of the cache has one for every lane."""


def columns(kernel: l.Kernel, gpu: Gpu, column: Any, whole: bool = True) -> Schedule:
    """Lanes take neighbouring columns, each as many as 16 bytes have; warps, and lanes where columns are few, share
    the rows, of which a thread has several on their way.

    Where results go along rows, lanes take a column each, and a thread stores several of its elements at once.
    """
    rows, inner, top = parts(kernel)
    across = [s for s in kernel.stores if any(a in s.free and step(s, a) == 1 for a in inner)]
    vector = 1 if across else vector_of(_leaves(top), column)
    while vector > 1 and vector * len(top) > COLUMNS:
        vector //= 2
    lanes = min(WARP, 1 << (ceil(size_of(column), vector) - 1).bit_length())
    length = max(size_of(r.axes[-1]) for r in top)
    points, narrow = math.prod(map(size_of, rows)), min(x.dtype.size for x in _loads(top) if column in x.free)
    while whole and lanes * vector * narrow > SECTOR and ceil(points, vector * lanes) < gpu.processors:
        lanes //= 2
    count = ceil(points, vector * lanes)
    share = min(8, 1 << ceil(length, WARP // lanes * 4).bit_length() - 1)
    while vector == 1 and share < WARP and share * count < WARP * gpu.processors and length // share >= 32:
        share *= 2  # there are few warps, each with many rows
    while share > 1 and length // share < 16 and count * share > 64 * gpu.processors:
        share //= 2  # there are warps enough, each with few rows
    apart = next(w for w in (8, 4, 2, 1) if w == 1 or (w * share <= 8 and count >= 2 * w * gpu.processors))
    threads = (*warps_of(share), *lanes_of(WARP // lanes))
    steps = [sum(vector * x.dtype.size for x in _loads([r]) if r.axes[-1] in x.free) for r in top]
    ahead = max(1, min(8 if vector > 1 else 16, FLYING // max(1, *steps)))
    own = grid(ceil(size_of(column), apart * lanes * vector))
    own = (*own, *warps_of(apart), *lanes_of(lanes), *vector_at(vector))
    lines = tuple((a.name, own if a is column else grid(size_of(a))) for a in rows)
    sites = []
    for name, r in n.accumulators(kernel).items():
        if r in top:
            axis = r.axes[-1]
            sites.append(Site((name,), ((axis_name(axis), _divided(size_of(axis), threads, ahead)),)))
    for s in kernel.stores:
        if mine := [a for a in inner if a in s.free]:
            axis = max(mine, key=lambda a: (step(s, a) == 1, size_of(a)))
            width = vector_of([s], axis) if s in across else 1
            binding = _divided(size_of(axis), (*threads, *vector_at(width)), 1 if width > 1 else ahead)
            sites.append(Site((s.buffer.name,), ((axis.name, binding),)))
    return Schedule(kernel.name, gpu.arch, lines, (), (), tuple(sites))


def lanes_of(count: int) -> tuple[Factor, ...]:
    return (Factor("lane", count),) if count > 1 else ()


def _divided(length: int, threads: tuple[Factor, ...], ahead: int) -> tuple[Factor, ...]:
    """An axis divided among threads, of which each has some elements on their way at once, in a loop of steps."""
    each = ceil(length, math.prod(f.size for f in threads))
    ahead = min(ahead, 1 << each.bit_length() - 1)
    steps = (Factor("time", ceil(each, ahead)),) if each > ahead else ()
    return (*steps, Factor("reg", ahead if steps else each), *threads)


def _again(kernel: l.Kernel, top: Sequence[l.Reduce], inner: Sequence[Any]) -> Iterator[str]:
    """The reductions whose summand, dear to compute, is wanted again at the same places of a row, as softmax's
    exponentials are.
    """
    stored = set(topological([s.value for s in kernel.stores]))
    for name, r in n.accumulators(kernel).items():
        if isinstance(r, l.Reduce) and r in top and len(r.args) == 1 and len(r.axes) == 1:
            cost = sum(x.fn.cost for x in topological(r.args) if isinstance(x, l.Apply) and r.axes[0] in x.free)
            same = [a for a in inner if size_of(a) == size_of(r.axes[0])]
            if cost >= DEAR and any(substitute(r.args[0], {r.axes[0]: a}) in stored for a in same):
                yield name


def finish(kernel: l.Kernel, gpu: Gpu) -> Schedule:
    """What follows a split: short reductions of partial states, a thread for each point where there are many. Of more
    states than a thread asks for at once, threads share them.
    """
    found = n.accumulators(kernel)
    states = max(size_of(a) for r in found.values() if isinstance(r, l.Reduce) for a in r.axes)
    if math.prod(map(size_of, kernel.axes)) < 1024 or states > KEPT:
        return reduction(kernel, gpu)
    *outer, last = kernel.axes
    warps = 4 if size_of(last) >= 4 * WARP else 1
    lines = (
        *((a.name, grid(size_of(a))) for a in outer),
        (last.name, grid(ceil(size_of(last), warps * WARP), *([("warp", warps)] if warps > 1 else []), ("lane", WARP))),
    )
    sites = tuple(
        Site(
            (name,),
            ((axis_name(r.axes[0]), (Factor("reg" if size_of(r.axes[0]) <= KEPT else "time", size_of(r.axes[0])),)),),
        )
        for name, r in found.items()
        if isinstance(r, l.Reduce)
    )
    return Schedule(kernel.name, gpu.arch, lines, (), (), sites)


def shared_axis(length: int, threads: int, vector: int, aligned: bool = False) -> tuple[Factor, ...]:
    """An axis divided among threads: registers (or a loop, where they would be many, with several accesses of a thread
    on their way), warps, lanes, a vector.
    """
    while vector > 1 and length < threads * vector:  # all lanes have work before any has a vector
        vector //= 2
    each = ceil(length, threads * vector)
    inner = (*warps_of(threads // WARP), Factor("lane", WARP), *vector_at(vector, aligned))
    if each * vector <= KEPT * 2:
        return (Factor("reg", each), *inner)
    return (Factor("time", ceil(each, AHEAD)), Factor("reg", AHEAD), *inner)


def _block(length: int, vector: int, rows: int, size: int, gpu: Gpu) -> int:
    """Warps of a block for a row, of which a thread reads elements of so many bytes in all.

    Where rows are many, few enough that a thread has several accesses on their way; else fewer than could take part
    where that leaves no rest, while a thread reads 128 bytes at most.
    """
    if length > WARP * WARP * KEPT * 2:
        return 16  # a row that registers do not hold: three such blocks are on a processor, each with steps to go
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
        *((a.name, grid(size_of(a))) for a in outer),
        (last.name, (Factor("grid", max(ceil(size_of(last), size), 1)), *inner)),
    )


def _rows(kernel: l.Kernel, top: Sequence[l.Reduce]) -> list[Any]:
    """The axes around all of the outermost reductions: those they depend on, and the loops around these."""
    last = max((k for k, a in enumerate(kernel.axes) if all(a in r.free for r in top)), default=-1)
    return list(kernel.axes[: last + 1])


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
