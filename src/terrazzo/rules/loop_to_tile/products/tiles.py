"""Every way to cut a product in tiles, whichever instructions it runs on, priced by one clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from terrazzo.collector import remembered
from terrazzo.hw.gpu import Gpu
from terrazzo.hw.products import matrix, warps
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.schedule import Schedule
from terrazzo.ir.sites import Product, no_product, product
from terrazzo.rules.loop_to_tile.products import boxes, products, warpgroups
from terrazzo.rules.loop_to_tile.products.packed import packed
from terrazzo.rules.loop_to_tile.walked.collapse import merge_product_axes

MOST = 32
"""Plans on warpgroups that are worth trying, in one piece and in several: where none of the best can be built, another
kind of tile is better.
"""

Plan = products.Plan | warpgroups.Plan


def plans(p: Product, gpu: Gpu) -> tuple[Plan, ...]:
    """The best plan of every tile, best first."""
    return _plans(p.nameless, gpu)


@remembered
def _plans(p: Product, gpu: Gpu) -> tuple[Plan, ...]:
    found = products.plans(p, gpu)
    others = products.instruction_for(p, gpu)[0] and gpu.warpgroups  # elsewhere rates are those of data sheets
    return _each([*found, *on_warpgroups(p, gpu), *(products.plans(p, gpu, True) if others else ())])


def on_cores(p: Product, gpu: Gpu) -> tuple[Plan, ...]:
    """The same, of those on CUDA cores."""
    return _each(products.plans(p, gpu, True))


def _each(found: Sequence[Plan]) -> tuple[Plan, ...]:
    """The best plan of every tile."""
    best: dict[Any, Plan] = {}
    for plan in sorted(found, key=lambda x: warpgroups.alike(x.time)):
        best.setdefault((plan.tile, plan.instruction), plan)
    return tuple(best.values())


def on_warpgroups(p: Product, gpu: Gpu) -> list[warpgroups.Plan]:
    """The best plans on instructions of warpgroups, in one piece and in several."""
    found = warpgroups.plans(p, gpu)
    return [x for split in (False, True) for x in [y for y in found if (y.pieces > 1) is split][:MOST]]


def schedule(p: Product, plan: Plan, gpu: Gpu) -> Schedule:
    """The bindings of a plan that is in one piece."""
    if isinstance(plan, warpgroups.Plan):
        return warpgroups.schedule(p, plan, gpu)
    return products.schedule(p, plan, gpu)


def unused(kernel: l.Kernel, chosen: Iterable[Schedule], gpu: Gpu) -> Iterator[tuple[str, str]]:
    """Why sums of products do not run on tensor cores, or not on the instructions of warpgroups: (which, why)."""
    issued = [warps(found) for s in chosen for site in s.sites if (found := matrix(site.instruction))]
    p = product(kernel)
    if p is None:
        if not issued and (why := no_product(kernel)):
            yield "tensor_cores", why
        return
    p = product(merge_product_axes(kernel, p.sites)) or p
    if not issued:
        name, why = products.instruction_for(p, gpu)
        also = boxes.moved(packed(kernel)[-1])[1] if gpu.warpgroups else ""
        why = "; ".join(filter(None, (why, also)))
        yield "tensor_cores", why or f"{name} takes it, and no tile of it that can be built is faster by the model"
    elif max(issued) == 1:
        _, why = warpgroups.instructions_for(p, gpu)
        best = next(iter(warpgroups.plans(p, gpu)), None)
        yield (
            "wgmma",
            why
            or (f"at best {best}, which is no better than what runs" if best else "no tile of it is filled by half"),
        )
