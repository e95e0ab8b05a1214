"""Store a buffer the way it is read.

Where every reader of a buffer, or every product that reads it, takes several of its dimensions apart from one variable
(after a `transpose(...).reshape(...)`: t[r // 64, a, r % 64]), the writer stores those dimensions merged: t[a, r] is
contiguous along r.
"""

from __future__ import annotations

from typing import Any

from terrazzo.ir.address import digit
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Bound, Expr, IntExpr, Var
from terrazzo.ir.node import topological, transform
from terrazzo.ir.sites import product
from terrazzo.ir.types import Type
from terrazzo.rewrite.rule import Event, Log

Groups = tuple[tuple[int, ...], ...]
"""The dimensions of the new buffer, each as the old dimensions it merges, outermost first."""


def store_as_read(program: l.Program, log: Log) -> l.Program:
    """`program` with every temporary that all readers read merged, stored merged.

    @loop
    def f(x: f32[2, 3, 2]):
        with kernel('t', t=f32[2, 3, 2]):
            for a0 in free(2):
                for a1 in free(3):
                    for a2 in free(2):
                        in0 = x[a0, a1, a2]
                        v0 = exp(in0)
                        t[a0, a1, a2] = v0
        with kernel('z', z=f32[3]):
            for a0 in free(3):
                for r0 in reduce(4):
                    in0 = t[r0 // 2, a0, r0 % 2]
                    acc0 <- sum(in0)
                z[a0] = acc0
        return (z,)
    =>
    @loop
    def f(x: f32[2, 3, 2]):
        with kernel('t', t=f32[3, 4]):
            for a0 in free(2):
                for a1 in free(3):
                    for a2 in free(2):
                        in0 = x[a0, a1, a2]
                        v0 = exp(in0)
                        t[a1, a0 * 2 + a2] = v0
        with kernel('z', z=f32[3]):
            for a0 in free(3):
                for r0 in reduce(4):
                    in0 = t[a0, r0]
                    acc0 <- sum(in0)
                z[a0] = acc0
        return (z,)
    """
    fixed = (
        set(program.inputs)
        | set(program.results)
        | {b for s in program.steps if isinstance(s, l.Call) for b in (*s.reads, *s.writes)}
    )
    kernels = [s for s in program.steps if isinstance(s, l.Kernel)]
    loads: dict[l.Buffer, list[l.Load]] = {}
    for node in topological(kernels):
        if isinstance(node, l.Load) and node.buffer not in fixed:
            loads.setdefault(node.buffer, []).append(node)
    ways = {buffer: {_groups(load) for load in found} for buffer, found in loads.items()}
    ways = {buffer: groups for buffer, groups in ways.items() if groups != {None}}
    readers = [s for s in kernels if not ways.keys().isdisjoint(s.reads)]
    multiplied = {x for p in map(product, readers) if p is not None for x in p.operands}
    moved: dict[l.Buffer, tuple[l.Buffer, Groups]] = {}
    for buffer, groups in ways.items():
        found = loads[buffer]
        if {_groups(load) for load in found if load in multiplied} == groups - {None}:
            groups -= {None}  # tiles are boxes of memory: who reads every place by itself finds it as well merged
        merged = groups.pop() if len(groups) == 1 else None
        if merged is not None:
            shape = tuple(_product([buffer.type.shape[d] for d in g]) for g in merged)
            moved[buffer] = (l.Buffer(buffer.name, Type(buffer.type.dtype, shape)), merged)
            log.add(
                Event(
                    "store_as_read",
                    "merge_dimensions",
                    buffer.name,
                    True,
                    f"{buffer.type} is stored as {moved[buffer][0].type}",
                )
            )
    if not moved:
        return program

    def visit(node: Any) -> Any:
        if isinstance(node, (l.Load, l.Store)) and node.buffer in moved:
            buffer, groups = moved[node.buffer]
            index = tuple(_merge(node.index, g, node.buffer.type.shape) for g in groups)
            return (
                l.Load.make(buffer, index, node.inside)
                if isinstance(node, l.Load)
                else l.Store(buffer, index, node.value)
            )
        return node

    memo: dict[Any, Any] = {}
    steps = tuple(transform(s, visit, memo) if isinstance(s, l.Kernel) else s for s in program.steps)
    changed = [(old, now) for old, now in zip(program.steps, steps, strict=True) if now is not old]
    log.applied("store_as_read", "merge_dimensions", ", ".join(b.name for b in moved), *zip(*changed, strict=True))
    return l.Program(program.name, program.inputs, steps, program.results)


def _groups(load: l.Load) -> Groups | None:
    """The dimensions that this load takes apart from one variable, merged; None if there are none."""
    shape = load.buffer.type.shape
    parts: dict[Expr, list[tuple[int, int, int | None]]] = {}
    for d, e in enumerate(load.index):
        if split := _part(e):
            parts.setdefault(split[0], []).append((d, split[1], split[2]))
    groups: dict[Expr, tuple[int, ...]] = {}
    for atom, found in parts.items():
        found.sort(key=lambda p: -p[1])
        radix = 1
        for d, divisor, modulus in reversed(found):
            extent = shape[d]
            last = modulus is None
            if not isinstance(extent, int) or divisor != radix or not (last or modulus == extent):
                break
            radix *= extent
        else:
            if len(found) > 1 and radix == getattr(atom, "extent", None):
                groups[atom] = tuple(d for d, _, _ in found)
    if not groups:
        return None
    inner = [g for atom, g in groups.items() if isinstance(atom, Bound)]  # what a reduction runs along is stored last
    outer = {g[0]: g for g in groups.values() if g not in inner}
    taken = {d for g in groups.values() for d in g}
    kept = [outer.get(d, (d,)) for d in range(len(shape)) if d not in taken or d in outer]
    return (*kept, *inner)


def _part(e: IntExpr) -> tuple[Expr, int, int | None] | None:
    """(variable, divisor, modulus) where e is variable // divisor % modulus."""
    v, divisor, modulus = digit(e)
    return (v, divisor, modulus) if isinstance(v, (Var, Bound)) else None


def _merge(index: tuple[IntExpr, ...], group: tuple[int, ...], shape: tuple[IntExpr, ...]) -> IntExpr:
    out: IntExpr = 0
    for d in group:
        out = out * shape[d] + index[d]
    return out


def _product(extents: list[IntExpr]) -> IntExpr:
    out: IntExpr = 1
    for e in extents:
        out = out * e
    return out
