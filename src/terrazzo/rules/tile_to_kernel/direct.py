"""Results of a tile that leave registers as they are. What is the same for a row is computed once, and what else they
are made of is loaded for many of them before the first is computed: who waits for each in turn waits for memory as
often as there are results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from terrazzo.ir import nest as n
from terrazzo.ir.address import coefficient, mentions
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import IntExpr, Loaded, Var
from terrazzo.ir.node import substitute, topological
from terrazzo.ir.plan import Limit, Plan
from terrazzo.rules.access import together, wide
from terrazzo.rules.tile.digits import LOOPED, Bindings, Digit, zero
from terrazzo.rules.tile_to_kernel.builder import Builder
from terrazzo.rules.tile_to_kernel.multiply import Fragment
from terrazzo.rules.tile_to_kernel.scope import Scope
from terrazzo.rules.tile_to_kernel.team_tile import Leaf

ROOM, OTHERS = 48, 64
"""32-bit registers of a thread for what results are made of, at most, and for what is neither that nor an accumulator:
so many beside 128 accumulators do not spill.
"""
DEAR = 4.0
"""Operations from which on a term is rather kept in registers than computed again."""
ONCE = "once"
"""What registers are called that hold what is computed once."""
ADDRESS = 1
"""Registers for where one of them lies: what is loaded and stored at one place is not computed twice."""
OF_A_THREAD, OF_A_PROCESSOR = 255, 65536
"""Registers, at most."""


def room(plan: Plan, bindings: Bindings, fragments: Mapping[l.Reduce, Fragment]) -> int:
    """32-bit registers for what results are made of."""
    resident = max([1, *(x.resident for x in plan.all(Limit))])
    most = min(OF_A_THREAD, OF_A_PROCESSOR // (bindings.warps * k.WARP * resident))
    sums = sum(k.shared_bytes(x) // 4 for x in {f.place for f in fragments.values()})
    return min(ROOM, (bindings.agent.registers or most) - sums - OTHERS)


@dataclass(frozen=True)
class Operand:
    """A load of results, for every value of the loops `over` and of `j`: for these at once, where that is `wide`."""

    load: l.Load
    over: tuple[Var, ...]
    j: Var | None
    wide: bool

    @property
    def registers(self) -> int:
        """For one value of `over`."""
        count, size = _size(self.j) if self.j is not None else 1, int(self.load.dtype.size)
        return max(1, count * size // 4 if self.wide else count * max(1, size // 4))


@dataclass(frozen=True)
class Direct:
    """Writes what is computed at every point of a tile, of which `rows` (of these axes) and `columns` (of one axis) are
    a thread's loops. It is done for all values of `j` at once, where that is one: `one` writes statements so, and
    `compute` a term.
    """

    builder: Builder
    scope: Scope
    leaf: Leaf
    axis: frozenset[Any]
    axes: frozenset[Any]
    rows: tuple[Var, ...]
    columns: tuple[Var, ...]
    j: Var | None
    inside: tuple[IntExpr, ...]
    room: int
    compute: Callable[[Any, Scope], None]
    one: Callable[[Sequence[n.Statement], Scope], None]

    def write(self) -> None:
        """All of it."""
        scope = self.scope.inner()
        later = (*self.columns, *self.own)
        body = self.once([*self.leaf.lets, *self.leaf.stores], self.axis, self.rows, self.inside, scope, later)
        left = self.room - sum(_count(x.buffer) for x in scope.env.values() if _is_row(x))
        operands = self.operands(body, left)
        outer, inner, became = self.split(operands, left)
        scope.env = {x: substitute(e, became) for x, e in scope.env.items()}
        inside = tuple(substitute(e, became) for e in self.inside)

        def together() -> None:
            here = scope.inner()
            for x in operands:
                here.env[x.load] = self.fetch(x, inner, inside, scope)
            self.builder.loops(_unrolled(inner), partial(column, here.inner()))

        def column(here: Scope) -> None:
            rest = self.once(body, self.axes, self.own, inside, here, self.rows)
            points = partial(self.one, rest, here)
            self.builder.loops(_unrolled(self.rows), lambda: self.builder.where(inside, points))

        self.builder.loops(_unrolled(outer), together)

    @property
    def own(self) -> tuple[Var, ...]:
        return (self.j,) if self.j is not None else ()

    def once(
        self,
        body: Sequence[n.Statement],
        axes: frozenset[Any],
        over: Sequence[Var],
        inside: Sequence[IntExpr],
        scope: Scope,
        later: Sequence[Var],
    ) -> list[n.Statement]:
        """What goes along none of these axes, computed once for each value of `over`, in registers, as far as there are
        some to spare: what is dear to compute first. The statements that are left. The loops of `later` are inside.
        """
        lets = [x for x in body if isinstance(x, n.Let)]
        free = {x.term: None for x in lets if not x.term.free & axes and x.term not in scope.env}
        others = [x for x in body if not isinstance(x, n.Let) or x.term not in free]
        terms: list[Any] = [x.term if isinstance(x, n.Let) else x for x in others]
        sizes = [_size(v) for v in over]
        used = _affordable(
            [x for x in free if x in set(topological(terms, stop=lambda x: x in free))], ROOM // 2 // math.prod(sizes)
        )
        if not used:
            return list(body)
        needed = set(topological(terms, stop=lambda x: x in used))
        rest = [x for x in body if not isinstance(x, n.Let) or (x.term in needed and x.term not in used)]
        known = set(topological(used))
        mine = [x for x in free if x in known]
        before = self.alike(mine, used, inside, scope, (*over, *later))
        mine, used = ([x for x in xs if x not in before] for xs in (mine, used))
        places = {x: self.builder.registers(ONCE, x.dtype, sizes) for x in used}
        here = scope.inner()
        here.env |= before
        here.pending = (*here.pending, *_anywhere(inside, later))

        def step() -> None:
            for x in mine:
                self.compute(x, here)
            for x, place in places.items():
                self.builder.add(l.Store(place, tuple(over), here(x)))

        if places:
            self.builder.loops(_unrolled(over), step)
        scope.env.update({x: l.Load(place, tuple(over)) for x, place in places.items()})
        return rest

    def alike(
        self, terms: Sequence[Any], used: Sequence[Any], inside: Sequence[IntExpr], scope: Scope, loops: Sequence[Var]
    ) -> dict[Any, Any]:
        """Those of the terms that are the same at all points of a tile, computed before all loops: what is made of one
        of them is computed where no loop that the others are kept for has begun.
        """
        same = [x for x in terms if not x.free & (self.axis | self.axes)]
        if not any(x in same for x in used):
            return {}
        here = scope.inner()
        here.pending = (*here.pending, *_anywhere(inside, loops))
        for x in same:
            self.compute(x, here)
        found = {x: here(x) for x in same}
        scope.env.update({x: found[x] for x in same if x in used})
        return found

    def operands(self, body: Sequence[n.Statement], room: int) -> list[Operand]:
        """What is loaded for the points of a tile, as far as there is room for one column of it; not what data says the
        place of.
        """
        found: list[Operand] = []
        for s in body:
            if not isinstance(s, n.Let) or not isinstance(s.term, l.Load) or s.term in self.scope.env:
                continue
            place: l.Load = self.scope(s.term)
            if any(isinstance(x, Loaded) for x in topological([place])):
                continue
            j = self.j if self.j is not None and _mentions(place, self.j) else None
            over = tuple(v for v in (*self.columns, *self.rows) if _mentions(place, v))
            one = Operand(s.term, over, j, j is not None and wide(place, j, _size(j)))
            if self.each([*found, one]) <= room:
                found.append(one)
        return found

    def each(self, operands: Sequence[Operand]) -> int:
        """Registers that operands take for one step along the columns."""
        return sum((ADDRESS + x.registers) * math.prod(_size(v) for v in x.over if v in self.rows) for x in operands)

    def split(self, operands: Sequence[Operand], room: int) -> tuple[list[Var], list[Var], dict[Var, IntExpr]]:
        """The loops around what is loaded together, and those inside: as many steps as there is room for. A variable
        of which both have a part became two.
        """
        each = max(1, self.each(operands))
        ways = product(*([x for x in range(1, _size(v) + 1) if _size(v) % x == 0] for v in self.columns))
        parts = max((w for w in ways if math.prod(w) == 1 or each * math.prod(w) <= room), key=math.prod)
        outer: list[Var] = []
        inner: list[Var] = []
        became: dict[Var, IntExpr] = {}
        for v, part in zip(self.columns, parts, strict=True):
            far, near = Var(f"{v.name}_", _size(v) // part), Var(v.name, part)
            outer += [v] if part == 1 else [far] if part < _size(v) else []
            inner += [v] if part == _size(v) > 1 else [near] if part > 1 else []
            if 1 < part < _size(v):
                became[v] = far * part + near
        return outer, inner, became

    def fetch(self, x: Operand, inner: Sequence[Var], inside: Sequence[IntExpr], scope: Scope) -> l.Load:
        """Load an operand for all values of the loops inside that it depends on."""
        found: l.Load = scope(x.load)
        over = [v for v in (*inner, *self.rows) if _mentions(found, v)]
        others = {*inner, *self.rows, *self.own} - {*over, *((x.j,) if x.j is not None else ())}
        guards = (*found.inside, *_anywhere(inside, others), *scope.pending)
        init = l.Literal(zero(x.load.dtype), x.load.dtype) if guards else None
        own = (x.j,) if x.j is not None else ()
        at = (*over, *own) or (0,)  # a move is between arrays
        place = self.builder.registers("in", x.load.dtype, [_size(v) for v in (*over, *own)] or [1], init)
        first = {} if self.j is None else {self.j: 0}

        def at_once() -> None:
            index = tuple(substitute(i, first) for i in found.index)
            move = k.Move(place, (*over, 0), x.load.buffer, index, _size(x.j) if x.j is not None else 1)
            self.builder.where([substitute(e, first) for e in guards], lambda: self.builder.add(move))

        def one() -> None:
            move = k.Move(place, at, x.load.buffer, found.index, 1)
            self.builder.where(guards, lambda: self.builder.add(move))

        self.builder.loops(_unrolled(over if x.wide else (*over, *own)), at_once if x.wide else one)
        return l.Load(place, at)


def _anywhere(inside: Sequence[IntExpr], variables: Iterable[Var]) -> list[IntExpr]:
    """What holds wherever all conditions do at some values of variables, as far as that is known."""
    return [e for e in (_somewhere(e, variables) for e in inside) if e is not None]


def _somewhere(e: IntExpr, variables: Iterable[Var]) -> IntExpr | None:
    """A condition at those values of variables at which it holds if it does at any; None where these are not known."""
    for v in variables:
        c = coefficient(e, v)
        if not isinstance(c, int):
            return None
        e = substitute(e, {v: 0 if c <= 0 else _size(v) - 1})
    return e


def beside(
    digits: Mapping[Any, Sequence[Digit]],
    inside: Sequence[IntExpr],
    wide: Callable[[Digit], tuple[Collection[l.Load], Collection[l.Store]]],
) -> tuple[Any, Digit | None]:
    """The axis along which a thread's values lie side by side, and which of its digits that is, where they are stored
    or loaded so, as `wide` says; else the axis of which a thread has most.
    """
    found: list[tuple[int, int, Any, Digit]] = []
    for a, ds in digits.items():
        d = ds[-1] if ds and ds[-1].level in ("reg", "frag") and ds[-1].stride == 1 else None
        if d is not None and d.size & d.size - 1 == 0 and all(together(e, d.variable, d.size) for e in inside):
            loads, stores = wide(d)
            found += [(len(stores), len(loads), a, d)] if loads or stores else []
    if found:
        _, _, axis, best = max(found, key=lambda x: x[:2])
        return axis, best
    return max(digits, key=lambda a: math.prod(d.size for d in digits[a] if d.level in LOOPED)), None


def _is_row(x: Any) -> bool:
    return isinstance(x, l.Load) and isinstance(x.buffer, k.Registers) and x.buffer.name.startswith(ONCE)


def _count(place: l.Buffer) -> int:
    return math.prod(place.type.static_shape)


def _unrolled(variables: Sequence[Var]) -> list[tuple[Var, bool]]:
    return [(v, True) for v in variables]


def _affordable(terms: Sequence[Any], room: int) -> list[Any]:
    """All terms, where so many registers have room for them; else those that are dear to compute, as far as they do."""
    if sum(_registers(x) for x in terms) <= room:
        return list(terms)
    found: list[Any] = []
    for x in sorted(terms, key=_dear, reverse=True):
        if _dear(x) >= DEAR and sum(map(_registers, found)) + _registers(x) <= room:
            found.append(x)
    return [x for x in terms if x in found]


def _registers(x: Any) -> int:
    found: int = max(1, x.dtype.size // 4)
    return found


def _dear(x: Any) -> float:
    """Operations of a term."""
    return sum(y.fn.cost for y in topological([x]) if isinstance(y, l.Apply) and not is_cast(y.fn))


def _size(v: Var | None) -> int:
    size: int = v.extent  # type: ignore[union-attr,assignment]
    return size


def _mentions(load: l.Load, v: Var) -> bool:
    return any(mentions(e, v) for e in (*load.index, *load.inside))
