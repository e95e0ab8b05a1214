"""Operands of products whose steps lie a few beside each other in memory, and then far apart, are stored first: as the
weights of an einsum of three axes, of which the outermost and the innermost are summed over. No box of a tensor takes
what is every eighth element, so such a product leaves the tensor cores, or waits for single elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

from terrazzo.ir.address import flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Bound, FloorDiv, Mod, bounds, terms_of
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.layout.lookups import operands_stored, stored_first

FEW = 16
"""Steps that a matrix instruction takes at once."""
PASS = "online"
RULE = "store_turned"


def store_turned(program: l.Program, log: Log, price: Callable[[Sequence[l.Kernel]], float]) -> l.Program:
    """`program` with such operands stored as they are multiplied, where that is faster by the model.

    @loop
    def f(x: bf16[4, 16], w: bf16[2, 6, 8]):
        with kernel('z', z=f32[4, 6]):
            for a0 in free(4):
                for a1 in free(6):
                    for r0 in reduce(16):
                        in0 = x[a0, r0]
                        v0 = f32(in0)
                        in1 = w[r0 % 2, a1, r0 // 2]
                        v1 = f32(in1)
                        v2 = mul(v0, v1)
                        acc0 <- sum(v2)
                    z[a0, a1] = acc0
        return (z,)
    =>
    @loop
    def f(x: bf16[4, 16], w: bf16[2, 6, 8]):
        with kernel('z_w', z_w=bf16[6, 16]):
            for a0 in free(6):
                for a1 in free(16):
                    in0 = w[a1 % 2, a0, a1 // 2]
                    z_w[a0, a1] = in0
        with kernel('z', z=f32[4, 6]):
            for a0 in free(4):
                for a1 in free(6):
                    for r0 in reduce(16):
                        in0 = x[a0, r0]
                        v0 = f32(in0)
                        in1 = z_w[a1, r0]
                        v1 = f32(in1)
                        v2 = mul(v0, v1)
                        acc0 <- sum(v2)
                    z[a0, a1] = acc0
        return (z,)
    """

    def find(s: l.Kernel, names: Set[str], _: object) -> tuple[l.Kernel, ...] | None:
        return operands_stored(s, _turned, names, {})

    def prices(s: l.Kernel, found: Sequence[l.Kernel]) -> tuple[float, float]:
        return price([s]), price(found)

    return stored_first(program, log, (PASS, RULE, "as it lies"), find, prices)


def _turned(x: Any) -> bool:
    """Whether what lies side by side in memory is a digit of few values of a step, and the steps' others lie apart."""
    if not isinstance(x, l.Load) or x.inside:
        return False
    terms = terms_of(flatten(x.index, x.buffer.type.element_strides))
    beside = [factors for factors, c in terms.items() if c == 1 and factors]
    if len(beside) != 1 or len(beside[0]) != 1:
        return False
    (atom,) = beside[0]
    _, last = bounds(atom)
    return isinstance(atom, FloorDiv | Mod) and isinstance(atom.a, Bound) and isinstance(last, int) and last < FEW
