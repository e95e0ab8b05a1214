"""The schedules of a product of a product, best first, or why there are none."""

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


def schedules(kernel: l.Kernel, gpu: Gpu) -> Iterator[Schedule | str]:
    """The schedules that are plans, best first, and why the others are none."""
    found = chain(kernel)
    if found is None:
        yield "no two products in one loop of steps on this machine"
    elif any(not isinstance(a.extent, int) for a in (*kernel.axes, found.steps, found.depth)):
        yield "an axis has no size that is known"
    else:
        yield from _plans(found, gpu)


def _plans(c: Chain, gpu: Gpu) -> Iterator[Schedule | str]:
    for way in _ways(c, gpu):
        if (made := way(False)) is None:
            yield f"products of {c.depth.extent} and {c.columns.extent} columns are on no instruction"
            continue
        plan, _ = complete(c.kernel, made, gpu)
        yield plan.reason if isinstance(plan, Refused) else way(True) or made if plan.all(Reach) else made


def _ways(c: Chain, gpu: Gpu) -> Iterator[Way]:
    """On warpgroups, where the machine has such and there are rows for them; on warps."""
    if "wgmma" in gpu.features and c.rows.extent >= FEW:
        for gathered in (True, False):
            yield lambda longest, gathered=gathered: on_warpgroups(c, gpu, gathered, longest)  # type: ignore[misc]
    else:
        for way in arrangements(c, gpu):
            yield lambda longest, way=way: on_warps(c, gpu, way, longest)  # type: ignore[misc]


def refusal(kernel: l.Kernel, gpu: Gpu, lost: Callable[[k.Kernel], str]) -> str:
    """Why a chain of two products is not worth one kernel, or nothing: none can be derived, or all were built and
    lost.
    """
    first = ""
    for made in schedules(kernel, gpu):
        why = made if isinstance(made, str) else lost(lower(kernel, made, gpu))
        if not why:
            return ""
        first = first or why
    return first or "a block has no room for two products in one loop of steps"
