"""Products whose results are reduced along their columns: each tile of columns is reduced where it is summed, and the
states of all tiles meet in a kernel of their own. No result of the product lies in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from terrazzo.collector import remembered
from terrazzo.hw.gpu import Gpu
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.nest import accumulators
from terrazzo.ir.schedule import Like, Schedule, Site
from terrazzo.ir.sites import Product, reduced_product
from terrazzo.rules.loop_to_tile.products import traffic, warpgroups
from terrazzo.rules.loop_to_tile.products.making import converted, promotes
from terrazzo.rules.loop_to_tile.products.warpgroup_tiles import COLUMNS, Tile, shapes
from terrazzo.rules.loop_to_tile.products.work import Work, fetched_each, lasts, powered
from terrazzo.rules.loop_to_tile.reductions.split import split
from terrazzo.rules.loop_to_tile.walked.collapse import digits_apart
from terrazzo.rules.loop_to_tile.walked.threads import ceil, size_of
from terrazzo.rules.tile.complete import Refused
from terrazzo.rules.tile.draft import axis_name
from terrazzo.rules.tile_to_kernel.in_frame import somewhere
from terrazzo.rules.tile_to_kernel.lower import derived

STATES = 6.0
"""Operations of a result for each value of its state. With two, a maximum and a sum of exponentials, tiles of 128 x 256
took 12.4 ms for 8192 rows of 4096 to 128,256 words, 1.01 of cuBLAS's product alone, as tiles do that store their
results; and those of 128 x 192 in turns 11.9 ms: nothing but products seems to take time (H200, 23 November 2026).
"""
ONE_BY_ONE = 48.0
"""The same, of states of several values in no frame: each waits for the one before it. The largest of 32,000 words took
347 us for 2048 rows of 2048, and where it is 405, as with the product stored (H200, 23 November 2026).
"""
DRAWN = 4.0
"""Of what a byte that is fetched for a product takes where power is at its limit: more than where results leave. 128 x
192 in turns took 11.9 ms in clusters of two, and 12.4 alone (H200).
"""


@dataclass(frozen=True)
class Way:
    """`part`, which is `whole` or computes the states of pieces of its columns, under a schedule; `rest` is the kernel
    in which these meet. `whole` means the same as the kernel it was made of.
    """

    whole: l.Kernel
    part: l.Kernel
    schedule: Schedule
    rest: l.Kernel | None
    plan: warpgroups.Plan


def plans(kernel: l.Kernel, gpu: Gpu) -> tuple[warpgroups.Plan, ...]:
    """The tiles of such a product on instructions of warpgroups, best first; none where it is no such product."""
    p = reduced_product(kernel)
    return _plans(p, gpu) if p is not None and gpu.warpgroups is not None else ()


@remembered
def _plans(p: Product, gpu: Gpu) -> tuple[warpgroups.Plan, ...]:
    if promotes(p) or converted(p):
        return ()
    found: list[tuple[int, warpgroups.Plan]] = []
    for i in warpgroups.instructions_for(p, gpu)[0]:
        for tile in shapes(p, i.shape[1]) if i.shape[1] in COLUMNS else ():
            turns = not tile.turns or _tiles(p, tile) > gpu.processors
            if tile.columns is p.n and tile.split is not p.n and turns:
                work = _work(p, tile, gpu)
                plan = warpgroups.Plan(tile, 1, i, max(lasts(work, gpu), powered(work, gpu)))
                if plan.time < math.inf:
                    found.append((warpgroups.alike(plan.time * (1 + DRAWN * fetched_each(work))), plan))
    return tuple(plan for _, plan in sorted(found, key=lambda x: x[0]))


def _tiles(p: Product, tile: Tile) -> int:
    return math.prod(map(size_of, p.batch)) * math.prod(tile.clusters) * tile.blocks


def _work(p: Product, tile: Tile, gpu: Gpu) -> Work:
    """What all tiles do, whose results stay where they are: of each row, a state leaves."""
    has = gpu.warpgroups
    assert has is not None
    around = [r for r in _around(p) if not any(somewhere(x, r.axes) for x in r.args)]
    each = sum(r.monoid.width * (STATES if r.monoid.frame or r.monoid.width == 1 else ONE_BY_ONE) for r in around)
    work = warpgroups.work_of(p, tile, traffic.walk(p, tile, gpu), gpu, has)
    read = sum(p.touched(x) * x.dtype.size for x in p.sources)
    after = work.after + tile.m * tile.n * each / has.after
    return work._replace(results=0, rate=1.0, after=after, least=read, drawn=work.fetched)


def _around(p: Product) -> list[l.Reduce]:
    """The reductions of a product's results."""
    sums = {c.reduce for c in p.sites}
    return [r for r in accumulators(p.kernel).values() if isinstance(r, l.Reduce) and r not in sums]


def ways(kernel: l.Kernel, gpu: Gpu) -> Iterator[Way]:
    """The ways to run such a product, best first: with its own axes, or, where TMA knows no tensor by these, with one
    for every digit.
    """
    if reduced_product(kernel) is None:
        return
    if not plans(kernel, gpu):
        kernel = digits_apart(kernel)
    p = reduced_product(kernel)
    for plan in plans(kernel, gpu):
        assert p is not None
        n = plan.tile.n
        pieces = ceil(p.n.extent, n)
        if pieces == 1:
            yield Way(kernel, kernel, schedule(p, plan, gpu), None, plan)
            continue
        part, rest = split(kernel, _around(p), pieces, n)
        q = reduced_product(part)
        if q is not None and q.n.extent == n:
            (piece,) = (a for a in _pieces(q) if a not in p.batch)
            own = replace(plan.tile, rows=q.m, columns=q.n, split={p.m: q.m, p.n: piece}.get(plan.tile.split))
            yield Way(kernel, part, schedule(q, plan._replace(tile=own), gpu), rest, plan)


def _pieces(p: Product) -> list[Any]:
    """The axis that pieces of columns are counted by, where there are several."""
    return [a for a in p.batch if all(a not in p.factors(c)[0].free for c in p.sites)]


def refusal(kernel: l.Kernel, gpu: Gpu) -> str:
    """Why a kernel is no product that tiles are reduced of where they are summed; nothing where it is one."""
    p = reduced_product(kernel)
    if p is None or gpu.warpgroups is None:
        return "it has no tiles that are reduced where they are summed"
    made = (derived(way.part, way.schedule, gpu) for way in ways(kernel, gpu))
    why = warpgroups.instructions_for(p, gpu)[1] or "no tile of it is filled by half"
    return next((x.reason if isinstance(x, Refused) else "" for x in made), why)


def schedule(p: Product, plan: warpgroups.Plan, gpu: Gpu) -> Schedule:
    """The bindings of a plan whose tile has all columns there are: those of a product that stores its results, but that
    pieces of columns are walked as columns are, and stores know rows alone.
    """
    made = warpgroups.schedule(p, plan, gpu)
    rows, columns = axis_name(p.m), axis_name(p.n)
    pieces = list(map(axis_name, _pieces(p)))
    lines = [(a, b if a != columns else b[1:]) for a, b in made.axes if not isinstance(b, Like)]
    last = [x for x in lines if x[0] in pieces]
    at = 1 + next(n for n, (a, _) in enumerate(lines) if a == rows)
    ordered = [*(x for x in lines[:at] if x not in last), *last, *lines[at:]]
    stores = Site(tuple(dict.fromkeys(b.name for b in p.kernel.writes)), ((rows, Like(p.names[0])),))
    return replace(made, axes=tuple(ordered), sites=(made.sites[0], stores))
