"""Weights that do not become part of the product that takes them are stored in the 16 bits of what they weigh.

Exponentials over their sum, kept or not, are multiplied with values of 16 bits, and what comes of it is rounded to 16:
PyTorch's own kernels round them before. In 32 bits no tensor core takes them beside such values.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from terrazzo.ir.contraction import contraction, operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.node import substitute, topological
from terrazzo.ir.types import DType, Type, contiguous_strides, f32, ordered_strides
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.access import WIDEST
from terrazzo.rules.loop.definitions import Definitions

PASS, RULE = "online", "rounded_weights"


def rounded_weights(program: l.Program, log: Log, matrix: Container[str]) -> l.Program:
    """`program` with weights in 32 bits that one product alone reads stored as its other factor is, where matrix
    instructions take that type.
    """
    known = Definitions(program)
    made: dict[l.Kernel, l.Kernel] = {}
    for last in [s for s in program.steps if isinstance(s, l.Kernel)]:
        if (found := _weights(last, known, matrix)) is None:
            continue
        load, kind = found
        maker = known.makers[load.buffer]
        (store,) = maker.stores
        b = l.Buffer(load.buffer.name, aligned(kind, load.buffer.type))
        rounded = l.Store(b, store.index, l.apply(kind.name, store.value))
        new = l.Kernel(maker.name, maker.axes, (rounded,), maker.source)
        reader = substitute(last, {load: l.apply(f32.name, l.Load(b, load.index, load.inside))})
        log.add(Event(PASS, RULE, last.name, True, f"{b.name} is stored in {kind.name}, which it is multiplied with"))
        log.applied(PASS, RULE, last.name, [maker, last], [new, reader])
        made |= {maker: new, last: reader}
    steps = tuple(made.get(s, s) if isinstance(s, l.Kernel) else s for s in program.steps)
    return l.Program(program.name, program.inputs, steps, program.results)


def _weights(last: l.Kernel, known: Definitions, matrix: Container[str]) -> tuple[l.Load, DType] | None:
    """Where a product reads weights of 32 bits that nobody else does, and the 16 bits its other factor is of."""
    if any(s.buffer.type.dtype.size != 2 for s in last.stores):
        return None
    for r in [x for x in topological(last.stores) if isinstance(x, l.Reduce)]:
        if (c := contraction(r)) is None or len(c.terms) > 1:
            continue
        for x, y in (c.factors, c.factors[::-1]):
            kind: DType = operand(y).dtype  # type: ignore[attr-defined]
            alone = isinstance(x, l.Load) and x.dtype is f32 and known.readers.get(x.buffer) == [last]
            if not alone or kind.name not in matrix or kind.size != 2:
                continue
            assert isinstance(x, l.Load)
            if x.buffer in known.kept:
                continue
            once = sum(isinstance(z, l.Load) and z.buffer is x.buffer for z in topological(last.stores)) == 1
            if once and x.buffer in known.makers and _weighs(known.of(x), known):
                return x, kind
    return None


def _weighs(x: Any, known: Definitions) -> bool:
    """Whether a term is an exponential, or a part of one."""
    x = known.unfold(x)
    if not isinstance(x, l.Apply):
        return False
    name, args = x.fn.name, x.args
    if is_cast(x.fn) or name in ("div", "approx_div"):
        return _weighs(args[0], known)
    if name == "mul":
        return any(_weighs(a, known) for a in args)
    if name == "where":
        zero = [isinstance(a, l.Literal) and a.value == 0 for a in args[1:]]
        return any(zero) and any(_weighs(a, known) for a, none in zip(args[1:], zero, strict=True) if not none)
    return name in ("exp", "approx_exp2")


def aligned(kind: DType, like: Type) -> Type:
    """The type of so many numbers of a kind, in rows that begin at multiples of 16 bytes."""
    shape = like.static_shape
    strides = ordered_strides(shape, range(len(shape)), WIDEST // kind.size)
    return Type(kind, shape, None if strides == contiguous_strides(shape) else strides)
