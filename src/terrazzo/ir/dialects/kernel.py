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
from terrazzo.ir.node import Node, topological
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


class Commit(Node, dialect="kernel", op="commit"):
    """What this thread copied asynchronously since the last commit becomes a group."""


class WaitGroups(Node, dialect="kernel", op="wait_groups"):
    """Until at most `open` groups of this thread are on their way."""

    open: int


class Sync(Node, dialect="kernel", op="sync"):
    """Until all threads of the block are here; what they wrote to shared memory is then seen by all."""


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


class TensorLoad(Node, dialect="kernel", op="tensor_load"):
    """TMA, by one thread: the box of the source that begins at `at` into shared memory, zeros outside the tensor.

    Its bytes count at a barrier.
    """

    target: Shared
    to: tuple[IntExpr, ...]
    source: Buffer
    at: tuple[IntExpr, ...]
    box: tuple[int, ...]
    barriers: Barriers
    slot: IntExpr


class LoadMatrix(Node, dialect="kernel", op="load_matrix"):
    """ldmatrix: `instruction` names a record of hw.ldmatrix; every lane names a row. Registers are 32 bits wide."""

    instruction: str
    target: Registers
    to: tuple[IntExpr, ...]
    source: Shared
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


class For(Node, dialect="kernel", op="for"):
    """`body` for every value of `axis`, in order. Unrolled loops leave no loop behind."""

    axis: Var
    body: tuple[Node, ...]
    unrolled: bool = False


class If(Node, dialect="kernel", op="if"):
    """`body` where every expression of `inside` is >= 0."""

    inside: tuple[IntExpr, ...]
    body: tuple[Node, ...]


class Kernel(Node, dialect="kernel", op="kernel"):
    """One launch of `grid` blocks of `warps` warps. `params` are the buffers in global memory, those read first.

    A thread may use as many registers as leave room for `resident` blocks on a processor.
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
        return tuple(dict.fromkeys((s.source, s.box, s.target.swizzle) for s in walk(self.body) if isinstance(s, TensorLoad)))

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


def shared_bytes(place: Buffer) -> int:
    """The bytes from the first element to the end of the last."""
    shape, strides = place.type.static_shape, place.type.element_strides
    if 0 in shape:
        return 0
    return (1 + sum((e - 1) * s for e, s in zip(shape, strides, strict=True) if isinstance(s, int))) * place.type.dtype.size


def walk(body: tuple[Node, ...]) -> Iterator[Node]:
    """Every statement, also inside loops and conditions, in order."""
    for s in body:
        yield s
        if isinstance(s, For | If):
            yield from walk(s.body)


def problem(kernel: Kernel) -> str:
    """What is wrong with a kernel, or nothing: a name used where it does not exist, a variable no loop binds, an index too many."""
    if not 1 <= kernel.warps <= 32:
        return f"a block has 1 to 32 warps, not {kernel.warps}"
    for s in walk(kernel.body):
        for place, index in places(s):
            if len(index) != place.type.rank:
                return f"{type(s).__name__} has {len(index)} indices into {place.name}: {place.type}"
            if isinstance(place, Registers) and any(getattr(x, "name", "") in THREADS for x in topological(list(_flat(index)))):
                return f"{type(s).__name__} indexes the registers {place.name} by the number of a thread, which they cannot be"
        if isinstance(s, l.Store | Move) and (target := s.buffer if isinstance(s, l.Store) else s.target) in kernel.reads:
            return f"{type(s).__name__} writes {target.name}, which the kernel only reads"
    known: set[Any] = {*kernel.params, *kernel.shared}
    return _problem(kernel.body, known, {"block", "warp", "lane"})


def places(s: Node) -> Iterator[tuple[Buffer, tuple[IntExpr, ...]]]:
    """The places that a statement names, itself or in a term, with the indices."""
    terms = [s.term] if isinstance(s, Let) else [s.value] if isinstance(s, l.Store) else []
    yield from ((x.buffer, x.index) for x in topological(terms) if isinstance(x, l.Load))
    match s:
        case l.Store():
            yield s.buffer, s.index
        case Move() | AsyncCopy() | TensorLoad() | LoadMatrix():
            yield s.target, s.to
            yield s.source, s.at
        case Multiply():
            yield from ((s.d, s.d_at), (s.a, s.a_at), (s.b, s.b_at))


def _problem(body: tuple[Node, ...], known: set[Any], variables: set[str]) -> str:
    known = set(known)
    for s in body:
        mine = [c for f, c in zip(s._fields, s.values, strict=True) if f not in ("body", "axis", "value" if isinstance(s, Let) else "")]
        mine = mine if not isinstance(s, Declare) else []
        for x in topological(list(_flat(mine))):
            if isinstance(x, Buffer | Value) and x not in known:
                return f"{type(s).__name__} uses {x.name}, which does not exist there"
            if isinstance(x, Var) and x.name not in variables:
                return f"{type(s).__name__} uses the variable {x.name}, which no loop around it binds"
        if isinstance(s, Let):
            known.add(s.value)
        elif isinstance(s, Declare):
            known.add(s.place)
        elif isinstance(s, For | If):
            inner = variables | {s.axis.name} if isinstance(s, For) else variables
            if why := _problem(s.body, known, inner):
                return why
    return ""


def _flat(value: Any) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, tuple | list):
        for v in value:
            yield from _flat(v)
