"""Where a kernel can be changed: its statements, and their indices, terms and conditions; and what two neighbours may
exchange.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from terrazzo.ir.address import evaluate
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr, Loaded, bounds
from terrazzo.ir.node import Node, substitute, topological

Body = tuple[Node, ...]


@dataclass(frozen=True)
class Site:
    """The statement `s`, number `n` of a body of a kernel; `rebuild` is the kernel with another body there."""

    body: Body
    n: int
    rebuild: Callable[[Body], k.Kernel]

    @property
    def s(self) -> Any:
        return self.body[self.n]

    @property
    def after(self) -> Node | None:
        """The next statement of the body."""
        return self.body[self.n + 1] if self.n + 1 < len(self.body) else None

    @property
    def before(self) -> Node | None:
        """The statement before it in the body."""
        return self.body[self.n - 1] if self.n else None

    def put(self, *new: Node, first: int = 0, take: int = 1) -> k.Kernel:
        """The kernel with these in the place of `take` statements, from the one that is `first` after this."""
        start = self.n + first
        return self.rebuild((*self.body[:start], *new, *self.body[start + take :]))

    def but(self, **fields: Any) -> k.Kernel:
        """The kernel with other fields of this statement."""
        return self.put(replace(self.s, **fields))


def sites(kernel: k.Kernel) -> Iterator[Site]:
    """Every statement of a kernel that does something, also in loops, conditions and roles. Of others every mutant that
    may run means the same.
    """
    some = working(kernel)

    def within(body: Body, rebuild: Callable[[Body], k.Kernel]) -> Iterator[Site]:
        for n, s in enumerate(body):
            site = Site(body, n, rebuild)
            if s in some:
                yield site
            if isinstance(s, k.For | k.If | k.Role) and runs(s):
                yield from within(s.body, lambda inner, site=site: site.but(body=inner))  # type: ignore[misc]

    yield from within(kernel.body, lambda body: replace(kernel, body=body))


def runs(s: Node) -> bool:
    """Whether a thread may come to what is inside a statement: the condition of tails that a tile has none of never
    holds.
    """
    return not (isinstance(s, k.If) and any(bounds(e)[1] < 0 for e in s.inside))


def working(kernel: k.Kernel) -> set[Node]:
    """The statements that do something: all but those that compute what nobody reads, or where nobody comes to, and
    what is around nothing else.
    """

    def within(body: Body) -> Iterator[Node]:
        for s in body:
            yield s
            if isinstance(s, k.For | k.If | k.Role) and runs(s):
                yield from within(s.body)

    left = {*within(kernel.body)}
    found: set[Node] = set()
    read: set[Node] = set()
    while new := {s for s in left if _into(s) is None or _into(s) in read}:
        found |= new
        left -= new
        read.update(x for s in new for x in topological(_reads(s)))
    around = (k.For, k.If, k.Role)
    acts = {s for s in found if not isinstance(s, around)}
    return acts | {s for s in found - acts if any(x in acts for x in within(s.body))}


def _into(s: Node) -> Node | None:
    """The register that a statement does nothing but write."""
    match s:
        case k.Let():
            return s.value
        case k.Declare():
            return s.place
        case l.Store() if isinstance(s.buffer, k.Registers):
            return s.buffer
    return None


def _reads(s: Any) -> list[Node]:
    """What a statement is made of, but for what it alone writes, and what is inside."""
    match s:
        case k.Let():
            return [s.term]
        case k.Declare():
            return []
        case l.Store() if isinstance(s.buffer, k.Registers):
            return [s.value, *(e for e in s.index if isinstance(e, Node))]
        case k.For() | k.Role():
            return []
        case k.If():
            return [e for e in s.inside if isinstance(e, Node)]
    return [s]


def indices(site: Site) -> Iterator[tuple[l.Buffer, tuple[IntExpr, ...], Callable[[tuple[IntExpr, ...]], k.Kernel]]]:
    """The places a statement names, the index into each, and the kernel with another index there."""
    s = site.s
    named = [(s.buffer, "index", s.index)] if isinstance(s, l.Store) else []
    named += [(place, at, index) for _, place, at, index in s.places()] if isinstance(s, k.Statement) else []
    for place, at, index in named:
        if isinstance(s, k.TensorLoad | k.TensorStore) and not isinstance(place, k.Shared):
            place = l.Buffer(place.name, s.tensor)
        yield place, index, lambda new, at=at: site.but(**{at: new})  # type: ignore[misc]
    for x, put in (*terms(site, l.Load), *terms(site, k.Remote)):
        yield x.buffer, x.index, lambda new, x=x, put=put: put(replace(x, index=new))  # type: ignore[misc]


def terms(site: Site, kind: type) -> Iterator[tuple[Any, Callable[[Node], k.Kernel]]]:
    """The terms of a kind in a statement, and the kernel with another one there."""
    field = {k.Let: "term", l.Store: "value", k.Atomic: "value"}.get(type(site.s))
    if field:
        whole = getattr(site.s, field)
        for x in topological([whole]):
            if isinstance(x, kind):
                yield x, lambda new, x=x: site.but(**{field: substitute(whole, {x: new})})  # type: ignore[misc]


def conditions(site: Site) -> Iterator[tuple[tuple[IntExpr, ...], Callable[[tuple[IntExpr, ...]], k.Kernel]]]:
    """The conditions of a statement (each an expression >= 0), and the kernel with others there."""
    if isinstance(site.s, k.If):
        yield site.s.inside, lambda new: site.but(inside=new) if new else site.put(*site.s.body)
    if isinstance(site.s, k.AsyncCopy):
        yield site.s.inside, lambda new: site.but(inside=new)
    for x, put in terms(site, l.Load):
        yield x.inside, lambda new, x=x, put=put: put(replace(x, inside=new))  # type: ignore[misc]


def edges(e: IntExpr) -> tuple[int, int]:
    """By how much less a condition e >= 0 begins to fail for more threads and steps, and by how much more it holds for
    more (0: never).
    """
    variables = sorted(e.free, key=lambda v: v.name) if isinstance(e, Expr) else []
    extents = [bounds(v)[1] + 1 for v in variables]
    if any(isinstance(v, Loaded) for v in topological(variables)) or math.prod(extents) > 1 << 20:
        return 1, 1
    axes = np.meshgrid(*map(np.arange, extents), indexing="ij")
    values = np.asarray(evaluate(e, dict(zip(variables, axes, strict=True))))
    holds, fails = values[values >= 0], values[values < 0]
    return int(holds.min()) + 1 if holds.size else 0, int(-fails.max()) if fails.size else 0


ASYNCHRONOUS = {k.AsyncCopy: "cp.async", k.MultiplyAsync: "wgmma", k.TensorStore: "bulk"}


def bare(s: Node) -> Node:
    """A statement without the condition that is around it alone."""
    return bare(s.body[0]) if isinstance(s, k.If) and len(s.body) == 1 else s


def commute(first: Node, second: Node) -> bool:
    """Whether two neighbours mean the same in either order."""
    first, second = bare(first), bare(second)
    for a, b in ((first, second), (second, first)):
        inside = list(k.walk((b,)))
        match a:
            case k.Commit():  # it is about its own kind
                if all(getattr(x, "kind", ASYNCHRONOUS.get(type(x))) != a.kind for x in inside):
                    return True
            case k.Fence() if isinstance(
                b, k.Sync | k.ClusterSync | k.WaitBarrier
            ):  # the thread that goes on has fenced, before or after
                return True
            case k.Expect() if all(isinstance(x, k.TensorLoad | k.For) for x in inside):
                return True  # bytes may come before they are announced
            case k.WaitBarrier() if isinstance(b, k.WaitBarrier):  # two waits, one after the other
                return True
            case k.Arrive() if isinstance(b, k.Arrive):
                return True
        integers = k.changed(tuple(k.walk((a,))))
        plain = all(isinstance(x, k.Declare | k.Let | l.Store | k.Move | k.For | k.If) for x in inside)
        if integers and not integers & {*topological([b])}:
            return True
        if integers:
            continue
        if plain and getattr(a, "kind", "") != "wgmma" and not any(isinstance(x, k.Shared) for x in topological([b])):
            return True  # what a thread does by itself
    return False
