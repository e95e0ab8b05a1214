"""What a nest says about how to walk it: terms computed twice, columns better than rows, transpositions, trips."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from terrazzo.ir import nest as n
from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, Loaded
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.ir.ranges import Range, stays

WORTH_KEEPING = 6.0
"""The price of a term (in additions) from which on storing and reading it back beats computing it twice."""
LARGEST_ROWS = 1 << 18
"""Bytes of kept rows in one scope: they live on the stack, and in the second-level cache."""

PARALLEL = 20_000
"""Points of a loop nest from which on a second thread pays."""

SHORT = 16
"""Steps of a reduction from which on there are vectors of them."""
NEAR = (2, 3, 4)
"""How far apart what lanes read may be, where the alternative is no vector at all."""
NOTHING: Mapping[Node, Range] = MappingProxyType({})
GROUP = 16
"""And where that is to go from row to row of memory instead, which is longer than all lanes are together."""


@dataclass(frozen=True)
class Kept:
    """`term` of the loop `first` is computed again, at the same places, in later loops: (loop, the term there)."""

    first: n.Loop
    term: l.Term
    again: tuple[tuple[n.Loop, Node], ...]


def repeated(body: Sequence[n.Statement]) -> list[Kept]:
    """The terms worth keeping from one loop of a scope to later ones over the same extent, as softmax's
    exponentials.
    """
    leaves = [
        s
        for s in body
        if isinstance(s, n.Loop) and is_leaf(s) and len(s.axes) == 1 and isinstance(s.axes[0].extent, int)
    ]
    found: list[Kept] = []
    covered: set[tuple[int, Node]] = set()  # what is read back already
    space = LARGEST_ROWS
    for k, first in enumerate(leaves):
        (axis,) = first.axes
        followers = [s for s in leaves[k + 1 :] if s.axes[0].extent == axis.extent]
        if not followers:
            continue
        lets = [s.term for s in first.body if isinstance(s, n.Let)]
        for x in reversed(lets):  # whole terms before their parts
            if axis not in x.free or (id(first), x) in covered or price(x, axis) < WORTH_KEEPING:
                continue
            again = []
            for s in followers:
                there = substitute(x, {axis: s.axes[0]})
                if (id(s), there) not in covered and any(isinstance(y, n.Let) and y.term is there for y in s.body):
                    again.append((s, there))
            size = axis.extent * x.dtype.size
            if again and size <= space:
                space -= size
                found.append(Kept(first, x, tuple(again)))
                covered |= {(id(first), y) for y in topological([x])}
                covered |= {(id(s), y) for s, there in again for y in topological([there])}
    return found


def price(x: Node, axis: Expr) -> float:
    """What computing a term costs at each point of `axis`, besides its loads."""
    return sum(
        y.fn.cost
        for y in topological([x], stop=lambda y: axis not in y.free)
        if isinstance(y, l.Apply) and axis in y.free
    )


def needed(body: Sequence[n.Statement], names: Mapping[Node, str]) -> list[n.Statement]:
    """The statements of a leaf's body without those that only compute parts of what has a name already."""
    roots: list[Node] = []
    for s in body:
        match s:
            case n.Accumulate():
                roots += s.args
            case l.Store():
                roots += s.children
    used = set(topological(roots, stop=names.__contains__))
    return [s for s in body if not isinstance(s, n.Let) or (s.term in used and s.term not in names)]


def computed_for(roots: Sequence[Node], names: Mapping[Node, str]) -> list[l.Term]:
    """The terms that these need and that have no names, what others need first."""
    return [
        x
        for x in topological(roots, stop=names.__contains__)
        if isinstance(x, l.Term) and not isinstance(x, l.Literal) and x not in names
    ]


def is_leaf(s: n.Loop) -> bool:
    """True for a loop without loops inside."""
    return not any(isinstance(x, n.Loop) for x in s.body)


def only_loop(s: n.Loop) -> n.Loop | None:
    """The free loop that is all of the body, if it is."""
    only = s.body[0] if len(s.body) == 1 else None
    return only if isinstance(only, n.Loop) and only.kind == "free" else None


def trips(body: Sequence[n.Statement]) -> int:
    """Statements executed by a piece of a nest."""
    return sum(points([s]) * max(trips(s.body), 1) if isinstance(s, n.Loop) else 1 for s in body)


def points(loops: Sequence[n.Loop]) -> int:
    """The product of the extents of these loops."""
    total = 1
    for s in loops:
        for a in s.axes:
            total *= a.extent if isinstance(a.extent, int) else 64
    return total


def vectorises(body: Sequence[n.Statement], spans: Mapping[Node, Range] = NOTHING) -> bool:
    """False where the statements of a leaf must run in order: a scan's accumulation, an index from data that is checked
    there. None is that stays inside its dimension, by the `spans` of what is loaded.
    """
    if any(isinstance(s, n.Accumulate) and isinstance(s.into, l.Scan) for s in body):
        return False
    lets = {s.term for s in body if isinstance(s, n.Let)}
    asked = {e for x in lets for e in _index_nodes(x) if isinstance(e, Loaded) and e.value in lets}
    return all(stays(e.value, e.extent, spans) for e in asked)


def reads_bytes(body: Sequence[n.Statement]) -> bool:
    """Whether a leaf reads numbers of one byte beside larger ones, such as a mask. As many lanes as a vector of floats
    has are so few of these that GCC writes the loop out, and takes it apart again, eight bytes at a time.
    """
    sizes = {x.dtype.size for x in _loads(body)}
    return 1 in sizes and len(sizes) > 1


def stays_a_loop(s: n.Loop, within: bool) -> list[str]:
    """What stands before a loop of a sum that runs `within` others of it, where terms are chosen by a condition. GCC 11
    and 12 vectorise a loop whose short inner loop they wrote out, in order, and lose some of the terms that have a
    condition: short loops stay loops.
    """
    return ["#pragma GCC unroll 1"] if within and _chooses(s.body) else []


def _chooses(body: Sequence[n.Statement]) -> bool:
    """Whether a term is one of two by a condition, or a load is there by one."""
    terms = [x.term for x in body if isinstance(x, n.Let)]
    return any(
        (isinstance(e, l.Apply) and e.fn.name == "where") or (isinstance(e, l.Load) and bool(e.inside))
        for e in topological(terms)
    ) or any(_chooses(x.body) for x in body if isinstance(x, n.Loop))


def in_columns(s: n.Loop, spans: Mapping[Node, Range] = NOTHING) -> bool:
    """True for a free loop whose reductions and scans read memory along it, and what follows them writes along it, so
    that lanes of it should run side by side.
    """
    inner = [x for x in s.body if isinstance(x, n.Loop)]
    if s.kind != "free" or all(x.kind == "free" for x in inner) or not all(map(is_leaf, inner)):
        return False
    if not isinstance(s.axes[0].extent, int) or s.axes[0].extent < 16:
        return False
    along, across = 0, 0
    for x in inner:
        accesses: list[l.Load | l.Store] = [*_loads(x.body), *(y for y in x.body if isinstance(y, l.Store))]
        for access in accesses:
            offset = flatten(access.index, access.buffer.type.element_strides)
            by, steps = coefficient(offset, s.axes[0]), x.axes[-1].extent
            far = not isinstance(steps, int) or steps >= SHORT
            row = coefficient(offset, x.axes[-1])  # lanes of one row of memory, each a group of its channels
            grouped = isinstance(by, int) and isinstance(row, int) and 1 < by <= GROUP and row >= by * s.axes[0].extent
            along += by == 1 or (by in NEAR and not far) or grouped
            # what knows no lane is one for all of them
            across += far and coefficient(offset, x.axes[-1]) == 1 and s.axes[0] in access.free
        if not vectorises([y for y in x.body if isinstance(y, n.Let) and s.axes[0] in y.term.free], spans):
            return False
    return along > 0 and across == 0


def transposes(outer: n.Loop, leaf: n.Loop) -> bool:
    """True for two free loops, one in the other, where something is read across the inner one and along the outer
    one.
    """
    if outer.kind != "free" or leaf.kind != "free" or not is_leaf(leaf) or not vectorises(leaf.body):
        return False
    for load in _loads(leaf.body):
        offset = flatten(load.index, load.buffer.type.element_strides)
        across, along = coefficient(offset, leaf.axes[0]), coefficient(offset, outer.axes[0])
        if isinstance(across, int) and abs(across) >= 16 and along == 1:
            return all(isinstance(s.axes[0].extent, int) and s.axes[0].extent >= 32 for s in (outer, leaf))
    return False


def groups(body: Sequence[n.Statement]) -> list[list[n.Statement]]:
    """Loops one by one, and what stands between them."""
    found: list[list[n.Statement]] = []
    for s in body:
        if isinstance(s, n.Loop) or not found or isinstance(found[-1][0], n.Loop):
            found.append([])
        found[-1].append(s)
    return found


def crossing(group: Sequence[n.Statement], others: Sequence[n.Statement]) -> list[l.Term]:
    """The terms computed in `group` that `others` use directly."""
    lets = {s.term: None for s in group if isinstance(s, n.Let) and not isinstance(s.term, l.Get)}
    used = set(topological(_roots(others), stop=lets.__contains__))
    return [x for x in lets if x in used]


def _roots(body: Sequence[n.Statement]) -> list[Node]:
    roots: list[Node] = []
    for s in body:
        match s:
            case n.Let():
                roots.append(s.term)
            case n.Accumulate():
                roots += s.args
            case n.Loop():
                roots += _roots(s.body)
            case l.Store():
                roots += s.children
    return roots


def _loads(body: Sequence[n.Statement]) -> Iterator[l.Load]:
    for s in body:
        if isinstance(s, n.Let) and isinstance(s.term, l.Load):
            yield s.term


def _index_nodes(x: Node) -> list[Node]:
    return topological([c for c in x.children if isinstance(c, Expr)], stop=lambda y: isinstance(y, l.Term))
