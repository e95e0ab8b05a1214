"""A maximum and the sum of exponentials below it as one reduction: its pair of values is in a frame, which moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.monoid import monoid
from terrazzo.ir.node import Node, substitute, topological, transform


@dataclass(frozen=True)
class _Frame:
    """A sum of exponentials below a maximum, or below what is made of that where it is infinite."""

    top: l.Reduce
    total: l.Reduce
    base: Any


def in_frames(kernel: l.Kernel) -> l.Kernel:
    """A kernel whose maxima, and the sums of exponentials below them, are one reduction each.

    @loop
    def f(x: f32[3, 4]):
        with kernel('z', z=f32[3]):
            for a0 in free(3):
                for r0 in reduce(4):
                    acc0 <- max(x[a0, r0])
                for r1 in reduce(4):
                    acc1 <- sum(exp(sub(x[a0, r1], acc0)))
                z[a0] = add(acc0, log(acc1))
        return (z,)
    =>
    @loop
    def f(x: f32[3, 4]):
        with kernel('z', z=f32[3]):
            for a0 in free(3):
                for r0 in reduce(4):
                    in0 = x[a0, r0]
                    acc0 <- logsumexp(in0, f32(1.0))
                v0 = get(acc0, 0)
                v1 = get(acc0, 1)
                v2 = sub(v0, v0)
                v3 = exp(v2)
                v4 = mul(v1, v3)
                v5 = log(v4)
                v6 = add(v0, v5)
                z[a0] = v6
        return (z,)
    """
    found = [f for r in kernel.carried if isinstance(r, l.Reduce) and (f := _frame(r)) is not None]
    known: dict[Node, Node] = {}
    for f in found:
        (axis,), (score,) = l.open_binder(f.top)
        both: Any = l.Reduce.make(monoid("logsumexp"), (axis,), (score, l.Literal(1.0, f.total.dtype)))
        known[f.top] = top = l.Get(both, 0)
        base = substitute(f.base, {f.top: top})
        known[f.total] = l.apply("mul", l.Get(both, 1), l.apply("exp", l.apply("sub", top, base)))
    stores = tuple(transform(s, lambda x: x, dict(known)) for s in kernel.stores)
    return l.Kernel(kernel.name, kernel.axes, stores, kernel.source) if found else kernel


def _frame(r: l.Reduce) -> _Frame | None:
    """A sum as one of exponentials below the maximum of their exponents."""
    if r.monoid.name != "sum" or len(r.axes) != 1:
        return None
    (axis,), (term,) = l.open_binder(r)
    match term:
        case l.Apply(fn=fn, args=(l.Apply(fn=minus, args=(score, base)),)) if (fn.name, minus.name) == ("exp", "sub"):
            tops = [x for x in topological([base]) if isinstance(x, l.Reduce)]
            if len(tops) == 1 and axis not in base.free and tops[0].monoid.name == "max" and len(tops[0].axes) == 1:
                (own,), (arg,) = l.open_binder(tops[0])
                if own.extent == axis.extent and substitute(arg, {own: axis}) is score:
                    return _Frame(tops[0], r, base)
    return None
