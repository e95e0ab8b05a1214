"""Sums of products that are wanted only where a condition says that others will not do.

`where(sure, f(fast), plain)`: tensor cores compute `fast`, and `sure`, which is made of it, nearly always holds. So
nobody multiplies for `plain` before it is known whether that is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from terrazzo.ir.contraction import contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import Node, per_node, substitute, topological


@dataclass(frozen=True)
class Rescue:
    """The sums `of` a contraction are `whole` if they will do: `fast` is made of them where they are `sure`, and
    elsewhere the sums of `plain` stand in its place.
    """

    whole: l.Apply
    of: l.Reduce

    @property
    def sure(self) -> Node:
        return self.whole.args[0]

    @property
    def fast(self) -> Node:
        return self.whole.args[1]

    @property
    def plain(self) -> l.Reduce:
        found = self.whole.args[2]
        assert isinstance(found, l.Reduce)
        return found


@per_node
def rescues(kernel: l.Kernel) -> Mapping[l.Reduce, Rescue]:
    """Those of a kernel, by the sums that are rarely wanted."""
    if not any(isinstance(x, l.Apply) and x.fn.name == "where" for x in kernel.terms):
        return {}
    sums = [x for x in kernel.carried if isinstance(x, l.Reduce) and contraction(x) is not None]
    found: dict[l.Reduce, Rescue] = {}
    for plain in sums if len(sums) > 1 else ():
        users = [x for x in (*kernel.terms, *kernel.stores) if plain in x.children]
        match users:
            case [l.Apply(fn=fn, args=(sure, fast, last)) as whole] if fn.name == "where" and last is plain:
                inside = topological([sure])
                of = [x for x in sums if x in inside and x in topological([fast])]
                elsewhere = topological(kernel.stores, stop=lambda x: x is whole)
                alike = len(of) == 1 and (of[0].axes, of[0].free) == (plain.axes, plain.free)
                if alike and of[0] not in elsewhere and whole.free == plain.free:
                    found[plain] = Rescue(whole, of[0])
    return found


@per_node
def settled(kernel: l.Kernel) -> l.Kernel:
    """A kernel whose sums are what they are to be: they will do, or others were put in their place."""
    known = {x.whole: x.of for x in rescues(kernel).values()}
    stores = tuple(substitute(s, known) for s in kernel.stores)
    return l.Kernel(kernel.name, kernel.axes, stores, kernel.source) if known else kernel
