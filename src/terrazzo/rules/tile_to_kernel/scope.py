"""What is known at a place of the kernel that is being written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Loaded
from terrazzo.ir.node import Node, substitute, topological, transform
from terrazzo.ir.types import i64
from terrazzo.rules.tile.digits import Digit, zero


@dataclass
class Scope:
    """What is known where statements are written.

    `env` maps axes to expressions and terms to terms of Kernel IR; `digits` has the digits of the axes outside;
    `places` maps loads, up to the names of loops, to the registers that hold them, and `kept` those that are to fill
    such registers; `threads` has the bits of lanes and warps that axes outside bind; `pending` are conditions of axes
    outside under which memory may be touched, where they cannot stand around a barrier.
    """

    env: dict[Any, Any] = field(default_factory=dict)
    digits: dict[Any, list[Digit]] = field(default_factory=dict)
    places: dict[Node, k.Registers] = field(default_factory=dict)
    kept: dict[Node, tuple[k.Registers, tuple[Any, ...]]] = field(default_factory=dict)
    threads: frozenset[tuple[str, int]] = frozenset()
    pending: tuple[IntExpr, ...] = ()

    def inner(self) -> Scope:
        return Scope(dict(self.env), dict(self.digits), dict(self.places), {}, self.threads, self.pending)

    def __call__(self, x: Any) -> Any:
        """A term or an index in terms of Kernel IR."""
        return substitute(x, self.env)

    def all(self, xs: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(map(self, xs))


def noting_nothing(term: Any, inside: Sequence[IntExpr]) -> Any:
    """A term whose indices from data are 0 where something `inside` is negative. Threads beyond the end compute it,
    too, of what is not loaded there: they must not note that an index is out of range.
    """
    if not inside or not any(isinstance(x, Loaded) for x in topological([term])):
        return term
    conditions = [l.apply("ge", l.Index(e), l.Literal(0, i64)) for e in inside]
    among = conditions[0]
    for condition in conditions[1:]:
        among = l.apply("and_", among, condition)

    def visit(x: Any) -> Any:
        if not isinstance(x, Loaded):
            return x
        kind = x.value.dtype  # type: ignore[attr-defined]
        return Loaded(l.apply("where", among, x.value, l.Literal(zero(kind), kind)), x.extent)

    return transform(term, visit)
