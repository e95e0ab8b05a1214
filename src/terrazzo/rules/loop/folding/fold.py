"""What is known of places is not computed: predicates on indices that always hold, sums of indices, indices "from data"
that are none. A mask that is made of them alone is no tensor any more: its readers compute it.

Models build masks from positions in many small steps, each of which stores a tensor: what lies before the first token,
which document a token is of, who may see whom. Put together, most of it says nothing, and the rest is one comparison,
which tells attention what it need not visit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from terrazzo.ir.address import coefficient
from terrazzo.ir.canonical import canonical, many_alike
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import Expr, IntExpr, Loaded, Var, at_least, floordiv, mod
from terrazzo.ir.node import Node, per_node, substitute, topological, transform, transformed
from terrazzo.ir.ranges import decided, range_of
from terrazzo.ir.types import DType, i64
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.definitions import Steps
from terrazzo.rules.loop.folding.digits import factors_apart
from terrazzo.rules.loop.folding.one_of_two import compared, reduced
from terrazzo.rules.loop.folding.where_taken import where_taken
from terrazzo.rules.loop.fusion.inline import inline

PASS = "fuse"
CHEAP = 8
"""Scalar operations that cost no more than to store and load what they compute."""
COMPARED: dict[str, Callable[[IntExpr, IntExpr], tuple[IntExpr, ...]]] = {
    "le": lambda a, b: (b - a,),
    "lt": lambda a, b: (b - a - 1,),
    "ge": lambda a, b: (a - b,),
    "gt": lambda a, b: (a - b - 1,),
}
"""What is >= 0 where a comparison holds."""
DIVIDED = {"floordiv": True, "mod": True, "truncdiv": False, "fmod": False}
"""Divisions, and whether they round towards minus infinity as those of indices do: others agree from 0 on."""
OPPOSITE = {"le": "gt", "lt": "ge", "ge": "lt", "gt": "le"}


def fold(program: l.Program, log: Log) -> l.Program:
    """`program` with what is known of places folded, and what only depends on them computed where it is read.

    @loop
    def f(x: f32[4, 4]):
        with kernel('mask', mask=f32[4, 4]):
            for a0 in free(4):
                for a1 in free(4):
                    v0 = le(index(a1), index(a0))
                    mask[a0, a1] = where(v0, f32(0.0), f32(-inf))
        with kernel('z', z=f32[4, 4]):
            for a0 in free(4):
                for a1 in free(4):
                    z[a0, a1] = add(x[a0, a1], mask[a0, a1])
        return (z,)
    =>
    @loop
    def f(x: f32[4, 4]):
        with kernel('z', z=f32[4, 4]):
            for a0 in free(4):
                v0 = index(a0)
                for a1 in free(4):
                    in0 = x[a0, a1]
                    v1 = index(a1)
                    v2 = le(v1, v0)
                    v3 = where(v2, f32(0.0), f32(-inf))
                    v4 = add(in0, v3)
                    z[a0, a1] = v4
        return (z,)
    """
    alike = many_alike(program)

    def folded(s: Any) -> Any:
        """A step with its terms folded, unless nothing is known to be folded in one like it."""
        whole = not isinstance(s, l.Kernel) or (alike and _is_folded(canonical(s).kernel))
        return s if whole else _kernel(s, log)

    steps = Steps(map(folded, program.steps))
    kept = {*program.results, *(b for s in steps.values() if isinstance(s, l.Call) for b in s.reads)}
    for n in sorted(steps):
        first = steps[n]  # which may be cheap now that others were recomputed in it
        if not isinstance(first, l.Kernel) or kept & {*first.writes} or not all(cheap(s.value) for s in first.stores):
            continue
        for m in steps.reading(first):
            made = inline(steps[m], first)
            log.add(Event(PASS, "recompute", made.name, True, f"{first.name} is made of indices alone"))
            log.applied(PASS, "recompute", made.name, [first, steps[m]], [made])
            steps[m] = _kernel(made, log)
        del steps[n]
    return l.Program(program.name, program.inputs, steps.in_order(), program.results)


def fold_indices(kernel: l.Kernel) -> l.Kernel:
    """`kernel` with what is known of indices folded in its terms.

    @loop
    def f(x: f32[4, 8]):
        with kernel('z', z=f32[4, 8]):
            for a0 in free(4):
                for a1 in free(8):
                    in0 = x[a0, a1]
                    v0 = add(index(a1), i64(1))
                    v1 = gt(v0, i64(0))
                    v2 = where(v1, in0, f32(0.0))
                    z[a0, a1] = v2
        return (z,)
    =>
    @loop
    def f(x: f32[4, 8]):
        with kernel('z', z=f32[4, 8]):
            for a0 in free(4):
                for a1 in free(8):
                    in0 = x[a0, a1]
                    z[a0, a1] = in0
        return (z,)
    """
    values = transformed([s.value for s in kernel.stores], folding)  # what several have in common is folded once
    stores = tuple(l.Store(s.buffer, s.index, x) for s, x in zip(kernel.stores, values, strict=True))
    return kernel if stores == kernel.stores else l.Kernel(kernel.name, kernel.axes, stores, kernel.source)


def extremes_once(kernel: l.Kernel) -> l.Kernel:
    """`kernel` with the largest and the smallest elements taken from the reductions that find where these are.

    @loop
    def f(x: f32[4, 8]):
        with kernel('best', best=f32[4], where=i32[4]):
            for a0 in free(4):
                for r0 in reduce(8):
                    in0 = x[a0, r0]
                    v0 = index(r0)
                    v1 = i32(v0)
                    acc0 <- max(in0)
                    acc1 <- argmax(in0, v1)
                v2 = get(acc1, 1)
                best[a0] = acc0
                where[a0] = v2
        return (best, where)
    =>
    @loop
    def f(x: f32[4, 8]):
        with kernel('best', best=f32[4], where=i32[4]):
            for a0 in free(4):
                for r0 in reduce(8):
                    in0 = x[a0, r0]
                    v0 = index(r0)
                    v1 = i32(v0)
                    acc0 <- argmax(in0, v1)
                v2 = get(acc0, 0)
                v3 = get(acc0, 1)
                best[a0] = v2
                where[a0] = v3
        return (best, where)
    """
    found = [x for x in topological(kernel.stores) if isinstance(x, l.Reduce)]
    places = {(x.monoid.name, x.axes, x.args[0]): x for x in found if x.monoid.name in ("argmax", "argmin")}
    taken: dict[Node, Any] = {}
    for x in found:
        if (place := places.get((f"arg{x.monoid.name}", x.axes, x.args[0]))) is not None:
            taken[x] = l.Get(place, 0)
    if not taken:
        return kernel
    stores = transformed(kernel.stores, lambda x: taken.get(x, x))
    return l.Kernel(kernel.name, kernel.axes, stores, kernel.source)


KERNELS: dict[str, tuple[Callable[[l.Kernel], l.Kernel], str]] = {
    "fold_indices": (fold_indices, "what is known of indices is not computed"),
    "factors_apart": (factors_apart, "an axis of which each factor of a product knows other digits is as many axes"),
    "extremes_once": (extremes_once, "who finds where an extreme is has found it"),
}


def _kernel(kernel: l.Kernel, log: Log) -> l.Kernel:
    """A kernel with its terms folded, which is told."""
    for name, (rewrite, why) in KERNELS.items():
        if (made := rewrite(kernel)) is not kernel:
            log.add(Event(PASS, name, kernel.name, True, why))
            log.applied(PASS, name, kernel.name, [kernel], [made])
            kernel = made
    return kernel


@per_node
def _is_folded(form: l.Kernel) -> bool:
    """Whether there is nothing to fold in a kernel: asked once of all that differ in names only."""
    return all(rewrite(form) is form for rewrite, _ in KERNELS.values())


def cheap(x: Node) -> bool:
    """Whether a term is a few operations on indices, or fewer."""
    parts = topological([x], stop=lambda n: isinstance(n, Expr))
    if any(isinstance(n, l.Load | l.Reduce | l.Scan | l.Get) for n in parts):
        return False
    if any(isinstance(n, Loaded) for n in topological([x])):
        return False
    work = [n for n in parts if isinstance(n, l.Apply) and not is_cast(n.fn)]
    return len(work) <= CHEAP and all(n.fn.name in EASY for n in work)


EASY = (*COMPARED, "eq", "ne", "and_", "or_", "not_", "where", "add", "sub", "mul", "min", "max", "abs")
"""Functions that are one instruction."""


def folded(x: Any) -> Any:
    """A term that means the same, with what is known of indices folded."""
    return transform(x, folding)


def folding(node: Any) -> Any:
    """A node whose children are folded, folded too."""
    found = _folded(node)
    if isinstance(found, l.Apply):
        range_of(found)  # is kept: nobody has to go down all of a term for it
    return found


def _folded(x: Any) -> Any:
    if isinstance(x, Loaded):
        e = place(x.value)
        inside = e is not None and at_least(e, 0) and at_least(x.extent - 1 - e, 0)
        return e if inside else x
    if isinstance(x, l.Index) and isinstance(x.value, int):
        return l.Literal(x.value, i64)
    if isinstance(x, l.Scan) and x.monoid.name == "sum" and _literal(x.args[0]) == 0 and x.dtype.is_integer:
        return x.args[0]
    if isinstance(x, l.Reduce):
        return _reduced(x)
    if not isinstance(x, l.Apply):
        return x
    name, args = x.fn.name, x.args
    if name in ("and_", "or_", "not_"):
        return _logic(x, name, args)
    if name == "where":
        return _chosen(x, *args)
    if is_cast(x.fn):
        return _cast(x, args[0])
    if name == "abs" and (e := place(args[0])) is not None and (at_least(e, 0) or at_least(-e, 0)):
        return args[0] if at_least(e, 0) else _index(-e)
    both = [place(a) for a in args] if len(args) == 2 else [None]
    if None not in both and (found := _arithmetic(x, name, *both)) is not x:
        return found
    return _in_range(x, name, args)


def _in_range(x: l.Apply, name: str, args: Any) -> Any:
    """Comparisons, minima and maxima of what lies in known ranges that do not meet; and comparisons of one of two
    values of which each decides it.
    """
    if (known := decided(x, range_of)) is not None:
        return l.Literal(known, x.dtype)
    if name in ("min", "max") and None not in (both := [range_of(a) for a in args]):
        (low, high), (least, most) = both  # type: ignore[misc]
        whole = not x.dtype.is_float  # of zeros of both signs either may be the greater one
        if low > most or (whole and low == most):
            return args[name == "min"]
        if high < least or (whole and high == least):
            return args[name == "max"]
    if name in (*COMPARED, "eq", "ne") and (said := compared(x)) is not None:
        return said
    return x


def _reduced(x: l.Reduce) -> Any:
    """A reduction of what is the same at every point: so many times it, or it; or at every point but one."""
    if (found := reduced(x, place)) is not None:
        return folded(found)
    count = math.prod(a.extent if isinstance(a.extent, int) else 0 for a in x.axes)
    if x.monoid.width > 1 or not count or any(a in x.args[0].free for a in x.axes):
        return x
    if x.monoid.name == "sum" and x.dtype.kind != "bool":
        many = l.Literal(float(count) if x.dtype.is_float else count, x.dtype)
        return l.apply("mul", x.args[0], many)
    return x.args[0] if x.monoid.name in ("max", "min", "any", "all") else x


def place(x: Any) -> IntExpr | None:
    """A term of whole numbers as an index expression."""
    if isinstance(x, l.Index):
        return x.value
    if isinstance(x, l.Literal) and x.type is i64:
        return int(x.value)
    return None


def _literal(x: Any) -> Any:
    return x.value if isinstance(x, l.Literal) else None


def _arithmetic(x: l.Apply, name: str, a: Any, b: Any) -> Any:
    """Sums and comparisons of index expressions."""
    if name in ("add", "sub") or (name == "mul" and (isinstance(a, int) or isinstance(b, int))):
        e = a + b if name == "add" else a - b if name == "sub" else a * b
        return _index(e)
    if name in DIVIDED and isinstance(b, int) and b > 0 and (DIVIDED[name] or at_least(a, 0)):
        return _index((mod if name.endswith("mod") else floordiv)(a, b))
    if name in COMPARED:
        holds = all(at_least(e, 0) for e in COMPARED[name](a, b))
        fails = all(at_least(e, 0) for e in COMPARED[OPPOSITE[name]](a, b))
        return l.Literal(holds, x.dtype) if holds or fails else x
    if name in ("eq", "ne"):
        same = isinstance(a - b, int) and a - b == 0
        apart = at_least(a - b - 1, 0) or at_least(b - a - 1, 0)
        return l.Literal(same == (name == "eq"), x.dtype) if same or apart else x
    return x


def _index(e: IntExpr) -> Any:
    return l.Literal(e, i64) if isinstance(e, int) else l.Index(e)


def _logic(x: l.Apply, name: str, args: Any) -> Any:
    if x.dtype.kind != "bool":
        return x
    if name == "not_":
        known = _literal(args[0])
        return x if known is None else l.Literal(not known, x.dtype)
    for one, other in (args, args[::-1]):
        if (known := _literal(one)) is not None:
            return other if known is (name == "and_") else one
    return x


def negated(x: Any) -> Any:
    """What holds where a predicate on indices does not; None where that is no such predicate."""
    if not isinstance(x, l.Apply):
        return l.Literal(not x.value, x.type) if isinstance(x, l.Literal) else None
    if x.fn.name in OPPOSITE and None not in map(place, x.args):
        return l.apply(OPPOSITE[x.fn.name], *x.args)
    if x.fn.name == "not_":
        return x.args[0]
    both: list[Any] = [negated(a) for a in x.args] if x.fn.name in ("and_", "or_") else [None]
    return None if None in both else l.apply("or_" if x.fn.name == "and_" else "and_", *both)


def _cast(x: l.Apply, arg: Any) -> Any:
    """Constants in another type, also those that are chosen among."""
    if (found := _converted(arg, x.dtype)) is not None:
        return found
    if isinstance(arg, l.Apply) and arg.fn.name == "where":
        one, other = (_converted(a, x.dtype) for a in arg.args[1:])
        if one is not None and other is not None:
            return l.apply("where", arg.args[0], one, other)
    return x


def _converted(x: Any, to: DType) -> l.Literal | None:
    """A constant in a type that has it exactly."""
    if not isinstance(x, l.Literal) or to.kind == "bool":
        return None
    exact = x.type.is_float and to.is_float and float(np.asarray(x.value, to.numpy)) == x.value
    whole = not x.type.is_float and to.is_integer and abs(int(x.value)) < 1 << 15
    whole = whole and to.lowest <= int(x.value) <= to.highest
    if exact:
        return l.Literal(float(x.value), to)
    return l.Literal(int(x.value), to) if whole else None


def _chosen(x: l.Apply, condition: Any, one: Any, other: Any) -> Any:
    """`where`, each of whose values is simplified by what holds where it is taken. One that is the other's value there
    too is taken everywhere.
    """
    if isinstance(condition, l.Literal):
        return one if condition.value else other
    one, other = (y.args[n] if _chooses(y, condition) else y for n, y in ((1, one), (2, other)))
    one = where_taken(one, condition, holding)
    if one is other:
        return one
    x = l.apply("where", condition, one, other)
    found = bounded(condition)
    if found is None or not all(cheap(y) for y in (one, other)):
        return x  # a load is made whatever the condition is, with the guards it has
    v, yes, no = found
    taken, left = _narrowed(one, v, yes), _narrowed(other, v, no)
    if _narrowed(left, v, yes) is _narrowed(taken, v, yes):
        return left
    if _narrowed(taken, v, no) is _narrowed(left, v, no):
        return taken
    return l.apply("where", condition, taken, left)


def _chooses(x: Any, condition: Any) -> bool:
    """Whether a term is one of two by a condition."""
    return isinstance(x, l.Apply) and x.fn.name == "where" and x.args[0] is condition


def holding(condition: Any) -> tuple[IntExpr, ...]:
    """What is >= 0 where a comparison of places holds."""
    if not isinstance(condition, l.Apply) or condition.fn.name not in COMPARED:
        return ()
    both = [place(a) for a in condition.args]
    return () if None in both else COMPARED[condition.fn.name](*both)  # type: ignore[arg-type]


Span = tuple[int, int]
"""The first and the last value of a variable."""


def bounded(condition: Any) -> tuple[Any, Span, Span] | None:
    """The only variable that a comparison is of, and its values where that holds, and where it does not; both exist."""
    if not isinstance(condition, l.Apply) or condition.fn.name not in COMPARED:
        return None
    both = [place(a) for a in condition.args]
    if None in both:
        return None
    (e,) = COMPARED[condition.fn.name](*both)  # type: ignore[arg-type]
    variables = [v for v in e.free if isinstance(v.extent, int)] if isinstance(e, Expr) else []
    if len(variables) != 1:
        return None
    (v,) = variables
    sign = coefficient(e, v)
    rest = e - sign * v if sign in (1, -1) else None
    if not isinstance(rest, int):
        return None
    last = v.extent - 1
    low, high = (0, rest) if sign == -1 else (-rest, last)  # where it holds
    others = (high + 1, last) if sign == -1 else (0, low - 1)
    return (v, (low, high), others) if 0 <= low <= high <= last and others[0] <= others[1] else None


def _narrowed(x: Any, v: Any, span: Span) -> Any:
    """A term folded by what is known where a variable is in a span."""
    first, last = span
    inner: Any = Var(l.fresh_name(), last - first + 1) if last > first else 0
    found = folded(substitute(x, {v: inner + first}))
    return substitute(found, {inner: v - first}) if last > first else found
