"""Factors of products that threads make in registers, on their way to the instructions of warpgroups (ADR 016): of what
that is done, and what it costs.
"""

from __future__ import annotations

from typing import Any

from terrazzo.collector import remembered
from terrazzo.ir.concatenated import loaded
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.node import topological
from terrazzo.ir.sites import Product, called, made_of, not_made
from terrazzo.ir.types import bf16

MADE = 12
"""Instructions of a thread that nothing hides, of those in which it makes the parts of a number of what lies in shared
memory, where two warpgroups take turns. Fitted to 16 products (benchmarks/fits/h200-parts.json): those in one piece are
4 % off in the middle, those in several take up to 20 % longer than the model says.
"""
MADE_ALONE = 24
"""The same where a warpgroup has no other to take turns with, or waits for its first factor. Fitted to 36 schedules in
tiles of 64 rows (benchmarks/fits/h200-parts-few.json), which are 6 % off in the middle.
"""
READ, PACKED = 1, 1
"""Instructions in which a thread reads an element that factors are made of, and packs one with its neighbour. Those
that make it are counted. Not measured.
"""
PAIRED = 1.5
"""How many times as fast bytes become bfloat16, of which neighbours are made at once (targets/cuda/pairs.py)."""
BEFORE = 230.0
"""Nanoseconds for which a warpgroup that makes anything but parts multiplies nothing in a step, besides those in which
it makes it: it waits for its slab, for what it loads of it, and for its products. So long another one multiplies, for
half of a step; in tiles of 128 x 256 that is as long. Fitted to a ReLU, int8 and int4 before 512 x 3584 x 18944, in
tiles of 128 rows and 96 to 256 columns (benchmarks/fits/h200-made.json); in those of 64 x 256, whose warpgroup is
alone, int8 took 198 us, and takes 190 by this.
"""
BEHIND = 3.0
"""How much less of the instructions that make it is left where another warpgroup multiplies meanwhile. In tiles of
128 x 256 a ReLU takes 10 to 20 ns of a step, int8 35, and 64 bytes of two numbers of four bits 50 to 100, where what
makes them takes 108, 96 and 313 (the same schedules).
"""
MADE_WAVES = 8
"""Tiles for each processor that products are cut into which make a factor: it is that of the rows, which come in many,
and blocks that are left over take a piece and not all of a tile. 128 x 3584 x 18944 took 385 us with 148 tiles and 251
with eight times as many (H200, 22 November 2026).
"""


@remembered
def promotes(p: Product) -> bool:
    """Whether sums of steps are added up on CUDA cores: where there are several terms of the same parts, someone wants
    to be exact.
    """
    return any(len(c.terms) > 1 and len(c.operands) < 2 * len(c.terms) for c in p.sites)


@remembered
def converted(p: Product) -> tuple[Any, ...]:
    """The operands that threads make of others, in registers."""
    return tuple(x for x in p.operands if not loaded(x))


def not_converted(p: Product, step: int) -> str:
    """Why operands that are computed on their way are not made in registers, in steps of so many products; nothing
    where they are: those of the rows, each of one tensor, and of few numbers beside it. Others are stored first.
    """
    for x in converted(p):
        if why := not_made(x):
            return why
        if not promotes(p) and (made_of(x).inside or p.axes[-1].extent % step):  # type: ignore[union-attr]
            return f"{called(x)} is computed on its way, and what is summed over ends within a step"
    if len({p.m in x.free for x in converted(p)}) > 1:
        return "both of its factors are computed on their way, and instructions take the first one from registers"
    return ""


@remembered
def making(p: Product) -> float:
    """Instructions in which a thread makes one element of what a factor is made of: all its parts, or one number."""
    if promotes(p):
        return len({made_of(x) for x in converted(p)}) * MADE
    found = sum(PACKED + sum(map(_instructions, _own(x))) for x in converted(p))
    found += len({made_of(x) for x in converted(p)}) * READ
    return found / (PAIRED if all(map(_of_bytes, converted(p))) else 1)


def _of_bytes(x: Any) -> bool:
    """Whether a factor is a bfloat16 made of a byte."""
    return x.dtype is bf16 and made_of(x).dtype.size == 1  # type: ignore[union-attr]


def _own(x: Any) -> list[l.Apply]:
    """What is computed for each element of a factor, and not for a row of them: of what it is made of."""
    source = made_of(x)
    return [y for y in topological([x]) if isinstance(y, l.Apply) and source in topological([y])]


def _instructions(x: l.Apply) -> int:
    """A number becomes one of another kind at half the rate, and a longer one of its kind for nothing."""
    if not is_cast(x.fn):
        return 1
    of: Any = x.args[0]
    return 2 if of.dtype.kind != x.dtype.kind else int(of.dtype.size > x.dtype.size)
