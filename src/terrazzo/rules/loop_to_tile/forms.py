"""A product under other axes: as few as possible, which makes fewer tiles; or one for every digit, as TMA has them."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.hw.gpu import Gpu
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.sites import Product, product
from terrazzo.rules.loop_to_tile import warpgroups
from terrazzo.rules.loop_to_tile.candidate import Rewrite
from terrazzo.rules.loop_to_tile.collapse import digits_apart, flat_products, merge_product_axes


@dataclass(frozen=True)
class Form:
    """A product, and the rewrites that led to its axes."""

    kernel: l.Kernel
    rewrites: tuple[Rewrite, ...] = ()

    def then(self, rewrite: str, kernel: l.Kernel) -> Form:
        """The same after one rewrite more."""
        return Form(kernel, (*self.rewrites, (rewrite, self.kernel, (kernel,))))


def merged(kernel: l.Kernel, p: Product, gpu: Gpu) -> Form:
    """Axes that the same factors know as one; and those of steps, where instructions of warpgroups take that."""
    form = Form(kernel).then("merge_product_axes", merge_product_axes(kernel, p.sites))
    flat = flat_products(form.kernel)
    steps = flat.stores != form.kernel.stores and on_warpgroups(flat, gpu)
    return form.then("flat_products", flat) if steps else form


def apart(form: Form) -> Form:
    """An axis for every digit."""
    return form.then("digits_apart", digits_apart(form.kernel))


def for_warpgroups(kernel: l.Kernel, gpu: Gpu) -> list[Form]:
    """The forms of a product that instructions of warpgroups take: merged, if they do, else apart, else as it is."""
    if (p := product(kernel)) is None:
        return []
    first = merged(kernel, p, gpu)
    return [x for x in (first, apart(first), Form(kernel)) if on_warpgroups(x.kernel, gpu)]


def on_warpgroups(kernel: l.Kernel, gpu: Gpu) -> bool:
    """Whether a kernel is a product that instructions of warpgroups take."""
    p = product(kernel)
    return p is not None and bool(warpgroups.instructions_for(p, gpu)[0])
