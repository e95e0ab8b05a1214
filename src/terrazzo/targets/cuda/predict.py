"""What a kernel will cost, from its text alone: the simulator's counts without running it.

How a warp's access falls on banks and sectors depends on few of the variables around it: a loop that moves all lanes on
by whole lines changes nothing. So an access is evaluated on the lanes of the warps that can differ, and counted as
often as there are others like them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import numpy as np

from terrazzo.hw import wgmma
from terrazzo.hw.memory import LINE, SECTOR
from terrazzo.interp.costs import Costs
from terrazzo.ir.address import coefficient, evaluate, flatten
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.expr import Expr, FloorDiv, IntExpr, Loaded, Mod, Var, at_least, bounds, terms_of
from terrazzo.ir.layout import HARDWARE
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.targets.cuda.accesses import Access, Around, accesses, integers, most, slabs, statements

MOST = 1 << 19
"""Warps that are evaluated for one access, at most."""
TOGETHER = 1 << 12
"""Warps that are evaluated at once."""
SPLIT = 64
"""Values of a variable from which on those that no condition concerns are told apart from the others."""


@dataclass(frozen=True)
class Prediction:
    """The costs of a kernel; `unknown` are statements whose accesses depend on data, or on too much, and are not among
    them.
    """

    costs: Costs
    unknown: tuple[Node, ...]


@lru_cache(maxsize=64)
def predict(kernel: k.Kernel) -> Prediction:
    """What the simulator would count."""
    predictor, unknown = _Predictor(kernel), []
    for s, around, _ in statements(kernel):
        if not isinstance(s, k.For | k.If | k.Role):
            try:
                predictor.statement(s, around)
            except _Unknown:
                unknown.append(s)
    return Prediction(predictor.costs, tuple(dict.fromkeys(unknown)))


class _Unknown(Exception):
    """An access that cannot be predicted."""


Sizes = dict[str, Any]
"""How many values every variable has, by its name."""
Address = tuple[IntExpr, int, int]
"""An expression, after what it may be shifted by without a change in costs (0: nothing), and the span of its
swizzle."""


class _Predictor:
    def __init__(self, kernel: k.Kernel) -> None:
        self.kernel, self.costs, self.uniform = kernel, Costs(), _uniform(kernel)
        self.varying = k.varying(kernel.body, ("lane",))

    def statement(self, s: Node, around: Around) -> None:
        if not around.whole:
            raise _Unknown
        sizes = {k.BLOCK: self.kernel.grid, "warp": self.kernel.warps} | {v.name: most(v.extent) for v in around.loops}
        for _, active, times in _warps(sizes, around.inside, ()):
            self.costs.issue(s, active, times)
            if isinstance(s, k.MultiplyAsync):
                self.product(s, [a.place for a in slabs(s, around)], int((active.any(-1) * times).sum()) // 4)
        found = [a for a in accesses(s, around) if not isinstance(a.place, k.Registers)]
        if isinstance(s, k.AsyncCopy):
            self.copy(s, sizes, found)
        else:
            for a in found:
                self.access(a, sizes)

    def access(self, a: Access, sizes: Sizes) -> None:
        size = a.count * a.place.type.dtype.size
        for (at,), active, times in _warps(sizes, a.inside, (self.address(a),)):
            if isinstance(a.statement, k.LoadMatrix | k.StoreMatrix):
                self.costs.matrix(a.statement, at, active, times)
            elif isinstance(a.place, k.Shared):
                self.costs.shared(a.statement, at, active, size, a.write, times)
            else:
                self.costs.memory(a.statement, at, active, size, a.write, times)

    def copy(self, s: k.AsyncCopy, sizes: Sizes, found: Sequence[Access]) -> None:
        source, target = map(self.address, found)
        wanted = (source, target, *((e, 0, 0) for e in s.inside))
        for (at, to, *inside), active, times in _warps(sizes, found[1].inside, wanted):
            self.costs.copy(s, at, to, active, np.all([e >= 0 for e in inside], axis=0) & active, times)

    def product(self, s: k.MultiplyAsync, places: Sequence[Any], times: int) -> None:
        m, n, depth = wgmma.product(s.instruction).shape
        for place in places:
            self.costs.slab(s, (m if place is s.a else n) * depth * place.type.dtype.size, times)

    def address(self, a: Access) -> Address:
        """The address of an access in bytes, without what shifts all lanes alike by a multiple of its period."""
        at, place = flatten(a.index, a.place.type.element_strides) * a.place.type.dtype.size, a.place
        swizzle = place.swizzle if isinstance(place, k.Shared) else 0
        period = max(LINE, swizzle * 8) if isinstance(place, k.Shared) else SECTOR
        total: IntExpr = self.kernel.offsets[place] if isinstance(place, k.Shared) else 0
        for factors, c in terms_of(at).items():
            alike = not any(
                x is k.LANE or x in self.varying or (isinstance(x, Loaded) and x.value not in self.uniform)
                for x in topological(factors)
            )
            rest: IntExpr = c % period if alike else c
            for f in factors:
                rest = rest * f
            total = total + rest
        return total, period, swizzle


def _uniform(kernel: k.Kernel) -> frozenset[Node]:
    """The values that are the same for all lanes of a warp, as far as their terms say."""
    found: set[Node] = set()
    for s in k.walk(kernel.body):
        if isinstance(s, k.Let):
            parts = topological([s.term], stop=lambda x: isinstance(x, k.Registers))
            varies = (
                x
                for x in parts
                if isinstance(x, k.Registers) or x is k.LANE or (isinstance(x, k.Value) and x not in found)
            )
            found |= set() if any(varies) else {s.value}
    return frozenset(found)


def _warps(sizes: Sizes, inside: Sequence[IntExpr], wanted: Sequence[Address]) -> Iterator[tuple[list[Any], Any, Any]]:
    """(values of `wanted`, active lanes, how often) for warps that differ, [warp, lane]."""
    if integers((*(e for e, _, _ in wanted), *inside)):
        raise _Unknown
    for regular, left, extents in _parts(tuple(e for e, _, _ in wanted), tuple(inside), sizes):
        if any(isinstance(x, Loaded) for x in topological([e for e in (*regular, *left) if isinstance(e, Expr)])):
            raise _Unknown
        names = _names((*regular, *left))
        axes = []
        for name in names:
            period = math.lcm(*(_period(e, period, name) for e, (_, period, _) in zip(regular, wanted, strict=True)))
            extent = extents[name]
            distinct = min(extent, period or extent) if not any(name in _names((g,)) for g in left) else extent
            axes.append((np.arange(distinct), (extent - 1 - np.arange(distinct)) // distinct + 1))
        often = math.prod(extents[n] for n in extents if n not in names)
        yield from _evaluated(names, axes, regular, left, wanted, often)


def _evaluated(
    names: Sequence[str], axes: Sequence[tuple[Any, Any]], exprs: Sequence[IntExpr], inside: Sequence[IntExpr],
    wanted: Sequence[Address], often: int,
) -> Iterator[tuple[list[Any], Any, Any]]:  # fmt: skip
    count = math.prod(len(values) for values, _ in axes)
    if count > MOST:
        raise _Unknown
    for first in range(0, count, TOGETHER):
        number = np.arange(first, min(first + TOGETHER, count))
        env: dict[str, Any] = {"lane": np.arange(k.WARP)[None, :]}
        times = np.full(len(number), often, np.int64)
        for name, (values, weights) in zip(names, axes, strict=True):
            digit, number = number % len(values), number // len(values)
            env[name] = values[digit][:, None]
            times = times * weights[digit]
        shape = (len(times), k.WARP)
        known: dict[Expr, Any] = {v: env[v.name] for v in _variables((*exprs, *inside))}
        active = np.ones(shape, bool)
        for g in inside:
            active = active & (evaluate(g, known) >= 0)
        found = []
        for e, (_, period, swizzle) in zip(exprs, wanted, strict=True):
            at = np.broadcast_to(evaluate(e, known), shape)
            if period:
                at = HARDWARE[swizzle](at - at.min() // period * period)
            found.append(at)
        yield found, active, times


def _parts(
    exprs: tuple[IntExpr, ...], inside: tuple[IntExpr, ...], sizes: Sizes
) -> Iterator[tuple[tuple[IntExpr, ...], tuple[IntExpr, ...], Sizes]]:
    """Ranges of the variables, each with the conditions that are still open there."""
    inside = tuple(g for g in inside if not at_least(g, 0))
    if 0 in sizes.values() or any((hi := bounds(g)[1]) is not None and hi < 0 for g in inside):
        return
    for v in sorted(_variables((*exprs, *inside)), key=lambda v: v.name):
        if v.name == "lane":
            continue
        if digits := _digits(v, (*exprs, *inside), sizes[v.name]):
            rest = {n: e for n, e in sizes.items() if n != v.name} | {d.name: d.extent for d, _ in digits}
            whole = reduce(operator.add, (d * cut for d, cut in digits))
            yield from _parts(_replaced(exprs, v, whole), _replaced(inside, v, whole), rest)
            return
    for v in _variables(inside):
        if v.name != "lane" and sizes[v.name] >= SPLIT and (n := _regular(v, inside, sizes[v.name])):
            for start, extent in ((0, n), (n, sizes[v.name] - n)):
                part = Var(v.name, extent) + start
                yield from _parts(_replaced(exprs, v, part), _replaced(inside, v, part), {**sizes, v.name: extent})
            return
    yield exprs, inside, sizes


def _replaced(exprs: Sequence[IntExpr], v: Var, by: IntExpr) -> tuple[IntExpr, ...]:
    return tuple(substitute(e, {v: by}) for e in exprs)


def _regular(v: Var, inside: Sequence[IntExpr], extent: int) -> int:
    """How many values from 0 on leave every condition that mentions v fulfilled; 0 where all or none do."""
    mine = [g for g in inside if v in _variables((g,))]

    def holds(n: int) -> bool:
        return all(at_least(substitute(g, {v: Var(v.name, n)}), 0) for g in mine)

    low, high = 0, extent
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _digits(v: Var, exprs: Sequence[IntExpr], extent: int) -> list[tuple[Var, int]]:
    """Variables for the digits of v that the expressions ask for by // and %, each with its place value; none where
    they are none.
    """
    cuts = set()
    for x in topological([e for e in exprs if isinstance(e, Expr)]):
        if isinstance(x, FloorDiv | Mod) and isinstance(x.b, int):
            if x.a is v:
                cuts.add(x.b)
            elif isinstance(x, Mod) and isinstance(x.a, FloorDiv) and x.a.a is v and isinstance(x.a.b, int):
                cuts |= {x.a.b, x.a.b * x.b}
    places = [1, *sorted(c for c in cuts if c < extent)]
    ends = [*places[1:], extent]
    if len(places) == 1 or any(b % a for a, b in zip(places, ends, strict=True)):
        return []
    return [(Var(f"{v.name}/{a}", b // a), a) for a, b in zip(places, ends, strict=True)]


def _period(e: IntExpr, period: int, name: str) -> int:
    """After how many values of a variable an expression is shifted by a multiple of its period; 0 where that cannot be
    said.
    """
    mine = [v for v in _variables((e,)) if v.name == name]
    if not mine:
        return 1
    c = coefficient(e, mine[0])
    return period // math.gcd(period, c) if period and isinstance(c, int) else 0


def _variables(exprs: Sequence[IntExpr]) -> list[Var]:
    """The variables in expressions, each once."""
    found = topological([e for e in exprs if isinstance(e, Expr)], stop=lambda n: isinstance(n, Loaded | Var))
    return [x for x in found if isinstance(x, Var)]


def _names(exprs: Sequence[IntExpr]) -> list[str]:
    """The names of the variables but the lane."""
    return [n for n in dict.fromkeys(v.name for v in _variables(exprs)) if n != "lane"]
