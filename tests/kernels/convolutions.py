"""Convolutions under pinned schedules, as text of Tile IR: one term, and the boxes of pixels a block may have."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Convolution:
    """`y[n, k, p, q] = epilogue(sum over c, r, s of x[n, c, p + r - pad, q + s - pad] * w[k, c, r, s])`, channels last.

    A block has a `box` of images, rows and columns, whose points are 64 rows of an instruction for each of `groups`
    warpgroups, and `channels` of the result; a step has `step` channels of the image.
    """

    shape: tuple[int, int, int, int] = (2, 8, 8, 64)
    out: int = 64
    taps: int = 3
    pad: int | None = None
    stride: int = 1
    dilation: int = 1
    box: tuple[int, int, int] = (2, 8, 8)
    channels: int = 64
    step: int = 64
    groups: int = 2
    ring: int = 4
    by: str = "tma"
    roles: bool = True
    registers: bool = True
    persistent: int = 0
    staged: str = 'by="tma", swizzle=128'
    dtype: str = "bf16"
    epilogue: str = "y[{at}] = {dtype}(acc0)"
    extra: str = ""
    target: str = "sm_90a"

    @property
    def padding(self) -> int:
        """Rows and columns of zeros around an image: as many as keep its size, where nothing else is said."""
        return self.taps // 2 * self.dilation if self.pad is None else self.pad

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Images, rows and columns of the result."""
        n, h, w, _ = self.shape
        reach = self.dilation * (self.taps - 1) + 1
        return n, *((x + 2 * self.padding - reach) // self.stride + 1 for x in (h, w))  # type: ignore[return-value]

    @property
    def text(self) -> str:
        """A program of this kernel and its schedule."""
        n, h, w, c = self.shape
        _, p, q = self.sizes
        r, t = self.taps, self.dtype
        at, extra = "a0, a1, a2, a3", f", {self.extra}" if self.extra else ""
        rows, columns = (self._place(a, tap) for a, tap in (("a2", "r1"), ("a3", "r2")))
        inside = "".join(
            f" and {e} >= 0 and {size - 1} - ({e}) >= 0" for e, size in ((rows, h), (columns, w)) if self.padding
        ).removeprefix(" and ")
        guard = f" if {inside} else 0" if inside else ""
        y = f"{t}[{n}, {self.out}, {p}, {q}] @ ({p * q * self.out}, 1, {q * self.out}, {self.out})"
        lines = [
            "@tile",
            f"def f(x: {t}[{n}, {c}, {h}, {w}] @ ({h * w * c}, 1, {w * c}, {c}), "
            f"w: {t}[{self.out}, {c}, {r}, {r}] @ ({r * r * c}, 1, {r * c}, {c}){extra}):",
            f"    with kernel('y', y={y}):",
            *("    " * (k + 2) + f"for a{k} in free({e}):" for k, e in enumerate((n, self.out, p, q))),
            f"                        for r0, r1, r2 in reduce({c}, {r}, {r}):",
            f"                            in0 = x[a0, r0, {rows}, {columns}]{guard}",
            "                            acc0 <- sum(mul(f32(in0), f32(w[a1, r0, r1, r2])))",
        ]
        lines += ["    " * 6 + line for line in self.epilogue.format(at=at, dtype=t).splitlines()]
        return "\n".join([*lines, *("    " + line for line in self.schedule), "    return (y,)", ""])

    def _place(self, axis: str, tap: str) -> str:
        first = axis if self.stride == 1 else f"{axis} * {self.stride}"
        tap = tap if self.dilation == 1 else f"{tap} * {self.dilation}"
        return f"{first} + {tap} - {self.padding}" if self.padding else f"{first} + {tap}"

    @property
    def schedule(self) -> list[str]:
        """The lines of the schedule."""
        counts = [math.ceil(e / b) for e, b in zip(self.sizes, self.box, strict=True)]
        lines = [f'with schedule("y", target="{self.target}"):']
        lines += [f"    a{k} = grid({e}) * block({b})" for k, e, b in zip((0, 2, 3), counts, self.box, strict=True)]
        lines.insert(2, f"    a1 = grid({math.ceil(self.out / self.channels)}) * block({self.channels})")
        lines += [
            f"    r0 = time({math.ceil(self.shape[3] / self.step)}, ring={self.ring}) * block({self.step})",
            f"    r1 = time({self.taps})",
            f"    r2 = time({self.taps})",
        ]
        lines += [f"    persistent({self.persistent})"] if self.persistent else []
        registers = ", registers=(40, 232)" if self.registers else ""
        lines += [f"    roles(load=warp(1), math=warpgroup({self.groups}){registers})"] if self.roles else []
        lines += [f'    with site("acc0", on="wgmma.m64n{self.channels}k16.f32.{self.dtype}"):']
        rows = [f"        a{k} = {line}" for k, line in zip((0, 2, 3), self.rows, strict=True)]
        lines += [*rows, f"        a1 = inst.n({self.channels})", f"        r0 = reg({self.step // 16}) * inst.k(16)"]
        swizzle = min(128, 2 * self.step)
        lines += [f'        {x} = smem(by="{self.by}", swizzle={swizzle})' for x in "xw"]
        if not self.staged:
            return [*lines, '    with site("y"):', *(f'        a{k} = like("acc0")' for k in range(4))]
        lines += ['    with site("y"):']
        if self.channels > 64:
            lines.append(f"        a1 = time({self.channels // 64}, ring=2) * block(64)")
        return [*lines, f"        y = smem({self.staged})"]

    @property
    def rows(self) -> list[str]:
        """How warpgroups and the rows of an instruction divide images, rows and columns: the outermost that is long
        enough is the warpgroups'.
        """
        out, left = [], self.groups
        for side in self.box:
            groups = math.gcd(left, side)
            left //= groups
            each = f"inst.m({side // groups})"
            out.append(f"warpgroup({groups}) * {each}" if groups > 1 else each)
        return out
