"""Random schedules for products of products: on what, how warps divide rows and steps, who loads, and by what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from terrazzo.ir.schedule import Binding, Factor, Like, Operand, Schedule, Site, Word
from terrazzo.ir.sites import called
from terrazzo.rules.loop_to_tile.chain import Chain

One = Callable[[Sequence[Any]], Any]
"""Draws one of several."""


def drawn(c: Chain, target: str, one: One) -> Schedule:
    """A schedule of a chain; its first factors are to be made to cover their axes."""
    number = int(target.removeprefix("sm_").rstrip("a"))
    groups = target == "sm_90a" and one((True, False))
    boxes = groups or (number >= 90 and one((True, False)))
    by = "tma" if boxes else one(("cp.async", "cp.async", "ld")) if number >= 80 else "ld"
    roles = groups or (boxes and one((True, False)))
    down, each, deep = (
        (one((1, 1, 2)), 1, 1)
        if groups
        else one(((1, 1, 1), (2, 1, 1), (2, 2, 1), (1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 2, 2)))
    )
    own = one((16, 32, 64) if deep == 1 else (16, 32))
    sites = _sites(c, number, by, groups, (down, each, deep), own, one)
    ring = one({"ld": (1, 2), "cp.async": (2, 3, 4), "tma": (1, 2, 3) if roles else (2, 3, 4)}[by])
    order = one(((), (("order", Word("longest_first")),)))
    pieces, count = ((Factor("grid", 1),), one((1, 2))) if one((True, False, False, False)) else ((), 1)
    lines: list[tuple[str, Binding]] = [
        (a.name, (Factor("grid", 1),)) for a in c.kernel.axes if a not in (c.rows, c.columns)
    ]
    rows = (64 if groups else 16) * down * each
    lines += [
        (c.rows.name, (Factor("grid", 1, order), Factor("block", rows))),
        (c.columns.name, (Factor("block", c.columns.extent),)),
        (f"r{c.steps.label}", (*pieces, Factor("time", count, (("ring", ring),)), Factor("block", own * deep))),
    ]
    who = Word("warpgroup", (down,)) if groups else Word("warp", (down * deep,))
    directives = (("roles", (), (("load", Word("warp", (1,))), ("math", who))),) if roles else ()
    return Schedule(c.kernel.name, target, tuple(lines), (), directives, sites)


def _sites(
    c: Chain, number: int, by: str, groups: bool, shared: tuple[int, int, int], own: int, one: One
) -> tuple[Site, ...]:
    """The two products, and the stores, which divide the tile as the outer one does."""
    down, each, deep = shared
    kind = c.operands[0].dtype.name  # type: ignore[attr-defined]
    width, depth = c.columns.extent, c.depth.extent
    k = 16 if groups or (number >= 80 and one((True, True, False))) else 8
    on = [f"wgmma.m64n{n}k16.f32.{kind}" if groups else f"mma.m16n8k{k}.f32.{kind}" for n in (own, width)]
    many = [(Factor("warpgroup" if groups else "warp", n),) if n > 1 or groups else () for n in (down, deep)]
    rows = (c.rows.name, (*many[0], Factor("reg", each), Factor("inst.m", 64 if groups else 16)))
    steps, across = f"r{c.steps.label}", () if groups else many[1]
    first = Site(
        (c.inner,),
        (
            rows,
            (steps, (*across, *_parts(own, "n", own if groups else 8))),
            (f"r{c.depth.label}", _parts(depth, "k", k)),
        ),
        tuple({called(x): _held(depth, by) for x in c.operands[:2]}.items()),
        on[0],
    )
    columns = (c.columns.name, _parts(width, "n", width if groups else 8))
    second = Site(
        (c.outer,),
        (rows, columns, (steps, (*across, *_parts(own, "k", k)))),
        ((called(c.operands[2]), _held(width, by)),),
        on[1],
    )
    stores = [(s.buffer.name, [a for a in (c.rows, c.columns) if a in s.free]) for s in c.kernel.stores]
    return first, second, *(Site((name,), tuple((a.name, Like(c.outer)) for a in axes)) for name, axes in stores)


def _parts(length: int, letter: str, each: int) -> tuple[Factor, ...]:
    """So much of an axis by an instruction's parts, one after the other."""
    return Factor("reg", length // each), Factor(f"inst.{letter}", each)


def _held(width: int, by: str) -> Operand:
    """An operand swizzled as far as its rows are long."""
    swizzle = next((s for s in (128, 64, 32) if 2 * width % s == 0), 0)
    return Operand("smem", (("by", by), *((("swizzle", swizzle),) if swizzle else ())))
