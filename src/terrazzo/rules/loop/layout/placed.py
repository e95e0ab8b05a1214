"""Kernels go along their results, where these lie in another order than their dimensions have."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Var
from terrazzo.ir.node import topological
from terrazzo.ir.sites import product
from terrazzo.ir.types import Type
from terrazzo.rewrite.rule import Event, Log

PASS, RULE = "store_as_read", "along_results"


def along_results(program: l.Program, log: Log) -> l.Program:
    """`program` whose kernels have their axes in the order in which a result lies in memory, where nothing is reduced
    more often for that.

    @loop
    def f(x: f32[3, 4]):
        with kernel('z', z=f32[3, 4] @ (1, 3)):
            for a0 in free(3):
                for a1 in free(4):
                    in0 = x[a0, a1]
                    v0 = exp(in0)
                    z[a0, a1] = v0
        return (z,)
    =>
    @loop
    def f(x: f32[3, 4]):
        with kernel('z', z=f32[3, 4] @ (1, 3)):
            for a1 in free(4):
                for a0 in free(3):
                    in0 = x[a0, a1]
                    v0 = exp(in0)
                    z[a0, a1] = v0
        return (z,)
    """
    placed = {b for b in program.results if b.type.strides is not None}
    steps = list(program.steps)
    for n, kernel in enumerate(steps):
        stores = [s for s in kernel.stores if s.buffer in placed] if isinstance(kernel, l.Kernel) else []
        if not isinstance(kernel, l.Kernel) or len({s.buffer.type.element_strides for s in stores}) != 1:
            continue
        axes = _along(kernel, stores[0])
        if axes == kernel.axes or _reduced(kernel, axes) > _reduced(kernel, kernel.axes):
            continue
        steps[n] = l.Kernel(kernel.name, axes, kernel.stores, kernel.source)
        log.add(Event(PASS, RULE, kernel.name, True, f"{stores[0].buffer.name} lies as {stores[0].buffer.type}"))
        log.applied(PASS, RULE, kernel.name, [kernel], steps[n : n + 1])
    return l.Program(program.name, program.inputs, tuple(steps), program.results)


def copied_after(program: l.Program, log: Log, columns: Callable[[l.Kernel], Var | None]) -> l.Program:
    """`program` with results copied to where they lie, of kernels that store well along their `columns` alone, and
    would store them across: a warp that writes to as many places as it has lanes takes longer than two passes.

    @loop
    def f(x: f32[3, 4]):
        with kernel('z', z=f32[3, 4] @ (1, 3)):
            for a0 in free(3):
                for a1 in free(4):
                    in0 = x[a0, a1]
                    v0 = exp(in0)
                    z[a0, a1] = v0
        return (z,)
    =>
    @loop
    def f(x: f32[3, 4]):
        with kernel('z_rows', z_rows=f32[3, 4]):
            for a0 in free(3):
                for a1 in free(4):
                    in0 = x[a0, a1]
                    v0 = exp(in0)
                    z_rows[a0, a1] = v0
        with kernel('z', z=f32[3, 4] @ (1, 3)):
            for a0 in free(3):
                for a1 in free(4):
                    in0 = z_rows[a0, a1]
                    z[a0, a1] = in0
        return (z,)
    """
    steps: list[l.Kernel | l.Call] = []
    taken = {b.name for s in program.steps for b in (*s.reads, *s.writes)}
    for kernel in program.steps:
        axis = columns(kernel) if isinstance(kernel, l.Kernel) else None
        if not isinstance(kernel, l.Kernel) or axis is None:
            steps.append(kernel)
            continue
        rows: dict[l.Store, l.Buffer] = {}
        for s in kernel.stores:
            kind, name = s.buffer.type, f"{s.buffer.name}_rows"
            along = coefficient(flatten(s.index, kind.element_strides), axis) in (0, 1)
            if s.buffer in program.results and kind.strides is not None and not along and name not in taken:
                rows[s] = l.Buffer(name, Type(kind.dtype, kind.shape))
        if not rows:
            steps.append(kernel)
            continue
        stores = tuple(l.Store(rows[s], s.index, s.value) if s in rows else s for s in kernel.stores)
        copies = [l.Store(s.buffer, s.index, l.Load.make(b, s.index)) for s, b in rows.items()]
        made = [l.Kernel(stores[0].buffer.name, kernel.axes, stores, kernel.source)]
        made += [l.Kernel(s.buffer.name, kernel.axes, (s,), kernel.source) for s in copies]
        log.add(Event("online", "copied_after", kernel.name, True, f"{axis} lies across what is stored"))
        log.applied("online", "copied_after", kernel.name, [kernel], made)
        steps += made
    return l.Program(program.name, program.inputs, tuple(steps), program.results)


def _along(kernel: l.Kernel, store: l.Store) -> tuple[Var, ...]:
    """The axes, outermost first, as they lie in what is stored; as they are where a scan needs them so, or where a
    place is no axis.
    """
    strides: dict[Any, Any] = dict(zip(store.index, store.buffer.type.element_strides, strict=True))
    if any(isinstance(x, l.Scan) for x in topological(kernel.stores)) or any(a not in strides for a in kernel.axes):
        return kernel.axes
    return tuple(sorted(kernel.axes, key=lambda a: -strides[a]))


def _reduced(kernel: l.Kernel, axes: Sequence[Var]) -> int:
    """How many times something is reduced: for every point of the axes around it."""
    if product(kernel) is not None:
        return 0
    found = [x for x in topological(kernel.stores) if isinstance(x, l.Reduce)]
    depths = [max((n + 1 for n, a in enumerate(axes) if a in x.free), default=0) for x in found]
    return sum(math.prod(a.extent for a in axes[:d]) for d in depths)  # type: ignore[misc]
