"""Tile IR: the kernels of Loop IR, untouched, each with a schedule that binds its axes to a machine (ADR 004), and
with a plan that leaves nothing open once rules have completed it (ADR 008).

A program of Tile IR means what its loops mean; schedules and plans only say where and in which order that happens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from terrazzo.errors import UserError
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Bound
from terrazzo.ir.nest import accumulators
from terrazzo.ir.plan import Plan
from terrazzo.ir.schedule import Schedule


@dataclass(frozen=True)
class Program:
    """A program of Loop IR with the schedules and plans of some of its kernels, by the kernels' places among the
    steps.
    """

    loop: l.Program
    schedules: tuple[tuple[int, Schedule], ...]
    plans: tuple[tuple[int, Plan], ...] = ()

    @property
    def dialect(self) -> str:
        return "tile"

    @property
    def name(self) -> str:
        return self.loop.name

    def beside(self, number: int) -> str:
        """What stands below a kernel: its schedule and its plan."""
        return "\n".join(str(given[number]) for given in (dict(self.schedules), dict(self.plans)) if number in given)


def fit(schedule: Schedule, kernel: l.Kernel) -> None:
    """UserError, with the reason, unless `schedule` can be one of this kernel."""
    if schedule.kernel != kernel.name:
        raise UserError(f"the schedule is one of {schedule.kernel}, and the kernel above it is {kernel.name}")
    axes, own = _extents(kernel)
    schedule.check(axes, own)


def _extents(kernel: l.Kernel) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """The extents of the kernel's axes, and, for each site, of those it has besides: its own, and those of reductions
    it is part of.
    """

    def extent(axis: Any) -> int:
        if not isinstance(axis.extent, int):
            raise UserError(f"{kernel.name} has an axis of symbolic extent, which no schedule binds yet")
        return axis.extent

    sites: dict[str, dict[str, int]] = {b.name: {} for b in kernel.writes}
    for name, site in accumulators(kernel).items():
        around = [a for a in site.free if isinstance(a, Bound)]
        own = [*site.axes, *sorted(around, key=lambda a: a.label)] if isinstance(site, l.Reduce) else []
        sites[name] = {f"r{a.label}": extent(a) for a in own}
    return {a.name: extent(a) for a in kernel.axes}, sites
