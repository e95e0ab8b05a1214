"""Free loops whose reductions read memory along them: their lanes run side by side, a block at a time, each with
accumulators of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from terrazzo.ir import nest as n
from terrazzo.ir.address import coefficient
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Loaded
from terrazzo.ir.node import Node
from terrazzo.targets.cpu import halves
from terrazzo.targets.cpu.combine import SHORT, accumulate, accumulators, declare_lanes, rounds, settled, types, wide
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


CHUNKS = 64
"""Pieces at most that tall columns are cut into: fixed, so that results do not depend on the threads."""
STEPS = 32
"""Steps of a piece at least."""
MANY = 7 * 256
"""Lanes up to which columns are cut into pieces: blocks of more are enough for threads, and their rows long runs."""


def written(writer: Writer, s: n.Loop, scope: Scope) -> list[str]:
    """A free loop in blocks of lanes: what is inside runs over a block at a time, so that memory is read along the
    lanes.
    """
    (axis,) = s.axes
    extent = int(axis.extent)
    parallel = not writer.parallel and trips([s]) >= PARALLEL
    if parallel and extent <= MANY and all(_is_tall(x) for x in s.body if isinstance(x, n.Loop)):
        return _Tall(writer, s, scope.inner()).lines()
    lanes = block(s, parallel)
    inner = scope.inner()
    inner.names[axis], step, start = inner.fresh("i"), inner.fresh("columns"), inner.fresh("b")
    outer, writer.parallel = writer.parallel, True
    lines = [_head(step, start)]
    head = Lanes(axis, start, inner.names[axis], lanes)
    for group, others in _stages(s):
        if isinstance(group[0], n.Loop):
            lines += ["  " + x for x in _Block(writer, head).side_by_side(group[0], inner)]
            settled(group[0], inner)
        else:
            lines += ["  " + x for x in _Block(writer, head).between(group, others, inner, "l")]
    lines.append("};")
    writer.parallel = outer
    if parallel:
        lines.append("#pragma omp parallel for num_threads(threads) schedule(static)")
    lines.append(f"for (int64_t {start} = 0; {start} < {extent}; {start} += {lanes})")
    return [*lines, "  " + _called(step, start, lanes, extent)]


def _stages(s: n.Loop) -> Iterator[tuple[list[Any], list[n.Statement]]]:
    """Loops one by one and what stands between them, each with all others."""
    stages = groups(s.body)
    for k, group in enumerate(stages):
        yield group, [x for j, other in enumerate(stages) if j != k for x in other]


def _head(step: str, start: str, more: str = "") -> str:
    """The head of a lambda for a block of lanes."""
    inside = f"(int64_t {start}, int64_t lanes, {more}int& bad) __attribute__((always_inline))"
    return f"const auto {step} = [&]{inside} {{  // free, side by side"


def _called(step: str, start: str, lanes: int, extent: int, more: str = "") -> str:
    """Its call for a block, in which it is known how long whole blocks are."""
    full = f"{step}({start}, {lanes}, {more}bad);"
    if extent % lanes == 0:
        return full
    return f"if ({start} + {lanes} <= {extent}) {full} else {step}({start}, {extent} - {start}, {more}bad);"


def _is_tall(s: n.Loop) -> bool:
    """Whether it reduces columns that are long enough to be cut into pieces."""
    first = s.axes[0].extent
    return s.kind == "reduce" and isinstance(first, int) and first >= 4 * STEPS


@dataclass(frozen=True)
class _Tall:
    """Writes a free loop with few points whose columns are tall: threads share pieces of these, in which memory is read
    in runs as long as rows are, and what pieces come to is combined in order.
    """

    writer: Writer
    s: n.Loop
    scope: Scope

    def lines(self) -> list[str]:
        """The loop."""
        (axis,) = self.s.axes
        extent = int(axis.extent)
        self.scope.names[axis] = name = self.scope.fresh("i")
        whole = Lanes(axis, "0", name, extent)
        lines = [f"const int64_t lanes = {extent};"]
        outer, self.writer.parallel = self.writer.parallel, True
        for group, others in _stages(self.s):
            if isinstance(group[0], n.Loop):
                lines += self.reduced(group[0], whole)
            else:
                lines += _Block(self.writer, whole).between(group, others, self.scope, name)
        self.writer.parallel = outer
        return ["{", *("  " + x for x in lines), "}"]

    def reduced(self, s: n.Loop, whole: Lanes) -> list[str]:
        """A reduction: in pieces, for a block of lanes at a time, and then all of them."""
        scope, first, extent = self.scope, int(s.axes[0].extent), whole.most
        count = min(CHUNKS, first // STEPS)
        lanes = min(256, extent)
        step, start, chunk = scope.fresh("columns"), scope.fresh("b"), scope.fresh("chunk")
        inner = scope.inner()
        begin, end = inner.fresh("begin"), inner.fresh("end")
        body = [
            f"const int64_t {begin} = {first}LL * {chunk} / {count}, {end} = {first}LL * ({chunk} + 1) / {count};",
            *_Block(self.writer, Lanes(whole.axis, start, whole.name, lanes)).side_by_side(
                s, inner, begin, end, -(-first // count)
            ),
        ]
        lines = declare_lanes(s, extent, scope, long=True)
        combined, freed = [], []
        for r in s.carried:
            mine, ours = accumulators(r, inner), accumulators(r, scope)
            parts = [scope.fresh("part") for _ in ours]
            for part, kind in zip(parts, types(r), strict=True):
                kept = "f64" if wide(r) else c_type(kind)
                size = f"(sizeof({kept}) * {extent * count} + 63) / 64 * 64"
                lines.append(f"{kept}* {part} = ({kept}*)aligned_alloc(64, {size});")
                freed.append(f"free({part});")
            place = f"[{chunk} * {extent} + {start} + l]"
            stored = [f"  {part}{place} = {x};" for part, x in zip(parts, mine, strict=True)]
            body += ["#pragma omp simd", "for (int64_t l = 0; l < lanes; l++) {", *stored, "}"]
            given = [f"{part}[{chunk} * {extent} + l]" for part in parts]
            combined += ["  " + x for x in accumulate(ours, r, given, scope)]
        lines += [
            _head(step, start, f"int64_t {chunk}, "),
            *("  " + x for x in body),
            "};",
            "#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)",
            f"for (int64_t {chunk} = 0; {chunk} < {count}; {chunk}++)",
            f"for (int64_t {start} = 0; {start} < {extent}; {start} += {lanes})",
            "  " + _called(step, start, lanes, extent, f"{chunk}, "),
            f"for (int64_t {chunk} = 0; {chunk} < {count}; {chunk}++) {{  // in order",
            "  #pragma omp simd",
            "  for (int64_t l = 0; l < lanes; l++) {",
            *("  " + x for x in combined),
            "  }",
            "}",
            *freed,
        ]
        for r in s.carried:
            scope.names[r] = scope.names[r].replace("[l]", f"[{whole.name}]")
        settled(s, scope)
        return lines


@dataclass(frozen=True)
class _Block:
    """Writes what is in the loop for a block of lanes, its `head`."""

    writer: Writer
    head: Lanes

    def between(
        self, group: Sequence[n.Statement], others: Sequence[n.Statement], scope: Scope, lane: str
    ) -> list[str]:
        """What stands between loops, and arrays of what the `others` use of it, each at its `lane`."""
        arrays = {x: scope.fresh("v") for x in crossing(group, others)}
        here = scope.inner()
        text = self.writer.statements(group, here, {x: f"{name}[l]" for x, name in arrays.items()})
        scope.names.update({x: f"{name}[{lane}]" for x, name in arrays.items()})
        gets = (x.term for x in group if isinstance(x, n.Let) and isinstance(x.term, l.Get))
        scope.names.update({x: here.names[x] for x in gets})
        kept = [f"{c_type(x.dtype)} {name}[{self.head.most}];" for x, name in arrays.items()]
        return [*kept, *self.head.loop(), *("  " + x for x in text), "}"]

    def side_by_side(self, s: n.Loop, scope: Scope, start: str = "0", end: str = "", steps: int = 0) -> list[str]:
        """A reduction or scan for a block of lanes at a time, each with its own accumulators; its first axis from
        `start` to `end`, which are so many `steps` at most, where they are given.
        """
        extent = s.axes[0].extent
        end, steps = end or index(extent, scope), steps or (extent if isinstance(extent, int) else SHORT**3)
        others = math.prod(a.extent if isinstance(a.extent, int) else SHORT**3 for a in s.axes[1:])
        if any(map(rounds, s.carried)) and steps * others > SHORT:
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
        middle, and one of two, where it holds for all or none: loops whose length is known are vectors to the end.
        """
        asked = (
            None
            if id(s) in self.writer.found or id(s) in self.writer.keep
            else guards(loads_of(s.body), self.head.axis)
        )
        if asked is None:
            same, s = self.same(s, scope)
            return [*same, *self.writer.in_line(s, scope, self.head)]
        if all(coefficient(e, self.head.axis) == 0 for e in asked):
            holds = " && ".join(f"{index(e, scope)} >= 0" for e in asked)
            then, otherwise = (self._where(s, x, scope) for x in (True, False))
            return [f"if ({holds}) {{", *("  " + x for x in then), "} else {", *("  " + x for x in otherwise), "}"]
        lines, low, high = between(asked, self.head.axis, scope, self.head.start, f"{self.head.start} + lanes")
        ends = ["0", f"{low} - {self.head.start}", f"{high} - {self.head.start}", "lanes"]
        for begin, end, holding in zip(ends, ends[1:], (False, True, False), strict=False):
            lines += self._where(s, holding, scope, begin, end)
        return lines

    def _where(self, s: n.Loop, inside: bool, scope: Scope, begin: str = "0", end: str = "lanes") -> list[str]:
        """One step for the lanes from `begin` to `end`, for which a guard holds, or does not."""
        body = self.writer.statements(where_asked(s.body, inside, scope.names), scope.inner())
        return [*self.head.loop(begin, end), *("  " + x for x in body), "}"]

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
