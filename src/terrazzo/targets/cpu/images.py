"""Images: a factor that is read in windows is written once, with its border, and every step reads it somewhere else.

A convolution reads at the point `s * w + d * t` of an image, for column `w` and step `t`. Where the image lies with
zeros around it, the columns of all its rows are one run of memory, and a step is the run that begins a little further
on: no guard is asked in between, and nothing is copied where few rows of the first factor read it. Between rows of the
image the run has points that are no column; what is summed there is not stored. With a stride `s`, points that are `s`
apart lie beside each other, in `s` images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.ir.address import coefficient
from terrazzo.ir.contraction import operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr, Loaded, Var
from terrazzo.ir.node import substitute, topological, transform
from terrazzo.targets.cpu.runs import between, guards, run_of, where_inside, written
from terrazzo.targets.terms import Scope, index


@dataclass(frozen=True)
class Dim:
    """A dimension of an image: its column, the step that moves it (if one does), and how: at `stride * column + by *
    step`. Points `stride` apart are `size` beside each other, in so many `phases`.
    """

    column: Any
    step: Any
    stride: int
    by: int
    size: int
    phases: int

    def shift(self, step: str) -> str:
        """How far a step is from the first one, in points that lie beside each other."""
        return f"{step} * {self.by}" if self.stride == 1 else f"{step} / {self.stride}"


@dataclass(frozen=True)
class Image:
    """Of a factor: the dimensions in which it is read in windows, and the axes of steps along which it is others."""

    factor: Any
    dims: tuple[Dim, ...]
    others: tuple[Any, ...]

    @property
    def points(self) -> tuple[Var, ...]:
        """Axes along the points of each dimension."""
        return tuple(Var(l.fresh_name(), d.size) for d in self.dims)

    @property
    def pitches(self) -> tuple[int, ...]:
        """How far apart neighbours in each dimension are."""
        return tuple(math.prod(d.size for d in self.dims[k + 1 :]) for k in range(len(self.dims)))

    @property
    def columns(self) -> int:
        """How many points the run of all columns has."""
        return 1 + sum((int(d.column.extent) - 1) * p for d, p in zip(self.dims, self.pitches, strict=True))

    @property
    def size(self) -> int:
        """How many numbers the images of all other steps have."""
        each = math.prod(d.size * d.phases for d in self.dims)
        return each * math.prod(int(a.extent) for a in self.others)

    def filling(self, memory: str, scope: Scope, zeros: bool = False) -> list[str]:
        """Writes the factor to memory, at the values that the axes around it have. Where memory is `zeros` but for what
        this wrote at other values of these axes, borders are left alone.
        """
        inner = scope.inner()
        phases = [Var(l.fresh_name(), d.phases) for d in self.dims]
        points = self.points
        at: dict[Any, Any] = {}
        for d, phase, point in zip(self.dims, phases, points, strict=True):
            at[d.column] = point
            if d.step is not None:
                at[d.step] = phase if d.phases > 1 else 0
        factor = transform(substitute(self.factor, at), lambda x: self._within(x, phases, points))
        outer = [*self.others, *(p for p in phases if p.extent != 1), *points[:-1]]
        rows, last = math.prod(int(a.extent) for a in outer), points[-1]
        if zeros and (asked := _border(factor, [*outer, last])):
            return _within_border(factor, asked, outer, last, memory, inner)
        return written(
            factor, outer, [last], ("0", str(rows), "0", str(last.extent)), (memory, str(last.extent), "1"), inner
        )

    def _within(self, x: Any, phases: Sequence[Var], points: Sequence[Var]) -> Any:
        """A load, guarded where an image has points that no column and step reads."""
        beyond = []
        for d, phase, point in zip(self.dims, phases, points, strict=True):
            last = d.stride * (int(d.column.extent) - 1) + (int(d.step.extent) - 1 if d.phases > 1 else 0)
            if d.phases > 1 and isinstance(x, l.Load) and point in x.free:
                beyond.append(last - d.stride * point - phase)
        return l.Load.make(x.buffer, x.index, (*x.inside, *beyond)) if beyond else x

    def steps(self, axes: Sequence[Any], name: str, scope: Scope) -> list[str]:
        """Writes where the run of each step begins, counted along the axes of steps."""
        inner = scope.inner()
        each = math.prod(d.size for d in self.dims)
        parts: list[str] = []
        by = each
        inner.names.update({a: inner.fresh("s") for a in axes})
        for d in reversed(self.dims):
            if d.phases > 1:
                parts.append(f"{inner.names[d.step]} % {d.stride} * {by}")
                by *= d.phases
        for a in reversed(self.others):
            parts.append(f"{inner.names[a]} * {by}")
            by *= int(a.extent)
        for d, p in zip(self.dims, self.pitches, strict=True):
            if d.step is not None:
                parts.append(f"{d.shift(inner.names[d.step])} * {p}")
        lines = [f"int64_t k = 0, *to = {name};"]
        for n, a in enumerate(axes):
            s = inner.names[a]
            lines.append(f"{'  ' * n}for (int64_t {s} = 0; {s} < {a.extent}; {s}++)")
        lines.append(f"{'  ' * len(axes)}to[k++] = {' + '.join(parts) or '0'};")
        return ["{", *("  " + x for x in lines), "}"]


def _border(factor: Any, axes: Sequence[Any]) -> tuple[IntExpr, ...]:
    """What is asked of the axes of an image where its border is 0; nothing where other axes have a part in it."""
    asked = guards([factor], axes[-1]) or ()
    one = operand(factor)
    every = [x for x in topological([e for e in asked if isinstance(e, Expr)]) if isinstance(x, Loaded | Var)]
    return asked if isinstance(one, l.Load) and all(x in axes for x in every) else ()


def _within_border(
    factor: Any, asked: Sequence[IntExpr], outer: Sequence[Any], last: Any, memory: str, scope: Scope
) -> list[str]:
    """Writes a factor where all that is asked holds, in runs along the last axis, whose bounds are the same in all."""
    scope.names.update({a: scope.fresh("i") for a in (*outer, last)})
    heads, row = [], "0"
    for a in outer:
        name = scope.names[a]
        heads.append(f"for (int64_t {name} = 0; {name} < {a.extent}; {name}++) {{")
        row = f"({row}) * {a.extent} + {name}" if row != "0" else name
    rows = [e for e in asked if coefficient(e, last) == 0]
    skipped = [f"if ({' || '.join(f'{index(e, scope)} < 0' for e in rows)}) continue;"] if rows and outer else []
    columns = [e for e in asked if e not in rows or not outer]
    bounds, low, high = between(columns, last, scope, "0", str(last.extent))
    inside = substitute(factor, where_inside([factor], True))
    text = run_of(inside, last, (low, high), lambda at: f"{memory}[({row}) * {last.extent} + {at}]", True, scope)
    lines = [*skipped, *bounds, *text]
    return [*heads, *("  " + x for x in lines), *("}" for _ in heads)]


def image(factor: Any, columns: Sequence[Any], steps: Sequence[Any]) -> Image | None:
    """A factor as images, if it is read in windows: all its columns are dimensions, along which some steps move it."""
    terms = [x for x in topological([factor]) if isinstance(x, l.Term)]
    every = [e for x in terms for e in x.children if isinstance(e, Expr)]
    if any(sum(a in e.free for a in columns) > 1 or sum(a in e.free for a in steps) > 1 for e in every):
        return None
    dims = []
    for column in columns:
        found = {_moved(e, column, steps) for e in every if column in e.free}
        if len(found) != 1 or (way := next(iter(found))) is None:
            return None
        step, stride, by = way
        taps = 1 if step is None else int(step.extent)
        if stride > 1 and by > 1:
            return None
        phases, longest = (min(stride, taps), (taps - 1) // stride) if stride > 1 else (1, by * (taps - 1))
        dims.append(Dim(column, step, stride, by, int(column.extent) + longest, phases))
    moving = {d.step: d.column for d in dims if d.step is not None}
    alone = all(a not in e.free or moving[a] in e.free for e in every for a in moving)
    if not moving or len(moving) < sum(d.step is not None for d in dims) or not alone:
        return None
    return Image(factor, tuple(dims), tuple(a for a in steps if a not in moving))


def _moved(e: Expr, column: Any, steps: Sequence[Any]) -> tuple[Any, int, int] | None:
    """The step that moves an index along a column, with (stride, by) of both, without common factors; None where the
    index is not of that form.
    """
    own = coefficient(e, column)
    if not isinstance(own, int) or own == 0:
        return None
    for step in (a for a in steps if a in e.free):
        by = coefficient(e, step)
        if not isinstance(by, int) or by * own <= 0:
            return None
        common = math.gcd(own, by)
        return step, abs(own) // common, abs(by) // common
    return None, 1, 0
