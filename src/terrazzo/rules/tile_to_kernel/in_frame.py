"""Reductions in a frame of what a thread has in registers: the frame of all of it first, and then sums in that frame.

One state after the other would move the sums whenever the frame grows: for each element as many exponentials as there
are sums and one, each of which waits for the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from terrazzo.ir import nest as n
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.node import Node
from terrazzo.ir.types import f32
from terrazzo.rules.loop.relax import LOG2E
from terrazzo.rules.tile.digits import Bindings, Digit
from terrazzo.rules.tile_to_kernel.builder import Builder
from terrazzo.rules.tile_to_kernel.meet import meet
from terrazzo.rules.tile_to_kernel.scope import Scope


def in_frame(
    builder: Builder,
    bindings: Bindings,
    s: n.Loop,
    digits: Sequence[Sequence[Digit]],
    inside: Sequence[IntExpr],
    scope: Scope,
    write: Callable[[Sequence[n.Statement], Scope], None],
) -> None:
    """Fill the accumulators of a loop whose steps can be taken twice; `write` writes what they compute."""
    every = [d for ds in digits for d in ds]
    looped = [d for d in every if d.level in ("reg", "frag")]
    shared = [d for d in every if d.level in ("lane", "warp", "warpgroup")]
    steps = [x for x in s.body if isinstance(x, n.Accumulate)]
    terms = [x for x in s.body if not isinstance(x, n.Accumulate)]

    def higher() -> None:
        for x in steps:
            top, (bare, _) = scope.env[x.into][0], growing(x.args[0])
            builder.add(l.Store(top, (), l.apply(x.into.monoid.frame, l.Load(top, ()), scope(bare))))

    def more() -> None:
        here = scope.inner()
        write(terms, here)
        for x in steps:
            args = here.all(x.args)
            worth = builder.let(exponential(l.apply("sub", args[0], bases[x.into])))
            for place, y in zip(scope.env[x.into][1:], args[1:], strict=True):
                term = worth if isinstance(y, l.Literal) and y.value == 1 else l.apply("mul", y, worth)
                builder.add(l.Store(place, (), l.apply("add", l.Load(place, ()), term)))

    builder.peeled(looped, inside, higher)
    bases: dict[Any, Node] = {}
    for x in steps:
        (top, *_), (_, rebuild) = scope.env[x.into], growing(x.args[0])
        meet(builder, bindings, top, shared, x.into.monoid.frame)
        builder.add(l.Store(top, (), rebuild(l.Load(top, ()))))
        bases[x.into] = builder.let(finite(l.Load(top, ())))
    builder.peeled(looped, inside, more)
    for x in steps:
        for place in scope.env[x.into][1:]:
            meet(builder, bindings, place, shared)


def growing(x: Any) -> tuple[Any, Callable[[Any], Any]]:
    """What a term is rounded from, and how it is. Roundings keep what is highest, so they are done once, to that: ptxas
    would keep the rounded values beside the others, for which there are no registers.
    """
    if isinstance(x, l.Apply) and is_cast(x.fn) and x.dtype.is_float and x.args[0].dtype.is_float:  # type: ignore[attr-defined]
        bare, inner = growing(x.args[0])
        return bare, lambda y: l.Apply(x.fn, (inner(y),))
    return x, lambda y: y


def finite(top: l.Load) -> Node:
    """A frame, or, where that is infinite, another one, from which the difference of what is equal is no NaN."""
    zero = l.Literal(0.0, top.dtype)
    return l.apply("where", l.apply("eq", l.apply("sub", top, top), zero), top, zero)


def exponential(difference: Any) -> Node:
    """exp of what is not above 0, in 32 bits as exactly as a sum of such that is not below 1 shows."""
    if difference.dtype is not f32:
        return l.apply("exp", difference)
    return l.apply("approx_exp2", l.apply("mul", difference, l.Literal(LOG2E, f32)))


def twice(s: n.Loop, body: Sequence[n.Statement], digits: Sequence[Sequence[Digit]]) -> bool:
    """Whether all reductions of a loop are in frames, and a thread has all that they take in registers."""
    framed = all(isinstance(r, l.Reduce) and r.monoid.frame for r in s.carried)
    plain = all(isinstance(x, n.Accumulate | n.Let) for x in body)
    loads = any(isinstance(x, n.Let) and isinstance(x.term, l.Load) for x in body)
    return bool(s.carried) and framed and plain and not loads and all(d.level != "time" for ds in digits for d in ds)
