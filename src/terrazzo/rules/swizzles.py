"""Swizzles of shared memory, found by the layout engine: those under which matrices move without bank conflicts."""

from __future__ import annotations

from functools import lru_cache

from terrazzo.ir.layout import HARDWARE, Layout, swizzle_for

MATRIX = Layout.parse("reg: k1 k2 k4; lane: m1 m2 m4 0 0")
"""What ldmatrix, stmatrix and wgmma move at a time: eight rows of 16 bytes, here of 16-bit elements, one below the
other. Eight lanes move 16 bytes each in a turn.
"""


@lru_cache(maxsize=1024)
def swizzled(row: int) -> int:
    """The span, in bytes, of the smallest swizzle under which matrices of rows of so many bytes lie in banks of their
    own. Rows that are wider than 128 bytes are cut into panels as wide as their swizzle, the widest that divides them.
    0 where they need none, as rows of an odd number of 16 bytes do, or where none fits.
    """
    for width in (128, 64, 32):
        if row % width == 0:
            bits = (width // 2).bit_length() - 1
            found = swizzle_for([(MATRIX, 4)], (("k", bits), ("m", 3)), 1)
            return next((s for s, swizzle in HARDWARE.items() if swizzle == found), 0)
    return 0
