"""Which reductions are cut into pieces for blocks to share, and into how many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.hw.gpu import Gpu
from terrazzo.ir import nest as n
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import substitute, topological
from terrazzo.ir.schedule import Like, Schedule
from terrazzo.rules.loop_to_tile.reductions.reductions import reduction
from terrazzo.rules.loop_to_tile.reductions.rows import bytes_of, column_of, leaves, loaded, parts
from terrazzo.rules.loop_to_tile.walked.threads import WORD, ceil, size_of, vector_of

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

    A block reads and computes as fast as a processor's share at most, so many blocks are faster than few. Pieces take a
    launch more, and their states are written and read; so many kernels come `before` that would not otherwise. Where a
    piece has a state for one reduction after the other, `together`, it is short enough to be read from memory once.
    """
    rows, inner, top = parts(kernel)
    if not top or len({tuple(map(size_of, r.axes)) for r in top}) > 1:
        return 1
    if inner and column_of(rows, top) is not None:
        return 1  # what is read by columns and stored by rows is transposed on its way, in one kernel
    chosen = reduction(kernel, gpu, whole=False)
    blocks = _blocks(chosen)
    first = [r for r in top if not any(x in top for x in topological(r.args))]
    once = sum(map(bytes_of, {x for r in first for x in loaded([r])}))
    rest = sum(map(bytes_of, _inside(kernel, inner)))
    far = together and not chosen.operands and once // blocks > NEAR
    most = max(ceil(BLOCKS * gpu.processors, blocks), once // (blocks * NEAR) if far else 1)
    length = size_of(top[0].axes[-1])
    if (most := min(most, once // (blocks * LEAST), length // 8)) < 2:
        return 1
    states = 8 * most * sum(math.prod(size_of(a) for a in rows if a in r.free) for r in top)
    launches = before + (1 if together or len(first) == len(top) else 2 * _stages(top) - 1) + bool(rest)
    walks = _walks(kernel, [name for name, _ in chosen.operands])
    stored = sum(bytes_of(l.Load(s.buffer, s.index)) for s in kernel.stores)
    whole = once + rest if together and not far and not chosen.operands else sum(w.read for w in walks) + stored
    operations = sum(w.operations for w in walks)
    again = [w for w in _walks(kernel) if w.axis not in inner]
    read = once if together else sum(w.read for w in again)
    cut = _taken(read, sum(w.operations for w in again), blocks * most, gpu) + rest / gpu.memory
    cut += states / gpu.cache + launches * gpu.launch
    return _even(length, most, unit(top)) if cut < _taken(whole, operations, blocks, gpu) else 1


def _taken(read: int, operations: float, blocks: int, gpu: Gpu) -> float:
    """Nanoseconds in which blocks read so many bytes and compute as much as so many additions."""
    return max(read / gpu.memory, 2 * operations / gpu.fma) * max(1.0, gpu.processors / blocks)


@dataclass(frozen=True)
class _Walk:
    """Along an axis of rows: the bytes that are read at its steps, and the operations, in additions."""

    axis: Any
    read: int
    operations: float


def _walks(kernel: l.Kernel, kept: Sequence[str] = ()) -> list[_Walk]:
    """What a row is walked for, by each reduction that others wait for and at its points, where threads have `kept`
    elements of these buffers, and the summands of these reductions.
    """
    _, inner, top = parts(kernel)
    sums = [r for name, r in n.accumulators(kernel).items() if name in kept and isinstance(r, l.Reduce)]
    along: dict[Any, list[Any]] = {}
    for r in top:
        along.setdefault(r.axes[-1], []).extend(r.args)
    for a in inner:
        along.setdefault(a, []).extend(s.value for s in kernel.stores if a in s.free)
    found, known = [], set[l.Buffer]()
    for axis, terms in along.items():
        made = {substitute(r.args[0], {r.axes[-1]: axis}) for r in sums if r.axes[-1] is not axis}
        steps = topological(terms, stop={*top, *made}.__contains__)
        mine = [x for x in steps if axis in x.free and x not in made]
        loads = [x for x in mine if isinstance(x, l.Load) and x.buffer not in known]
        known |= {x.buffer for x in loads if x.buffer.name in kept}
        cost = sum(x.fn.cost * math.prod(map(size_of, x.free)) for x in mine if isinstance(x, l.Apply))
        found.append(_Walk(axis, sum(map(bytes_of, loads)), cost))
    return found


def crowded(kernel: l.Kernel, gpu: Gpu) -> bool:
    """Whether the few blocks that share short reductions have so many points of rows to compute that the others would
    be faster, even a launch later.
    """
    rows, inner, top = parts(kernel)
    if not (inner and top) or column_of(rows, top) is not None:
        return False
    chosen = reduction(kernel, gpu)
    speed = min(gpu.memory, _blocks(chosen) * gpu.memory / gpu.processors)
    every = _inside(kernel, inner)
    read, rest, others = (sum(map(bytes_of, x)) for x in (set(loaded(top)), every, every - _alike(top, inner)))
    whole = read + (others if chosen.operands else rest)
    return read / speed + rest / gpu.memory + gpu.launch < whole / speed


def _alike(top: Sequence[l.Reduce], inner: Sequence[Any]) -> set[l.Load]:
    """What reductions read in their steps, as it is read at the points of a row."""
    return {substitute(x, {r.axes[-1]: a}) for r in top for x in loaded([r]) if r.axes[-1] in x.free for a in inner}


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


def again(kernel: l.Kernel, gpu: Gpu) -> list[l.Reduce]:
    """Reductions that rows would compute again for an axis around them that they do not know, where reading that much
    again takes longer than a kernel of their own.
    """
    rows, _, top = parts(kernel)
    first = [r for r in top if not any(x in top for x in topological(r.args))]
    found = []
    for r in first:
        times = math.prod(size_of(a) for a in rows if a not in r.free)
        read = sum(map(bytes_of, loaded([r])))
        if (times - 1) * read / gpu.cache > 2 * gpu.launch:
            found.append(r)
    return found


def _stages(top: Sequence[l.Reduce]) -> int:
    """How many reductions come one after the other."""
    depth: dict[l.Reduce, int] = {}
    for r in topological(top):
        if isinstance(r, l.Reduce) and r in top:
            depth[r] = 1 + max((depth[x] for x in topological(r.args) if x in depth), default=0)
    return max(depth.values())


def unit(top: Sequence[l.Reduce]) -> int:
    """What the pieces of reductions should be multiples of: what is loaded at once."""
    return min(vector_of(leaves([r]), r.axes[-1]) for r in top)


def _even(length: int, most: int, unit: int) -> int:
    """As many pieces as there may be, or up to half of that where they are of one size then."""
    found = (s for u in (unit, 1) for s in range(most, most // 2, -1) if length % s == 0 and length // s % u == 0)
    return next(found, -(-length // (-(-length // (most * unit)) * unit)))


def in_moments(kernel: l.Kernel, pieces: int) -> bool:
    """Whether so many pieces of a kernel's moments are as fast as they may be: where they are not equally long, each
    begins anywhere, and elements of less than a word are loaded one by one then.
    """
    _, _, top = parts(kernel)
    return size_of(top[0].axes[-1]) % pieces == 0 or all(x.dtype.size >= WORD for x in loaded(top))


def strangers(kernel: l.Kernel) -> bool:
    """Whether what is computed at the points of rows needs none of their reductions and reads other places than these
    do: only the extents of their axes are alike.
    """
    _, inner, top = parts(kernel)
    points = [s for s in kernel.stores if s.free & set(inner)]
    terms = set(topological(points))
    return bool(points) and bool(top) and not terms & {*top, *_alike(top, inner)}


def _inside(kernel: l.Kernel, inner: Sequence[Any]) -> set[l.Load]:
    """What is loaded or stored at every point of a row, as loads."""
    loads = [x for x in topological(kernel.stores) if isinstance(x, l.Load)]
    stores = [l.Load(s.buffer, s.index) for s in kernel.stores]
    return {x for x in (*loads, *stores) if x.free & set(inner)}
