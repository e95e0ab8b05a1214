"""Sums and maxima that threads share: what each of them has in registers becomes the whole, in all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Var
from terrazzo.ir.schedule import WARPS_IN_A_GROUP
from terrazzo.ir.types import Type
from terrazzo.rules.tile.digits import Bindings, Digit, zero
from terrazzo.rules.tile_to_kernel.builder import Builder


def meet(
    builder: Builder, bindings: Bindings, place: k.Registers, digits: Sequence[Digit], function: str = "add"
) -> None:
    """Sums (or maxima) of lanes that these digits tell apart meet by shuffles, those of warps through shared memory."""
    at = tuple(bindings.loop_variable("i", n) for n in place.type.static_shape)
    every = [(v, True) for v in at]
    mine = l.Load(place, at)
    for d in digits:
        for bit in range(d.size.bit_length() - 1 if d.level == "lane" else 0):
            total = l.apply(function, mine, k.Shuffle(mine, d.inner << bit))
            builder.loops(every, partial(builder.add, l.Store(place, at, total)))
    if others := [d for d in digits if d.level != "lane"]:
        _through_memory(builder, bindings, place, at, others, function)


def _through_memory(
    builder: Builder,
    bindings: Bindings,
    place: k.Registers,
    at: tuple[Var, ...],
    digits: Sequence[Digit],
    function: str,
) -> None:
    own, every = bindings.warp, [(v, True) for v in at]
    kind = Type(place.type.dtype, (bindings.warps, *place.type.static_shape, k.WARP))
    meeting = builder.memory("meet", kind)
    put = l.Store(meeting, (own, *at, k.LANE), l.Load(place, at))
    builder.loops(every, partial(builder.add, put))
    builder.add(bindings.sync)
    there = own
    variables = []
    for d in digits:
        each = d.inner * (WARPS_IN_A_GROUP if d.level == "warpgroup" else 1)
        variables.append(bindings.loop_variable("w", d.size))
        there = there + (variables[-1] - d.value) * each
    identity = zero(place.type.dtype) if function == "add" else -math.inf
    nothing = l.Store(place, at, l.Literal(identity, place.type.dtype))
    total = l.apply(function, l.Load(place, at), l.Load(meeting, (there, *at, k.LANE)))

    def combine() -> None:
        builder.add(nothing)
        builder.loops([(v, True) for v in variables], partial(builder.add, l.Store(place, at, total)))

    builder.loops(every, combine)
    if builder.depth and not bindings.alone:
        builder.add(bindings.sync)  # before the next tile is put there: no step of it syncs
