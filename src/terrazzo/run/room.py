"""Room on processors for kernels that are launched while the one before them still runs (ADR 014).

Their blocks wait where there is room. What finds none comes to the processors that are through first, and piles up
there while others idle: of 512 blocks of a softmax on 132 processors 7 landed on one and none on 29. Shared memory is
what a launch can ask for to prevent it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

RESERVED = 1 << 10
"""Bytes of shared memory that a block takes beyond its own."""
FEW = 8
"""Blocks on a processor up to which one more makes it late: of many, each is a small part of its work."""

Launched = tuple[int, int, int]
"""For how many blocks of a kernel a processor has slots, how many there are, and bytes of shared memory of each."""


def asked(kernels: Sequence[Launched], processors: int, largest: int) -> tuple[list[int], bool]:
    """Bytes of shared memory that blocks of kernels ask for which are launched early, one after the other, and whether
    processors are divided for shared memory.

    What a kernel without shared memory would ask for is its cache, in which its threads share what they read. But that
    is gone where they are divided so; and after a kernel that fills shared memory its blocks come to where that one has
    few: 512 that add up the sums of 256 others came to 48 of 132 processors, 11 to some.
    """
    found = [even(*x, processors, largest) if x[2] else 0 for x in kernels]
    both = [(b, *x) for b, x in zip(found, kernels, strict=True)]
    if not crowded([(slots if b == own else -(-blocks // processors), b) for b, slots, blocks, own in both], largest):
        return found, False
    for n, (before, kernel) in enumerate(pairwise(kernels), 1):
        if before[2] and not kernel[2]:
            found[n] = even(*kernel, processors, largest)
    return found, True


def even(slots: int, blocks: int, shared: int, processors: int, largest: int) -> int:
    """Bytes of shared memory for each of so many blocks, which uses `shared` of the `largest` that it may have; a
    processor has `slots` for them. Of few blocks it takes an even share at most.
    """
    share = -(-blocks // processors)
    if share >= slots or share > FEW:
        return shared
    return max(shared, ((largest + RESERVED) // share - RESERVED) // 128 * 128)


def crowded(kernels: Iterable[tuple[int, int]], largest: int) -> bool:
    """Whether one of the kernels, of so many slots and bytes each, fills more than half of what can be shared memory. A
    processor divides it anew between that and its cache only when it is idle, so no kernel that wants it divided
    otherwise comes to where this one is.
    """
    return any(slots * (shared + RESERVED) > largest // 2 for slots, shared in kernels)
