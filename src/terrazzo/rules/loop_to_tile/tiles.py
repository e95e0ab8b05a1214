"""Every way to cut a product in tiles, whichever instructions it runs on, priced by one clock."""

from __future__ import annotations

from typing import Any

from terrazzo.hw.gpu import Gpu
from terrazzo.ir.schedule import Schedule
from terrazzo.ir.sites import Product
from terrazzo.rules.loop_to_tile import products, warpgroups

Plan = products.Plan | warpgroups.Plan


def plans(p: Product, gpu: Gpu, cores: bool = False) -> list[Plan]:
    """The best plan of every tile, best first; with `cores`, only those on CUDA cores."""
    found: list[Plan] = [*products.plans(p, gpu, cores), *([] if cores else warpgroups.plans(p, gpu))]
    best: dict[Any, Plan] = {}
    for plan in sorted(found, key=lambda x: x.time):
        best.setdefault((plan.tile, plan.instruction), plan)
    return list(best.values())


def schedule(p: Product, plan: Plan, gpu: Gpu) -> Schedule:
    """The bindings of a plan that is in one piece."""
    if isinstance(plan, warpgroups.Plan):
        return warpgroups.schedule(p, plan, gpu)
    return products.schedule(p, plan, gpu)
