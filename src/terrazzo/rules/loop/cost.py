"""What a kernel costs, by a model simple enough to argue with: memory traffic + arithmetic + one launch, in
nanoseconds.

The model reads the loop nest: a term costs its price times the trips of the loops around it; a buffer costs the bytes
of it that are touched, once per kernel. It decides fusion only; it does not pretend to predict a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.ir import nest as n
from terrazzo.ir.address import flatten
from terrazzo.ir.contraction import Contraction, contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import Bound, Expr, FloorDiv, IntExpr, Loaded, Mod, Var, bounds, terms_of
from terrazzo.ir.node import substitute, topological
from terrazzo.ir.sites import Sites, alone, loads, made_of, not_made, sites
from terrazzo.rules.loop.layout.images import image, strewn, transposed


@dataclass(frozen=True)
class Rates:
    """Nanoseconds per unit of work, for a whole machine that is kept busy.

    byte: one byte of memory traffic; op: one simple vectorised operation on one element; serial: one combination of a
    monoid that does not vectorise; fma: one multiply-add of a contraction the target blocks; mixed: one in a kernel
    that also reduces in other ways, or has other products, so that it is not blocked; load: one element from cache;
    step: one step of a reduction that each thread does by itself, since others around it are shared; launch: one
    kernel. Where there are matrix instructions, `matrix` are the types of their operands, and tensor is a multiply-add
    of theirs; with `boxes` they take what is padded with zeros on its way.
    """

    byte: float = 0.05
    op: float = 0.03
    serial: float = 1.0
    fma: float = 0.012
    mixed: float = 0.2
    load: float = 0.02
    step: float = 0.0
    launch: float = 3000.0
    tensor: float = 0.012
    matrix: tuple[str, ...] = ()
    boxes: bool = False


def cost(kernel: l.Kernel, rates: Rates, as_it_is: bool = False) -> float:
    """Nanoseconds, by the model. Images that are stored first for the kernel's windows count as stored, unless it is
    priced `as_it_is`.
    """
    found = sites(kernel)
    reductions = found.carried.values()
    steps = {r.axes if isinstance(r, l.Reduce) else () for r in reductions}  # products over other steps are not blocked
    tiled = {c.reduce: c for c in found.contractions.values() if not looked_up(c.operands)}
    if rates.matrix:
        every = found.contractions.values() if found.everywhere and not _astray(found) else ()
        tiled = {c.reduce: c for c in every if _once(kernel, c) and _boxes(kernel, c, rates, as_it_is)}
    blocked = len(tiled) == len(reductions) and len(steps) < 2 and (rates.matrix or _blocked(found))
    bill = _Bill(rates, rates.fma if blocked else rates.mixed, tiled)
    bill.walk(n.nest(kernel), 1)
    traffic = sum(min(count, _count(b.type.numel)) * b.type.dtype.size for b, count in bill.touched.items())
    return rates.launch + bill.work + traffic * rates.byte


def _blocked(found: Sites) -> bool:
    """Whether a processor blocks sums of products: those with a tile in common. One that has none is walked in any
    case; beside others it keeps them from theirs.
    """
    axes, alone = found.kernel.axes, len(found.contractions) < 2
    return found.everywhere and found.one_chain and (alone or any(found.sides(a, b) for a in axes for b in axes))


def on_matrix(r: Any, rates: Rates) -> bool:
    """Whether a reduction is a contraction that matrix instructions can compute: of plain loads of their types, each
    with a free axis of its own. Who computes an operand on the way, converts it to such a type, or looks up where it
    is, takes that away.
    """
    if not isinstance(r, l.Reduce) or (c := contraction(r)) is None or r.dtype.name != "f32":
        return False
    plain = all(
        (isinstance(x, l.Load) and (not x.inside or (rates.boxes and _padded(x))) and not (rates.boxes and _shifted(x)))
        or (rates.boxes and (widened(x) or transposed(x, r.axes)))
        for x in c.operands
    )
    types = {x.dtype for x in c.operands}  # type: ignore[attr-defined]
    return plain and has_tiles(c) and not looked_up(c.operands) and len(types) == 1 and types.pop().name in rates.matrix


def has_tiles(c: Contraction) -> bool:
    """Whether each factor has an axis that is neither summed over nor one of the other's."""
    one, other = (f.free - frozenset(c.reduce.axes) for f in c.factors)
    return all(any(map(_longer, own)) for own in (one - other, other - one))


def _shifted(x: l.Load) -> bool:
    """Whether rows that lie at multiples of 16 bytes are read from between these on, so that no box begins there: who
    writes a product behind a column reads its factor so. Contrast with a queue of 65,536 ran at 0.64 of eager so.
    """
    terms, whole = terms_of(flatten(x.index, x.buffer.type.element_strides)), 16 // x.dtype.size
    start = terms.pop((), 0)
    beside = [c for c in terms.values() if c % whole]
    return start % whole > 0 and beside == [1]


def widened(x: Any) -> bool:
    """Whether a factor is made of whole numbers, such as quantised weights: products make it on its way, or have
    it stored first, whichever is cheaper.
    """
    source = made_of(x)
    whole = source is not None and source.dtype.is_integer and not isinstance(x, l.Load)
    return whole and alone(x) and not looked_up([x]) and (not not_made(x) or _several(source))


def _several(source: Any) -> bool:
    """Whether a number that is read holds several elements along what is summed over."""
    every = topological([e for e in (*source.index, *source.inside) if isinstance(e, Expr)])
    return any(isinstance(x, FloorDiv | Mod) and any(isinstance(a, Bound) for a in x.free) for x in every)


def _once(kernel: l.Kernel, c: Contraction) -> bool:
    """Whether every sum is taken once: a tile has one at each of its points; others are taken in the loops around the
    last axis that they know.
    """
    known = [a in c.reduce.free for a in kernel.axes if _longer(a)]
    while known and not known[-1] and not all(_own(c)):
        known.pop()
    return all(known)


def _astray(found: Sites) -> bool:
    """Whether there are sums of products over the same steps of which each has rows and columns, but no two axes are
    those of all: alone each is a tile's, and together none. Attention along rows and along columns ran at 0.25 of eager
    where its scores, or their products, were one kernel.
    """
    sums = [*found.contractions.values()]
    if len(sums) < 2 or any(c.reduce.axes != sums[0].reduce.axes or not all(_own(c)) for c in sums):
        return False
    return not any(found.sides(a, b) for a in found.kernel.axes for b in found.kernel.axes)


def _boxes(kernel: l.Kernel, c: Contraction, rates: Rates, as_it_is: bool) -> bool:
    """Whether operands lie in boxes, or images of them do that are stored first, or those that phases see."""
    steps = c.reduce.axes
    images = [x for x in c.operands if not as_it_is and strewn(x, steps) and image(x, kernel.axes, steps)[1]]
    others = [x for x in c.operands if x not in images and not (rates.boxes and transposed(x, steps))]
    if rates.boxes and any(isinstance(x, l.Load) and _together(x, steps) for x in c.operands):
        return False
    return not looked_up(others) and not any(strewn(x, steps) for x in others)


def _together(x: l.Load, steps: Sequence[Any]) -> bool:
    """Whether several axes of points walk a dimension that steps walk, too, as where results of a convolution are
    stored window by window: boxes have one axis along each dimension.
    """
    return any(
        len({f for f in e.free if _longer(f)} - {*steps}) > 1 and not e.free.isdisjoint(steps)
        for e in x.index
        if isinstance(e, Expr) and not any(isinstance(y, FloorDiv | Mod) for y in topological([e]))
    )


def _own(c: Contraction) -> list[list[Any]]:
    """The free axes, or those with a digit, of each factor that the other does not know."""
    one, other = map(_read_by, c.factors)
    return [[a for a, by in x.items() if _longer(a) and a not in c.reduce.axes and _adds(by, y.get(a))]
            for x, y in ((one, other), (other, one))]  # fmt: skip


def _points(axes: Sequence[Any]) -> int:
    return math.prod(_count(a.extent) for a in axes)


SIDE = 16
"""Points of a factor's own axes that a tile has at least: fewer share what each loads of the other one."""


def _adds(by: set[Any], known: set[Any] | None) -> bool:
    """Whether who reads an axis by some of its digits knows more of it than who reads it by others, or not at all."""
    return known is None or (WHOLE not in known and not by <= known)


WHOLE = "whole"


def _read_by(factor: Any) -> dict[Any, set[Any]]:
    """By which digits of which axes a factor is read, or that it is by the whole of one."""
    found: dict[Any, set[Any]] = {}
    for x in topological([factor]):
        for a in x.children:
            if isinstance(a, Var):
                by = (type(x), x.b) if isinstance(x, FloorDiv | Mod) and x.a is a and isinstance(x.b, int) else WHOLE
                found.setdefault(a, set()).add(by)
    return found


def _longer(axis: Any) -> bool:
    return getattr(axis, "extent", 2) != 1


def looked_up(terms: Sequence[Any]) -> bool:
    """Whether data says where something that terms are made of is."""
    return any(isinstance(x, Loaded) for x in topological(terms))


def _padded(x: l.Load) -> bool:
    """Whether a load is 0 outside its tensor, and nowhere else."""
    ends = [e for i, n in zip(x.index, x.buffer.type.shape, strict=True) for e in (i, n - 1 - i)]
    return all(e in ends for e in x.inside)


LONG, FAR = 4096, 1 << 25
"""Steps of a reduction, and bytes of a buffer, from which on what is read again comes from memory again."""


class _Bill:
    def __init__(self, rates: Rates, fma: float, products: Mapping[Any, Contraction]) -> None:
        self.rates, self.fma, self.products = rates, fma, products
        self.work = 0.0
        self.touched: dict[l.Buffer, int] = {}

    def touch(self, buffer: l.Buffer, trips: int) -> None:
        self.touched[buffer] = max(self.touched.get(buffer, 0), trips)

    def walk(self, body: Sequence[n.Statement], trips: int, in_reduction: bool = False, alone: bool = False) -> None:
        shared = any(isinstance(s, n.Loop) and s.kind == "reduce" for s in body)
        for s in body:
            match s:
                case n.Let():
                    self.term(s.term, trips, in_reduction)
                case n.Accumulate():
                    simple = s.into.monoid.width == 1 and isinstance(s.into, l.Reduce)
                    self.work += trips * (self.rates.op if simple else self.rates.serial)
                case l.Store():
                    self.touch(s.buffer, trips)
                case n.Loop():
                    points = trips
                    for a in s.axes:
                        points *= _count(a.extent)
                    reduces = s.kind == "reduce"
                    self.work += points // max(trips, 1) * self.rates.step * (reduces and alone)
                    blocked = not in_reduction and reduces and all(r in self.products for r in s.carried)
                    if blocked:
                        self.work += points * sum(map(self.product, s.carried))
                        self.operands(s.body, points, self.made(s.carried))
                        self.work += points * sum(map(self.gathered, s.carried)) * self.rates.load
                        self.work -= points * self.rates.op * len(s.carried)  # the products are in the price of an fma
                    else:
                        self.again(s, trips, points)
                        self.walk(s.body, points, in_reduction or reduces, alone or shared or reduces)

    def again(self, s: n.Loop, rows: int, points: int) -> None:
        """What long rows of a large buffer cost where a reduction over them is computed at several points each."""
        if s.kind != "reduce" or points // max(rows, 1) <= LONG:
            return
        for x in s.body:
            if isinstance(x, n.Let) and isinstance(x.term, l.Load) and set(s.axes) <= x.term.free:
                once, size = _count(x.term.buffer.type.numel), x.term.dtype.size
                self.work += max(points - once, 0) * size * self.rates.byte * (once * size >= FAR)

    def product(self, r: Any) -> float:
        """The multiply-adds of a point of a contraction, and what is loaded at every one: a factor is loaded for a
        whole tile only where the other has an axis of its own, along which the tile lies, and for a few points where
        that axis is short. Nine gradients of 2 x 2 weights for 512 places took 1200 us as parts of a sum (H200).
        """
        c = self.products[r]
        if self.fma == self.rates.fma and on_matrix(r, self.rates):
            return len(c.terms) * self.rates.tensor
        each = [points for points in map(_points, _own(c)) if points < SIDE] if self.rates.matrix else []
        return len(c.terms) * (self.fma + self.rates.load * min(1.0, sum(1 / points for points in each)))

    def gathered(self, r: Any) -> int:
        """What is loaded at a point besides the factors of a product that is computed on its way, and that matrix
        instructions would take if it lay in memory: few threads make it of single elements, and wait for each step's.
        Queries and keys of 32 tokens, turned on their way, took 10 us for their scores on an H200, and 4 apart.
        """
        every = self.products[r].operands
        kinds = {x.dtype.name for x in every}  # type: ignore[attr-defined]
        if on_matrix(r, self.rates) or len(kinds) > 1 or not kinds <= {*self.rates.matrix}:
            return 0
        return sum(max(len(loads(x)) - 1, 0) for x in every)

    def made(self, carried: Sequence[Any]) -> dict[Any, int]:
        """How often what is made on its way to matrix instructions is made."""
        found: dict[Any, int] = {}
        for r in carried:
            for x in self.products[r].operands if on_matrix(r, self.rates) else ():
                if not isinstance(x, l.Load):
                    count = math.prod(_count(a.extent) for a in x.free if isinstance(a, Var | Bound))
                    found |= dict.fromkeys(topological([x]), count)
        return found

    def operands(self, body: Sequence[n.Statement], points: int, made: Mapping[Any, int]) -> None:
        """A contraction's products are paid; what its operands need beyond loads and conversions is paid at every
        point, but for what is `made` less often.
        """
        for s in body:
            match s:
                case n.Let(term=l.Load() as load):
                    self.touch(load.buffer, points)
                case n.Let(term=l.Apply() as f) if not is_cast(f.fn):
                    self.work += made.get(f, points) * f.fn.cost * self.rates.op
                case n.Loop():
                    self.walk([s], points, True, True)

    def term(self, term: l.Term, trips: int, in_reduction: bool) -> None:
        if isinstance(term, l.Load):
            self.touch(term.buffer, trips)
            self.work += trips * self.rates.load * (1.0 if in_reduction else _reading(term))
        elif isinstance(term, l.Apply):
            self.work += trips * term.fn.cost * self.rates.op


def _reading(x: l.Load) -> float:
    """The part of the points that load at all, where a digit of few values says which, as of what is stacked: one of
    two in `x[i // 2] if i % 2 == 0 else 0`. A thread has them all, and loads nothing for the others. (Not where it
    reduces: whose columns these are, is not known then.)
    """
    atoms = [d for d in topological([e for e in x.inside if isinstance(e, Expr)]) if isinstance(d, Mod | Var)]
    part = 1.0
    for d in atoms:
        low, high = bounds(d)
        if low != 0 or not isinstance(high, int) or high >= FEW:
            continue
        tested = ([substitute(e, {d: v}) for e in x.inside] for v in range(high + 1))
        part *= sum(all(not isinstance(e, int) or e >= 0 for e in y) for y in tested) / (high + 1)
    return part


FEW = 8
"""Values of a digit whose points one thread has side by side, at most."""


def _count(extent: IntExpr) -> int:
    """The size itself, or a middling guess for a symbolic one."""
    if isinstance(extent, int):
        return extent
    lo, hi = bounds(extent)
    return max(lo or 1, min(hi or 512, 512))
