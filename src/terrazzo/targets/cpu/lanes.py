"""Heads of loops, and how many lanes and steps of a reduction are taken at a time."""

from __future__ import annotations

import re
from collections.abc import Sequence

from terrazzo.ir import nest as n
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr
from terrazzo.ir.node import topological
from terrazzo.ir.types import f16
from terrazzo.targets.cpu.combine import rounds
from terrazzo.targets.cpu.runs import loads_of
from terrazzo.targets.terms import Scope, index

AT_A_TIME, LITTLE = 4, 4.0
"""Steps of sums for a block of lanes that are taken together, where the price of one is so low."""
WIDE = (1024, 512)
"""Lanes of a block that is little work, where there are enough blocks: memory is fetched in long runs, and twice as
many steps are taken together.
"""

TILE = 32
"""Side of the squares in which two loops are walked when memory is read across the inner one."""


def block(s: n.Loop, parallel: bool) -> int:
    """How many lanes a block of a free loop has whose reductions run side by side."""
    extent = s.axes[0].extent
    assert isinstance(extent, int)
    streams = parallel and all(takes_several(x) for x in s.body if isinstance(x, n.Loop))
    widths = (*(WIDE if streams else ()), 256, 64, 32)
    return next((w for w in widths if (extent > 7 * w if parallel else extent >= 3 * w // 4)), 16)


def takes_several(s: n.Loop) -> bool:
    """Whether several steps of sums are taken at a time: they are little work, and the same at all places. What is no
    sum, such as a maximum that keeps NaN, compilers no longer vectorise then; and runs of float16 that are converted
    would leave the first-level cache.
    """
    last, work = s.axes[-1].extent, (x.term for x in s.body if isinstance(x, n.Let))
    if not (s.carried and all(map(rounds, s.carried))) or not isinstance(last, int) or last < AT_A_TIME:
        return False
    if any(x.dtype is f16 for x in loads_of(s.body)):  # type: ignore[attr-defined]
        return False
    little = sum(x.fn.cost for x in work if isinstance(x, l.Apply)) <= LITTLE
    return little and not any(isinstance(x, l.Load) and x.inside for x in topological(loads_of(s.body)))


def pieces(start: str, end: str, size: int, scope: Scope) -> tuple[list[str], str, str]:
    """The head of a loop over pieces of so many indices, and what a piece's first index and its end are called. The end
    has a name: where it is computed in the loop that runs to it, GCC keeps accumulators in memory.
    """
    piece, until = scope.fresh("piece"), scope.fresh("until")
    head = f"for (int64_t {piece} = {start}; {piece} < {end}; {piece} += {size}) {{"
    return [head, f"  const int64_t {until} = std::min<int64_t>({piece} + {size}, {end});"], piece, until


def header(axis: Expr, scope: Scope, kind: str, start: str = "0", end: str = "") -> str:
    """The head of a loop along an axis, which it names: all of the axis, or from `start` to `end`."""
    scope.names[axis] = name = scope.fresh("i")
    extent: IntExpr = axis.extent  # type: ignore[attr-defined]
    return f"for (int64_t {name} = {start}; {name} < {end or index(extent, scope)}; {name}++) {{  // {kind}"


def squares(outer: Expr, inner: Expr, scope: Scope) -> tuple[list[str], list[str], list[tuple[str, str]]]:
    """The heads of loops over squares of two axes, the last of which is open, those of the loops in a square, and of
    both axes where a square begins, and how long it is.
    """
    lines, heads, sides = [], [], []
    for axis in (outer, inner):
        block = scope.fresh("b")
        scope.names[axis] = name = scope.fresh("i")
        extent: IntExpr = axis.extent  # type: ignore[attr-defined]
        lines.append(f"for (int64_t {block} = 0; {block} < {extent}; {block} += {TILE})")
        whole = isinstance(extent, int) and extent % TILE == 0
        side = str(TILE) if whole else f"std::min<int64_t>({TILE}, {extent} - {block})"
        heads.append(f"for (int64_t {name} = {block}; {name} < {block} + {side}; {name}++) {{  // free")
        sides.append((block, side))
    lines[-1] += " {"
    return lines, heads, sides


def noted(line: str) -> str:
    """A line of a kernel that notes what is bad without a branch: threads and lanes note each for themselves."""
    return line + " reduction(|:bad)" if "#pragma omp" in line else line


_WORD, _KNOWN = re.compile(r"[A-Za-z_]\w*"), re.compile(r"const (\w+) (\w+) = ")


def by_value(body: Sequence[str], pointers: Sequence[str]) -> list[str]:
    """The lines of a kernel, with what is known before a loop that threads share, or before a lambda, there by value:
    pointers, numbers, and lambdas for the threads. What is there by reference GCC reads again at each step, where it
    may be what was stored: gradients that are all times one number were no vectors, and runs were gathered with many
    reads.
    """
    last = {word: k for k, line in enumerate(body) for word in _WORD.findall(line)}
    known: dict[str, str] = {}
    out = []
    for k, line in enumerate(body):
        used = [name for name in known if last[name] > k]
        if used and "#pragma omp parallel" in line:
            line += f" firstprivate({', '.join(used)})"
        if (found := _KNOWN.match(line)) is not None:
            known[found[2]] = found[1]
        captured = [*pointers, *(name for name in used if known[name] != "auto")]
        out.append(line.replace("[&](", f"[&, {', '.join(captured)}]("))
    return out
