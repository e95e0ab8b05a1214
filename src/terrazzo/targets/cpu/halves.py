"""Runs of float16: processors have an instruction that converts a vector of them, and compilers do not use it in loops.

So what a block of lanes reads in line is widened before the loop over the lanes, and what it stores in line is rounded
behind it, both in the first-level cache. bfloat16 stays where it is: there it takes a shift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.ir import nest as n
from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import CASTS
from terrazzo.ir.expr import Loaded, Var
from terrazzo.ir.node import Node, topological
from terrazzo.ir.types import Type, f16, f32
from terrazzo.targets.cpu.rows import is_leaf, vectorises
from terrazzo.targets.terms import Scope, element

BLOCK = 256
"""Lanes of a block where nothing else says how many."""
FEWEST = 32
"""Lanes of a block at least."""


@dataclass(frozen=True)
class Lined:
    """A body whose runs are converted `before` it, and `behind` it."""

    before: list[str]
    body: tuple[n.Statement, ...]
    behind: list[str]


def lined(body: Sequence[Any], axis: Any, start: str, lanes: int, scope: Scope) -> Lined:
    """A leaf's body whose lanes `l` are values of an axis from `start` on: `lanes` at most, and as many as the C++
    variable of that name says. Names what is widened.
    """
    before: list[str] = []
    behind: list[str] = []
    here = scope.inner()
    here.names[axis] = start
    for x in _read(body, axis):
        if x not in scope.names:
            name = scope.fresh("wide")
            scope.names[x] = f"{name}[l]"
            (load,) = x.args
            before.append(f"alignas(64) f32 {name}[{lanes}];")
            before.append(f"tz_widen_run(&{element(load.buffer, load.index, here)}, {name}, lanes);")
    made: list[n.Statement] = []
    for s in body:
        if _is_stored(s, axis):
            name = scope.fresh("narrow")
            buffer = l.Buffer(name, Type(f32, (lanes,)))
            lane = Var(l.fresh_name(), lanes)
            scope.buffers[buffer], scope.names[lane] = name, "l"
            before.append(f"alignas(64) f32 {name}[{lanes}];")
            behind.append(f"tz_narrow_run({name}, &{element(s.buffer, s.index, here)}, lanes);")
            s = l.Store(buffer, (lane,), s.value.args[0])
        made.append(s)
    return Lined(before, tuple(made), behind)


def has_runs(s: n.Loop) -> bool:
    """Whether a free loop is one over lanes that reads or stores runs."""
    (axis,) = s.axes
    if s.kind != "free" or not is_leaf(s) or not vectorises(s.body):
        return False
    long = isinstance(axis.extent, int) and axis.extent >= FEWEST
    return long and bool(_read(s.body, axis) or any(_is_stored(x, axis) for x in s.body))


def _read(body: Sequence[Any], axis: Any) -> list[Any]:
    """The conversions to float32 of what a body reads in line."""
    terms: list[Any] = [s.term for s in body if isinstance(s, n.Let)]
    return [
        x
        for x in terms
        if isinstance(x, l.Apply)
        and x.fn is CASTS[f32]
        and isinstance(load := x.args[0], l.Load)
        and load.dtype is f16
        and not load.inside
        and _in_line(load, axis)
    ]


def _is_stored(s: Any, axis: Any) -> bool:
    """Whether a statement rounds a float32 and stores it in line."""
    if not isinstance(s, l.Store) or not isinstance(s.value, l.Apply) or s.value.fn is not CASTS[f16]:
        return False
    (wide,) = s.value.args
    return isinstance(wide, l.Term) and wide.dtype is f32 and _in_line(s, axis)


def _in_line(x: l.Load | l.Store, axis: Any) -> bool:
    """Whether an access is one further on at the next value of an axis, at places that no data says."""
    places: list[Node] = [e for e in x.index if isinstance(e, Node)]
    if any(isinstance(e, Loaded) for e in topological(places)):
        return False
    return coefficient(flatten(x.index, x.buffer.type.element_strides), axis) == 1
