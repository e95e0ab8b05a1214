"""Memory that is taken over: tensors of a plan that lie in one place, one after the other (`ir/in_place.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.in_place import in_place_variant

if TYPE_CHECKING:
    from terrazzo.run.plan import Plan, Slot, Step

T = TypeVar("T")


def roots(slots: Sequence[Slot]) -> dict[int, int]:
    """Of slots that lie in the memory of others, or others in theirs, the one that has a place: what they are a region
    of; or the last if it is a result, else the first, which has nothing here.
    """
    given = adopted(slots)
    onto = {k: s.onto for k, s in enumerate(slots) if s.onto is not None and k not in given}
    regions = {k: s.of for k, s in enumerate(slots) if s.of is not None}
    placed = updated(slots)
    return _rooted(onto, {k for k, s in enumerate(slots) if s.kind == "result" and k not in placed}) | regions


def updated(slots: Sequence[Slot]) -> dict[int, int]:
    """Results that lie in the memory of inputs, whose new values they are, with these."""
    onto = ((k, s.onto) for k, s in enumerate(slots) if s.onto is not None)
    return {k: old for k, old in onto if slots[old].kind == "input"}


def adopted(slots: Sequence[Slot]) -> dict[int, int]:
    """Results that are what ops of PyTorch made, with that: each begins as a tensor that is there, and no other."""
    onto = ((k, s.onto) for k, s in enumerate(slots) if s.onto is not None and s.kind == "result")
    return {k: old for k, old in onto if slots[old].kind == "call"}


def rooted(
    taken: Mapping[l.Buffer, l.Buffer],
    results: Collection[l.Buffer],
    called: Collection[l.Buffer],
    inputs: Collection[l.Buffer] = (),
) -> dict[l.Buffer, l.Buffer]:
    """The same of buffers, of which some are what ops of PyTorch made, and some are inputs."""
    own = [b for b in results if taken.get(b) not in inputs]
    return _rooted({b: old for b, old in taken.items() if b not in results or old not in called}, own)


def _rooted(onto: Mapping[T, T], results: Collection[T]) -> dict[T, T]:
    after = {old: k for k, old in onto.items()}
    found: dict[T, T] = {}
    for k in (k for k in after if k not in onto):
        chain = [k]
        while chain[-1] in after:
            chain.append(after[chain[-1]])
        root = chain[-1] if chain[-1] in results else k
        found |= {x: root for x in chain if x != root}
    return found


def misplaced(plan: Plan, first: Mapping[int, int], last: Mapping[int, int]) -> Iterator[int]:
    """Slots that lie in the memory of another one and may not: they may if a kernel writes them, or an op of PyTorch
    that works there, which is the last to use that; in that of an input, if they are its new value.
    """
    slots, root = plan.slots, roots(plan.slots)
    takers = Counter(s.onto for s in slots)
    for k, one in enumerate(slots):
        if (old := one.onto) is None:
            continue
        other = slots[old]
        like = (one.dtype, one.bytes) == (other.dtype, other.bytes)
        kinds = one.kind in ("arena", "result") and other.kind in ("arena", "call")
        theirs = other.kind == "call" and slots[root.get(old, old)].kind == "result"
        same = (one.shape, one.strides) == (other.shape, other.strides) or (one.kind, other.kind) != ("result", "call")
        alone = k != old and takers[old] == 1
        fits = like and same and kinds and alone and not theirs and k in first and first[k] == last.get(old)
        if other.kind == "input":
            fits = like and alone and _renews(plan, k, old) and last.get(old, -1) <= first.get(k, -1)
        if not fits or not (plan.steps[first[k]].key or works_on(plan.steps[first[k]]) == old):
            yield k


def works_on(step: Step) -> int | None:
    """The slot of the operand that an op of PyTorch may write its result to; None where there is none."""
    first = step.args[0] if step.args and not step.key and in_place_variant(step.name) else None
    return first["slot"] if isinstance(first, dict) and set(first) == {"slot"} else None


def _renews(plan: Plan, k: int, old: int) -> bool:
    """Whether a result is the new value of an input, and nothing else; and neither is given back."""
    slots, results = plan.slots, plan.results
    new = dict(zip(plan.updated, results[len(results) - len(plan.updated) :], strict=True))
    same = (slots[k].shape, slots[k].strides) == (slots[old].shape, slots[old].strides)
    return same and new.get(old) == k and results.count(k) == 1 and old not in results
