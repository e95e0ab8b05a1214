"""The accesses of a kernel of Kernel IR to its places, with the loops and conditions around each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from terrazzo.hw import ldmatrix, mma_sync
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.loop import Buffer
from terrazzo.ir.expr import IntExpr, Var
from terrazzo.ir.node import Node, topological


@dataclass(frozen=True)
class Around:
    """What is around a statement: loops, from the outside, and conditions (expressions that are >= 0)."""

    loops: tuple[Var, ...] = ()
    inside: tuple[IntExpr, ...] = ()


@dataclass(frozen=True)
class Access:
    """A thread reads or writes `count` elements of a place from `index` on, where the expressions of `inside` are >= 0."""

    statement: Node
    place: Buffer
    index: tuple[IntExpr, ...]
    count: int
    write: bool
    around: Around
    inside: tuple[IntExpr, ...]


def statements(body: tuple[Node, ...], around: Around = Around()) -> Iterator[tuple[Node, Around]]:
    """Every statement with what is around it, in order; those of loops without iterations are none."""
    for s in body:
        yield s, around
        if isinstance(s, k.For) and s.axis.extent != 0:
            yield from statements(s.body, Around((*around.loops, s.axis), around.inside))
        elif isinstance(s, k.If):
            yield from statements(s.body, Around(around.loops, (*around.inside, *s.inside)))


def accesses(s: Node, around: Around) -> Iterator[Access]:
    """The accesses of a statement by ordinary loads and stores, cp.async and matrix instructions; boxes of TMA are not among them."""

    def access(place: Buffer, index: tuple[IntExpr, ...], count: int, write: bool, inside: tuple[IntExpr, ...] = ()) -> Access:
        return Access(s, place, index, count, write, around, (*around.inside, *inside))

    for x in loads(s):
        yield access(x.buffer, x.index, 1, False, x.inside)
    match s:
        case l.Store():
            yield access(s.buffer, s.index, 1, True)
        case k.Move():
            yield access(s.source, s.at, s.count, False)
            yield access(s.target, s.to, s.count, True)
        case k.AsyncCopy():
            yield access(s.source, s.at, s.count, False, s.inside)
            yield access(s.target, s.to, s.count, True)
        case k.LoadMatrix():
            yield access(s.source, s.at, 16 // s.source.type.dtype.size, False)
            yield access(s.target, s.to, ldmatrix.move(s.instruction).count, True)
        case k.Multiply():
            record = mma_sync.product(s.instruction)
            for place, index, count in ((s.a, s.a_at, record.a.registers), (s.b, s.b_at, record.b.registers)):
                yield access(place, index, count, False)
            yield access(s.d, s.d_at, record.d.elements, True)


def loads(s: Node) -> list[l.Load]:
    """The loads in the term of a statement, one for each that CUDA would have: equal ones are one."""
    terms = [s.term] if isinstance(s, k.Let) else [s.value] if isinstance(s, l.Store) else []
    return [x for x in topological(terms) if isinstance(x, l.Load)]
