"""What the rows of a kernel read across memory, turned for a block of rows first: the norm of a transposed tensor.

Where a row is reduced and stored along itself, and what it is made of lies along the rows, each step of a loop over it
reads a cache line of its own, and no two steps are a vector. A block of rows is as long as such a line: it is turned
into memory of the thread in squares, and all loops over a row read it from there, in runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from terrazzo.ir import nest as n
from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr, Loaded, Var
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.ir.ranges import Range
from terrazzo.ir.types import Type
from terrazzo.targets.cpu.chained import everywhere
from terrazzo.targets.cpu.rows import in_columns
from terrazzo.targets.cpu.turned import FAR
from terrazzo.targets.terms import Scope, in_memory, index

LINE = 64
"""Bytes of a block along the rows: a line of the cache, and the widest vector."""
ROOM = 1 << 16
"""Bytes that blocks may have: with what else a row reads it stays in the second-level cache."""


@dataclass(frozen=True)
class Block:
    """Rows of `source` from `first` on, so many elements of each, which lie `by` apart there, in a buffer."""

    buffer: l.Buffer
    source: l.Buffer
    first: IntExpr
    by: int

    @property
    def length(self) -> int:
        """Elements of a row."""
        return self.buffer.type.static_shape[1]

    def turned(self, rows: str, scope: Scope) -> list[str]:
        """Statements that fill the block with so many rows."""
        count, length = self.buffer.type.static_shape[0], self.length
        kind, name = in_memory(self.buffer.type.dtype), scope.buffers[self.buffer]
        start = f"{scope.buffers[self.source]} + {index(self.first, scope)}"
        return [
            f"alignas(64) {kind} {name}[{count * length}];",
            f"tz_across<{length}>({start}, {self.by}, {name}, {rows}, {length});",
        ]


@dataclass
class Across:
    """The rows of a kernel, an axis of it, of which `count` from `begin` on are in blocks."""

    axis: Var
    begin: Var
    count: int
    blocks: list[Block] = field(default_factory=list)


def across(kernel: l.Kernel, spans: Mapping[Node, Range]) -> tuple[l.Kernel, Across | None]:
    """A kernel whose rows read blocks, and these; or as it is, where nothing that is reduced is read across."""
    if kernel.scans or not any(isinstance(x, l.Reduce) for s in kernel.stores for x in topological([s.value])):
        return kernel, None
    body = n.nest(kernel)
    for depth, axis in enumerate(kernel.axes[:-1]):
        loops = [s for s in body if isinstance(s, n.Loop)]
        rows = next((s for s in loops if s.axes == (axis,)), None)
        if rows is None or rows.kind != "free" or in_columns(rows, spans):
            return kernel, None
        if not isinstance(axis.extent, int) or axis.extent < FAR:
            body = rows.body
            continue
        found = Across(axis, Var(l.fresh_name(), axis.extent), 0)
        reader = _Reader(kernel, kernel.axes[:depth], found)
        stores = [l.Store(s.buffer, s.index, everywhere(s.value, kernel.axes, reader.change)) for s in kernel.stores]
        if reader.reduced:
            return l.Kernel(kernel.name, kernel.axes, tuple(stores), kernel.source), found
        body = rows.body
    return kernel, None


class _Reader:
    """Finds the loads along rows, of one size of elements, and what reads blocks in their place."""

    def __init__(self, kernel: l.Kernel, around: Sequence[Any], found: Across) -> None:
        self.kernel, self.around, self.found, self.reduced = kernel, around, found, False

    def change(self, x: Any, axes: Sequence[Any]) -> Any:
        """A load of a block in place of one across memory."""
        if not isinstance(x, l.Load) or x.inside or x.dtype.size == 1 or x.buffer in self.kernel.writes:
            return None
        if any(isinstance(e, Loaded) for e in topological([e for e in x.index if isinstance(e, Expr)])):
            return None
        rows, offset = self.found.axis, flatten(x.index, x.buffer.type.element_strides)
        along = [a for a in axes if a in x.free and a is not rows and a not in self.around]
        if rows not in x.free or coefficient(offset, rows) != 1 or len(along) != 1:
            return None
        by, length, count = coefficient(offset, along[0]), along[0].extent, LINE // x.dtype.size
        if not (isinstance(by, int) and by >= FAR and isinstance(length, int) and length >= FAR):
            return None
        first, blocks = substitute(offset, {rows: self.found.begin, along[0]: 0}), self.found.blocks
        same = (b for b in blocks if (b.source, b.first, b.by, b.length) == (x.buffer, first, by, length))
        if (block := next(same, None)) is None:
            if (len(blocks) + 1) * count * length * x.dtype.size > ROOM or self.found.count not in (0, count):
                return None
            self.found.count = count
            block = Block(l.Buffer(l.fresh_name(), Type(x.dtype, (count, length))), x.buffer, first, by)
            blocks.append(block)
        self.reduced |= along[0] not in self.kernel.axes
        return l.Load.make(block.buffer, (rows % count, along[0]))  # blocks begin at multiples of that
