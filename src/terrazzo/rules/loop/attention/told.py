"""What is known of a mask that lies in memory: where it hides keys whatever its data.

A mask of positions and lengths, say, is stored once and read by every layer. Where positions alone hide a key, a reader
that knows it need not look. One that compares what each row has with what each column has, such as the numbers of their
documents, is made again where it is read: it is as large as the scores, and what it is made of is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.node import topological
from terrazzo.rules.loop.folding.fold import EASY, cheap
from terrazzo.rules.loop.fusion.inline import element, rewrite_loads


def masks(kernels: Sequence[l.Kernel], writers: Mapping[l.Buffer, Any]) -> dict[l.Buffer, l.Kernel]:
    """The buffers that some kernels read of which others store something that places alone hide in part, or what is
    made of tables, with these.
    """
    found = {b: writers[b] for kernel in kernels for b in kernel.reads if isinstance(writers.get(b), l.Kernel)}
    alone = {b: w for b, w in found.items() if w not in kernels and len(w.stores) == 1}
    return {b: w for b, w in alone.items() if _seen(w.stores[0].value) or of_tables(w.stores[0].value)}


def masks_told(kernel: l.Kernel, known: Mapping[l.Buffer, l.Kernel]) -> l.Kernel:
    """`kernel` with every load of such a buffer said to be -inf, or false, where places alone hide it; or with the term
    of it, where that is made of tables that do not know both of the last axes.
    """
    if known.keys().isdisjoint(kernel.reads):
        return kernel
    last = {*kernel.axes[-2:]}

    def replace(load: l.Load) -> Any:
        if load.buffer not in known or load.inside:
            return load
        made = element(known[load.buffer].stores[0], load.index)
        if of_tables(made) and not any(last <= y.free for y in topological([made]) if isinstance(y, l.Load)):
            return made
        if not (parts := _seen(made)):
            return load
        seen = both(parts)
        if load.dtype.kind == "bool":
            return both([seen, load])
        return l.apply("where", seen, load, l.Literal(-math.inf, load.dtype))

    stores = tuple(l.Store(s.buffer, s.index, rewrite_loads(s.value, replace)) for s in kernel.stores)
    return l.Kernel(kernel.name, kernel.axes, stores, kernel.source)


TABLES = 4
"""Tables that a mask may be made of."""


def of_tables(x: Any) -> bool:
    """Whether a term is a few easy operations on whole numbers, or what is true, of a few tables."""
    parts = topological([x])
    loads = [y for y in parts if isinstance(y, l.Load)]
    work = [y.fn for y in parts if isinstance(y, l.Apply) and not is_cast(y.fn)]
    bare = not any(isinstance(y, l.Reduce | l.Scan | l.Get) for y in parts)
    known = not any(y.dtype.is_float or y.inside for y in loads)
    return bare and known and 0 < len(loads) <= TABLES and all(f.name in EASY for f in work)


def easy(x: Any) -> bool:
    """Whether a predicate is made of places, or of tables."""
    return cheap(x) or of_tables(x)


def _seen(x: Any) -> list[Any]:
    """The predicates of places that hold where a term is true, or no -inf."""
    return conjuncts(x) if x.dtype.kind == "bool" else _needed(x)


def _needed(x: Any) -> list[Any]:
    """The predicates of places without which a term is -inf."""
    if not isinstance(x, l.Apply):
        return []
    if is_cast(x.fn) and x.dtype.is_float:
        return _needed(x.args[0])
    if x.fn.name == "where" and isinstance(x.args[2], l.Literal) and x.args[2].value == -math.inf:
        return [*conjuncts(x.args[0]), *_needed(x.args[1])]
    return []


def conjuncts(x: Any) -> list[Any]:
    """The parts of a predicate, all of which must hold, that are made of places alone."""
    return [y for y in every(x) if isinstance(y, l.Apply) and cheap(y)]


def every(x: Any) -> list[Any]:
    """The parts of a predicate, all of which must hold."""
    if isinstance(x, l.Apply) and x.fn.name == "and_":
        return [y for a in x.args for y in every(a)]
    return [x]


def both(parts: Sequence[Any]) -> Any:
    """Whether all of some predicates hold."""
    return reduce(lambda a, b: l.apply("and_", a, b), parts)
