"""Inputs that a call changes in place.

Kernels store new values of inputs where these lie (`ir/in_place.py`), which is as good as a copy of them afterwards
only if nothing else that the call reads lies there too. Of tensors that share memory so, kernels are given copies, and
what these become is copied back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from terrazzo.run.plan import Plan


class Updated:
    """What a plan changes in place, and where that lay in the last call."""

    def __init__(self, plan: Plan) -> None:
        self.inputs = plan.updated
        count = len(plan.results) - len(plan.updated)
        self.results, self.new = plan.results[:count], plan.results[count:]
        self.there = frozenset(k for k in self.new if plan.slots[k].onto in plan.updated)
        stored = {plan.slots[k].onto for k in self.there}
        self.watched = [(k, plan.slots[k].bytes, k in stored) for k in plan.inputs if plan.slots[k].bytes]
        self.known: tuple[list[int], list[int]] = [], []

    def shared(self, tensors: Mapping[int, Any]) -> list[int]:
        """The slots of inputs that share memory with one that kernels store to, or are one and share it with others."""
        if not self.there:
            return []
        places = [tensors[k].data_ptr() for k, _, _ in self.watched]
        known, found = self.known
        if places != known:
            found = self._meeting(places)
            self.known = places, found
        return found

    def _meeting(self, places: Sequence[int]) -> list[int]:
        lying = sorted(
            (place, place + size, k, new) for place, (k, size, new) in zip(places, self.watched, strict=True)
        )
        found: list[int] = []
        group: list[tuple[int, bool]] = []  # what lies in one piece of memory
        end = 0
        for start, last, k, new in [*lying, (1 << 64, 1 << 64, -1, False)]:
            if start >= end:
                found += [x for x, _ in group] if len(group) > 1 and any(n for _, n in group) else []
                group = []
            group.append((k, new))
            end = max(end, last)
        return found

    def finish(self, given: Mapping[int, Any], used: Mapping[int, Any], tensors: Mapping[int, Any]) -> None:
        """Give the inputs that were `given` their new values, where these lie elsewhere: in copies that were `used`
        instead, or in results among `tensors`.
        """
        import torch

        each = list(zip(self.new, self.inputs, strict=True))
        theirs = {id(tensors[old]) for old in self.inputs if old in tensors}  # what is an input may change first
        with torch.no_grad():
            values = [used[old] if k in self.there else tensors[k] for k, old in each]
            shared = [id(x) in theirs and k not in self.there for k, x in zip(self.new, values, strict=True)]
            values = [x.clone() if again else x for x, again in zip(values, shared, strict=True)]
            for old, value in zip(self.inputs, values, strict=True):
                if value is not given[old]:
                    given[old].data.copy_(value)  # who calls says that they were changed
