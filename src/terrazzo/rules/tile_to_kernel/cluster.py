"""Sums that the blocks of a cluster share: each multiplies its part of the steps, and gives what it has to the others
through its shared memory. Each then takes a part of the tile's columns, and adds up what all of them have of it, in the
order of their ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from terrazzo.hw.wgmma import WarpgroupInstruction
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.node import Node
from terrazzo.ir.schedule import WARPS_IN_A_GROUP, Site
from terrazzo.ir.types import Type
from terrazzo.rules.tile.digits import Bindings
from terrazzo.rules.tile.draft import axis_name
from terrazzo.rules.tile_to_kernel.builder import Builder
from terrazzo.rules.tile_to_kernel.copies import Part
from terrazzo.rules.tile_to_kernel.multiply import Fragment


@dataclass(frozen=True)
class Given:
    """Accumulators, and where they lie in shared memory: a row of all threads of the team for each of them."""

    fragment: Fragment
    place: k.Shared


def give(builder: Builder, bindings: Bindings, fragment: Fragment, room: int) -> Given:
    """What a thread has of a tile's sums goes to shared memory, to where the slabs of its steps were, where these have
    `room` for those of all teams: once all of them are done with these.
    """
    held, agent = fragment.place, bindings.agent
    kind = Type(held.type.dtype, (*held.type.static_shape, WARPS_IN_A_GROUP, k.WARP))
    over = agent.teams * kind.span <= room
    if over:
        builder.add(k.Sync(1 + agent.teams, agent.warps))
    place = builder.memory("given", kind, at=bindings.team * kind.span if over else k.BEHIND)
    at = tuple(bindings.loop_variable("e", n) for n in held.type.static_shape)
    put = l.Store(place, (*at, *_thread(bindings)), l.Load(held, at))
    builder.loops([(v, True) for v in at], partial(builder.add, put))
    return Given(fragment, place)


def take(builder: Builder, bindings: Bindings, given: Given, columns: str, site: Site | None, parts: int) -> Fragment:
    """The whole sums of this block's part of the columns, of so many: accumulators of an instruction that has no
    others.
    """
    old = given.fragment
    assert isinstance(old.instruction, WarpgroupInstruction)
    new = old.instruction.narrow(parts)
    *outer, count = old.place.type.static_shape
    held = builder.registers("acc", old.place.type.dtype, [*outer, count // parts])
    *rows, number = at = tuple(bindings.loop_variable("e", n) for n in held.type.static_shape)
    there = (*rows, bindings.rank * (count // parts) + number if parts > 1 else number, *_thread(bindings))

    def add() -> None:
        ranks = range(bindings.order.cluster_size)
        first, *others = [builder.let(k.Remote(given.place, there, rank), "other") for rank in ranks]
        total: Node = first
        for one in others:
            total = l.apply("add", total, one)
        builder.add(l.Store(held, at, total))

    builder.loops([(v, True) for v in at], add)
    mine = tuple(_narrow(bindings, p, site, parts) if axis_name(p.axis) == columns else p for p in old.parts)
    return Fragment(held, mine, new)


def _thread(bindings: Bindings) -> tuple[IntExpr, IntExpr]:
    """The number of a thread in its warpgroup."""
    return bindings.warp % WARPS_IN_A_GROUP, k.LANE


def _narrow(bindings: Bindings, part: Part, site: Site | None, parts: int) -> Part:
    """What this block has of the tile's columns in the end."""
    size = part.size // parts
    digits = bindings.digits(axis_name(part.axis), site, part.axis.extent)
    inside = tuple(d for d in digits if d.level not in ("grid", "cluster"))
    return replace(part, base=part.base + bindings.rank * size if parts > 1 else part.base, size=size, digits=inside)
