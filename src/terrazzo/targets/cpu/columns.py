"""Free loops whose reductions read memory along them: their lanes run side by side, a block at a time, each with
accumulators of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from terrazzo.ir import nest as n
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Loaded
from terrazzo.ir.node import Node
from terrazzo.targets.cpu import halves
from terrazzo.targets.cpu.combine import SHORT, accumulate, accumulators, declare_lanes, rounds, settled
from terrazzo.targets.cpu.lanes import AT_A_TIME, WIDE, block, header, pieces, takes_several
from terrazzo.targets.cpu.rows import PARALLEL, crossing, groups, trips
from terrazzo.targets.cpu.runs import Lanes, between, guards, loads_of, where_asked
from terrazzo.targets.terms import Scope, c_type, index


class Writer(Protocol):
    """What is asked of the one who writes the nest."""

    gathered: list[Loaded]
    parallel: bool
    found: dict[int, dict[Node, str]]
    keep: dict[int, dict[Node, str]]

    def statements(
        self, body: Sequence[n.Statement], scope: Scope, keep: Mapping[Node, str] | None = None
    ) -> list[str]: ...

    def checked(self, scope: Scope) -> list[str]: ...

    def body(self, s: n.Loop, scope: Scope, lined: halves.Lined | None = None) -> list[str]: ...

    def in_line(self, s: n.Loop, scope: Scope, head: Lanes) -> list[str]: ...


def written(writer: Writer, s: n.Loop, scope: Scope) -> list[str]:
    """A free loop in blocks of lanes: what is inside runs over a block at a time, so that memory is read along the
    lanes.
    """
    (axis,) = s.axes
    extent = int(axis.extent)
    parallel = not writer.parallel and trips([s]) >= PARALLEL
    lanes = block(s, parallel)
    inner = scope.inner()
    inner.names[axis], step, start = inner.fresh("i"), inner.fresh("columns"), inner.fresh("b")
    outer, writer.parallel = writer.parallel, True
    lines = [
        f"const auto {step} = [&](int64_t {start}, int64_t lanes, int& bad) __attribute__((always_inline)) "
        "{  // free, side by side"
    ]
    head = Lanes(axis, start, inner.names[axis], lanes)
    stages = groups(s.body)
    for k, group in enumerate(stages):
        if isinstance(group[0], n.Loop):
            lines += ["  " + x for x in _Block(writer, head).side_by_side(group[0], inner)]
            settled(group[0], inner)
            continue
        needed_there = crossing(group, [x for j, other in enumerate(stages) if j != k for x in other])
        arrays = {x: inner.fresh("v") for x in needed_there}
        lines += [f"  {c_type(x.dtype)} {name}[{lanes}];" for x, name in arrays.items()]
        here = inner.inner()
        text = writer.statements(group, here, {x: f"{name}[l]" for x, name in arrays.items()})
        lines += ["  " + x for x in (*head.loop(), *("  " + x for x in text), "}")]
        inner.names.update({x: f"{name}[l]" for x, name in arrays.items()})
        inner.names.update(
            {x.term: here.names[x.term] for x in group if isinstance(x, n.Let) and isinstance(x.term, l.Get)}
        )
    lines.append("};")
    writer.parallel = outer
    if parallel:
        lines.append("#pragma omp parallel for num_threads(threads) schedule(static)")
    lines.append(f"for (int64_t {start} = 0; {start} < {extent}; {start} += {lanes})")
    full = f"{step}({start}, {lanes}, bad);"
    if extent % lanes:
        full = f"if ({start} + {lanes} <= {extent}) {full} else {step}({start}, {extent} - {start}, bad);"
    return [*lines, "  " + full]


@dataclass(frozen=True)
class _Block:
    """Writes what is in the loop for a block of lanes, its `head`."""

    writer: Writer
    head: Lanes

    def side_by_side(self, s: n.Loop, scope: Scope, start: str = "0", end: str = "", steps: int = 0) -> list[str]:
        """A reduction or scan for a block of lanes at a time, each with its own accumulators; its first axis from
        `start` to `end`, which are so many `steps` at most, where they are given.
        """
        extent = s.axes[0].extent
        end, steps = end or index(extent, scope), steps or (extent if isinstance(extent, int) else SHORT**3)
        others = math.prod(a.extent if isinstance(a.extent, int) else SHORT**3 for a in s.axes[1:])
        if s.carried and all(map(rounds, s.carried)) and steps * others > SHORT:
            return self.short_columns(s, scope, start, end, steps)
        lines = declare_lanes(s, self.head.most, scope)
        inner = scope.inner()
        bounds = [(start, end), *(("0", index(a.extent, scope)) for a in s.axes[1:])]
        heads = [header(a, inner, s.kind, *b) for a, b in zip(s.axes, bounds, strict=True)]
        last = heads.pop()
        if takes_several(s):
            body = self.several(s, inner, *bounds[-1], AT_A_TIME * (2 if self.head.most in WIDE else 1))
        else:
            body = [last, *("  " + x for x in self.lanes(s, inner)), "}"]
        lines += ["  " * k + x for k, x in enumerate(heads)]
        lines += ["  " * len(heads) + x for x in body]
        return lines + ["  " * k + "}" for k in reversed(range(len(heads)))]

    def several(self, s: n.Loop, scope: Scope, start: str, end: str, many: int) -> list[str]:
        """The steps of the last axis of sums, several of them in one loop over the lanes: accumulators are read and
        written once for all of these, and as many rows of memory are read side by side.
        """
        axis = s.axes[-1]
        step = scope.names[axis]
        lines = [f"int64_t {step} = {start};"]
        lines.append(f"for (; {step} + {many} <= {end}; {step} += {many}) {{  // {s.kind}")
        body = []
        for k in range(many):
            inner = scope.inner()
            inner.names[axis] = name = scope.fresh("i")
            same, rest = self.same(s, inner)
            lines += ["  " + x for x in (f"const int64_t {name} = {step} + {k};", *same)]
            body += ["    " + x for x in self.writer.body(rest, inner)]
        lines += [*("  " + x for x in self.head.loop()), *body]
        lines += ["  }", "}", f"for (; {step} < {end}; {step}++) {{"]
        return [*lines, *("  " + x for x in self.lanes(s, scope)), "}"]

    def lanes(self, s: n.Loop, scope: Scope) -> list[str]:
        """One step of a reduction or scan for all lanes; in three parts, where a guard holds for some lanes in the
        middle.
        """
        asked = (
            None
            if id(s) in self.writer.found or id(s) in self.writer.keep
            else guards(loads_of(s.body), self.head.axis)
        )
        if asked is None:
            same, s = self.same(s, scope)
            return [*same, *self.writer.in_line(s, scope, self.head)]
        lines, low, high = between(asked, self.head.axis, scope, self.head.start, f"{self.head.start} + lanes")
        ends = ["0", f"{low} - {self.head.start}", f"{high} - {self.head.start}", "lanes"]
        for begin, end, inside in zip(ends, ends[1:], (False, True, False), strict=False):
            body = self.writer.statements(where_asked(s.body, inside, scope.names), scope.inner())
            lines += [*self.head.loop(begin, end), *("  " + x for x in body), "}"]
        return lines

    def same(self, s: n.Loop, scope: Scope) -> tuple[list[str], n.Loop]:
        """What is the same for all lanes, before them, where data says which row they read: it is checked once. And the
        loop without it.
        """
        fixed = [x for x in s.body if isinstance(x, n.Let) and self.head.axis not in x.term.free]
        values = {x.term for x in fixed}
        if (
            id(s) in self.writer.found
            or id(s) in self.writer.keep
            or not any(e.value in values for e in self.writer.gathered)
        ):
            return [], s
        lines = [*self.writer.statements(fixed, scope), *self.writer.checked(scope)]
        return lines, n.Loop(s.kind, s.axes, tuple(x for x in s.body if x not in fixed), s.carried)

    def short_columns(self, s: n.Loop, scope: Scope, start: str, end: str, steps: int) -> list[str]:
        """Long sums for a block of lanes as sums of shorter ones: of pieces of the first axis, while it is long, and of
        what the other axes are summed over.
        """
        lines = declare_lanes(s, self.head.most, scope, long=True)
        outside = {r: accumulators(r, scope) for r in s.carried}
        inner = scope.inner()
        if steps > SHORT:
            size = next(x for x in (SHORT**3, SHORT**2, SHORT) if x < steps)
            loop, piece, until = pieces(start, end, size, scope)
            lines += loop
            body = self.side_by_side(s, inner, piece, until, size)
        else:
            lines.append(header(s.axes[0], inner, s.kind, start, end))
            body = self.side_by_side(n.Loop(s.kind, s.axes[1:], s.body, s.carried), inner)
        body += ["#pragma omp simd", "for (int64_t l = 0; l < lanes; l++) {"]
        for r, names in outside.items():
            body += ["  " + x for x in accumulate(names, r, accumulators(r, inner), scope)]
        return [*lines, *("  " + x for x in (*body, "}")), "}"]
