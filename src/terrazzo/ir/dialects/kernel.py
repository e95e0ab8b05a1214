"""Kernel IR: a program for one block, written for one thread of it (ADR 005). One statement per CUDA statement.

Index expressions are those of Loop IR over the variables `block`, `warp` and `lane` and those of loops; terms are those of Loop IR
without reductions, over `Value`s and loads from any place. Nothing is implied: a barrier that is not in the text is not in the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from terrazzo.errors import UserError
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.loop import Buffer, Term
from terrazzo.ir.expr import IntExpr, Var
from terrazzo.ir.node import Node
from terrazzo.ir.types import DType

WARP = 32
"""Threads in a warp."""


class Shared(Buffer, dialect="kernel", op="shared"):
    """Memory of the block. Bits of the byte offset are exchanged with a span of `swizzle` bytes (0, 32, 64 or 128; see ir.layout)."""

    swizzle: int = 0


class Barriers(Shared, dialect="kernel", op="barriers"):
    """`mbarrier`s, one for each slot of a ring. A phase ends when `arrivals` threads arrived and all announced bytes have come."""

    arrivals: int = 1


class Registers(Buffer, dialect="kernel", op="registers"):
    """Memory of the thread: indices must be constants once loops are unrolled."""


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


class Let(Node, dialect="kernel", op="let"):
    """Compute a term into a register that nothing changes."""

    value: Value
    term: Node


class Declare(Node, dialect="kernel", op="declare"):
    """Registers come into being, all at `init` where there is one."""

    place: Registers
    init: l.Literal | None = None


class Move(Node, dialect="kernel", op="move"):
    """`count` elements that lie one behind the other in both places, in as few accesses as their size allows (16 bytes each)."""

    target: Buffer
    to: tuple[IntExpr, ...]
    source: Buffer
    at: tuple[IntExpr, ...]
    count: int

    def check(self) -> None:
        if self.count < 1 or self.count & self.count - 1:
            raise UserError(f"move takes a power of two of elements, not {self.count}")
        if self.target.type.dtype is not self.source.type.dtype:
            raise UserError(f"move: {self.source.type.dtype} into {self.target.name}, which holds {self.target.type.dtype}")


class AsyncCopy(Node, dialect="kernel", op="async_copy"):
    """cp.async: `count` elements from global into shared memory, zeros where an expression of `inside` is negative."""

    target: Shared
    to: tuple[IntExpr, ...]
    source: Buffer
    at: tuple[IntExpr, ...]
    count: int
    inside: tuple[IntExpr, ...] = ()

    def check(self) -> None:
        if self.count * self.source.type.dtype.size not in (4, 8, 16):
            raise UserError(f"cp.async moves 4, 8 or 16 bytes, not {self.count * self.source.type.dtype.size}")


KINDS = ("cp.async", "wgmma", "bulk")
"""What is grouped, each kind by itself: copies into shared memory, products of warpgroups, boxes on their way to global memory."""


class Commit(Node, dialect="kernel", op="commit"):
    """What this thread began asynchronously since the last commit, of one of the KINDS, becomes a group."""

    kind: str = "cp.async"

    def check(self) -> None:
        _one_of("commit", self.kind, KINDS)


class WaitGroups(Node, dialect="kernel", op="wait_groups"):
    """Until at most `open` groups of this thread, of a kind, are on their way. Boxes ("bulk") have then been read, not yet written."""

    open: int
    kind: str = "cp.async"

    def check(self) -> None:
        _one_of("wait_groups", self.kind, KINDS)


class Sync(Node, dialect="kernel", op="sync"):
    """Until `warps` warps are here (0: all of the block), at barrier `number`; what they wrote to shared memory is then seen by all."""

    number: int = 0
    warps: int = 0

    def check(self) -> None:
        if not (self.number == self.warps == 0 or (1 <= self.number <= 15 and 1 <= self.warps <= 32)):
            raise UserError(f"sync(number, warps) has numbers 1 to 15 and 1 to 32 warps, not {self.number} and {self.warps}")


class ClusterSync(Node, dialect="kernel", op="cluster_sync"):
    """Until all threads of the cluster are here."""


FENCES = ("proxy", "wgmma")


class Fence(Node, dialect="kernel", op="fence"):
    """An order between this thread's plain accesses and asynchronous ones that come after.

    "proxy": what was written to shared memory is seen by TMA and wgmma; "wgmma": what was written to registers is seen by wgmma.
    """

    kind: str

    def check(self) -> None:
        _one_of("fence", self.kind, FENCES)


class InitBarriers(Node, dialect="kernel", op="init_barriers"):
    """Barriers come into being, and are seen by asynchronous copies. One thread does this, before a barrier of the block."""

    barriers: Barriers


class Expect(Node, dialect="kernel", op="expect"):
    """Arrive at a barrier, and announce bytes that will come."""

    barriers: Barriers
    slot: IntExpr
    bytes: int


class WaitBarrier(Node, dialect="kernel", op="wait_barrier"):
    """Until the phase of this parity of a barrier has ended."""

    barriers: Barriers
    slot: IntExpr
    phase: IntExpr


class Arrive(Node, dialect="kernel", op="arrive"):
    """Arrive at a barrier: of this block, or of block `rank` of the cluster."""

    barriers: Barriers
    slot: IntExpr
    rank: IntExpr | None = None


class TensorLoad(Node, dialect="kernel", op="tensor_load"):
    """TMA, by one thread: the box of the source that begins at `at` into shared memory, zeros outside the tensor.

    Its bytes count at a barrier. With `ranks`, a set of bits, it goes to that place and counts at that barrier of each such block of
    the cluster.
    """

    target: Shared
    to: tuple[IntExpr, ...]
    source: Buffer
    at: tuple[IntExpr, ...]
    box: tuple[int, ...]
    barriers: Barriers
    slot: IntExpr
    ranks: int = 0


REDUCTIONS = ("", "add", "min", "max")


class TensorStore(Node, dialect="kernel", op="tensor_store"):
    """TMA, by one thread: a box of shared memory to where it begins at `to` in the target, nothing outside the tensor; kind "bulk".

    With a reduction, each element of the target becomes its sum with (its minimum, maximum with) that of the box.
    """

    target: Buffer
    to: tuple[IntExpr, ...]
    source: Shared
    at: tuple[IntExpr, ...]
    box: tuple[int, ...]
    reduction: str = ""

    def check(self) -> None:
        _one_of("tensor_store", self.reduction, REDUCTIONS)


class LoadMatrix(Node, dialect="kernel", op="load_matrix"):
    """ldmatrix: `instruction` names a record of hw.ldmatrix; every lane names a row. Registers are 32 bits wide."""

    instruction: str
    target: Registers
    to: tuple[IntExpr, ...]
    source: Shared
    at: tuple[IntExpr, ...]


class StoreMatrix(Node, dialect="kernel", op="store_matrix"):
    """stmatrix: the reverse of ldmatrix. Registers are 32 bits wide, or hold elements of the target's type."""

    instruction: str
    target: Shared
    to: tuple[IntExpr, ...]
    source: Registers
    at: tuple[IntExpr, ...]


class Multiply(Node, dialect="kernel", op="multiply"):
    """d += a * b by a matrix instruction, a record of hw.mma_sync. a and b are in 32-bit registers."""

    instruction: str
    d: Registers
    d_at: tuple[IntExpr, ...]
    a: Registers
    a_at: tuple[IntExpr, ...]
    b: Registers
    b_at: tuple[IntExpr, ...]


class MultiplyAsync(Node, dialect="kernel", op="multiply_async"):
    """d += a * b by the four warps of a warpgroup, a record of hw.wgmma; d may be used again once its group was waited for.

    b is a slab of shared memory, swizzled, whose rows are as wide as the swizzle; a too, or it is in 32-bit registers.
    """

    instruction: str
    d: Registers
    d_at: tuple[IntExpr, ...]
    a: Buffer
    a_at: tuple[IntExpr, ...]
    b: Shared
    b_at: tuple[IntExpr, ...]


class For(Node, dialect="kernel", op="for"):
    """`body` for every value of `axis`, in order. Unrolled loops leave no loop behind."""

    axis: Var
    body: tuple[Node, ...]
    unrolled: bool = False


class If(Node, dialect="kernel", op="if"):
    """`body` where every expression of `inside` is >= 0."""

    inside: tuple[IntExpr, ...]
    body: tuple[Node, ...]


class Role(Node, dialect="kernel", op="role"):
    """`body` for warps `first` to `first + count - 1`, each thread of which takes `registers` registers from here on (0: as it has)."""

    first: int
    count: int
    body: tuple[Node, ...]
    registers: int = 0

    def check(self) -> None:
        if self.registers and (self.first % 4 or self.count % 4 or self.registers not in range(24, 241, 8)):
            raise UserError("a role with registers is of whole warpgroups, and takes a multiple of 8 from 24 to 240")


class Kernel(Node, dialect="kernel", op="kernel"):
    """One launch of `grid` blocks of `warps` warps. `params` are the buffers in global memory, those read first.

    A thread may use as many registers as leave room for `resident` blocks on a processor; `cluster` blocks share their memory.
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

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * WARP

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """The buffers in global memory that are not written."""
        return tuple(b for b in self.params if b not in self.writes)

    @cached_property
    def maps(self) -> tuple[tuple[Buffer, tuple[int, ...], int], ...]:
        """The tensor maps it takes, each once: of which buffer, with which box and swizzle."""
        boxes = [s for s in walk(self.body) if isinstance(s, TensorLoad | TensorStore)]
        return tuple(dict.fromkeys(map_of(s) for s in boxes))

    @cached_property
    def offsets(self) -> dict[Shared, int]:
        """Where each part of shared memory begins, in bytes."""
        found, at = {}, 0
        for s in self.shared:
            at = -(-at // 1024) * 1024 if s.swizzle else -(-at // 16) * 16
            found[s] = at
            at += shared_bytes(s)
        return found

    @cached_property
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


BLOCK = "block"
THREADS = ("block", "warp", "lane")
LANE = Var("lane", WARP)
REGISTER_FILE = 65536
"""32-bit registers of a processor."""


def map_of(s: TensorLoad | TensorStore) -> tuple[Buffer, tuple[int, ...], int]:
    """The tensor map of a box: of which buffer in global memory, with which box and swizzle."""
    return (s.source, s.box, s.target.swizzle) if isinstance(s, TensorLoad) else (s.target, s.box, s.source.swizzle)


def shared_bytes(place: Buffer) -> int:
    """The bytes from the first element to the end of the last."""
    shape, strides = place.type.static_shape, place.type.element_strides
    if 0 in shape:
        return 0
    return (1 + sum((e - 1) * s for e, s in zip(shape, strides, strict=True) if isinstance(s, int))) * place.type.dtype.size


def walk(body: tuple[Node, ...]) -> Iterator[Node]:
    """Every statement, also inside loops, conditions and roles, in order."""
    for s in body:
        yield s
        if isinstance(s, For | If | Role):
            yield from walk(s.body)


def _one_of(what: str, word: str, words: tuple[str, ...]) -> None:
    if word not in words:
        raise UserError(f"{what}: {word!r} is none of {', '.join(map(repr, words))}")
