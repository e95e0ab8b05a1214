"""What stands in the bodies of loops, asked of a kernel's nest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from terrazzo.ir import nest as n
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import topological


def abreast(body: Sequence[n.Statement], axis: Any) -> bool:
    """Whether some reduction inside depends on an axis, and none has loops of its own or goes along one in order."""
    every = [s for s in body if isinstance(s, n.Loop)]
    reduces = [s for s in every if s.kind == "reduce"]
    if any(s.kind == "scan" or isinstance(x, n.Loop) for s in every for x in s.body if s.kind != "free"):
        return False
    inside = [s for s in every if s.kind == "free"]
    return all(axis in r.free for s in reduces for r in s.carried) and (
        (bool(reduces) and all(abreast(s.body, axis) or not loops(s.body) for s in inside))
        or (bool(inside) and all(abreast(s.body, axis) for s in inside))
    )


def chain(s: n.Loop, left: Callable[[Sequence[n.Statement]], list[n.Statement]]) -> list[n.Loop]:
    """Loops of which each is all that is in the one around it, but for terms; none where they are not."""
    found = [s]
    while inside := [x for x in left(found[-1].body) if isinstance(x, n.Loop)]:
        if len(inside) > 1 or any(isinstance(x, l.Store) for x in found[-1].body):
            return []
        found += inside
    plain = all(x.kind == "free" and not any(isinstance(y, n.Accumulate) for y in x.body) for x in found)
    return found if plain else []


def loops(body: Sequence[n.Statement]) -> bool:
    """Whether there are loops."""
    return any(isinstance(s, n.Loop) for s in body)


def used(body: Sequence[n.Statement]) -> set[Any]:
    """All terms that statements are made of."""
    terms: list[Any] = []
    for s in body:
        match s:
            case n.Let():
                terms.append(s.term)
            case n.Accumulate():
                terms += s.args
            case l.Store():
                terms.append(s)
            case n.Loop():
                terms += used(s.body)
    return set(topological(terms))


def stores(body: Sequence[n.Statement]) -> list[l.Store]:
    """The stores, those in loops last."""
    inside = [x for s in body if isinstance(s, n.Loop) for x in stores(s.body)]
    return [*(s for s in body if isinstance(s, l.Store)), *inside]


def only(s: n.Loop, wanted: Sequence[l.Store]) -> n.Loop:
    """A loop with some of the stores in it, and what these need."""
    needed = set(topological(wanted))

    def some(body: Sequence[n.Statement]) -> tuple[n.Statement, ...]:
        found: list[n.Statement] = []
        for x in body:
            if isinstance(x, n.Loop) and not x.carried:
                inside = some(x.body)
                found += [replace(x, body=inside)] if stores(inside) else []
            elif x in wanted if isinstance(x, l.Store) else needed & set(computes(x)):
                found.append(x)
        return tuple(found)

    return replace(s, body=some(s.body))


def computes(x: n.Let | n.Accumulate | n.Loop) -> Sequence[Any]:
    """The terms that a statement gives a value."""
    return x.carried if isinstance(x, n.Loop) else (x.term,) if isinstance(x, n.Let) else (x.into,)


def flat(kernel: l.Kernel) -> tuple[tuple[Any, ...], tuple[n.Statement, ...]] | str:
    """The free axes of a kernel that is one nest of loops around reductions, and its statements; or why it is not."""
    axes: list[Any] = []
    found: list[n.Statement] = []
    body: Sequence[n.Statement] = n.nest(kernel)
    while free := [x for x in body if isinstance(x, n.Loop) and x.kind == "free"]:
        rest = [x for x in body if x is not free[0]]
        if len(free) > 1 or any(isinstance(x, l.Store) for x in rest):
            return "points take steps together where all stores are at every point"
        found += rest
        axes += free[0].axes
        body = free[0].body
    found += body
    inside = [x for x in found if isinstance(x, n.Loop)]
    if any(x.kind == "scan" or loops(x.body) for x in inside):
        return "points take the steps of reductions together, of which none is in another"
    return tuple(axes), tuple(found)
