"""A kernel of Loop IR and its schedule as a kernel of Kernel IR."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from terrazzo.errors import Limitation, UserError
from terrazzo.hw.gpu import Gpu
from terrazzo.hw.mma_sync import PRODUCTS
from terrazzo.ir import nest as n
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.schedule import Schedule
from terrazzo.ir.verify_kernel import REGISTERS, declared
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.tile_to_kernel.digits import Bindings, factors
from terrazzo.rules.tile_to_kernel.scope import Scope
from terrazzo.rules.tile_to_kernel.walk import Walker

SINCE = {"ld": 0, "cp.async": 80, "tma": 90}
"""The first architecture that has a transport."""


def program(
    scheduled: tile.Program, gpu: Gpu, log: Log | None = None, show: Callable[[Any], str] | None = None
) -> k.Program:
    """Every kernel by its schedule. UserError where one asks for more than the machine has."""
    schedules = dict(scheduled.schedules)
    p = scheduled.loop
    steps: list[k.Kernel | l.Call] = []
    for i, s in enumerate(p.steps):
        if not isinstance(s, l.Kernel):
            steps.append(s)
            continue
        done = lower(s, schedules[i], gpu)
        steps.append(done)
        if log is not None:
            texts = (f"{show(s)}\n{schedules[i]}", show(done)) if show else ("", "")
            what = f"{done.grid} blocks of {done.threads} threads, {done.shared_bytes} bytes of shared memory"
            log.add(Event("derive", "derive", s.name, True, what, *texts))
            log.applied("derive", "derive", s.name, [s], [done])
    return k.Program(p.name, p.inputs, tuple(steps), p.results)


@lru_cache(maxsize=512)
def lower(kernel: l.Kernel, schedule: Schedule, gpu: Gpu) -> k.Kernel:
    """What the schedule means for this kernel. UserError or Limitation, with the reason, where it cannot be.

    Kept, because whoever chooses a schedule asks whether it can be derived, and equal layers have equal kernels.

    @tile
    def f(x: f32[3, 40]):
        with kernel('z', z=f32[3]):
            for a0 in free(3):
                for r0 in reduce(40):
                    in0 = x[a0, r0]
                    acc0 <- max(in0)
                z[a0] = acc0
        with schedule("z", target="sm_80"):
            a0 = grid(3)
            with site("acc0"):
                r0 = reg(2) * lane(32)
        return (z,)
    =>
    @kernel
    def f(x: f32[3, 40]):
        with launch('z', _grid=3, _warps=1, _resident=1, _reads=[x], z=f32[3]):
            acc0 = registers(f32, f32(-inf))
            for i0 in unrolled(1):
                in0 = x[block, i0 * 32 + lane]
                acc0[()] = max(acc0[()], in0)
            if lane < 8:
                in0 = x[block, lane + 32]
                acc0[()] = max(acc0[()], in0)
            other0 = shuffle(acc0[()], 1)
            acc0[()] = max(acc0[()], other0)
            other1 = shuffle(acc0[()], 2)
            acc0[()] = max(acc0[()], other1)
            other2 = shuffle(acc0[()], 4)
            acc0[()] = max(acc0[()], other2)
            other3 = shuffle(acc0[()], 8)
            acc0[()] = max(acc0[()], other3)
            other4 = shuffle(acc0[()], 16)
            acc0[()] = max(acc0[()], other4)
            if lane == 0:
                z[block] = acc0[()]
        return (z,)
    """
    tile.fit(schedule, kernel)
    _instructions(schedule, gpu)
    free = {a.name for a in kernel.axes}
    if shared := [
        a for a, b in schedule.axes for f in factors(b) if a not in free and f.level == "grid" and f.size > 1
    ]:
        raise Limitation(
            f"{kernel.name}: blocks share the reduction over {shared[0]} in two kernels only, each with a schedule of its own"
        )
    bindings = Bindings(schedule)
    walker = Walker(kernel, bindings)
    walker.statements(n.nest(kernel), Scope())
    reads = tuple(b for b in kernel.reads if b not in kernel.writes)
    params = (*reads, *kernel.writes)
    resident = [v for v in schedule.directive("resident") if isinstance(v, int)]
    done = k.Kernel(
        kernel.name, params, kernel.writes, bindings.blocks, bindings.warps, tuple(walker.shared), tuple(walker.out),
        max([1, *resident]), kernel.source,
    )  # fmt: skip
    _budget(done, gpu)
    return done


def _instructions(schedule: Schedule, gpu: Gpu) -> None:
    """UserError for an instruction or a transport that does not exist on the machine."""
    for site in schedule.sites:
        if site.instruction not in (None, "fma.f32"):
            record = PRODUCTS.get(site.instruction or "")
            if record is None:
                raise UserError(
                    f"{schedule.kernel}: unknown instruction {site.instruction}; known: fma.f32, {', '.join(PRODUCTS)}"
                )
            if record.since > gpu.number:
                raise UserError(
                    f"{schedule.kernel}: {site.instruction} needs sm_{record.since}, and the target is {gpu.arch}"
                )
        for name, operand in site.operands:
            by = str(dict(operand.options).get("by", "ld"))
            if by not in SINCE:
                raise UserError(f"{schedule.kernel}: {name} is brought in by {by!r}; known: {', '.join(SINCE)}")
            if gpu.number < SINCE[by]:
                raise UserError(
                    f"{schedule.kernel}: {name} is brought in by {by}, which needs sm_{SINCE[by]}, and the target is {gpu.arch}"
                )


def _budget(kernel: k.Kernel, gpu: Gpu) -> None:
    """UserError where a block would need more than it may have."""
    for what, needs, has in (
        ("bytes of shared memory", kernel.shared_bytes, gpu.shared),
        ("threads in a block", kernel.threads, 1024),
        ("registers of a thread", declared(kernel.body), REGISTERS),
        ("blocks", kernel.grid, (1 << 31) - 1),
    ):
        if needs > has:
            raise UserError(f"{kernel.name}: the schedule needs {needs} {what}, and {gpu.arch} has {has}")
