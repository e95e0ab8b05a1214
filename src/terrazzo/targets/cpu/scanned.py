"""Scans along memory: what goes into a scan and what is made of it in vectors, and only its combinations one by one.

A step of a scan waits for the one before it. Rows do not wait for each other, so some of them take turns. A long row
that is alone is cut into chunks, which are such rows as soon as it is known what comes before each: all are reduced
first, where their monoid may be reduced in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from terrazzo.ir import nest as n
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import Node, topological
from terrazzo.targets.cpu.combine import accumulate, accumulators, declare, identities, types
from terrazzo.targets.cpu.rows import computed_for, is_leaf, vectorises
from terrazzo.targets.terms import Scope, c_type, component, index, term

AT_ONCE = 4
"""Rows that take turns: as many as an addition takes cycles."""
STEPS = 64
"""Steps of a row after which vectors and single steps take turns: what they hand on stays in the first-level cache."""
CHUNKS = 64
"""Pieces that a long row is cut into: fixed, so that the result does not depend on the threads."""
LONG = 64 * STEPS
"""Steps of a row from which on it is cut."""


class Writer(Protocol):
    """What is asked of the one who writes the nest."""

    parallel: bool
    found: dict[int, dict[Node, str]]
    keep: dict[int, dict[Node, str]]

    def statements(self, body: Sequence[n.Statement], scope: Scope) -> list[str]: ...

    def reduce_loops(self, s: n.Loop, scope: Scope, start: str, end: str) -> list[str]: ...


def along_memory(s: n.Loop) -> bool:
    """Whether a loop is a scan, or several, of what is there before any of them."""
    if s.kind != "scan" or not is_leaf(s) or not isinstance(s.axes[0].extent, int) or s.axes[0].extent < STEPS:
        return False
    into = [x.into for x in s.body if isinstance(x, n.Accumulate)]
    before = topological([a for x in s.body if isinstance(x, n.Accumulate) for a in x.args])
    return not any(r in before for r in into)


def scan_of_rows(s: n.Loop) -> n.Loop | None:
    """The scan that a free loop has at each of its points, if that is all but terms."""
    *lets, last = s.body
    alone = s.kind == "free" and isinstance(last, n.Loop) and all(isinstance(x, n.Let) for x in lets)
    enough = isinstance(s.axes[0].extent, int) and s.axes[0].extent >= AT_ONCE
    return last if alone and enough and along_memory(last) else None  # type: ignore[arg-type, return-value]


def written(writer: Writer, s: n.Loop, scope: Scope, shared: bool) -> list[str]:
    """The scan that a loop is, or has at each of its points, as described here; nothing for another loop."""
    if (scan := scan_of_rows(s)) and id(scan) not in writer.keep:
        return of_rows(writer, s, scan, scope, shared)
    return of_one_row(writer, s, scope, shared) if along_memory(s) and id(s) not in writer.keep else []


def of_rows(writer: Writer, s: n.Loop, scan: n.Loop, scope: Scope, shared: bool) -> list[str]:
    """A free loop over rows, each of which is scanned; threads share them, where it is `shared`. While there are enough
    for all threads, several take turns.
    """
    (axis,), row, first = s.axes, scope.fresh("i"), scope.fresh("row")
    inner = scope.inner()
    inner.names[axis] = row
    head = [f"const int64_t {row} = {first} + l;"]
    steps = index(scan.axes[0].extent, scope)
    some, one = scope.fresh("rows"), scope.fresh("single")
    lines = []
    for name, count in ((some, AT_ONCE), (one, 1)):
        body = _Rows(writer, scan, s.body[:-1], inner, count, head).lines(lambda _: "0", steps)
        lines += [_lambda(name, first), *("  " + x for x in body), "};"]
    whole = scope.fresh("whole")
    share = ["#pragma omp parallel for num_threads(threads) schedule(static)"] if shared else []
    enough = f"{axis.extent} >= {AT_ONCE} * threads" if shared else "true"
    return [
        *lines,
        f"const int64_t {whole} = {enough} ? {int(axis.extent) // AT_ONCE * AT_ONCE} : 0;",
        f"if ({whole} > 0) {{",
        *share,
        f"for (int64_t {first} = 0; {first} < {whole}; {first} += {AT_ONCE}) {some}({first}, bad);",
        "}",
        f"if ({whole} < {axis.extent}) {{",
        *share,
        f"for (int64_t {first} = {whole}; {first} < {axis.extent}; {first}++) {one}({first}, bad);",
        "}",
    ]


def of_one_row(writer: Writer, scan: n.Loop, scope: Scope, shared: bool) -> list[str]:
    """A scan by itself: a long one as one of chunks, which threads share, where it is `shared`."""
    extent = int(scan.axes[0].extent)
    if extent < LONG or id(scan) in writer.found or not all(r.monoid.commutes for r in scan.carried):
        return ["{", *("  " + x for x in _Rows(writer, scan, (), scope, 1, []).lines(lambda _: "0", str(extent))), "}"]
    size = extent // CHUNKS
    share = ["#pragma omp parallel for num_threads(threads) schedule(static)"] if shared else []
    chunk = scope.fresh("chunk")
    outer, writer.parallel = writer.parallel, True
    parts = {r: [scope.fresh("part") for _ in types(r)] for r in scan.carried}
    lines = [f"{c_type(t)} {p}[{CHUNKS}];" for r in parts for t, p in zip(types(r), parts[r], strict=True)]
    body = []
    for r in scan.carried:
        inner = scope.inner()
        whole = _reduced(r, scope)  # type: ignore[arg-type]
        text = writer.reduce_loops(whole, inner, f"{chunk} * {size}", f"({chunk} + 1) * {size}")
        ends = zip(parts[r], accumulators(whole.carried[0], inner), strict=True)
        body += ["{", *("  " + x for x in (*text, *(f"{p}[{chunk}] = {mine};" for p, mine in ends))), "}"]
    lines += [*share, f"for (int64_t {chunk} = 0; {chunk} < {CHUNKS}; {chunk}++) {{", *("  " + x for x in body), "}"]

    inner = scope.inner()  # what comes before each chunk, in the place of what it adds up to
    lines += declare(scan, inner)
    body = []
    for r in scan.carried:
        mine, swapped = accumulators(r, inner), [scope.fresh("own") for _ in types(r)]
        body += [f"const auto {own} = {p}[{chunk}];" for own, p in zip(swapped, parts[r], strict=True)]
        body += [f"{p}[{chunk}] = {name};" for p, name in zip(parts[r], mine, strict=True)]
        body += accumulate(mine, r, swapped, scope)
    lines += [f"for (int64_t {chunk} = 0; {chunk} < {CHUNKS}; {chunk}++) {{  // in order"]
    lines += [*("  " + x for x in body), "}"]

    some, first = scope.fresh("rows"), scope.fresh("row")
    begin = {r: [[f"{p}[{first} + {k}]" for p in parts[r]] for k in range(AT_ONCE)] for r in scan.carried}
    rows = _Rows(writer, scan, (), scope, AT_ONCE, [], begin).lines(lambda l: f"({first} + {l}) * {size}", str(size))
    lines += [_lambda(some, first), *("  " + x for x in rows), "};", *share]
    lines.append(f"for (int64_t {first} = 0; {first} < {CHUNKS}; {first} += {AT_ONCE}) {some}({first}, bad);")
    if rest := extent - size * CHUNKS:
        begin = {r: [accumulators(r, inner)] for r in scan.carried}
        rows = _Rows(writer, scan, (), scope, 1, [], begin).lines(lambda _: str(size * CHUNKS), str(rest))
        lines += ["{", *("  " + x for x in rows), "}"]
    writer.parallel = outer
    return lines


def _lambda(name: str, first: str) -> str:
    return f"const auto {name} = [&](int64_t {first}, int& bad) __attribute__((always_inline)) {{  // scan, by rows"


def _reduced(r: l.Scan, scope: Scope) -> n.Loop:
    """The loop that combines all that a scan does."""
    whole = l.Reduce.make(r.monoid, (r.axis,), r.args)
    terms = topological(whole.args, stop=scope.names.__contains__)
    lets = [n.Let(x) for x in terms if isinstance(x, l.Term) and not isinstance(x, l.Literal) and x not in scope.names]
    return n.Loop("reduce", whole.axes, (*lets, n.Accumulate(whole, whole.args)), (whole,))


@dataclass(frozen=True)
class _Rows:
    """Some rows that are scanned side by side, the l-th of which is told apart by `head`, and begins at `begin`, or at
    the identity. `lets` are the terms of a row.
    """

    writer: Writer
    scan: n.Loop
    lets: Sequence[n.Statement]
    scope: Scope
    count: int
    head: Sequence[str]
    begin: Mapping[Any, Sequence[Sequence[str]]] | None = None

    def lines(self, first: Callable[[str], str], steps: str) -> list[str]:
        """The scans of so many steps, in each row from its `first` on."""
        scope, lines = self.scope.inner(), []
        rows: dict[Any, list[list[str]]] = {}
        handed: dict[Any, list[str]] = {}
        for r in self.scan.carried:
            named = identities(r, "acc", scope, False)
            base = scope.fresh("step")
            handed[r] = [base] if len(named) == 1 else [component(base, k) for k in range(len(named))]
            kinds = [kind for kind, *_ in named]
            lines += [
                f"alignas(64) {kind} {x}[{self.count * STEPS}];" for kind, x in zip(kinds, handed[r], strict=True)
            ]
            rows[r] = [[f"{name}_{k}" for _, name, _ in named] for k in range(self.count)]
            for k, mine in enumerate(rows[r]):
                given = self.begin[r][k] if self.begin else [value for *_, value in named]
                lines += [f"{kind} {x} = {v};" for kind, x, v in zip(kinds, mine, given, strict=True)]
            scope.names.pop(r)
        block, left, step = scope.fresh("b"), scope.fresh("left"), scope.fresh("steps")
        some = [f"const auto {step} = [&](int64_t {block}, int64_t {left}, int& bad) __attribute__((always_inline)) {{"]

        def at(row: str) -> str:
            return f"{first(row)} + {block} + k"

        turns = (
            *self.before(scope, handed, at, left),
            *self.combined(scope, handed, rows, at, left),
            *self.behind(scope, handed, at, left),
        )
        some += ["  " + x for x in turns]
        whole = f"{steps} / {STEPS} * {STEPS}"
        lines += [*some, "};"]
        lines.append(f"for (int64_t {block} = 0; {block} < {whole}; {block} += {STEPS}) {step}({block}, {STEPS}, bad);")
        if not (steps.isdigit() and int(steps) % STEPS == 0):
            lines.append(f"{step}({whole}, {steps} % {STEPS}, bad);")
        return lines

    def before(self, scope: Scope, handed: dict[Any, list[str]], at: Callable[[str], str], left: str) -> list[str]:
        """What is combined, in vectors."""
        given = [x for x in self.scan.body if isinstance(x, n.Accumulate)]

        pairs = [(a, x) for s in given for a, x in zip(s.args, handed[s.into], strict=True) if not self.counts(a)]

        def text(here: Scope) -> list[str]:
            return [f"{x}[l * {STEPS} + k] = {term(a, here)};" for a, x in pairs]

        return self.over_steps([a for a, _ in pairs], text, scope, at, left)

    def behind(self, scope: Scope, handed: dict[Any, list[str]], at: Callable[[str], str], left: str) -> list[str]:
        """What is made of it, and stored, in vectors."""
        here = scope.inner()
        for r, names in handed.items():
            here.names[r] = f"{names[0].rpartition('_')[0] if r.monoid.width > 1 else names[0]}[l * {STEPS} + k]"
        stores = [x for x in self.scan.body if isinstance(x, l.Store)]
        return self.over_steps(stores, lambda inner: self.writer.statements(stores, inner), here, at, left)

    def over_steps(
        self,
        roots: Sequence[Node],
        text: Callable[[Scope], list[str]],
        scope: Scope,
        at: Callable[[str], str],
        left: str,
    ) -> list[str]:
        """A loop over rows and the steps of each: all that `roots` need, and the text that is for these."""
        (axis,) = self.scan.axes
        here, step = scope.inner(), scope.fresh("i")
        here.names[axis] = step
        places = f"[{step}]"
        here.names.update({x: row + places for x, row in self.writer.found.get(id(self.scan), {}).items()})
        needed = computed_for(roots, here.names)
        of_row = [n.Let(x) for x in needed if axis not in x.free]
        lines = self.writer.statements(of_row, here)
        body = [n.Let(x) for x in needed if x not in here.names]
        inside = here.inner()
        simd = ["#pragma omp simd"] if vectorises(body) else []
        steps = [f"const int64_t {step} = {at('l')};", *self.writer.statements(body, inside), *text(inside)]
        return [
            f"for (int64_t l = 0; l < {self.count}; l++) {{",
            *("  " + x for x in (*self.head, *lines, *simd, f"for (int64_t k = 0; k < {left}; k++) {{")),
            *("    " + x for x in steps),
            "  }",
            "}",
        ]

    def combined(
        self,
        scope: Scope,
        handed: dict[Any, list[str]],
        rows: dict[Any, Any],
        at: Callable[[str], str],
        left: str,
    ) -> list[str]:
        """The steps in order, each row's behind another's."""
        text = []
        for r, mine in rows.items():
            for row, names in enumerate(mine):
                here = scope.inner()
                here.names[self.scan.axes[0]] = f"({at(str(row))})"
                places = [f"{x}[{row * STEPS} + k]" for x in handed[r]]
                args = [term(a, here) if self.counts(a) else x for a, x in zip(r.step, places, strict=True)]
                text += accumulate(names, r, args, scope, in_order=True)
                text += [f"{place} = {name};" for place, name in zip(places, names, strict=True)]
        return [f"for (int64_t k = 0; k < {left}; k++) {{  // scan", *("  " + x for x in text), "}"]

    def counts(self, x: Node) -> bool:
        """Whether a term is how far a row is, which needs no memory."""
        return isinstance(x, l.Index) and x.free <= {*self.scan.axes}
