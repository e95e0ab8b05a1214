"""Statements of Kernel IR, written one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from terrazzo.ir.address import mentions
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Var, at_least
from terrazzo.ir.node import Node, substitute
from terrazzo.ir.types import DType, Type, u64
from terrazzo.rules.tile.digits import Digit


class Builder:
    """Where statements go, and the places and names they use. `tensors` are the names that are taken."""

    def __init__(self, tensors: set[str]) -> None:
        self.tensors = tensors
        self.out: list[Node] = []
        self.shared: list[k.Shared] = []
        self.counts: dict[str, int] = {}
        self.depth = 0

    def fresh(self, prefix: str) -> str:
        """A name that no other place or value has, nor a tensor of the kernel."""
        self.counts[prefix] = self.counts.get(prefix, -1) + 1
        name = f"{prefix}{self.counts[prefix]}"
        return self.fresh(prefix) if name in self.tensors else name

    def add(self, *statements: Node) -> None:
        """Write statements where writing is."""
        self.out += statements

    def inside(self, write: Callable[[], None]) -> tuple[Node, ...]:
        """The statements that `write` writes."""
        outer, self.out = self.out, []
        write()
        found, self.out = tuple(self.out), outer
        return found

    def earlier(self, at: int | None, write: Callable[[], None]) -> None:
        """`write` before what was written after the first `at` statements here; or here."""
        found = self.inside(write)
        at = len(self.out) if at is None else at
        self.out[at:at] = found

    def loops(self, variables: Sequence[tuple[Var, bool]], write: Callable[[], None]) -> None:
        """Loops over (variable, unrolled), the first outermost."""
        if not variables:
            return write()
        (axis, unrolled), *rest = variables
        self.depth += 1
        body = self.inside(lambda: self.loops(rest, write))
        self.depth -= 1
        self.out.append(k.For(axis, body, unrolled))

    def peeled(self, digits: Sequence[Digit], inside: Sequence[IntExpr], write: Callable[[], None]) -> None:
        """Loops over digits, the first outermost. What no step changes is tested once, around them: between loads that
        are each in a branch of their own, a thread waits. Only the last steps of the outermost one test the rest of
        `inside`, where the others cannot fail.
        """
        if fixed := [e for e in inside if digits and not any(mentions(e, d.variable) for d in digits)]:
            moving = [e for e in inside if e not in fixed]
            return self.where(fixed, partial(self.peeled, digits, moving, write))
        self.depth += len(digits)
        body = self.inside(write)
        self.depth -= len(digits)
        loops = [(d.variable, d.unrolled) for d in digits]
        whole = always(digits[0], inside) if inside and digits and (len(digits) == 1 or not digits[0].unrolled) else 0
        if not whole:
            return self.loops(loops, lambda: self.where(inside, partial(self.add, *body)))
        i = digits[0].variable
        first = Var(i.name, whole)
        every = [substitute(x, {i: first}) for x in body]
        self.loops([(first, digits[0].unrolled), *loops[1:]], partial(self.add, *every))
        for last in range(whole, digits[0].size):
            rest = [substitute(x, {i: last}) for x in body]
            tests = [substitute(e, {i: last}) for e in inside]
            self.loops(loops[1:], partial(self.where, tests, partial(self.add, *rest)))

    def where(self, inside: Sequence[IntExpr], write: Callable[[], None]) -> None:
        """`write` under a condition, unless it always holds."""
        open_ = tuple(dict.fromkeys(e for e in inside if not at_least(e, 0)))
        if not open_:
            return write()
        self.out.append(k.If(open_, self.inside(write)))

    def let(self, term: Node, prefix: str = "v") -> k.Value:
        """A value with a name."""
        name = k.Value(self.fresh(prefix), term.dtype)  # type: ignore[attr-defined]
        self.out.append(k.Let(name, term))
        return name

    def registers(self, prefix: str, dtype: DType, shape: Sequence[int], init: l.Literal | None = None) -> k.Registers:
        """Registers of a thread."""
        place = k.Registers(self.fresh(prefix), Type(dtype, tuple(shape)))
        self.out.append(k.Declare(place, init))
        return place

    def memory(self, prefix: str, kind: Type, swizzle: int = 0, at: int = k.BEHIND) -> k.Shared:
        """Shared memory of the block."""
        place = k.Shared(self.fresh(prefix), kind, swizzle, at)
        self.shared.append(place)
        return place

    def barriers(self, prefix: str, slots: int, arrivals: int) -> k.Barriers:
        """mbarriers, one for each slot."""
        place = k.Barriers(self.fresh(prefix), Type(u64, (slots,)), 0, k.BEHIND, arrivals)
        self.shared.append(place)
        return place


def always(digit: Digit, inside: Sequence[IntExpr]) -> int:
    """How many first values of a digit make conditions hold whatever the other variables are; 0 where that leaves too
    many, or all.
    """
    whole = 0
    while whole < digit.size and all(at_least(substitute(e, {digit.value: whole}), 0) for e in inside):
        whole += 1
    return whole if whole >= digit.size - 1 and whole < digit.size else 0
