"""Inputs that a call changes in place: their new values lie where they do, and only what changes is stored.

A cache of keys into which a call writes those of one token, states of a recurrent net, running statistics and moments
of an optimizer come as new values of all their elements. Of a value that is the old one but for a row, the rest is
there already.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

from terrazzo.ir.address import coefficient
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr, Loaded, Var, at_least
from terrazzo.ir.in_place import Given, lies_over, taken_over, updates
from terrazzo.ir.node import substitute, topological, transform
from terrazzo.ir.ranges import stays
from terrazzo.ir.types import i64
from terrazzo.ir.verify import kernel_problem
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.folding.fold import COMPARED, folded, negated, place
from terrazzo.rules.loop.folding.one_of_two import all_of, one_place
from terrazzo.rules.loop.fusion.inline import inline, unproved
from terrazzo.rules.loop.memory.lifetimes import followed, needs_of
from terrazzo.rules.loop.memory.remake import storing

PASS = "renew"


def renew(program: l.Program, updated: Sequence[str], log: Log, products: bool = True) -> l.Program:
    """`program`, whose last results are the new values of `updated` inputs, with its steps in an order in which what
    reads an old value comes before the new one is there, and of new values only what changes stored.

    @loop
    def f(cache: f32[4, 64, 8], k: f32[4, 8], pos: i64[1]):
        with kernel('new', new=f32[4, 64, 8]):
            for a0 in free(4):
                for a1 in free(64):
                    v0 = eq(index(at(pos[0], 64)), index(a1))
                    for a2 in free(8):
                        in0 = k[a0, a2]
                        in1 = cache[a0, a1, a2]
                        v1 = where(v0, in0, in1)
                        new[a0, a1, a2] = v1
        with kernel('s', s=f32[4]):
            for a0 in free(4):
                for r0, r1 in reduce(64, 8):
                    in0 = cache[a0, r0, r1]
                    acc0 <- sum(in0)
                s[a0] = acc0
        return (s, new)
    =>
    @loop
    def f(cache: f32[4, 64, 8], k: f32[4, 8], pos: i64[1]):
        with kernel('s', s=f32[4]):
            for a0 in free(4):
                for r0, r1 in reduce(64, 8):
                    in0 = cache[a0, r0, r1]
                    acc0 <- sum(in0)
                s[a0] = acc0
        with kernel('new', new=over(cache)):
            in0 = pos[0]
            v0 = index(at(in0, 64))
            v1 = eq(v0, in0)
            for a0 in free(4):
                for a2 in free(8):
                    in1 = k[a0, a2]
                    in2 = cache[a0, at(in0, 64), a2]
                    v2 = where(v1, in1, in2)
                    new[a0, at(in0, 64), a2] = v2
        return (s, new)
    """
    wanted = new_values(program, updated)
    if not wanted:
        return program
    ordered = _old_read_first(program, wanted, log)
    steps = [x for s in ordered.steps for x in _apart(s, wanted, ordered.steps)]
    for n, s in enumerate(steps):
        if not isinstance(s, l.Kernel) or not any(b in wanted for b in s.writes):
            continue
        made, makers = _part(s, wanted, steps)
        if isinstance(made, str):
            log.add(Event(PASS, "only_changed", s.name, False, made))
            continue
        tried = l.Program(ordered.name, ordered.inputs, (*steps[:n], made, *steps[n + 1 :]), ordered.results)
        given = updates(tried, updated, products)
        if any(taken_over(tried.steps, tried.results, {}, given=given).get(b) is not wanted[b] for b in made.writes):
            log.add(Event(PASS, "only_changed", s.name, False, "the old value is needed afterwards"))
            continue
        log.add(Event(PASS, "only_changed", s.name, True, "only what changes is stored, where the input lies"))
        log.applied(PASS, "only_changed", s.name, [*makers, s], [made])
        steps[n] = made
    return _needed(l.Program(ordered.name, ordered.inputs, tuple(steps), ordered.results))


def _apart(step: l.Kernel | l.Call, wanted: Given, steps: Sequence[l.Kernel | l.Call]) -> list[l.Kernel | l.Call]:
    """A step, or the two kernels it is where it stores a new value, of which a part is enough, and something besides:
    what says where two caches change was left to the kernel that writes one of them. Nothing is reduced twice.
    """
    if not isinstance(step, l.Kernel) or not any(b in wanted for b in step.writes):
        return [step]
    own, others = ([s for s in step.stores if (s.buffer in wanted) is new] for new in (True, False))
    if not others or isinstance(_part(alone := storing(step, own), wanted, steps)[0], str) or alone.carried:
        return [step]
    return [storing(step, others), alone]


def _part(kernel: l.Kernel, wanted: Given, steps: Sequence[l.Kernel | l.Call]) -> tuple[l.Kernel | str, list[l.Kernel]]:
    """A kernel that stores only what changes, or why it cannot; and others, which it computes the stores of itself."""
    made = only_changed(kernel, wanted)
    if isinstance(made, str):
        seen, makers = _seen_through(kernel, steps)
        again = only_changed(seen, wanted) if makers else made
        if isinstance(again, l.Kernel) and len(again.carried) <= len(kernel.carried):
            return again, makers
    return made, []


def _seen_through(kernel: l.Kernel, steps: Sequence[l.Kernel | l.Call]) -> tuple[l.Kernel, list[l.Kernel]]:
    """A kernel that computes itself what others store that is no number with a fraction: it may say where something
    changes. And these others.
    """
    writer = {b: s for s in steps if isinstance(s, l.Kernel) for b in s.writes if not b.type.dtype.is_float}
    makers: list[l.Kernel] = []
    while (maker := next((writer[b] for b in kernel.reads if b in writer), None)) is not None:
        made = inline(kernel, maker)
        if unproved([made]):
            break
        kernel = made
        makers.insert(0, maker)
    return kernel, makers


def _needed(program: l.Program) -> l.Program:
    """A program without kernels that store nothing that is read or given back."""
    steps = list(program.steps)
    needed = {*program.results, *(b for s in steps for b in s.reads)}
    while gone := [s for s in steps if isinstance(s, l.Kernel) and needed.isdisjoint(s.writes)]:
        steps = [s for s in steps if s not in gone]
        needed = {*program.results, *(b for s in steps for b in s.reads)}
    return program if len(steps) == len(program.steps) else replace(program, steps=tuple(steps))


def new_values(program: l.Program, updated: Sequence[str]) -> dict[l.Buffer, l.Buffer]:
    """The last results of a program with the inputs whose new values they are, and which they lie in memory as."""
    inputs = {b.name: b for b in program.inputs}
    pairs = zip(program.results[len(program.results) - len(updated) :], map(inputs.get, updated), strict=True)
    found = {b: old for b, old in pairs if old is not None and b.type == old.type and b not in program.inputs}
    return {b: old for b, old in found.items() if program.results.count(b) == 1 and old not in program.results}


def renewed(kernel: l.Kernel, wanted: Given) -> set[tuple[l.Buffer, bool]]:
    """The new values of inputs that a kernel may store where these lie, each with whether it stores only a part."""
    stored = {b: old for b, old in wanted.items() if b in kernel.writes}
    if not stored:
        return set()
    part = isinstance(only_changed(kernel, wanted), l.Kernel)
    return {(b, part) for b, old in stored.items() if part or lies_over(kernel, b, old)}


def _old_read_first(program: l.Program, wanted: Given, log: Log) -> l.Program:
    """The steps in an order in which those that read an old value come before what writes the new one, unless they need
    that themselves.
    """
    steps = program.steps
    needs = list(needs_of(steps))
    writer = {b: n for n, s in enumerate(steps) for b in s.writes}
    for b, old in wanted.items():
        w = writer[b]
        for r in (n for n in range(w + 1, len(steps)) if old in steps[n].reads):
            if w not in followed(r, needs):
                needs[w].add(r)
    order: dict[int, None] = {}
    for n in range(len(steps)):
        _put(n, needs, order)
    if [*order] == [*range(len(steps))]:
        return program
    log.add(Event(PASS, "old_read_first", program.name, True, "what reads an old value comes before the new one"))
    return l.Program(program.name, program.inputs, tuple(steps[n] for n in order), program.results)


def _put(step: int, needs: Sequence[Collection[int]], order: dict[int, None]) -> None:
    """Put a step into an order, with what it needs before it."""
    path = [step]
    while path:
        if path[-1] in order or not (missing := [n for n in sorted(needs[path[-1]], reverse=True) if n not in order]):
            order.setdefault(path.pop())
        else:
            path += missing


def only_changed(kernel: l.Kernel, wanted: Given) -> l.Kernel | str:
    """A kernel that stores new values, with only what of these is not the old one stored; or why it is none. All that
    it stores changes at the same places.
    """
    if kernel.scans or any(s.buffer not in wanted for s in kernel.stores):
        return "it stores more than the new value of an input"
    found = None
    while not isinstance(more := _less(found or kernel, wanted), str):  # of a place along one axis some along another
        found = more
    return found or more


def _less(kernel: l.Kernel, wanted: Given) -> l.Kernel | str:
    """The same along one axis."""
    found = [_changed(s, wanted[s.buffer], kernel.axes) for s in kernel.stores]
    if found[0] is None or any(x is None or x[:2] != found[0][:2] for x in found):
        return "it is not the old value but for some places in a row"
    axis, there, _ = found[0]
    stores = []
    for s, (_, _, value) in zip(kernel.stores, filter(None, found), strict=True):
        index = tuple(substitute(e, {axis: there}) for e in s.index)
        stores.append(l.Store(s.buffer, index, folded(substitute(value, {axis: there})), wanted[s.buffer]))
    left = {v for s in stores for e in s.index if isinstance(e, Expr) for v in e.free}
    own = next((v for v in left if v not in kernel.axes), axis)
    axes = tuple(x for a in kernel.axes if (x := own if a is axis else a) in left)
    made = l.Kernel(kernel.name, axes, tuple(stores), kernel.source)
    return kernel_problem(made) or made


def _changed(s: l.Store, old: l.Buffer, axes: Sequence[Var]) -> tuple[Var, IntExpr, Any] | None:
    """An axis with the places along it where a stored value is another one than the old one, and what it is there; None
    where that may be everywhere.
    """
    value = folded(s.value)
    if not (isinstance(value, l.Apply) and value.fn.name == "where"):
        return None
    condition, new, same = value.args
    kept = l.Load.make(old, s.index, ())
    if new is kept and (other := negated(condition)) is not None:
        condition, new, same = other, same, new
    if same is not kept:
        return None
    left = list(all_of(condition))
    for axis in axes:
        if [e for e in s.index if isinstance(e, Expr) and axis in e.free] == [axis]:
            ways = (way(axis, left) for way in (partial(one_place, place=place), _computed_place, _in_a_row))
            if (there := next((x for x in ways if x is not None), None)) is not None:
                left += _in_range(there)
                new = _where_it_holds(new, condition)
                return axis, there, l.apply("where", reduce(_both, left), new, same) if left else new
    return None


def _computed_place(axis: Var, left: list[Any]) -> IntExpr | None:
    """The one place along an axis that one of some conditions says by a computed number, which is in range where the
    place is that number; None if none says so.
    """
    for c in left:
        if not isinstance(c, l.Apply) or c.fn.name != "eq":
            continue
        for number, here in (c.args, c.args[::-1]):
            if (
                place(here) is axis
                and place(number) is None
                and axis not in number.free
                and isinstance(axis.extent, int)
            ):
                first, last = l.Literal(0, i64), l.Literal(axis.extent - 1, i64)
                there = Loaded(l.apply("min", l.apply("max", number, first), last), axis.extent)
                left[left.index(c)] = l.apply("eq", l.Index(there), number)
                return there
    return None


def _both(one: Any, other: Any) -> Any:
    return l.apply("and_", one, other)


def _in_range(e: IntExpr) -> list[Any]:
    """That places which data says are in range: elsewhere nothing is stored, and whoever asked for it is told."""
    every = topological([e] if isinstance(e, Expr) else [])
    said = [x for x in every if isinstance(x, Loaded) and not stays(x.value, x.extent, {})]
    values = [x.value if x.value.dtype is i64 else l.apply("i64", x.value) for x in said]  # type: ignore[attr-defined]
    return [l.apply("eq", l.Index(x), value) for x, value in zip(said, values, strict=True)]


def _where_it_holds(x: Any, condition: Any) -> Any:
    """A term that is taken where a condition holds, with places that come from what it chooses known, where they are in
    range whether it holds or not.
    """

    def simpler(y: Any) -> Any:
        chosen = isinstance(y, l.Apply) and y.fn.name == "where" and y.args[0] is condition
        return y.args[1] if chosen else y

    def known(y: Any) -> Any:
        if not isinstance(y, Loaded):
            return y
        e = place(folded(transform(y.value, simpler)))
        return e if e is not None and at_least(e, 0) and at_least(y.extent - 1 - e, 0) else y

    return transform(x, known)


def _in_a_row(axis: Var, left: list[Any]) -> IntExpr | None:
    """The places in a row along an axis where some conditions hold, which are taken out of them; None if that is all,
    or none.
    """
    extent = axis.extent
    low, high = 0, extent if isinstance(extent, int) else 0
    used = []
    for c in left:
        both = [place(x) for x in c.args] if isinstance(c, l.Apply) and c.fn.name in COMPARED else [None]
        for e in COMPARED[c.fn.name](*both) if None not in both else ():
            by = coefficient(e, axis)
            rest: Any = e - axis * by if by in (1, -1) else None
            if isinstance(rest, int):
                low, high = (max(low, -rest), high) if by == 1 else (low, min(high, rest + 1))
                used.append(c)
    if not 0 < high - low < extent:  # type: ignore[operator]
        return None
    for c in used:
        left.remove(c)
    return low if high - low == 1 else Var(axis.name, high - low) + low
