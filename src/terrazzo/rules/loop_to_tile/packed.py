"""Operands of a sum of products, copied so that memory runs along an axis that is summed over."""

from __future__ import annotations

from typing import Any

from terrazzo.ir.address import coefficient, flatten, mentions
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Var
from terrazzo.ir.node import transform
from terrazzo.ir.sites import product
from terrazzo.ir.types import Type
from terrazzo.rules.loop_to_tile.collapse import collapse


def packed(kernel: l.Kernel) -> tuple[l.Kernel, ...]:
    """Copies of the factors of a sum of products that are not contiguous along the longest axis that both are summed
    over, and `kernel`, which reads these.

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
        with kernel('z_x', z_x=f32[2, 9, 3] @ (27, 1, 9)):
            for a0 in free(54):
                in0 = x[a0 // 27, a0 % 9, (a0 // 9) % 3]
                z_x[a0 // 27, a0 % 9, (a0 // 9) % 3] = in0
        with kernel('z', z=f32[2, 3, 4]):
            for a0 in free(2):
                for a1 in free(3):
                    for a2 in free(4):
                        for r0 in reduce(9):
                            in0 = z_x[a0, r0, a1]
                            in1 = w[a2, r0]
                            v0 = mul(in0, in1)
                            acc0 <- sum(v0)
                        z[a0, a1, a2] = acc0
        return (z,)
    """
    p = product(kernel)
    if p is None or len(p.sites) != 1 or len(p.sites[0].terms) > 1:
        return (kernel,)
    loads = [x for x in p.operands if isinstance(x, l.Load)]
    shared = [a for a in p.axes if len(loads) == 2 and all(_dimension(x, a) is not None for x in loads)]
    if not shared:
        return (kernel,)
    depth = max(shared, key=lambda a: (all(_contiguous(x, a) for x in loads), a.extent))
    copies: list[l.Kernel] = []
    taken: dict[l.Load, l.Load] = {}
    for x in loads:
        if not _contiguous(x, depth):
            copy = _copy(f"{kernel.name}_{x.buffer.name}", x.buffer, _dimension(x, depth) or 0)
            taken[x] = l.Load.make(copy.stores[0].buffer, x.index, x.inside)
            copies.append(copy)

    def visit(node: Any) -> Any:
        return taken.get(node, node) if isinstance(node, l.Load) else node

    reads = tuple(transform(s, visit) for s in kernel.stores)
    return (*copies, l.Kernel(kernel.name, kernel.axes, reads, kernel.source)) if copies else (kernel,)


def _contiguous(x: l.Load, axis: Any) -> bool:
    return coefficient(flatten(x.index, x.buffer.type.element_strides), axis) == 1


def _dimension(x: l.Load, axis: Any) -> int | None:
    """The dimension that an axis walks by itself, where it is in no other."""
    found = [d for d, e in enumerate(x.index) if mentions(e, axis)]
    return found[0] if len(found) == 1 and x.index[found[0]] is axis else None


def _copy(name: str, source: l.Buffer, last: int) -> l.Kernel:
    """A kernel that stores a buffer with one of its dimensions contiguous, and the others as they were."""
    shape = source.type.static_shape
    order = [*(d for d in range(len(shape)) if d != last), last]
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = step
        step *= shape[d]
    axes = [Var(f"a{order.index(d)}", n) for d, n in enumerate(shape)]
    index: tuple[IntExpr, ...] = tuple(axes)
    copy = l.Buffer(name, Type(source.type.dtype, shape, tuple(strides)))
    return collapse(l.Kernel(name, tuple(axes[d] for d in order), (l.Store(copy, index, l.Load(source, index)),)))
