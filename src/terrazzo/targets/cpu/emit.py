"""A kernel of Loop IR as a C++ function.

    extern "C" int NAME(void** buffers, int threads)

`buffers` are the data pointers of `kernel.reads`, then of `kernel.writes`. The function returns 0, or 1 if an index that came from
data was outside its dimension. The text follows the loop nest; products are blocked (see blocked.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from typing import Any

from terrazzo.ir import nest as n
from terrazzo.ir.address import flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr, Loaded
from terrazzo.ir.monoid import Monoid
from terrazzo.ir.node import Node, topological
from terrazzo.targets.cpu import blocked
from terrazzo.targets.cpu.terms import Scope, c_type, expression, identifier, index, literal, term

PARALLEL = 20_000
"""Points of a loop nest from which on a second thread pays."""
CHUNKS = 64
"""Pieces a reduction without enough loops around it is cut into: fixed, so that the result does not depend on the threads."""

_SIMD = {"sum": "+", "prod": "*", "max": "tz_max", "min": "tz_min"}


@lru_cache(maxsize=1)
def prelude() -> str:
    """The text every source begins with."""
    return (resources.files("terrazzo.targets.cpu") / "prelude.h").read_text()


def emit(kernel: l.Kernel) -> tuple[str, str]:
    """(function name, C++ source) of a kernel. Kernels that differ only in the names of buffers have the same source."""
    scope = Scope()
    name = "k_" + identifier(kernel.name)
    lines = [f'extern "C" int {name}(void** buffers, int threads) {{', "  int bad = 0;"]
    if kernel.source:
        lines.insert(0, f"// {kernel.source}")
    taken: set[str] = set()
    reads = [b for b in kernel.reads if b not in kernel.writes]
    for k, b in enumerate([*reads, *kernel.writes]):
        formal = _unique(identifier(b.name), taken)
        scope.buffers[b] = formal
        const = "const " if b in reads else ""
        lines.append(f"  {const}{c_type(b.type.dtype)}* __restrict {formal} = ({const}{c_type(b.type.dtype)}*)buffers[{k}];")
    body = blocked.emit(kernel, scope) or _Writer(kernel, scope).lines()
    lines += ["  " + line for line in body]
    lines += ["  return bad;", "}"]
    return name, prelude() + "\n".join(lines) + "\n"


def arguments(kernel: l.Kernel) -> tuple[l.Buffer, ...]:
    """The buffers a kernel's function takes, in order."""
    return (*(b for b in kernel.reads if b not in kernel.writes), *kernel.writes)


def _unique(name: str, taken: set[str]) -> str:
    base, k = name + "_p", 2
    name = base
    while name in taken:
        name, k = f"{base}{k}", k + 1
    taken.add(name)
    return name


def trips(body: Sequence[n.Statement]) -> int:
    """Statements executed by a piece of a nest."""
    total = 0
    for s in body:
        if isinstance(s, n.Loop):
            points = 1
            for a in s.axes:
                points *= a.extent if isinstance(a.extent, int) else 512
            total += points * max(trips(s.body), 1)
        else:
            total += 1
    return total


class _Writer:
    def __init__(self, kernel: l.Kernel, scope: Scope) -> None:
        self.kernel, self.scope = kernel, scope
        self.parallel = False

    def lines(self) -> list[str]:
        """The body of the function."""
        return self.statements(n.nest(self.kernel), self.scope)

    def statements(self, body: Sequence[n.Statement], scope: Scope) -> list[str]:
        lines: list[str] = []
        for s in body:
            match s:
                case n.Let():
                    lines += self.let(s.term, scope)
                case n.Accumulate():
                    lines += accumulate(s.into.monoid, _accumulators(s.into, scope), s.into, [term(a, scope) for a in s.args], scope)
                case l.Store():
                    place = index(flatten(s.index, s.buffer.type.element_strides), scope)
                    lines.append(f"{scope.buffers[s.buffer]}[{place}] = {term(s.value, scope)};")
                case n.Loop(kind="reduce"):
                    lines += self.reduction(s, scope)
                case n.Loop():
                    lines += self.loop(s, scope)
        return lines

    def let(self, x: l.Term, scope: Scope) -> list[str]:
        if isinstance(x, l.Get):
            scope.names[x] = f"{scope.names[x.x]}_{x.index}"
            return []
        text = expression(x, scope)
        scope.names[x] = scope.fresh("in" if isinstance(x, l.Load) else "v")
        return [f"const {c_type(x.dtype)} {scope.names[x]} = {text};"]

    def loop(self, s: n.Loop, scope: Scope) -> list[str]:
        """A free loop or a scan; the outermost ones share the work among threads."""
        pragmas, nested = [], [s]
        if not self.parallel and s.kind == "free" and trips([s]) >= PARALLEL:
            while (child := _only_loop(nested[-1])) and _points(nested) < 64 and any(isinstance(x, n.Loop) for x in child.body):
                nested.append(child)  # but for the innermost loop, which vectorises
            if _points(nested) >= 4 or (_points(nested) >= 2 and not _only_loop(nested[-1])):
                alone = not any(isinstance(x, n.Loop) for x in nested[-1].body)
                simd = " simd" if alone and len(nested) == 1 and _vectorises(nested[-1].body) else ""
                collapse = f" collapse({len(nested)})" if len(nested) > 1 else ""
                pragmas = [f"#pragma omp parallel for{simd}{collapse} num_threads(threads) schedule(static)"]
        if not pragmas:
            nested = [s]
            if s.kind == "free" and not any(isinstance(x, n.Loop) for x in s.body) and _vectorises(s.body):
                pragmas = ["#pragma omp simd"]
        outer, self.parallel = self.parallel, self.parallel or any("parallel" in p for p in pragmas)
        lines = list(pragmas)
        for k, loop in enumerate(nested):
            lines += ["  " * k + x for x in (*_declare(loop, scope), _header(loop.axes[0], scope, loop.kind))]
        inner = scope.inner()
        lines += ["  " * len(nested) + x for x in self.statements(nested[-1].body, inner)]
        lines += ["  " * k + "}" for k in reversed(range(len(nested)))]
        self.parallel = outer
        return lines

    def reduction(self, s: n.Loop, scope: Scope) -> list[str]:
        """Accumulators at their identity, then the loops. A long one that nothing around makes parallel is cut into chunks."""
        first = s.axes[0].extent
        if not self.parallel and trips([s]) >= 4 * PARALLEL and isinstance(first, int) and first >= CHUNKS:
            return self.chunked(s, scope)
        lines = _declare(s, scope)
        inner = scope.inner()
        return lines + self._loops(s, inner, [_header(a, inner, "reduce") for a in s.axes])

    def _loops(self, s: n.Loop, scope: Scope, headers: list[str]) -> list[str]:
        body = self.statements(s.body, scope)
        lines = ["  " * k + h for k, h in enumerate(headers[:-1])]
        depth = "  " * (len(headers) - 1)
        plain = all(r.monoid.name in _SIMD and not isinstance(r, l.Scan) for r in s.carried)
        if plain and not any(isinstance(x, n.Loop) for x in s.body) and _vectorises(s.body):
            clauses = " ".join(f"reduction({_SIMD[r.monoid.name]}:{scope.names[r]})" for r in s.carried)
            lines.append(f"{depth}#pragma omp simd {clauses}")
        lines.append(depth + headers[-1])
        lines += [depth + "  " + x for x in body]
        return lines + ["  " * k + "}" for k in reversed(range(len(headers)))]

    def chunked(self, s: n.Loop, scope: Scope) -> list[str]:
        lines = _declare(s, scope)
        parts: list[str] = []
        outside = {r: list(_accumulators(r, scope)) for r in s.carried}
        for r, names in outside.items():
            for name, dtype in zip(names, _types(r), strict=True):
                parts.append(f"{c_type(dtype)} {name}_part[{CHUNKS}];")
        inner = scope.inner()
        chunk = scope.fresh("chunk")
        body = _declare(s, inner)
        extent = s.axes[0].extent
        head = _header(s.axes[0], inner, "reduce", f"{extent}LL * {chunk} / {CHUNKS}", f"{extent}LL * ({chunk} + 1) / {CHUNKS}")
        self.parallel = True
        body += self._loops(s, inner, [head, *(_header(a, inner, "reduce") for a in s.axes[1:])])
        self.parallel = False
        for r, names in outside.items():
            for name, mine in zip(names, _accumulators(r, inner), strict=True):
                body.append(f"{name}_part[{chunk}] = {mine};")
        lines += parts
        lines += [
            "#pragma omp parallel for num_threads(threads) schedule(static)",
            f"for (int {chunk} = 0; {chunk} < {CHUNKS}; {chunk}++) {{",
        ]
        lines += ["  " + x for x in body] + ["}"]
        lines.append(f"for (int {chunk} = 0; {chunk} < {CHUNKS}; {chunk}++) {{  // in order")
        for r, names in outside.items():
            lines += ["  " + x for x in accumulate(r.monoid, names, r, [f"{name}_part[{chunk}]" for name in names], scope)]
        return [*lines, "}"]


def _only_loop(s: n.Loop) -> n.Loop | None:
    """The free loop that is all of the body, if it is."""
    only = s.body[0] if len(s.body) == 1 else None
    return only if isinstance(only, n.Loop) and only.kind == "free" else None


def _points(loops: Sequence[n.Loop]) -> int:
    points = 1
    for s in loops:
        extent = s.axes[0].extent
        points *= extent if isinstance(extent, int) else 64
    return points


def _vectorises(body: Sequence[n.Statement]) -> bool:
    """False where a statement must run in order: a scan's accumulation, a gather that notes a bad index."""
    for s in body:
        if isinstance(s, n.Accumulate) and isinstance(s.into, l.Scan):
            return False
        roots: list[Node] = [s.term] if isinstance(s, n.Let) else [s] if isinstance(s, l.Store) else []
        if any(isinstance(e, Loaded) for r in roots for c in r.children if isinstance(c, Expr) for e in topological([c])):
            return False
    return True


def _types(r: l.Reduce | l.Scan) -> Any:
    return r.dtype if r.monoid.width > 1 else (r.dtype,)


def _accumulators(r: l.Reduce | l.Scan, scope: Scope) -> list[str]:
    name = scope.names[r]
    return [name] if r.monoid.width == 1 else [f"{name}_{k}" for k in range(r.monoid.width)]


def _declare(s: n.Loop, scope: Scope) -> list[str]:
    """The accumulators a loop carries, at their identities."""
    lines = []
    for r in s.carried:
        scope.names[r] = scope.fresh("acc")
        types = _types(r)
        for name, dtype, value in zip(_accumulators(r, scope), types, r.monoid.identity(types), strict=True):
            lines.append(f"{c_type(dtype)} {name} = {literal(value, dtype)};")
    return lines


def _header(axis: Expr, scope: Scope, kind: str, start: str = "0", end: str = "") -> str:
    scope.names[axis] = name = scope.fresh("i")
    extent: IntExpr = axis.extent  # type: ignore[attr-defined]
    return f"for (int64_t {name} = {start}; {name} < {end or index(extent, scope)}; {name}++) {{  // {kind}"


class _Value(l.Term, op="value"):
    """A C++ expression as a term, to build a combination from."""

    text: str
    type: Any

    def infer(self) -> Any:
        return self.type


def accumulate(m: Monoid, into: Sequence[str], r: l.Reduce | l.Scan, args: Sequence[str], scope: Scope) -> list[str]:
    """Statements that combine `args` into the accumulators."""
    types = _types(r)
    if m.name == "sum":
        return [f"{into[0]} += {args[0]};"]
    if m.name == "prod":
        return [f"{into[0]} *= {args[0]};"]

    def build(values: Sequence[str]) -> list[Node]:
        nodes: list[Node] = []
        for text, dtype in zip(values, types, strict=True):
            node = _Value(text, dtype)
            here.names[node] = text
            nodes.append(node)
        return nodes

    here = scope.inner()
    combined = m.combine(l.apply, build(into), build(args))
    if m.width == 1:
        return [f"{into[0]} = {term(combined[0], here)};"]
    fresh = [scope.fresh("t") for _ in combined]
    lines: list[str] = []
    for node in topological(combined):
        if isinstance(node, l.Apply) and node not in here.names:
            text = expression(node, here)
            here.names[node] = scope.fresh("c")
            lines.append(f"const {c_type(node.dtype)} {here.names[node]} = {text};")
    lines += [f"const auto {f} = {term(x, here)};" for f, x in zip(fresh, combined, strict=True)]
    return ["{", *("  " + x for x in lines), *(f"  {a} = {f};" for a, f in zip(into, fresh, strict=True)), "}"]
