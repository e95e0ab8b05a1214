"""Reductions of images that lie in different orders: lanes step through one of them, whichever axis they take."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.hw.gpu import Gpu
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import Node
from terrazzo.rules.loop_to_tile.products.packed import reading, turned_copy
from terrazzo.rules.loop_to_tile.reductions.rows import bytes_of, loaded, parts
from terrazzo.rules.loop_to_tile.walked.crossed import copying
from terrazzo.rules.loop_to_tile.walked.threads import SECTOR, step


def lie_alike(kernel: l.Kernel) -> tuple[l.Kernel, ...]:
    """Copies of images that reductions read across memory, where they read more of others of the same shape along it,
    in the order in which these lie; and `kernel`, which reads the copies.

    @loop
    def f(x: f32[6, 4, 8], y: f32[6, 4, 8], u: f32[6, 4, 8] @ (32, 1, 4)):
        with kernel('z', z=f32[4]):
            for a0 in free(4):
                for r0 in reduce(48):
                    in0 = x[r0 // 8, a0, r0 % 8]
                    in1 = y[r0 // 8, a0, r0 % 8]
                    v0 = mul(in0, in1)
                    in2 = u[r0 // 8, a0, r0 % 8]
                    v1 = mul(v0, in2)
                    acc0 <- sum(v1)
                z[a0] = acc0
        return (z,)
    =>
    @loop
    def f(x: f32[6, 4, 8], y: f32[6, 4, 8], u: f32[6, 4, 8] @ (32, 1, 4)):
        with kernel('z_u', z_u=f32[6, 4, 8] @ (32, 8, 1)):
            for a0 in free(192):
                in0 = u[a0 // 32, (a0 // 8) % 4, a0 % 8]
                z_u[a0 // 32, (a0 // 8) % 4, a0 % 8] = in0
        with kernel('z', z=f32[4]):
            for a0 in free(4):
                for r0 in reduce(48):
                    in0 = x[r0 // 8, a0, r0 % 8]
                    in1 = y[r0 // 8, a0, r0 % 8]
                    v0 = mul(in0, in1)
                    in2 = z_u[r0 // 8, a0, r0 % 8]
                    v1 = mul(v0, in2)
                    acc0 <- sum(v1)
                z[a0] = acc0
        return (z,)
    """
    rows, _, top = parts(kernel)
    found = [x for x in loaded(top) if len(set(x.buffer.type.static_shape) - {1}) > 1]
    along = {x for r in top for x in loaded([r]) if x in found and step(x, r.axes[-1]) == 1}
    across = {x for x in found if x not in along and any(step(x, a) == 1 for a in rows)}
    few, many = sorted((along, across), key=_bytes)
    shapes = {x.buffer.type.shape for x in (*few, *many)}
    if not few or not many or len(shapes) > 1:
        return (kernel,)
    last = {
        d for x in many for d, s in enumerate(x.buffer.type.element_strides) if s == 1 and x.buffer.type.shape[d] != 1
    }
    if len(last) != 1:
        return (kernel,)
    (d,) = last
    if any(x.buffer.type.element_strides[d] == 1 for x in few):  # rows and columns of one tensor: a copy lies alike
        return (kernel,)
    copies = {x.buffer: turned_copy(f"{kernel.name}_{x.buffer.name}", x.buffer, d) for x in few}
    taken: dict[Node, l.Load] = {x: l.Load.make(copies[x.buffer].stores[0].buffer, x.index, x.inside) for x in few}
    return reading(kernel, copies.values(), taken)


def worth(kernel: l.Kernel, copies: Sequence[l.Kernel], gpu: Gpu) -> bool:
    """Whether copying takes less than sectors of which one element each is read: by every point around a sum."""
    copied = {b for x in copies for b in x.reads}
    _, _, top = parts(kernel)
    sectors: float = sum(SECTOR / x.dtype.size * bytes_of(x) for x in loaded(top) if x.buffer in copied)
    return sum(copying(x, gpu) for x in copies) < sectors / gpu.cache


def _bytes(loads: set[l.Load]) -> int:
    return sum(map(bytes_of, loads))
