"""Statements that are no calls: values and integers named, loops, conditions, roles."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from terrazzo.errors import UserError
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.kernel.values import Integer, Registers, Value
from terrazzo.ir.expr import Expr, IntExpr, Loaded, Var, bounds
from terrazzo.ir.node import Node, per_node, topological


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


def walk(body: tuple[Node, ...]) -> Iterator[Node]:
    """Every statement, also inside loops, conditions and roles, in order."""
    for s in body:
        yield s
        if isinstance(s, For | If | Role):
            yield from _within(s)


@per_node
def _within(s: For | If | Role) -> tuple[Node, ...]:
    return tuple(walk(s.body))


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
