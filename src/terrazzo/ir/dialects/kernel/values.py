"""Places and values of Kernel IR: memory of a block and of a thread, and terms that only a kernel has."""

from __future__ import annotations

from typing import Any

from terrazzo.errors import UserError
from terrazzo.ir.dialects.loop import Buffer, Term
from terrazzo.ir.expr import IntExpr, Var
from terrazzo.ir.node import Node
from terrazzo.ir.types import DType, bool_

WARP = 32
"""Threads in a warp."""
BLOCK = "block"
THREADS = ("block", "warp", "lane")
LANE = Var("lane", WARP)
BEHIND = -1
"""Where memory of the block lies that is nowhere in particular."""


class Shared(Buffer, dialect="kernel", op="shared"):
    """Memory of the block. Bits of the byte offset are exchanged with a span of `swizzle` bytes (0, 32, 64 or 128; see
    ir.layout). It lies behind what was declared before it, or begins `at` a byte, and may lie over other memory then:
    what is written to the one, the other holds no longer.
    """

    swizzle: int = 0
    at: int = BEHIND


class Barriers(Shared, dialect="kernel", op="barriers"):
    """`mbarrier`s, one for each slot of a ring. A phase ends when `arrivals` threads arrived and all announced bytes
    have come.
    """

    arrivals: int = 1


class Registers(Buffer, dialect="kernel", op="registers"):
    """Memory of the thread: indices must be constants once loops are unrolled."""


class Integer(Var, dialect="kernel", op="integer"):
    """An integer in [0, extent) that each thread carries and may change. Index expressions mean what it is at that
    time.
    """


class Value(Term, dialect="kernel", op="value"):
    """What a `Let` named."""

    name: str
    type: DType

    def infer(self) -> DType:
        return self.type


class Shuffle(Term, dialect="kernel", op="shuffle"):
    """x as the lane has it whose number differs in the bits of `mask`."""

    x: Node
    mask: int

    def check(self) -> None:
        super().check()
        if not 0 < self.mask < WARP:
            raise UserError(f"shuffle: a mask is in 1 to {WARP - 1}, not {self.mask}")

    def infer(self) -> Any:
        return self.x.dtype  # type: ignore[attr-defined]


class Vote(Term, dialect="kernel", op="vote"):
    """Whether "any" or "all" lanes of the warp have x, a bool."""

    kind: str
    x: Node

    def check(self) -> None:
        super().check()
        if self.kind not in ("any", "all") or self.x.dtype is not bool_:  # type: ignore[attr-defined]
            raise UserError("vote('any', x) or vote('all', x), of a bool")

    def infer(self) -> Any:
        return bool_


class Remote(Term, dialect="kernel", op="remote"):
    """An element of shared memory as block `rank` of the cluster has it."""

    buffer: Shared
    index: tuple[IntExpr, ...]
    rank: IntExpr

    def infer(self) -> Any:
        return self.buffer.type.dtype


def shared_bytes(place: Buffer) -> int:
    """The bytes from the first element to the end of the last."""
    return place.type.span
