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
from terrazzo.ir.expr import Expr, FloorDiv, IntExpr, Mod, Var, terms_of
from terrazzo.ir.instances import buffers_of, instances
from terrazzo.ir.node import per_node, substitute, topological, transform
from terrazzo.ir.proof import leaves
from terrazzo.ir.sites import product
from terrazzo.ir.types import Type, contiguous_strides
from terrazzo.ir.verify import kernel_problem
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.moves import meeting

PASS, RULE = "store_as_read", "dimensions_of_products"


def dimensions_of_products(program: l.Program, log: Log, copied: bool = False) -> l.Program:
    """`program` with temporaries stored with a dimension for every stride at which products step through them, where
    these find places by dividing what is summed over, or all the way across two dimensions. Images that are given are
    `copied` so, where asked for and each of their elements is multiplied often.

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
    often: set[l.Buffer] = set()
    instance = instances(s for s in program.steps if isinstance(s, l.Kernel))
    for kernel in [instance(s) for s in program.steps if isinstance(s, l.Kernel)]:
        for n, shape, image in _read_by(kernel.form):
            shapes.setdefault(kernel.buffers[n], set()).add(shape)
            often |= {kernel.buffers[n]} if image else set()
    new: dict[l.Buffer, l.Buffer] = {}
    copies: dict[l.Buffer, l.Buffer] = {}
    taken = {b.name for s in program.steps for b in (*s.reads, *s.writes)}
    for b, found in shapes.items():
        other = found - {b.type.shape} if b in fixed else found  # others go on reading what is given
        shape = other.pop() if len(other) == 1 else None
        if shape is None or shape == b.type.shape:
            continue
        kind, name = Type(b.type.dtype, shape), f"{b.name}_apart"
        if b not in fixed:
            made = l.Buffer(b.name, kind)
            why = next((_problem(s, b, made) for s in program.steps if isinstance(s, l.Kernel) and b in s.writes), "")
            if not why:
                new[b] = made
            log.add(Event(PASS, RULE, b.name, not why, why or f"{b.type} is stored as {kind}"))
        elif copied and b in often and name not in taken:
            copies[b] = l.Buffer(name, kind)
            log.add(Event(PASS, RULE, b.name, True, f"{b.type} is copied as {kind}"))
    if not new and not copies:
        return program

    def visit(node: Any) -> Any:
        if not isinstance(node, l.Load | l.Store) or node.buffer not in new:
            return node
        return _placed(node, new[node.buffer])

    memo: dict[Any, Any] = {}
    steps: list[l.Kernel | l.Call] = []
    missing = dict(copies)
    for s in program.steps:
        if isinstance(s, l.Kernel):
            read = {x: _placed(x, copies[x.buffer]) for x in operands(s) if x.buffer in copies}
            steps += [_copy(x.buffer, missing.pop(x.buffer)) for x in read if x.buffer in missing]
            stores = tuple(substitute(x, read) for x in s.stores) if read else s.stores
            s = transform(l.Kernel(s.name, s.axes, stores, s.source) if read else s, visit, memo)
        steps.append(s)
    log.applied(PASS, RULE, ", ".join(b.name for b in (*new, *copies)), program.steps, steps)
    return l.Program(program.name, program.inputs, tuple(steps), program.results)


@per_node
def _read_by(kernel: l.Kernel) -> tuple[tuple[int, tuple[int, ...] | None, bool], ...]:
    """Which of the buffers of a kernel its products read, each with the dimensions of the strides at which they step
    through it, and whether it is an image of which every element is multiplied often.
    """
    found = (x for x in operands(kernel) if x.buffer.type.strides is None)
    return tuple(
        (buffers_of(kernel).index(x.buffer), _shape(x, kernel), _is_image(x, kernel) and times(x, kernel) >= OFTEN)
        for x in found
        if all(isinstance(e, int) for e in x.buffer.type.shape)
    )


def _problem(kernel: l.Kernel, old: l.Buffer, new: l.Buffer) -> str:
    """Why a kernel cannot store a buffer with other dimensions, or nothing: where its digits are none of theirs."""
    stores = tuple(_placed(s, new) if s.buffer is old else s for s in kernel.stores)
    return kernel_problem(l.Kernel(kernel.name, kernel.axes, stores, kernel.source))


OFTEN = 128
"""Products with an element from which on copying it is little beside multiplying it on CUDA cores, one by one."""


def _is_image(x: l.Load, kernel: l.Kernel) -> bool:
    """Whether an operand lies under a window, which no rows of memory are."""
    p = product(kernel)
    return p is not None and meeting([x], kernel.axes, p.axes) != (1, 1)


def times(x: l.Load, kernel: l.Kernel) -> int:
    """How often each element of what an operand reads is multiplied."""
    p = product(kernel)
    points = math.prod(a.extent for a in (*kernel.axes, *(p.axes if p else ())) if isinstance(a.extent, int))
    return points // max(1, math.prod(x.buffer.type.static_shape))


def _placed(node: Any, buffer: l.Buffer) -> Any:
    """A load or store where a buffer of other dimensions has what it reads or writes."""
    place = flatten(node.index, node.buffer.type.element_strides)
    inside = node.inside if isinstance(node, l.Load) else ()
    index = _index(place, buffer.type.static_shape, inside) or unflatten(place, buffer.type.shape)
    return l.Load.make(buffer, index, inside) if isinstance(node, l.Load) else l.Store(buffer, index, node.value)


def _copy(source: l.Buffer, copy: l.Buffer) -> l.Kernel:
    """A kernel that stores a buffer with other dimensions."""
    axes = tuple(Var(f"a{d}", n) for d, n in enumerate(copy.type.static_shape))
    load = l.Load.make(source, unflatten(flatten(axes, copy.type.element_strides), source.type.shape))
    return l.Kernel(copy.name, axes, (l.Store(copy, axes, load),))


def operands(kernel: l.Kernel) -> Iterator[l.Load]:
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
