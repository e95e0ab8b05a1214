"""What a statement of Kernel IR says of itself: how it is written, what it names and writes, who executes it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Protocol

from terrazzo.errors import UserError
from terrazzo.ir.dialects.kernel.values import Registers, Shared
from terrazzo.ir.dialects.loop import Buffer
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.node import Node

PLACES: dict[str, type[Buffer]] = {"place": Buffer, "shared": Shared, "registers": Registers}
"""What kind of place an argument names."""
_KINDS = {
    "Buffer": "place",
    "Shared": "shared",
    "Registers": "registers",
    "int": "number",
    "str": "word",
    "Node": "term",
    "IntExpr": "expression",
    "IntExpr | None": "expression",
    "tuple[int, ...]": "box",
    "Type | None": "type",
}
INDEX = "tuple[IntExpr, ...]"
Function = tuple[Any, ...]
"""A function of CUDA that a statement calls: its name in `hw.functions`, and what it is made for."""


class Cuda(Protocol):
    """What the CUDA of a statement is made of: how its writer calls things."""

    begins: bool
    """Whether nobody has touched memory yet, but for barriers that came into being."""

    def name(self, place: Buffer) -> str:
        """Of a place."""

    def index(self, e: IntExpr) -> str:
        """The value of an index expression."""

    def guard(self, inside: Sequence[IntExpr]) -> str:
        """Whether expressions are not negative."""

    def term(self, x: Node) -> str:
        """The value of a term."""

    def element(self, place: Buffer, at: Sequence[IntExpr]) -> str:
        """An element of a place."""

    def address(self, place: Buffer, at: Sequence[IntExpr]) -> str:
        """A pointer to it."""

    def shared(self, place: Buffer, at: Sequence[IntExpr]) -> str:
        """Its address in shared memory."""

    def slab(self, place: Buffer, at: Sequence[IntExpr]) -> str:
        """The address in shared memory where a slab begins, which is not swizzled."""

    def descriptor(self, place: Buffer, at: Sequence[IntExpr], transposed: bool) -> str:
        """What wgmma takes for a slab."""

    def group(self, place: Buffer, at: Sequence[IntExpr], count: int) -> str:
        """So many registers as an array."""

    def packed(self, place: Buffer, at: Sequence[IntExpr], count: int) -> str:
        """So many registers of 32 bits as an array, perhaps of several elements each."""

    def words(self, place: Buffer, at: Sequence[IntExpr], count: int) -> str:
        """The same, to be written."""

    def map(self, key: Any) -> str:
        """A tensor map."""

    def record(self, instruction: str) -> Any:
        """The record of an instruction."""

    def settled(self) -> list[str]:
        """The accumulators that the next wait for products settles."""


@dataclass(frozen=True)
class Argument:
    """An argument in the text of a statement: its kind, and the fields that it gives. One that is `named` follows its
    name; one that is `optional` may be missing.
    """

    kind: str
    fields: tuple[str, ...]
    named: bool = False
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.fields[0]}={self.kind}" if self.named else self.kind + "?" * self.optional


class Statement(Node):
    """A statement that is written as a call. Its arguments are its fields, in order: a place and its index are one, a
    barrier and its slot; conditions `inside` belong to the place that is read. So is its CUDA, which it says itself.
    """

    writes: ClassVar[tuple[str, ...]] = ()
    """The fields that are places it writes; it reads the others."""
    together: ClassVar[str] = ""
    """Who must come together to it: "warp", "warpgroup", "block", "cluster"; or it is for a single "lane" of a warp."""
    named: ClassVar[dict[str, str]] = {}
    """The fields that are written with their name, and their kinds."""
    uses: ClassVar[tuple[str, ...]] = ()
    """The functions of CUDA that each of them calls, by their names in `hw.functions`."""

    @classmethod
    @cache
    def arguments(cls) -> tuple[Argument, ...]:
        """How it is written."""
        kinds = {f: str(cls.__annotations__[f]) for f in cls._fields}
        found: list[Argument] = []
        rest = [f for f in cls._fields if f not in cls.named]
        while rest:
            field = rest.pop(0)
            kind, after = kinds[field], kinds[rest[0]] if rest else ""
            optional = field in cls._defaults
            if kind == "Barriers":
                found.append(
                    Argument("barrier", (field, rest.pop(0))) if after == "IntExpr" else Argument("barriers", (field,))
                )
            elif kind in ("Buffer", "Shared", "Registers") and after == INDEX:
                fields = (field, rest.pop(0))
                guarded = field == "source" and "inside" in kinds
                found.append(Argument("source", (*fields, "inside")) if guarded else Argument(_KINDS[kind], fields))
            elif field != "inside":
                found.append(Argument(_KINDS[kind], (field,), optional=optional))
        return (*found, *(Argument(kind, (f,), named=True, optional=True) for f, kind in cls.named.items()))

    def places(self) -> Iterator[tuple[str, Buffer, str, tuple[IntExpr, ...]]]:
        """The places it names and the indices into them, each with its field."""
        for argument in self.arguments():
            if argument.kind in PLACES or argument.kind == "source":
                place, index = argument.fields[:2]
                yield place, getattr(self, place), index, getattr(self, index)

    def functions(self, cluster: int) -> tuple[Function, ...]:
        """The functions of CUDA that it calls, in a kernel whose clusters have so many blocks."""
        return tuple((name,) for name in self.uses)

    def cuda(self, w: Cuda) -> list[str]:
        """Its lines of CUDA."""
        raise NotImplementedError


def one_of(what: str, word: str, words: Collection[str]) -> None:
    """UserError for a word that is none of these."""
    if word not in words:
        raise UserError(f"{what}: {word!r} is none of {', '.join(map(repr, words))}")


def written(s: Node) -> list[Any]:
    """The places that a statement written as a call writes."""
    return [getattr(s, field) for field in s.writes] if isinstance(s, Statement) else []
