"""Products whose operands are stored first as TMA takes them: those that are computed on their way, are no boxes of
memory, or lie in rows that begin anywhere. What was fused is undone so.
"""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.collector import remembered
from terrazzo.hw.gpu import Gpu
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.sites import Product, product
from terrazzo.rules.loop_to_tile.products import warpgroups
from terrazzo.rules.loop_to_tile.products.forms import on_warpgroups
from terrazzo.rules.loop_to_tile.products.making import converted, promotes
from terrazzo.rules.loop_to_tile.products.packed import padded, stored_first
from terrazzo.rules.loop_to_tile.products.patches import even_products
from terrazzo.rules.loop_to_tile.products.unpacked import digits_summed
from terrazzo.rules.loop_to_tile.walked.collapse import digits_apart
from terrazzo.rules.loop_to_tile.walked.crossed import copying

MOST, TIMES, OFTEN = 1 << 32, 16, 1 << 29
"""Elements of an operand that is stored first, at most; and of one that is so many times what it is read from, as
patches are that overlap much. Large ones are there in windows (`copies.py`), which lose some of what they gain whole.
"""


@dataclass(frozen=True)
class Stored:
    """A product, `base` of it under other axes, and what became of that by the rewrite `how`: `made` and `copies` come
    before `form`.
    """

    rewrite: str
    base: l.Kernel
    made: tuple[l.Kernel, ...]
    whole: l.Kernel
    copies: tuple[l.Kernel, ...]
    form: l.Kernel
    product: Product
    how: str = "stored_first"

    def before(self, gpu: Gpu) -> float:
        """Nanoseconds of what comes first, by the model."""
        return sum(copying(x, gpu) for x in (*self.made, *self.copies))

    def plans(self, gpu: Gpu) -> list[warpgroups.Plan]:
        """In one piece, the best first."""
        return [x for x in warpgroups.plans(self.product, gpu) if x.pieces == 1]


@remembered
def stored(merged: l.Kernel, gpu: Gpu) -> tuple[Stored, ...]:
    """A product that runs on instructions of warpgroups only after its operands were stored, or that makes one on its
    way otherwise: as it is, or with digits of its axes apart; and with one axis of steps, where a filter's taps are
    steps beside channels.
    """
    if gpu.warpgroups is None or (on_warpgroups(merged, gpu) and not _makes(merged)):
        return ()
    ways = (("merge_product_axes", merged), ("digits_apart", digits_apart(merged)))
    first = next(filter(None, (_stored(rewrite, base, gpu) for rewrite, base in dict.fromkeys(ways))), None)
    flat = even_products(merged)
    one = _stored("even_products", flat, gpu) if flat.stores != merged.stores else None
    return tuple(filter(None, (first, one, _unpacked(merged, gpu), _larger_made(merged, gpu))))


def _unpacked(base: l.Kernel, gpu: Gpu) -> Stored | None:
    """Steps along numbers that hold several elements of a factor each, after the other factor was copied for that."""
    *made, whole = digits_summed(base)
    again = product(whole)
    if not made or again is None or not on_warpgroups(whole, gpu):
        return None
    return Stored("merge_product_axes", base, tuple(made), whole, (), whole, again, "digits_summed")


def _larger_made(base: l.Kernel, gpu: Gpu) -> Stored | None:
    """The smaller factor alone is stored first, where both are computed: the larger one is made on its way."""
    p = product(base)
    kept = [x for x in converted(p) if p.touched(x) == max(map(p.touched, p.operands))] if p is not None else []
    if p is None or not kept or len(kept) == len(converted(p)):
        return None
    *made, form = stored_first(base, kept)
    again = product(form)
    if again is None or not on_warpgroups(form, gpu):
        return None
    return Stored("merge_product_axes", base, tuple(made), form, (), form, again)


def _makes(kernel: l.Kernel) -> bool:
    """Whether a product makes an operand on its way. Of parts, of which several are made at once, none are stored."""
    p = product(kernel)
    return p is not None and not promotes(p) and bool(converted(p))


def _stored(rewrite: str, base: l.Kernel, gpu: Gpu) -> Stored | None:
    *made, whole = stored_first(base)
    *copies, form = padded(whole)
    again = product(form)
    if form is base or again is None or not on_warpgroups(form, gpu):
        return None
    if any(b.type.span > _most(b, x) for x in made for b in x.writes):
        return None
    return Stored(rewrite, base, tuple(made), whole, tuple(copies), form, again)


def _most(made: l.Buffer, maker: l.Kernel) -> int:
    """Elements of an operand that a kernel stores, at most."""
    return OFTEN if made.type.span > TIMES * sum(b.type.span for b in maker.reads) else MOST
