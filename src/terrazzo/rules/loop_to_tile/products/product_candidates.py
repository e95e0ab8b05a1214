"""Ways to run a product: in boxes of what is read at moved places, after its operands were stored, in tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from terrazzo.collector import remembered
from terrazzo.hw.gpu import Gpu
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.schedule import Schedule
from terrazzo.ir.sites import Product, product
from terrazzo.rules.loop_to_tile.candidate import Candidate, Rewrite, joined
from terrazzo.rules.loop_to_tile.pinned import as_pinned
from terrazzo.rules.loop_to_tile.products import boxes, image_forms, taps, tiles, warpgroups
from terrazzo.rules.loop_to_tile.products.forms import Form, apart, for_warpgroups, merged, on_warpgroups
from terrazzo.rules.loop_to_tile.products.stored import stored
from terrazzo.rules.loop_to_tile.products.warpgroup_tiles import ROWS
from terrazzo.rules.loop_to_tile.reductions.pieces import added_up, in_pieces, tiled
from terrazzo.rules.loop_to_tile.walked.crossed import copying, points
from terrazzo.rules.loop_to_tile.walked.threads import ceil, size_of
from terrazzo.rules.tile.complete import Refused
from terrazzo.rules.tile_to_kernel.lower import derived

COPIED = 1.25
"""Of what its bytes take, what a copy does, beside ways that need none: 225 us for the patches of a layer of wav2vec,
of 372 in all, where boxes took 250 (H100).
"""
FEW = 16
"""Rows or columns below which a product in float32 stays on CUDA cores: parts of its numbers would fill no tile."""


def in_boxes(kernel: l.Kernel, p: Product, gpu: Gpu, pinned: Mapping[str, Schedule]) -> Iterator[Candidate]:
    """A product of what is read at moved places, in boxes, where the model says that it is faster than other tiles,
    those after stored operands among them. Operands are copied first, where memory runs otherwise than boxes do.
    """
    ways = image_forms.boxed(kernel, p, gpu)
    if not ways:
        return
    why = "boxes are brought in along what is summed over, and memory runs otherwise"
    others = min(best(merged(kernel, p, gpu).kernel, gpu), after(kernel, p, gpu))
    for time, form, plan in ways:
        if time < others:
            first, _ = copied(form.copies, why, gpu, pinned)
            chosen = form.moved.kernel, boxes.schedule(form.moved, plan, gpu), "boxes", str(plan)
            rest = (added_up(x, gpu) for x in form.rest)
            yield joined((first, Candidate((chosen,)), *rest)).after(*form.rewrites)


def by_taps(
    kernel: l.Kernel, p: Product, gpu: Gpu, pinned: Mapping[str, Schedule], later: bool = False
) -> Iterator[Candidate]:
    """A sum over points under taps with a product for each tap, where the model says that it is faster than boxes and
    other tiles, those after stored operands among them. Or, `later`, where it is faster than tiles by themselves: boxes
    and stored operands that the model preferred could not be derived.
    """
    if not (ways := taps.ways(kernel, gpu)):
        return
    sooner = min(after(kernel, p, gpu), boxed(kernel, p, gpu))
    tiled_time = best(merged(kernel, p, gpu).kernel, gpu)
    others = tiled_time if later else min(tiled_time, sooner)
    why = "boxes are brought in along channels, and memory runs otherwise"
    for way in ways:
        if way.time < others and not (later and way.time < sooner):
            first, _ = copied(way.turned[:-1], why, gpu, pinned)
            rest = (added_up(x, gpu) for x in way.kernels[1:])
            done = joined((first, Candidate((tiled(way.product, way.plan, gpu),)), *rest))
            yield done.after(("channels_beside", kernel, way.turned), ("taps_apart", way.turned[-1], way.kernels))


def boxed(kernel: l.Kernel, p: Product, gpu: Gpu) -> float:
    """Nanoseconds of a product in the best of its boxes, with the copies of operands; infinity where it has none."""
    return next((time for time, _, _ in image_forms.boxed(kernel, p, gpu)), math.inf)


@dataclass(frozen=True)
class Shares:
    """A product whose blocks are few, in pieces of an axis of its steps that is not the last: as of images that are
    summed pixel by pixel. The form it has, its partial sums and what adds them up, a tile of these, and nanoseconds.
    """

    form: Form
    kernels: tuple[l.Kernel, l.Kernel]
    product: Product
    plan: tiles.Plan
    time: float

    def whole(self, gpu: Gpu) -> tuple[float, l.Kernel, Callable[[], Schedule]]:
        """What all of it takes, and the kernel that must be derived for that, with its schedule."""
        return self.time, self.kernels[0], partial(tiles.schedule, self.product, self.plan, gpu)


@remembered
def shared(kernel: l.Kernel, gpu: Gpu) -> tuple[Shares, ...]:
    """The ways to run a product so, best first; none where blocks are not few, or may share the last axis."""
    found: list[Shares] = []
    for form in for_warpgroups(kernel, gpu):
        p = product(form.kernel)
        if p is None or len(p.sites) != 1 or len(p.axes) < 2:
            continue
        if any(x.pieces > 1 for x in tiles.on_warpgroups(p, gpu)):  # blocks may share the last
            continue
        for kernels, again in _shares(form, p, gpu):
            if not warpgroups.instructions_for(again, gpu)[1]:
                plans = [x for x in tiles.on_warpgroups(again, gpu) if x.pieces == 1][:1]
                found += [Shares(form, kernels, again, x, x.time + taps.meeting(again, gpu)) for x in plans]
    return tuple(sorted(found or _on_cores(kernel, gpu), key=lambda x: x.time))


def _on_cores(kernel: l.Kernel, gpu: Gpu) -> Iterator[Shares]:
    """The same on CUDA cores, of a product that runs nowhere else: as of a few channels of each group of a filter."""
    p = product(kernel)
    form = merged(kernel, p, gpu) if p is not None else Form(kernel)
    p = product(form.kernel)
    if p is None or len(p.sites) != 1 or len(p.axes) < 2 or min(size_of(p.m), size_of(p.n)) >= FEW:
        return
    plans = tiles.plans(p, gpu)
    if any(x.instruction or x.pieces > 1 for x in plans):
        return
    for kernels, again in _shares(form, p, gpu):
        for x in [x for x in tiles.plans(again, gpu) if x.pieces == 1][:1]:
            yield Shares(form, kernels, again, x, x.time + taps.meeting(again, gpu))


def _shares(form: Form, p: Product, gpu: Gpu) -> Iterator[tuple[tuple[l.Kernel, l.Kernel], Product]]:
    """A product's partial sums and what adds them up, in as many pieces as fill a machine."""
    number, steps = max(enumerate(map(size_of, p.axes[:-1])), key=lambda x: x[1])
    rows = ceil(p.m.extent, ROWS) * ceil(p.n.extent, ROWS)
    blocks = rows * math.prod(size_of(a) for a in form.kernel.axes if a not in (p.m, p.n))
    for pieces in taps.shares(steps, blocks, gpu):
        kernels = taps.cut_along(form.kernel, number, pieces)
        again = product(kernels[0])
        if again is not None:
            yield kernels, again


def in_shares(kernel: l.Kernel, p: Product, gpu: Gpu) -> Iterator[Candidate]:
    """A product so, where the model says that it is faster than other tiles, those after stored operands among them."""
    if not (ways := shared(kernel, gpu)):
        return
    others = min(best(merged(kernel, p, gpu).kernel, gpu), after(kernel, p, gpu))
    for way in ways:
        if way.time < others:
            done = joined((Candidate((tiled(way.product, way.plan, gpu),)), added_up(way.kernels[1], gpu)))
            yield done.after(*way.form.rewrites, ("split", way.form.kernel, way.kernels))


def copied(copies: Sequence[l.Kernel], why: str, gpu: Gpu, pinned: Mapping[str, Schedule]) -> tuple[Candidate, float]:
    """Kernels that copy operands, with their schedules, and the nanoseconds they take."""
    found: list[Candidate] = []
    for x in copies:
        if x.name in pinned:
            found.append(Candidate((as_pinned([x], pinned, gpu),)))
        else:
            form, chosen, _, rewrite = points(x, gpu)
            found.append(Candidate(((form, chosen, "points", why),)).after((rewrite, x, (form,))))
    return joined(found), sum(copying(x, gpu) for x in copies)


def after(kernel: l.Kernel, p: Product, gpu: Gpu, divided: bool = False) -> float:
    """Nanoseconds of the best tiles of a product after kernels that store its operands, of those whose steps blocks
    have `divided` among them, too; infinity where it has none.
    """
    ways = stored(merged(kernel, p, gpu).kernel, gpu)
    plans = ((way, x) for way in ways for x in (tiles.on_warpgroups(way.product, gpu) if divided else way.plans(gpu)))
    return min((x.time + COPIED * way.before(gpu) for way, x in plans), default=math.inf)


def after_stores(kernel: l.Kernel, p: Product, gpu: Gpu, pinned: Mapping[str, Schedule]) -> Iterator[Candidate]:
    """A product after kernels that store its operands as TMA takes them, where the model says that it is faster than
    other tiles.
    """
    form = merged(kernel, p, gpu)
    if not (ways := stored(form.kernel, gpu)):
        return
    digits = apart(form).kernel
    others = min(_soonest(form.kernel, gpu), best(digits, gpu) if on_warpgroups(digits, gpu) else math.inf)
    found: list[tuple[int, Candidate, list[Rewrite], Product, warpgroups.Plan]] = []
    for way in ways:
        why = "TMA brings what lies in memory, in rows that begin at multiples of 16 bytes"
        copies, before = copied([*way.made, *way.copies], why, gpu, pinned)
        rewrites: list[Rewrite] = [
            *form.rewrites,
            (way.rewrite, form.kernel, (way.base,)),
            (way.how, way.base, (*way.made, way.whole)),
            ("padded", way.whole, (*way.copies, way.form)),
        ]
        plans = [x for x in tiles.on_warpgroups(way.product, gpu) if x.time + before < others]
        found += [(warpgroups.alike(x.time + before), copies, rewrites, way.product, x) for x in plans]
    for _, first, rewrites, again, plan in sorted(found, key=lambda x: x[0]):
        for done in _planned(again, plan, gpu, pinned):
            yield joined((first, done)).after(*rewrites)


def in_tiles(kernel: l.Kernel, p: Product, gpu: Gpu, pinned: Mapping[str, Schedule]) -> Iterator[Candidate]:
    """A product in tiles: on the instructions of warpgroups or of warps, by what the model says, then on CUDA cores.

    Axes are merged first, which makes fewer tiles; where that is no tensor TMA knows, digits are axes again.
    """
    whole = merged(kernel, p, gpu)
    digits = apart(whole)
    found = [whole]
    found += [Form(kernel)] if whole.kernel is not kernel else []
    if not on_warpgroups(whole.kernel, gpu) and on_warpgroups(digits.kernel, gpu):
        first = 0 if best(digits.kernel, gpu) < _soonest(whole.kernel, gpu) else len(found)
        found.insert(first, digits)
    for form in found:
        again = product(form.kernel)
        assert again is not None
        for plans in (tiles.plans, tiles.on_cores) if form is whole else (tiles.plans,):
            for plan in plans(again, gpu):
                for candidate in _planned(again, plan, gpu, pinned):
                    yield candidate.after(*form.rewrites)


def _planned(p: Product, plan: tiles.Plan, gpu: Gpu, pinned: Mapping[str, Schedule]) -> Iterator[Candidate]:
    """A product in the tiles of a plan: as one kernel, or as two where blocks share its steps."""
    if plan.pieces == 1:
        yield Candidate((tiled(p, plan, gpu),))
    else:
        yield from in_pieces(p.kernel, [c.reduce for c in p.sites], plan.pieces, gpu, pinned, plan.unit)


@remembered
def best(kernel: l.Kernel, gpu: Gpu) -> float:
    """By the model, the nanoseconds of the best tile of a product that can be derived."""
    if (p := product(kernel)) is None:
        return math.inf
    for plan in tiles.plans(p, gpu):
        done = next(_planned(p, plan, gpu, {}), None)
        if done and not any(isinstance(derived(x, s, gpu), Refused) for x, s, *_ in done.kernels):
            return plan.time
    return math.inf


def _soonest(kernel: l.Kernel, gpu: Gpu) -> float:
    """What the best tile takes, by the model, whether it can be derived or not."""
    p = product(kernel)
    return min((x.time for x in tiles.plans(p, gpu)), default=math.inf) if p is not None else math.inf
