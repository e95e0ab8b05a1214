"""Binding reductions to threads: those of a block share a row, or take columns where memory runs so."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from terrazzo.hw.gpu import Gpu
from terrazzo.ir import nest as n
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, FloorDiv, Loaded, Mod
from terrazzo.ir.node import substitute, topological
from terrazzo.ir.schedule import Factor, Like, Operand, Schedule, Site
from terrazzo.rules.access import WIDEST
from terrazzo.rules.loop_to_tile.reductions.rows import column_of, leaves, loaded, parts, read_alike, reducing
from terrazzo.rules.loop_to_tile.reductions.sharing import FLYING, MANY, beside, row_lines, sharing
from terrazzo.rules.loop_to_tile.walked.threads import (
    DEAR,
    KEPT,
    SECTOR,
    SPARE,
    WARP,
    WORD,
    ceil,
    divided,
    grid,
    lanes_of,
    pointwise,
    ragged_vector,
    size_of,
    step,
    vector_at,
    vector_of,
    warps_of,
    waste,
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
    if (column := column_of(rows, top) or read_alike(rows, top)) is not None:
        return columns(kernel, gpu, column, whole)
    longest = max((r.axes[-1] for r in top), key=size_of)
    vector = min(
        [vector_of(leaves([r]), r.axes[-1]) for r in top]
        + [vector_of(kernel.stores, a) for a in inner if size_of(a) == size_of(longest)]
    )
    ragged = _ragged(kernel, top, inner, longest) if vector == 1 else 1
    vector = max(vector, ragged)
    length, count = size_of(longest), math.prod(map(size_of, rows))
    if (length <= 16 or _mostly_beside(kernel, top, length, count, gpu)) and not inner and rows:
        return Schedule(kernel.name, gpu.arch, _thread_each(rows), (), (), _written_out(kernel))
    used = 0
    if length <= WARP * vector * 4 and rows and count >= gpu.processors:
        warps, used = 1, sharing(rows, top, length, vector, gpu)
        lines = row_lines(rows, *beside(rows, WARP // used))
    else:
        read = {x.buffer for r in top for x in topological(r.args) if isinstance(x, l.Load) and r.axes[-1] in x.free}
        warps = min(most, _block(length, vector, count, sum(b.type.dtype.size for b in read), gpu))
        lines = tuple((a.name, grid(size_of(a))) for a in rows)
        if warps == 1 and rows and count >= MANY * gpu.processors:  # blocks of a warp would leave half of the room
            lines = row_lines(rows, *beside(rows, 1))
    loads = Counter(x.buffer.name for x in topological([s.value for s in kernel.stores]) if isinstance(x, l.Load))
    ahead = AHEAD * max(1, WIDEST // (vector * max((x.dtype.size for x in loaded(top)), default=WIDEST)) // 2)
    if ragged > 1 and warps == WARP and max(loads.values()) > 1 and _crowded(length, count, gpu):
        warps, ahead = 16, 2
    used = used or warps * WARP
    sites: list[Site] = []
    bound: dict[tuple[str, int], str] = {}
    for name, r in n.accumulators(kernel).items():
        if r in top:
            axis = r.axes[-1]
            key = (axis_name(axis), size_of(axis))
            own = Like(bound[key]) if key in bound else _row(axis, used, vector, ragged, length, ahead)
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
                else _row(axis, used, 1 if _looked_up(store, axis) else vector_of([store], axis), ragged, length, ahead)
            )
            if not any(dict(s.axes).keys() == {axis.name} and s.names[0] not in n.accumulators(kernel) for s in sites):
                sites.append(Site((store.buffer.name,), ((axis.name, own),)))
            else:
                sites[-1] = Site((*sites[-1].names, store.buffer.name), sites[-1].axes)
    per_thread = ceil(length, used * vector) * vector
    twice = [b for b, uses in loads.items() if uses > 1][:2]
    keep = _kept(kernel, twice, per_thread, warps * WARP)
    if warps == WARP and twice and not keep:  # read again, from the cache, by blocks of which a processor has several
        return reduction(kernel, gpu, WARP // 2, whole)
    sites += _innermost(kernel, top) if warps == 1 else []  # sites agree on the number of warps
    words = ragged > 1 and ragged * min(x.dtype.size for x in loaded(top)) <= WORD
    several = _resident(warps, per_thread) if words else ()
    return Schedule(kernel.name, gpu.arch, lines, keep, several, tuple(sites))


def _kept(kernel: l.Kernel, twice: Sequence[str], each: int, threads: int) -> tuple[tuple[str, Operand], ...]:
    """What a thread keeps of its elements of a row, so many `each`: what is read `twice`, then the summand of a
    reduction that is dear to compute again, and what is stored of what a reduction computes on its way, where registers
    hold it.
    """
    _, inner, top = parts(kernel)
    far = any(isinstance(x, FloorDiv | Mod) for y in loaded(top) for x in topological(_indices(y)))
    most = REGISTERS // threads - WORKING - DIVIDING * far
    room = min(KEPT * 2, most)
    sizes = {b.name: b.type.dtype.size for b in kernel.reads}
    words = sum(ceil(each * sizes[b], WORD) for b in twice)
    held = list(twice) if each <= KEPT * 2 and words <= room else []
    left = room - words if held else room
    held += (again := [*_again(kernel, top, inner)][:1] if each <= min(KEPT, left) else [])
    made = [] if again else [*_on_the_way(kernel, top, inner)]
    if each <= KEPT and words + sum(ceil(each * b.type.dtype.size, WORD) for b in made) <= min(KEPT * 3, most):
        held += [b.name for b in made]
    return tuple((name, Operand("reg")) for name in held)


REGISTERS, WORKING, DIVIDING = 65536, 12, 8
"""Of a processor; those that a thread needs beside the elements that it keeps, at least; and more where it divides to
find these. A processor does not hold 65,536 elements: where 1024 threads were to keep 64 each, what was built instead
took 93 us for the variance of 512 rows of these (H100).
"""


def _indices(x: l.Load) -> list[Expr]:
    return [e for e in x.index if isinstance(e, Expr)]


def _crowded(length: int, count: int, gpu: Gpu) -> bool:
    """Whether many rows each fill the registers of a processor, if they are kept there: nothing is on its way while
    their blocks reduce. Where rows begin anywhere they are read again instead, by two blocks of 16 warps: softmax of
    4096 x 50257 in bfloat16 took 328 us so, 360 with one access on its way, and 398 kept (H200, November 2026); of 512
    rows by blocks of 16 warps 60, and 70 kept (H100).
    """
    return WARP * WARP * KEPT < length <= WARP * WARP * KEPT * 2 and count >= 3 * gpu.processors


def _looked_up(store: l.Store, axis: Any) -> bool:
    """Whether data says where points of an axis read: those that lie side by side may have something in common, so
    lanes have these, and not one thread.
    """
    found = topological([e for x in topological([store.value]) if isinstance(x, l.Load) for e in _indices(x)])
    return any(isinstance(x, Loaded) and axis in x.free for x in found)


def _resident(warps: int, each: int) -> tuple[tuple[str, tuple[int], tuple[()]], ...]:
    """How many blocks are to fit on a processor where each thread takes so many elements, in words and one by one: the
    compiler would spend registers on addresses. LayerNorm of 2048 x 8191 in bfloat16 took 50 us with 72 registers,
    which leave room for one block of 16 warps (H200, November 2026).
    """
    blocks = (48 if each <= KEPT // 2 else 24) // warps
    return (("resident", (blocks,), ()),) if blocks > 1 else ()


def _mostly_beside(kernel: l.Kernel, top: Sequence[l.Reduce], length: int, count: int, gpu: Gpu) -> bool:
    """Whether more is computed beside short rows than along them, which all lanes that share a row would compute: as
    the filters of pixels, which weigh what lies around these. A thread has a row where rows are a few sectors, which
    its loads find in the cache, and there are many.
    """
    size = max((x.dtype.size for x in loaded(top)), default=0)
    if length * size > 2 * SECTOR or count < WARP * MANY * gpu.processors:
        return False
    beside = topological([s.value for s in kernel.stores], stop=lambda x: x in top)
    cost = sum(x.fn.cost for x in beside if isinstance(x, l.Apply)) + sum(isinstance(x, l.Load) for x in beside)
    return cost > WARP * 2


def _ragged(kernel: l.Kernel, top: Sequence[l.Reduce], inner: Sequence[Any], longest: Any) -> int:
    """Elements that threads take at once of rows that begin anywhere, where an element is less than a word: a warp's
    access would be less than a line of the cache.
    """
    along = [(leaves([r]), r.axes[-1]) for r in top if size_of(r.axes[-1]) == size_of(longest)]
    along += [(list(kernel.stores), a) for a in inner if size_of(a) == size_of(longest)]
    loads = [x for r in top for x in loaded([r]) if step(x, r.axes[-1]) == 1]
    return min(ragged_vector(*x) for x in along) if any(x.dtype.size < WORD for x in loads) else 1


def _row(axis: Any, threads: int, vector: int, ragged: int, length: int, ahead: int) -> tuple[Factor, ...]:
    """An axis of a row divided among threads, in vectors that begin where memory is aligned where rows are ragged."""
    if ragged > 1 and size_of(axis) == length:
        return shared_axis(length, threads, ragged, aligned=True, ahead=ahead)
    return shared_axis(size_of(axis), threads, vector if size_of(axis) % vector == 0 else 1, ahead=ahead)


AHEAD = 4
"""Accesses that a thread has on their way at once, in a loop along a row."""
COLUMNS = 32
"""Accumulators of a thread that takes several columns, at most."""


def columns(kernel: l.Kernel, gpu: Gpu, column: Any, whole: bool = True) -> Schedule:
    """Lanes take neighbouring columns, each as many as 16 bytes have; warps, and lanes where columns are few, share
    the rows, of which a thread has several on their way.

    Where results go along rows, lanes take a column each, and a thread stores several of its elements at once. Where
    rows begin anywhere, what a warp reads ends amid sectors, which the warp beside it in the block finds in the cache:
    sums of 4096 rows of 4095 float32, 128 times, took 2632 us with all warps of a block sharing columns, 2485 with four
    of eight side by side, 2364 with eight of 16, and 2175 with eight of 32 (H200, 28 November 2026).
    """
    rows, inner, top = parts(kernel)
    if (short := held(kernel, gpu)) is not None:
        return short
    across = [s for s in kernel.stores if any(a in s.free and step(s, a) == 1 for a in inner)]
    alike = column is read_alike(rows, top)
    vector = 1 if across or alike else vector_of(leaves(top), column)
    while vector > 1 and vector * len(top) > COLUMNS:
        vector //= 2
    lanes = min(WARP, 1 << (ceil(size_of(column), vector) - 1).bit_length())
    length = max(size_of(r.axes[-1]) for r in top)
    points = math.prod(map(size_of, rows))
    narrow = min((x.dtype.size for x in loaded(top) if column in x.free), default=WORD)
    while whole and lanes * vector * narrow > SECTOR and ceil(points, vector * lanes) < gpu.processors:
        lanes //= 2
    count = ceil(points, vector * lanes)
    share = 1 if alike else min(8, 1 << ceil(length, WARP // lanes * 4).bit_length() - 1)
    while vector == 1 and share < WARP and share * count < WARP * gpu.processors and length // share >= 32:
        share *= 2  # there are few warps, each with many rows
    while share > 1 and length // share < 16 and count * share > 64 * gpu.processors:
        share //= 2  # there are warps enough, each with few rows
    beside = [w for w in (8, 4, 2) if not alike or waste(size_of(column), w * lanes) <= SPARE]
    apart = next((w for w in beside if w * share <= 8 and count >= 2 * w * gpu.processors), 1)
    if vector == 1 and lanes == WARP and vector_of(leaves(top), column) == 1 and count >= MANY * gpu.processors:
        apart, share = 8, min(share, 4)
    threads = (*warps_of(share), *lanes_of(WARP // lanes))
    steps = [sum(vector * x.dtype.size for x in loaded([r]) if r.axes[-1] in x.free) for r in top]
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


def held(kernel: l.Kernel, gpu: Gpu) -> Schedule | None:
    """Columns so short that registers hold them, where what reductions read is wanted again: threads read all of a
    column (or, where it is longer, their part of it) at once, and nothing twice. None where that is not so.
    """
    rows, inner, top = parts(kernel)
    column, points = column_of(rows, top) if top else None, math.prod(map(size_of, rows))
    if column is None or kernel.scans or len(inner) > 1 or any(len(r.axes) != 1 for r in top):
        return None
    loops = [[r for r in s.carried if r in top] for s in reducing(n.nest(kernel))]
    along = [(rs[0].axes[0], leaves(rs)) for rs in loops if rs] + [(a, kernel.stores) for a in inner]
    again = _read_again(along, column)[:2]
    lengths = {size_of(a) for a, _ in along}
    if len(lengths) > 1 or not again or any(step(s, a) == 1 for s in kernel.stores for a in inner):
        return None
    narrow = min(x.dtype.size for x in loaded(top) if column in x.free)
    widest = vector_of(leaves(top), column)
    for share in (1, 2, 4, 8, 16, 32):
        each, kept = ceil(max(lengths), share), 2 * KEPT if share < WARP else KEPT
        vector = next((v for v in (8, 4, 2, 1) if v <= widest and v * each * len(again) <= kept), 0)
        if vector * narrow >= min(WORD, widest * narrow):
            break
    else:
        return None
    while vector > 1 and vector * narrow > WORD and points < 2 * gpu.processors * WARP * vector:
        vector //= 2
    blocks = [(w, points // (WARP * vector * w)) for w in (8, 4, 2, 1) if w == 1 or w * share <= 8]
    apart, count = next((x for x in blocks if x[1] >= 2 * gpu.processors), blocks[-1])
    if count < gpu.processors:
        return None
    own = (*grid(ceil(size_of(column), apart * WARP * vector)), *warps_of(apart), Factor("lane", WARP))
    lines = tuple((a.name, (*own, *vector_at(vector)) if a is column else grid(size_of(a))) for a in rows)
    binding = (Factor("reg", each), *warps_of(share))
    names = [(name, r.axes[0]) for name, r in n.accumulators(kernel).items() if r in top]
    names += [(s.buffer.name, a) for s in kernel.stores for a in inner if a in s.free]
    sites = tuple(Site((name,), ((axis_name(a), binding),)) for name, a in names)
    terms = tuple((name, Operand("reg")) for name in _again(kernel, top, inner)) if vector * each <= KEPT else ()
    keep = tuple((name, Operand("reg")) for name in again)
    return Schedule(kernel.name, gpu.arch, lines, (*keep, *terms[:1]), (), sites)


def _read_again(along: Sequence[tuple[Any, Sequence[Any]]], column: Any) -> list[str]:
    """The buffers that several loops read, and read alike: the same columns, element by element. They come in the order
    in which they are read, so that every process chooses the same ones.
    """
    first = along[0][0]
    found: list[Any] = []
    for a, terms in along:
        loads = (x for x in topological(terms) if isinstance(x, l.Load) and {a, column} <= x.free)
        found += dict.fromkeys(substitute(x, {a: first}) for x in loads)
    return [x.buffer.name for x in dict.fromkeys(found)
            if found.count(x) > 1 and all(y is x for y in found if y.buffer is x.buffer)]  # fmt: skip


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


def _on_the_way(kernel: l.Kernel, top: Sequence[l.Reduce], inner: Sequence[Any]) -> Iterator[l.Buffer]:
    """The buffers in which those values are stored, dear to compute, that a reduction's summand is made of, as the
    parts of a row's numbers are of which it adds up what they leave.
    """
    sums = [r for r in top if len(r.axes) == 1]
    for store in kernel.stores if len(inner) == 1 else ():
        (a,) = inner
        cost = sum(x.fn.cost for x in topological([store.value], stop=lambda x: x in top) if isinstance(x, l.Apply))
        same = [r for r in sums if size_of(r.axes[0]) == size_of(a)]
        dear = a in store.value.free and cost >= DEAR
        if dear and any(substitute(store.value, {a: r.axes[0]}) in topological(r.args) for r in same):
            yield store.buffer


def finish(kernel: l.Kernel, gpu: Gpu) -> Schedule:
    """What follows a split: short reductions of partial states, a thread for each point where there are many, or for a
    few side by side where that leaves a block for each processor: 458,752 points took 5 us one by one, of two states
    or of four. Of more states than a thread asks for at once, threads share them.
    """
    found = n.accumulators(kernel)
    states = max(size_of(a) for r in found.values() if isinstance(r, l.Reduce) for a in r.axes)
    if math.prod(map(size_of, kernel.axes)) < 1024 or states > KEPT:
        return reduction(kernel, gpu)
    *outer, last = kernel.axes
    warps = 4 if size_of(last) >= 4 * WARP else 1
    most = math.prod(map(size_of, kernel.axes)) // (warps * WARP * gpu.processors)
    vector = next((v for v in (4, 2) if size_of(last) % v == 0 and v <= most), 1)
    inner = [*([("warp", warps)] if warps > 1 else []), ("lane", WARP), *([("reg", vector)] if vector > 1 else [])]
    lines = (
        *((a.name, grid(size_of(a))) for a in outer),
        (last.name, grid(ceil(size_of(last), warps * WARP * vector), *inner)),
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


def shared_axis(
    length: int, threads: int, vector: int, aligned: bool = False, ahead: int = AHEAD
) -> tuple[Factor, ...]:
    """An axis divided among threads: registers (or a loop, where they would be many, with `ahead` accesses of a thread
    on their way), warps, lanes, a vector.
    """
    while vector > 1 and length < threads * vector:  # all lanes have work before any has a vector
        vector //= 2
    each = ceil(length, threads * vector)
    inner = (*warps_of(threads // WARP), Factor("lane", min(threads, WARP)), *vector_at(vector, aligned))
    if each * vector <= KEPT * 2:
        return (Factor("reg", each), *inner)
    return (Factor("time", ceil(each, ahead)), Factor("reg", ahead), *inner)


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


def _thread_each(rows: Sequence[Any]) -> tuple[tuple[str, tuple[Factor, ...]], ...]:
    """A row for each thread: of the last axis, and where that is short, of those before it too. Of regions of 7 x 7
    pixels 128 threads along the last axis would have 7 that do anything (818 us on an H200 where a library took 200).
    """
    if len(rows) == 1 or waste(size_of(rows[-1]), 4 * WARP) < 2:
        return row_lines(rows, (*warps_of(4), Factor("lane", WARP)), 4 * WARP)
    sizes, order = {a: size_of(a) for a in rows}, list(reversed(rows))
    lanes = dict.fromkeys(order, 1)
    longest = max(order, key=size_of)
    lanes[longest] *= divided(WARP, order, sizes, lanes)
    both = dict(lanes)
    divided(4, order, sizes, both)
    return tuple(
        (a.name, (*grid(ceil(sizes[a], both[a])), *warps_of(both[a] // lanes[a]), *lanes_of(lanes[a]))) for a in rows
    )


UNROLLED = 64
"""Steps of a thread's short reductions that are written out, at most."""
FEW_STEPS = 8
"""The same of those that lie in the steps of others: what is found for each of them, as where the corners of a cell lie
and what they weigh, is found before these then, and not in each of them.
"""


def _innermost(kernel: l.Kernel, top: Sequence[l.Reduce]) -> list[Site]:
    """Short reductions in the steps of others that each thread takes by itself, with all of their steps written out."""
    found = [(name, r) for name, r in n.accumulators(kernel).items() if isinstance(r, l.Reduce) and r not in top]
    inside = {x for _, r in found for x in topological(r.args) if isinstance(x, l.Reduce)}
    short = [(name, r) for name, r in found if r in inside and math.prod(map(size_of, r.axes)) <= FEW_STEPS]
    return [Site((name,), tuple((axis_name(a), (Factor("reg", size_of(a)),)) for a in r.axes)) for name, r in short]


def _written_out(kernel: l.Kernel) -> tuple[Site, ...]:
    """Reductions within others, as windows that are pooled, with all of their steps written out: a thread waits for
    what it loads once then, and not in every step, and what steps have in common is computed once.
    """
    found = {name: r for name, r in n.accumulators(kernel).items() if isinstance(r, l.Reduce)}
    steps = math.prod(size_of(a) for r in found.values() for a in r.axes)
    if steps > UNROLLED or all(r.axes == s.axes for r in found.values() for s in found.values()):
        return ()
    return tuple(
        Site((name,), tuple((axis_name(a), (Factor("reg", size_of(a)),)) for a in r.axes)) for name, r in found.items()
    )
