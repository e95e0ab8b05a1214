"""Room on processors for kernels that are launched while the one before them still runs (ADR 014).

Their blocks wait where there is room. What finds none comes to the processors that are through first, and piles up
there while others idle: of 512 blocks of a softmax on 132 processors 7 landed on one and none on 29. Shared memory is
what a launch can ask for to prevent it.
"""

from __future__ import annotations

from typing import NamedTuple

RESERVED = 1 << 10
"""Bytes of shared memory that a block takes beyond its own."""
FEW = 8
"""Blocks on a processor up to which one more makes it late: of many, each is a small part of its work."""
IDLE = 1 / 8
"""Of the places that an even share on every processor has, those that may be empty."""
LONG = 32 << 20
"""Bytes that a kernel touches from which it matters more where its blocks are than when they begin."""


class Launched(NamedTuple):
    """A kernel as the driver knows it: so many blocks of so many bytes of shared memory, for which a processor has
    `slots`; together they touch some bytes of memory.
    """

    slots: int
    blocks: int
    shared: int
    touched: int


def even(kernel: Launched, processors: int, largest: int) -> int:
    """Bytes of shared memory, of the `largest` that it may have, for each block of a kernel. Of few blocks a processor
    takes an even share at most: so many bytes that one more finds no room, and no more than that, for the rest of
    shared memory is cache. A kernel without shared memory is left all of its cache, in which its threads share what
    they read.
    """
    share = -(-kernel.blocks // processors)
    if not kernel.shared or share >= kernel.slots or share > FEW:
        return kernel.shared
    return max(kernel.shared, ((largest + RESERVED) // (share + 1) - RESERVED) // 128 * 128 + 128)


def late(kernel: Launched, processors: int) -> bool:
    """Whether a kernel of long work had better be launched after the one before it than wait for it: where each of its
    blocks fills a processor, or where it leaves many places empty.

    Blocks that wait are not spread over the parts of the chip, and its parts have their share of what memory gives:
    74 blocks, of which each fills a processor, read 136 MB in 50 us, and in 35 when they came to an idle chip. 132
    blocks whose warpgroups take turns, tiles of 128 x 176, multiplied 2048 x 4096 x 14336 behind a ReLU in 358 us and
    302; others took as long or 0.97 (ADR 014).
    """
    share = -(-kernel.blocks // processors)
    empty = share * processors - kernel.blocks
    few = share <= min(kernel.slots, FEW)
    return kernel.touched >= LONG and few and (kernel.slots == 1 or empty > IDLE * share * processors)
