"""Products whose columns are reduced in tiles, under pinned schedules, as text of Tile IR."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from terrazzo.ir.types import bf16

TERM = """@tile
def f(x: bf16[{rows}, {deep}], w: bf16[{words}, {deep}], y: i64[{rows}]):
    with kernel("loss", found=f32[{pieces}, {rows}], top=f32[{pieces}, {rows}], total=f32[{pieces}, {rows}]):
        for a0 in free({rows}):
            for s in free({pieces}):
                v0 = index(at(y[a0], {words}))
                for r1 in reduce({chunk}):
                    v1 = index({last} - s * {chunk} - r1)
                    for r0 in reduce({deep}):
                        acc2 <- sum(mul(f32(x[a0, r0]), f32({w})))
                    v2 = f32(bf16(acc2))
                    acc0 <- sum(where(eq(index(s * {chunk} + r1), v0), v2, f32(0.0)))
                    acc1 <- logsumexp({score}, f32(1.0))
                found[s, a0] = acc0
                top[s, a0] = get(acc1, 0)
                total[s, a0] = get(acc1, 1)
    with schedule("loss", target="{target}"):
        a0 = {cut}
        s = {walked}
        r1 = block({chunk})
        r0 = time({steps}, ring=3) * block({step})
        {walk}
        with site("acc2", on="{on}"):
            a0 = {own}
            r1 = {columns}
            r0 = reg({deeper}) * inst.k(16)
            x = smem(by="{by}", swizzle={swizzle}{x})
            w = smem(by="{by}", swizzle={swizzle}{w_s})
        with site("found", "top", "total"):
            a0 = like("acc2")
    return (found, top, total)
"""


@dataclass(frozen=True)
class Reduced:
    """The states of a loss: of each row and `chunk` of columns the maximum, the sum of exponentials below it, and the
    number in the column of a label. `words` may end within a chunk. Warpgroups have `each` 64 rows, in `turns` perhaps;
    a `cluster` of so many blocks divides rows, or pieces of `columns`. With `warps` the instructions of warps multiply,
    two along the columns. With `lag` one warpgroup begins a step behind the other.
    """

    rows: int = 128
    words: int = 32
    deep: int = 128
    chunk: int = 16
    groups: int = 1
    each: int = 1
    turns: bool = False
    lag: bool = False
    cluster: int = 1
    columns: bool = False
    warps: bool = False
    persistent: int = 1
    registers: bool = True

    @property
    def target(self) -> str:
        return "sm_80" if self.warps else "sm_90a"

    @property
    def text(self) -> str:
        """A program of this kernel and its schedule."""
        pieces, step = -(-self.words // self.chunk), 32 if self.warps else 64
        tile = 64 if self.warps else 64 * self.groups * self.each
        blocks = f" * cluster({self.cluster})" if self.cluster > 1 else ""
        down, across = ("", blocks) if self.columns else (blocks, "")
        shared = (", multicast=True" if across else "", ", multicast=True" if down else "")
        every, beside = (1, self.cluster) if self.columns else (self.cluster, 1)
        reg = f"reg({self.each}) * " if self.each > 1 else ""
        whole = self.words % self.chunk == 0
        place = f"w[s * {self.chunk} + r1, r0]"
        own = ", registers=(40, 232)" if self.registers else ""
        roles = f"roles(load=warp(1), math=warpgroup({2 if self.turns else self.groups}){own}"
        roles += ", turns=True" * self.turns + ", lag=True" * self.lag
        walk = f"persistent({self.persistent})\n        {roles})"
        return TERM.format(
            rows=self.rows, words=self.words, deep=self.deep, chunk=self.chunk, pieces=pieces, last=self.words - 1,
            w=place if whole else f"{place} if s * {self.chunk} + r1 < {self.words} else 0",
            score="v2" if whole else "where(ge(v1, i64(0)), v2, f32(-inf))",
            target=self.target,
            cut=f"grid({-(-self.rows // (tile * every))}){down} * block({tile})",
            walked=f"grid({pieces // beside}){across}",
            steps=self.deep // step, step=step, deeper=step // 16,
            walk="persistent(1)" if self.warps else walk,
            on="mma.m16n8k16.f32.bf16" if self.warps else f"wgmma.m64n{self.chunk}k16.f32.bf16",
            own="warp(2) * reg(2) * inst.m(16)" if self.warps else f"warpgroup({self.groups}) * {reg}inst.m(64)",
            columns=f"warp(2) * reg({self.chunk // 16}) * inst.n(8)" if self.warps else f"inst.n({self.chunk})",
            by="cp.async" if self.warps else "tma", swizzle=2 * step, x=shared[0], w_s=shared[1],
        )  # fmt: skip


EVERY = {
    "warpgroups": Reduced(256, 512, chunk=256, groups=2, persistent=2),
    "in turns": Reduced(256, 384, chunk=192, each=2, turns=True, persistent=2),
    "cluster": Reduced(256, 128, chunk=64, groups=2, cluster=2, persistent=2),
    "cluster of columns": Reduced(256, 256, chunk=64, groups=2, each=2, cluster=2, columns=True, persistent=4),
    "more rows": Reduced(256, 256, chunk=128, groups=2, each=2, persistent=2),
    "one behind the other": Reduced(256, 256, deep=320, chunk=64, groups=2, lag=True, persistent=2),
    "ragged": Reduced(200, 150, chunk=64, groups=2, persistent=2),
    "warps": Reduced(200, 128, chunk=32, warps=True),
    "ragged, on warps": Reduced(64, 72, chunk=32, warps=True),
}


def losses(case: Reduced, seed: int = 0, steep: float = 0.25) -> dict[str, Any]:
    """Normal numbers, those of x times `steep`, and labels in all tiles."""
    rng = np.random.default_rng(seed)
    x, w = (rng.standard_normal((n, case.deep)) for n in (case.rows, case.words))
    y = (np.arange(case.rows) * 37 + 5) % case.words
    return {"x": (x * steep).astype(bf16.numpy), "w": w.astype(bf16.numpy), "y": y.astype(np.int64)}
