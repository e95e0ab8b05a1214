"""What a kernel's statements cost where time goes: wavefronts of shared memory, sectors of global memory, bytes,
issues.

The simulator counts what happens; `targets.cuda.predict` counts what the text says will. Both count here, so the rules
are one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from terrazzo.hw import ldmatrix, mma_sync, wgmma
from terrazzo.hw.memory import copied_sectors, matrix_wavefronts, sectors, wavefronts
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import Node, topological


@dataclass
class Count:
    """Accesses of one kind by one statement: `requests` are those of warps, `bytes` those of all lanes.

    Of shared memory `wavefronts` counts its rounds and `conflicts` those of them that bank conflicts cost; of global
    memory `sectors` counts 32-byte sectors.
    """

    requests: int = 0
    bytes: int = 0
    wavefronts: int = 0
    conflicts: int = 0
    sectors: int = 0

    def add(self, other: Count) -> None:
        """Count what the other counted too."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class Costs:
    """Counts by statement and kind of access: "shared read", "shared write", "global read", "global write"; and issues
    by statement.

    Addresses are in bytes, [..., lane], of lanes that take part where `active` has True; one access in the text stands
    for `times` of them (a number, or one for every warp). A lane moves `size` bytes, in accesses of 16 where it is
    more.
    """

    accesses: dict[tuple[Node, str], Count] = field(default_factory=dict)
    issues: dict[Node, tuple[int, int]] = field(default_factory=dict)

    def issue(self, statement: Node, active: Any, times: Any = 1) -> None:
        """A statement is executed by the warps of which lanes are active."""
        warps, lanes = self.issues.get(statement, (0, 0))
        self.issues[statement] = warps + _total(active.any(-1), times), lanes + _total(active.sum(-1), times)

    def shared(
        self, statement: Node, addresses: Any, active: Any, size: int, write: bool = False, times: Any = 1
    ) -> None:
        """An access to shared memory."""
        for at, wide in _pieces(addresses, size):
            self._shared(statement, wavefronts(at, active, wide, write), active, wide, write, times)

    def matrix(self, statement: Any, rows: Any, active: Any, times: Any = 1) -> None:
        """An `ldmatrix` or `stmatrix`, given the address of the row that each lane names."""
        record = ldmatrix.move(statement.instruction)
        self._shared(
            statement, matrix_wavefronts(rows, active, record.count), active, 4 * record.count, record.store, times
        )

    def slab(self, statement: Node, size: int, times: int = 1) -> None:
        """An operand of a warpgroup's product in shared memory, of so many bytes; whether its swizzle conflicts is not
        asked.
        """
        self.accesses.setdefault((statement, "shared read"), Count()).add(Count(times, size * times))

    def memory(
        self, statement: Node, addresses: Any, active: Any, size: int, write: bool = False, times: Any = 1
    ) -> None:
        """An access to global memory, counted as if every buffer began at a multiple of 128 bytes."""
        for at, wide in _pieces(addresses, size):
            self._global(statement, sectors(at, active), active, wide, write, times)

    def copy(self, statement: k.AsyncCopy, source: Any, target: Any, active: Any, inside: Any, times: Any = 1) -> None:
        """A cp.async: lanes `inside` read, all active ones write (zeros, where they did not read)."""
        size = statement.count * statement.source.type.dtype.size
        reads = active & inside
        self._global(statement, copied_sectors(source, target, reads, size), reads, size, False, times)
        self._shared(statement, wavefronts(target, active, size, True), active, size, True, times)

    def _shared(self, statement: Node, found: tuple[Any, Any], active: Any, size: int, write: bool, times: Any) -> None:
        rounds, conflicts = (_total(x, times) for x in found)
        self._count(statement, "shared", write, active, size, times, Count(wavefronts=rounds, conflicts=conflicts))

    def _global(self, statement: Node, found: Any, active: Any, size: int, write: bool, times: Any) -> None:
        self._count(statement, "global", write, active, size, times, Count(sectors=_total(found, times)))

    def _count(self, statement: Node, level: str, write: bool, active: Any, size: int, times: Any, more: Count) -> None:
        more.requests, more.bytes = _total(active.any(-1), times), _total(active.sum(-1), times) * size
        self.accesses.setdefault((statement, f"{level} {'write' if write else 'read'}"), Count()).add(more)

    def total(self, kind: str, statements: Iterable[Node] | None = None) -> Count:
        """All accesses of a kind, or those of some statements."""
        found, only = Count(), None if statements is None else set(statements)
        for (statement, name), count in self.accesses.items():
            if name == kind and (only is None or statement in only):
                found.add(count)
        return found

    @property
    def kinds(self) -> dict[str, int]:
        """Statements that warps issued, by kind."""
        found: dict[str, int] = {}
        for statement, (warps, _) in self.issues.items():
            found[statement.op] = found.get(statement.op, 0) + warps
        return found

    @property
    def box_bytes(self) -> int:
        """Bytes that TMA brought and took."""
        boxes = ((s, n) for s, (_, n) in self.issues.items() if isinstance(s, k.TensorLoad | k.TensorStore))
        return sum(n * math.prod(s.box) * s.target.type.dtype.size for s, n in boxes)

    @property
    def operations(self) -> dict[str, int]:
        """Operations on scalars of lanes, by function ("add", "exp", ...), and those of matrix instructions, a
        multiply-add being two.
        """
        found: dict[str, int] = {}
        for s, (warps, lanes) in self.issues.items():
            if isinstance(s, k.Multiply | k.MultiplyAsync):
                one = (
                    mma_sync.product(s.instruction).shape
                    if isinstance(s, k.Multiply)
                    else wgmma.product(s.instruction).shape
                )
                times = warps if isinstance(s, k.Multiply) else warps // 4
                found[s.instruction] = found.get(s.instruction, 0) + 2 * times * math.prod(one)
            for x in topological(
                [s.term if isinstance(s, k.Let) else s.value] if isinstance(s, k.Let | l.Store | k.Atomic) else []
            ):
                if isinstance(x, l.Apply):
                    found[x.fn.name] = found.get(x.fn.name, 0) + lanes
        return found


def _total(found: Any, times: Any) -> int:
    return int((np.asarray(found, np.int64) * times).sum())


def _pieces(addresses: Any, size: int) -> list[tuple[Any, int]]:
    """Addresses and bytes of the accesses of which none is wider than 16 bytes."""
    return [(addresses + n, min(size, 16)) for n in range(0, size, 16)]
