"""A kernel of Loop IR and its schedule as a kernel of Kernel IR."""

from __future__ import annotations

from terrazzo.ir import nest as n
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.schedule import Schedule
from terrazzo.rules.tile_to_kernel.digits import Bindings
from terrazzo.rules.tile_to_kernel.walk import Scope, Walker


def program(scheduled: tile.Program) -> k.Program:
    """Every kernel by its schedule."""
    schedules = dict(scheduled.schedules)
    p = scheduled.loop
    steps = tuple(lower(s, schedules[i]) if isinstance(s, l.Kernel) else s for i, s in enumerate(p.steps))
    return k.Program(p.name, p.inputs, steps, p.results)


def lower(kernel: l.Kernel, schedule: Schedule) -> k.Kernel:
    """What the schedule means for this kernel. UserError or Limitation, with the reason, where it cannot be."""
    tile.fit(schedule, kernel)
    bindings = Bindings(schedule)
    walker = Walker(kernel, bindings)
    walker.statements(n.nest(kernel), Scope())
    reads = tuple(b for b in kernel.reads if b not in kernel.writes)
    params = (*reads, *kernel.writes)
    resident = [v for v in schedule.directive("resident") if isinstance(v, int)]
    return k.Kernel(
        kernel.name, params, kernel.writes, bindings.blocks, bindings.warps, tuple(walker.shared), tuple(walker.out),
        max([1, *resident]), kernel.source,
    )  # fmt: skip
