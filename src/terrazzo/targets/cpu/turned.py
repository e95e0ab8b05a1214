"""What two loops read across the inner one, turned first, a square at a time: both its sides are in runs then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from terrazzo.ir import nest as n
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Loaded
from terrazzo.ir.node import Node, topological
from terrazzo.targets.cpu.lanes import TILE, squares
from terrazzo.targets.cpu.rows import needed
from terrazzo.targets.cpu.runs import stride
from terrazzo.targets.terms import Scope, element, in_memory

FAR = 16
"""How far apart what the inner loop reads is, at least."""


class Writer(Protocol):
    """What is asked of the one who writes the nest."""

    found: dict[int, dict[Node, str]]
    keep: dict[int, dict[Node, str]]

    def body(self, s: n.Loop, scope: Scope) -> list[str]: ...


def in_squares(writer: Writer, outer: n.Loop, leaf: n.Loop, scope: Scope) -> list[str]:
    """Two free loops in squares: what is read across is turned, or stays in the first-level cache until all of it is
    used.
    """
    lines, heads, sides = squares(outer.axes[0], leaf.axes[0], scope)
    if not (id(leaf) in writer.keep or id(leaf) in writer.found):
        lines += turned(outer, leaf, sides, scope)
        leaf = n.Loop(leaf.kind, leaf.axes, tuple(needed(leaf.body, scope.names)))
    lines += [f"  {heads[0]}", "    #pragma omp simd", f"    {heads[1]}"]
    return [*lines, *("      " + x for x in writer.body(leaf, scope)), "    }", "  }", "}"]


def turned(outer: n.Loop, leaf: n.Loop, sides: Sequence[tuple[str, str]], scope: Scope) -> list[str]:
    """Statements that turn a square of each such tensor, and are what its loads read from then on. `sides` are where
    the square begins along both axes, and how long it is.
    """
    lines = []
    (a0, na), (b0, nb) = sides
    row, column = (s.axes[0] for s in (outer, leaf))
    for x in [s.term for s in leaf.body if isinstance(s, n.Let)]:
        if not isinstance(x, l.Load) or x.inside or x.dtype.size == 1 or x in scope.names:
            continue
        across, along = stride(x, column), stride(x, row)
        if along != 1 or across is None or across < FAR or any(isinstance(y, Loaded) for y in topological([x])):
            continue
        name, first = scope.fresh("turned"), scope.inner()
        first.names |= {row: a0, column: b0}
        lines.append(f"  alignas(64) {in_memory(x.dtype)} {name}[{TILE * TILE}];")
        lines.append(f"  tz_across<{TILE}>(&{element(x.buffer, x.index, first)}, {across}, {name}, {na}, {nb});")
        scope.names[x] = f"{name}[({scope.names[row]} - {a0}) * {TILE} + {scope.names[column]} - {b0}]"
    return lines
