"""The statements of Kernel IR, one for each of CUDA."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from terrazzo.errors import UserError
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.kernel.statement import Statement
from terrazzo.ir.dialects.kernel.values import Barriers, Integer, Registers, Shared, Value
from terrazzo.ir.dialects.loop import Buffer
from terrazzo.ir.expr import Expr, IntExpr, Loaded, Var, bounds
from terrazzo.ir.node import Node, topological
from terrazzo.ir.types import Type


class Let(Node, dialect="kernel", op="let"):
    """Compute a term into a register that nothing changes."""

    value: Value
    term: Node


class Declare(Node, dialect="kernel", op="declare"):
    """Registers come into being, all at `init` where there is one."""

    place: Registers
    init: l.Literal | None = None


class DeclareInteger(Node, dialect="kernel", op="declare_integer"):
    """An integer comes into being."""

    variable: Integer
    value: IntExpr


class SetInteger(Node, dialect="kernel", op="set_integer"):
    """An integer becomes what an expression is now."""

    variable: Integer
    value: IntExpr


class Move(Statement, dialect="kernel", op="move"):
    """`count` elements that lie one behind the other in both places, in as few accesses as their size allows (16 bytes
    each).
    """

    writes = ("target",)

    target: Buffer
    to: tuple[IntExpr, ...]
    source: Buffer
    at: tuple[IntExpr, ...]
    count: int

    def check(self) -> None:
        if self.count < 1 or self.count & self.count - 1:
            raise UserError(f"move takes a power of two of elements, not {self.count}")
        if self.target.type.dtype is not self.source.type.dtype:
            raise UserError(
                f"move: {self.source.type.dtype} into {self.target.name}, which holds {self.target.type.dtype}"
            )


class Atomic(Statement, dialect="kernel", op="atomic"):
    """An element of global memory becomes its "add", "min" or "max" with a value, as if no thread came between. f32 and
    i32.
    """

    writes = ("buffer",)

    function: str
    buffer: Buffer
    index: tuple[IntExpr, ...]
    value: Node

    def check(self) -> None:
        _one_of("atomic", self.function, ("add", "min", "max"))
        kind = self.buffer.type.dtype
        if kind.name not in ("f32", "i32") or (kind.is_float and self.function != "add"):
            raise UserError(f"there is no atomic {self.function} of {kind}")
        if self.value.dtype is not kind:  # type: ignore[attr-defined]
            raise UserError(f"atomic: {self.value.dtype} into {self.buffer.name}, which holds {kind}")  # type: ignore[attr-defined]


class AsyncCopy(Statement, dialect="kernel", op="async_copy"):
    """cp.async: `count` elements from global into shared memory, zeros where an expression of `inside` is negative."""

    writes = ("target",)

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
"""What is grouped, each kind by itself: copies into shared memory, products of warpgroups, boxes on their way to global
memory."""


class Commit(Statement, dialect="kernel", op="commit"):
    """What this thread began asynchronously since the last commit, of one of the KINDS, becomes a group."""

    kind: str = "cp.async"

    def check(self) -> None:
        _one_of("commit", self.kind, KINDS)


class WaitGroups(Statement, dialect="kernel", op="wait_groups"):
    """Until at most `open` groups of this thread, of a kind, are on their way. Boxes ("bulk") have then been read, not
    yet written.
    """

    open: int
    kind: str = "cp.async"

    def check(self) -> None:
        _one_of("wait_groups", self.kind, KINDS)


class Sync(Statement, dialect="kernel", op="sync"):
    """Until `warps` warps are here (0: all of the block), at barrier `number`; what they wrote to shared memory is then
    seen by all.
    """

    number: int = 0
    warps: int = 0

    @property
    def together(self) -> str:  # type: ignore[override]
        """All of the block, or the warps that it names."""
        return "warp" if self.warps else "block"

    def check(self) -> None:
        if not (self.number == self.warps == 0 or (1 <= self.number <= 15 and 1 <= self.warps <= 32)):
            raise UserError(
                f"sync(number, warps) has numbers 1 to 15 and 1 to 32 warps, not {self.number} and {self.warps}"
            )


class ClusterSync(Statement, dialect="kernel", op="cluster_sync"):
    """Until all threads of the cluster are here."""

    together = "cluster"


FENCES = ("proxy", "wgmma")


class Fence(Statement, dialect="kernel", op="fence"):
    """An order between this thread's plain accesses and asynchronous ones that come after.

    "proxy": what was written to shared memory is seen by TMA and wgmma; "wgmma": what was written to registers is seen
    by wgmma.
    """

    kind: str

    def check(self) -> None:
        _one_of("fence", self.kind, FENCES)


class InitBarriers(Statement, dialect="kernel", op="init_barriers"):
    """Barriers come into being, and are seen by asynchronous copies. One thread does this, before a barrier of the
    block.
    """

    together = "lane"

    barriers: Barriers


class Expect(Statement, dialect="kernel", op="expect"):
    """Arrive at a barrier, and announce bytes that will come."""

    together = "lane"

    barriers: Barriers
    slot: IntExpr
    bytes: int


class WaitBarrier(Statement, dialect="kernel", op="wait_barrier"):
    """Until the phase of this parity of a barrier has ended."""

    barriers: Barriers
    slot: IntExpr
    phase: IntExpr


class Arrive(Statement, dialect="kernel", op="arrive"):
    """Arrive at a barrier: of this block, or of block `rank` of the cluster."""

    barriers: Barriers
    slot: IntExpr
    rank: IntExpr | None = None


class TensorLoad(Statement, dialect="kernel", op="tensor_load"):
    """TMA, by one thread: the box of the source that begins at `at` into shared memory, zeros outside the tensor.

    Its bytes count at a barrier. With `ranks`, a set of bits, it goes to that place and counts at that barrier of each
    such block of the cluster. With `view`, the tensor is the source's memory under another shape.
    """

    writes, together = ("target",), "lane"
    named = {"view": "type"}

    target: Shared
    to: tuple[IntExpr, ...]
    source: Buffer
    at: tuple[IntExpr, ...]
    box: tuple[int, ...]
    barriers: Barriers
    slot: IntExpr
    ranks: int = 0
    view: Type | None = None

    @property
    def tensor(self) -> Type:
        """The tensor that the box is of."""
        return self.view or self.source.type

    def check(self) -> None:
        _seen(self.op, self.source, self.tensor, self.at)


REDUCTIONS = ("", "add", "min", "max")


class TensorStore(Statement, dialect="kernel", op="tensor_store"):
    """TMA, by one thread: a box of shared memory to where it begins at `to` in the target, nothing outside the tensor;
    kind "bulk".

    With a reduction, each element of the target becomes its sum with (its minimum, maximum with) that of the box. With
    `view`, the tensor is the target's memory under another shape.
    """

    writes, together = ("target",), "lane"
    named = {"view": "type"}

    target: Buffer
    to: tuple[IntExpr, ...]
    source: Shared
    at: tuple[IntExpr, ...]
    box: tuple[int, ...]
    reduction: str = ""
    view: Type | None = None

    @property
    def tensor(self) -> Type:
        """The tensor that the box is of."""
        return self.view or self.target.type

    def check(self) -> None:
        _one_of("tensor_store", self.reduction, REDUCTIONS)
        _seen(self.op, self.target, self.tensor, self.to)


def _seen(what: str, place: Buffer, tensor: Type, index: tuple[IntExpr, ...]) -> None:
    """UserError unless a tensor lies in a buffer's memory and has so many dimensions."""
    if tensor.dtype is not place.type.dtype or tensor.span > place.type.span:
        raise UserError(f"{what}: {tensor} does not lie in the memory of {place.name}: {place.type}")
    if len(index) != tensor.rank:
        raise UserError(f"{what}: {len(index)} indices into {place.name}, seen as {tensor}")


class LoadMatrix(Statement, dialect="kernel", op="load_matrix"):
    """ldmatrix: `instruction` names a record of hw.ldmatrix; every lane names a row. Registers are 32 bits wide."""

    writes, together = ("target",), "warp"

    instruction: str
    target: Registers
    to: tuple[IntExpr, ...]
    source: Shared
    at: tuple[IntExpr, ...]


class StoreMatrix(Statement, dialect="kernel", op="store_matrix"):
    """stmatrix: the reverse of ldmatrix. Registers are 32 bits wide, or hold elements of the target's type."""

    writes, together = ("target",), "warp"

    instruction: str
    target: Shared
    to: tuple[IntExpr, ...]
    source: Registers
    at: tuple[IntExpr, ...]


class Multiply(Statement, dialect="kernel", op="multiply"):
    """d += a * b by a matrix instruction, a record of hw.mma_sync. Registers of a and b are 32 bits wide, or
    elements.
    """

    writes, together = ("d",), "warp"

    instruction: str
    d: Registers
    d_at: tuple[IntExpr, ...]
    a: Registers
    a_at: tuple[IntExpr, ...]
    b: Registers
    b_at: tuple[IntExpr, ...]


class MultiplyAsync(Statement, dialect="kernel", op="multiply_async"):
    """d += a * b by the four warps of a warpgroup, a record of hw.wgmma; d may be used again once its group was waited
    for. Where `fresh` is >= 0, d becomes a * b, whatever it was.

    b is a slab of shared memory, swizzled, whose rows are as wide as the swizzle; a too, or it is in registers, 32 bits
    wide or elements. Rows go along k; of operands that are `transposed` ("a", "b" or "ab"), along m or n.
    """

    writes, together = ("d",), "warpgroup"
    named = {"transposed": "word", "fresh": "condition"}

    instruction: str
    d: Registers
    d_at: tuple[IntExpr, ...]
    a: Buffer
    a_at: tuple[IntExpr, ...]
    b: Shared
    b_at: tuple[IntExpr, ...]
    fresh: IntExpr = -1
    transposed: str = ""

    def check(self) -> None:
        _one_of("transposed", self.transposed, ("", "a", "b", "ab"))
        if "a" in self.transposed and isinstance(self.a, Registers):
            raise UserError("multiply_async: an operand in registers is not transposed")
        for place in (self.a, self.b):
            if isinstance(place, Shared) and place.swizzle:
                kind = place.type
                wide = kind.static_shape[-1] * kind.dtype.size if kind.rank > 1 else 0
                if (wide, *kind.element_strides[-2:]) != (place.swizzle, *kind.static_shape[-1:], 1):
                    raise UserError(
                        f"multiply_async: rows of {place.name} are {wide} bytes wide, its swizzle spans {place.swizzle}"
                    )


class For(Node, dialect="kernel", op="for"):
    """`body` for every value of `axis`, in order. Unrolled loops leave no loop behind.

    How many there are, the extent of the axis, may be an expression; it is what that is before the first.
    """

    axis: Var
    body: tuple[Node, ...]
    unrolled: bool = False

    def check(self) -> None:
        if self.unrolled and not isinstance(self.axis.extent, int):
            raise UserError(f"an unrolled loop has a constant number of steps, not {self.axis.extent}")
        if bounds(self.axis.extent)[1] is None:
            raise UserError(f"a loop has at most so many steps, and nothing bounds {self.axis.extent}")

    @property
    def most(self) -> int:
        """How many values there are at most."""
        return max(bounds(self.axis.extent)[1] or 0, 0)


class If(Node, dialect="kernel", op="if"):
    """`body` where every expression of `inside` is >= 0."""

    inside: tuple[IntExpr, ...]
    body: tuple[Node, ...]


class Role(Node, dialect="kernel", op="role"):
    """`body` for warps `first` to `first + count - 1`, each thread of which takes `registers` registers from here on
    (0: as it has).
    """

    first: int
    count: int
    body: tuple[Node, ...]
    registers: int = 0

    def check(self) -> None:
        if self.registers and (self.first % 4 or self.count % 4 or self.registers not in range(24, 241, 8)):
            raise UserError("a role with registers is of whole warpgroups, and takes a multiple of 8 from 24 to 240")


Map = tuple[Buffer, Type, tuple[int, ...], int]
"""A tensor map: of which buffer in global memory, seen as which tensor, with which box and swizzle."""


def map_of(s: TensorLoad | TensorStore) -> Map:
    """The tensor map of a box."""
    place, slab = (s.source, s.target) if isinstance(s, TensorLoad) else (s.target, s.source)
    return place, s.tensor, s.box, slab.swizzle


def walk(body: tuple[Node, ...]) -> Iterator[Node]:
    """Every statement, also inside loops, conditions and roles, in order."""
    for s in body:
        yield s
        if isinstance(s, For | If | Role):
            yield from walk(s.body)


def changed(body: tuple[Node, ...]) -> frozenset[Integer]:
    """The integers that statements change, also inside loops, conditions and roles."""
    return frozenset(s.variable for s in walk(body) if isinstance(s, SetInteger | DeclareInteger))


def varying(body: tuple[Node, ...], names: tuple[str, ...]) -> frozenset[Integer]:
    """The integers whose value may depend on the variables of these names, or on data."""
    found: set[Integer] = set()
    given = [s for s in walk(body) if isinstance(s, SetInteger | DeclareInteger)]
    while more := {s.variable for s in given if s.variable not in found and depends(s.value, names, found)}:
        found |= more
    return frozenset(found)


def depends(e: IntExpr, names: tuple[str, ...], integers: Collection[Integer] = ()) -> bool:
    """Whether an expression mentions variables of these names, some integers, or data."""
    parts = topological([e], stop=lambda x: isinstance(x, Var)) if isinstance(e, Expr) else []
    return any(isinstance(x, Loaded) or x in integers or getattr(x, "name", "") in names for x in parts)


def _one_of(what: str, word: str, words: tuple[str, ...]) -> None:
    if word not in words:
        raise UserError(f"{what}: {word!r} is none of {', '.join(map(repr, words))}")
