"""Statements that move elements: by threads, by asynchronous copies, by TMA."""

from __future__ import annotations

from terrazzo.errors import UserError
from terrazzo.ir.dialects.kernel.statement import Cuda, Function, Statement, one_of
from terrazzo.ir.dialects.kernel.values import Barriers, Shared
from terrazzo.ir.dialects.loop import Buffer
from terrazzo.ir.expr import Expr, IntExpr, Loaded
from terrazzo.ir.node import Node, topological
from terrazzo.ir.types import Type


class Move(Statement, dialect="kernel", op="move"):
    """`count` elements that lie one behind the other in both places, in as few accesses as their size allows (16 bytes
    each).
    """

    writes = ("target",)
    uses = ("ld/st",)

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

    def cuda(self, w: Cuda) -> list[str]:
        return [f"move<{self.count}>({w.address(self.target, self.to)}, {w.address(self.source, self.at)});"]


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
        one_of("atomic", self.function, ("add", "min", "max"))
        kind = self.buffer.type.dtype
        if kind.name not in ("f32", "i32") or (kind.is_float and self.function != "add"):
            raise UserError(f"there is no atomic {self.function} of {kind}")
        given = self.value.dtype  # type: ignore[attr-defined]
        if given is not kind:
            raise UserError(f"atomic: {given} into {self.buffer.name}, which holds {kind}")

    def cuda(self, w: Cuda) -> list[str]:
        at = f"&{w.element(self.buffer, self.index)}"
        return [f"atomic{self.function.capitalize()}({at}, {w.term(self.value)});"]


class AsyncCopy(Statement, dialect="kernel", op="async_copy"):
    """cp.async: `count` elements from global into shared memory, zeros where an expression of `inside` is negative."""

    writes = ("target",)
    uses = ("cp.async",)

    target: Shared
    to: tuple[IntExpr, ...]
    source: Buffer
    at: tuple[IntExpr, ...]
    count: int
    inside: tuple[IntExpr, ...] = ()

    def check(self) -> None:
        if self.count * self.source.type.dtype.size not in (4, 8, 16):
            raise UserError(f"cp.async moves 4, 8 or 16 bytes, not {self.count * self.source.type.dtype.size}")

    def cuda(self, w: Cuda) -> list[str]:
        size = self.count * self.source.type.dtype.size
        source, inside = w.address(self.source, self.at), w.guard(self.inside)
        if inside and any(isinstance(x, Loaded) for e in self.at if isinstance(e, Expr) for x in topological([e])):
            source = f"{inside} ? {source} : {w.name(self.source)}"  # outside there are no numbers of places to load
        told = f", {inside}" if inside else ""
        return [f"cp_async<{size}>({w.address(self.target, self.to)}, {source}{told});"]


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

    def functions(self, cluster: int) -> tuple[Function, ...]:
        return ("mbarrier",), ("elected",), ("tma_load", len(self.box), cluster > 1)

    def cuda(self, w: Cuda) -> list[str]:
        at = ", ".join(w.index(e) for e in reversed(self.at))
        place = w.shared(self.barriers, (self.slot,))
        function, ranks = ("tma_load_to", f" {self.ranks},") if self.ranks else ("tma_load", "")
        slab, box = w.slab(self.target, self.to), f"&{w.map(map_of(self))}"
        return [f"{function}_{len(self.at)}d({slab}, {box}, {place},{ranks} {at});"]


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
        one_of("tensor_store", self.reduction, REDUCTIONS)
        _seen(self.op, self.target, self.tensor, self.to)

    def functions(self, cluster: int) -> tuple[Function, ...]:
        return ("bulk",), ("elected",), ("tma_store", len(self.box), self.reduction)

    def cuda(self, w: Cuda) -> list[str]:
        at = ", ".join(w.index(e) for e in reversed(self.to))
        slab, box = w.slab(self.source, self.at), f"&{w.map(map_of(self))}"
        return [f"tma_{self.reduction or 'store'}_{len(self.to)}d({box}, {slab}, {at});"]


def _seen(what: str, place: Buffer, tensor: Type, index: tuple[IntExpr, ...]) -> None:
    """UserError unless a tensor lies in a buffer's memory and has so many dimensions."""
    if tensor.dtype is not place.type.dtype or tensor.span > place.type.span:
        raise UserError(f"{what}: {tensor} does not lie in the memory of {place.name}: {place.type}")
    if len(index) != tensor.rank:
        raise UserError(f"{what}: {len(index)} indices into {place.name}, seen as {tensor}")


Map = tuple[Buffer, Type, tuple[int, ...], int]
"""A tensor map: of which buffer in global memory, seen as which tensor, with which box and swizzle."""


def map_of(s: TensorLoad | TensorStore) -> Map:
    """The tensor map of a box."""
    place, slab = (s.source, s.target) if isinstance(s, TensorLoad) else (s.target, s.source)
    return place, s.tensor, s.box, slab.swizzle
