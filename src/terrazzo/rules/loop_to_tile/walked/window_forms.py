"""Kernels of which a thread takes windows: reductions of few steps, of which many points read the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any

from terrazzo.ir import nest as n
from terrazzo.ir.contraction import contraction, is_product
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import Expr, Loaded, terms_of
from terrazzo.ir.node import Node, derived, per_node, topological
from terrazzo.ir.sites import product
from terrazzo.ir.types import f32
from terrazzo.rules.loop_to_tile.walked.cache_lines import LINE, offset_of, stride_of
from terrazzo.rules.moves import meeting, moves, overlaps, slides
from terrazzo.rules.tile.bodies import flat

SHORT, MANY = 16, 1 << 16
"""Steps that a thread takes by itself, at most; points from which on there are threads enough for that."""
FEW = 8
"""Columns of a product, as those of a convolution in groups, of which instructions compute more than is wanted."""
MOST_STEPS, MOST_SHARED = 1024, 8192
"""Steps of a window at most: beyond, a row is long enough for threads to share it; and of one whose points share what
they read at any length, as filters and pairs do. 31 x 31 on 8 x 128 x 56 x 56 took 1304 us as rows (PyTorch 874, H100);
as windows 239 by the model, and were not measured. By the model 9 x 9 from 64 channels to 3 in float32 takes 130 us, in
tiles that are mostly empty 1584.
"""
PART, LONGEST = 16, 32
"""Terms of a sum that are added up one after the other before they are added to others; and at most, where a sum does
not divide otherwise.
"""
SHALLOW = 512
"""Products in a sum over few channels, at most."""
POINTS = (2, 4, 7, 8)
"""Points of a thread along an axis: images are often 7 * 2^n wide."""

FEW_LOOPS = 5
"""Loops over steps of which each may be serial or written out, whichever the others are."""


@dataclass(frozen=True)
class Form:
    """A kernel with windows: its axes, the terms outside reductions and those of each. They may lie `under_taps`, whose
    sums are of a piece of an image.
    """

    kernel: l.Kernel
    axes: tuple[Any, ...]
    terms: tuple[Node, ...]
    loops: tuple[n.Loop, ...]
    under_taps: bool = False

    @derived
    def crossed(self) -> bool:
        """Whether all that it reduces is over pairs of operands, and no product."""
        return all(isinstance(r, l.Reduce) and crosses(r) for s in self.loops for r in s.carried)

    @derived
    def summed(self) -> bool:
        """Whether it adds up pairs, in sums that threads would share otherwise, each with a part of them."""
        return self.crossed and any(r.monoid.name == "sum" for s in self.loops for r in s.carried)

    @derived
    def accesses(self) -> list[Any]:
        """What is loaded and stored."""
        inside = [x.term for s in self.loops for x in s.body if isinstance(x, n.Let)]
        return [*(t for t in (*self.terms, *inside) if isinstance(t, l.Load)), *self.kernel.stores]

    @derived
    def loaded(self) -> list[list[l.Load]]:
        """What is loaded in each loop."""
        return [[x.term for x in s.body if isinstance(x, n.Let) and isinstance(x.term, l.Load)] for s in self.loops]

    @derived
    def executed(self) -> dict[n.Loop | None, list[tuple[Any, int]]]:
        """What is executed by itself (None) and in each loop: one term of each kind, and how many there are. A term of
        hundreds of loads has few kinds.
        """
        found: dict[Any, dict[Any, tuple[Any, int]]] = {s: {} for s in (None, *self.loops)}
        inside = [(s, x.term) for s in self.loops for x in s.body if isinstance(x, n.Let)]
        for s, t in (*((None, t) for t in self.terms), *inside, *((None, t) for t in self.kernel.stores)):
            if is_product(t) and s is not None and _summed(t, s):
                continue
            one, count = found[s].get(_kind(t), (t, 0))
            found[s][_kind(t)] = one, count + 1
        return {s: [*each.values()] for s, each in found.items()}

    @derived
    def serial(self) -> list[frozenset[Any]]:
        """Which steps may be serial, while the others are written out."""
        steps = sorted((a for s in self.loops for a in s.axes), key=lambda a: -a.extent)
        if self.under_taps:  # the last one is a run
            return [frozenset(steps) - {s.axes[-1] for s in self.loops}]
        if len(steps) <= FEW_LOOPS:
            found = [frozenset(x) for k in range(len(steps) + 1) for x in combinations(steps, k)]
        else:  # the longest are serial first
            found = [frozenset(steps[:k]) for k in range(len(steps) + 1)]
        if self.summed:
            found = [x for x in found if all(a in x or a.extent <= SHORT for a in steps)]
        return found

    @derived
    def gathered(self) -> list[tuple[frozenset[Any], int]]:
        """Planes that data says where to read in: which axes they are chosen by, and bytes of one."""
        found = []
        for x in self.accesses:
            index = {d: e for d, e in enumerate(x.index) if isinstance(e, Expr)}
            said = {d for d, e in index.items() if any(isinstance(y, Loaded) for y in topological([e]))}
            if len(x.index) - 1 in said:
                plane = math.prod(x.buffer.type.static_shape[d] for d in said) * x.buffer.type.dtype.size
                found.append((frozenset(a for d, e in index.items() if d not in said for a in e.free), plane))
        return found

    @derived
    def bytes(self) -> float:
        """Of all buffers, or of what is read of one at fewer points, as of a table in which data says where."""
        points: dict[l.Buffer, int] = {}
        for x in self.accesses:
            points[x.buffer] = points.get(x.buffer, 0) + math.prod(a.extent for a in x.free)
        return float(sum(min(math.prod(b.type.static_shape), count) * b.type.dtype.size for b, count in points.items()))

    @derived
    def asked(self) -> dict[Any, tuple[int, int]]:
        """What was found of terms for those who compute windows in different ways."""
        return {}

    @derived
    def lanes(self) -> tuple[Any, ...]:
        """Axes that memory runs along in some access, or nearly."""
        found: dict[Any, None] = {}
        for x in self.accesses:
            steps = {a: stride_of(x, a) for a in self.axes}
            near = {a: abs(s) for a, s in steps.items() if isinstance(s, int) and s}
            if near:
                found[min(near, key=lambda a: near[a])] = None
        return tuple(found) or self.axes[-1:]


def form_of(kernel: l.Kernel, under_taps: bool = False) -> Form | None:
    """A kernel as one nest of loops over points around reductions of few steps, of which some load moves with both, or
    which are so short that a thread takes each by itself, and no tiles are worth it. Windows that have no place in
    common are rows that threads had better share, unless every one of many points has its own; so is a long row beside
    them that does not move, and a long window that more points share than a thread takes, as that of a norm. Who cuts a
    sum over an image knows that its pieces are windows, whatever tiles there are.
    """
    if isinstance(found := flat(kernel), str):
        return None
    axes, statements = found
    loops = tuple(s for s in statements if isinstance(s, n.Loop))
    every = [*axes, *(a for s in loops for a in s.axes)]
    if not loops or not axes or any(not isinstance(a.extent, int) or a.extent < 1 for a in every):
        return None
    if any(math.prod(a.extent for a in s.axes) > (MOST_SHARED if _shared(s) else MOST_STEPS) for s in loops):
        return None
    terms = tuple(s.term for s in statements if isinstance(s, n.Let))
    reduces = [r for s in loops for r in s.carried if isinstance(r, l.Reduce)]
    if under_taps:
        return Form(kernel, axes, terms, loops, under_taps)
    if any(over_an_image(r, axes) for r in reduces):
        return None
    many = math.prod(a.extent for a in axes) >= MANY
    short = all(math.prod(a.extent for a in r.axes) <= SHORT and (many or contraction(r) is not None) for r in reduces)
    own = many and all(a in r.free for r in reduces for a in axes)
    long = [r for r in reduces if math.prod(a.extent for a in r.axes) > SHORT]
    moving = any(slides(r) and (own or overlaps(r)) for r in reduces) and all(map(slides, long))
    known = max((k for k, a in enumerate(axes) if any(a in r.free for r in reduces)), default=-1)
    moving = moving and not (long and math.prod(a.extent for a in axes[known + 1 :]) > max(POINTS))
    moved = moving and (product(kernel) is None or multiplied_by_threads(kernel))
    form = Form(kernel, axes, terms, loops)
    pairs = form.crossed and known == len(axes) - 1 and all(map(_exact, reduces))
    return form if moved or short or pairs else None


def over_an_image(r: l.Reduce, axes: Sequence[Any]) -> bool:
    """Whether a long sum is over the points of an image under a few taps, as of a filter's gradient: threads share it,
    since there are few of its results.
    """
    loads = [x for x in topological(r.args) if isinstance(x, l.Load)]
    results, summed = meeting(loads, axes, r.axes)
    return math.prod(a.extent for a in r.axes) > SHALLOW and results < summed


def crosses(r: l.Reduce) -> bool:
    """Whether a reduction that is no product is over pairs, as a sum of distances is: of two operands each misses an
    axis of points that the other knows, so a thread that takes points along both loads each for all of them.
    """
    if contraction(r) is not None:
        return False
    read = {x.free - frozenset(r.axes) for x in topological(r.args) if isinstance(x, l.Load)}
    own = [[frozenset(a for a in x - y if getattr(a, "extent", 2) != 1) for y in read] for x in read]
    return any(own[i][j] and own[j][i] for i in range(len(read)) for j in range(i))


def _exact(r: l.Reduce) -> bool:
    """Whether a thread that goes through all steps of a reduction rounds hardly more than threads that share them."""
    (axis, *others), count = r.axes, math.prod(a.extent for a in r.axes)
    return r.monoid.name != "sum" or count <= SHORT or (not others and afresh(axis.extent) != ())


@lru_cache(maxsize=1024)
def afresh(steps: int) -> tuple[int, ...]:
    """How a long sum is divided: the last so many steps are added up before they are added to others, so many of these
    before that, and so on; nothing where it divides into no such parts. Of 64, 256 and 512 distances sums in parts of
    16, 16 and 32 were off by 1.4, 1.8 and 1.7 times as much as those of a tree, and sums in one by 3.6, 7 and 9 times.
    """
    if steps <= PART:
        return (steps,)
    sizes = (PART, LONGEST, *range(PART - 1, 1, -1))
    found = [(*outer, k) for k in sizes if steps % k == 0 and (outer := afresh(steps // k))]
    return min(found, key=len, default=())


def _shared(s: n.Loop) -> bool:
    """Whether all that a loop adds up is products, or all that it reduces is over pairs."""
    reduces = [r for r in s.carried if isinstance(r, l.Reduce)]
    filtered = all(r.monoid.name == "sum" and is_product(x) for r in reduces for x in r.args)
    return filtered or all(map(crosses, reduces))


def multiplied_by_threads(kernel: l.Kernel) -> bool:
    """Whether a kernel is a product of which the tile of an instruction would be mostly empty, or of few channels."""
    p = product(kernel)
    return p is not None and (min(p.m.extent, p.n.extent) <= FEW or few_channels(kernel))


def few_channels(kernel: l.Kernel) -> bool:
    """Whether a kernel is a product in float32 of few channels, of which tiles fetch what threads' points share."""
    p = product(kernel)
    factors: list[Any] = [*p.operands] if p else []
    if p is None or min(p.m.extent, p.n.extent) <= FEW or any(x.dtype is not f32 for x in factors):
        return False
    return math.prod(a.extent for a in p.axes) <= SHALLOW and any(overlaps(c.reduce) for c in p.sites)


@per_node
def directions(term: Node) -> tuple[tuple[Any, Any], ...]:
    """How each variable that a term knows moves the places that it is made of: the number of a direction, and steps in
    it; nothing where it moves none, None where in no even steps.
    """
    read = (x for x in topological([term]) if isinstance(x, l.Load | l.Index))
    every = (e for x in read for e in (x.children if isinstance(x, l.Index) else (*x.index, *x.inside)))
    indices: Any = tuple(dict.fromkeys(every))
    numbers: dict[tuple[int, ...], int] = {}
    found: list[tuple[Any, Any]] = []
    for v in term.free:
        along = moves(indices, [(v, 2)])
        if not along:
            found.append((v, None if along is None else ()))
            continue
        (one,) = along
        ((_, _, c),) = one.loops
        least = math.gcd(*one.steps)
        found.append((v, (numbers.setdefault(tuple(s // least for s in one.steps), len(numbers)), c * least)))
    return tuple(sorted(found, key=lambda x: id(x[0])))


@lru_cache(maxsize=4096)
def places(directions: tuple[tuple[Any, Any], ...], loops: tuple[tuple[Any, int], ...]) -> int:
    """How many places loops, variables with their sizes, move to, those between that no loop meets included."""
    moved = dict(directions)
    along: dict[int, list[tuple[int, int]]] = {}
    for v, size in loops:
        if moved[v] is None:
            return math.prod(size for _, size in loops)
        if moved[v]:
            number, c = moved[v]
            along.setdefault(number, []).append((c, size))
    least = {number: math.gcd(*(c for c, _ in every)) for number, every in along.items()}
    return math.prod(1 + sum(abs(c) // least[k] * (size - 1) for c, size in every) for k, every in along.items())


def _kind(t: Any) -> Any:
    """What terms that take as long have in common: where they lie in a line of the cache, not in which one."""
    if isinstance(t, l.Apply):
        return directions(t), 1 if is_cast(t.fn) else t.fn.cost
    if isinstance(t, l.Load):
        at = dict(terms_of(offset_of(t)))
        begin = at.pop((), 0) * t.dtype.size % LINE
        return directions(t), t.buffer.type, tuple(at.items()), begin, t.inside
    return t


def _summed(term: Node, s: n.Loop) -> bool:
    """Whether a product goes into a sum, so both are one instruction."""
    return any(term in x.args for x in s.body if isinstance(x, n.Accumulate))
