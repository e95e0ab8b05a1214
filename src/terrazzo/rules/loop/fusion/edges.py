"""Windows of products that reach beyond the edge of what they read."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.instances import Instance, buffers_of
from terrazzo.ir.sites import sites
from terrazzo.ir.types import f32
from terrazzo.rules.loop.cost import Rates, has_tiles


def beyond_edges(kernels: Sequence[Instance], readers: Sequence[Instance], rates: Rates) -> str:
    """Why what kernels compute is not computed in the windows of products in float32, or nothing. Beyond the edge it is
    0, whatever a function makes of 0, and such a factor has no parts for tensor cores (ADR 009): a convolution of
    4 x 320 x 64 x 64 behind the gradient of a norm takes 2184 us by the model where it computes that itself, and 63
    behind a kernel of its own, which takes 17 (H200).
    """
    stores = [(b, s) for k in kernels for b, s in zip(k.writes, k.form.stores, strict=True)]
    computed = {b for b, s in stores if not isinstance(s.value, l.Load)}
    for reader in readers if rates.matrix else ():
        named = dict(zip(buffers_of(reader.form), reader.buffers, strict=True))
        for c in sites(reader.form).contractions.values():
            windows = [x for x in c.operands if isinstance(x, l.Load) and x.inside and x.dtype is f32]
            if any(named[x.buffer] in computed for x in windows) and has_tiles(c):
                return "a window in float32 reaches beyond the edge of what is computed"
    return ""
