"""Store images whose neighbouring pixels are channels of products, with all of these in one dimension.

Pixels are shuffled among channels behind a convolution that makes images larger (`pixel_shuffle`), and back in its
gradients: their channels are one axis, of which an image in memory has some digits beside each other, and others are
which of neighbouring pixels it is. No box of memory has that axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from terrazzo.ir.address import mentions, unflatten
from terrazzo.ir.canonical import may_have
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Var, bounds, terms_of
from terrazzo.ir.node import substitute
from terrazzo.ir.sites import product
from terrazzo.ir.types import Type
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.layout.dimensions import OFTEN, operands, times

PASS = "store_as_read"
RULE = "pixels_together"


@dataclass(frozen=True)
class Shuffle:
    """How an axis lies in an image: `channels` is the dimension that its first digit walks alone, `digits` has those
    that others walk, and which, and `sizes` are the extents of all of them.
    """

    channels: int
    digits: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]

    def shape(self, image: l.Buffer) -> tuple[int, ...]:
        """That of the image with all of the axis in the dimension of channels."""
        found = list(image.type.static_shape)
        for d, n in self.digits:
            found[d] //= self.sizes[n]
        found[self.channels] = math.prod(self.sizes)
        return tuple(found)


def pixels_together(program: l.Program, log: Log, often: int = OFTEN) -> l.Program:
    """`program` with images that products read along channels which are neighbouring pixels, too, stored first with one
    dimension of all these channels, where every element is multiplied `often`, or more.

    @loop
    def f(x: f32[6, 4, 8], w: f32[512, 8]):
        with kernel('z', z=f32[6, 4, 512]):
            for a0 in free(6):
                for a1 in free(4):
                    for a2 in free(512):
                        for r0 in reduce(8):
                            in0 = x[a0, r0 // 2, r0 % 2 + a1 * 2]
                            in1 = w[a2, r0]
                            v0 = mul(in0, in1)
                            acc0 <- sum(v0)
                        z[a0, a1, a2] = acc0
        return (z,)
    =>
    @loop
    def f(x: f32[6, 4, 8], w: f32[512, 8]):
        with kernel('x_together', x_together=f32[6, 8, 4]):
            for a0 in free(6):
                for a1 in free(8):
                    for a2 in free(4):
                        in0 = x[a0, a1 // 2, (a1 % 2) + a2 * 2]
                        x_together[a0, a1, a2] = in0
        with kernel('z', z=f32[6, 4, 512]):
            for a0 in free(6):
                for a1 in free(4):
                    for a2 in free(512):
                        for r0 in reduce(8):
                            in0 = x_together[a0, r0, a1]
                            in1 = w[a2, r0]
                            v0 = mul(in0, in1)
                            acc0 <- sum(v0)
                        z[a0, a1, a2] = acc0
        return (z,)
    """
    taken = {b.name for s in program.steps for b in (*s.reads, *s.writes)}
    made: list[l.Buffer] = []
    there: dict[tuple[l.Buffer, Shuffle], l.Buffer] = {}
    steps: list[l.Kernel | l.Call] = []
    may = may_have(program, lambda form: any(_shuffled(form, often)))
    for s in program.steps:
        read: dict[Any, Any] = {}
        for x, axis, how in _shuffled(s, often) if isinstance(s, l.Kernel) and may(s) else ():
            key = x.buffer, how
            name = f"{x.buffer.name}_together"
            if key not in there and name not in taken:
                taken.add(name)
                there[key] = l.Buffer(name, Type(x.dtype, how.shape(x.buffer)))
                made.append(there[key])
                steps.append(_stored(x.buffer, there[key], how))
                log.add(Event(PASS, RULE, x.buffer.name, True, f"{x.buffer.type} is stored as {there[key].type}"))
            if key in there:
                read[x] = l.Load.make(there[key], _places(x, axis, how), x.inside)
        if read and isinstance(s, l.Kernel):
            s = l.Kernel(s.name, s.axes, tuple(substitute(y, read) for y in s.stores), s.source)
        steps.append(s)
        there = {key: b for key, b in there.items() if key[0] not in s.writes}
    if not made:
        return program
    log.applied(PASS, RULE, ", ".join(b.name for b in made), program.steps, steps)
    return l.Program(program.name, program.inputs, tuple(steps), program.results)


def _shuffled(kernel: l.Kernel, often: int) -> Iterator[tuple[l.Load, Any, Shuffle]]:
    """The images among the operands of a product that are read so, the axis and how it lies there."""
    p = product(kernel)
    for x in dict.fromkeys(operands(kernel)):
        if not all(isinstance(n, int) for n in x.buffer.type.shape) or times(x, kernel) < often:
            continue
        for a in (*kernel.axes, *(p.axes if p else ())):
            if a in x.free and isinstance(a.extent, int) and (how := _how(x, a)) is not None:
                yield x, a, how
                break


def _how(x: l.Load, axis: Any) -> Shuffle | None:
    """How an axis lies in an image; None where it is in one dimension, or in others than channels and pixels."""
    found: dict[int, Any] = {}
    for d, e in enumerate(x.index):
        own = [(f, c) for factors, c in terms_of(e).items() for f in factors if mentions(f, axis)]
        if len(own) > 1 or any(c != 1 for _, c in own):
            return None
        if own:
            found[d] = own[0][0]
    alone = [d for d, f in found.items() if x.index[d] is f]
    if len(found) < 2 or len(alone) != 1:
        return None
    shape = x.buffer.type.static_shape
    pixels = sorted((d for d in found if d != alone[0]), key=lambda d: -_step(found[d], axis))
    sizes = (shape[alone[0]], *(bounds(found[d])[1] + 1 for d in pixels))  # type: ignore[operator]
    if unflatten(axis, sizes) != (found[alone[0]], *(found[d] for d in pixels)) or math.prod(sizes) != axis.extent:
        return None
    for d, n in zip(pixels, sizes[1:], strict=True):
        if shape[d] % n or any(c % n for c in terms_of(x.index[d] - found[d]).values()):
            return None
    return Shuffle(alone[0], tuple((d, k + 1) for k, d in enumerate(pixels)), sizes)


def _step(digit: Any, axis: Any) -> int:
    """How far along an axis a digit of it changes first."""
    values = [substitute(digit, {axis: k}) for k in range(axis.extent)]
    return next((k for k, v in enumerate(values) if v != values[0]), 0)


def _places(x: l.Load, axis: Any, how: Shuffle) -> tuple[IntExpr, ...]:
    """The index of an image that is stored with all channels in one dimension."""
    digit = unflatten(axis, how.sizes)
    index = list(x.index)
    for d, n in how.digits:
        index[d] = (index[d] - digit[n]) // how.sizes[n]
    index[how.channels] = axis
    return tuple(index)


def _stored(image: l.Buffer, whole: l.Buffer, how: Shuffle) -> l.Kernel:
    """A kernel that stores an image so."""
    axes = tuple(Var(f"a{d}", n) for d, n in enumerate(whole.type.static_shape))
    digit = unflatten(axes[how.channels], how.sizes)
    index: list[IntExpr] = [*axes]
    for d, n in how.digits:
        index[d] = axes[d] * how.sizes[n] + digit[n]
    index[how.channels] = digit[0]
    return l.Kernel(whole.name, axes, (l.Store(whole, axes, l.Load.make(image, tuple(index))),))
