"""Operands of a sum of products, brought to where TMA takes boxes of them: copied so that memory runs along an axis
that is summed over, or in rows that begin at multiples of 16 bytes; and stored, where they are computed on their way.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from itertools import count
from typing import Any

import numpy as np

from terrazzo.collector import remembered
from terrazzo.ir.address import coefficient, evaluate, flatten, mentions
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, FloorDiv, IntExpr, Loaded, Mod, Var, at_least, at_most, terms_of
from terrazzo.ir.node import Node, substitute, topological, transformed
from terrazzo.ir.sites import Product, called, loads, product
from terrazzo.ir.types import Type, ordered_strides
from terrazzo.rules.access import WIDEST, box
from terrazzo.rules.loop_to_tile.walked.collapse import collapse
from terrazzo.rules.loop_to_tile.walked.threads import size_of, step

LEAST = 16
"""Steps that an instruction takes together: an axis of fewer is worth no boxes, however it lies in memory."""


@remembered
def packed(kernel: l.Kernel, beside: frozenset[Any] = frozenset()) -> tuple[l.Kernel, ...]:
    """Copies of the factors of a sum of products that are not contiguous along the longest axis that both are summed
    over, or of which rows along it do not all begin at multiples of 16 bytes, as those of a slice of channels, and
    `kernel`, which reads these. Rows of copies do. Those that lie so along one of the axes `beside` are not copied.

    @loop
    def f(x: f32[2, 9, 3], w: f32[4, 9]):
        with kernel('z', z=f32[2, 3, 4]):
            for a0 in free(2):
                for a1 in free(3):
                    for a2 in free(4):
                        for r0 in reduce(9):
                            in0 = x[a0, r0, a1]
                            in1 = w[a2, r0]
                            v0 = mul(in0, in1)
                            acc0 <- sum(v0)
                        z[a0, a1, a2] = acc0
        return (z,)
    =>
    @loop
    def f(x: f32[2, 9, 3], w: f32[4, 9]):
        with kernel('z_x', z_x=f32[2, 9, 3] @ (36, 1, 12)):
            for a0 in free(54):
                in0 = x[a0 // 27, a0 % 9, (a0 // 9) % 3]
                z_x[a0 // 27, a0 % 9, (a0 // 9) % 3] = in0
        with kernel('z_w', z_w=f32[4, 9] @ (12, 1)):
            for a0 in free(36):
                in0 = w[a0 // 9, a0 % 9]
                z_w[a0 // 9, a0 % 9] = in0
        with kernel('z', z=f32[2, 3, 4]):
            for a0 in free(2):
                for a1 in free(3):
                    for a2 in free(4):
                        for r0 in reduce(9):
                            in0 = z_x[a0, r0, a1]
                            in1 = z_w[a2, r0]
                            v0 = mul(in0, in1)
                            acc0 <- sum(v0)
                        z[a0, a1, a2] = acc0
        return (z,)
    """
    p = product(kernel)
    if p is None or len(p.sites) != 1 or len(p.sites[0].terms) > 1:
        return (kernel,)
    loads = [x for x in p.operands if isinstance(x, l.Load)]
    shared = [a for a in p.axes if len(loads) == 2 and all(dimension(x, a) is not None for x in loads)]
    if not shared:
        return (kernel,)
    depth = max(shared, key=lambda a: (a.extent >= LEAST, all(_contiguous(x, a) for x in loads), a.extent))
    return _copied(kernel, {x: depth for x in loads if not any(_evenly(x, a) for a in (depth, *(beside & x.free)))})


def _evenly(x: l.Load, axis: Any) -> bool:
    """Whether an operand is contiguous along an axis, in rows that begin at multiples of 16 bytes."""
    return _contiguous(x, axis) and even(x.buffer) and not _begins(x, axis)


def _begins(x: l.Load, axis: Any) -> int:
    """Where rows of a slice begin, along an axis in which they do not so at a multiple of 16 bytes; 0 for others."""
    first = substitute(x.index[dimension(x, axis) or 0], {axis: 0})
    return first if _contiguous(x, axis) and isinstance(first, int) and first * x.dtype.size % WIDEST else 0


def _copied(kernel: l.Kernel, along: Mapping[l.Load, Any]) -> tuple[l.Kernel, ...]:
    """Copies of operands with rows that begin at multiples of 16 bytes along an axis of each, and `kernel`, which reads
    these. Of a slice that begins amid rows it is the slice alone.
    """
    copies: dict[tuple[l.Buffer, int], l.Kernel] = {}
    taken: dict[Node, l.Load] = {}
    for x, axis in along.items():
        last, begins = dimension(x, axis) or 0, _begins(x, axis)
        part = (begins, size_of(axis)) if begins else None
        name = f"{kernel.name}_{x.buffer.name}" + (f"_{begins}" if begins else "")
        if (x.buffer, begins) not in copies:
            copies[x.buffer, begins] = turned_copy(name, x.buffer, last, pitch=WIDEST // x.dtype.size, part=part)
        index = tuple(e - begins if d == last else e for d, e in enumerate(x.index))
        taken[x] = l.Load.make(copies[x.buffer, begins].stores[0].buffer, index, x.inside)
    return reading(kernel, copies.values(), taken)


def stored_first(kernel: l.Kernel, kept: Collection[Node] = ()) -> tuple[l.Kernel, ...]:
    """Kernels that store the operands of a product that are computed on their way, or lie in no boxes of memory, and
    `kernel`, which reads these. Some may be `kept`, which are made on their way.

    @loop
    def f(x: f32[3, 9], w: f32[5, 9]):
        with kernel('z', z=f32[3, 5]):
            for a0 in free(3):
                for a1 in free(5):
                    for r0 in reduce(9):
                        in0 = x[a0, r0]
                        v0 = tanh(in0)
                        in1 = w[a1, r0]
                        v1 = mul(v0, in1)
                        acc0 <- sum(v1)
                    z[a0, a1] = acc0
        return (z,)
    =>
    @loop
    def f(x: f32[3, 9], w: f32[5, 9]):
        with kernel('z_x', z_x=f32[3, 9] @ (12, 1)):
            for a0 in free(27):
                in0 = x[a0 // 9, a0 % 9]
                v0 = tanh(in0)
                z_x[a0 // 9, a0 % 9] = v0
        with kernel('z', z=f32[3, 5]):
            for a0 in free(3):
                for a1 in free(5):
                    for r0 in reduce(9):
                        in0 = z_x[a0, r0]
                        in1 = w[a1, r0]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    z[a0, a1] = acc0
        return (z,)
    """
    p = product(kernel)
    taken: dict[Node, l.Load] = {}
    made: list[l.Kernel] = []
    for x in p.operands if p is not None else ():
        walked = [a for a in (*kernel.axes, *p.axes) if a in x.free]  # type: ignore[union-attr]
        across = _across(x, p)  # type: ignore[arg-type]
        fits = isinstance(x, l.Load) and not isinstance(box(x, dict.fromkeys(walked, 1)), str)
        if x in taken or x in kept or (fits and not across and not _digits_uneven(x)):  # type: ignore[arg-type]
            continue
        taken_names = {y.name for y in made}
        name = next(n for n in (f"{kernel.name}_{called(x)}{'_' * k}" for k in count()) if n not in taken_names)
        walked.sort(key=lambda a: -_step(x, a))
        inner = (p.m, p.n, *p.axes)  # type: ignore[union-attr]
        if walked[-1] not in inner:  # boxes would have no neighbours in memory
            walked.sort(key=lambda a: inner.index(a) + 1 if a in inner else 0)
        shape = tuple(a.extent for a in walked)
        room = WIDEST // x.dtype.size  # type: ignore[attr-defined]
        strides = ordered_strides(shape, range(len(shape)), room)
        place = l.Buffer(name, Type(x.dtype, shape, strides))  # type: ignore[attr-defined]
        axes = [Var(f"a{d}", n) for d, n in enumerate(shape)]
        store = l.Store(place, tuple(axes), substitute(x, dict(zip(walked, axes, strict=True))))
        made.append(collapse(l.Kernel(name, tuple(axes), (store,), kernel.source)))
        taken[x] = l.Load.make(place, tuple(walked), ())
    return reading(kernel, made, taken)


def padded(kernel: l.Kernel) -> tuple[l.Kernel, ...]:
    """Copies of the operands of a product whose rows do not all begin at multiples of 16 bytes, in rows that do, and
    `kernel`, which reads these. They end in zeros, so threads store 16 bytes at once, and nobody asks where rows end
    who goes no further.

    @loop
    def f(x: f32[3, 9], w: f32[5, 9]):
        with kernel('z', z=f32[3, 5]):
            for a0 in free(3):
                for a1 in free(5):
                    for r0 in reduce(9):
                        in0 = x[a0, r0]
                        in1 = w[a1, r0]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    z[a0, a1] = acc0
        return (z,)
    =>
    @loop
    def f(x: f32[3, 9], w: f32[5, 9]):
        with kernel('z_x', z_x=f32[3, 12] @ (12, 1)):
            for a0 in free(36):
                in0 = x[a0 // 12, a0 % 12] if a0 % 12 < 9 else 0
                z_x[a0 // 12, a0 % 12] = in0
        with kernel('z_w', z_w=f32[5, 12] @ (12, 1)):
            for a0 in free(60):
                in0 = w[a0 // 12, a0 % 12] if a0 % 12 < 9 else 0
                z_w[a0 // 12, a0 % 12] = in0
        with kernel('z', z=f32[3, 5]):
            for a0 in free(3):
                for a1 in free(5):
                    for r0 in reduce(9):
                        in0 = z_x[a0, r0]
                        in1 = z_w[a1, r0]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    z[a0, a1] = acc0
        return (z,)
    """
    p = product(kernel)
    copies: dict[l.Buffer, l.Kernel] = {}
    taken: dict[Node, l.Load] = {}
    for x in p.operands if p is not None else ():
        last = _uneven(x.buffer) if isinstance(x, l.Load) else None
        if last is not None and isinstance(x, l.Load):
            if x.buffer not in copies:
                room = WIDEST // x.dtype.size
                copies[x.buffer] = turned_copy(f"{kernel.name}_{x.buffer.name}", x.buffer, last, room)
            place, index = copies[x.buffer].stores[0].buffer, x.index[last]
            row, room = (b.type.static_shape[last] for b in (x.buffer, place))
            zeros = {row - 1 - index} if at_most(index, room - 1) else set()
            taken[x] = l.Load.make(place, x.index, tuple(e for e in x.inside if e not in zeros))
    return reading(kernel, copies.values(), taken)


SMALL = 8
"""How many times smaller than the largest a buffer is at least that is copied for how it lies in memory."""


def copied_along(kernel: l.Kernel, axis: Any, small: int = SMALL) -> tuple[l.Kernel, ...]:
    """Copies of the buffers, so many times smaller than the largest, of which an axis of points walks a dimension in
    long steps, with that dimension contiguous, and `kernel`, which reads these. Images are walked by windows, too.

    @loop
    def f(x: f32[40, 3], w: f32[3, 4]):
        with kernel('z', z=f32[37, 3]):
            for a0 in free(37):
                for a1 in free(3):
                    for r0 in reduce(4):
                        in0 = x[a0 + r0, a1]
                        in1 = w[a1, r0]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    z[a0, a1] = acc0
        return (z,)
    =>
    @loop
    def f(x: f32[40, 3], w: f32[3, 4]):
        with kernel('z_w', z_w=f32[3, 4] @ (1, 3)):
            for a0 in free(12):
                in0 = w[a0 % 3, a0 // 3]
                z_w[a0 % 3, a0 // 3] = in0
        with kernel('z', z=f32[37, 3]):
            for a0 in free(37):
                for a1 in free(3):
                    for r0 in reduce(4):
                        in0 = x[a0 + r0, a1]
                        in1 = z_w[a1, r0]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    z[a0, a1] = acc0
        return (z,)
    """
    loads = [x for x in topological([s.value for s in kernel.stores]) if isinstance(x, l.Load)]
    largest = max((math.prod(x.buffer.type.static_shape) for x in loads), default=0)
    copies: dict[l.Buffer, l.Kernel] = {}
    taken: dict[Node, l.Load] = {}
    for x in loads:
        last = _walked(x, axis)
        if last is None or math.prod(x.buffer.type.static_shape) * small > largest:
            continue
        if x.buffer not in copies:
            copies[x.buffer] = turned_copy(f"{kernel.name}_{x.buffer.name}", x.buffer, last)
        taken[x] = l.Load.make(copies[x.buffer].stores[0].buffer, x.index, x.inside)
    return reading(kernel, copies.values(), taken)


@remembered
def channels_beside(kernel: l.Kernel) -> tuple[l.Kernel, ...]:
    """Copies of the factors of a sum of products that are contiguous along no axis of their own, with their longest one
    contiguous, and of those whose rows begin elsewhere than at multiples of 16 bytes; and `kernel`, which reads these.

    @loop
    def f(g: f32[16, 4, 6], x: f32[16, 8, 6]):
        with kernel('z', z=f32[4, 8, 3]):
            for a0 in free(4):
                for a1 in free(8):
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
    def f(g: f32[16, 4, 6], x: f32[16, 8, 6]):
        with kernel('z_x', z_x=f32[16, 8, 6] @ (48, 1, 8)):
            for a0 in free(768):
                in0 = x[a0 // 48, a0 % 8, (a0 // 8) % 6]
                z_x[a0 // 48, a0 % 8, (a0 // 8) % 6] = in0
        with kernel('z_g', z_g=f32[16, 4, 6] @ (24, 1, 4)):
            for a0 in free(384):
                in0 = g[a0 // 24, a0 % 4, (a0 // 4) % 6]
                z_g[a0 // 24, a0 % 4, (a0 // 4) % 6] = in0
        with kernel('z', z=f32[4, 8, 3]):
            for a0 in free(4):
                for a1 in free(8):
                    for a2 in free(3):
                        for r0, r1 in reduce(16, 6):
                            in0 = z_g[r0, a0, r1]
                            in1 = z_x[r0, a1, r1 + a2 - 1] if r1 + a2 >= 1 and r1 + a2 < 7 else 0
                            v0 = mul(in0, in1)
                            acc0 <- sum(v0)
                        z[a0, a1, a2] = acc0
        return (z,)
    """
    return _copied(kernel, {**_uneven_channels(kernel), **_channels_apart(kernel)})


def _uneven_channels(kernel: l.Kernel) -> dict[l.Load, Any]:
    """The operands of a sum of products that are contiguous along an axis of their own factor alone, in rows that do
    not all begin at multiples of 16 bytes, each with that axis.
    """
    p = product(kernel)
    if p is None or len(p.sites) != 1:
        return {}
    first, second = p.factors(p.sites[0])
    return {
        x: a
        for mine, other in ((first, second), (second, first))
        for a in kernel.axes
        for x in p.operands
        if a in mine.free - other.free and isinstance(x, l.Load) and a in x.free
        if dimension(x, a) is not None and _contiguous(x, a) and not _evenly(x, a) and size_of(a) >= LEAST
    }


def across_channels(kernel: l.Kernel) -> dict[l.Load, int]:
    """What a sum of products reads that is contiguous along no axis of its own factor alone, each with the dimension of
    the longest of these.
    """
    return {x: d for x, a in _channels_apart(kernel).items() if (d := dimension(x, a)) is not None}


def _channels_apart(kernel: l.Kernel) -> dict[l.Load, Any]:
    """What a sum of products reads that is contiguous along no axis of its own factor alone, each with the longest of
    these.
    """
    p = product(kernel)
    if p is None or len(p.sites) != 1:
        return {}
    found: dict[l.Load, Any] = {}
    first, second = p.factors(p.sites[0])
    for mine, other in ((first, second), (second, first)):
        own = [a for a in kernel.axes if a in mine.free - other.free]
        loads = [x for x in p.operands if isinstance(x, l.Load) and not x.free.isdisjoint(own)]
        alone = [a for a in own if all(dimension(x, a) is not None for x in loads)]
        if any(all(_contiguous(x, a) for x in loads) for a in alone):
            continue
        whole = [a for a in alone if all(_wide(x, a) for x in loads)]
        found |= dict.fromkeys(loads if whole else (), max(whole, key=size_of, default=None))
    return found


def _wide(x: l.Load, axis: Any) -> bool:
    """Whether rows along an axis begin at multiples of 16 bytes where it is contiguous."""
    size: int = axis.extent * x.dtype.size
    return size % WIDEST == 0


def even(buffer: l.Buffer) -> bool:
    """Whether all rows of a buffer begin at multiples of 16 bytes."""
    steps = zip(buffer.type.shape, buffer.type.element_strides, strict=True)
    return all(isinstance(s, int) and s * buffer.type.dtype.size % WIDEST == 0 for n, s in steps if 1 not in (n, s))


def _uneven(buffer: l.Buffer) -> int | None:
    """The contiguous dimension of a buffer of which rows begin elsewhere than at multiples of 16 bytes; None where all
    do, or none is contiguous.
    """
    if even(buffer):
        return None
    found = (d for d, s in enumerate(buffer.type.element_strides) if s == 1 and buffer.type.shape[d] != 1)
    return max(found, default=None)


def _across(x: Node, p: Product) -> bool:
    """Whether memory runs along an axis of the batch where an operand lies, so that none of the product's boxes have
    neighbours in it.
    """
    if not isinstance(x, l.Load):
        return False
    found = box(x, dict.fromkeys((a for a in (p.m, p.n, *p.axes) if a in x.free), 1))
    return not isinstance(found, str) and found.along[-1] is None and any(_contiguous(x, a) for a in p.batch)


def _step(x: Node, axis: Any) -> int:
    """How far apart in memory the first two points of an axis are that an operand is read at: so threads that copy it
    walk memory.
    """
    return max((abs(step(load, axis) or 0) for load in loads(x) if axis in load.free), default=0)


def _digits_uneven(x: l.Load) -> bool:
    """Whether several dimensions are the digits of an axis, and rows begin elsewhere than at multiples of 16 bytes: no
    padding of one dimension changes that.
    """
    digits = any(isinstance(e, FloorDiv | Mod) for e in topological([e for e in x.index if isinstance(e, Expr)]))
    return digits and _uneven(x.buffer) is not None


def reading(kernel: l.Kernel, copies: Iterable[l.Kernel], taken: dict[Node, l.Load]) -> tuple[l.Kernel, ...]:
    """Copies, and `kernel` with what is taken from them."""
    if not taken:
        return (kernel,)

    def visit(node: Any) -> Any:
        return taken.get(node, node)

    reads = transformed(kernel.stores, visit)
    return (*copies, l.Kernel(kernel.name, kernel.axes, reads, kernel.source))


def _walked(x: l.Load, axis: Any) -> int | None:
    """The dimension whose places lie apart and that an axis walks from one to the next, or slower, where it is in no
    other: by itself, as that of an image under a window, or divided, as that of the image behind a pooling.
    """
    found = [d for d, e in enumerate(x.index) if mentions(e, axis)]
    if len(found) != 1 or x.buffer.type.element_strides[found[0]] == 1:
        return None
    place: Any = x.index[found[0]]
    if any(isinstance(e, Loaded) for e in topological([place])):
        return None
    points = evaluate(place, {**dict.fromkeys(place.free, 0), axis: np.arange(size_of(axis))})
    return found[0] if np.abs(np.diff(points)).max(initial=0) <= 1 else None


def _contiguous(x: l.Load, axis: Any) -> bool:
    return coefficient(flatten(x.index, x.buffer.type.element_strides), axis) == 1


def dimension(x: l.Load, axis: Any) -> int | None:
    """The dimension that an axis walks by itself, or of whose places it is the last digit, from wherever these begin,
    where it is in no other.
    """
    found = [d for d, e in enumerate(x.index) if mentions(e, axis)]
    if len(found) != 1:
        return None
    terms = dict(terms_of(x.index[found[0]]))
    alone = terms.pop((axis,), 0) == 1 and not any(c % axis.extent for factors, c in terms.items() if factors)
    return found[0] if alone else None


def turned_copy(
    name: str, source: l.Buffer, last: int, room: int = 1, pitch: int = 1, part: tuple[int, int] | None = None
) -> l.Kernel:
    """A kernel that stores a buffer with one of its dimensions contiguous, in rows of a multiple of `room` elements,
    and the others as they were. Rows end in zeros. They begin at multiples of `pitch` elements. Of that dimension it
    may be a part: where that begins, and how long it is.
    """
    first, count = part or (0, source.type.static_shape[last])
    shape = [-(-count // room) * room if d == last else n for d, n in enumerate(source.type.static_shape)]
    order = [*(d for d in range(len(shape)) if d != last), last]
    axes = [Var(f"a{order.index(d)}", n) for d, n in enumerate(shape)]
    index: tuple[IntExpr, ...] = tuple(axes)
    inside = (count - 1 - axes[last],)
    read = tuple(e + first if d == last else e for d, e in enumerate(index))
    load = l.Load.make(source, read, () if at_least(*inside, 0) else inside)
    copy = l.Buffer(name, Type(source.type.dtype, tuple(shape), ordered_strides(shape, order, pitch)))
    return collapse(l.Kernel(name, tuple(axes[d] for d in order), (l.Store(copy, index, load),)))
