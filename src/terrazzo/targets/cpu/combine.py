"""Accumulators as C++ variables: declared at their identity, combined with a value, with each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from terrazzo.ir import nest as n
from terrazzo.ir.address import coefficient
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import Node, topological
from terrazzo.ir.types import bool_, f32
from terrazzo.targets.terms import Scope, c_type, component, expression, literal, term

Carried = l.Reduce | l.Scan

SHORT = 32
"""Steps of a sum at most, and of a sum of such sums in turn: what is rounded away grows with them."""


def types(r: Carried) -> tuple[Any, ...]:
    """The element type of each value of a reduction or scan."""
    found = r.dtype if r.monoid.width > 1 else (r.dtype,)
    assert isinstance(found, tuple)
    return found


def wide(r: Carried) -> bool:
    """Whether it adds up float32: short sums of it are, and what adds these up is in float64, so that a long sum is
    rounded little more often than a short one.
    """
    return isinstance(r, l.Reduce) and r.monoid.name == "sum" and r.dtype is f32


def rounds(r: Carried) -> bool:
    """Whether it sums numbers that are rounded."""
    return isinstance(r, l.Reduce) and r.monoid.name == "sum" and not types(r)[0].is_integer


def accumulators(r: Carried, scope: Scope) -> list[str]:
    """What its accumulators are called."""
    name = scope.names[r]
    return [name] if r.monoid.width == 1 else [component(name, k) for k in range(r.monoid.width)]


def declare(s: n.Loop, scope: Scope, long: bool = False) -> list[str]:
    """The accumulators a loop carries, at their identities."""
    return [f"{kind} {name} = {value};" for r in s.carried for kind, name, value in identities(r, "acc", scope, long)]


def declare_lanes(s: n.Loop, lanes: int, scope: Scope, long: bool = False) -> list[str]:
    """An array for each accumulator a loop carries, at its identity: one for each of the lanes that `l` counts. Truths
    lie in whole numbers: GCC takes no vector for a bool in memory.
    """
    lines = []
    for r in s.carried:
        for kind, name, value in identities(r, "lane", scope, long):
            lines.append(f"alignas(64) {'i32' if _truth(r) else kind} {name}[{lanes}];")
            lines.append(f"std::fill_n({name}, {lanes}, {value});")
        scope.names[r] += "[l]"
    return lines


def meet(s: n.Loop, lanes: int, scope: Scope) -> list[str]:
    """Combine the lanes, halves with halves: an order of its own, whatever the width of the machine's vectors."""
    lines, halves, ends = [], [], []
    for r in s.carried:
        given = accumulators(r, scope)
        if wide(r):
            lines += declare_lanes(n.Loop(s.kind, s.axes, (), (r,)), lanes, scope, long=True)
            (name,) = accumulators(r, scope)
            lines.append(f"for (int64_t l = 0; l < {lanes}; l++) {name} = {given[0]};")
            given = [name]
        halves.append((r, given))
        scope.names[r] = scope.fresh("acc")
        for kind, name, lane in zip(map(c_type, types(r)), accumulators(r, scope), given, strict=True):
            ends.append(f"const {kind} {name} = ({kind}){lane.replace('[l]', '[0]')};")
    half = lanes
    while half := half // 2:  # each a loop of its own: of known lengths, they become vectors
        lines += ["#pragma omp simd", f"for (int64_t l = 0; l < {half}; l++) {{"]
        for r, given in halves:
            other = [x.replace("[l]", f"[l + {half}]") for x in given]
            lines += ["  " + x for x in accumulate(given, r, other, scope)]
        lines.append("}")
    return [*lines, *ends]


def _truth(r: Carried) -> bool:
    """Whether it is bools combined by their bits, for which whole numbers do as well."""
    return r.dtype is bool_ and r.monoid.ufunc in (np.bitwise_and, np.bitwise_or, np.bitwise_xor)


def settled(s: n.Loop, scope: Scope) -> None:
    """From here on, what may run along in another type is read in its own."""
    for r in s.carried:
        if wide(r) or _truth(r):
            scope.names[r] = f"({c_type(r.dtype)}){scope.names[r]}"


def identities(r: Carried, prefix: str, scope: Scope, long: bool) -> list[tuple[str, str, str]]:
    """(C++ type, name, identity) of each accumulator; of a long sum, in float64. Names them."""
    scope.names[r] = scope.fresh(prefix)
    given = types(r)
    values = [literal(v, t) for v, t in zip(r.monoid.identity(given), given, strict=True)]
    kinds = ["f64"] if long and wide(r) else map(c_type, given)
    return list(zip(kinds, accumulators(r, scope), values, strict=True))


def rises(r: Carried) -> bool:
    """Whether what it combines counts the points of its axes, in order: each comes after all before it."""
    counted, reach = r.args[-1], 0
    if not isinstance(counted, l.Index):
        return False
    for axis in reversed(r.axes if isinstance(r, l.Reduce) else (r.axis,)):
        by = coefficient(counted.value, axis)
        if not isinstance(by, int) or not isinstance(axis.extent, int) or by <= reach:
            return False
        reach += by * (axis.extent - 1)
    return True


def accumulate(into: Sequence[str], r: Carried, args: Sequence[str], scope: Scope, in_order: bool = False) -> list[str]:
    """Statements that combine `args` into the accumulators: the next of its points, where they come `in_order`."""
    m, given = r.monoid, types(r)
    if m.name in ("sum", "prod") and not given[0].is_integer:
        return [f"{into[0]} {'+' if m.name == 'sum' else '*'}= {args[0]};"]
    here = scope.inner()

    def build(values: Sequence[str]) -> list[Node]:
        nodes: list[Node] = [_Value(text, dtype) for text, dtype in zip(values, given, strict=True)]
        here.names.update(zip(nodes, values, strict=True))
        return nodes

    combine = m.after if m.after and in_order and rises(r) else m.combine
    combined = combine(l.apply, build(into), build(args))
    if m.width == 1:
        return [f"{into[0]} = {term(combined[0], here)};"]
    lines: list[str] = []
    for node in topological(combined):
        if isinstance(node, l.Apply) and node not in here.names:
            text = expression(node, here)
            here.names[node] = scope.fresh("c")
            lines.append(f"const {c_type(node.dtype)} {here.names[node]} = {text};")
    return [
        "{",
        *("  " + x for x in lines),
        *(f"  {a} = {term(x, here)};" for a, x in zip(into, combined, strict=True)),
        "}",
    ]


class _Value(l.Term, op="value"):
    """A C++ expression as a term, to build a combination from."""

    text: str
    type: Any

    def infer(self) -> Any:
        return self.type
