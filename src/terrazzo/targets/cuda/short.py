"""Whole numbers of 64 bits that are known to fit into 32: processors compute with these, and take several instructions
for longer ones, some of them slow ones.

Kernel IR says i64, and means it: what is computed in fewer bits is the same number, since ranges say so (`ir/ranges`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.node import Node
from terrazzo.ir.ranges import Range, decided, reach
from terrazzo.ir.types import i64
from terrazzo.targets.terms import Scope, index, term

_SAME = ("add", "sub", "mul", "min", "max", "neg", "abs")
"""Functions of whole numbers that give the same in 32 bits where operands and result fit; so do these, and `where`."""
_TESTS = ("lt", "le", "gt", "ge", "eq", "ne")


class Short:
    """Which values of a kernel, as it is written, are in 32 bits, by their names. What they may be, the scope knows."""

    def __init__(self, scope: Scope, names: Mapping[Node, str] | None = None) -> None:
        self.scope, self.names = scope, dict(names or {})

    def inner(self) -> Short:
        """The same for what is written in braces."""
        return Short(self.scope, self.names)

    def of(self, x: Node) -> Range | None:
        """The range of a value or a term."""
        return self.scope.spans.get(x) if isinstance(x, k.Value) else reach(x, self.of)

    def text(self, x: Any) -> str | None:
        """A term computed in 32 bits, where it is a whole number that has so many, or made of such; else None."""
        if isinstance(x, k.Value):
            return self.names.get(x)
        fits = self.fits(x)
        match x:
            case l.Literal() if x.type is i64 and fits:
                return f"((i32){int(x.value)})"
            case l.Index() if fits:
                return f"(i32){index(x.value, self.scope)}"
            case l.Apply():
                return self.applied(x, fits)
        return None

    def applied(self, x: l.Apply, fits: bool) -> str | None:
        """What a function gives, in 32 bits or of operands that have these."""
        (known, name) = decided(x, self.of), x.fn.name
        if known is not None:
            return "true" if known else "false"
        if is_cast(x.fn):
            return self.converted(x, x.args[0], fits)
        given: list[Any] = list(x.args[1:] if name == "where" else x.args)
        made = [self.whole(a) for a in given]
        if x.dtype is i64 and fits:
            if None in made or name not in (*_SAME, "where"):
                return f"(i32){term(x, self.scope)}"
            if name == "where":
                return x.fn.c.format(term(x.args[0], self.scope), *made)
            return f"tz_{name}({', '.join(map(str, made))})"
        return x.fn.c.format(*made) if name in _TESTS and None not in made else None

    def converted(self, x: l.Apply, of: Any, fits: bool) -> str | None:
        """What a conversion gives, as `applied`."""
        if x.dtype is i64:
            return f"tz_cast<i32>({term(of, self.scope)})" if fits and of.dtype.name in ("f32", "i32") else None
        inner = self.whole(of) if x.dtype.is_float else None
        return x.fn.c.format(inner) if inner else None

    def whole(self, x: Any) -> str | None:
        """A whole number in 32 bits."""
        return self.text(x) if x.dtype is i64 else None

    def fits(self, x: Any) -> bool:
        found = self.of(x)
        return found is not None and x.dtype is i64 and -(1 << 31) < found[0] <= found[1] < 1 << 31

    def let(self, s: k.Let, name: str) -> None:
        """Keep what is known of a value that has been written, and what it is called, in longer numbers too."""
        found = self.of(s.term)
        self.names.pop(s.value, None)
        self.scope.spans.pop(s.value, None)
        self.scope.names[s.value] = name
        if found is not None:
            self.scope.spans[s.value] = found
        if self.fits(s.term):
            self.names[s.value], self.scope.names[s.value] = name, f"((i64){name})"
