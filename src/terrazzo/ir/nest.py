"""The loop nest a kernel means: where each of its terms is computed.

A term is computed in the outermost scope that binds its free variables. Reductions that are ready at the same time and
run over the same axes share one loop. The printed form of a kernel and every code generator walk this nest: what is
shown is what runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

from terrazzo.ir.dialects.loop import Kernel, Literal, Reduce, Scan, Store, Term, children_in_scope
from terrazzo.ir.expr import Expr
from terrazzo.ir.node import Node, per_node


@dataclass(frozen=True)
class Let:
    """Compute a term here, once; everything below in this scope may use it."""

    term: Term


@dataclass(frozen=True)
class Accumulate:
    """Combine the terms `args` into the accumulators of a reduction or scan."""

    into: Reduce | Scan
    args: tuple[Node, ...]


@dataclass(frozen=True)
class Loop:
    """A loop over `axes` (several for one reduction over several). `carried` start at their monoid's identity before
    it.

    kind: "free" (iterations are independent), "reduce", or "scan" (in order).
    """

    kind: str
    axes: tuple[Any, ...]
    body: tuple[Statement, ...]
    carried: tuple[Reduce | Scan, ...] = ()


Statement: TypeAlias = "Let | Accumulate | Loop | Store"


@dataclass
class _Sink:
    """Something that must happen once `vars` are bound, and the nodes it uses."""

    vars: frozenset[Any]
    uses: tuple[Node, ...]
    statement: Statement


@per_node
def nest(kernel: Kernel) -> tuple[Statement, ...]:
    """The statements of a kernel."""
    sinks = []
    for store in kernel.stores:
        index = frozenset().union(*(e.free for e in store.index if isinstance(e, Expr)))
        sinks.append(
            _Sink(index | store.value.free, (store.value, *(e for e in store.index if isinstance(e, Expr))), store)
        )
    terms = _reachable([u for s in sinks for u in s.uses], set())
    levels = _by_level(kernel.axes, terms)
    if any(type(x) is Reduce or type(x) is Scan for x in terms):
        return tuple(_level(0, kernel.axes, sinks, levels, set(), any(type(x) is Scan for x in terms)))
    return _points(kernel.axes, levels, sinks)


def _by_level(axes: Sequence[Any], terms: Sequence[Node]) -> list[list[Term]]:
    """The terms that some number of axes is enough for, by that number; those that need others come last."""
    depth = {axis: n + 1 for n, axis in enumerate(axes)}
    levels: list[list[Term]] = [[] for _ in range(len(axes) + 2)]

    @cache
    def level(variables: frozenset[Any]) -> list[Term]:
        return levels[max((depth.get(v, len(axes) + 1) for v in variables), default=0)]

    for x in terms:
        if isinstance(x, Term) and type(x) is not Literal:
            level(x.free).append(x)
    return levels


def accumulators(kernel: Kernel) -> dict[str, Reduce | Scan]:
    """The reductions and scans of a kernel, by the names that the printed nest gives them."""
    found: dict[Reduce | Scan, None] = {}

    def walk(body: Sequence[Statement]) -> None:
        for s in body:
            if isinstance(s, Loop):
                found.update(dict.fromkeys(s.carried))
                walk(s.body)
            elif isinstance(s, Accumulate):
                found.setdefault(s.into)

    if kernel.carried:
        walk(nest(kernel))
    return {f"acc{k}": site for k, site in enumerate(found)}


def _points(axes: Sequence[Any], terms: Sequence[Sequence[Term]], sinks: Sequence[_Sink]) -> tuple[Statement, ...]:
    """Statements where nothing is reduced: each term stands in the loop of the innermost axis that it knows."""
    levels: list[list[Statement]] = [list(map(Let, some)) for some in terms]
    bound = [frozenset(axes[:n]) for n in range(len(axes) + 1)]
    for s in sinks:
        levels[next((n for n, known in enumerate(bound) if s.vars <= known), -1)].append(s.statement)
    last = max((n for n in range(len(axes) + 1) if levels[n]), default=0)
    body = levels[last]
    for n in reversed(range(last)):
        body = [*levels[n], Loop("free", (axes[n],), tuple(body))]
    return tuple(body)


def _level(
    level: int,
    axes: Sequence[Any],
    sinks: list[_Sink],
    terms: Sequence[Sequence[Term]],
    done: set[Node],
    scanned: bool,
) -> list[Statement]:
    """Statements of the scope of so many of the `axes`, for which `terms` are ready, with loops over the others inside,
    which scans may run along.
    """
    out: list[Statement] = []
    bound, rest = frozenset(axes[:level]), axes[level:]
    if scanned or any(type(x) is Reduce for x in terms[level]):
        _compute([u for s in sinks for u in s.uses], bound, done, out)
    else:  # nothing is looped over: what is ready comes one after the other
        out.extend(map(Let, terms[level]))
        done.update(terms[level])
    now = [s for s in sinks if s.vars <= bound]
    out.extend(s.statement for s in now)
    later = [s for s in sinks if not s.vars <= bound]
    if later and rest:
        axis = rest[0]
        below = _reachable([u for s in later for u in s.uses], done) if scanned else []
        scans = tuple(n for n in below if isinstance(n, Scan) and n.at is axis)
        body = _level(level + 1, axes, later, terms, set(done), scanned)
        out.append(Loop("scan" if scans else "free", (axis,), tuple(body), scans))
    return out


@dataclass
class _Stage:
    """Lets that need no reduction of this stage, then the reductions, grouped by the axes they run over."""

    lets: list[Statement] = field(default_factory=list)
    reductions: dict[tuple[Any, ...], list[Reduce]] = field(default_factory=dict)


def _compute(uses: Sequence[Node], bound: frozenset[Any], done: set[Node], out: list[Statement]) -> None:
    """Compute every term below `uses` that this scope can, in stages: a reduction ends the stage it needs."""
    stages: dict[int, _Stage] = {}
    depth: dict[Node, int] = {}
    for node in _reachable(uses, done):
        below = 0
        for c in node.children if type(node) is not Scan else children_in_scope(node):
            below = max(below, depth.get(c, 0))
        if type(node) is Reduce and node.free <= bound:
            below = max((depth[c] for c in _inner(node, done) if c in depth), default=0)
            stages.setdefault(below, _Stage()).reductions.setdefault(node.axes, []).append(node)
            depth[node] = below + 1
        elif isinstance(node, Term) and node.free <= bound:
            if type(node) is Scan:
                stages.setdefault(below, _Stage()).lets.append(Accumulate(node, node.step))
            elif type(node) is not Literal:
                stages.setdefault(below, _Stage()).lets.append(Let(node))
            depth[node] = below
        else:
            depth[node] = below  # an index expression, which may hold a term that was loaded
    for k in sorted(stages):
        out.extend(stages[k].lets)
        for statement in stages[k].lets:
            made = statement.into if isinstance(statement, Accumulate) else statement.term  # type: ignore[union-attr]
            done.add(made)
        for axes, reductions in stages[k].reductions.items():
            inner = bound | set(axes)
            body: list[Statement] = []
            within = set(done)
            _compute([a for r in reductions for a in r.args], inner, within, body)
            body.extend(Accumulate(r, r.args) for r in reductions)
            out.append(Loop("reduce", axes, tuple(body), tuple(reductions)))
            done.update(reductions)


def _inner(node: Node, done: set[Node]) -> list[Node]:
    return _reachable(list(node.children), done)


def _reachable(roots: Sequence[Node], done: set[Node]) -> list[Node]:
    """Everything below `roots` that is not done, children first, also inside reductions: what is invariant moves
    out.
    """
    order: list[Node] = []
    seen = set(done)
    path: list[Node] = []
    rest = [iter(roots)]
    while rest:
        for node in rest[-1]:
            if node in seen:
                continue
            seen.add(node)
            if below := node.children if type(node) is not Scan else children_in_scope(node):
                path.append(node)
                rest.append(iter(below))
                break
            order.append(node)
        else:
            rest.pop()
            if path:
                order.append(path.pop())
    return order
