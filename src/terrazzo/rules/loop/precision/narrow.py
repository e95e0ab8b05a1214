"""Store a buffer in the type its readers convert it to.

Conversions are read through when kernels fuse, so a value that PyTorch rounds to 16 bits may be stored in 32 and
rounded by every reader. Where all of them do, the writer rounds once, and half the bytes move.
"""

from __future__ import annotations

from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast, scalar
from terrazzo.ir.node import Node, topological, transform
from terrazzo.ir.types import DTYPES, DType, Type
from terrazzo.rewrite.rule import Event, Log


def narrow(program: l.Program, log: Log) -> l.Program:
    """`program` with every temporary that all readers convert to one narrower type, stored in that type.

    @loop
    def f(x: f32[4]):
        with kernel('t', t=f32[4]):
            for a0 in free(4):
                in0 = x[a0]
                v0 = exp(in0)
                t[a0] = v0
        with kernel('z', z=bf16[2]):
            for a0 in free(2):
                in0 = t[a0 + 2]
                v0 = bf16(in0)
                z[a0] = v0
        return (z,)
    =>
    @loop
    def f(x: f32[4]):
        with kernel('t', t=bf16[4]):
            for a0 in free(4):
                in0 = x[a0]
                v0 = exp(in0)
                v1 = bf16(v0)
                t[a0] = v1
        with kernel('z', z=bf16[2]):
            for a0 in free(2):
                in0 = t[a0 + 2]
                z[a0] = in0
        return (z,)
    """
    kernels = [s for s in program.steps if isinstance(s, l.Kernel)]
    fixed = (
        set(program.inputs)
        | set(program.results)
        | {b for s in program.steps if isinstance(s, l.Call) for b in (*s.reads, *s.writes)}
    )
    wanted: dict[l.Buffer, set[DType | None]] = {}
    for node in topological(kernels):
        cast = DTYPES[node.fn.name] if isinstance(node, l.Apply) and is_cast(node.fn) else None
        for child in node.children:
            if isinstance(child, l.Load) and child.buffer not in fixed:
                wanted.setdefault(child.buffer, set()).add(cast)
    new: dict[l.Buffer, l.Buffer] = {}
    for buffer, types in wanted.items():
        to = types.pop() if len(types) == 1 else None
        if to is not None and to.size < buffer.type.dtype.size and to.is_float and buffer.type.dtype.is_float:
            new[buffer] = l.Buffer(buffer.name, Type(to, buffer.type.shape, buffer.type.strides))
            log.add(
                Event("store_as_read", "narrow", buffer.name, True, f"{buffer.type} is stored as {new[buffer].type}")
            )
    if not new:
        return program

    def visit(node: Any) -> Any:
        if isinstance(node, l.Load) and node.buffer in new:
            return l.Load(new[node.buffer], node.index, node.inside)
        if isinstance(node, l.Store) and node.buffer in new:
            kind = new[node.buffer].type.dtype
            return l.Store(new[node.buffer], node.index, l.Apply(scalar(kind.name), (node.value,)))
        if isinstance(node, l.Apply) and is_cast(node.fn):
            (x,) = node.args
            if isinstance(x, l.Load) and x.dtype is node.dtype:
                return x
        return node

    memo: dict[Node, Any] = {}
    steps = tuple(transform(s, visit, memo) if isinstance(s, l.Kernel) else s for s in program.steps)
    changed = [(old, now) for old, now in zip(program.steps, steps, strict=True) if now is not old]
    log.applied("store_as_read", "narrow", ", ".join(b.name for b in new), *zip(*changed, strict=True))
    return l.Program(program.name, program.inputs, steps, program.results)
