"""The form of a product in which boxes of an image are brought in at moved places: what is copied for that first, and
what reads the copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from terrazzo.hw.gpu import Gpu
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.sites import Product, product
from terrazzo.rules.loop_to_tile.candidate import Rewrite
from terrazzo.rules.loop_to_tile.products import boxes, taps
from terrazzo.rules.loop_to_tile.products.forms import columns_merged
from terrazzo.rules.loop_to_tile.products.packed import packed
from terrazzo.rules.loop_to_tile.products.warpgroup_tiles import ROWS
from terrazzo.rules.loop_to_tile.walked.crossed import copying
from terrazzo.rules.loop_to_tile.walked.threads import ceil

LONG = 8
"""Steps along an axis that are worth sharing among blocks: filters are shorter, images are not."""


@dataclass(frozen=True)
class Form:
    """Kernels that copy operands, what reads an image at moved places after them, and the rewrites that led there;
    and what adds up partial sums, where blocks share steps.
    """

    copies: tuple[l.Kernel, ...]
    moved: boxes.Moved
    rewrites: tuple[Rewrite, ...]
    rest: tuple[l.Kernel, ...] = ()

    def plans(self, gpu: Gpu) -> list[tuple[float, boxes.Plan]]:
        """The best plans, with the nanoseconds of all kernels by the model."""
        found = boxes.plans(self.moved, gpu)
        if not found:
            return []
        more = sum(copying(x, gpu) for x in self.copies)
        more += taps.meeting(self.moved.whole, gpu) if self.rest else 0.0
        return [(x.time + more, x) for x in found]


def boxed(kernel: l.Kernel, p: Product, gpu: Gpu) -> list[tuple[float, Form, boxes.Plan]]:
    """The ways to run a product in boxes, as a whole or in pieces, with their nanoseconds, best first."""
    forms = [y for x in image_forms(kernel, p, gpu) for y in (x, *_in_pieces(x, gpu))]
    return sorted(((time, x, plan) for x in forms for time, plan in x.plans(gpu)), key=lambda way: way[0])


def _in_pieces(form: Form, gpu: Gpu) -> Iterator[Form]:
    """A form whose blocks are few and have many steps, as in the gradient of a filter of few channels: in several
    pieces of the longest axis of steps.
    """
    x = form.moved
    steps = x.whole.sites[0].reduce.axes
    longest = max(x.taps, key=lambda a: a.extent, default=None)
    if longest is None or longest.extent < LONG:
        return
    blocks = math.prod(a.extent for a in x.batch) * ceil(math.prod(a.extent for a in x.rows), ROWS)
    for pieces in taps.shares(longest.extent, blocks * ceil(x.columns.extent, ROWS), gpu):
        part, rest = taps.cut_along(x.kernel, steps.index(longest), pieces)
        if (moved := boxes.moved(part)[0]) is not None:
            yield Form(form.copies, moved, (*form.rewrites, ("split", x.kernel, (part, rest))), (rest,))


def image_forms(kernel: l.Kernel, p: Product, gpu: Gpu) -> Iterator[Form]:
    """A product in such forms, with filters along one axis: those that lie beside each other along it, as of images'
    gradients, are copied or read as they lie.
    """
    whole = columns_merged(kernel, p)
    ways = [packed(whole), packed(whole, _own(whole))] if gpu.warpgroups else [(whole,)]
    for *copies, form in dict.fromkeys(ways):
        if (moved := boxes.moved(form)[0]) is not None:
            rewrites: tuple[Rewrite, ...] = (("merge_axes", kernel, (whole,)), ("packed", whole, (*copies, form)))
            yield Form(tuple(copies), moved, rewrites)


def _own(kernel: l.Kernel) -> frozenset[Any]:
    """The axis that one of two factors has to itself: of those of which each has some, the one that has one."""
    p = product(kernel)
    if p is None or len(p.sites) != 1:
        return frozenset()
    first, second = p.factors(p.sites[0])
    return min((frozenset(kernel.axes) & (x.free - y.free) for x, y in ((first, second), (second, first))), key=len)
