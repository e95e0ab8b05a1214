"""Slabs that span loops (`over=`): what all steps of these loops need of an operand is brought at once.

The slab of an operand is the image of the tile under its index. Where a loop moves the index along an axis of the tile,
as a tap moves the pixels of a convolution, the image is longer than the tile by what the loop moves it: it has a halo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from terrazzo.hw.products import warps
from terrazzo.ir.address import coefficient, mentions
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.node import Node
from terrazzo.ir.sites import called
from terrazzo.rewrite.rule import need
from terrazzo.rules.tile.draft import Draft, axis_name


def spanned(draft: Draft) -> tuple[Any, ...]:
    """The axes whose loops run inside a step, since every operand's slab spans them; in the order of the term."""
    asked = draft.spans
    if not any(asked.values()):
        return ()
    need(len(draft.products) == 1, "slabs span loops of one product only")
    if len(every := {frozenset(x) for x in asked.values()}) > 1:
        told = ", ".join(f"{x} spans {', '.join(over) or 'none'}" for x, over in asked.items())
        raise draft.fail(f"all operands of a product span the same loops: {told}")
    ((name, c),) = draft.products.items()
    loops = {axis_name(a): a for a in c.reduce.axes if draft.length(a, draft.site(name)) == 1}
    if unknown := sorted(every.pop() - set(loops)):
        found = ", ".join(loops) or "none"
        raise draft.fail(f"over={unknown[0]!r}: a slab spans loops that take one element a step, which are {found}")
    instruction = draft.instruction(draft.site(name))
    need(warps(instruction) == 1, f"{name}: wgmma reads rows that lie where its swizzle begins anew, which taps move")
    return tuple(a for x, a in loops.items() if x in asked[next(iter(asked))])


@dataclass(frozen=True)
class Span:
    """What the loops inside a step do to an operand's slab: those of `own` walk it, and `shifts` says by how much the
    others move it along an axis of the tile, for each of their steps.
    """

    own: tuple[Any, ...]
    shifts: tuple[tuple[Any, tuple[tuple[Any, int], ...]], ...]

    def halo(self, axis: Any) -> int:
        """How much longer the slab is along an axis than the tile."""
        return sum(d * (r.extent - 1) for a, moves in self.shifts if a is axis for r, d in moves)

    def at(self, axis: Any, where: dict[Any, IntExpr]) -> IntExpr:
        """What is added to the tile's place along an axis, in the step of the loops that `where` says."""
        moved: IntExpr = where[axis] if axis in self.own else 0
        for a, moves in self.shifts:
            for r, d in moves if a is axis else ():
                moved = moved + where[r] * d
        return moved


def span(draft: Draft, term: Node) -> Span:
    """How an operand's slab spans the loops inside a step. Declines where it is no image of the tile."""
    loops = [r for r in spanned(draft) if r in term.free]
    if not loops:
        return Span((), ())
    name = called(term)
    need(isinstance(term, l.Load), f"{name} is computed on its way, and spans no loops")
    assert isinstance(term, l.Load)
    own: list[Any] = []
    shifts: list[tuple[Any, tuple[tuple[Any, int], ...]]] = []
    for e in term.index:
        moving = [r for r in loops if mentions(e, r)]
        mine = [a for a in draft.tiled if mentions(e, a)]
        if not mine:
            own += moving
            continue
        steps = [(r, coefficient(e, r)) for r in moving]
        need(
            not moving or (len(mine) == 1 and coefficient(e, mine[0]) == 1),
            f"{name}: loops that a slab spans move it along one axis with a stride of one, not {e}",
        )
        need(
            all(isinstance(d, int) and d > 0 for _, d in steps),
            f"{name}: loops that a slab spans move it forward, not as {e}",
        )
        if moving:
            shifts.append((mine[0], tuple((r, d) for r, d in steps if isinstance(d, int))))
    seen = [*own, *(r for _, moves in shifts for r, _ in moves), *(a for a, _ in shifts)]
    once = all(sum(mentions(e, a) for e in term.index) == 1 for a in seen)
    need(once and len(set(seen)) == len(seen), f"{name}: an axis that a spanned loop moves is in several dimensions")
    return Span(tuple(own), tuple(shifts))
