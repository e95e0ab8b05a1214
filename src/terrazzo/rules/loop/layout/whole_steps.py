"""Sums of which every s-th step is of anything take these steps only, as those that add up what the windows of a
transposed convolution have for a point: its taps lie s apart, and which is the first one follows from the point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import gcd
from typing import Any

from terrazzo.ir.address import coefficient
from terrazzo.ir.canonical import may_have
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import Expr, FloorDiv, IntExpr, Mod, Var, floordiv, mod
from terrazzo.ir.node import substitute, topological, transform
from terrazzo.ir.sites import product
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.folding.fold import folded, holding
from terrazzo.rules.loop.folding.where_taken import together
from terrazzo.rules.loop.fusion.inline import select

PASS, RULE = "online", "whole_steps"
SURE = 0.8
"""How much of the time of all steps they may take: which they are is found anew by each point."""


def whole_steps(program: l.Program, log: Log, price: Callable[[Sequence[l.Kernel]], float]) -> l.Program:
    """`program` with such sums, but those of products of matrices, which go phase by phase, where that is faster by the
    model.

    @loop
    def f(x: f32[8, 6]):
        with kernel('z', z=f32[24]):
            for a0 in free(24):
                for r0 in reduce(8):
                    in0 = x[r0, (a0 - r0) // 4] if (a0 - r0) // 4 >= 0 and (a0 - r0) // 4 < 6 and (a0 - r0) % 4 == 0 else 0
                    acc0 <- sum(in0)
                z[a0] = acc0
        return (z,)
    =>
    @loop
    def f(x: f32[8, 6]):
        with kernel('z', z=f32[24]):
            for a0 in free(24):
                for r0 in reduce(2):
                    in0 = x[r0 * 4 + (a0 % 4), -r0 + (a0 // 4)] if r0 <= a0 // 4 else 0
                    acc0 <- sum(in0)
                z[a0] = acc0
        return (z,)
    """  # noqa: E501
    steps: list[l.Kernel | l.Call] = []
    may = may_have(program, lambda form: with_whole_steps(form) is not form)
    for s in program.steps:
        if isinstance(s, l.Kernel) and may(s) and (found := with_whole_steps(s)) is not s:
            before, after = price([s]), price([found])
            said = f"{before / 1000:.1f} us with steps of which most are 0, {after / 1000:.1f} us without"
            log.add(Event(PASS, RULE, s.name, after < SURE * before, said))
            if after < SURE * before:
                log.applied(PASS, RULE, s.name, [s], [found])
                s = found
        steps.append(s)
    return l.Program(program.name, program.inputs, tuple(steps), program.results)


def with_whole_steps(kernel: l.Kernel) -> l.Kernel:
    """The kernel with the steps of its sums that are of anything; itself where these are all, or nobody knows, or it is
    a product of matrices.
    """
    if product(kernel) is not None:
        return kernel
    found = {r: _whole(r) for r in kernel.carried if isinstance(r, l.Reduce)}
    new: dict[Any, Any] = {r: x for r, x in found.items() if x is not r}
    if not new:
        return kernel
    stores = tuple(l.Store(s.buffer, s.index, substitute(s.value, new), s.over) for s in kernel.stores)
    return l.Kernel(kernel.name, kernel.axes, stores, kernel.source)


def _whole(reduce: l.Reduce) -> Any:
    """A sum over the steps that leave no rest, one of its axes after the other."""
    if reduce.monoid.name != "sum":
        return reduce
    axes, (arg,) = l.open_binder(reduce)
    left: list[Any] = [*axes]
    for m in sorted(_rests(arg), key=str):
        for r in left:
            c = coefficient(m.a, r)
            if isinstance(c, int) and c and isinstance(r.extent, int) and isinstance(m.b, int) and gcd(c, m.b) == 1:
                turns = -(-r.extent // m.b)
                turn = Var(l.fresh_name(), turns) if turns > 1 else 0
                arg = _without_rest(arg, m, r, c, turn)
                left = [turn if a is r else a for a in left if a is not r or turns > 1]
                break
    if left == [*axes]:
        return reduce
    return l.Reduce.make(reduce.monoid, tuple(left), (arg,)) if left else arg


def _without_rest(arg: Any, m: Mod, r: Any, c: int, turn: IntExpr) -> Any:
    """A term at the steps r at which c * r + (what else there is) is a multiple of s, one after the other."""
    s: Any = m.b
    rest = m.a - c * r
    first = mod(rest * (-pow(c, -1, s) % s), s)
    step = turn * s + first
    quotient = {-1: floordiv(rest, s), 1: floordiv(rest + s - 1, s)}.get(c, floordiv(rest + c * first, s)) + c * turn
    at: dict[Any, Any] = {r: step, m: 0}
    for q in topological([arg]):
        if isinstance(q, FloorDiv) and q.b == s and isinstance(more := q.a - m.a, int) and more % s == 0:
            at[q] = quotient + more // s
    behind = () if r.extent % s == 0 else (r.extent - 1 - step,)  # the last one for some points

    def taken(x: Any) -> Any:
        if not isinstance(x, l.Load | l.Index) or r not in x.free:
            return x
        if isinstance(x, l.Index):
            return l.Index(substitute(x.value, at))
        index, inside = (tuple(substitute(e, at) if isinstance(e, Expr) else e for e in y) for y in (x.index, x.inside))
        return l.Load.make(x.buffer, index, (*inside, *behind))

    zero = any(isinstance(x, l.Load) and r in x.free for x in _factors(arg))  # behind it
    return select(() if zero else behind, folded(transform(arg, taken)))


def _rests(x: Any) -> set[Mod]:
    """The rests that are 0 where a term is anything else."""
    found: set[Mod] = set()
    for y in _factors(x):
        inside = y.inside if isinstance(y, l.Load) else ()
        if _chosen(y):
            inside = tuple(e for told in together(y.args[0]) for e in holding(told))
        found |= {m for e in inside if isinstance(m := -e, Mod)}
    return found


def _factors(x: Any) -> Iterator[Any]:
    """Terms that a term is 0 with: its factors, whatever they are converted to."""
    if isinstance(x, l.Apply) and (is_cast(x.fn) or x.fn.name in ("mul", "neg")):
        for y in x.args:
            yield from _factors(y)
        return
    yield x
    if _chosen(x):
        yield from _factors(x.args[1])


def _chosen(x: Any) -> bool:
    """Whether a term is 0 where a condition does not hold."""
    zero = isinstance(x, l.Apply) and x.fn.name == "where" and x.args[2]
    return isinstance(zero, l.Literal) and zero.value == 0
