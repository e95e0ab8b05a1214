"""What the model expects of a kernel, and the least any kernel for it could take."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.hw.gpu import Gpu
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.sites import product
from terrazzo.rules.loop_to_tile import boxes, tiles


@dataclass(frozen=True)
class Estimate:
    """Nanoseconds: by the model, and by the data sheet's rates; `bound` says which of them it is, memory or
    arithmetic.
    """

    time: float
    least: float
    bound: str


def estimate(kernel: l.Kernel, gpu: Gpu, moved: int, operations: int) -> Estimate:
    """For a kernel that moves so many bytes and computes so many scalar operations (a multiply-add is two)."""
    memory, fma, tensor = gpu.roof
    p = product(kernel)
    found: list[tiles.Plan | boxes.Plan] = [x for x in tiles.plans(p, gpu) if x.pieces == 1] if p else []
    if (image := boxes.moved(kernel)[0]) is not None:
        found += boxes.plans(image, gpu)
    plan = min(found, key=lambda x: x.time, default=None)
    arithmetic = operations / (tensor if plan and plan.instruction else fma)
    traffic = moved / memory
    time = plan.time if plan else max(moved / gpu.memory, operations / gpu.fma) + gpu.launch
    return Estimate(time, max(traffic, arithmetic), "memory" if traffic >= arithmetic else "arithmetic")
