"""Products whose results are repeated along an axis are stored once, where a kernel that does both is slower.

Scores of groups that heads share, as in Mamba-2, are fused with what is done to them for each head before it shows that
they are the same for several. The product stands outside of the loop over heads then, and no matrix instructions can
compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from terrazzo.ir.contraction import contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.nest import accumulators
from terrazzo.ir.types import Type
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.definitions import unused
from terrazzo.rules.loop_to_tile.products.apart import term_apart

PASS = "parts"
RULE = "multiply_once"

Price = Callable[[Sequence[l.Kernel]], float]


def multiply_once(program: l.Program, log: Log, price: Price) -> l.Program:
    """`program` with products that are repeated along axes of their kernels as kernels of their own, where both take
    less by the model.

    @loop
    def f(x: f32[3, 4], w: f32[5, 4], u: f32[3, 5, 2]):
        with kernel('z', z=f32[3, 5, 2]):
            for a0 in free(3):
                for a1 in free(5):
                    for r0 in reduce(4):
                        in0 = x[a0, r0]
                        in1 = w[a1, r0]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    for a2 in free(2):
                        in2 = u[a0, a1, a2]
                        v1 = mul(acc0, in2)
                        z[a0, a1, a2] = v1
        return (z,)
    =>
    @loop
    def f(x: f32[3, 4], w: f32[5, 4], u: f32[3, 5, 2]):
        with kernel('z_once', z_once=f32[3, 5]):
            for a0 in free(3):
                for a1 in free(5):
                    for r0 in reduce(4):
                        in0 = x[a0, r0]
                        in1 = w[a1, r0]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    z_once[a0, a1] = acc0
        with kernel('z', z=f32[3, 5, 2]):
            for a0 in free(3):
                for a1 in free(5):
                    in0 = z_once[a0, a1]
                    for a2 in free(2):
                        in1 = u[a0, a1, a2]
                        v0 = mul(in0, in1)
                        z[a0, a1, a2] = v0
        return (z,)
    """
    names = {s.name for s in program.steps} | {b.name for s in program.steps for b in (*s.reads, *s.writes)}
    steps: list[l.Kernel | l.Call] = []
    for s in program.steps:
        if isinstance(s, l.Kernel) and (r := _repeated(s)) is not None:
            axes = _order(s, r)
            buffer = l.Buffer(unused(f"{s.name}_once", names), Type(r.dtype, tuple(a.extent for a in axes)))
            apart = term_apart(s, r, buffer, axes)
            together, both = price([s]), price(apart)
            why = f"{both / 1000:.1f} us stored once, {together / 1000:.1f} us together"
            log.add(Event(PASS, RULE, s.name, both < together, why))
            if both < together:
                log.applied(PASS, RULE, s.name, [s], list(apart))
                names.add(buffer.name)
                steps += apart
                continue
        steps.append(s)
    if len(steps) == len(program.steps):
        return program
    return l.Program(program.name, program.inputs, tuple(steps), program.results)


def _repeated(kernel: l.Kernel) -> l.Reduce | None:
    """The only product of a kernel that reduces nothing else, if its results are repeated along axes."""
    match list(accumulators(kernel).values()):
        case [l.Reduce() as r] if contraction(r) is not None and r.free < {*kernel.axes}:
            sizes = [a.extent for a in (*kernel.axes, *r.axes)]
            again = any(a.extent != 1 for a in kernel.axes if a not in r.free)
            return r if again and all(isinstance(n, int) for n in sizes) else None
    return None


def _order(kernel: l.Kernel, r: l.Reduce) -> tuple[Any, ...]:
    """How a product is stored: the axes of its batch first, as products are."""
    found = contraction(r)
    factors = found.factors if found else ()
    return tuple(sorted((a for a in kernel.axes if a in r.free), key=lambda a: not all(a in f.free for f in factors)))
