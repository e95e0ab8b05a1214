"""The accesses of a kernel of Kernel IR to its places, with the loops and conditions around each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from terrazzo.hw import ldmatrix, mma_sync, wgmma
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.loop import Buffer
from terrazzo.ir.expr import Expr, IntExpr, Var, bounds
from terrazzo.ir.node import Node, per_node, topological
from terrazzo.ir.show_kernel import lines


@dataclass(frozen=True)
class Around:
    """What is around a statement: loops, from the outside, and conditions (expressions that are >= 0).

    Of a loop with a computed number of steps, that there is such a step is a condition. One that mentions an integer
    which changes around the statement is none, for it held before; then they are not the `whole` truth.
    """

    loops: tuple[Var, ...] = ()
    inside: tuple[IntExpr, ...] = ()
    whole: bool = True

    def inner(self, loops: tuple[Var, ...], inside: tuple[IntExpr, ...], body: tuple[Node, ...]) -> Around:
        """What is around the statements of `body`, which stands in one more loop or under some more conditions."""
        changing = k.changed(body)
        every = (*self.inside, *inside)
        lasting = tuple(e for e in every if not changing & {*integers((e,))}) if changing else every
        return Around((*self.loops, *loops), lasting, self.whole and len(lasting) == len(every))


@dataclass(frozen=True)
class Access:
    """A thread reads or writes `count` elements of a place from `index` on, where the expressions of `inside` are >=
    0.
    """

    statement: Node
    place: Buffer
    index: tuple[IntExpr, ...]
    count: int
    write: bool
    around: Around
    inside: tuple[IntExpr, ...]


def statements(kernel: k.Kernel) -> Iterator[tuple[Node, Around, int]]:
    """Every statement with what is around it and the number of its line in the kernel's text, in order; those of loops
    without iterations are none.
    """
    yield from _statements(kernel.body, Around(), Var("warp", kernel.warps), 1 + len(kernel.shared))


def _statements(body: tuple[Node, ...], around: Around, warp: Var, line: int) -> Iterator[tuple[Node, Around, int]]:
    for s in body:
        yield s, around, line
        if isinstance(s, k.For) and s.axis.extent != 0:
            steps = (s.axis.extent - 1 - s.axis,) if isinstance(s.axis.extent, Expr) else ()
            yield from _statements(s.body, around.inner((s.axis,), steps, s.body), warp, line + 1)
        elif isinstance(s, k.If | k.Role):
            inside = s.inside if isinstance(s, k.If) else (warp - s.first, s.first + s.count - 1 - warp)
            yield from _statements(s.body, around.inner((), inside, s.body), warp, line + 1)
        line += lines(s)


def most(extent: IntExpr) -> int:
    """How many values a variable has at most."""
    return max(bounds(extent)[1] or 0, 0)


def integers(exprs: Iterable[IntExpr]) -> list[k.Integer]:
    """The integers that expressions mention, each once."""
    found = topological([e for e in exprs if isinstance(e, Expr)], stop=lambda x: isinstance(x, Var))
    return [x for x in found if isinstance(x, k.Integer)]


def accesses(s: Node, around: Around) -> Iterator[Access]:
    """The accesses of a statement, but for those that name a slab of shared memory (`slabs`)."""

    def access(
        place: Buffer, index: tuple[IntExpr, ...], count: int, write: bool, inside: tuple[IntExpr, ...] = ()
    ) -> Access:
        return Access(s, place, index, count, write, around, (*around.inside, *inside))

    for x in terms(s):
        if isinstance(x, l.Load | k.Remote):
            yield access(x.buffer, x.index, 1, False, x.inside if isinstance(x, l.Load) else ())
    match s:
        case l.Store() | k.Atomic():
            yield access(s.buffer, s.index, 1, True)
        case k.Move():
            yield access(s.source, s.at, s.count, False)
            yield access(s.target, s.to, s.count, True)
        case k.AsyncCopy():
            yield access(s.source, s.at, s.count, False, s.inside)
            yield access(s.target, s.to, s.count, True)
        case k.LoadMatrix() | k.StoreMatrix():
            record = ldmatrix.move(s.instruction)
            shared, held = (s.target, s.source) if record.store else (s.source, s.target)
            row, registers = 16 // shared.type.dtype.size, 4 * record.count // held.type.dtype.size
            yield access(s.source, s.at, registers if record.store else row, False)
            yield access(s.target, s.to, row if record.store else registers, True)
        case k.TurnMatrix():
            yield access(s.source, s.at, 4 // s.source.type.dtype.size, False)
            yield access(s.target, s.to, 4 // s.target.type.dtype.size, True)
        case k.Multiply():
            product = mma_sync.product(s.instruction)
            yield access(s.a, s.a_at, product.a.held_in(s.a), False)
            yield access(s.b, s.b_at, product.b.held_in(s.b), False)
            yield access(s.d, s.d_at, product.d.elements, True)
        case k.MultiplyAsync():
            group = wgmma.product(s.instruction)
            if isinstance(s.a, k.Registers):
                yield access(s.a, s.a_at, group.a.held_in(s.a), False)
            yield access(s.d, s.d_at, group.d.registers, True)


def slabs(s: Node, around: Around) -> Iterator[Access]:
    """The slabs of shared memory that a box of TMA fills or a product of a warpgroup reads: from their first element to
    their last.
    """
    match s:
        case k.TensorLoad():
            yield Access(s, s.target, s.to, math.prod(s.box), True, around, around.inside)
        case k.TensorStore():
            yield Access(s, s.source, s.at, math.prod(s.box), False, around, around.inside)
        case k.MultiplyAsync():
            for operand, place, at in (("a", s.a, s.a_at), ("b", s.b, s.b_at)):
                if isinstance(place, k.Shared):
                    size = wgmma.slab(place, operand in s.transposed).bytes(
                        *wgmma.product(s.instruction).extent(operand, operand in s.transposed)
                    )
                    yield Access(s, place, at, size // place.type.dtype.size, False, around, around.inside)


@per_node
def terms(s: Node) -> tuple[Node, ...]:
    """The parts of the term of a statement, each once, as CUDA computes equal ones once."""
    roots = [s.term] if isinstance(s, k.Let) else [s.value] if isinstance(s, l.Store | k.Atomic) else []
    return tuple(topological(roots))
