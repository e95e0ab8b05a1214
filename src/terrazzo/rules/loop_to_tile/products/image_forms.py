"""The form of a product in which boxes of an image are brought in at moved places: what is copied for that first, and
what reads the copies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from terrazzo.hw.gpu import Gpu
from terrazzo.ir.address import flatten, unflatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Var
from terrazzo.ir.node import substitute
from terrazzo.ir.sites import Product, product
from terrazzo.ir.types import contiguous_strides
from terrazzo.rules.loop_to_tile.candidate import Rewrite
from terrazzo.rules.loop_to_tile.products import boxes
from terrazzo.rules.loop_to_tile.products.forms import columns_merged
from terrazzo.rules.loop_to_tile.products.packed import LEAST, dimension, laid_out, packed, reading
from terrazzo.rules.loop_to_tile.walked.collapse import digits_apart
from terrazzo.rules.loop_to_tile.walked.crossed import copying
from terrazzo.rules.loop_to_tile.walked.threads import size_of, step


@dataclass(frozen=True)
class Form:
    """Kernels that copy operands, what reads an image at moved places after them, and the rewrites that led there."""

    copies: tuple[l.Kernel, ...]
    moved: boxes.Moved
    rewrites: tuple[Rewrite, ...]

    def before(self, gpu: Gpu) -> float:
        """Nanoseconds of the copies by the model."""
        return sum(copying(x, gpu) for x in self.copies)


def image_form(kernel: l.Kernel, p: Product, gpu: Gpu) -> Form | None:
    """A product in such a form, with filters along one axis; or after these were stored anew, where its channels are
    digits of an axis; None where it has none.
    """
    whole = columns_merged(kernel, p)
    merged: Rewrite = ("merge_axes", kernel, (whole,))
    if (found := _packed((), whole, gpu, merged)) is not None:
        return found
    *stored, apart = filters_by_digits(kernel)
    return _packed(tuple(stored), apart, gpu, ("filters_by_digits", kernel, (*stored, apart))) if stored else None


def _packed(first: tuple[l.Kernel, ...], whole: l.Kernel, gpu: Gpu, before: Rewrite) -> Form | None:
    *copies, form = packed(whole) if gpu.warpgroups else (whole,)
    moved = boxes.moved(form)[0]
    if moved is None:
        return None
    return Form((*first, *copies), moved, (before, ("packed", whole, (*copies, form))))


def filters_by_digits(kernel: l.Kernel) -> tuple[l.Kernel, ...]:
    """The filters of an image whose channels, side by side in memory, are digits of an axis that is summed over, as
    where pixels were shuffled: stored with channels last, and all else that is summed over, the taps, first, as one
    dimension; and `kernel`, which reads these, with digits apart.

    @loop
    def f(x: f32[6, 16, 8] @ (128, 1, 16), w: f32[4, 32]):
        with kernel('z', z=f32[6, 4, 4]):
            for a0 in free(6):
                for a1 in free(4):
                    for a2 in free(4):
                        for r0 in reduce(32):
                            in0 = x[a0, r0 // 2, r0 % 2 + a1 * 2]
                            in1 = w[a2, r0]
                            v0 = mul(in0, in1)
                            acc0 <- sum(v0)
                        z[a0, a1, a2] = acc0
        return (z,)
    =>
    @loop
    def f(x: f32[6, 16, 8] @ (128, 1, 16), w: f32[4, 32]):
        with kernel('z_w', z_w=f32[2, 4, 16] @ (64, 16, 1)):
            for a0 in free(128):
                in0 = w[(a0 // 16) % 4, (a0 // 64) + (a0 % 16) * 2]
                z_w[a0 // 64, (a0 // 16) % 4, a0 % 16] = in0
        with kernel('z', z=f32[6, 4, 4]):
            for a0 in free(6):
                for a1 in free(4):
                    for a2 in free(4):
                        for r0, r1 in reduce(16, 2):
                            in0 = x[a0, r0, r1 + a1 * 2]
                            in1 = z_w[r1, a2, r0]
                            v0 = mul(in0, in1)
                            acc0 <- sum(v0)
                        z[a0, a1, a2] = acc0
        return (z,)
    """
    apart = digits_apart(kernel)
    p = product(apart)
    loads = [x for x in p.operands if isinstance(x, l.Load)] if p is not None else []
    if p is None or len(p.sites) != 1 or len(loads) != 2 or len(p.operands) != 2:
        return (kernel,)
    filters, image = sorted(loads, key=p.touched)
    depth = [a for a in p.axes if a in image.free and step(image, a) == 1 and size_of(a) >= LEAST]
    if len(depth) != 1 or depth[0] not in filters.free or dimension(filters, depth[0]) is not None:
        return (kernel,)
    own = [a for a in apart.axes if a in filters.free]
    taps = [a for a in p.axes if a is not depth[0]]
    tap = Var(l.fresh_name(), math.prod(map(size_of, taps)))
    digits = dict(zip(taps, unflatten(tap, tuple(map(size_of, taps))), strict=True))
    name = f"{kernel.name}_{filters.buffer.name}"
    copy, taken = laid_out(name, substitute(filters, digits), (tap, *own, depth[0]), kernel.source)
    number = flatten(tuple(taps), contiguous_strides(tuple(map(size_of, taps))))
    return reading(apart, [copy], {filters: substitute(taken, {tap: number})})
