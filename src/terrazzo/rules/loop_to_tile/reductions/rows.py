"""What a kernel of reductions is made of: its rows, what lies inside them, and the reductions that threads share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from terrazzo.ir import nest as n
from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, Mod
from terrazzo.ir.node import topological
from terrazzo.rules.loop_to_tile.walked.collapse import merge_axes
from terrazzo.rules.loop_to_tile.walked.threads import WARP, ordered, size_of, step


def parts(kernel: l.Kernel) -> tuple[list[Any], list[Any], list[l.Reduce]]:
    """The axes of rows, those inside them, and the reductions that threads share: others lie in loops that threads
    share, so each thread computes its own.
    """
    top = _outermost(kernel)
    rows = _rows(kernel, top)
    top = [r for r in top if r.free <= frozenset(rows)]
    one_by_one = ordered(kernel)
    rest = [a for a in kernel.axes if a not in one_by_one]
    return [a for a in rest if a in rows], [a for a in rest if a not in rows], top


def column_of(rows: Sequence[Any], top: Sequence[l.Reduce]) -> Any:
    """The axis of rows along which memory runs, by most of what reductions read in their steps; None where it runs
    along these.
    """
    along = sum(bytes_of(x) for r in top for x in loaded([r]) if step(x, r.axes[-1]) == 1)
    read = [x for x in loaded(top) if not x.free <= frozenset(rows)]  # not once for a row
    found = {a: sum(bytes_of(x) for x in read if step(x, a) == 1) for a in rows}
    best = max(rows, key=lambda a: found[a], default=None)
    return best if best is not None and found[best] > along else None


def read_alike(rows: Sequence[Any], top: Sequence[l.Reduce]) -> Any:
    """The innermost axis of rows whose points all read the same in the steps of their reductions, as where each element
    of a row is compared with all others: lanes that had points of it would load one element for all of them. None
    where it has fewer points than a warp has lanes.
    """
    read = [x for x in loaded(top) if not x.free <= frozenset(rows)]
    found = [a for a in rows if size_of(a) >= WARP and all(a not in x.free for x in read)]
    return found[-1] if read and found else None


def column(kernel: l.Kernel) -> Any:
    """The axis of rows of a kernel that lanes would take as columns; None where there is none."""
    outer, _, top = parts(kernel)
    return column_of(outer, top)


def loaded(reduces: Sequence[l.Reduce]) -> list[l.Load]:
    """What reductions read."""
    return [x for x in topological(leaves(reduces)) if isinstance(x, l.Load)]


def bytes_of(load: l.Load) -> int:
    """How much of memory a load reads."""
    points = math.prod(size_of(a) for a in load.free)
    return int(load.dtype.size * min(points, math.prod(load.buffer.type.static_shape)))


def flattened(kernel: l.Kernel) -> l.Kernel:
    """`kernel` with what lies inside a row as one axis, so that threads divide all of it; and with its rows as one axis
    that runs as memory does, where lanes take them as columns, or where they lie one after the other in all of it.
    """
    rows, inner, top = parts(kernel)
    found = merge_axes(kernel, sorted(inner, key=lambda a: -_far(kernel.stores, a))) if top else kernel
    if column_of(rows, top) is None:
        return merge_axes(found, rows) if top and in_line(found, rows) else found
    return merge_axes(found, sorted(rows, key=lambda a: -_far(sorted(loaded(top), key=bytes_of, reverse=True), a)))


def in_line(kernel: l.Kernel, rows: Sequence[Any]) -> bool:
    """Whether each row lies behind the one before it, whichever axis counts them, in all that is read and stored of
    several rows, and nothing else is made of their numbers.
    """
    for x in topological(kernel.stores):
        if isinstance(x, l.Index) and x.free & frozenset(rows):
            return False
        if isinstance(x, l.Load | l.Store) and x.free & frozenset(rows):
            if isinstance(x, l.Load) and x.inside:
                return False
            place = flatten(x.index, x.buffer.type.element_strides)
            far = [d for a in rows if isinstance(d := coefficient(place, a), int)]
            inner = [d * size_of(a) for d, a in zip(far, rows, strict=False)]
            if len(far) < len(rows) or far[:-1] != inner[1:]:
                return False
    return True


def _far(accesses: Sequence[Any], axis: Any) -> int:
    """The step of an axis in the first access that goes along it."""
    return next((abs(d) for x in accesses if axis in x.free and (d := step(x, axis)) is not None), 0)


def _rows(kernel: l.Kernel, top: Sequence[l.Reduce]) -> list[Any]:
    """The axes around all of the outermost reductions: those they depend on, and the loops around these."""
    last = max((k for k, a in enumerate(kernel.axes) if all(a in r.free for r in top)), default=-1)
    return list(kernel.axes[: last + 1])


def _outermost(kernel: l.Kernel) -> list[l.Reduce]:
    """Reductions that are in no other one."""
    return [r for s in reducing(n.nest(kernel)) for r in s.carried if isinstance(r, l.Reduce)]


def reducing(body: Sequence[n.Statement]) -> Iterator[n.Loop]:
    """The loops of reductions that are in no other one. One loop may carry several."""
    for s in body:
        if isinstance(s, n.Loop) and s.kind == "reduce":
            yield s
        elif isinstance(s, n.Loop):
            yield from reducing(s.body)


def leaves(reduces: Sequence[l.Reduce]) -> list[Any]:
    """What reductions combine."""
    return [a for r in reduces for a in r.args]


def run(r: l.Reduce) -> int:
    """How many elements of a row lie side by side: those of a window are rows of an image."""
    places = [flatten(x.index, x.buffer.type.element_strides) for x in loaded([r])]
    digits = [e for e in topological([p for p in places if isinstance(p, Expr)]) if isinstance(e, Mod)]
    return min((e.b for e in digits if e.a == r.axes[-1] and isinstance(e.b, int)), default=size_of(r.axes[-1]))
