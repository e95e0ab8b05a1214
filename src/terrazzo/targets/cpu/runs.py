"""Runs: what lies along one axis, written without asking at each point whether it is inside its tensor.

A guard such as `1 <= r + i < 57` holds from one value of `i` to another. So a loop along `i` is three: before it holds,
where a load is 0; where it holds, which vectorises; and behind that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.ir import nest as n
from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr, Loaded, at_least
from terrazzo.ir.node import Node, substitute, topological, transform
from terrazzo.rules.loop.folding.fold import COMPARED, folding, place
from terrazzo.targets.cpu.rows import computed_for
from terrazzo.targets.terms import Scope, c_type, element, expression, index


def guards(terms: Sequence[Node], axis: Expr) -> tuple[IntExpr, ...] | None:
    """What all guarded loads of the terms ask, where it holds from one value of the axis to another; None where they
    ask several things, or something of another form.
    """
    asked = {frozenset(x.inside): x.inside for x in topological(terms) if isinstance(x, l.Load) and x.inside}
    if len(asked) != 1:
        return None
    (found,) = asked.values()
    by = [coefficient(e, axis) for e in found]
    return found if all(isinstance(c, int) for c in by) else None


def between(asked: Sequence[IntExpr], axis: Any, scope: Scope, start: str, end: str) -> tuple[list[str], str, str]:
    """Declarations of the first value of the axis from `start` to `end` for which all that is asked holds, and of the
    one behind the last; and their names. All other variables have names.
    """
    low, high = scope.fresh("low"), scope.fresh("high")
    lines = [f"int64_t {low} = {start}, {high} = {end};"]
    for e in asked:
        by = coefficient(e, axis)
        assert isinstance(by, int)
        rest = index(e - by * axis, scope)
        if by == 0:
            lines.append(f"if ({rest} < 0) {high} = {low};")
        elif by > 0:
            lines.append(f"{low} = std::max<int64_t>({low}, tz_fdiv({by - 1} - ({rest}), {by}));")
        else:
            lines.append(f"{high} = std::min<int64_t>({high}, tz_fdiv({rest}, {-by}) + 1);")
    lines.append(f"{low} = std::min<int64_t>({low}, {end}), {high} = std::max({low}, {high});")
    return lines, low, high


def where_inside(terms: Sequence[Node], inside: bool) -> dict[Node, Node]:
    """For guarded loads of the terms, what they are where all that they ask holds, or does not."""
    return {
        x: l.Load(x.buffer, x.index) if inside else l.Literal(zero(x), x.dtype)
        for x in topological(terms)
        if isinstance(x, l.Load) and x.inside
    }


def zero(x: l.Load) -> Any:
    """What a load gives where its guards do not hold."""
    return 0.0 if x.dtype.is_float else False if x.dtype.kind == "bool" else 0


@dataclass(frozen=True)
class Lanes:
    """A block of values of an axis from `start` on, of which a loop has one a lane, `most` at most: called `name`."""

    axis: Any
    start: str
    name: str
    most: int

    def loop(self, begin: str = "0", end: str = "lanes") -> list[str]:
        """The head of a loop over some of the lanes."""
        return [
            "#pragma omp simd",
            f"for (int64_t l = {begin}; l < {end}; l++) {{",
            f"  const int64_t {self.name} = {self.start} + l;",
        ]


def loads_of(body: Sequence[n.Statement]) -> list[Node]:
    """What a leaf's body loads."""
    return [s.term for s in body if isinstance(s, n.Let) and isinstance(s.term, l.Load)]


def where_asked(body: Sequence[n.Statement], inside: bool, named: Mapping[Node, str]) -> list[n.Statement]:
    """A leaf's body where all that its loads ask holds, or where it does not, with what is known there of what its
    terms ask: a largest element, and where it is, are chosen by the same conditions. What is named already stays.
    """
    loads = loads_of(body)
    memo: dict[Node, Any] = {**{x: x for x in named}, **where_inside(loads, inside)}
    asked = {e for x in loads if isinstance(x, l.Load) for e in x.inside} if inside else set()

    def visit(x: Any) -> Any:
        if isinstance(x, l.Apply) and x.fn.name in COMPARED:
            a, b = map(place, x.args)
            holds = COMPARED[x.fn.name](a, b) if a is not None and b is not None else ()
            if holds and all(any(at_least(e - known, 0) for known in asked) for e in holds):
                return l.Literal(True, x.dtype)
        return folding(x)

    made: list[n.Statement] = []
    known = dict(named)
    for s in body:  # in their order: what a scan comes to is read behind its accumulation
        match s:
            case n.Accumulate():
                roots = args = tuple(transform(x, visit, memo) for x in s.args)
                then: n.Statement = n.Accumulate(s.into, args)
            case l.Store():
                then = l.Store(s.buffer, s.index, transform(s.value, visit, memo))
                roots = then.children
            case _:
                continue
        lets = computed_for(roots, known)
        known.update(dict.fromkeys(lets, ""))
        made += [*map(n.Let, lets), then]
    return made


def written(
    x: Any, outer: Sequence[Any], inner: Sequence[Any], span: Sequence[str], to: Sequence[str], scope: Scope
) -> list[str]:
    """A term at a range of places, written to memory: `span` is the first of `outer`, counted in row-major order, how
    many of these, the first of `inner`, and how many; `to` is the memory and the strides along these. Runs are along
    the last axis of `inner`.
    """
    o0, oc, i0, ic = span
    memory, along_outer, along_inner = to
    scope = scope.inner()
    run, last = scope.fresh("run"), inner[-1]
    o, i, at, size = (scope.fresh(prefix) for prefix in ("o", "i", "at", "size"))
    head = digits(f"{o0} + {o}" if o0 != "0" else o, outer, scope)
    place = f"{i0} + {i}" if i0 != "0" else i
    within = digits(place, inner, scope) if len(inner) > 1 else []
    first = scope.names[last] if within else place
    lines = [
        *within,
        f"const int64_t {at} = {first}, {size} = std::min<int64_t>({ic} - {i}, {last.extent} - {at});",
    ]
    scope.names[last] = run
    start, end = at, f"{at} + {size}"
    asked = guards([x], last)
    target = f"{memory}[{o} * {along_outer} + ({i} + {run} - {at}){'' if along_inner == '1' else f' * {along_inner}'}]"

    def loop(y: Any, a: str, b: str) -> list[str]:
        return run_of(y, last, (a, b), lambda name: target.replace(run, name), along_inner == "1", scope)

    if asked is None:
        lines += loop(x, start, end)
    else:
        found, low, high = between(asked, last, scope, start, end)
        outside, within_it = (substitute(x, where_inside([x], y)) for y in (False, True))
        lines += [
            *found,
            *loop(outside, start, low),
            *loop(within_it, low, high),
            *loop(outside, high, end),
        ]
    step = scope.fresh("next")
    lines.insert(len(within) + 1, f"{step} = {i} + {size};")
    return [
        f"for (int64_t {o} = 0; {o} < {oc}; {o}++) {{",
        *("  " + z for z in head),
        f"  for (int64_t {i} = 0, {step}; {i} < {ic}; {i} = {step}) {{",
        *("    " + z for z in lines),
        "  }",
        "}",
    ]


def run_of(x: Any, axis: Any, ends: tuple[str, str], to: Callable[[str], str], near: bool, scope: Scope) -> list[str]:
    """A term written along an axis, which has a name, from one value to another; `to` says where each belongs, and
    those are `near` if they lie one behind the other.
    """
    begin, end = ends
    if isinstance(x, l.Load) and not x.inside and stride(x, axis) == 1 and near and not _checks(x):
        first = scope.inner()
        first.names[axis] = begin
        return [f"tz_run(&{to(begin)}, &{element(x.buffer, x.index, first)}, {end} - {begin});"]
    name, body = scope.names[axis], computed(x, scope.inner())
    simd = not isinstance(x, l.Literal) and not _checks(x)
    return [
        *(["#pragma omp simd"] if simd else []),
        f"for (int64_t {name} = {begin}; {name} < {end}; {name}++) {{",
        *("  " + z for z in body[:-1]),
        f"  {to(name)} = {body[-1]};",
        "}",
    ]


def digits(flat: str, axes: Sequence[Any], scope: Scope) -> list[str]:
    """Declarations that take a row-major count apart into variables."""
    out = []
    for k, a in enumerate(axes):
        size = 1
        for b in axes[k + 1 :]:
            size *= int(b.extent)
        scope.names[a] = scope.fresh("i")
        digit = f"({flat}) / {size}" if size != 1 else f"({flat})"
        out.append(f"const int64_t {scope.names[a]} = {digit}{f' % {a.extent}' if k else ''};")
    return out


def computed(x: Node, scope: Scope) -> list[str]:
    """Declarations for everything below `x`, then `x` itself as an expression."""
    out = []
    for node in topological([x]):
        if isinstance(node, l.Term) and node is not x and not isinstance(node, l.Literal) and node not in scope.names:
            text = expression(node, scope)
            scope.names[node] = scope.fresh("v")
            out.append(f"const {c_type(node.dtype)} {scope.names[node]} = {text};")
    return [*out, expression(x, scope)]


def _checks(x: Node) -> bool:
    """Whether an index that comes from data is checked."""
    return any(isinstance(y, Loaded) for y in topological([x]))


def stride(load: l.Load, axis: Any) -> int | None:
    """How many elements further a load is at the next value of an axis; None where that is not the same everywhere."""
    by = coefficient(flatten(load.index, load.buffer.type.element_strides), axis)
    return by if isinstance(by, int) else None
