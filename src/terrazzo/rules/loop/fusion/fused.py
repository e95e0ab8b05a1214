"""What fusion makes of two kernels, and what becomes of no kernel."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

from terrazzo.errors import TerrazzoError
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr
from terrazzo.ir.instances import Instance
from terrazzo.ir.node import per_node, substituted, topological
from terrazzo.rules.loop.fusion.alike import by_axes
from terrazzo.rules.loop.fusion.inline import inline, unproved
from terrazzo.rules.loop.fusion.scale import scale_after, uncast

LARGEST = 600
"""Nodes of a term beyond which nothing more is inlined into it: compilers get slow, and people cannot read it."""
SHRINKS = 4
"""How many times as large as what comes of it what is copied into a term may be: its nodes are folded, and shared."""


def problem(kernels: Iterable[Instance]) -> str:
    """Why kernels are not valid though those they were made of are, or nothing."""
    return next((k.named(why) for k in kernels if (why := unproved([k.form]))), "")


def only_reduced(kernel: l.Kernel, reader: l.Kernel) -> bool:
    """Whether a reader only reduces what a kernel stores."""
    terms = topological(reader.stores)
    uses = [x for x in terms for y in x.children if isinstance(y, l.Load) and y.buffer in kernel.writes]
    return bool(uses) and all(isinstance(x, l.Reduce) for x in uses)


def scanned_last(kernel: l.Kernel) -> l.Kernel:
    """`kernel` with the axis that its scans run along as the last one, which takes their steps. A reader that takes
    what is scanned from the end, as gradients of scans are, goes from the end itself.
    """
    at = {x.at for x in kernel.scans}
    if len(at) != 1:
        return kernel
    stores = kernel.stores
    if turned := {a: a.extent - 1 - a for a in kernel.axes if a.extent - 1 - a in at}:
        stores = substituted(stores, turned)
        at = {*turned}
    axes = sorted(kernel.axes, key=lambda a: a in at)
    return l.Kernel(kernel.name, tuple(axes), stores, kernel.source)


@per_node
def reduces_in_order(kernel: l.Kernel) -> bool:
    """Whether there is a reduction in the steps of a scan, of its terms or of what is made of it, which threads cannot
    share then.
    """
    scans = kernel.scans
    inside = [(s.axis, x) for s in scans for x in topological(s.args)]
    inside += [(s.at, x) for s in scans for x in kernel.terms]
    reduces = [(axis, x) for axis, x in inside if isinstance(x, l.Reduce)]
    return any(axis in x.free and any(a.extent != 1 for a in x.axes) for axis, x in reduces)


@per_node
def scans_again(kernel: l.Kernel) -> bool:
    """Whether a scan is taken at points of an axis that makes no difference to it."""
    axes = {a for a in kernel.axes if a.extent != 1}
    return any(axes - x.free for x in kernel.scans)


def viewed(view: l.Kernel, reader: l.Kernel) -> l.Kernel:
    """A reader of a view that reads what it is a view of."""
    return scale_after(inline(reader, view))


def is_view(value: Any) -> bool:
    """Whether a term only moves, converts or names values."""
    return isinstance(uncast(value), (l.Load, l.Literal, l.Index))


def _depth(store: l.Store) -> int:
    return sum(isinstance(e, Expr) for e in store.index)


def _copied(first: l.Kernel, second: l.Kernel) -> int:
    """Nodes of what `first` stores, once for each place that `second` reads it at, before any are folded."""
    stored = {s.buffer: s.value for s in first.stores}
    found: dict[Any, dict[l.Buffer, Any]] = {}
    for x in second.terms:
        if isinstance(x, l.Load) and x.buffer in stored:
            found.setdefault((x.index, x.inside), {})[x.buffer] = stored[x.buffer]
    return sum(len(topological(values.values())) for values in found.values())


def merged(first: l.Kernel, second: l.Kernel, dead: Set[l.Buffer] = frozenset()) -> l.Kernel | None:
    """One kernel that stores what both store, but for `dead`: `second` may read what `first` stores, through its
    term.
    """
    if _copied(first, second) > SHRINKS * LARGEST:
        return None
    long, short = by_axes(first, second)
    try:
        reader = inline(second, first)
        rename: dict[Any, Any] = dict(zip(short.axes, long.axes, strict=False))
        parts = {first: first.stores, second: reader.stores}
        parts[short] = substituted(parts[short], rename)
        kept = [s for s in (*parts[first], *parts[second]) if s.buffer not in dead]
        stores = sorted(kept, key=_depth)  # outermost first, as the nest has them
        axes = tuple(a for a in long.axes if any(a in s.free for s in stores))
        made = l.Kernel(second.name, axes, tuple(stores), second.source or first.source)
    except TerrazzoError:
        return None
    if not made.scans_in_order or reduces_in_order(made) or scans_again(made) or len(made.terms) > LARGEST:
        return None
    return made
