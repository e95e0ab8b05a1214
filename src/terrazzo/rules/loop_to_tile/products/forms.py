"""A product under other axes: as few as possible, which makes fewer tiles; or one for every digit, as TMA needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from terrazzo.collector import remembered
from terrazzo.hw.gpu import Gpu
from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr
from terrazzo.ir.node import topological
from terrazzo.ir.sites import Product, loads, product
from terrazzo.rules.loop_to_tile.candidate import Rewrite
from terrazzo.rules.loop_to_tile.products import warpgroups
from terrazzo.rules.loop_to_tile.walked.collapse import digits_apart, flat_products, merge_axes, merge_product_axes
from terrazzo.rules.loop_to_tile.walked.threads import size_of, step


@dataclass(frozen=True)
class Form:
    """A product, and the rewrites that led to its axes."""

    kernel: l.Kernel
    rewrites: tuple[Rewrite, ...] = ()

    def then(self, rewrite: str, kernel: l.Kernel) -> Form:
        """The same after one rewrite more."""
        return Form(kernel, (*self.rewrites, (rewrite, self.kernel, (kernel,))))


@remembered
def merged(kernel: l.Kernel, p: Product, gpu: Gpu) -> Form:
    """Axes that the same factors know as one; and those of steps, where instructions of warpgroups take that, or memory
    runs through them as through one. In steps of a short last axis tiles multiply by zeros mostly: 131,072 x 5 results
    of 5 x 5 steps took 36 us by the model, and take 11.
    """
    form = Form(kernel).then("merge_product_axes", merge_product_axes(kernel, p.sites))
    flat = flat_products(form.kernel)
    steps = flat.stores != form.kernel.stores and (on_warpgroups(flat, gpu) or _steps_even(flat))
    return form.then("flat_products", flat) if steps else form


def _steps_even(flat: l.Kernel) -> bool:
    """Whether the steps of a product are one axis, along which each of its operands has the same step all the way."""
    if (p := product(flat)) is None or len(p.axes) > 1:
        return False
    (axis,) = p.axes
    read = [x for x in p.operands if isinstance(x, l.Load) and not x.inside]
    steps = [coefficient(flatten(x.index, x.buffer.type.element_strides), axis) for x in read]
    return len(read) == len(p.operands) and all(isinstance(s, int) for s in steps)


def columns_merged(kernel: l.Kernel, p: Product) -> l.Kernel:
    """A product of what is read at moved places with the axes of its filters as one, which instructions take: those
    that the factor knows that is read nowhere beside its place.
    """
    for f, g in (pair for c in p.sites for pair in (c.factors, c.factors[::-1])):
        own = f.free - g.free
        if any(e.free & set(p.axes) and e.free & own for x in loads(f) for e in x.index if isinstance(e, Expr)):
            return merge_axes(kernel, [a for a in kernel.axes if a in g.free - f.free])
    return kernel


@remembered
def apart(form: Form) -> Form:
    """An axis for every digit, but one for those along which all that is read and stored runs as if it were one: pixels
    of an image whose channels come first.
    """
    digits = form.then("digits_apart", digits_apart(form.kernel))
    found = product(digits.kernel)
    for run in _runs(found) if found is not None else ():
        digits = digits.then("merge_axes", merge_axes(digits.kernel, run))
    return digits


def _runs(p: Product) -> list[list[Any]]:
    """Neighbouring axes of a product that the same factors know, and that are one in memory wherever they are read."""
    terms = topological([s.value for s in p.kernel.stores])
    accesses = [x for x in terms if isinstance(x, l.Load)] + [l.Load(s.buffer, s.index) for s in p.kernel.stores]

    def one(a: Any, b: Any) -> bool:
        knows = [(a in f.free, b in f.free) for c in p.sites for f in c.factors]
        both = [(step(x, a), step(x, b)) for x in accesses if a in x.free or b in x.free]
        return all(x == y for x, y in knows) and all(y is not None and x == y * size_of(b) for x, y in both)

    runs: list[list[Any]] = []
    for a in p.kernel.axes:
        if runs and one(runs[-1][-1], a):
            runs[-1].append(a)
        else:
            runs.append([a])
    return [x for x in runs if len(x) > 1]


def for_warpgroups(kernel: l.Kernel, gpu: Gpu) -> list[Form]:
    """The forms of a product that instructions of warpgroups take: merged, if they do, else apart, else as it is."""
    p = product(kernel)
    if p is None or not warpgroups.multiplied(p):
        return []
    first = merged(kernel, p, gpu)
    return [x for x in (first, apart(first), Form(kernel)) if on_warpgroups(x.kernel, gpu)]


def on_warpgroups(kernel: l.Kernel, gpu: Gpu) -> bool:
    """Whether a kernel is a product that instructions of warpgroups take."""
    p = product(kernel)
    return p is not None and bool(warpgroups.instructions_for(p, gpu)[0])
