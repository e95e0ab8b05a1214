"""What is known at a place of the kernel that is being written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.node import Node, substitute
from terrazzo.rules.tile.digits import Digit


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
