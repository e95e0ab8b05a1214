"""Why a plan that was read back is none for a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.tensor import Opaque
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.in_place import given_variant
from terrazzo.ir.node import topological
from terrazzo.ir.regions import ALIGNED, Piece
from terrazzo.ir.types import Type
from terrazzo.run.arena import ALIGN
from terrazzo.run.branches import Ahead
from terrazzo.run.plan import (
    Plan,
    Slot,
    as_rooted,
    held,
    made_by_calls,
    mentioned,
    pieces,
    places_in,
    uses,
    whole_strides,
)
from terrazzo.run.taken import adopted, misplaced, roots, updated


def misfit(plan: Plan, program: Any, once: Plan | None = None) -> str:
    """Why a plan that was read back is none for this program, in any IR; "" if all that can be compared agrees. The
    results of what is computed `once` are its last inputs.
    """
    whole = getattr(program, "loop", program)
    wanted = [(b.name, *_kind(b.type), whole_strides(b.type)) for b in whole.inputs]
    if once is not None:
        taken = [_described(once.slots[k]) for k in once.inputs]
        if any(x not in wanted for x in taken):
            return "what is computed once has other inputs"
        if why := _odd(once, whole):
            return why
        wanted += [_described(once.slots[k]) for k in once.results]
    if [_described(plan.slots[k]) for k in plan.inputs] != wanted:
        return "its inputs are others"
    if [_described(plan.slots[k])[1:3] for k in plan.results] != [_kind(r.type) for r in whole.results]:
        return "its results are others"
    return _odd(plan, whole)


def _odd(plan: Plan, whole: Any) -> str:
    """What a plan does that one of this program would not do."""
    if stray := {s.name for s in plan.steps if not s.key} - _operators(whole):
        return f"it calls {min(stray)}"
    if stray := {s.name for s in plan.steps if s.told and not given_variant(s.name)}:
        return f"{min(stray)} cannot be told where to write"
    called = made_by_calls(plan)
    inputs, ends = frozenset(plan.inputs), frozenset(plan.results)
    for k, slot in enumerate(plan.slots):
        kind = "input" if k in inputs else "result" if k in ends else "call" if k in called else "arena"
        hidden = slot.within is not None and (kind != "arena" or plan.slots[slot.within].kind != "result")
        begins = ALIGN if slot.of is None else ALIGNED
        if slot.kind != kind or slot.offset % begins or hidden:
            return f"{slot.name} lies elsewhere"
    return shared(plan)


def _described(s: Slot) -> tuple[str, str, tuple[int, ...], tuple[int, ...]]:
    return s.name, s.dtype, s.shape, s.strides


def _kind(ty: Type) -> tuple[str, tuple[int, ...]]:
    return ty.dtype.name, ty.static_shape


def _operators(program: Any) -> set[str]:
    """The operators of PyTorch that a program names."""
    if hasattr(program, "steps"):
        return {s.name for s in program.steps if isinstance(s, l.Call)}
    return {n.name for n in topological(program.results) if isinstance(n, Aten | Opaque)}


def shared(plan: Plan) -> str:
    """Which tensors of a plan share memory while both are in use; "" if none do."""
    first, last = uses(plan)
    root = roots(plan.slots)
    for k in misplaced(plan, first, last):
        return f"{plan.slots[k].name} lies in the memory of something else"
    if plan.branches > 1 and (why := _side_by_side(plan, first)):
        return why
    as_rooted(plan, first, last)
    placed: dict[int | None, list[int]] = {}
    for k, s in enumerate(plan.slots):
        if k in first and s.bytes and s.kind == "arena" and k not in root:
            placed.setdefault(s.within, []).append(k)
    theirs = adopted(plan.slots) | updated(plan.slots)
    lives = pieces(plan, first, last)
    for place, slots in placed.items():
        if place in theirs:
            return f"{plan.slots[place].name} is what was there before, and has room for nothing else"
        live: list[int] = []  # those that are still used
        for a in sorted(slots, key=first.__getitem__):
            mine = [p.at(plan.slots[a].offset) for p in lives[a]]
            if place is not None and _meet(mine, [replace(p, last=len(plan.steps)) for p in lives[place]]):
                return f"{plan.slots[a].name} and {plan.slots[place].name} share memory"
            live = [b for b in live if last[b] >= first[a]]
            if shares := [b for b in live if _meet(mine, [p.at(plan.slots[b].offset) for p in lives[b]])]:
                return f"{plan.slots[shares[0]].name} and {plan.slots[a].name} share memory"
            live.append(a)
    return ""


def _meet(mine: Sequence[Piece], theirs: Sequence[Piece]) -> bool:
    """Whether some pieces of memory are in use together with others and overlap them."""
    return any(p.beside(q) and p.start < q.end and q.start < p.end for p in mine for q in theirs)


def _side_by_side(plan: Plan, begin: Mapping[int, int]) -> str:
    """Which tensors of a plan may be used before they are there, or share memory while both are in use; "" if none."""
    users: dict[int, list[int]] = {}
    first = dict(begin)
    for n, s in enumerate(plan.steps):
        for k in mentioned(s):
            of = plan.slots[k].of
            users.setdefault(k if of is None else of, []).append(n)
    ahead = Ahead(places_in(plan, range(len(plan.steps))))
    for k, steps in users.items():
        if plan.slots[k].kind != "input" and not all(ahead(steps[:1], n) for n in steps[1:] if n != steps[0]):
            return f"{plan.slots[k].name} is used before it is there"
        onto = plan.slots[k].onto
        if onto is not None and not ahead([n for n in users.get(onto, ()) if n != steps[0]], steps[0]):
            return f"{plan.slots[k].name} and {plan.slots[onto].name} share memory"
    root = roots(plan.slots)
    for k, r in (root | held(plan)).items():
        users[r] = sorted({*users.get(r, ()), *users.get(k, ())})  # those of regions are counted already
        first[r] = min(first.get(r, first[k]), first[k])
    there = [k for k in first if plan.slots[k].kind == "arena" and k not in root]
    lying = sorted((plan.slots[k].within or -1, plan.slots[k].offset, k) for k in there)
    for n, (place, offset, a) in enumerate(lying):
        for other, begins, b in lying[n + 1 :]:
            if other != place or begins >= offset + plan.slots[a].bytes:
                break
            if not ahead(users[a], first[b]) and not ahead(users[b], first[a]):
                return f"{plan.slots[a].name} and {plan.slots[b].name} share memory"
        if place >= 0 and place in first and not ahead(users[a], first[place]):
            return f"{plan.slots[a].name} and {plan.slots[place].name} share memory"
    return ""
