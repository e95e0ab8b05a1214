"""The best schedule of a product of a product, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from terrazzo.hw.gpu import Gpu
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.plan import Reach
from terrazzo.ir.schedule import Schedule
from terrazzo.rules.loop_to_tile.chain import Chain, chain
from terrazzo.rules.loop_to_tile.chain_schedules import FEW, arrangements, on_warpgroups, on_warps
from terrazzo.rules.tile.complete import Refused, complete
from terrazzo.rules.tile_to_kernel.lower import lower

Way = Callable[[bool], Schedule | None]
"""A schedule, given whether the longest tiles are the first; None where instructions do not cover the chain."""


def best(kernel: l.Kernel, gpu: Gpu) -> tuple[Schedule | None, str]:
    """A schedule that is a plan, or why there is none."""
    found = chain(kernel)
    if found is None:
        return None, "no two products in one loop of steps on this machine"
    if any(not isinstance(a.extent, int) for a in (*kernel.axes, found.steps, found.depth)):
        return None, "an axis has no size that is known"
    why = ""
    for way in _ways(found, gpu):
        made = way(False)
        if made is None:
            continue
        plan, _ = complete(kernel, made, gpu)
        if not isinstance(plan, Refused):
            return (way(True) if plan.all(Reach) else made), ""
        why = why or plan.reason
    return None, why or f"products of {found.depth.extent} and {found.columns.extent} columns are on no instruction"


def _ways(c: Chain, gpu: Gpu) -> Iterator[Way]:
    """On warpgroups, where the machine has such and there are rows for them; on warps."""
    if "wgmma" in gpu.features and c.rows.extent >= FEW:
        for gathered in (True, False):
            yield lambda longest, gathered=gathered: on_warpgroups(c, gpu, gathered, longest)  # type: ignore[misc]
    else:
        for way in arrangements(c, gpu):
            yield lambda longest, way=way: on_warps(c, gpu, way, longest)  # type: ignore[misc]


def refusal(kernel: l.Kernel, gpu: Gpu, lost: Callable[[k.Kernel], str]) -> str:
    """Why a chain of two products is not worth one kernel, or nothing: it cannot be derived, or was built and lost."""
    made, why = best(kernel, gpu)
    return why if made is None else lost(lower(kernel, made, gpu))
