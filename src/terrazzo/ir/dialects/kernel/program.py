"""Kernels, and programs of them."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.kernel.control import walk
from terrazzo.ir.dialects.kernel.moves import Map, TensorLoad, TensorStore, map_of
from terrazzo.ir.dialects.kernel.values import BEHIND, WARP, Shared, shared_bytes
from terrazzo.ir.dialects.loop import Buffer
from terrazzo.ir.node import Node, derived

REGISTER_FILE = 65536
"""32-bit registers of a processor."""

EARLY = 5280
"""Blocks, at most, of a kernel that is launched while the one before it still runs: each waits for that one by itself,
which takes longer than a launch where there are many (ADR 014).
"""


class Kernel(Node, dialect="kernel", op="kernel"):
    """One launch of `grid` blocks of `warps` warps. `params` are the buffers in global memory, those read first.

    A thread may use as many registers as leave room for `resident` blocks on a processor; `cluster` blocks share their
    memory. What it writes may lie `over` something else, each with that: what is not written is what was there.
    """

    name: str
    params: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    grid: int
    warps: int
    shared: tuple[Shared, ...]
    body: tuple[Node, ...]
    resident: int = 1
    source: str = ""
    cluster: int = 1
    over: tuple[tuple[Buffer, Buffer], ...] = ()

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * WARP

    @property
    def early(self) -> bool:
        """Whether it is launched while the kernel before it still runs, where the machine can (ADR 014)."""
        return self.grid <= EARLY

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """The buffers in global memory that are not written."""
        return tuple(b for b in self.params if b not in self.writes)

    @derived
    def maps(self) -> tuple[Map, ...]:
        """The tensor maps it takes, each once."""
        boxes = [s for s in walk(self.body) if isinstance(s, TensorLoad | TensorStore)]
        return tuple(dict.fromkeys(map_of(s) for s in boxes))

    @derived
    def offsets(self) -> dict[Shared, int]:
        """Where each part of shared memory begins, in bytes."""
        found, at = {}, 0
        for s in self.shared:
            at = -(-at // 1024) * 1024 if s.swizzle else -(-at // 16) * 16
            found[s] = at if s.at == BEHIND else s.at
            at += shared_bytes(s) if s.at == BEHIND else 0
        return found

    @derived
    def shared_bytes(self) -> int:
        """How much shared memory a block takes."""
        return max((at + shared_bytes(s) for s, at in self.offsets.items()), default=0)


@dataclass(frozen=True)
class Program:
    """Kernels and calls in the order they run, as in Loop IR."""

    name: str
    inputs: tuple[Buffer, ...]
    steps: tuple[Kernel | l.Call, ...]
    results: tuple[Buffer, ...]

    @property
    def dialect(self) -> str:
        return "kernel"
