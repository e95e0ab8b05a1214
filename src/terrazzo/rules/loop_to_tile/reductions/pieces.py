"""Reductions in pieces, which blocks share: a kernel for partial states, and one in which these meet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from terrazzo.hw.gpu import Gpu
from terrazzo.ir import nest as n
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.schedule import Factor, Like, Schedule
from terrazzo.ir.sites import Product, product
from terrazzo.rules.loop_to_tile.candidate import Candidate, Chosen, joined
from terrazzo.rules.loop_to_tile.pinned import as_pinned
from terrazzo.rules.loop_to_tile.products import tiles
from terrazzo.rules.loop_to_tile.reductions import reductions
from terrazzo.rules.loop_to_tile.reductions.split import split
from terrazzo.rules.loop_to_tile.walked import threads
from terrazzo.rules.loop_to_tile.walked.collapse import collapse
from terrazzo.rules.loop_to_tile.walked.threads import size_of
from terrazzo.rules.tile.complete import Refused
from terrazzo.rules.tile.draft import axis_name
from terrazzo.rules.tile_to_kernel.lower import derived


def in_pieces(
    kernel: l.Kernel,
    reduces: list[l.Reduce],
    pieces: int,
    gpu: Gpu,
    pinned: Mapping[str, Schedule],
    unit: int = 1,
) -> Iterator[Candidate]:
    """A kernel of partial states, in each way it can be run, and one that combines them and does the rest."""
    first, second = split(kernel, reduces, pieces, unit)
    rest = added_up(second, gpu) if product(first) is not None else Candidate((meeting(second, gpu),))
    for part in partial_states(first, pieces, gpu, pinned):
        yield joined((Candidate((part,)), rest)).after(("split", kernel, (first, second)))


def partial_states(kernel: l.Kernel, pieces: int, gpu: Gpu, pinned: Mapping[str, Schedule]) -> Iterator[Chosen]:
    """The ways to run a kernel of partial states."""
    why = f"{pieces} pieces of a reduction over the grid, since there are few blocks otherwise"
    if kernel.name in pinned:
        part, chosen, _, reason = as_pinned([kernel], pinned, gpu)
        yield part, chosen, "split", f"{why}; {reason}"
    elif (p := product(kernel)) is not None:
        for plan in (x for x in tiles.plans(p, gpu) if x.pieces == 1):
            part, chosen, _, reason = tiled(p, plan, gpu)
            yield part, chosen, "split", f"{why}; {reason}"
    else:
        ways = ((kernel, *way) for way in together(kernel, gpu))
        yield from ((x, chosen, "split", f"{why}; {reason}") for x, chosen, _, reason in (*ways, alone(kernel, gpu)))


def added_up(kernel: l.Kernel, gpu: Gpu) -> Candidate:
    """What adds up the partial sums of a product's tiles."""
    flat = collapse(kernel) if all(s.free >= frozenset(kernel.axes) for s in kernel.stores) else kernel
    chosen = flat, reductions.finish(flat, gpu), "finish", "partial states meet, in order"
    return Candidate((chosen,)).after(("collapse", kernel, (flat,)))


def meeting(kernel: l.Kernel, gpu: Gpu) -> Chosen:
    """What brings partial states together, in the first way that can be built: many need a thread's registers."""
    ways = [way for way, *_ in together(kernel, gpu)]
    built = (x for x in ways if not isinstance(derived(kernel, x, gpu), Refused))
    return kernel, next(built, ways[0]), "finish", "partial states meet, in order"


def together(kernel: l.Kernel, gpu: Gpu) -> Iterator[tuple[Schedule, str, str]]:
    """Reductions by threads together; then with fewer registers in use, or more for each thread."""
    first = reductions.reduction(kernel, gpu)
    what = "threads share the reductions of a row, or take columns where memory runs so"
    yield first, "share", what
    fewer = [(replace(first, operands=()), f"{what}, and read again what they need twice")]
    fewer += [
        (replace(reductions.reduction(kernel, gpu, warps), operands=()), f"{what}; {warps} warps at most")
        for warps in (16, 8)
    ]
    tried = [first]
    for other, why in fewer:
        if other not in tried:
            yield other, "share", why
            tried.append(other)
    yield _one_at_a_time(kernel, first), "share", f"{what}; a thread takes an element at a time"


def alone(kernel: l.Kernel, gpu: Gpu) -> Chosen:
    """Reductions by each thread for itself."""
    return kernel, threads.pointwise(kernel, gpu), "alone", "every thread reduces by itself"


def _one_at_a_time(kernel: l.Kernel, schedule: Schedule) -> Schedule:
    """Threads share rows as they do, and go along them step by step: what is long to compute needs many registers."""
    found = {name: r for name, r in n.accumulators(kernel).items() if isinstance(r, l.Reduce)}
    own = {(name, axis_name(a)): a for name, r in found.items() for a in r.axes}
    own |= {(s.buffer.name, a.name): a for s in kernel.stores for a in kernel.axes}

    def stepped(site: str, name: str, binding: tuple[Factor, ...] | Like) -> tuple[Factor, ...] | Like:
        if isinstance(binding, Like):
            return binding
        used = tuple(f for f in binding if f.level not in ("time", "reg"))
        length = size_of(own[site, name])  # two sites may each have an axis of this name
        return (Factor("time", threads.ceil(length, math.prod(f.size for f in used))), *used)

    sites = tuple(replace(s, axes=tuple((a, stepped(s.names[0], a, b)) for a, b in s.axes)) for s in schedule.sites)
    return replace(schedule, operands=(), sites=sites)


def tiled(p: Product, plan: tiles.Plan, gpu: Gpu) -> Chosen:
    """A product in the tiles of a plan."""
    return p.kernel, tiles.schedule(p, plan, gpu), "tile", str(plan)
