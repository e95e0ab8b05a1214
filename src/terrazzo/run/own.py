"""Large temporaries with memory of their own, which PyTorch hands on to others as soon as they are through.

An arena is there for a whole call, and what a call gives grows beside it: of a training step the arena is full when the
forward pass is through, and the gradients are there in the end, which is more than there ever is to remember.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from terrazzo.run.arena import padded, placed
from terrazzo.run.plan import Plan, spans

LARGE = 1 << 20
"""Bytes from which on a temporary may have memory of its own: PyTorch rounds what is less up to a part of a block."""
GAIN = 0.02
"""The part of all memory that this must save: each is asked for at every call."""


@dataclass(frozen=True)
class Layout:
    """Where temporaries lie: at `offsets` of an arena of `size` bytes, or, those that are `own`, by themselves."""

    offsets: Mapping[int, int]
    size: int
    own: frozenset[int] = frozenset()


def layout(plan: Plan, apart: bool) -> Layout:
    """Where the temporaries of a plan lie whose steps run one after the other. Large ones lie `apart`, if they may and
    that takes less memory.
    """
    first, last = spans(plan)
    temporary = [k for k, s in enumerate(plan.slots) if s.kind == "arena" and s.within is None]
    whole = Layout({k: plan.slots[k].offset for k in temporary}, plan.arena)
    if not apart or _most(plan, whole, first, last) - _most(plan, None, first, last) < LARGE:
        return whole
    large = frozenset(k for k in temporary if plan.slots[k].bytes >= LARGE and k in first)
    rest = sorted((k for k in temporary if k not in large and k in first), key=lambda k: -plan.slots[k].bytes)

    def meeting(n: int) -> list[int]:
        return [m for m in range(n) if not (last[rest[m]] < first[rest[n]] or last[rest[n]] < first[rest[m]])]

    offsets, size = placed(rest, lambda k: padded(plan.slots[k].bytes), meeting)
    found = Layout(offsets, size, large)
    before, after = (_most(plan, x, first, last) for x in (whole, found))
    return found if after <= (1 - GAIN) * before else whole


def _most(plan: Plan, layout: Layout | None, first: Mapping[int, int], last: Mapping[int, int]) -> int:
    """The most bytes that are in use at a time, the arena included; without a layout, at least."""
    change = [0] * (len(plan.steps) + 2)
    for k, slot in enumerate(plan.slots):
        if slot.kind == "input" or slot.within is not None or (k not in first and slot.kind != "result"):
            continue
        if slot.kind == "arena" and layout is not None and k not in layout.own:
            continue
        change[first.get(k, 0)] += slot.bytes
        if slot.kind != "result" and k not in plan.results:
            change[last[k] + 1] -= slot.bytes
    now, most = layout.size if layout else 0, 0
    for x in change[: len(plan.steps)]:
        now += x
        most = max(most, now)
    return most
