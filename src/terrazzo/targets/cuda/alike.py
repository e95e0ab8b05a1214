"""Roles that do the same but for where they do it, as one text.

Each team of an agent has a role of its own in Kernel IR, where every number is known. In CUDA they share their code:
what follows the sums of a tile is long and runs once for each of them, so that much of the time fetches instructions.
Where numbers differ they grow evenly from team to team: `a` in the first, `a + d` in the second.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Any

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.expr import Expr, IntExpr, Sum, Var, terms_of
from terrazzo.ir.node import Node, substitute

TEAM = "team"


class TeamSync(k.Statement):
    """Where the warps of a team meet, each team at a barrier of its own."""

    together = "warp"

    number: IntExpr
    warps: int

    @classmethod
    def make(cls, number: IntExpr, warps: int) -> k.Statement:
        return k.Sync(number, warps) if isinstance(number, int) else cls(number, warps)

    def functions(self, cluster: int) -> tuple[k.Function, ...]:
        return (("named",),)

    def cuda(self, w: k.Cuda) -> list[str]:
        return [f"sync({w.index(self.number)}, {self.warps * k.WARP});"]


class _Apart(Exception):
    """Two texts differ in more than names and numbers."""


def alike(kernel: k.Kernel) -> tuple[k.Kernel, str]:
    """A kernel whose teams share their text, and what says which of them a warp is in (nothing: none do)."""
    body: list[Node] = []
    number = ""
    for (count, registers), run in groupby(kernel.body, _shape):
        roles: list[Any] = list(run)
        while count and not number and len(roles) > 1:  # who loads may have as many warps
            if (shared := _shared(roles)) is not None:
                number = f"(warp - {roles[0].first}) / {count}"
                roles = [k.Role(roles[0].first, count * len(roles), shared, registers)]
            else:
                body.append(roles.pop(0))
        body += roles
    if not number:
        return kernel, ""
    fields = dict(zip(kernel._fields, kernel.values, strict=True))
    return k.Kernel(**fields | {"body": tuple(body)}), number


def _shape(s: Node) -> tuple[int, int]:
    return (s.count, s.registers) if isinstance(s, k.Role) else (0, 0)


def _shared(roles: Sequence[k.Role]) -> tuple[Node, ...] | None:
    """The one text of several roles, whose warps follow each other; None where there is none."""
    first, *others = roles
    if any(b.first != a.first + a.count for a, b in zip(roles, others, strict=False)):
        return None
    team = Var(TEAM, len(roles))
    try:
        found: tuple[Node, ...] = _Pair(team).value(first.body, others[0].body, True)
        for n, other in enumerate(others):
            mine = tuple(substitute(s, {team: n + 1}) for s in found)
            if _Pair(team).value(mine, other.body, True) != mine:
                return None
    except _Apart:
        return None
    return found


class _Pair:
    """Finds what two texts have in common. `names` are those of the second one in words of the first."""

    def __init__(self, team: Var) -> None:
        self.team = team
        self.names: dict[Any, Any] = {}
        self.taken: set[Any] = set()
        self.variables: dict[Any, Any] = {}

    def value(self, x: Any, y: Any, number: bool) -> Any:
        """A value of a field; of those that may be expressions, a `number` may differ."""
        if x is y:
            return x
        if isinstance(x, tuple) and isinstance(y, tuple) and len(x) == len(y):
            return tuple(self.value(a, b, number) for a, b in zip(x, y, strict=True))
        if isinstance(x, k.Registers | k.Value | Var):
            return self.named(x, y)
        if isinstance(x, k.Sync) and isinstance(y, k.Sync) and x.warps == y.warps > 0:
            return TeamSync.make(self.expression(x.number, y.number), x.warps)
        if isinstance(x, Node) and type(x) is type(y) and not isinstance(x, Expr):
            return type(x).make(*self.fields(x, y))
        if isinstance(x, int | Expr) and isinstance(y, int | Expr) and number and not isinstance(x, bool):
            return self.expression(x, y)
        if type(x) is type(y) and x == y:
            return x
        raise _Apart

    def fields(self, x: Node, y: Node) -> list[Any]:
        """What the fields of two nodes of a kind have in common."""
        return [self.value(a, b, free) for a, b, free in zip(x.values, y.values, _numbers(type(x)), strict=True)]

    def named(self, x: Any, y: Any) -> Any:
        """What the text names: one is called as the other, everywhere."""
        if type(x) is not type(y) or self.names.get(y, x) is not x:
            raise _Apart
        if y not in self.names:
            rest = [(a, b) for f, a, b in zip(x._fields, x.values, y.values, strict=True) if f != "name"]
            if x in self.taken or any(self.value(a, b, True) != a for a, b in rest):
                raise _Apart
            self.names[y] = x
            self.taken.add(x)
            if isinstance(y, Var):
                self.variables[y] = x
        return x

    def expression(self, x: Any, y: Any) -> Any:
        """An expression that is x for the first team and y for the second."""
        y = substitute(y, self.variables)
        if isinstance(further := y - x, int):
            return x + self.team * further
        if not isinstance(x, Sum) and not isinstance(y, Sum):
            if type(x) is not type(y) or isinstance(x, Var):
                raise _Apart
            return type(x).make(*self.fields(x, y))
        mine, others = (dict(terms_of(e)) for e in (x, y))
        found: Any = mine.pop((), 0) + self.team * (others.pop((), 0) - terms_of(x).get((), 0))
        for factors in [f for f in mine if others.get(f) == mine[f]]:  # what they have in common
            found = found + math.prod(factors, start=mine.pop(factors))
            del others[factors]
        if len(mine) != len(others):
            raise _Apart
        for (a, times), (b, again) in zip(mine.items(), others.items(), strict=True):
            if times != again or len(a) != len(b):
                raise _Apart
            found = found + math.prod(map(self.expression, a, b), start=times)
        return found


@cache
def _numbers(kind: type) -> tuple[bool, ...]:
    """Of each field of a node, whether it may hold an expression where a number is."""
    fields: Any = dataclasses.fields(kind)
    return tuple(any(word in str(f.type) for word in ("Expr", "Node")) for f in fields)
