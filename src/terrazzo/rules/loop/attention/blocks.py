"""Which keys a block of rows sees, where data says who sees whom: found before, so that nobody visits the others.

A mask compares what each row has with what each key has, such as the number of its document, or a row's place with a
length. Over a block of rows such a number lies between the least and the greatest there is, and a comparison may hold
somewhere in the block, or must hold everywhere in it, as those two say. So, of blocks of so many rows and keys,

    seen(q, k)   =   first[q'] <= k'  and  k' < last[q']  and  (whole[q', k'] or seen(q, k))

where q' = q // BLOCK and k' = k // BLOCK, nothing may be seen before `first` nor from `last` on, and all must be seen
of `whole`. That is so for any data; where it is sorted, little is left to visit. FlexAttention is given such blocks;
here they follow from the predicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Var, at_least
from terrazzo.ir.monoid import monoid
from terrazzo.ir.node import substitute, topological, transformed
from terrazzo.ir.types import Type, i64
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.attention.told import both, every
from terrazzo.rules.loop.definitions import in_order, unused
from terrazzo.rules.loop.fusion.inline import guarded, rewrite_loads, unproved
from terrazzo.rules.loop_to_tile.chains.chain import chain

PASS, RULE = "online", "blocks_seen"
BLOCK = 128
"""Rows and keys of a block: as many as a tile has, or a multiple."""
WORTH = 8
"""Blocks are found where that takes at most so many-th of the time of the kernel that asks: who sees a quarter of all
keys less for them gains.
"""


def blocks_seen(program: l.Program, log: Log, price: Callable[[Sequence[l.Kernel]], float]) -> l.Program:
    """`program` with the blocks that masks made of data leave anything of found before, where that is cheap."""
    names = {b.name for s in program.steps for b in s.writes} | {b.name for b in program.inputs}
    steps: list[l.Kernel | l.Call] = []
    known: dict[Any, _Seen] = {}
    for s in program.steps:
        if isinstance(s, l.Kernel) and (asked := _asked(s)) is not None:
            seen = known.get(asked.form) or _found(asked, s, names)
            made = told(s, asked, seen)
            finding, taken = (price(seen.kernels) if asked.form not in known else 0.0), price([s])
            fired = WORTH * finding <= taken and not unproved([*seen.kernels, made])
            why = f"{finding / 1000:.1f} us to find what blocks of {BLOCK} rows see, {taken / 1000:.1f} us for all"
            log.add(Event(PASS, RULE, s.name, fired, why))
            if fired:
                found = () if asked.form in known else seen.kernels
                known[asked.form] = seen
                names |= {b.name for x in found for b in x.writes}
                log.applied(PASS, RULE, s.name, [s], [*seen.kernels, made])
                steps += [*found, made]
                continue
        steps.append(s)
    return in_order(l.Program(program.name, program.inputs, program.steps, program.results), steps)


@dataclass(frozen=True)
class _Asked:
    """A predicate of data, the axes of rows and keys, and those around them that it knows."""

    predicate: Any
    rows: Any
    keys: Any
    around: tuple[Any, ...]

    @property
    def form(self) -> Any:
        """The same for all that ask the same, whatever axes are called."""
        names = {a: Var(f"${n}", a.extent) for n, a in enumerate((self.rows, self.keys, *self.around))}
        return substitute(self.predicate, names), tuple(names.values())


@dataclass(frozen=True)
class _Seen:
    """The kernels that find what blocks see: the last one stores the first block that each block of rows sees and the
    one after the last, and which blocks are seen whole; it is made of what those before know of blocks.
    """

    kernels: tuple[l.Kernel, ...]

    @property
    def buffers(self) -> tuple[l.Buffer, ...]:
        return self.kernels[-1].writes


def _asked(kernel: l.Kernel) -> _Asked | None:
    """What a chain of products asks of data before it looks at a score."""
    found = chain(kernel)
    if found is None or found.rounds or found.others:
        return None
    for x in kernel.terms:
        if (seen := _of_data(x)) is None:
            continue
        keys = [a for a in seen.free if a not in kernel.axes]
        rows = found.rows
        if len(keys) != 1 or not all(isinstance(a.extent, int) for a in (rows, *keys)):
            continue
        if rows.extent < BLOCK or keys[0].extent <= BLOCK or keys[0].extent != found.steps.extent:
            continue
        around = tuple(a for a in kernel.axes if a in seen.free and a is not rows)
        if found.columns not in around and _spans(seen, {rows, *keys}):
            return _Asked(seen, rows, keys[0], around)
    return None


def _of_data(x: Any) -> Any:
    """The part of what hides a score that data decides."""
    if not isinstance(x, l.Apply) or x.fn.name != "where" or not _is(x.args[2], float("-inf")):
        return None
    parts = [p for p in every(x.args[0]) if any(isinstance(y, l.Load) for y in topological([p]))]
    whole = [p for p in parts if not any(isinstance(y, l.Reduce | l.Scan | l.Get) for y in topological([p]))]
    return both(whole) if whole else None


def _is(x: Any, value: float) -> bool:
    return isinstance(x, l.Literal) and not isinstance(x.value, bool) and x.value == value


def told(kernel: l.Kernel, asked: _Asked, seen: _Seen) -> l.Kernel:
    """`kernel` with its predicate of data said of blocks first."""
    first, last, whole = seen.buffers
    given = (*asked.around, *((asked.rows // BLOCK,) if asked.rows in asked.predicate.free else ()))
    given = given or (0,)

    def visit(x: Any) -> Any:
        found = _of_data(x) if isinstance(x, l.Apply) else None
        if found is None:
            return x
        keys = next((a for a in found.free if a not in kernel.axes), None)
        if keys is None or substitute(found, {keys: asked.keys}) is not asked.predicate:
            return x
        at = l.Index(keys // BLOCK)
        bounds = l.apply("le", l.Load(first, given), at), l.apply("lt", at, l.Load(last, given))
        inside = l.apply("ne", l.Load(whole, (*given, keys // BLOCK)), l.Literal(0, i64))
        places = [p for p in every(x.args[0]) if p not in every(found)]
        return l.apply("where", both([*places, *bounds, l.apply("or_", inside, found)]), *x.args[1:])

    stores = transformed(kernel.stores, visit)
    return l.Kernel(kernel.name, kernel.axes, stores, kernel.source)


def _found(asked: _Asked, kernel: l.Kernel, names: set[str]) -> _Seen:
    """The kernels that find what blocks see."""
    row, key = (-(-a.extent // BLOCK) for a in (asked.rows, asked.keys))
    outer = tuple(Var(f"a{n}", a.extent) for n, a in enumerate(asked.around))
    by_rows = asked.rows in asked.predicate.free
    blocks = Var(f"a{len(outer)}", row if by_rows else 1)
    axes = (*outer, *((blocks,) if by_rows or not outer else ()))
    shape = tuple(a.extent for a in axes)
    predicate = substitute(asked.predicate, dict(zip(asked.around, outer, strict=True)))
    first, last, whole = (
        l.Buffer(unused(f"{kernel.name}_{what}", names), Type(i64, (*shape, *more)))
        for what, more in (("first", ()), ("last", ()), ("whole", (key,)))
    )
    column, step = Var(f"a{len(axes)}", key), Var(l.fresh_name(), key)
    ranges = _Ranges(f"{kernel.name}_blocks", outer, names, kernel.source)
    may = _Block({asked.rows: blocks, asked.keys: step}, ranges).may(predicate)
    must = _Block({asked.rows: blocks, asked.keys: column}, ranges).must(predicate)
    at = l.Index(step)
    ends = (
        ("min", l.apply("where", may, at, l.Literal(key, i64))),
        ("max", l.apply("where", may, l.apply("add", at, l.Literal(1, i64)), l.Literal(0, i64))),
    )
    least, most = (l.Reduce.make(monoid(m), (step,), (x,)) for m, x in ends)
    inside = l.apply("where", must, l.Literal(1, i64), l.Literal(0, i64))
    stores = l.Store(first, axes, least), l.Store(last, axes, most), l.Store(whole, (*axes, column), inside)
    return _Seen((*ranges.kernels(), l.Kernel(first.name, (*axes, column), stores, kernel.source)))


class _Ranges:
    """What is known of terms of one axis over each of its blocks, each once, in kernels of their own."""

    def __init__(self, name: str, outer: tuple[Var, ...], names: set[str], source: str) -> None:
        self.name, self.outer, self.names, self.source = name, outer, {*names}, source
        self.stores: dict[Any, tuple[tuple[Var, ...], l.Store]] = {}

    def of(self, x: Any, axis: Any, at: Var, by: str) -> l.Load:
        """A term over the block number `at` of an axis, combined `by` a monoid."""
        around = tuple(a for a in self.outer if a in x.free)
        block = Var(f"a{len(around)}", -(-axis.extent // BLOCK))
        axes = (*(Var(f"a{n}", a.extent) for n, a in enumerate(around)), block)
        each = Var(l.fresh_name(), BLOCK)
        place: IntExpr = block * BLOCK + each
        found = substitute(x, {axis: place, **dict(zip(around, axes, strict=False))})
        if not at_least(left := axis.extent - 1 - place, 0):
            found = rewrite_loads(found, lambda load: guarded(load, (left,)))
            (nothing,) = monoid(by).identity([x.dtype])
            here = l.apply("ge", l.Index(left), l.Literal(0, i64))
            found = l.apply("where", here, found, l.Literal(nothing, x.dtype))
        value = l.Reduce.make(monoid(by), (each,), (found,))
        if value not in self.stores:
            name = unused(self.name, self.names)
            self.names.add(name)
            place_of = l.Buffer(name, Type(x.dtype, tuple(a.extent for a in axes)))
            self.stores[value] = axes, l.Store(place_of, axes, value)
        return l.Load(self.stores[value][1].buffer, (*around, at))

    def kernels(self) -> Iterator[l.Kernel]:
        """One for all terms of the same axes."""
        for axes in dict.fromkeys(a for a, _ in self.stores.values()):
            stores = tuple(s for a, s in self.stores.values() if a == axes)
            yield l.Kernel(stores[0].buffer.name, axes, stores, self.source)


class _Block:
    """What is known of predicates over blocks: `at` says which block of an axis it is."""

    def __init__(self, at: dict[Any, Var], ranges: _Ranges) -> None:
        self.at, self.ranges = at, ranges

    def may(self, p: Any) -> Any:
        """A predicate that holds where p does somewhere in the blocks."""
        return self._judged(p, True)

    def must(self, p: Any) -> Any:
        """A predicate that holds only where p does everywhere in the blocks."""
        return self._judged(p, False)

    def _judged(self, p: Any, some: bool) -> Any:
        mine = p.free & {*self.at}
        if not mine:
            return p
        if isinstance(p, l.Apply):
            name, args = p.fn.name, p.args
            if name in ("and_", "or_"):
                return l.apply(name, *(self._judged(a, some) for a in args))
            if name == "not_":
                return l.apply("not_", self._judged(args[0], not some))
            if name in COMPARISONS:
                one, other = map(self._span, args)
                if one is not None and other is not None:
                    return COMPARISONS[name](one, other, some)
        if len(mine) == 1 and p.dtype.kind == "bool":
            return self._over(p, "any" if some else "all")
        return l.Literal(some, p.dtype)

    def _span(self, x: Any) -> tuple[Any, Any] | None:
        """The least and the greatest a whole number may be in the blocks."""
        mine = x.free & {*self.at}
        if not mine:
            return x, x
        if len(mine) == 1 and x.dtype.kind != "bool":
            return self._over(x, "min"), self._over(x, "max")
        if isinstance(x, l.Apply) and x.fn.name in ("add", "sub"):
            a, b = map(self._span, x.args)
            if a is not None and b is not None:
                b = b if x.fn.name == "add" else b[::-1]
                return l.apply(x.fn.name, a[0], b[0]), l.apply(x.fn.name, a[1], b[1])
        return None

    def _over(self, x: Any, by: str) -> l.Load:
        """A term of one axis, over its block."""
        (axis,) = x.free & {*self.at}
        return self.ranges.of(x, axis, self.at[axis], by)


Span = tuple[Any, Any]


def _below(a: Span, b: Span, some: bool, fn: str) -> Any:
    """a < b, or a <= b, for some or all of what they may be."""
    return l.apply(fn, a[0], b[1]) if some else l.apply(fn, a[1], b[0])


def _equal(a: Span, b: Span, some: bool) -> Any:
    """Whether two ranges meet, or are one number."""
    pairs = ((a[0], b[1]), (b[0], a[1])) if some else ((a[1], b[0]), (b[1], a[0]))
    return l.apply("and_", *(l.apply("le", *x) for x in pairs))


def _unlike(a: Span, b: Span, some: bool) -> Any:
    return l.apply("not_", _equal(a, b, not some))


COMPARISONS: dict[str, Callable[[Span, Span, bool], Any]] = {
    "eq": _equal,
    "ne": _unlike,
    "lt": lambda a, b, some: _below(a, b, some, "lt"),
    "le": lambda a, b, some: _below(a, b, some, "le"),
    "gt": lambda a, b, some: _below(b, a, some, "lt"),
    "ge": lambda a, b, some: _below(b, a, some, "le"),
}


def _spans(p: Any, blocked: set[Any]) -> bool:
    """Whether something is known of a predicate over blocks: what it compares are whole numbers."""
    if not p.free & blocked:
        return True
    if isinstance(p, l.Apply) and p.fn.name in ("and_", "or_", "not_"):
        return any(_spans(a, blocked) for a in p.args)
    if isinstance(p, l.Apply) and p.fn.name in COMPARISONS:
        return all(_whole(a, blocked) for a in p.args)
    return len(p.free & blocked) == 1


def _whole(x: Any, blocked: set[Any]) -> bool:
    """Whether a term is a whole number that knows one axis of blocks, or a sum of such."""
    if x.dtype.is_float:
        return False
    if len(x.free & blocked) < 2:
        return True
    return isinstance(x, l.Apply) and x.fn.name in ("add", "sub") and all(_whole(a, blocked) for a in x.args)
