"""Products of which somebody repeats the results, as who resizes an image after a convolution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.sites import sites
from terrazzo.rules.loop.cost import Rates, on_matrix


def repeated(kernels: Sequence[l.Kernel], readers: Sequence[l.Kernel], rates: Rates) -> str:
    """Why the products of kernels are not computed at all points of who only repeats them along an axis, or nothing: to
    multiply again takes longer than to store them once and read them. What follows is the same work either way, and
    stored in 32 bits as long as it is not whole, so whole kernels are not compared. 32 x 1024 rows of 512 columns, each
    wanted four times, take 107 us by the model of tiles when they are multiplied four times, and 69 when they are
    stored.
    """
    products = [c.reduce for k in kernels for c in sites(k).contractions.values()]
    if not products:
        return ""
    pointwise = [k for k in readers if not any(isinstance(x, l.Reduce) for x in k.terms)]
    again = 0.0
    for r in products:
        more = sum(max(0, _points(k.axes) - _points(r.free)) for k in pointwise)
        again += more * _points(r.axes) * (rates.tensor if on_matrix(r, rates) else rates.fma)
    size = sum(_points(k.axes) * b.type.dtype.size for k in kernels for b in k.writes)
    apart = rates.launch * len(kernels) + 2 * size * rates.byte
    return f"{again / 1000:.1f} us to multiply again, {apart / 1000:.1f} us to store" if again > apart else ""


def _points(axes: Any) -> int:
    """How many points axes have, those of sizes that are not known aside."""
    extents = (getattr(a, "extent", 1) for a in axes)
    return math.prod(n for n in extents if isinstance(n, int))
