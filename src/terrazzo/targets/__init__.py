"""The targets, by name. Each is one record; `options.TARGETS` lists their names, before anything is imported."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.errors import UserError
from terrazzo.hw import mma_sync
from terrazzo.hw.gpu import GPUS, Gpu
from terrazzo.rules.loop.cost import Rates


@dataclass(frozen=True)
class Target:
    """What programs are compiled for. `rates` price its kernels; `gpu` is the record of a machine that runs CUDA."""

    name: str
    description: str
    rates: Rates
    gpu: Gpu | None = None


def _cuda(gpu: Gpu) -> Target:
    op = 2 / gpu.fma
    known = (i for i in mma_sync.INSTRUCTIONS if i.since <= gpu.number and i.d.dtype.name == "f32")
    types = tuple(dict.fromkeys(i.a.dtype.name for i in known))
    rates = Rates(
        1 / gpu.memory, op, serial=10 * op, fma=op, mixed=64 * op, load=4 / gpu.cache, step=200, launch=gpu.launch,
        tensor=2 / gpu.tensor, matrix=types, boxes=gpu.warpgroups is not None,
    )  # fmt: skip
    return Target(gpu.arch, f"CUDA on {gpu.name}, compiled by NVRTC", rates, gpu)


TARGETS = {
    t.name: t
    for t in (
        Target("cpu", "C++ with OpenMP, compiled by this machine's compiler", Rates()),
        Target("interpreter", "numpy, on any machine, slowly", Rates()),
        *map(_cuda, GPUS.values()),
    )
}


def target(name: str) -> Target:
    """The target called `name`; "auto" is the processor, until tensors say where they are."""
    if name == "auto":
        return TARGETS["cpu"]
    if name not in TARGETS:
        raise UserError(f"unknown target {name!r}; known: {', '.join(TARGETS)}")
    return TARGETS[name]
