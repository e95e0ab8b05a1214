"""Store images the way convolutions read them: with the channels, which are summed over, side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.canonical import many_alike
from terrazzo.ir.contraction import operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.instances import Instance, buffers_of
from terrazzo.ir.node import topological, transform
from terrazzo.ir.sites import Product, product
from terrazzo.ir.types import Type, ordered_strides
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.access import WIDEST
from terrazzo.rules.moves import meeting, slides

FILTER = 8
"""How many times smaller than an image that is stored what is read for it is at least that is none: a filter."""
IMAGE = 3
"""Dimensions of an image, at least."""


def channels_last(program: l.Program, log: Log, move_results: bool = True) -> l.Program:
    """`program` with images stored channels last: temporaries in 16 bits where a sum of products runs along the
    channels, and whatever is made of images that are so, in any type, results with `move_results` only.

    @loop
    def f(x: bf16[2, 8, 4] @ (32, 1, 8), w: bf16[4, 8]):
        with kernel('y', y=bf16[2, 4, 4]):
            for a0 in free(2):
                for a1 in free(4):
                    for a2 in free(4):
                        for r0 in reduce(8):
                            in0 = x[a0, r0, a2]
                            v0 = f32(in0)
                            in1 = w[a1, r0]
                            v1 = f32(in1)
                            v2 = mul(v0, v1)
                            acc0 <- sum(v2)
                        v3 = bf16(acc0)
                        y[a0, a1, a2] = v3
        return (y,)
    =>
    @loop
    def f(x: bf16[2, 8, 4] @ (32, 1, 8), w: bf16[4, 8]):
        with kernel('y', y=bf16[2, 4, 4] @ (16, 1, 4)):
            for a0 in free(2):
                for a2 in free(4):
                    for a1 in free(4):
                        for r0 in reduce(8):
                            in0 = x[a0, r0, a2]
                            v0 = f32(in0)
                            in1 = w[a1, r0]
                            v1 = f32(in1)
                            v2 = mul(v0, v1)
                            acc0 <- sum(v2)
                        v3 = bf16(acc0)
                        y[a0, a1, a2] = v3
        return (y,)
    """
    calls = {b for s in program.steps if isinstance(s, l.Call) for b in (*s.reads, *s.writes)}
    results = {*program.results}
    fixed = {*program.inputs, *calls}
    kernels = [s for s in program.steps if isinstance(s, l.Kernel)]
    forms = [Instance.of(s) if many_alike(program) else Instance.of(s, s) for s in kernels]
    alike = [(x.form, dict(zip(buffers_of(x.form), x.buffers, strict=True))) for x in forms]
    last: dict[l.Buffer, int] = {}
    for kernel, real in alike:
        for x in _images(product(kernel)):
            b = real[x.buffer]
            if b not in fixed and b not in results and (d := _dimension(x, kernel)) is not None:
                last.setdefault(b, d)
    if not (move_results and any(_shaped(b.type) and _last(b, {}) is not None for b in program.inputs)):
        fixed |= results  # PyTorch's are as they always are, and would be copied from these
    for kernel, real in alike:
        stored = [real[s.buffer] for s in kernel.stores]
        if any(b in fixed and _shaped(b.type) and _last(b, {}) is None for b in stored):
            continue  # what one kernel stores lies alike
        for s, b in zip(kernel.stores, stored, strict=True):
            if b not in fixed:
                lies = {x: d for x, y in real.items() if (d := _last(y, last)) is not None}
                if (d := _as_read(kernel, s, lies, b not in results)) is not None:
                    last.setdefault(b, d)
    new = {
        b: l.Buffer(b.name, _moved(b.type, d))
        for b, d in last.items()
        if _shaped(b.type) and b.type.strides is None and d != b.type.rank - 1
    }
    for maker, s in [(x, s) for x in kernels for s in x.stores if s.buffer in new]:
        if why := _reduces_rows(maker, s, last[s.buffer]) or _read_by_rows(kernels, s.buffer):
            log.add(Event("store_as_read", "channels_last", s.buffer.name, False, why))
            del new[s.buffer]
    if not new:
        return program
    for old, now in new.items():
        log.add(Event("store_as_read", "channels_last", old.name, True, f"{old.type} is stored as {now.type}"))

    def visit(node: Any) -> Any:
        if isinstance(node, l.Load) and node.buffer in new:
            return l.Load.make(new[node.buffer], node.index, node.inside)
        if isinstance(node, l.Store) and node.buffer in new:
            return l.Store(new[node.buffer], node.index, node.value)
        return node

    memo: dict[Any, Any] = {}
    steps = tuple(_in_order(transform(s, visit, memo)) if isinstance(s, l.Kernel) else s for s in program.steps)
    changed = [(old, now) for old, now in zip(program.steps, steps, strict=True) if now is not old]
    log.applied("store_as_read", "channels_last", ", ".join(b.name for b in new), *zip(*changed, strict=True))
    return l.Program(program.name, program.inputs, steps, tuple(new.get(b, b) for b in program.results))


def _image(kind: Type) -> bool:
    """Whether tensor cores take what is of a type."""
    return _shaped(kind) and kind.dtype.is_float and kind.dtype.size == 2


def _shaped(kind: Type, rank: int = IMAGE) -> bool:
    return kind.rank >= rank and kind.dtype.kind != "complex" and all(isinstance(e, int) for e in kind.shape)


def _reduces_rows(kernel: l.Kernel, s: l.Store, d: int) -> str:
    """Why the points along a dimension cannot be the innermost ones, or nothing: what is reduced for each of them would
    be reduced again for every point around it.
    """
    axis = s.index[d]
    for r in topological([s.value]) if product(kernel) is None else ():
        if isinstance(r, l.Reduce) and axis in r.free and any(a not in r.free and a in s.free for a in kernel.axes):
            return f"a {r.monoid.name} is known for every {axis}, and would be computed again"
    return ""


def _read_by_rows(kernels: Sequence[l.Kernel], b: l.Buffer) -> str:
    """Who reduces rows of a buffer that lie in memory one behind the other, or nothing."""
    for kernel in [x for x in kernels if b in x.reads and product(x) is None]:
        for r in [x for x in topological(kernel.stores) if isinstance(x, l.Reduce)]:
            loads = [x for x in topological(r.args) if isinstance(x, l.Load)]
            if any(x.buffer is b and (x.index[-1],) == r.axes for x in loads):
                return f"{kernel.name} reduces its rows, which lie in memory one behind the other"
    return ""


def _wide(kind: Type, d: int) -> bool:
    """Whether rows along a dimension would begin at multiples of 16 bytes."""
    return kind.static_shape[d] * kind.dtype.size % WIDEST == 0


def _moved(kind: Type, last: int) -> Type:
    """The type with one dimension contiguous, and the others around it as they were."""
    order = [*(d for d in range(kind.rank) if d != last), last]
    return Type(kind.dtype, kind.shape, ordered_strides(kind.static_shape, order))


def _images(p: Product | None) -> Iterator[l.Load]:
    """The image of a sum of products: the factor that knows several axes of its own. Sums over the points of an image
    have none, since they read those of others.
    """
    if p is None:
        return
    for c in p.sites:
        results, summed = meeting((x for x in c.operands if isinstance(x, l.Load)), p.kernel.axes, p.axes)
        if results < summed:
            continue
        for f, g in (c.factors, c.factors[::-1]):
            own = [a for a in p.kernel.axes if a in f.free and a not in g.free]
            x = operand(f)
            if len(own) > 1 and isinstance(x, l.Load) and _image(x.buffer.type):
                yield x


def _dimension(x: l.Load, kernel: l.Kernel) -> int | None:
    """The dimension of an image that is summed over, and nothing else: its channels."""
    p = product(kernel)
    assert p is not None
    found = [d for d, e in enumerate(x.index) if any(e is a for a in p.axes)]
    return found[0] if len(found) == 1 else None


def _as_read(kernel: l.Kernel, s: l.Store, lies: dict[l.Buffer, int], ours: bool) -> int | None:
    """Which dimension of a store lies last in what it is made of, where `lies` says which are contiguous. Sums of
    products are best stored so, where that is ours to choose: what they read is copied, where it lies otherwise.
    """
    if not _shaped(s.buffer.type):
        return None
    p = product(kernel)
    if p is not None:
        summed = [(x, d) for x in _images(p) if (d := _dimension(x, kernel)) is not None]
        columns = [a for a in kernel.axes if all(a not in x.free for x in _images(p))]
        if len(columns) != 1 or columns[0] not in s.index:
            return None
        own = s.index.index(columns[0])
        along = any(lies.get(x.buffer) == d or (ours and _wide(x.buffer.type, d)) for x, d in summed)
        few = bool(summed) and ours and _wide(s.buffer.type, own)  # channels are read, which are copied anyway
        return own if along or few else None
    size = math.prod(s.buffer.type.static_shape)
    rows = any(isinstance(x, l.Reduce) and slides(x) for x in topological([s.value]))  # a window lies as its image
    rank = 2 if rows else IMAGE
    loads = [x for x in topological([s.value]) if isinstance(x, l.Load) and _shaped(x.buffer.type, rank)]
    loads = [x for x in loads if math.prod(x.buffer.type.static_shape) * FILTER > size]
    found = {x: x.buffer.type.rank - 1 if (d := lies.get(x.buffer)) is None and rows else d for x in loads}
    channels = {_moved_along(x.index[d], kernel) if d is not None else None for x, d in found.items()}
    axis = channels.pop() if len(channels) == 1 else None
    return s.index.index(axis) if axis is not None and axis in s.index else None


def _moved_along(e: IntExpr, kernel: l.Kernel) -> Any:
    """The axis that a place is, or begins some way along, as those of channels that were put beside others."""
    return next((a for a in kernel.axes if isinstance(e - a, int)), None)


def _last(b: l.Buffer, last: dict[l.Buffer, int]) -> int | None:
    """The dimension of an image that is contiguous, where it is not the last one."""
    if b in last:
        return last[b]
    found = [d for d, s in enumerate(b.type.element_strides) if s == 1 and b.type.shape[d] != 1]
    return found[0] if b.type.strides is not None and len(found) == 1 and found[0] != b.type.rank - 1 else None


def _in_order(kernel: l.Kernel) -> l.Kernel:
    """A kernel whose last axis is the one that its results run along."""
    if any(isinstance(x, l.Scan) for x in topological(kernel.stores)):
        return kernel
    inner = [
        a
        for a in kernel.axes
        if all(coefficient(flatten(s.index, s.buffer.type.element_strides), a) == 1 for s in kernel.stores)
    ]
    if len(inner) != 1 or inner[0] is kernel.axes[-1]:
        return kernel
    axes = (*(a for a in kernel.axes if a is not inner[0]), inner[0])
    return l.Kernel(kernel.name, axes, kernel.stores, kernel.source)
