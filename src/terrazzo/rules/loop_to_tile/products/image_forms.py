"""The form of a product in which boxes of an image are brought in at moved places: what is copied for that first, and
what reads the copies.
"""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.hw.gpu import Gpu
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.sites import Product
from terrazzo.rules.loop_to_tile.candidate import Rewrite
from terrazzo.rules.loop_to_tile.products import boxes
from terrazzo.rules.loop_to_tile.products.forms import columns_merged
from terrazzo.rules.loop_to_tile.products.packed import packed
from terrazzo.rules.loop_to_tile.walked.crossed import copying


@dataclass(frozen=True)
class Form:
    """Kernels that copy operands, what reads an image at moved places after them, and the rewrites that led there."""

    copies: tuple[l.Kernel, ...]
    moved: boxes.Moved
    rewrites: tuple[Rewrite, ...]

    def before(self, gpu: Gpu) -> float:
        """Nanoseconds of the copies by the model."""
        return sum(copying(x, gpu) for x in self.copies)


def image_form(kernel: l.Kernel, p: Product, gpu: Gpu) -> Form | None:
    """A product in such a form, with filters along one axis; None where it has none."""
    whole = columns_merged(kernel, p)
    *copies, form = packed(whole) if gpu.warpgroups else (whole,)
    moved = boxes.moved(form)[0]
    if moved is None:
        return None
    rewrites: tuple[Rewrite, ...] = (("merge_axes", kernel, (whole,)), ("packed", whole, (*copies, form)))
    return Form(tuple(copies), moved, rewrites)
