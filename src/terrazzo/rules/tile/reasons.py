"""Why a plan is as it is, where that follows from what the machine does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from terrazzo.hw.memory import matrix_wavefronts, wavefronts
from terrazzo.hw.movmatrix import TURN
from terrazzo.hw.products import matrix, warps
from terrazzo.ir.layout import HARDWARE, Layout
from terrazzo.ir.plan import STORED, Convert, Plan, Product, Result, Stage, Stream
from terrazzo.rules.tile.draft import Draft
from terrazzo.rules.tile.handed import COPIES, REGISTERS, SIZE, handed
from terrazzo.rules.tile.results import height
from terrazzo.rules.tile.rings import axis_called, brought, operand_text

LAYOUT = {
    REGISTERS: "its sums lie as {} wants them, and are rounded where they are",
    COPIES: "lanes have what {} wants of its sums, in other registers",
    TURN.name: "its sums are what {} wants once matrices of 8 x 8 are transposed, from lane to lane",
}
"""Why what was summed stays in registers."""


def reasons(plan: Plan, draft: Draft) -> Iterator[tuple[str, str]]:
    """(which decision, why)."""
    for p in plan.all(Product):
        instruction = matrix(p.on)
        sizes = {operand_text(x): x.dtype.size for x in brought(draft, p)}  # type: ignore[attr-defined]
        for s in plan.all(Stream):
            size = sizes.get(s.operand, 0)
            if size and instruction is not None:
                who = "wgmma, which takes swizzled rows only," if warps(instruction) > 1 else "ldmatrix"
                row = (s.panel or s.axes[-1].args[0]) * size
                yield "swizzle", f"{s.name}: {who} reads {_pieces(row, s.pad * size, s.swizzle)}"
            if size and s.multicast > 1:
                yield (
                    "multicast",
                    f"{s.name}: the {s.multicast} blocks of a cluster need the same of it; each fetches a part",
                )
    for c in plan.all(Convert):
        if c.by in LAYOUT:
            yield "layout", f"{c.value}: {LAYOUT[c.by].format(c.to)}"
    for p in plan.all(Product):
        if STORED in (p.a, p.b):
            m, n = (axis_called(draft, x) for x in (p.m, p.n))
            way = handed(draft, p.sites[0], matrix(p.on), m, n)
            for x in plan.all(Stage):
                if x.product in p.sites:
                    yield "layout", f"{x.of}: what {p.sites[0]} takes of it lies in shared memory: {way.why}"
                    row = (x.panel or x.axes[-1].args[0]) * SIZE
                    who = "wgmma" if warps(matrix(p.on)) > 1 else "ldmatrix"
                    yield "swizzle", f"{x.name}: {who} reads {_pieces(row, 0, x.swizzle)}"
    for r in plan.all(Result):
        if r.slab:
            size = next(x.buffer.type.dtype.size for x in draft.kernel.stores if x.buffer.name == r.store)
            product = next(p for p in plan.all(Product) if p.n == r.columns)
            row = size * (r.panel or (height(draft, product) if r.turned else r.width))
            told = f"{r.put} writes {_pieces(row, r.pad * size, r.swizzle)}"
            yield "swizzle", f"{r.slab}: {_lanes(plan, r, row, size) if r.put == 'st' else told}"


def _lanes(plan: Plan, r: Result, row: int, size: int) -> str:
    """What it costs that the lanes of a warp put what they have side by side of a store's results."""
    layout = Layout.parse(next(c.layout for c in plan.all(Convert) if c.to == r.slab))
    lanes = layout.coordinates(lane=np.arange(32))
    down, across = (lanes["n"], lanes["m"]) if r.turned else (lanes["m"], lanes["n"])
    at, each = down * (row + r.pad * size) + across * size, size << layout.bits("reg")
    rounds, _ = wavefronts(HARDWARE[r.swizzle](at)[None], np.ones((1, 32), bool), each, True)
    return f"lanes put {each} bytes each in rows of {row} bytes: {rounds[0]} wavefronts swizzled by {r.swizzle}"


def _pieces(row: int, pad: int, swizzle: int) -> str:
    """What eight pieces of 16 bytes cost, one below the other: so matrices are read and written."""
    told = f"8 pieces of 16 bytes from rows of {row} bytes"
    plain, done = (f"{n} wavefront{'s' if n > 1 else ''}" for n in (_wavefronts(row + pad, x) for x in (0, swizzle)))
    if pad:
        told += f" and {pad} more"
    return f"{told}: {done} swizzled by {swizzle}, {plain} if not" if swizzle else f"{told}, not swizzled: {plain}"


def _wavefronts(row: int, swizzle: int) -> int:
    lanes = np.arange(32)
    at = HARDWARE[swizzle](lanes % 8 * row)
    found, _ = matrix_wavefronts(at[None], np.ones((1, 32), bool), 1)
    return int(found[0])
