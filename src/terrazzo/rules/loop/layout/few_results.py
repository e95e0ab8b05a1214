"""Convolutions of few results for a point, with which an instruction has few columns to fill: ways that fill them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.layout.lookups import stored_first
from terrazzo.rules.loop.layout.phases import in_phases
from terrazzo.rules.loop.layout.whole_steps import with_whole_steps

Price = Callable[[Sequence[l.Kernel]], float]
FEW = 32
"""Columns that the smallest boxes have: of as many results and more for a point, tiles are filled."""
SURE = 0.8
"""How much of the time of other ways it may take to fill them: there are two kernels then, or three, and more memory is
in use.
"""


def has_few(kernel: l.Kernel, filters: l.Load) -> bool:
    """Whether a convolution with these filters has few results for a point."""
    columns: Any = math.prod(a.extent for a in kernel.axes if a in filters.free)
    return bool(columns < FEW)


def surely(
    program: l.Program,
    log: Log,
    told: tuple[str, str, str],
    find: Callable[[l.Kernel, Set[str]], tuple[l.Kernel, ...] | None],
    price: Price,
) -> l.Program:
    """`program` with convolutions in several kernels, as `find` has them, given the names there are, where these take
    less by far than it does as it is, or with the steps that are of anything, or phase by phase. `told` are the pass,
    the rule, and how it is done otherwise.
    """
    names = {b.name for s in program.steps for b in s.writes} | {b.name for b in program.inputs}

    def prices(s: l.Kernel, found: Sequence[Any]) -> tuple[float, float]:
        others: list[Any] = [[s], [with_whole_steps(s)], *in_phases(s, names)]
        return min(map(price, others)), price(found)

    return stored_first(program, log, told, lambda s, names, _: find(s, names), prices, SURE)
