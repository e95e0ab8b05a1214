"""Room on processors for kernels that are launched while the one before them still runs (ADR 014).

Their blocks wait where there is room. What finds none comes to the processors that are through first, and piles up
there while others idle: of 512 blocks of a softmax on 132 processors 7 landed on one and none on 29. Shared memory is
what a launch can ask for to prevent it.
"""

from __future__ import annotations

from collections.abc import Iterable

RESERVED = 1 << 10
"""Bytes of shared memory that a block takes beyond its own."""
FEW = 8
"""Blocks on a processor up to which one more makes it late: of many, each is a small part of its work."""


def even(slots: int, blocks: int, processors: int, shared: int, largest: int) -> int:
    """Bytes of shared memory for each of so many blocks, which uses `shared` of the `largest` that it may have; a
    processor has `slots` for them. Of few blocks it takes an even share at most. A kernel that uses no shared memory is
    left the cache, in which its threads share what they read.
    """
    share = -(-blocks // processors)
    if not shared or share >= slots or share > FEW:
        return shared
    return max(shared, ((largest + RESERVED) // share - RESERVED) // 128 * 128)


def crowded(kernels: Iterable[tuple[int, int]], largest: int) -> bool:
    """Whether one of the kernels, of so many slots and bytes each, fills more than half of what can be shared memory. A
    processor divides it anew between that and its cache only when it is idle, so no kernel that wants it divided
    otherwise comes to where this one is.
    """
    return any(slots * (shared + RESERVED) > largest // 2 for slots, shared in kernels)
