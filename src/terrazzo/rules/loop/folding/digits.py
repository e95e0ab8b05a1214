"""A product whose results were shuffled is the product it was: each of its axes is one factor's own again."""

from __future__ import annotations

from terrazzo.ir.contraction import contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.nest import accumulators
from terrazzo.rules.loop_to_tile.walked.collapse import digits_apart


def factors_apart(kernel: l.Kernel) -> l.Kernel:
    """`kernel` with axes for digits, where both factors of a product know an axis by its digits, and fewer axes are
    known to both then: a convolution that was fused with a shuffle of its pixels has rows, columns and channels again.

    @loop
    def f(x: f32[3, 4], w: f32[10, 4]):
        with kernel('z', z=f32[5, 6]):
            for a0 in free(5):
                for a1 in free(6):
                    for r0 in reduce(4):
                        in0 = x[a1 // 2, r0]
                        in1 = w[a0 * 2 + a1 % 2, r0]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    z[a0, a1] = acc0
        return (z,)
    =>
    @loop
    def f(x: f32[3, 4], w: f32[10, 4]):
        with kernel('z', z=f32[5, 6]):
            for a0 in free(5):
                for a1 in free(3):
                    for a2 in free(2):
                        for r0 in reduce(4):
                            in0 = x[a1, r0]
                            in1 = w[a0 * 2 + a2, r0]
                            v0 = mul(in0, in1)
                            acc0 <- sum(v0)
                        z[a0, a1 * 2 + a2] = acc0
        return (z,)
    """
    if not (both := _both(kernel)):
        return kernel
    apart = digits_apart(kernel)
    return apart if _both(apart) < both else kernel


def _both(kernel: l.Kernel) -> int:
    """Points of the axes that both factors of products know; 0 where a kernel reduces in other ways too."""
    carried = accumulators(kernel).values()
    sums = [contraction(r) if isinstance(r, l.Reduce) else None for r in carried]
    points = 1
    for a in kernel.axes:
        known = any(c is not None and all(a in f.free for f in c.factors) for c in sums)
        points *= a.extent if known and isinstance(a.extent, int) else 1
    return points if sums and all(sums) and points > 1 else 0
