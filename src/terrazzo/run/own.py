"""Large temporaries with memory of their own, which PyTorch hands on to others as soon as they are through.

An arena is there for a whole call, and what a call gives grows beside it: of a training step the arena is full when the
forward pass is through, and the gradients are there in the end, which is more than there ever is to remember.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from terrazzo.run.arena import placed
from terrazzo.run.plan import Plan, held, pieces, spans, views_in
from terrazzo.run.taken import adopted, roots

LARGE = 1 << 20
"""Bytes from which on a temporary may have memory of its own: PyTorch rounds what is less up to a part of a block."""
LESS, MUCH = 1 << 17, 0.05
"""Bytes from which on it has where that saves so much more: many that are not large may be as much together."""
BESIDE = "aten.convolution"
"""What ops are called that may need memory beside their operands and results, and only the library knows how much: what
else is in use then is to be little.
"""
GAIN = 0.02
"""The part of all memory that this must save: each is asked for at every call."""


@dataclass(frozen=True)
class Layout:
    """Where temporaries lie: at `offsets` of an arena of `size` bytes, or, those that are `own`, by themselves; all
    others in the results that the plan names.
    """

    offsets: Mapping[int, int]
    size: int
    own: frozenset[int] = frozenset()

    @property
    def moved(self) -> frozenset[int]:
        """The temporaries that lie in no result."""
        return self.own.union(self.offsets)


def layout(plan: Plan, apart: bool) -> Layout:
    """Where the temporaries of a plan lie. Where its steps run one after the other, they may lie `apart` if that takes
    less memory: in an arena of which branches share more than if they ran side by side; or large ones by themselves,
    those of the arena, or also those that lie in results, which are not there so early then.
    """
    root = roots(plan.slots)
    temporary = [k for k, s in enumerate(plan.slots) if s.kind == "arena" and k not in root]
    mine = [k for k in temporary if plan.slots[k].within is None]
    whole = Layout({k: plan.slots[k].offset for k in mine}, plan.arena)
    if apart and plan.branches > 1:
        whole = min(whole, _apart(plan, mine, math.inf), key=lambda x: x.size)
    if not apart:
        return whole
    before = _most(plan, whole)
    found = whole
    saves = before - _most(plan, Layout({}, 0, frozenset(temporary))) >= LARGE
    for size, gain in ((LARGE, GAIN), (LESS, MUCH)) if saves else ():
        least = min((_apart(plan, some, size) for some in (mine, temporary)), key=lambda x: _most(plan, x))
        if _most(plan, least) <= _most(plan, found) - gain * before:
            found = least
    if calls := [n for n, s in enumerate(plan.steps) if s.name.startswith(BESIDE)]:

        def beside(x: Layout) -> int:
            used = _used(plan, x)
            return sum(used[n] for n in calls)

        least = min((_apart(plan, some, LARGE) for some in (mine, temporary)), key=beside)
        if beside(least) <= (1 - GAIN) * beside(found) and _most(plan, least) <= (1 + GAIN) * _most(plan, found):
            found = least
    return found


def _apart(plan: Plan, temporary: Sequence[int], size: float) -> Layout:
    """Of these temporaries those of so many bytes by themselves, the others in an arena."""
    first, last = spans(plan)
    used = [k for k in temporary if k in first]
    large = frozenset(k for k in used if plan.slots[k].bytes >= size)
    rest = sorted((k for k in used if k not in large), key=lambda k: -plan.slots[k].bytes)

    def meeting(n: int) -> list[int]:
        return [m for m in range(n) if not (last[rest[m]] < first[rest[n]] or last[rest[n]] < first[rest[m]])]

    offsets, end = placed(rest, pieces(plan, first, last).__getitem__, meeting)
    return Layout(offsets, end, large)


def _most(plan: Plan, layout: Layout) -> int:
    """The most bytes that are in use at a time, the arena included."""
    return max(_used(plan, layout), default=layout.size)


def _used(plan: Plan, layout: Layout) -> list[int]:
    """How many bytes are in use in each step, the arena included."""
    begin, end = _changes(plan, layout)
    return list(accumulate(x - y for x, y in zip(begin, [0, *end], strict=False)))


def _changes(plan: Plan, layout: Layout) -> tuple[list[int], list[int]]:
    """How many bytes each step begins to use, the first one those of the arena and of what is donated, and how many are
    free after it.
    """
    first, last = spans(plan, layout.moved)
    views, root, there = set[int](), roots(plan.slots), held(plan)
    for k, of in sorted(views_in(plan).items(), key=lambda x: -last[x[0]]):  # views of views first
        of = root.get(of, of)
        if plan.slots[of].kind != "arena" or of in layout.own or k in there:
            views.add(k)
            last[of] = max(last[of], last[k])
    theirs = adopted(plan.slots)
    begin, end = [0] * len(plan.steps), [0] * len(plan.steps)
    for k, slot in enumerate(plan.slots if plan.steps else ()):
        if slot.donated and k in last:
            begin[0] += slot.bytes
            end[last[k]] += slot.bytes
        if slot.kind == "input" or (slot.kind == "arena" and k not in layout.own) or k in views:
            continue
        if (k not in first and slot.kind != "result") or k in root or k in theirs:
            continue
        begin[first.get(k, 0)] += slot.bytes
        if slot.kind != "result" and k not in plan.results and k not in theirs.values():
            end[last[k]] += slot.bytes
    if begin:
        begin[0] += layout.size
    return begin, end


def runs(plan: Plan, layout: Layout) -> list[list[int]]:
    """The steps in groups that may be launched at once: all that a group makes is there when it begins, and what is
    free after one of its steps only when it ends, as far as that takes no more memory than the steps by themselves.
    Calls of PyTorch are alone.
    """
    begin, _ = _changes(plan, layout)
    used = _used(plan, layout)
    room = max(used, default=0)
    room += max(LARGE, int(GAIN / 2 * room))
    found: list[list[int]] = []
    there = 0
    for n, step in enumerate(plan.steps):
        joins = bool(found) and step.key and plan.steps[n - 1].key and there + begin[n] <= room
        if joins:
            found[-1].append(n)
            there += begin[n]
        else:
            found.append([n])
            there = used[n]
    return found
