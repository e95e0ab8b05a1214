"""Store what products read with the dimensions that they read it by.

A gradient comes out of a norm as groups of channels and rows of pixels, and a convolution reads it as an image: through
a view, at places that division finds, where a tile of it would be no box. What lies in memory is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from itertools import product as combinations
from typing import Any

from terrazzo.ir.address import flatten, unflatten
from terrazzo.ir.contraction import operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, FloorDiv, IntExpr, Mod, terms_of
from terrazzo.ir.node import topological, transform
from terrazzo.ir.proof import leaves
from terrazzo.ir.sites import product
from terrazzo.ir.types import Type, contiguous_strides
from terrazzo.rewrite.rule import Event, Log

PASS, RULE = "store_as_read", "dimensions_of_products"


def dimensions_of_products(program: l.Program, log: Log) -> l.Program:
    """`program` with temporaries stored with a dimension for every stride at which products step through them, where
    these find places by dividing what is summed over, or all the way across two dimensions.

    @loop
    def f(x: f32[2, 4, 3], w: f32[5, 8]):
        with kernel('t', t=f32[2, 4, 3]):
            for a0 in free(2):
                for a1 in free(4):
                    for a2 in free(3):
                        in0 = x[a0, a1, a2]
                        v0 = exp(in0)
                        t[a0, a1, a2] = v0
        with kernel('z', z=f32[3, 5]):
            for a0 in free(3):
                for a1 in free(5):
                    for r0 in reduce(8):
                        in0 = t[r0 // 4, r0 % 4, a0]
                        in1 = w[a1, r0]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    z[a0, a1] = acc0
        return (z,)
    =>
    @loop
    def f(x: f32[2, 4, 3], w: f32[5, 8]):
        with kernel('t', t=f32[8, 3]):
            for a0 in free(2):
                for a1 in free(4):
                    for a2 in free(3):
                        in0 = x[a0, a1, a2]
                        v0 = exp(in0)
                        t[a0 * 4 + a1, a2] = v0
        with kernel('z', z=f32[3, 5]):
            for a0 in free(3):
                for a1 in free(5):
                    for r0 in reduce(8):
                        in0 = t[r0, a0]
                        in1 = w[a1, r0]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    z[a0, a1] = acc0
        return (z,)
    """
    calls = {b for s in program.steps if isinstance(s, l.Call) for b in (*s.reads, *s.writes)}
    fixed = {*program.inputs, *program.results, *calls}
    shapes: dict[l.Buffer, set[tuple[int, ...] | None]] = {}
    for kernel in [s for s in program.steps if isinstance(s, l.Kernel)]:
        for x in _operands(kernel):
            if x.buffer not in fixed and x.buffer.type.strides is None and _static(x.buffer.type):
                shapes.setdefault(x.buffer, set()).add(_shape(x, kernel))
    new: dict[l.Buffer, l.Buffer] = {}
    for b, found in shapes.items():
        shape = found.pop() if len(found) == 1 else None
        if shape is not None and shape != b.type.shape:
            new[b] = l.Buffer(b.name, Type(b.type.dtype, shape))
            log.add(Event(PASS, RULE, b.name, True, f"{b.type} is stored as {new[b].type}"))
    if not new:
        return program

    def visit(node: Any) -> Any:
        if not isinstance(node, l.Load | l.Store) or node.buffer not in new:
            return node
        b = new[node.buffer]
        place = flatten(node.index, node.buffer.type.element_strides)
        inside = node.inside if isinstance(node, l.Load) else ()
        index = _index(place, b.type.static_shape, inside) or unflatten(place, b.type.shape)
        return l.Load.make(b, index, inside) if isinstance(node, l.Load) else l.Store(b, index, node.value)

    memo: dict[Any, Any] = {}
    steps = tuple(transform(s, visit, memo) if isinstance(s, l.Kernel) else s for s in program.steps)
    changed = [(old, now) for old, now in zip(program.steps, steps, strict=True) if now is not old]
    log.applied(PASS, RULE, ", ".join(b.name for b in new), *zip(*changed, strict=True))
    return l.Program(program.name, program.inputs, steps, program.results)


def _operands(kernel: l.Kernel) -> Iterator[l.Load]:
    """The tensors that sums of products of a kernel multiply."""
    p = product(kernel)
    for site in p.sites if p else ():
        for x in map(operand, site.factors):
            if isinstance(x, l.Load):
                yield x


def _shape(x: l.Load, kernel: l.Kernel) -> tuple[int, ...] | None:
    """The dimensions that have the strides at which a load steps, where its index has others and is found by division;
    the buffer's own where it is not; None where strides do not tell.
    """
    own = x.buffer.type.static_shape
    p = product(kernel)
    if p is None or not any(_across(e, {*p.axes}) for e in x.index if isinstance(e, Expr)):
        return own
    place = flatten(x.index, x.buffer.type.element_strides)
    strides = sorted({abs(c) for factors, c in terms_of(place).items() if factors}, reverse=True)
    if not strides or strides[-1] != 1 or any(a % b for a, b in pairwise(strides)) or math.prod(own) % strides[0]:
        return None
    shape = (math.prod(own) // strides[0], *(a // b for a, b in pairwise(strides)))
    return shape if _index(place, shape, x.inside) is not None else None


def _across(e: Expr, steps: set[Any]) -> bool:
    """Whether steps move one place of an index by several strides, or are divided to find it."""
    if any(isinstance(q, FloorDiv | Mod) and q.free & steps for q in topological([e])):
        return True
    return len({abs(c) for factors, c in terms_of(e).items() if steps.intersection(factors)}) > 1


def _static(kind: Type) -> bool:
    return all(isinstance(e, int) for e in kind.shape)


def _index(place: IntExpr, shape: tuple[int, ...], inside: tuple[IntExpr, ...]) -> tuple[IntExpr, ...] | None:
    """The index of a place whose terms each go along one dimension; None where that cannot be proved.

    A constant may be a step back along a dimension and one ahead along the one around it.
    """
    strides: tuple[int, ...] = contiguous_strides(shape)  # type: ignore[assignment]
    index: list[IntExpr] = [0] * len(shape)
    constant = 0
    for factors, c in terms_of(place).items():
        if not factors:
            constant = c
            continue
        d = next((d for d, s in enumerate(strides) if c % s == 0), None)
        if d is None:
            return None
        term: IntExpr = c // strides[d]
        for f in factors:
            term = term * f
        index[d] = index[d] + term
    for moved in _moves(constant, strides):
        found = tuple(e + by for e, by in zip(index, moved, strict=True))
        if leaves(found, shape, inside) is None:
            return found
    return None


def _moves(constant: int, strides: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The ways to go so far by steps along dimensions, each the nearest below or above."""
    for up in combinations((0, 1), repeat=len(strides) - 1):
        left, out = constant, []
        for s, more in zip(strides, (*up, 0), strict=True):
            out.append(left // s + more)
            left -= out[-1] * s
        yield tuple(out)
