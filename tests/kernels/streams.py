"""What a kernel asks of memory, read off Kernel IR: blocks, bytes on their way in a processor, sectors it touches."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.hw.gpu import gpu
from terrazzo.ir.address import evaluate, flatten
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, Loaded, Var
from terrazzo.ir.node import topological

SECTOR = 32
FULL = 2048
"""Threads that a processor has on at a time."""


@dataclass(frozen=True)
class Access:
    """A load or store of global memory: so many elements of a buffer at an index, how often a thread makes it, and how
    often in one step of the serial loop it is in, which has a number.
    """

    buffer: l.Buffer
    index: tuple[Any, ...]
    count: int
    trips: int
    flying: int
    load: bool
    loop: int

    @property
    def bytes(self) -> int:
        """Of one access of a thread."""
        return int(self.count * self.buffer.type.dtype.size)

    def sectors(self) -> tuple[int, int]:
        """Those a warp touches, and the fewest that have what it needs: at some places, in all."""
        place = flatten(self.index, self.buffer.type.element_strides)
        free = [x for x in topological([place]) if isinstance(x, Var)] if not isinstance(place, int) else []
        draw, touched, needed = random.Random(1), 0, 0
        for _ in range(8):
            env: dict[Any, int] = {v: draw.randrange(v.extent) for v in free}  # type: ignore[arg-type]
            found: set[int] = set()
            for lane in range(k.WARP):
                here = {**env, **{v: lane for v in free if v is k.LANE or v.name == "lane"}}
                first = evaluate(place, here) * self.buffer.type.dtype.size
                found |= set(range(first, first + self.bytes))
            touched += len({x // SECTOR for x in found})
            needed += -(-len(found) // SECTOR)
        return touched, needed


def accesses(body: Sequence[Any], trips: int = 1, flying: int = 1, loop: int = 0) -> Iterator[Access]:
    """Those of statements, but for what data says where."""
    for s in body:
        found: list[tuple[Any, Any, int, bool]] = []
        match s:
            case k.For():
                n = int(s.axis.extent)  # type: ignore[call-overload]
                inner = (flying * n, loop) if s.unrolled else (1, id(s))
                yield from accesses(s.body, trips * n, *inner)
            case k.If() | k.Role():
                yield from accesses(s.body, trips, flying, loop)
            case k.Move():
                found = [(s.source, s.at, s.count, True), (s.target, s.to, s.count, False)]
            case _:
                found = [(x.buffer, x.index, 1, True) for x in topological([s]) if isinstance(x, l.Load)]
                found += [(s.buffer, s.index, 1, False)] if isinstance(s, l.Store) else []
        yield from (Access(b, i, n, trips, flying, load, loop) for b, i, n, load in found if _told(b, i))


def _told(buffer: l.Buffer, index: Sequence[Any]) -> bool:
    """Whether a place is in global memory, and index expressions say where."""
    places = [e for e in index if isinstance(e, Expr)]
    found = any(isinstance(e, Loaded) for e in topological(places))
    return not isinstance(buffer, k.Shared | k.Registers) and not found


def faults(kernel: k.Kernel, arch: str) -> list[str]:
    """What a kernel that memory bounds does not do as the model has it: enough blocks, bytes on their way, full
    sectors.
    """
    machine = gpu(arch)
    found = list(accesses(kernel.body))
    moved = sum(b.type.numel * b.type.dtype.size for b in {x.buffer for x in found})  # type: ignore[operator]
    if moved < 4 << 20:
        return []
    out = [f"{kernel.grid} blocks for {moved >> 20} MB"] if kernel.grid < 100 else []
    resident = max(1, min(-(-kernel.grid // machine.processors), FULL // kernel.threads))
    heavy = [x for x in found if x.trips * x.bytes * kernel.threads * kernel.grid * 8 > moved]
    loops: dict[int, int] = {}
    for x in heavy:
        loops[x.loop] = loops.get(x.loop, 0) + x.bytes * x.flying * x.load
    flying = resident * kernel.threads * max(loops.values())
    out += [f"{flying} bytes on their way"] if flying < 32768 else []
    for x in heavy:
        touched, needed = x.sectors()
        if touched > 2 * needed:
            out.append(f"{touched} sectors of {x.buffer.name} for {needed}")
    return out
