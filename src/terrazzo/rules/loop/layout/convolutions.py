"""Convolutions in the forms that tensor cores multiply best, one after the other."""

from __future__ import annotations

from terrazzo.ir.dialects import loop as l
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.layout.few_results import Price
from terrazzo.rules.loop.layout.in_place import images_in_place
from terrazzo.rules.loop.layout.phases import phases_apart
from terrazzo.rules.loop.layout.phases_beside import phases_beside
from terrazzo.rules.loop.layout.taps_after import taps_after
from terrazzo.rules.loop.layout.whole_steps import whole_steps


def convolutions(program: l.Program, log: Log, price: Price) -> l.Program:
    """`program` with those of few results first, which fill columns in ways of their own, then others that have phases,
    then images that were cropped or padded in the place of what they are a part of, and sums that are no products.
    """
    few = phases_beside(taps_after(program, log, price), log, price)
    return whole_steps(images_in_place(phases_apart(few, log, price), log, price), log, price)
