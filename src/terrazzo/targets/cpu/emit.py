"""A kernel of Loop IR as a C++ function.

    extern "C" int NAME(void** buffers, int threads)

`buffers` are the data pointers of `kernel.reads`, then of `kernel.writes`; NAME_spans says how many they are, and how
many bytes of each the function may use. The function returns 0, or has bit 0 set if an index that came from data was
outside its dimension, and bit 1 if a whole number was divided by zero. The text follows the loop nest; products are
blocked (see blocked.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import resources

from terrazzo.errors import about
from terrazzo.ir import nest as n
from terrazzo.ir.address import flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Loaded
from terrazzo.ir.node import Node, topological
from terrazzo.ir.ranges import range_of
from terrazzo.targets.cpu import blocked, chained, columns, halves, looked_up, scanned
from terrazzo.targets.cpu.across import Across, across
from terrazzo.targets.cpu.combine import (
    SHORT,
    accumulate,
    accumulators,
    declare,
    declare_lanes,
    meet,
    rounds,
    settled,
    types,
)
from terrazzo.targets.cpu.lanes import by_value, header, noted, pieces
from terrazzo.targets.cpu.merged import as_stored, merged, quotients_apart, summed_as_stored
from terrazzo.targets.cpu.phases import by_phases
from terrazzo.targets.cpu.pieces import apart, changes, in_pieces
from terrazzo.targets.cpu.rows import (
    PARALLEL,
    computed_for,
    in_columns,
    is_leaf,
    needed,
    only_loop,
    points,
    reads_bytes,
    repeated,
    stays_a_loop,
    transposes,
    trips,
    vectorises,
)
from terrazzo.targets.cpu.runs import Lanes
from terrazzo.targets.cpu.tables import tabled
from terrazzo.targets.cpu.turned import in_squares
from terrazzo.targets.names import Names, comment, identifier
from terrazzo.targets.terms import Scope, c_type, component, expression, in_memory, index, term

CHUNKS = 64
"""Pieces a reduction without enough loops around it is cut into: fixed, so that the result does not depend on the
threads."""


@lru_cache(maxsize=1)
def prelude() -> str:
    """The text every source begins with."""
    folder = resources.files("terrazzo.targets")
    return (
        (folder / "cpu" / "prelude.h").read_text().replace('#include "scalars.h"\n', (folder / "scalars.h").read_text())
    )


@lru_cache(maxsize=1)
def remainders() -> str:
    """Vectors of remainders, for sources that have any: they take half as long to compile as all else."""
    return (resources.files("terrazzo.targets") / "cpu" / "remainders.h").read_text()


def emit(kernel: l.Kernel) -> tuple[str, str]:
    """(function name, C++ source) of a kernel. Kernels that differ only in the names of buffers have the same
    source. UserError where a size is symbolic.
    """
    spans = [_span(b) for b in arguments(kernel)]
    scope = Scope(notes_zero=True)
    name = "k_" + identifier(kernel.name)
    lines = [f'extern "C" int {name}(void** buffers, int threads) {{', "  int bad = 0;"]
    if kernel.source:
        lines.insert(0, comment(kernel.source))
    names = Names()
    reads = [b for b in kernel.reads if b not in kernel.writes]
    for k, b in enumerate([*reads, *kernel.writes]):
        scope.buffers[b] = formal = names.formal(b.name)
        kind = ("const " if b in reads else "") + in_memory(b.type.dtype)
        lines.append(f"  {kind}* __restrict {formal} = ({kind}*)buffers[{k}];")
    body = _body(kernel, scope)
    noting = any("tz_among(" in line for line in body)
    body = _own_angles(body)
    pointers = [scope.buffers[b] for b in arguments(kernel)]
    lines += ["  " + line for line in by_value([noted(x) for x in body] if noting else body, pointers)]
    lines += ["  return bad;", "}"]
    lines.append(f'extern "C" int64_t {name}_spans[];')
    lines.append(f"int64_t {name}_spans[] = {{{', '.join(map(str, (len(spans), *spans)))}}};")
    more = remainders() if any("tz_mod(" in line or "tz_fmod(" in line for line in body) else ""
    return name, prelude() + more + "\n".join(lines) + "\n"


def _own_angles(body: list[str]) -> list[str]:
    """Statements with sines or cosines but not both: these are GCC's own, of which it has vectors also where they are
    one of two by a condition. Of both it would make one call.
    """
    found = {name for name in ("sin", "cos") if any(f"tz_{name}(" in line for line in body)}
    return (
        [line.replace(f"tz_{name}(", f"std::{name}(") for name in found for line in body] if len(found) == 1 else body
    )


def _body(kernel: l.Kernel, scope: Scope) -> list[str]:
    """The statements of a kernel whose buffers have names."""
    tables, kernel, terms = tabled(kernel)
    lines = []
    for table in tables:
        for b in table.writes:
            scope.buffers[b] = scope.fresh("table")
            lines.append(f"alignas(64) {in_memory(b.type.dtype)} {scope.buffers[b]}[{math.prod(b.type.static_shape)}];")
        lines += _Writer(_walked(table), scope).lines()
    scope.spans |= {load: found for load, x in terms.items() if (found := range_of(x)) is not None}
    body = blocked.emit(kernel, scope) or chained.emit(kernel, scope, _of_a_row)
    if not body:
        nests = [nest for k in apart(kernel) for nest in by_phases(k)]
        rows = [across(_walked(nest), scope.spans) for nest in nests]
        body = [x for nest, found in rows for x in _Writer(nest, scope, across=found).lines()]
    return [*lines, *body]


def _walked(kernel: l.Kernel) -> l.Kernel:
    """A kernel with the axes along which it is walked."""
    return merged(summed_as_stored(as_stored(quotients_apart(kernel))))


def _span(b: l.Buffer) -> int:
    with about(b):
        return b.type.span


def arguments(kernel: l.Kernel) -> tuple[l.Buffer, ...]:
    """The buffers a kernel's function takes, in order."""
    return (*(b for b in kernel.reads if b not in kernel.writes), *kernel.writes)


def _of_a_row(kernel: l.Kernel, body: Sequence[n.Statement], scope: Scope) -> list[str]:
    """Statements of a kernel within a loop that threads share already."""
    return _Writer(kernel, scope, parallel=True).statements(body, scope)


class _Writer:
    """Writes a nest. `parallel` is True inside a parallel loop; `rows` names the arrays in which a loop keeps terms, or
    finds them.
    """

    def __init__(self, kernel: l.Kernel, scope: Scope, parallel: bool = False, across: Across | None = None) -> None:
        self.kernel, self.scope, self.parallel, self.across = kernel, scope, parallel, across
        self.gathered = [e for e in topological(kernel.stores) if isinstance(e, Loaded)]
        self.keep: dict[int, dict[Node, str]] = {}
        self.found: dict[int, dict[Node, str]] = {}

    def lines(self) -> list[str]:
        """The body of the function."""
        return self.statements(n.nest(self.kernel), self.scope)

    def statements(
        self, body: Sequence[n.Statement], scope: Scope, keep: Mapping[Node, str] | None = None
    ) -> list[str]:
        lines = self.kept_rows(body, scope)
        for s in body:
            lines += self.checked(scope)
            match s:
                case n.Let():
                    lines += self.let(s.term, scope)
                    if keep and s.term in keep:
                        lines.append(f"{keep[s.term]} = {scope.names[s.term]};")
                case n.Accumulate():
                    args = [term(a, scope) for a in s.args]
                    lines += accumulate(accumulators(s.into, scope), s.into, args, scope, in_order=True)
                case l.Store():
                    place = index(flatten(s.index, s.buffer.type.element_strides), scope)
                    lines.append(f"{scope.buffers[s.buffer]}[{place}] = {term(s.value, scope)};")
                case n.Loop(kind="reduce"):
                    lines += self.reduction(s, scope)
                case n.Loop():
                    lines += self.loop(s, scope)
        return lines

    def checked(self, scope: Scope) -> list[str]:
        """The indices from data whose values are known now: checked once, and not again in the loops that use them."""
        lines = []
        for e in self.gathered:
            if e not in scope.names and e.value in scope.names:
                text = index(e, scope)
                scope.names[e] = scope.fresh("at")
                lines.append(f"const int64_t {scope.names[e]} = {text};")
        return lines

    def kept_rows(self, body: Sequence[n.Statement], scope: Scope) -> list[str]:
        """Declarations of the rows in which terms are kept from one loop of a scope to the next."""
        lines = []
        for kept in repeated(body):
            name = scope.fresh("row")
            lines.append(f"{c_type(kept.term.dtype)} {name}[{kept.first.axes[0].extent}];")
            self.keep.setdefault(id(kept.first), {})[kept.term] = name
            for s, x in kept.again:
                self.found.setdefault(id(s), {})[x] = name
        return lines

    def let(self, x: l.Term, scope: Scope) -> list[str]:
        if isinstance(x, l.Get):
            scope.names[x] = component(scope.names[x.x], x.index)
            return []
        text = expression(x, scope)
        scope.names[x] = scope.fresh("in" if isinstance(x, l.Load) else "v")
        return [f"const {c_type(x.dtype)} {scope.names[x]} = {text};"]

    def body(self, s: n.Loop, scope: Scope, lined: halves.Lined | None = None) -> list[str]:
        """The body of a loop whose axes are named, or what it is where runs are converted around it."""
        body = lined.body if lined else s.body
        place = f"[{scope.names[s.axes[0]]}]" if len(s.axes) == 1 else ""
        found = {x: row + place for x, row in self.found.get(id(s), {}).items()}
        scope.names.update(found)
        keep = {x: row + place for x, row in self.keep.get(id(s), {}).items()}
        return self.statements(needed(body, scope.names) if found or (lined and lined.before) else body, scope, keep)

    def in_line(self, s: n.Loop, scope: Scope, head: Lanes) -> list[str]:
        """A leaf for a block of lanes, with what it reads and stores in line converted around the loop over them."""
        inner = scope.inner()
        lined = halves.lined(s.body, head.axis, head.start, head.most, inner)
        body = self.body(s, inner, lined)
        return [*lined.before, *head.loop(), *("  " + x for x in body), "}", *lined.behind]

    def in_runs(self, s: n.Loop, scope: Scope, shared: bool) -> list[str]:
        """A free loop in blocks of lanes whose runs are converted, which threads share, where it is `shared`."""
        (axis,), block, inner = s.axes, scope.fresh("b"), scope.inner()
        extent = int(axis.extent)
        inner.names[axis] = name = scope.fresh("i")
        most = min(halves.BLOCK, extent)
        lanes = str(most) if extent % most == 0 else f"std::min<int64_t>({most}, {extent} - {block})"
        return [
            *(["#pragma omp parallel for num_threads(threads) schedule(static)"] if shared else []),
            f"for (int64_t {block} = 0; {block} < {extent}; {block} += {most}) {{  // free, in runs",
            f"  const int64_t lanes = {lanes};",
            *("  " + x for x in self.in_line(s, inner, Lanes(axis, block, name, most))),
            "}",
        ]

    def in_blocks(self, rows: Across, s: n.Loop, scope: Scope, shared: bool) -> list[str]:
        """A loop over rows in blocks that are turned first, which threads share, where it is `shared`."""
        inner, lanes = scope.inner(), scope.fresh("rows")
        inner.names[rows.begin] = begin = scope.fresh("b")
        inner.names[rows.axis] = row = scope.fresh("i")
        inner.buffers.update({block.buffer: scope.fresh("turned") for block in rows.blocks})
        outer, self.parallel = self.parallel, self.parallel or shared
        body = self.body(s, inner)
        self.parallel = outer
        return [
            *(["#pragma omp parallel for num_threads(threads) schedule(static)"] if shared else []),
            f"for (int64_t {begin} = 0; {begin} < {rows.axis.extent}; {begin} += {rows.count}) {{  // free, in blocks",
            f"  const int64_t {lanes} = std::min<int64_t>({rows.count}, {rows.axis.extent} - {begin});",
            *("  " + x for block in rows.blocks for x in block.turned(lanes, inner)),
            f"  for (int64_t {row} = {begin}; {row} < {begin} + {lanes}; {row}++) {{",
            *("    " + x for x in body),
            "  }",
            "}",
        ]

    def loop(self, s: n.Loop, scope: Scope) -> list[str]:
        """A free loop or a scan; the outermost ones share the work among threads."""
        if in_columns(s, scope.spans):
            return columns.written(self, s, scope)
        large = not self.parallel and trips([s]) >= PARALLEL
        if self.across and s.axes[0] is self.across.axis:
            return self.in_blocks(self.across, s, scope, large)
        if is_leaf(s) and s.kind == "free" and (found := self.pieces(s, scope)):
            return [x for piece in found for x in self.loop(piece, scope.inner())]
        if text := scanned.written(self, s, scope, large) or looked_up.written(self, s, scope, large):
            return text
        if halves.has_runs(s):
            return self.in_runs(s, scope, large)
        nested, parallel = [s], False
        if large and s.kind == "free":
            while (
                (child := only_loop(nested[-1]))
                and points(nested) < 64
                and not is_leaf(child)
                and not in_columns(child, scope.spans)
                and not (self.across and child.axes[0] is self.across.axis)
                and not scanned.scan_of_rows(child)
            ):
                nested.append(child)  # but for the innermost loop, which vectorises
            parallel = points(nested) >= 4 or (points(nested) >= 2 and not only_loop(nested[-1]))
            nested = nested if parallel else [s]
        leaf = only_loop(nested[-1])
        tiled = leaf is not None and transposes(nested[-1], leaf)
        simd = is_leaf(s) and s.kind == "free" and vectorises(s.body, scope.spans)
        lines = []
        if parallel:
            collapse = f" collapse({len(nested) + tiled})" if len(nested) + tiled > 1 else ""
            lines = [
                f"#pragma omp parallel for{' simd' if simd else ''}{collapse} num_threads(threads) schedule(static)"
            ]
        elif simd:
            lines = ["#pragma omp simd"]
        outer, self.parallel = self.parallel, self.parallel or parallel
        inner = scope.inner()
        for k, x in enumerate(nested[: len(nested) - tiled]):
            lines += ["  " * k + y for y in (*declare(x, inner), header(x.axes[0], inner, x.kind))]
        depth = "  " * (len(nested) - tiled)
        lines += [
            depth + x
            for x in (in_squares(self, nested[-1], leaf, inner) if tiled and leaf else self.body(nested[-1], inner))
        ]
        lines += ["  " * k + "}" for k in reversed(range(len(nested) - tiled))]
        self.parallel = outer
        return lines

    def pieces(self, s: n.Loop, scope: Scope) -> list[n.Loop]:
        """A free loop without loops inside as several, on each of which more is known; nothing where it is one."""
        if id(s) in self.found or id(s) in self.keep:
            return []
        found = in_pieces([x for x in s.body if isinstance(x, l.Store)], s.axes[0], scope.names, changes)
        return [
            n.Loop(s.kind, (axis,), (*map(n.Let, computed_for(stores, scope.names)), *stores)) for axis, stores in found
        ]

    def reduction(self, s: n.Loop, scope: Scope) -> list[str]:
        """Accumulators at their identity, then the loops. A long one that nothing around makes parallel is cut into
        chunks.
        """
        first = s.axes[0].extent
        if not self.parallel and trips([s]) >= 4 * PARALLEL and isinstance(first, int) and first >= CHUNKS:
            return self.chunked(s, scope)
        return self.reduce_loops(s, scope, "0", index(first, scope))

    def reduce_loops(self, s: n.Loop, scope: Scope, start: str, end: str) -> list[str]:
        """The accumulators and the loops of a reduction whose first axis runs from `start` to `end`."""
        last = s.axes[-1].extent
        if is_leaf(s) and isinstance(last, int) and last >= 32 and vectorises(s.body):
            lanes = 64 if last >= (64 if reads_bytes(s.body) else 256) else 16
            return [*self.sums(s, scope, start, end, lanes), *meet(s, lanes, scope)]
        lines = self.sums(s, scope, start, end)
        settled(s, scope)
        return lines

    def sums(
        self, s: n.Loop, scope: Scope, start: str, end: str, lanes: int = 1, most: int = 0, within: bool = False
    ) -> list[str]:
        """A reduction, its first axis from `start` to `end`, which are `most` indices at most; in so many lanes, each
        with accumulators of its own. A long sum is one of shorter sums: of pieces of the first axis, while it is long,
        and of what the other axes are summed over, `within` it.
        """
        first, *rest = (a.extent if isinstance(a.extent, int) else SHORT**3 for a in s.axes)
        count = -(-(most or first) // (1 if rest else lanes))  # steps of the first axis
        steps = -(-math.prod(rest) // lanes)  # within one of them
        if not any(map(rounds, s.carried)) or count * steps <= SHORT:
            return self.in_order(s, scope, start, end, lanes, within)
        lines = declare_lanes(s, lanes, scope, long=True) if lanes > 1 else declare(s, scope, long=True)
        outside = {r: accumulators(r, scope) for r in s.carried}
        inner = scope.inner()
        short = max(SHORT // steps, 1)  # steps of the first axis that are a short sum
        if count > short:
            size = next(x for x in (short * SHORT**2, short * SHORT, short) if x < count) * (1 if rest else lanes)
            head, piece, until = pieces(start, end, size, scope)
            body = self.sums(s, inner, piece, until, lanes, size, True)
        else:
            head = [header(s.axes[0], inner, s.kind, start, end)]
            others = n.Loop(s.kind, s.axes[1:], s.body, s.carried)
            body = self.sums(others, inner, "0", index(others.axes[0].extent, scope), lanes, within=True)
        added = [x for r, names in outside.items() for x in accumulate(names, r, accumulators(r, inner), scope)]
        if lanes > 1:
            added = ["#pragma omp simd", f"for (int64_t l = 0; l < {lanes}; l++) {{", *("  " + x for x in added), "}"]
        return [*lines, *stays_a_loop(s, within), *head, *("  " + x for x in (*body, *added)), "}"]

    def in_order(self, s: n.Loop, scope: Scope, start: str, end: str, lanes: int, within: bool) -> list[str]:
        """One accumulation after the other; or in so many lanes: it vectorises, and no sum waits for the last one."""
        lines = declare_lanes(s, lanes, scope) if lanes > 1 else declare(s, scope)
        inner = scope.inner()
        outer, last = (s.axes[:-1], s.axes[-1]) if lanes > 1 else (s.axes, None)
        bounds = [(start, end), *(("0", index(a.extent, scope)) for a in s.axes[1:])]
        heads = [header(a, inner, "reduce", *b) for a, b in zip(outer, bounds, strict=False)]
        text = self.body(s, inner) if last is None else self.step(s, inner, *bounds[-1], lanes)
        lines += ["  " * k + x for k, head in enumerate(heads) for x in (*stays_a_loop(s, within or k > 0), head)]
        lines += ["  " * len(heads) + x for x in text]
        return lines + ["  " * k + "}" for k in reversed(range(len(heads)))]

    def step(self, s: n.Loop, inner: Scope, start: str, end: str, lanes: int) -> list[str]:
        """The last axis of a reduction in lanes, as many of them at a time."""
        last = s.axes[-1]
        inner.names[last], block, step = inner.fresh("i"), inner.fresh("b"), inner.fresh("step")
        body = self.in_line(s, inner, Lanes(last, block, inner.names[last], lanes))
        text = [
            f"const auto {step} = [&](int64_t {block}, int64_t lanes, int& bad) __attribute__((always_inline)) "
            f"{{  // reduce, {lanes} at a time",
            *("  " + x for x in body),
            "};",
            f"int64_t {block} = {start};",
            f"for (; {block} + {lanes} <= {end}; {block} += {lanes}) {step}({block}, {lanes}, bad);",
        ]
        if not (start.isdigit() and end.isdigit() and (int(end) - int(start)) % lanes == 0):
            text.append(f"{step}({block}, {end} - {block}, bad);")
        return text

    def chunked(self, s: n.Loop, scope: Scope) -> list[str]:
        """A reduction in a fixed number of chunks, which threads share, combined in order."""
        lines = declare(s, scope, long=True)
        outside = {r: accumulators(r, scope) for r in s.carried}
        for r, names in outside.items():
            lines += [f"{c_type(dtype)} {name}_part[{CHUNKS}];" for name, dtype in zip(names, types(r), strict=True)]
        inner = scope.inner()
        chunk, extent = scope.fresh("chunk"), s.axes[0].extent
        self.parallel = True
        begin, end = inner.fresh("begin"), inner.fresh("end")
        body = [
            f"const int64_t {begin} = {extent}LL * {chunk} / {CHUNKS}, {end} = {extent}LL * ({chunk} + 1) / {CHUNKS};",
            *self.reduce_loops(s, inner, begin, end),
        ]
        self.parallel = False
        for r, names in outside.items():
            body += [
                f"{name}_part[{chunk}] = {mine};" for name, mine in zip(names, accumulators(r, inner), strict=True)
            ]
        lines += [
            "#pragma omp parallel for num_threads(threads) schedule(static)",
            f"for (int64_t {chunk} = 0; {chunk} < {CHUNKS}; {chunk}++) {{",
            *("  " + x for x in body),
            "}",
            f"for (int64_t {chunk} = 0; {chunk} < {CHUNKS}; {chunk}++) {{  // in order",
        ]
        for r, names in outside.items():
            lines += ["  " + x for x in accumulate(names, r, [f"{name}_part[{chunk}]" for name in names], scope)]
        settled(s, scope)
        return [*lines, "}"]
