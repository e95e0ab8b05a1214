"""Random schedules for products of products: on what, how warps divide rows and steps, who loads, and by what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.ir.nest import accumulators
from terrazzo.ir.schedule import Binding, Factor, Like, Operand, Schedule, Site, Word
from terrazzo.ir.sites import called
from terrazzo.rules.loop_to_tile.chains.chain import Chain

One = Callable[[Sequence[Any]], Any]
"""Draws one of several."""


def drawn(c: Chain, target: str, one: One) -> Schedule:
    """A schedule of a chain; its first factors are to be made to cover their axes."""
    number = int(target.removeprefix("sm_").rstrip("a"))
    on = one(ON) if target == "sm_90a" else ("mma", "mma")
    groups = "wgmma" in on
    boxes = groups or (number >= 90 and one((True, False)))
    by = "tma" if boxes else one(("cp.async", "cp.async", "ld")) if number >= 80 else "ld"
    roles = groups or (boxes and one((True, False)))
    down, each, deep = (
        (one((1, 1, 2)), 1, 1)
        if groups
        else one(((1, 1, 1), (2, 1, 1), (2, 2, 1), (1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 2, 2)))
    )
    own = one((16, 32, 64) if deep == 1 else (16, 32))
    rows, width = (64 if groups else 16) * down * each, c.columns.extent
    framed = len(accumulators(c.kernel)) > 2  # a softmax, whose frame goes along with rows
    lies = one((("n", "a"), ("n", "a"), ("m", "b")) if framed else (("n", "a"), ("m", "b"), ("m", "a"), ("n", "b")))
    lies = ("n", "a") if framed and groups else lies
    if on[1] == "wgmma" and width % (64 * down):
        lies = lies[0], "a"
    if on[0] == "wgmma" and lies[0] == "m":
        own = 64 * down
    apart = not groups and not framed and rows % (16 * deep) == 0 == width % (16 * down) and one((True, False))
    tile = Tile(on, lies, rows, own * deep, down * (4 if groups else 1), deep, down, apart)
    sites = _sites(c, number, by, tile, one)
    ring = one({"ld": (1, 2), "cp.async": (2, 3, 4), "tma": (1, 2, 3) if roles else (2, 3, 4)}[by])
    order = one(((), (("order", Word("longest_first")),)))
    pieces, count = ((Factor("grid", 1),), one((1, 2))) if one((True, False, False, False)) else ((), 1)
    lines: list[tuple[str, Binding]] = [
        (a.name, (Factor("grid", 1),)) for a in c.kernel.axes if a not in (c.rows, c.columns)
    ]
    lines += [
        (c.rows.name, (Factor("grid", 1, order), Factor("block", rows))),
        (c.columns.name, (Factor("block", c.columns.extent),)),
        (f"r{c.steps.label}", (*pieces, Factor("time", count, (("ring", ring),)), Factor("block", own * deep))),
    ]
    who = Word("warpgroup", (down,)) if groups else Word("warp", (down * deep,))
    directives = (("roles", (), (("load", Word("warp", (1,))), ("math", who))),) if roles else ()
    return Schedule(c.kernel.name, target, tuple(lines), (), directives, sites)


ON = (*(("wgmma", "wgmma"), ("mma", "mma")) * 2, ("wgmma", "mma"), ("mma", "wgmma"))
"""What both products run on, on a Hopper."""


@dataclass(frozen=True)
class Tile:
    """A tile of so many rows and steps. Steps lie along the "n" or the "m" of the first product's instruction, and what
    is made of its sums is factor "a" or "b" of the second one's. Of the warps `down` divide rows, and so many `steps`;
    or columns of the second product, which are divided `apart` then. Warpgroups are so many.
    """

    on: tuple[str, str]
    lies: tuple[str, str]
    rows: int
    step: int
    down: int
    steps: int
    groups: int
    apart: bool

    def bound(self, number: int, letter: str, size: int, warps: int) -> tuple[Factor, ...]:
        """An axis of which a product has so much, as the rows or columns of its instruction."""
        if self.on[number] == "wgmma" and letter == "m":
            return (Factor("warpgroup", self.groups), *_parts(max(size // self.groups, 64), "m", 64))
        if self.on[number] == "wgmma":
            return _parts(size, letter, size)
        many = (Factor("warp", warps),) if warps > 1 else ()
        return (*many, *_parts(size // warps, letter, 16 if letter == "m" else 8))


def _sites(c: Chain, number: int, by: str, tile: Tile, one: One) -> tuple[Site, ...]:
    """The two products, and the stores, which divide the tile as the outer one does."""
    kind = c.operands[0].dtype.name  # type: ignore[attr-defined]
    width, depth, steps = c.columns.extent, c.depths[0].extent, f"r{c.steps.label}"
    k = 16 if "wgmma" in tile.on or (number >= 80 and one((True, True, False))) else 8
    along, second = tile.lies
    beside = "m" if along == "n" else "n"
    own, across = ("m", "n") if second == "a" else ("n", "m")
    wide = [tile.step if along == "n" else tile.rows, width if second == "a" else tile.rows]
    on = [
        f"wgmma.m64n{n}k16.f32.{kind}" if x == "wgmma" else f"mma.m16n8k{k}.f32.{kind}"
        for x, n in zip(tile.on, wide, strict=True)
    ]
    first = Site(
        (c.inner,),
        (
            (c.rows.name, tile.bound(0, beside, tile.rows, tile.down)),
            (steps, tile.bound(0, along, tile.step, tile.steps)),
            (f"r{c.depths[0].label}", _parts(depth, "k", k)),
        ),
        tuple({called(x): _held(depth, by) for x in c.operands[:2]}.items()),
        on[0],
    )
    down, beyond, shared = tile.down, 1, tile.steps
    if tile.apart:
        down, beyond, shared = tile.steps, tile.down, 1
    many = (Factor("warp", shared),) if shared > 1 else ()
    weights = one((*((),) * 5, ((c.inner, Operand("reg")),), ((c.inner, Operand("smem")),)))
    weights = one((weights, weights, ((c.inner, Operand("smem", (("slots", one((1, 2))),))),)))
    outer = Site(
        (c.outer,),
        (
            (c.rows.name, tile.bound(1, own, tile.rows, down)),
            (c.columns.name, tile.bound(1, across, width, beyond)),
            (steps, (*many, *_parts(tile.step // shared, "k", k))),
        ),
        ((called(c.operands[2]), _held(width, by)), *weights),
        on[1],
    )
    stores = [(s.buffer.name, [a for a in (c.rows, c.columns) if a in s.free]) for s in c.kernel.stores]
    return first, outer, *(Site((name,), tuple((a.name, Like(c.outer)) for a in axes)) for name, axes in stores)


def _parts(length: int, letter: str, each: int) -> tuple[Factor, ...]:
    """So much of an axis by an instruction's parts, one after the other."""
    return Factor("reg", length // each), Factor(f"inst.{letter}", each)


def _held(width: int, by: str) -> Operand:
    """An operand swizzled as far as its rows are long."""
    swizzle = next((s for s in (128, 64, 32) if 2 * width % s == 0), 0)
    return Operand("smem", (("by", by), *((("swizzle", swizzle),) if swizzle else ())))
