"""What a loop counts along instead of dividing in every step.

There is no instruction that divides whole numbers. `(i * 32 + t) % 10`, the slot of a ring, is some ten of them one
after the other, before every wait. In a loop over t it is a number that starts again at 10, and what is divided is
raised by one then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.expr import Expr, FloorDiv, IntExpr, Loaded, Mod, at_least, terms_of
from terrazzo.ir.node import substitute, topological

MOST = 4
"""Numbers that a loop counts, at most: each takes a register."""


@dataclass(frozen=True)
class Counter:
    """A number that grows with a loop by one a step, modulo `base` and divided by it: what is written for these, where
    they are wanted, and what they are before the first step.
    """

    base: int
    first: IntExpr
    rest: Mod | None
    quotient: FloorDiv | None


def counters(loop: k.For) -> list[Counter]:
    """The first few of the divisions in a loop that it may count along."""
    found: dict[tuple[Expr, int], list[Mod | FloorDiv]] = {}
    if not loop.unrolled:
        for x in _divisions(loop):
            found.setdefault((x.a, x.b), []).append(x)  # type: ignore[arg-type]
    return [
        Counter(
            base,
            substitute(a, {loop.axis: 0}),
            next((x for x in uses if isinstance(x, Mod)), None),
            next((x for x in uses if isinstance(x, FloorDiv)), None),
        )
        for (a, base), uses in list(found.items())[:MOST]
    ]


def _divisions(loop: k.For) -> Iterator[Mod | FloorDiv]:
    """Divisions, by a constant that is no power of two or of what may be negative, of the loop's variable and what the
    loop does not change.
    """
    inner = {s.axis for s in k.walk(loop.body) if isinstance(s, k.For)} | k.changed(loop.body)
    for x in topological(loop.body):
        if not isinstance(x, Mod | FloorDiv) or not isinstance(x.b, int):
            continue
        if x.b & (x.b - 1) == 0 and at_least(x.a, 0):
            continue
        alone = {fs: c for fs, c in terms_of(x.a).items() if loop.axis in frozenset().union(*(f.free for f in fs))}
        known = not x.a.free & inner and not any(isinstance(y, Loaded) for y in topological([x.a]))
        if known and alone == {(loop.axis,): 1}:
            yield x
