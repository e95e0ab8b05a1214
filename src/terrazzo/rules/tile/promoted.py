"""Sums that begin afresh in every step: in which groups its products are, and what registers have room for."""

from __future__ import annotations

import math

from terrazzo.hw.products import matrix
from terrazzo.hw.wgmma import WarpgroupInstruction
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.plan import Agent, Plan, Product
from terrazzo.rules.loop.precision.number_parts import every_digit
from terrazzo.rules.tile.agents import LOAD
from terrazzo.rules.tile.draft import Draft

TOGETHER = 4
"""Steps whose sums are added up by themselves. 4096 products of normal numbers are 2.6e-7 off where each of three sums
a step is added to all before it, and 1.0e-7 so (emulated); with 8 steps they are as far off, with 2 1.2e-7.
"""
SPARE, OPEN, REGISTERS = 40, 60, 65536
"""Registers that a thread needs beside its sums, more where groups of products are open, and those of a processor."""

Group = tuple[float, tuple[int, int]]
"""Products of a step that are waited for together: how they are scaled, and which of so many pieces of it they are."""


def scales(draft: Draft, p: Product) -> tuple[float, ...]:
    """How the products of a step are scaled, the small ones first."""
    return tuple(dict.fromkeys(draft.products[p.sites[0]].scales))


def halves(draft: Draft, p: Product) -> int:
    """Into how many pieces a step of a warpgroup's large products is cut: two where someone wants all digits of
    float32, and that leaves two instructions each.
    """
    site, sums = draft.site(p.sites[0]), draft.products[p.sites[0]]
    if not p.promote or not every_digit(sums.scales):
        return 1
    factors = [f for a in sums.reduce.axes for f in draft.binding(a, site)]
    deep = [f.size for f in factors if f.level == "reg" and f.size > 1]
    own = isinstance(matrix(p.on), WarpgroupInstruction) and p.a != "ldmatrix"
    return 2 if own and len(deep) == 1 and deep[0] % 4 == 0 else 1


def groups(draft: Draft, p: Product) -> list[Group]:
    """The products of a step in the order in which they are multiplied."""
    *small, last = scales(draft, p)
    pieces = halves(draft, p)
    return [*((scale, (0, 1)) for scale in small), *((last, (n, pieces)) for n in range(pieces))]


def few(draft: Draft, plan: Plan, p: Product, steps: int) -> bool:
    """Whether sums of a few of so many steps are added up by themselves: where someone wants all digits of float32, and
    there are registers for them.
    """
    if not every_digit(scales(draft, p)) or p.a != "shared" or not p.promote or steps < TOGETHER:
        return False
    return 3 * _sums(draft, p) + SPARE <= _room(plan, p)


def opens(draft: Draft, plan: Plan, p: Product) -> bool:
    """Whether a group of products is on its way while the sums of the one before it are added up: where there are
    registers for the sums of all groups of a step, and of small products all are scaled alike.
    """
    own = isinstance(matrix(p.on), WarpgroupInstruction) and any(a.name == LOAD for a in plan.all(Agent))
    if not own or not p.promote or p.a != "shared" or len(p.sites) > 1 or len(scales(draft, p)) > 2:
        return False
    held, count = every_digit(scales(draft, p)), len(groups(draft, p))
    return count > 1 and (1 + held + count) * _sums(draft, p) + OPEN <= _room(plan, p)


def _sums(draft: Draft, p: Product) -> int:
    """Registers of a thread for the sums of a tile."""
    site, on = draft.site(p.sites[0]), matrix(p.on)
    free = [a for a in draft.tiled if a in draft.products[p.sites[0]].reduce.free]
    each = math.prod(f.size for a in free for f in draft.binding(a, site) if f.level == "reg")
    return each * (on.d.elements if on is not None else 1) * len(p.sites)


def _room(plan: Plan, p: Product) -> int:
    """Registers of a thread."""
    warps, agent = sum(a.warps for a in plan.all(Agent)), plan.named(p.agent)
    return agent.registers or REGISTERS // (warps * k.WARP) // 8 * 8
